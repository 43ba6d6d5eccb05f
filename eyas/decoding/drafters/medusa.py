"""Medusa heads as a drafter: every level of the tree has its own head, which knows nothing of the levels above."""

from __future__ import annotations

import torch
from torch import Tensor

from eyas.heads.medusa import MedusaHead
from eyas.kernels.packed import Weights
from eyas.target import Target


class MedusaDrafter:
    """Medusa heads for a batch of rows: no cache, no step; level n of a tree is head n's reading of the last true state."""

    def __init__(self, target: Target, head: MedusaHead, *, weights: Weights = "stock") -> None:
        head.config.check_target(target)
        self._weights, self._dtype = weights, next(head.parameters()).dtype
        self.head = head.packed(weights).eval()
        self.target_ids = head.draft_ids(head.d2t)
        self.depth: int | None = head.config.num_heads

    def __repr__(self) -> str:
        return f"MedusaDrafter({self.head.config!r}, {self._weights}, {self._dtype})"

    def allocate(self, rows: int, length: int, scratch: int) -> int:
        return 0

    def begin(self, row: int, first: int, source: int, count: int) -> None:
        pass

    def prefill(self, row: int, tokens: Tensor, taps: Tensor) -> None:
        pass

    @torch.inference_mode()
    def extend(self, tokens: Tensor, taps: Tensor, counts: Tensor) -> Tensor:
        self._features = taps[torch.arange(len(counts)), counts - 1].to(self._dtype)  # [B, H]
        self._level = 0
        return self.head.logits(0, self._features)

    @torch.inference_mode()
    def expand(self, tokens: Tensor, parents: Tensor) -> Tensor:
        self._level += 1
        logits = self.head.logits(self._level, self._features)  # [B, D]
        return logits[:, None].expand(-1, tokens.shape[1], -1)

    def move(self, source: int, to: int) -> None:
        pass
