"""One trial: a reading of the head held against the evidence, and whether another reading does better beyond noise."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from eyas.data.batches import Batch
from eyas.doctor.evidence import Evidence
from eyas.doctor.readings import Reading
from eyas.target import Target
from eyas.training.acceptance import Acceptance, judge
from eyas.training.unroll import Step

DEPTHS = 3
SURE = 5.0  # standard errors that a gain must exceed; some twenty readings are tried, and neighbouring tokens are akin
WORTH = 0.005  # share of the overlap that must be gained: less is a matter of training, not of loading
LEAST = 0.002  # and at least this much: a head that drafts nothing gains from any change


@dataclass(frozen=True)
class Trial:
    """`overlap` float32 [N] is, for each token of the evidence that was drafted, the mean over depths of sum(min(p, q)): the
    chance that a draft from the head's distribution q is accepted under the target's p (Leviathan et al., arXiv 2211.17192).
    It tells readings apart on far less text than counts of accepted tokens. `drafted` int64 are the draft ids of depth 1."""

    acceptance: Acceptance
    overlap: Tensor
    drafted: Tensor

    @property
    def mean_overlap(self) -> float:
        return float(self.overlap.mean())

    def beats(self, other: Trial) -> bool:
        """Whether this trial's overlap is above `other`'s beyond noise and by enough to matter (paired by token)."""
        gain = self.overlap - other.overlap  # [N]
        error = float(gain.std()) / len(gain) ** 0.5
        return float(gain.mean()) > max(WORTH * other.mean_overlap, LEAST, SURE * error)


@torch.no_grad()
def run_trial(reading: Reading, evidence: Evidence, target: Target) -> Trial:
    """Draft a chain of DEPTHS tokens at every position of the evidence with the head as `reading` has it."""
    head = reading.head(target)
    batch = evidence.with_taps(reading.config.tap_ids)
    ids = reading.target_ids.to(target.device)
    draft_ids = inverse(ids, target.vocab_size)  # [V]
    offered, accepted, drafted = [0] * DEPTHS, [0] * DEPTHS, ids[:0]
    total = torch.zeros(len(batch.tokens), device=target.device)  # [N]
    count = torch.zeros_like(total)
    for depth, judged in enumerate(judge(head, batch, DEPTHS, ids)):
        offered[depth] = int(judged.alive.sum())
        accepted[depth] = int((judged.alive & judged.right).sum())
        if not depth:
            drafted = judged.step.logits.argmax(-1)  # [n]
        total.index_add_(0, judged.step.token_index, _overlap(judged.step, batch, draft_ids))
        count.index_add_(0, judged.step.token_index, torch.ones_like(judged.right, dtype=total.dtype))
    return Trial(Acceptance(tuple(offered), tuple(accepted)), (total / count.clamp(min=1))[count > 0], drafted)


def spelt(n_alpha: Sequence[float]) -> str:
    """n-alpha by depth, for people."""
    return " ".join(f"{rate:.2f}" for rate in n_alpha)


def inverse(target_ids: Tensor, vocab_size: int) -> Tensor:
    """The draft id int64 [V] of every target id, -1 where it has none; ids out of range are passed over."""
    places = torch.full((vocab_size,), -1, device=target_ids.device)
    inside = (target_ids >= 0) & (target_ids < vocab_size)
    places[target_ids[inside]] = torch.arange(len(target_ids), device=target_ids.device)[inside]
    return places


def _overlap(step: Step, batch: Batch, draft_ids: Tensor) -> Tensor:
    """sum(min(p, q)) [n] over the teacher's tokens; what the head cannot draft counts nothing."""
    places = draft_ids[batch.teacher_ids[step.teacher_row]]  # [n, K]
    q = step.logits.softmax(-1).gather(1, places.clamp(min=0)) * (places >= 0)  # [n, K]
    return torch.minimum(q, batch.teacher_probs[step.teacher_row]).sum(-1)
