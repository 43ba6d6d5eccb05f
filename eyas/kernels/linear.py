"""One linear layer with packed weights: fast for few rows, and with rows that never see each other.

The stock CPU product streams its weights badly when a forward has 2 to 30 tokens, which is exactly what verifying a
draft needs, and its bits change with the number of rows. Here every output element is one chain of fused multiply-adds
over ascending k (see `linear.cpp`), so a row's result is bit-identical in any batch, at any row and thread count.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor, nn

from eyas.errors import EyasError

Packing = Literal["fp32", "fp16", "int8"]
DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "int8": torch.int8}
PANEL = 16  # outputs in a panel, as in linear.cpp


def pack(weight: Tensor, weights: Packing) -> tuple[Tensor, Tensor | None]:
    """Pack `weight` float32 [out, in] into panels [ceil(out / 16), in, 16]; returns them with int8's scales [out].

    "fp32" keeps the weights, "fp16" rounds them to half precision, "int8" symmetrically with one scale per output.
    Raises EyasError for weights that are not float32 on the CPU, not finite or, for "fp16", beyond 65504.
    """
    weight = weight.detach()
    if weight.device.type != "cpu" or weight.dtype != torch.float32:
        raise EyasError(
            f"weights='{weights}' packs float32 models on the CPU, but this one is {weight.dtype} on {weight.device}; "
            "use weights='stock'"
        )
    out_features, in_features = weight.shape
    largest = weight.abs().amax(dim=1)  # [out]
    limit = torch.finfo(torch.float16 if weights == "fp16" else torch.float32).max
    if not bool((largest <= limit).all()):
        raise EyasError(f"a weight of {list(weight.shape)} is not finite or too large for '{weights}'; use 'fp32'")
    scale = None
    if weights == "int8":
        scale = (largest / 127).clamp_min(torch.finfo(torch.float32).tiny)  # [out]
        weight = (weight / scale[:, None]).round()
    panels = -(-out_features // PANEL)
    padded = nn.functional.pad(weight, (0, 0, 0, panels * PANEL - out_features))  # [panels * 16, in]
    packed = padded.view(panels, PANEL, in_features).transpose(1, 2).to(DTYPES[weights])  # [panels, in, 16]
    return packed.contiguous(), scale


class PackedLinear(nn.Module):
    """x float32 [..., in] -> x weight^T + bias, float32 [..., out], on the CPU. Inference only, and not for saving.

    Made from `weight` float32 [out, in] and `bias` [out]; raises EyasError where `pack` does.
    """

    packed: Tensor  # [ceil(out / 16), in, 16]
    scale: Tensor | None  # [out], int8 only
    bias: Tensor | None  # [out]

    def __init__(self, weight: Tensor, bias: Tensor | None, weights: Packing) -> None:
        super().__init__()
        self.out_features, self.in_features = weight.shape
        self.weights = weights
        packed, scale = pack(weight, weights)
        self.register_buffer("packed", packed, persistent=False)
        self.register_buffer("scale", scale, persistent=False)
        self.register_buffer("bias", None if bias is None else bias.detach(), persistent=False)
        self._product = torch.ops.eyas.packed_linear.default  # looked up once: this is called hundreds of times a token

    @property
    def weight(self) -> Tensor:
        """The weights as the product sees them, float32 [out, in], unpacked at every access (slow)."""
        rows = self.packed.float().transpose(1, 2).reshape(-1, self.in_features)[: self.out_features]  # [out, in]
        return rows if self.scale is None else rows * self.scale[:, None]

    @property
    def parts(self) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """`packed`, `scale` and `bias`, as the operators take them."""
        own = self._buffers
        return own["packed"], own["scale"], own["bias"]

    def forward(self, x: Tensor, add: Tensor | None = None) -> Tensor:
        """`add` float32 [..., out], where given, is added to the result (a residual)."""
        if x.requires_grad and torch.is_grad_enabled():
            raise EyasError("packed weights are for inference only; to differentiate the target use weights='stock'")
        return self._product(x, *self.parts, add, self.out_features)

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}, weights={self.weights}"
