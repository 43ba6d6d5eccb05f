"""The KV cache: rows are slots of one preallocated store, each with its own length.

A row's first `lengths[r]` entries are committed; a forward writes what it reads behind them, and what is not committed
afterwards is simply written over. Accepting a draft moves its path to the front of that space.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

import torch
from torch import Tensor

from eyas.target import LayerShape


class KVCache:
    """`rows` x `length` entries for every layer of `shapes`, allocated once.

    `lengths` int64 [rows], kept by the caller's commits, lies on the host: it steers shapes.
    """

    def __init__(
        self, shapes: Sequence[LayerShape], rows: int, length: int, *,
        dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu",
    ) -> None:  # fmt: skip
        self.rows, self.length = rows, length
        self.lengths = torch.zeros(rows, dtype=torch.long)
        self.device = torch.device(device)
        self._stores: list[Tensor] = []  # each [layers of one shape, rows, heads, length, dim]
        self._layers: list[tuple[Tensor, Tensor]] = []  # per layer keys and values [rows, heads, length, dim]
        for shape, group in groupby(shapes):
            count = len(list(group))
            keys = torch.zeros(count, rows, shape.heads, length, shape.key_dim, dtype=dtype, device=device)
            values = torch.zeros(count, rows, shape.heads, length, shape.value_dim, dtype=dtype, device=device)
            self._stores += [keys, values]
            self._layers += list(zip(keys, values, strict=True))

    @staticmethod
    def bytes_needed(shapes: Sequence[LayerShape], rows: int, length: int, dtype: torch.dtype) -> int:
        """Memory in bytes of a cache, before it is made."""
        per_token = sum(s.heads * (s.key_dim + s.value_dim) for s in shapes)
        return per_token * rows * length * dtype.itemsize

    def view(self, first: int, count: int, slots: Tensor) -> SlotView:
        """The rows first..first+count as a forward sees them: query i of row r is stored at `slots` int64 [count, Q]."""
        return SlotView(self._layers, first, count, slots.to(self.device), int(slots.max()) + 1)

    def commit(self, row: int, path: Tensor) -> None:
        """Append to `row` the entries at offsets `path` int64 [n] (ascending, path[i] >= i) behind its committed ones."""
        count = len(path)
        start = int(self.lengths[row])
        if int(path[-1]) != count - 1:  # not already in place
            source = path.to(self.device) + start
            for store in self._stores:
                store[:, row, :, start : start + count] = store[:, row, :, source]
        self.lengths[row] += count

    def share(self, source: int, to: int, count: int) -> None:
        """Row `to` begins anew with a copy of the first `count` committed entries of row `source`."""
        for store in self._stores:
            store[:, to, :, :count] = store[:, source, :, :count]
        self.lengths[to] = count

    def move(self, source: int, to: int) -> None:
        """Make row `to` a copy of row `source`."""
        self.share(source, to, int(self.lengths[source]))

    def keys_values(self, layer: int, row: int) -> tuple[Tensor, Tensor]:
        """The committed keys and values [heads, committed, dim] of one row (for tests and inspection)."""
        keys, values = self._layers[layer]
        used = int(self.lengths[row])
        return keys[row, :, :used], values[row, :, :used]


class SlotView:
    """One forward's window on the cache; see `eyas.target.CacheView`."""

    def __init__(self, layers: list[tuple[Tensor, Tensor]], first: int, count: int, slots: Tensor, end: int) -> None:
        self._layers, self._first, self._count, self.end = layers, first, count, end
        self._slots = slots
        self._rows = torch.arange(first, first + count, device=slots.device)[:, None]  # [B, 1]
        # One row written without a gap (plain decoding, prefill, a tree at batch 1) is a plain slice.
        self._span = (end - slots.shape[1], end) if count == 1 else None

    def append(self, layer: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        for store, new in zip(self._layers[layer], (keys, values), strict=True):
            if self._span is not None:
                store[self._first, :, self._span[0] : self._span[1]] = new[0]
            else:
                store[self._rows, :, self._slots] = new.transpose(1, 2)  # [B, Q, heads, dim]
        stored_keys, stored_values = self._layers[layer]
        rows = slice(self._first, self._first + self._count)
        return stored_keys[rows, :, : self.end], stored_values[rows, :, : self.end]  # [B, heads, K, dim]


def committed_mask(lengths: Tensor, queries: int, keys: int) -> Tensor:
    """bool [B, queries, keys]: True where the key is one of the row's first `lengths[b]`; a fresh tensor."""
    committed = torch.arange(keys, device=lengths.device) < lengths[:, None]  # [B, K]
    return committed[:, None].repeat(1, queries, 1)
