"""Acceptance measured on given texts without decoding them: what a chain of drafts would have got right.

The unroll on a text equals drafting a chain from every position of it, so comparing its best tokens with the text's own
gives n-alpha of a greedy chain on text that the target wrote greedily.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from operator import mul
from typing import NamedTuple

import torch
from torch import Tensor

from eyas.data.batches import Batch
from eyas.heads.head import DraftHead
from eyas.training.unroll import Step, predictions


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
        """Estimated tokens per round of a greedy chain as deep as the unroll."""
        return chain_tau(self.n_alpha)


def chain_tau(n_alpha: Sequence[float]) -> float:
    """Tokens per round of a greedy chain with these rates: 1 + the products of n-alpha."""
    return 1.0 + sum(accumulate(n_alpha, mul))


class Judged(NamedTuple):
    """One step of the unroll held against the text: `alive` and `right` bool [n] over the step's slots say whether all earlier
    steps of the slot's chain were right, and whether this one is."""

    step: Step
    alive: Tensor
    right: Tensor


def judge(head: DraftHead, batch: Batch, steps: int, target_ids: Tensor) -> Iterator[Judged]:
    """What a chain of `steps` drafts from every position of `batch` says, held against the tokens that follow there.

    `target_ids` int64 [D] are the target's ids of the draft ids.
    """
    everything = torch.ones_like(head.t2d)  # also where the teacher's token is outside the draft vocabulary: a miss
    masks = torch.stack([batch.carries_loss(i, everything) for i in range(steps)])
    alive = torch.ones_like(batch.place, dtype=torch.bool)  # [T]
    for step in predictions(head, batch, masks):
        still = alive[step.slots]  # [n]
        right = target_ids[step.logits.argmax(-1)] == batch.tokens[step.token_index]  # [n]
        yield Judged(step, still, right)
        alive[step.slots] = still & right


@torch.no_grad()
def measure(head: DraftHead, batches: Iterable[Batch], steps: int) -> Acceptance:
    """n-alpha of depths 1..`steps` over `batches`, at every position whose next token the target wrote."""
    offered, accepted = [0] * steps, [0] * steps
    target_ids = head.draft_ids(head.d2t)
    for batch in batches:
        for i, judged in enumerate(judge(head, batch, steps, target_ids)):
            offered[i] += int(judged.alive.sum())
            accepted[i] += int((judged.alive & judged.right).sum())
    return Acceptance(tuple(offered), tuple(accepted))
