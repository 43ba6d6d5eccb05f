"""Rotary position embedding (RoFormer; the half-split form of Llama), with the frequency scalings of Llama 3 and linear."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from eyas.errors import EyasError


def inverse_frequencies(rope: dict[str, Any], head_dim: int) -> Tensor:
    """float32 [head_dim / 2] angular frequencies per position for the `rope_parameters` of a config.

    Raises EyasError for a rope type that is not one of default, linear, llama3.
    """
    theta = float(rope.get("rope_theta", 10000.0))
    frequencies = 1.0 / theta ** (torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim)  # [D/2]
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind == "default":
        return frequencies
    if kind == "linear":
        return frequencies / float(rope["factor"])
    if kind == "llama3":
        return _llama3(frequencies, rope)
    raise EyasError(f"rope type '{kind}' is not supported by eyas heads; choose default, linear or llama3")


def _llama3(frequencies: Tensor, rope: dict[str, Any]) -> Tensor:
    """Long wavelengths are stretched by `factor`, short ones kept, those between blended (Llama 3.1)."""
    original = float(rope["original_max_position_embeddings"])
    low, high, factor = float(rope["low_freq_factor"]), float(rope["high_freq_factor"]), float(rope["factor"])
    wavelength = 2 * math.pi / frequencies  # [D/2]
    blend = (original / wavelength - low) / (high - low)
    blended = (1 - blend) * frequencies / factor + blend * frequencies
    scaled = torch.where(wavelength > original / low, frequencies / factor, blended)
    return torch.where(wavelength < original / high, frequencies, scaled)


def rotate(x: Tensor, positions: Tensor, frequencies: Tensor) -> Tensor:
    """Turn `x` [..., heads, D] at `positions` int64 [...] (one per leading index) by the given frequencies [D/2]."""
    angles = positions[..., None].float() * frequencies  # [..., D/2]
    cos, sin = angles.cos()[..., None, :], angles.sin()[..., None, :]  # [..., 1, D/2]
    first, second = x.chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1).to(x.dtype)
