"""The EAGLE-3 head (arXiv 2503.01840): three fused taps, one decoder layer, its own vocabulary.

Training and decoding share these functions; they differ only in what the queries attend over, so neither has a second
implementation. T below is any run of leading dimensions: [B, Q] in decoding, [slots] in training.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from eyas.heads.config import HeadConfig
from eyas.heads.rope import inverse_frequencies, rotate


class Attention(nn.Module):
    """Projections of the head's attention; q, k and v read 2h (embedding half first)."""

    def __init__(self, config: HeadConfig) -> None:
        super().__init__()
        h, d = config.hidden_size, config.head_dim
        self.q_proj = nn.Linear(2 * h, config.num_attention_heads * d, bias=False)
        self.k_proj = nn.Linear(2 * h, config.num_key_value_heads * d, bias=False)
        self.v_proj = nn.Linear(2 * h, config.num_key_value_heads * d, bias=False)
        self.o_proj = nn.Linear(config.num_attention_heads * d, h, bias=False)


class MLP(nn.Module):
    def __init__(self, config: HeadConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class DraftLayer(nn.Module):
    """The one decoder layer. Parameter names are those of the authors' checkpoints (`midlayer.*`)."""

    def __init__(self, config: HeadConfig) -> None:
        super().__init__()
        h, eps = config.hidden_size, config.rms_norm_eps
        self.self_attn = Attention(config)
        self.mlp = MLP(config)
        self.input_layernorm = nn.RMSNorm(h, eps=eps)
        self.hidden_norm = nn.RMSNorm(h, eps=eps)
        self.post_attention_layernorm = nn.RMSNorm(h, eps=eps)


class Eagle3Head(nn.Module):
    """A draft head for one target: `fuse`, then per step `mix`, `queries`, `keys_values`, attention, `finish`, `logits`.

    `embedding` [V, h] is the target's own, frozen and not a parameter. `d2t` int64 [D] holds OFFSETS: draft id i means
    target id i + d2t[i]; `t2d` bool [V] marks the target ids the head can draft.
    """

    inverse_frequencies: Tensor
    embedding: Tensor
    d2t: Tensor
    t2d: Tensor

    def __init__(self, config: HeadConfig, embedding: Tensor, d2t: Tensor) -> None:
        super().__init__()
        self.config = config
        self.fc = nn.Linear(3 * config.target_hidden_size, config.hidden_size, bias=False)
        self.midlayer = DraftLayer(config)
        self.norm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.lm_head = nn.Linear(config.hidden_size, config.draft_vocab_size, bias=False)
        self.register_buffer("embedding", embedding.detach(), persistent=False)
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

    def fuse(self, taps: Tensor) -> Tensor:
        """The three taps [T, 3H] -> step-0 states g [T, h] (section 3.1)."""
        return self.fc(taps)

    def mix(self, states: Tensor, tokens: Tensor) -> Tensor:
        """What q, k and v read: normed embedding of `tokens` int64 [T] beside the normed `states` [T, h] -> [T, 2h]."""
        embedded = F.embedding(tokens, self.embedding).to(states.dtype)  # [T, h]
        return torch.cat([self.midlayer.input_layernorm(embedded), self.midlayer.hidden_norm(states)], dim=-1)

    def queries(self, x: Tensor, positions: Tensor) -> Tensor:
        """Rotated queries [T, heads, head_dim] of `x` [T, 2h] at `positions` int64 [T]."""
        q = self.midlayer.self_attn.q_proj(x).unflatten(-1, (-1, self.config.head_dim))
        return rotate(q, positions, self.inverse_frequencies)

    def keys_values(self, x: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Rotated keys and values [T, kv_heads, head_dim] of `x` [T, 2h] at `positions` int64 [T]."""
        attention, d = self.midlayer.self_attn, self.config.head_dim
        k = attention.k_proj(x).unflatten(-1, (-1, d))
        v = attention.v_proj(x).unflatten(-1, (-1, d))
        return rotate(k, positions, self.inverse_frequencies), v

    def finish(self, states: Tensor, attended: Tensor) -> Tensor:
        """The rest of the layer: `attended` [T, heads, head_dim] joins the residual `states` [T, h] -> new states [T, h]."""
        layer = self.midlayer
        residual = layer.hidden_norm(states) if self.config.norm_before_residual else states
        s = residual + layer.self_attn.o_proj(attended.flatten(-2))
        return s + layer.mlp(layer.post_attention_layernorm(s))

    def logits(self, states: Tensor) -> Tensor:
        """Draft logits [T, D] of states [T, h]; the state handed to the next step is the one BEFORE this norm."""
        return self.lm_head(self.norm(states))
