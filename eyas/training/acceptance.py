"""Acceptance measured on given texts without decoding them: what a chain of drafts would have got right.

The unroll on a text equals drafting a chain from every position of it, so comparing its best tokens with the text's own
gives n-alpha of a greedy chain on text that the target wrote greedily.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch

from eyas.data.batches import Batch
from eyas.heads.eagle3 import Eagle3Head
from eyas.training.unroll import unroll


@dataclass(frozen=True)
class Acceptance:
    """`offered[n]` drafts at depth n + 1 whose earlier depths were right, `accepted[n]` of them right themselves."""

    offered: tuple[int, ...]
    accepted: tuple[int, ...]

    @property
    def n_alpha(self) -> list[float]:
        return [a / o if o else 0.0 for a, o in zip(self.accepted, self.offered, strict=True)]

    @property
    def tau(self) -> float:
        """Estimated tokens per round of a greedy chain as deep as the unroll: 1 + the products of n-alpha."""
        tau, joint = 1.0, 1.0
        for rate in self.n_alpha:
            joint *= rate
            tau += joint
        return tau


@torch.no_grad()
def measure(head: Eagle3Head, batches: Iterable[Batch], steps: int) -> Acceptance:
    """n-alpha of depths 1..`steps` over `batches`, at every position whose next token the target wrote."""
    offered, accepted = [0] * steps, [0] * steps
    everything = torch.ones_like(head.t2d)  # also where the teacher's token is outside the draft vocabulary: a miss
    target_ids = head.draft_ids(head.d2t)
    for batch in batches:
        masks = torch.stack([batch.carries_loss(i, everything) for i in range(steps)])
        alive = torch.ones_like(batch.place, dtype=torch.bool)  # [T]
        for i, step in enumerate(unroll(head, batch, masks)):
            still = alive[step.slots]
            right = target_ids[step.logits.argmax(-1)] == batch.tokens[step.token_index]  # [n]
            offered[i] += int(still.sum())
            accepted[i] += int((still & right).sum())
            alive[step.slots] = still & right
    return Acceptance(tuple(offered), tuple(accepted))
