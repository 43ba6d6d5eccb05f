"""A drafter joined with prompt look-up in one tree: where the text repeats itself, what followed before has its say.

The two are mixed into one distribution, q = (1 - w) q_drafter + w q_look-up, w being how often such a match was right in
this text, so one tree holds the candidates of both, none of them twice, and every sampling rule stays lossless.
"""

from __future__ import annotations

import torch
from torch import Tensor

from eyas.decoding.drafters.drafter import Drafter
from eyas.decoding.drafters.lookup import Found, LookupDrafter
from eyas.target import Target


class JoinedDrafter:
    """`drafter` with look-up, over the target's whole vocabulary."""

    def __init__(self, target: Target, drafter: Drafter) -> None:
        self.drafter, self.lookup = drafter, LookupDrafter(target)
        self.target_ids, self.depth = self.lookup.target_ids, drafter.depth

    def __repr__(self) -> str:
        return f"JoinedDrafter({self.drafter!r}, {self.lookup!r})"

    def allocate(self, rows: int, length: int, scratch: int) -> int:
        return self.drafter.allocate(rows, length, scratch) + self.lookup.allocate(rows, length, scratch)

    def begin(self, row: int, first: int, source: int, count: int) -> None:
        self.drafter.begin(row, first, source, count)
        self.lookup.begin(row, first, source, count)

    def prefill(self, row: int, tokens: Tensor, taps: Tensor) -> None:
        self.drafter.prefill(row, tokens, taps)
        self.lookup.prefill(row, tokens, taps)

    def extend(self, tokens: Tensor, taps: Tensor, counts: Tensor) -> Tensor:
        own = self.drafter.extend(tokens, taps, counts)[:, None]  # [B, 1, D]
        return self._mixed(own, self.lookup.found(tokens, counts))[:, 0]

    def expand(self, tokens: Tensor, parents: Tensor) -> Tensor:
        return self._mixed(self.drafter.expand(tokens, parents), self.lookup.found_below(tokens, parents))

    def move(self, source: int, to: int) -> None:
        self.drafter.move(source, to)
        self.lookup.move(source, to)

    def _mixed(self, own: Tensor, found: list[list[Found | None]]) -> Tensor:
        """log q [B, k, V] from the drafter's logits `own` [B, k, D] and what look-up `found`."""
        weights = [[self.lookup.confidence(row, f) if f else 0.0 for f in line] for row, line in enumerate(found)]
        w = torch.tensor(weights, device=own.device)[..., None]  # [B, k, 1]
        mixed = self.lookup.shares(found) * w  # [B, k, V]
        ids = self.drafter.target_ids.expand(*own.shape[:2], -1)  # [B, k, D]
        mixed.scatter_add_(2, ids, own.float().softmax(-1) * (1 - w))
        return mixed.log()
