"""Losses of the unroll: token prediction only (EAGLE-3 has no feature regression)."""

from __future__ import annotations

import torch
from torch import Tensor

from eyas.heads.eagle3 import Eagle3Head


class DraftTeacher:
    """The teacher's rows seen through the draft vocabulary.

    `ids` int64 [P, K] are draft ids (0 where the token is outside), `probs` float32 [P, K] the target's probabilities with
    what is outside set to zero, not renormalised.
    """

    def __init__(self, head: Eagle3Head, teacher_ids: Tensor, teacher_probs: Tensor) -> None:
        to_draft = torch.full_like(head.t2d, -1, dtype=torch.long)  # [V]
        to_draft[head.draft_ids(head.d2t)] = torch.arange(len(head.d2t), device=head.d2t.device)
        ids = to_draft[teacher_ids]  # [P, K]
        self.ids = ids.clamp(min=0)
        self.probs = teacher_probs * (ids >= 0)


def soft_cross_entropy(logits: Tensor, ids: Tensor, probs: Tensor) -> Tensor:
    """[n]: cross-entropy of `logits` [n, D] against the teacher restricted to the draft vocabulary and renormalised.

    `ids` int64 [n, K] draft ids and `probs` float32 [n, K]. The loss of the authors' code.
    """
    wanted = probs / probs.sum(-1, keepdim=True).clamp(min=1e-9)  # [n, K]
    chosen = logits.gather(-1, ids)  # [n, K]
    return logits.logsumexp(-1) - (wanted * chosen).sum(-1)
