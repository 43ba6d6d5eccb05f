"""The EAGLE-3 head (arXiv 2503.01840): three fused taps, decoder layers, its own vocabulary.

Training and decoding share these functions; they differ only in what the queries attend over, so neither has a second
implementation. T below is any run of leading dimensions: [B, Q] in decoding, [slots] in training.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from eyas.heads.config import HeadConfig, LayerConfig
from eyas.heads.rope import inverse_frequencies, rotate


class Attention(nn.Module):
    """Projections of one layer's attention; q, k and v read `width` values: 2h in the first layer, h in later ones."""

    def __init__(self, config: LayerConfig, width: int) -> None:
        super().__init__()
        h, d = config.hidden_size, config.head_dim
        self.q_proj = nn.Linear(width, config.num_attention_heads * d, bias=config.qkv_bias)
        self.k_proj = nn.Linear(width, config.num_key_value_heads * d, bias=config.qkv_bias)
        self.v_proj = nn.Linear(width, config.num_key_value_heads * d, bias=config.qkv_bias)
        self.o_proj = nn.Linear(config.num_attention_heads * d, h, bias=config.o_bias)
        self.q_norm = nn.RMSNorm(d, eps=config.rms_norm_eps) if config.qk_norm else None
        self.k_norm = nn.RMSNorm(d, eps=config.rms_norm_eps) if config.qk_norm else None


class MLP(nn.Module):
    """The gated MLP of a Llama layer."""

    def __init__(self, config: LayerConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=config.mlp_bias)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=config.mlp_bias)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=config.mlp_bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class DraftLayer(nn.Module):
    """A Llama-shaped decoder layer, its attention left to the caller. Parameter names are those of the public checkpoints."""

    def __init__(self, config: LayerConfig, width: int) -> None:
        super().__init__()
        h, eps = config.hidden_size, config.rms_norm_eps
        self.head_dim = config.head_dim
        self.self_attn = Attention(config, width)
        self.mlp = MLP(config)
        self.input_layernorm = nn.RMSNorm(h, eps=eps)
        self.post_attention_layernorm = nn.RMSNorm(h, eps=eps)

    def queries(self, x: Tensor, positions: Tensor, frequencies: Tensor) -> Tensor:
        """Rotated queries [T, heads, head_dim] of what the layer reads, `x` [T, width], at `positions` int64 [T]."""
        q = self.self_attn.q_proj(x).unflatten(-1, (-1, self.head_dim))
        if self.self_attn.q_norm is not None:
            q = self.self_attn.q_norm(q)
        return rotate(q, positions, frequencies)

    def keys_values(self, x: Tensor, positions: Tensor, frequencies: Tensor) -> tuple[Tensor, Tensor]:
        """Rotated keys and values [T, kv_heads, head_dim] of `x` [T, width] at `positions` int64 [T]."""
        k = self.self_attn.k_proj(x).unflatten(-1, (-1, self.head_dim))
        v = self.self_attn.v_proj(x).unflatten(-1, (-1, self.head_dim))
        if self.self_attn.k_norm is not None:
            k = self.self_attn.k_norm(k)
        return rotate(k, positions, frequencies), v

    def residual(self, states: Tensor) -> Tensor:
        """What attention is added to."""
        return states

    def finish(self, states: Tensor, attended: Tensor) -> Tensor:
        """The rest of the layer: `attended` [T, heads, head_dim] joins the residual of `states` [T, h] -> new states [T, h]."""
        s = self.residual(states) + self.self_attn.o_proj(attended.flatten(-2))
        return s + self.mlp(self.post_attention_layernorm(s))


class FirstLayer(DraftLayer):
    """The layer that reads a token beside a state: q, k and v see 2h, the embedding half first."""

    def __init__(self, config: HeadConfig) -> None:
        super().__init__(config, 2 * config.hidden_size)
        self.norm_before_residual = config.norm_before_residual
        self.hidden_norm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)

    def residual(self, states: Tensor) -> Tensor:
        return self.hidden_norm(states) if self.norm_before_residual else states


class Eagle3Head(nn.Module):
    """A draft head for one target: `fuse`, then per step and layer `read`, `queries`, `keys_values`, attention, `finish`;
    at the end of a step `hand_on` and `logits`.

    `embedding` [V, h] is the target's own, frozen and not a parameter; a head of another width than its target has one of
    its own. `d2t` int64 [D] holds OFFSETS: draft id i means target id i + d2t[i]; `t2d` bool [V] marks the target ids the
    head can draft.
    """

    inverse_frequencies: Tensor
    target_embedding: Tensor
    d2t: Tensor
    t2d: Tensor

    def __init__(self, config: HeadConfig, embedding: Tensor, d2t: Tensor) -> None:
        """`embedding` [V, H] is the target's, shared unless the head has its own."""
        super().__init__()
        self.config = config
        h, eps = config.hidden_size, config.rms_norm_eps
        normed_taps = len(config.tap_ids) if config.fc_norm else 0
        self.fc_norm = nn.ModuleList(nn.RMSNorm(config.target_hidden_size, eps=eps) for _ in range(normed_taps))
        self.fc = nn.Linear(len(config.tap_ids) * config.target_hidden_size, h, bias=config.fc_bias)
        self.midlayer = FirstLayer(config)
        # serving engines call the first layer layers.0 or midlayer, the others layers.1 and so on
        self.layers = nn.ModuleDict({str(n): DraftLayer(config, h) for n in range(1, config.num_layers)})
        self.norm = nn.RMSNorm(h, eps=eps)
        self.lm_head = nn.Linear(h, config.draft_vocab_size, bias=False)
        self.embed_tokens = nn.Embedding(config.vocab_size, h) if config.own_embedding else None
        if self.embed_tokens is None:
            self.register_buffer("target_embedding", embedding.detach(), persistent=False)
        self.register_buffer("d2t", d2t)
        t2d = torch.zeros(config.vocab_size, dtype=torch.bool, device=d2t.device)
        t2d[self.draft_ids(d2t)] = True
        self.register_buffer("t2d", t2d)
        frequencies = inverse_frequencies(config.rope, config.head_dim).to(embedding.device)
        self.register_buffer("inverse_frequencies", frequencies, persistent=False)

    @staticmethod
    def draft_ids(d2t: Tensor) -> Tensor:
        """The target ids int64 [D] behind the offsets `d2t`."""
        return torch.arange(len(d2t), device=d2t.device) + d2t

    @property
    def embedding(self) -> Tensor:
        """The token embedding [V, h] that the head reads."""
        return self.target_embedding if self.embed_tokens is None else self.embed_tokens.weight

    @property
    def decoder_layers(self) -> list[DraftLayer]:
        """The layers in their order."""
        return [self.midlayer, *self.layers.values()]  # type: ignore[list-item]

    def fuse(self, taps: Tensor) -> Tensor:
        """The taps side by side [T, 3H] -> step-0 states g [T, h] (section 3.1); EAGLE-3.1 norms each tap first."""
        if self.fc_norm:
            parts = taps.chunk(len(self.fc_norm), dim=-1)  # each [T, H]
            taps = torch.cat([norm(part) for norm, part in zip(self.fc_norm, parts, strict=True)], dim=-1)
        return self.fc(taps)

    def read(self, layer: int, states: Tensor, tokens: Tensor) -> Tensor:
        """What q, k and v of a layer read: the first one the normed embedding of `tokens` int64 [T] beside the normed
        `states` [T, h] -> [T, 2h], a later one the normed states alone [T, h]."""
        if layer:
            return self.decoder_layers[layer].input_layernorm(states)
        embedded = F.embedding(tokens, self.embedding).to(states.dtype)  # [T, h]
        return torch.cat([self.midlayer.input_layernorm(embedded), self.midlayer.hidden_norm(states)], dim=-1)

    def queries(self, layer: int, x: Tensor, positions: Tensor) -> Tensor:
        """Rotated queries [T, heads, head_dim] of `x` (from `read`) at `positions` int64 [T]."""
        return self.decoder_layers[layer].queries(x, positions, self.inverse_frequencies)

    def keys_values(self, layer: int, x: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Rotated keys and values [T, kv_heads, head_dim] of `x` (from `read`) at `positions` int64 [T]."""
        return self.decoder_layers[layer].keys_values(x, positions, self.inverse_frequencies)

    def finish(self, layer: int, states: Tensor, attended: Tensor) -> Tensor:
        """The rest of a layer: `attended` [T, heads, head_dim] joins its `states` [T, h] -> new states [T, h]."""
        return self.decoder_layers[layer].finish(states, attended)

    def hand_on(self, states: Tensor) -> Tensor:
        """The state [T, h] that the next step reads, from the last layer's `states`: as they are, or normed (EAGLE-3.1)."""
        return self.norm(states) if self.config.norm_output else states

    def logits(self, handed_on: Tensor) -> Tensor:
        """Draft logits [T, D] of what `hand_on` gave [T, h]: the final norm is applied once, whether handed on or not."""
        return self.lm_head(handed_on if self.config.norm_output else self.norm(handed_on))
