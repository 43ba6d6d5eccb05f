"""Gumbel noise from a counter: a pure function of (seed, sample, output index, token id).

Coupled sampling picks token = argmax(logits + noise). Because the noise of an output index depends on nothing else, the
chosen text is the same with or without drafts, in any batch (Daliri et al., arXiv 2408.07978). The generator is an
integer hash in 64-bit arithmetic, so every device gives the same bits.
"""

from __future__ import annotations

import torch
from torch import Tensor

_MASK32 = 0xFFFFFFFF
_MASK64 = 0xFFFFFFFFFFFFFFFF


def _mix64(x: int) -> int:
    """The finaliser of splitmix64 (Steele et al. 2014)."""
    x = (x + 0x9E3779B97F4A7C15) & _MASK64
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _MASK64
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _MASK64
    return x ^ (x >> 31)


def noise_key(seed: int, sample: int, index: int) -> tuple[int, int]:
    """Two 32-bit keys for the `index`-th generated token of the `sample`-th text drawn with `seed`."""
    key = _mix64(_mix64(_mix64(seed & _MASK64) ^ (sample & _MASK64)) ^ (index & _MASK64))
    return key & _MASK32, key >> 32


def _mix32(x: Tensor) -> Tensor:
    """A bijective hash of 32-bit values held in int64 (multipliers: Wellons' lowbias32)."""
    x = x ^ (x >> 16)
    x = (x * 0x7FEB352D) & _MASK32
    x = x ^ (x >> 15)
    x = (x * 0x846CA68B) & _MASK32
    return x ^ (x >> 16)


def gumbel(keys: Tensor, ids: Tensor) -> Tensor:
    """Standard Gumbel noise float32 [B, n] for `keys` int64 [B, 2] at token `ids` int64 [n] or [B, n]."""
    low, high = keys[:, :1], keys[:, 1:]  # [B, 1]
    bits = _mix32(_mix32((ids & _MASK32) ^ low) ^ high)  # [B, n], 32 bits each
    uniform = (bits.double() + 0.5) / 2**32  # inside (0, 1)
    return -torch.log(-torch.log(uniform)).float()
