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


def _signed32(x: int) -> int:
    return x - (1 << 32) if x >> 31 else x


def noise_key(seed: int, sample: int, index: int, stream: int = 0) -> tuple[int, int]:
    """Two signed 32-bit keys for the `index`-th generated token of the `sample`-th text drawn with `seed`.

    Another `stream` is noise independent of the first one's, for the same token.
    """
    key = _mix64(_mix64(_mix64(seed & _MASK64) ^ (sample & _MASK64)) ^ (index & _MASK64))
    if stream:
        key = _mix64(key ^ stream)
    return _signed32(key & _MASK32), _signed32(key >> 32)


def _mix32_(x: Tensor) -> Tensor:
    """A bijective hash of int32 values, in place (multipliers: Wellons' lowbias32; the shifts are logical ones)."""
    x ^= (x >> 16) & 0xFFFF
    x *= _signed32(0x7FEB352D)
    x ^= (x >> 15) & 0x1FFFF
    x *= _signed32(0x846CA68B)
    x ^= (x >> 16) & 0xFFFF
    return x


def _rows(keys: Tensor, ids: Tensor) -> Tensor:
    bits = _mix32_(ids ^ keys[:, :1])  # [R, n]
    bits ^= keys[:, 1:]
    uniform = _mix32_(bits).double()  # [R, n], whole numbers from -2^31
    uniform += 2.0**31 + 0.5
    uniform /= 2.0**32  # inside (0, 1)
    return uniform.log_().neg_().log_().neg_().float()


def gumbel(keys: Tensor, ids: Tensor) -> Tensor:
    """Standard Gumbel noise float32 [B, n] for `keys` int32 [B, 2] at token `ids` int [n]."""
    ids = ids.int()[None]  # [1, n]
    if keys.device.type != "cpu":
        return _rows(keys, ids)
    return torch.cat([_rows(key, ids) for key in keys.split(1)])  # a row at a time stays in the cache
