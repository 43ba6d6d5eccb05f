"""Norms and gated MLPs in one call each: a token's forward is short enough for the calls in between to matter.

transformers spells an RMS norm as eight small operators and a gated MLP as five. A module is replaced only if it is
known by its parts and the replacement reproduced it on random input: a family that does it differently keeps its own.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from eyas.kernels.linear import PackedLinear, Packing


class FusedNorm(nn.Module):
    """weight * x / sqrt(mean(x^2) + eps) over the last axis of x float32 [..., n]; `weight` stays the model's own."""

    def __init__(self, weight: nn.Parameter, eps: float) -> None:
        super().__init__()
        self.weight, self.eps = weight, eps
        self._norm = torch.ops.eyas.rms_norm.default

    def forward(self, x: Tensor) -> Tensor:
        return self._norm(x, self._parameters["weight"], self.eps)


class FusedMLP(nn.Module):
    """down(silu(gate(x)) * up(x)) for x float32 [..., n], with gate and up as one packed product."""

    def __init__(self, gate: nn.Linear, up: nn.Linear, down: nn.Linear, weights: Packing) -> None:
        super().__init__()
        biases = None if gate.bias is None else torch.cat([gate.bias, up.bias])
        self.gate_up = PackedLinear(torch.cat([gate.weight, up.weight]), biases, weights)
        self.down = PackedLinear(down.weight, down.bias, weights)
        self._gate = torch.ops.eyas.silu_gate.default

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self._gate(self.gate_up(x)))


def fused_twin(module: nn.Module, weights: Packing) -> nn.Module | None:
    """The fused replacement of `module`, if it is an RMS norm or a silu-gated MLP of the usual kind; else None."""
    if type(module).__name__.endswith("RMSNorm"):
        return _norm_twin(module)
    if set(module._modules) == {"gate_proj", "up_proj", "down_proj", "act_fn"}:
        return _mlp_twin(module, weights)
    return None


def _norm_twin(module: nn.Module) -> nn.Module | None:
    weight, eps = getattr(module, "weight", None), getattr(module, "variance_epsilon", getattr(module, "eps", None))
    if not isinstance(weight, nn.Parameter) or weight.dim() != 1 or not isinstance(eps, float):
        return None
    if weight.dtype != torch.float32 or weight.device.type != "cpu":
        return None
    twin = FusedNorm(weight, eps)
    return twin if _same(module, twin, weight.shape[0]) else None


def _mlp_twin(module: nn.Module, weights: Packing) -> nn.Module | None:
    gate, up, down = (getattr(module, name) for name in ("gate_proj", "up_proj", "down_proj"))
    if not all(type(part) is nn.Linear for part in (gate, up, down)) or (gate.bias is None) != (up.bias is None):
        return None

    def usual(x: Tensor) -> Tensor:
        return down(nn.functional.silu(gate(x)) * up(x))

    return FusedMLP(gate, up, down, weights) if _same(module, usual, gate.in_features) else None


@torch.no_grad()
def _same(module: nn.Module, twin: nn.Module | object, width: int) -> bool:
    x = torch.randn(3, width, generator=torch.Generator().manual_seed(0))  # [rows, width]
    want, got = module(x), twin(x)  # type: ignore[operator]
    return bool(torch.allclose(want, got, rtol=1e-4, atol=1e-5 * float(want.abs().max())))
