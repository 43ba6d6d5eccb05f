"""Weights in the precision an engine will compute in."""

from __future__ import annotations

import torch
from torch import Tensor

from eyas.errors import EyasError
from eyas.target import DTYPES


def cast(tensors: dict[str, Tensor], dtype: str) -> dict[str, Tensor]:
    """`tensors` with every floating one in `dtype`.

    Raises EyasError when a value is not finite there: an engine would load it and accept no draft, without a word.
    """
    if dtype not in DTYPES:
        raise EyasError(f"unknown dtype '{dtype}'; choose one of {', '.join(DTYPES)}")
    found: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        found[name] = tensor.to(DTYPES[dtype]) if tensor.is_floating_point() else tensor
        if not bool(torch.isfinite(found[name]).all()):
            largest = float(tensor.abs().max())
            why = f"its largest value is {largest:g}" if largest < float("inf") else "it holds NaN or infinity already"
            raise EyasError(f"tensor '{name}' does not fit {dtype}: {why}; give --dtype bfloat16 or float32")
    return found
