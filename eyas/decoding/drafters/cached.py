"""Drafters that keep keys and values: which entries a node of the tree may look at, whatever network reads them.

Committed entries come from committed tokens and true taps only. What a drafter wrote for its own guesses lies behind them
and is written over by the next round (without the re-feed 8-15 % of tau is lost).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch
from torch import Tensor

from eyas.decoding.cache import KVCache, SlotView, committed_mask
from eyas.errors import EyasError
from eyas.target import LayerShape


class CachedDrafter(ABC):
    """The bookkeeping of a drafter whose layers keep `shapes`; a kind of drafter says how it computes one pass."""

    target_ids: Tensor
    depth: int | None = None

    def __init__(self, shapes: Sequence[LayerShape], dtype: torch.dtype, device: torch.device) -> None:
        self._shapes, self._dtype, self._device = shapes, dtype, device
        self._cache: KVCache | None = None
        self._levels: list[int] = []  # of the scratch so far

    @property
    def cache(self) -> KVCache:
        if self._cache is None:
            raise EyasError("the drafter has no cache yet; give it to an Engine first")
        return self._cache

    def allocate(self, rows: int, length: int, scratch: int) -> int:
        self._cache = KVCache(self._shapes, rows, length + scratch, dtype=self._dtype, device=self._device)
        return KVCache.bytes_needed(self._shapes, rows, length + scratch, self._dtype)

    def begin(self, row: int, first: int, source: int, count: int) -> None:
        self.cache.share(source, row, count)

    @torch.inference_mode()
    def prefill(self, row: int, tokens: Tensor, taps: Tensor) -> None:
        if len(tokens):
            self._read(row, tokens[None], taps[None])
            self.cache.lengths[row] += len(tokens)

    @torch.inference_mode()
    def extend(self, tokens: Tensor, taps: Tensor, counts: Tensor) -> Tensor:
        rows = tokens.shape[0]
        states = self._read(0, tokens, taps)  # [B, M, h]
        self.cache.lengths[:rows] += counts
        last = states[torch.arange(rows), counts - 1]  # [B, h]
        self._states = last[:, None]  # [B, 1, h]
        self._seen = torch.zeros(rows, 1, 0, dtype=torch.bool, device=states.device)  # [B, 1, scratch so far]
        return self._logits(last)

    @torch.inference_mode()
    def expand(self, tokens: Tensor, parents: Tensor) -> Tensor:
        rows, k = tokens.shape
        states = self._states.gather(1, parents[..., None].expand(-1, -1, self._states.shape[-1]))  # [B, k, h]
        used = self._seen.shape[-1]
        inherited = self._seen.gather(1, parents[..., None].expand(-1, -1, used))  # [B, k, scratch]
        own = torch.eye(k, dtype=torch.bool, device=tokens.device).expand(rows, k, k)
        self._seen = torch.cat([inherited, own], -1)  # [B, k, scratch + k]
        level = self._levels[-1] + 1 if self._levels else 0
        self._levels = [*self._levels, *[level] * k]
        lengths = self.cache.lengths[:rows].to(tokens.device)  # [B]
        slots = lengths[:, None] + used + torch.arange(k, device=tokens.device)  # [B, k]
        positions = (lengths[:, None] + level).expand(rows, k)  # slot t of step i stands at position t + i
        view = self.cache.view(0, rows, slots)
        mask = committed_mask(lengths, k, view.end)  # [B, k, K]
        place = lengths[:, None] + torch.arange(used + k, device=tokens.device)  # [B, scratch]
        mask.scatter_(2, place[:, None].expand(rows, k, used + k), self._seen)
        self._states = self._step(states, tokens, positions, view, mask)
        return self._logits(self._states)

    def move(self, source: int, to: int) -> None:
        self.cache.move(source, to)

    def _read(self, first: int, tokens: Tensor, taps: Tensor) -> Tensor:
        """The pass over `tokens` [B, M] with true taps, behind the committed entries of rows first..first+B."""
        rows, count = tokens.shape
        lengths = self.cache.lengths[first : first + rows].to(tokens.device)
        slots = lengths[:, None] + torch.arange(count, device=tokens.device)  # [B, M]
        view = self.cache.view(first, rows, slots)
        mask = torch.arange(view.end, device=tokens.device) <= slots[..., None]  # [B, M, K]
        self._levels = []
        return self._step(self._fuse(taps), tokens, slots, view, mask)

    def _key_positions(self, rows: int, count: int) -> Tensor:
        """The positions int64 [rows, count] of the first `count` entries: committed ones, then the tree's by their levels."""
        found = torch.arange(count, device=self._device).repeat(rows, 1)  # [B, K]
        if self._levels:
            lengths = self.cache.lengths[:rows, None].to(self._device)  # [B, 1]
            place = lengths + torch.arange(len(self._levels), device=self._device)  # [B, scratch]
            found.scatter_(1, place, lengths + torch.tensor(self._levels, device=self._device))
        return found

    # -- what a kind of drafter says ----------------------------------------------------------------------------------

    @abstractmethod
    def _fuse(self, taps: Tensor) -> Tensor:
        """The states [B, M, h] that true taps [B, M, nH] stand for."""

    @abstractmethod
    def _step(self, states: Tensor, tokens: Tensor, positions: Tensor, view: SlotView, mask: Tensor) -> Tensor:
        """One pass: states [B, Q, h] beside `tokens` [B, Q] at `positions` [B, Q] -> states [B, Q, h].

        `mask` bool [B, Q, K] is True where a query may look.
        """

    @abstractmethod
    def _logits(self, states: Tensor) -> Tensor:
        """Draft logits [..., D] of states [..., h]."""
