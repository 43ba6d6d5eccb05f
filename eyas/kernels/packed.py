"""Pack the products of a model: `pack_linears` swaps its linear layers for packed ones, in place.

Packings: "fp32" keeps the weights; "fp16" rounds them to half precision; "int8" rounds them symmetrically with one
scale per output channel. Activations and sums are float32 in all of them. "stock" leaves torch's own layers in place.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from torch import nn

from eyas.errors import EyasError
from eyas.kernels.build import kernels_ready
from eyas.kernels.linear import PackedLinear
from eyas.kernels.twins import fused_twin

Weights = Literal["stock", "fp32", "fp16", "int8"]


@dataclass(frozen=True)
class PackReport:
    """What `pack_linears` did.

    `weights`: the packing now in force ("stock" when the kernels could not be built); `products`: packed products;
    `fused`: modules with a fused twin (`eyas.kernels.twins`); `bytes`: size of the packed weights, all of which one forward
    reads; `left`: modules that still hold matrices of their own, embeddings aside.
    """

    weights: Weights
    products: int
    fused: int
    bytes: int
    left: tuple[str, ...]

    @property
    def row_invariant(self) -> bool:
        """Whether every product of the model gives a row the same bits at any number of rows."""
        return self.weights != "stock" and not self.left


def pack_linears(model: nn.Module, weights: Weights) -> PackReport:
    """Replace every `nn.Linear` of `model` by a `PackedLinear`, in place, and whatever has a fused twin by that.

    Fetch modules from the model again afterwards: references taken before still name the stock ones. An embedding tied
    to a packed layer keeps its weights. Where the kernels cannot be built (a line on stderr says why) the model stays
    as it is and the report says "stock". Raises EyasError for an unknown packing, for models that are not float32 on
    the CPU and for weights that the packing cannot hold.
    """
    if weights not in get_args(Weights):
        raise EyasError(f"unknown weight packing '{weights}'; choose one of {', '.join(get_args(Weights))}")
    if weights == "stock" or not kernels_ready():
        return PackReport("stock", 0, 0, 0, _other_products(model))
    twins: dict[nn.Module, nn.Module] = {}  # a module that sits in two places is replaced by one

    def swap(parent: nn.Module) -> None:
        for name, child in parent._modules.items():
            if child is None:
                continue
            if child not in twins:
                if type(child) is nn.Linear:
                    twins[child] = PackedLinear(child.weight, child.bias, weights)
                else:
                    twins[child] = fused_twin(child, weights) or child
                    if twins[child] is child:
                        swap(child)
            parent._modules[name] = twins[child]

    swap(model)
    products = [module for module in model.modules() if isinstance(module, PackedLinear)]
    fused = sum(twin is not child and type(child) is not nn.Linear for child, twin in twins.items())
    size = sum(product.packed.nbytes for product in products)
    return PackReport(weights, len(products), fused, size, _other_products(model))


def _other_products(model: nn.Module) -> tuple[str, ...]:
    return tuple(
        name
        for name, module in model.named_modules()
        if not isinstance(module, nn.Embedding) and any(p.dim() > 1 for p in module.parameters(recurse=False))
    )
