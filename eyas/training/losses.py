"""Losses of the unroll: the head's distribution q over the draft vocabulary against the teacher's p.

The teacher is a list: the target's K most probable tokens with their probabilities in the whole vocabulary. Of the rest, the
*remainder*, only its mass is known. Two readings of p follow, and each loss says which it takes:

- p~ is p restricted to the listed tokens that can be drafted and renormalised: the remainder and what is outside the draft
  vocabulary are left out, as in the authors' code, whose list is the whole vocabulary;
- p as it is, for the losses that speak of acceptance: tokens outside the draft vocabulary are never drafted, and a draft from
  the remainder counts as rejected, so acceptance is bounded from below (exact when the list is the whole vocabulary).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Literal, NamedTuple, get_args

import torch
from torch import Tensor

from eyas.heads.head import DraftHead

LossName = Literal["soft_ce", "hard_ce", "forward_kl", "reverse_kl", "tv", "lk_alpha", "lk_lambda"]
FLOOR = 1e-8  # stands for a probability that half precision rounded to zero


class TeacherRows(NamedTuple):
    """Rows of the teacher, most probable token first: draft `ids` int64 [n, K] (0 where the token is outside the draft
    vocabulary), `inside` bool [n, K], `probs` float32 [n, K] (0 outside), and the mass `rest` [n] beyond the list."""

    ids: Tensor
    inside: Tensor
    probs: Tensor
    rest: Tensor

    @property
    def restricted(self) -> Tensor:
        """p~ [n, K]."""
        return self.probs / self.probs.sum(-1, keepdim=True).clamp(min=FLOOR)


class DraftTeacher:
    """The teacher's rows seen through the draft vocabulary of `head`: `teacher_ids` int64 [P, K] are the target's ids."""

    def __init__(self, head: DraftHead, teacher_ids: Tensor, teacher_probs: Tensor) -> None:
        to_draft = torch.full_like(head.t2d, -1, dtype=torch.long)  # [V]
        to_draft[head.draft_ids(head.d2t)] = torch.arange(len(head.d2t), device=head.d2t.device)
        ids = to_draft[teacher_ids]  # [P, K]
        inside = ids >= 0
        rest = (1 - teacher_probs.sum(-1)).clamp(min=0)  # [P]
        self._rows = TeacherRows(ids.clamp(min=0), inside, teacher_probs * inside, rest)

    def rows(self, which: Tensor) -> TeacherRows:
        """The rows `which` int64 [n]."""
        return TeacherRows(*(part[which] for part in self._rows))


Loss = Callable[[Tensor, TeacherRows], Tensor]  # (logits [n, D], rows) -> [n]


def soft_cross_entropy(logits: Tensor, teacher: TeacherRows) -> Tensor:
    """-sum p~ log q: the loss of the authors' code."""
    return -(teacher.restricted * _log_q(logits, teacher)).sum(-1)


def hard_cross_entropy(logits: Tensor, teacher: TeacherRows) -> Tensor:
    """-log q of the teacher's best token (which the loss mask has in the draft vocabulary)."""
    return -_log_q(logits, teacher)[:, 0]


def forward_kl(logits: Tensor, teacher: TeacherRows) -> Tensor:
    """KL(p~ || q): the soft cross-entropy less the teacher's own entropy, so the gradient is the same and the optimum is 0."""
    wanted = teacher.restricted
    return (wanted * (wanted.clamp(min=FLOOR).log() - _log_q(logits, teacher))).sum(-1)


def reverse_kl(logits: Tensor, teacher: TeacherRows) -> Tensor:
    """KL(q || p), with the remainder and the draft tokens beyond the list as one outcome each other's counterpart.

    What lies outside the draft vocabulary is left out and the rest renormalised. A bound from below: merging outcomes never
    raises a divergence.
    """
    log_q = _log_q(logits, teacher)
    q = log_q.exp() * teacher.inside  # [n, K]
    draftable = (teacher.probs.sum(-1) + teacher.rest).clamp(min=FLOOR)  # [n]
    log_p = (teacher.probs / draftable[:, None]).clamp(min=FLOOR).log()
    q_rest = (1 - q.sum(-1)).clamp(min=FLOOR)
    log_p_rest = (teacher.rest / draftable).clamp(min=FLOOR).log()
    return (q * (log_q - log_p)).sum(-1) + q_rest * (q_rest.log() - log_p_rest)


def acceptance_rate(logits: Tensor, teacher: TeacherRows) -> Tensor:
    """sum min(p, q): how often a draft drawn from q is accepted by rejection sampling (Leviathan et al.)."""
    q = _log_q(logits, teacher).exp() * teacher.inside
    return torch.minimum(teacher.probs, q).sum(-1)


def total_variation(logits: Tensor, teacher: TeacherRows) -> Tensor:
    """1 - sum min(p, q), the rate of rejection."""
    return 1 - acceptance_rate(logits, teacher)


def lk_alpha(logits: Tensor, teacher: TeacherRows) -> Tensor:
    """-log sum min(p, q) (arXiv 2602.23881): the total variation with its gradient scaled up where little is accepted."""
    return -acceptance_rate(logits, teacher).clamp(min=FLOOR).log()


def lk_lambda(logits: Tensor, teacher: TeacherRows, *, decay: float) -> Tensor:
    """w KL(p~ || q) + (1 - w) TV(p, q), w = exp(-decay * acceptance), not differentiated (arXiv 2602.23881).

    w is taken per position, so that the loss does not depend on how the texts are batched; the authors' code takes that of
    the batch's mean acceptance.
    """
    variation = total_variation(logits, teacher)
    weight = torch.exp(-decay * (1 - variation.detach()))
    return weight * forward_kl(logits, teacher) + (1 - weight) * variation


_LOSSES: dict[str, Loss] = {
    "soft_ce": soft_cross_entropy,
    "hard_ce": hard_cross_entropy,
    "forward_kl": forward_kl,
    "reverse_kl": reverse_kl,
    "tv": total_variation,
    "lk_alpha": lk_alpha,
}


def loss_function(name: LossName, *, lk_decay: float) -> Loss:
    """The loss called `name`, per position and in float32."""
    assert name in get_args(LossName)
    return partial(lk_lambda, decay=lk_decay) if name == "lk_lambda" else _LOSSES[name]


def _log_q(logits: Tensor, teacher: TeacherRows) -> Tensor:
    """log q [n, K] of the listed tokens; meaningless where they are outside the draft vocabulary."""
    logits = logits.float()
    return logits.gather(-1, teacher.ids) - logits.logsumexp(-1, keepdim=True)
