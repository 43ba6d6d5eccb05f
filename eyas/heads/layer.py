"""The Llama-shaped decoder layer that heads are made of, its attention left to the caller.

T below is any run of leading dimensions: [B, Q] in decoding, [slots] in training.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from eyas.heads.config import LayerConfig
from eyas.heads.rope import rotate


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

    def finish(self, residual: Tensor, attended: Tensor) -> Tensor:
        """The rest of the layer: `attended` [T, heads, head_dim] joins the `residual` [T, h] -> new states [T, h]."""
        s = residual + self.self_attn.o_proj(attended.flatten(-2))
        return s + self.mlp(self.post_attention_layernorm(s))
