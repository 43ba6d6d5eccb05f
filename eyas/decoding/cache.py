"""The KV cache: rows are slots of one preallocated store, each with its own length.

A row's first `lengths[r]` entries are committed; a forward writes what it reads behind them, and what is not committed
afterwards is simply written over. Accepting a draft moves its path to the front of that space.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

import torch
from torch import Tensor

from eyas.kernels.slots import write_slots
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
        self._stores: list[Tensor] = []  # keys and values in turns, each [layers of one shape, rows, heads, length, dim]
        for shape, group in groupby(shapes):
            count = len(list(group))
            for dim in (shape.key_dim, shape.value_dim):
                self._stores.append(torch.zeros(count, rows, shape.heads, length, dim, dtype=dtype, device=device))

    @staticmethod
    def bytes_needed(shapes: Sequence[LayerShape], rows: int, length: int, dtype: torch.dtype) -> int:
        """Memory in bytes of a cache, before it is made."""
        per_token = sum(s.heads * (s.key_dim + s.value_dim) for s in shapes)
        return per_token * rows * length * dtype.itemsize

    def view(self, first: int, count: int, slots: Tensor) -> SlotView:
        """The rows first..first+count as a forward sees them: query i of row r is stored at `slots` int64 [count, Q]."""
        return SlotView(self._layers(first, count, int(slots.max()) + 1), slots.to(self.device))

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
        keys, values = self._layers(row, 1, int(self.lengths[row]))[layer]
        return keys[0], values[0]

    def _layers(self, first: int, count: int, end: int) -> list[tuple[Tensor, Tensor]]:
        """Per layer the keys and values [count, heads, end, dim] of some rows."""
        windows = [store[:, first : first + count, :, :end].unbind() for store in self._stores]
        pairs = zip(windows[::2], windows[1::2], strict=True)
        return [layer for keys, values in pairs for layer in zip(keys, values, strict=True)]


class SlotView:
    """One forward's window on the cache; see `eyas.target.CacheView`."""

    def __init__(self, layers: list[tuple[Tensor, Tensor]], slots: Tensor) -> None:
        self._layers, self._slots = layers, slots  # per layer keys and values [B, heads, K, dim]

    @property
    def end(self) -> int:
        """K, the number of keys that a query may look at."""
        return self._layers[0][0].shape[2]

    def append(self, layer: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        stored = self._layers[layer]
        write_slots(*stored, keys, values, self._slots)
        return stored

    def window(self, layer: int) -> tuple[Tensor, Tensor, Tensor]:
        return *self._layers[layer], self._slots


def committed_mask(lengths: Tensor, queries: int, keys: int) -> Tensor:
    """bool [B, queries, keys]: True where the key is one of the row's first `lengths[b]`; a fresh tensor."""
    committed = torch.arange(keys, device=lengths.device) < lengths[:, None]  # [B, K]
    return committed[:, None].repeat(1, queries, 1)
