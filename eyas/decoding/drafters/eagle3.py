"""Drafters propose; they know nothing of sampling. Each returns logits over its own vocabulary and decoding ranks them."""

from __future__ import annotations

import copy
from typing import Protocol

import torch
from torch import Tensor

from eyas.decoding.cache import KVCache, SlotView, committed_mask
from eyas.errors import EyasError
from eyas.heads.eagle3 import Eagle3Head
from eyas.kernels.attention import attend
from eyas.kernels.packed import Weights, pack_linears
from eyas.target import LayerShape, Target


class Drafter(Protocol):
    """What the engine asks of a drafter. Rows 0..B-1 are active; the engine moves rows when one leaves."""

    target_ids: Tensor  # int64 [D]: the target's id of every draft id

    def allocate(self, rows: int, length: int, scratch: int) -> int:
        """Make room for `rows` texts of `length` tokens and `scratch` tree nodes per row; return the bytes it takes."""

    def share(self, source: int, to: int, count: int) -> None:
        """Begin a text in row `to` with the first `count` positions of row `source`, whose tokens are the same."""

    def prefill(self, row: int, tokens: Tensor, taps: Tensor) -> None:
        """Go on with the prompt in `row`: `tokens` int64 [M] follow the positions whose `taps` [M, 3H] are given."""

    def extend(self, tokens: Tensor, taps: Tensor, counts: Tensor) -> Tensor:
        """Read what was committed: of `tokens` [B, M] and true `taps` [B, M, 3H] the first `counts[b]` >= 1 are valid.

        Returns logits [B, D] for the token after the last committed one. Forgets everything speculative.
        """

    def expand(self, tokens: Tensor, parents: Tensor) -> Tensor:
        """Read one level of the tree: `tokens` [B, k] under the places `parents` [B, k] of the level before it.

        The first level's parent is the state that `extend` left. Returns logits [B, k, D].
        """

    def move(self, source: int, to: int) -> None:
        """Row `to` becomes a copy of row `source`."""


class Eagle3Drafter:
    """An EAGLE-3 head with its KV cache, for a batch of rows.

    Slot t of the head pairs the target's tap at position t with token t + 1. Committed slots hold true taps only: what the
    head wrote for its own guesses lies behind them and is overwritten by the next round (without the re-feed 8-15 % of tau
    is lost).
    """

    def __init__(self, target: Target, head: Eagle3Head, *, weights: Weights = "stock") -> None:
        head.config.check_target(target)
        self._weights = weights
        if weights != "stock":  # in a copy: the caller's head can still be trained and saved
            head = copy.deepcopy(head, {id(head.embedding): head.embedding})
            pack_linears(head, weights)
        self.head = head.eval()
        self.target_ids = head.draft_ids(head.d2t)
        config = head.config
        self._shape = LayerShape(config.num_key_value_heads, config.head_dim, config.head_dim)
        self._scale = config.head_dim**-0.5
        self._cache: KVCache | None = None

    @property
    def cache(self) -> KVCache:
        if self._cache is None:
            raise EyasError("the drafter has no cache yet; give it to an Engine first")
        return self._cache

    def allocate(self, rows: int, length: int, scratch: int) -> int:
        weight = self.head.norm.weight
        shapes = [self._shape] * self.head.config.num_layers
        self._cache = KVCache(shapes, rows, length + scratch, dtype=weight.dtype, device=weight.device)
        return KVCache.bytes_needed(shapes, rows, length + scratch, weight.dtype)

    def __repr__(self) -> str:
        return f"Eagle3Drafter({self.head.config!r}, {self._weights}, {self.head.norm.weight.dtype})"

    def share(self, source: int, to: int, count: int) -> None:
        self.cache.share(source, to, count)

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
        self._level = 0
        return self.head.logits(last)

    @torch.inference_mode()
    def expand(self, tokens: Tensor, parents: Tensor) -> Tensor:
        rows, k = tokens.shape
        states = self._states.gather(1, parents[..., None].expand(-1, -1, self._states.shape[-1]))  # [B, k, h]
        used = self._seen.shape[-1]
        inherited = self._seen.gather(1, parents[..., None].expand(-1, -1, used))  # [B, k, scratch]
        own = torch.eye(k, dtype=torch.bool, device=tokens.device).expand(rows, k, k)
        self._seen = torch.cat([inherited, own], -1)  # [B, k, scratch + k]
        lengths = self.cache.lengths[:rows].to(tokens.device)  # [B]
        slots = lengths[:, None] + used + torch.arange(k, device=tokens.device)  # [B, k]
        positions = (lengths[:, None] + self._level).expand(rows, k)  # slot t of step i stands at position t + i
        view = self.cache.view(0, rows, slots)
        mask = committed_mask(lengths, k, view.end)  # [B, k, K]
        place = lengths[:, None] + torch.arange(used + k, device=tokens.device)  # [B, scratch]
        mask.scatter_(2, place[:, None].expand(rows, k, used + k), self._seen)
        self._level += 1
        self._states = self._step(states, tokens, positions, view, mask)
        return self.head.logits(self._states)

    def move(self, source: int, to: int) -> None:
        self.cache.move(source, to)

    def _read(self, first: int, tokens: Tensor, taps: Tensor) -> Tensor:
        """Step 0 over `tokens` [B, M] with true taps, behind the committed slots of rows first..first+B."""
        rows, count = tokens.shape
        lengths = self.cache.lengths[first : first + rows].to(tokens.device)
        slots = lengths[:, None] + torch.arange(count, device=tokens.device)  # [B, M]
        view = self.cache.view(first, rows, slots)
        mask = torch.arange(view.end, device=tokens.device) <= slots[..., None]  # [B, M, K]
        return self._step(self.head.fuse(taps.to(self.head.norm.weight.dtype)), tokens, slots, view, mask)

    def _step(self, states: Tensor, tokens: Tensor, positions: Tensor, view: SlotView, mask: Tensor) -> Tensor:
        """One pass of the head's layers: states [B, Q, h] -> [B, Q, h]; `mask` bool [B, Q, K]."""
        head = self.head
        for layer in range(head.config.num_layers):
            x = head.read(layer, states, tokens)  # [B, Q, 2h], later [B, Q, h]
            keys, values = head.keys_values(layer, x, positions)
            keys, values = view.append(layer, keys.transpose(1, 2), values.transpose(1, 2))
            queries = head.queries(layer, x, positions).transpose(1, 2)  # [B, heads, Q, head_dim]
            states = head.finish(layer, states, attend(queries, keys, values, mask[:, None], self._scale))
        return head.hand_on(states)
