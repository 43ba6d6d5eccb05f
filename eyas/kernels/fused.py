"""Norms, attention, gated MLPs and whole decoder layers in a few calls each: the forward of a few tokens is short enough
for the calls between its products to matter.

transformers spells an RMS norm as eight small operators, a gated MLP as five and the way from hidden states to rotated heads
as twenty. These stand in for them, where `eyas.kernels.twins` knows a module.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from eyas.kernels.attention import attend
from eyas.kernels.linear import PANEL, PackedLinear, Packing


class FusedNorm(nn.Module):
    """weight * x / sqrt(mean(x^2) + eps) over the last axis of x float32 [..., n]; `weight` stays the model's own."""

    def __init__(self, weight: nn.Parameter, eps: float) -> None:
        super().__init__()
        self.weight, self.eps = weight, eps
        self._norm = torch.ops.eyas.rms_norm.default

    @property
    def parts(self) -> tuple[Tensor | None, float]:
        """`weight` and `eps`, as the operators take them."""
        return self._parameters["weight"], self.eps

    def forward(self, x: Tensor) -> Tensor:
        return self._norm(x, *self.parts)


class FusedMLP(nn.Module):
    """down(silu(gate(x)) * up(x)) for x float32 [..., n], with gate and up as one packed product."""

    def __init__(self, gate: nn.Linear, up: nn.Linear, down: nn.Linear, weights: Packing) -> None:
        super().__init__()
        self.gate_up = woven(gate, up, weights)
        self.down = PackedLinear(down.weight, down.bias, weights)
        self._mlp = torch.ops.eyas.gated_mlp.default

    @property
    def parts(self) -> tuple[Tensor | None, ...]:
        """The parts of both products, as the operators take them."""
        return *self.gate_up.parts, *self.down.parts

    def forward(self, x: Tensor) -> Tensor:
        return self._mlp(x, *self.parts)


class FusedAttention(nn.Module):
    """Attention over a cache with q, k and v as one packed product, rotary positions, and norms of q and k if it has them.

    Made from a module of transformers' usual kind, it takes what such a module is given and returns as much:
    `hidden_states` float32 [B, Q, n], `position_embeddings` (cosines, sines) [B or 1, Q, head_dim], `attention_mask` bool
    [B, 1, Q, K] and, as `cache`, an `eyas.target.CacheView` in transformers' dress or None.
    """

    def __init__(self, module: Any, weights: Packing) -> None:
        super().__init__()
        self.layer_idx, self.head_dim, self.scaling = module.layer_idx, module.head_dim, module.scaling
        self.heads, self.kv_heads = (p.out_features // self.head_dim for p in (module.q_proj, module.k_proj))
        self.qkv = joined([module.q_proj, module.k_proj, module.v_proj], weights)
        self.o_proj = PackedLinear(module.o_proj.weight, module.o_proj.bias, weights)
        norms = [getattr(module, name, None) for name in ("q_norm", "k_norm")]
        self.q_norm, self.k_norm = (None if norm is None else norm.weight for norm in norms)
        self.head_eps = 0.0 if norms[0] is None else eps_of(norms[0])
        self._project = torch.ops.eyas.project_heads.default

    @property
    def parts(self) -> tuple[Any, ...]:
        """What the operators take after the tensors of a forward: parts of both products, norms of the heads, scale."""
        return *self.qkv.parts, self.q_norm, self.k_norm, self.head_eps, self.scaling, *self.o_proj.parts

    def forward(
        self, hidden_states: Tensor, position_embeddings: tuple[Tensor, Tensor], attention_mask: Tensor,
        cache: Any = None, **_: Any,
    ) -> tuple[Tensor, None]:  # fmt: skip
        queries, keys, values = self._project(
            hidden_states, *self.qkv.parts, self.q_norm, self.k_norm, self.head_eps, *position_embeddings,
            self.heads, self.kv_heads, self.head_dim,
        )  # fmt: skip
        if cache is not None:
            keys, values = cache.update(keys, values, self.layer_idx)
        attended = attend(queries, keys, values, attention_mask, self.scaling)  # [B, Q, heads, head_dim]
        return self.o_proj(attended.flatten(2)), None


class FusedRotary(nn.Module):
    """A rotary embedding whose cosines and sines are computed once, a block of positions at a time, so that those of a position
    depend on nothing else."""

    BLOCK = 256  # positions

    def __init__(self, rotary: nn.Module) -> None:
        super().__init__()
        self._rotary = rotary
        self._tables: list[Tensor] = []  # cosines and sines [positions so far, head_dim]

    def forward(self, x: Tensor, position_ids: Tensor) -> tuple[Tensor, ...]:
        """Cosines and sines [B, Q, head_dim] at `position_ids` int64 [B, Q]; of `x` the dtype alone matters."""
        last = int(position_ids.max())
        while not self._tables or last >= len(self._tables[0]):
            start = len(self._tables[0]) if self._tables else 0
            found = self._rotary(x, torch.arange(start, start + self.BLOCK)[None])  # each [1, BLOCK, head_dim]
            known = self._tables or [table[0, :0] for table in found]
            self._tables = [torch.cat([old, new[0]]) for old, new in zip(known, found, strict=True)]
        return tuple(nn.functional.embedding(position_ids, table) for table in self._tables)


class FusedLayer(nn.Module):
    """A decoder layer, x + attention(norm(x)) and then x + mlp(norm(x)), given what transformers gives such a layer.

    `cache`, where there is one, tells where the layer's keys and values lie and belong (`eyas.target.CacheView.window`): the
    one operator that a layer is writes and reads them in place.
    """

    def __init__(self, first: FusedNorm, attention: FusedAttention, second: FusedNorm, mlp: FusedMLP) -> None:
        super().__init__()
        self.input_layernorm, self.self_attn, self.post_attention_layernorm, self.mlp = first, attention, second, mlp
        norms = first.parts, second.parts
        self.parts = (*norms[0], *attention.parts, *norms[1], *mlp.parts)  # what the operator takes after a forward's tensors
        self._layer = torch.ops.eyas.decoder_layer.default

    def forward(
        self, hidden_states: Tensor, attention_mask: Tensor, position_embeddings: tuple[Tensor, Tensor],
        cache: Any = None, **_: Any,
    ) -> Tensor:  # fmt: skip
        window = None if cache is None else cache.window(self.self_attn.layer_idx)
        return self._layer(
            hidden_states, *position_embeddings, attention_mask, *(window or self._own_window(hidden_states)), *self.parts
        )

    def _own_window(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Keys, values and slots of a forward that keeps nothing: x [B, Q, n] looks at itself."""
        own, (batch, queries, _) = self.self_attn, x.shape
        keys, values = x.new_empty(2, batch, own.kv_heads, queries, own.head_dim).unbind()
        return keys, values, torch.arange(queries).expand(batch, queries)


def joined(layers: list[nn.Linear], weights: Packing) -> PackedLinear:
    """Layers that read the same input as one product, their outputs side by side."""
    biases = None if layers[0].bias is None else torch.cat([layer.bias for layer in layers])
    return PackedLinear(torch.cat([layer.weight for layer in layers]), biases, weights)


def woven(gate: nn.Linear, up: nn.Linear, weights: Packing) -> PackedLinear:
    """Two layers as one product, whose panels of outputs they take turns in: both halves of a gate are ready together."""

    def panels(tensor: Tensor) -> Tensor:
        rest = -len(tensor) % PANEL
        return nn.functional.pad(tensor, (0, 0) * (tensor.dim() - 1) + (0, rest)).unflatten(0, (-1, PANEL))

    def turns(first: Tensor, second: Tensor) -> Tensor:
        return torch.stack([panels(first), panels(second)], dim=1).flatten(0, 2)  # [2 panels * 16, ...]

    biases = None if gate.bias is None else turns(gate.bias, up.bias)
    return PackedLinear(turns(gate.weight, up.weight), biases, weights)


def eps_of(norm: nn.Module) -> float:
    """What an RMS norm adds to the mean square, under either name that families give it; NaN where it has neither."""
    eps = getattr(norm, "variance_epsilon", getattr(norm, "eps", None))
    return eps if isinstance(eps, float) else float("nan")
