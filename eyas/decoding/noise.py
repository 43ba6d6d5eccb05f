"""Gumbel noise from a counter: a pure function of (seed, sample, output index, token id).

Coupled sampling picks token = argmax(logits + noise). Because the noise of an output index depends on nothing else, the
chosen text is the same with or without drafts, in any batch (Daliri et al., arXiv 2408.07978). The generator is an
integer hash in 64-bit arithmetic, so every device gives the same bits.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

AT_ONCE = 65536  # numbers that are worked on together on the CPU, so that they stay in its cache


def _mix64(x: np.ndarray) -> np.ndarray:
    """The finaliser of splitmix64 (Steele et al. 2014), on uint64 values."""
    x = x + np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def text_keys(texts: Sequence[tuple[int, int]]) -> np.ndarray:
    """Keys uint64 [B] of texts given as (seed, sample)."""
    numbers = np.array([[part & 0xFFFFFFFFFFFFFFFF for part in text] for text in texts], np.uint64).reshape(-1, 2)  # [B, 2]
    return _mix64(_mix64(numbers[:, 0]) ^ numbers[:, 1])


def noise_keys(texts: np.ndarray, indices: Sequence[int], stream: int = 0) -> Tensor:
    """Keys int32 [B, 2] of the `indices[b]`-th generated token of every text of `texts` uint64 [B].

    Another `stream` is noise independent of the first one's, for the same token.
    """
    keys = _mix64(texts ^ np.array(indices, np.uint64))
    if stream:
        keys = _mix64(keys ^ np.uint64(stream))
    return torch.from_numpy(keys.view(np.int32).reshape(-1, 2).copy())  # low half first, on a little-endian machine


def _signed32(x: int) -> int:
    return x - (1 << 32) if x >> 31 else x


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
    return torch.cat([_rows(some, ids) for some in keys.split(max(1, AT_ONCE // ids.shape[1]))])
