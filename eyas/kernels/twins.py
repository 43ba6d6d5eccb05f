"""Which modules of a model have a fused twin: those known by their parts that compute the usual thing on random input.

A family that does it differently keeps its own modules; of a layer that is not known whole, the known parts are replaced.
The formulas here are the eager reference of `eyas.kernels.fused`.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor, nn

from eyas.errors import EyasError
from eyas.kernels.attention import attend
from eyas.kernels.fused import FusedAttention, FusedLayer, FusedMLP, FusedNorm, FusedRotary, eps_of
from eyas.kernels.linear import Packing

INTERFACE = "eyas"  # the name under which a model's attention is `kernels.attend`
FIXED_ROPE = ("default", "linear", "llama3", "yarn")  # whose frequencies do not change with the length of the text
SCALES = (1.0, 1000.0)  # of the random input: the larger one finds what clips


@torch.no_grad()
def fused_twin(module: Any, weights: Packing) -> nn.Module | None:
    """The fused replacement of `module`, if it is an RMS norm, a silu-gated MLP, a rotary embedding, attention with rotary
    positions or a decoder layer of these, each of the usual kind; else None."""
    if _is_norm(module):
        return FusedNorm(module.weight, eps_of(module))
    if _is_mlp(module):
        return FusedMLP(module.gate_proj, module.up_proj, module.down_proj, weights)
    if _is_attention(module):
        return FusedAttention(module, weights)
    if _is_rotary(module):
        return FusedRotary(module)
    if _is_layer(module):
        parts = (module.input_layernorm, module.self_attn, module.post_attention_layernorm, module.mlp)
        return FusedLayer(*(fused_twin(part, weights) for part in parts))  # type: ignore[arg-type]
    return None


def usual_norm(norm: Any, x: Tensor) -> Tensor:
    """weight * x / sqrt(mean(x^2) + eps)."""
    return norm.weight * (x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps_of(norm)))


def usual_mlp(mlp: Any, x: Tensor) -> Tensor:
    """down(silu(gate(x)) * up(x))."""
    return mlp.down_proj(nn.functional.silu(mlp.gate_proj(x)) * mlp.up_proj(x))


def usual_attention(module: Any, x: Tensor, turns: tuple[Tensor, Tensor], mask: Tensor, cache: Any) -> Tensor:
    """Attention of x [B, Q, n] with rotary positions in halves, and norms of q and k where the module has them."""
    heads = []
    for name in ("q", "k", "v"):
        head = getattr(module, f"{name}_proj")(x).unflatten(-1, (-1, module.head_dim))  # [B, Q, heads, head_dim]
        norm = getattr(module, f"{name}_norm", None)
        heads.append((head if norm is None else usual_norm(norm, head)).transpose(1, 2))  # [B, heads, Q, head_dim]
    q, k = (_turned(head, *turns) for head in heads[:2])
    k, v = cache.update(k, heads[2], module.layer_idx)
    return module.o_proj(attend(q, k, v, mask, module.scaling).flatten(2))


def _turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    return x * cos[:, None] + torch.cat([-second, first], dim=-1) * sin[:, None]


# -- known by its parts, and usual on random input --------------------------------------------------------------------


class _Kept:
    """A cache that keeps what it was given last."""

    def update(self, keys: Tensor, values: Tensor, layer: int, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        self.keys, self.values, self.layer = keys, values, layer
        return keys, values


def _is_norm(module: Any) -> bool:
    weight = getattr(module, "weight", None)
    if not type(module).__name__.endswith("RMSNorm") or not isinstance(weight, nn.Parameter) or weight.dim() != 1:
        return False
    return _packable(weight) and all(_same(module(x), usual_norm(module, x)) for x in _random(3, len(weight)))


def _is_mlp(module: Any) -> bool:
    if _parts(module) != {"gate_proj", "up_proj", "down_proj", "act_fn"}:
        return False
    layers = [module.gate_proj, module.up_proj, module.down_proj]
    if not _linear(*layers) or not _alike(*layers[:2]):
        return False
    return all(_same(module(x), usual_mlp(module, x)) for x in _random(3, layers[0].in_features))


def _is_rotary(module: Any) -> bool:
    named = type(module).__name__.endswith("RotaryEmbedding") and getattr(module, "rope_type", None) in FIXED_ROPE
    return named and list(inspect.signature(type(module).forward).parameters) == ["self", "x", "position_ids"]


def _is_attention(module: Any) -> bool:
    norms = _parts(module) & {"q_norm", "k_norm"}
    if _parts(module) - norms != {"q_proj", "k_proj", "v_proj", "o_proj"} or len(norms) == 1:
        return False
    if getattr(getattr(module, "config", None), "_attn_implementation", None) != INTERFACE:
        return False
    if not all(hasattr(module, name) for name in ("layer_idx", "head_dim", "scaling")) or not _takes(module):
        return False
    layers = [module.q_proj, module.k_proj, module.v_proj]
    if not _linear(*layers, module.o_proj) or not _alike(*layers):
        return False
    if any(not _is_norm(getattr(module, name)) or len(getattr(module, name).weight) != module.head_dim for name in norms):
        return False
    if norms and eps_of(module.q_norm) != eps_of(module.k_norm):
        return False
    return all(_attends_as_usual(module, x) for x in _random(2, 3, layers[0].in_features))


def _attends_as_usual(module: Any, x: Tensor) -> bool:
    turns, mask = _surroundings(x, module.head_dim)
    told, usual = _Kept(), _Kept()
    try:
        out = module(hidden_states=x, position_embeddings=turns, attention_mask=mask, cache=told)
    except (RuntimeError, EyasError):  # shapes that it takes differently, or attention that `attend` is not
        return False
    want = usual_attention(module, x, turns, mask, usual)
    kept = told.layer == usual.layer and _same(told.keys, usual.keys) and _same(told.values, usual.values)
    return kept and isinstance(out, tuple) and len(out) == 2 and _same(out[0], want)


def _is_layer(module: Any) -> bool:
    if _parts(module) != {"self_attn", "mlp", "input_layernorm", "post_attention_layernorm"} or not _takes(module):
        return False
    if not (_is_norm(module.input_layernorm) and _is_norm(module.post_attention_layernorm)):
        return False
    if not (_is_attention(module.self_attn) and _is_mlp(module.mlp)):
        return False
    return all(_adds_as_usual(module, x) for x in _random(2, 3, module.self_attn.q_proj.in_features))


def _adds_as_usual(module: Any, x: Tensor) -> bool:
    turns, mask = _surroundings(x, module.self_attn.head_dim)
    out = module(hidden_states=x, position_embeddings=turns, attention_mask=mask, cache=_Kept())
    want = x + usual_attention(module.self_attn, usual_norm(module.input_layernorm, x), turns, mask, _Kept())
    want = want + usual_mlp(module.mlp, usual_norm(module.post_attention_layernorm, want))
    return isinstance(out, Tensor) and _same(out, want)


def _parts(module: nn.Module) -> set[str]:
    return {name for name, part in module._modules.items() if part is not None}


def _takes(module: nn.Module) -> bool:
    """Whether it is called like transformers' layers and their attention."""
    given = {"hidden_states", "position_embeddings", "attention_mask", "cache"}
    return given <= set(inspect.signature(type(module).forward).parameters)


def _linear(*layers: Any) -> bool:
    return all(type(layer) is nn.Linear and _packable(layer.weight) for layer in layers)


def _alike(*layers: nn.Linear) -> bool:
    """Whether all or none have a bias."""
    return len({layer.bias is None for layer in layers}) == 1


def _packable(weight: Tensor) -> bool:
    return weight.dtype == torch.float32 and weight.device.type == "cpu"


def _random(*shape: int) -> list[Tensor]:
    x = torch.randn(*shape, generator=torch.Generator().manual_seed(0))
    return [scale * x for scale in SCALES]


def _surroundings(x: Tensor, head_dim: int) -> tuple[tuple[Tensor, Tensor], Tensor]:
    """Random turns (cosines, sines) [B, Q, head_dim] and the causal mask [B, 1, Q, Q] for x [B, Q, n]."""
    batch, queries = x.shape[:2]
    cos, sin = torch.randn(2, batch, queries, head_dim, generator=torch.Generator().manual_seed(1))
    causal = torch.ones(queries, queries, dtype=torch.bool).tril()
    return (cos, sin), causal.expand(batch, 1, queries, queries)


def _same(got: Tensor, want: Tensor) -> bool:
    return got.shape == want.shape and torch.allclose(got, want, rtol=1e-4, atol=1e-5 * float(want.abs().max()))
