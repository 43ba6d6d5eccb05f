"""Every loss against its definition written out over the whole vocabulary, with a whole and with a truncated teacher."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from eyas.heads.eagle3 import Eagle3Head
from eyas.training.losses import DraftTeacher, TeacherRows, acceptance_rate, loss_function
from tests.test_unroll import random_head
from tests.tiny import VOCAB, tiny_target

ROWS, DRAFT = 9, 70
ETA = 3.0


def case(top_k: int) -> tuple[Tensor, TeacherRows, Tensor, Tensor, Tensor]:
    """(logits [n, D], the teacher's rows, the target's p [n, V], the listed tokens bool [n, V], q scattered to V [n, V])."""
    head = random_head(tiny_target("llama"), draft_vocab=DRAFT)
    generator = torch.Generator().manual_seed(7)
    p = (torch.randn(ROWS, VOCAB, generator=generator) * 2).softmax(-1)
    drafted = head.draft_ids(head.d2t)
    best = drafted[torch.randint(DRAFT, (ROWS,), generator=generator)]
    p[torch.arange(ROWS), best] += 1  # as in training, the best token can be drafted
    p /= p.sum(-1, keepdim=True)
    probs, ids = p.topk(top_k)
    logits = torch.randn(ROWS, DRAFT, generator=generator).requires_grad_()
    q = torch.zeros(ROWS, VOCAB).scatter(1, drafted.expand(ROWS, DRAFT), logits.detach().softmax(-1))
    listed = torch.zeros(ROWS, VOCAB, dtype=torch.bool).scatter(1, ids, True)
    return logits, DraftTeacher(head, ids, probs).rows(torch.arange(ROWS)), p, listed, q


def draftable() -> Tensor:
    return random_head(tiny_target("llama"), draft_vocab=DRAFT).t2d


def restricted(p: Tensor, listed: Tensor) -> Tensor:
    kept = p * listed * draftable()
    return kept / kept.sum(-1, keepdim=True)


def ce(p: Tensor, q: Tensor) -> Tensor:
    return -(p * q.clamp(min=1e-30).log()).sum(-1)


def kl(p: Tensor, q: Tensor) -> Tensor:
    return (p * (p.clamp(min=1e-30) / q.clamp(min=1e-30)).log()).sum(-1)


def overlap(p: Tensor, q: Tensor, listed: Tensor) -> Tensor:
    return torch.minimum(p * listed, q).sum(-1)


def merged_reverse_kl(p: Tensor, q: Tensor, listed: Tensor) -> Tensor:
    """KL(q || p) over the listed draftable tokens and one outcome for all else that may be drafted."""
    seen = listed & draftable()
    out = []
    for i in range(len(p)):
        outside = float(p[i][listed[i] & ~draftable()].sum())
        p_seen = p[i][seen[i]] / (1 - outside)
        q_seen = q[i][seen[i]]
        p_all = torch.cat([p_seen, (1 - p_seen.sum()).clamp(min=1e-8)[None]])
        q_all = torch.cat([q_seen, (1 - q_seen.sum()).clamp(min=1e-8)[None]])
        out.append((q_all * (q_all / p_all).log()).sum())
    return torch.stack(out)


def hybrid(p: Tensor, q: Tensor, listed: Tensor) -> Tensor:
    alpha = overlap(p, q, listed)
    weight = (-ETA * alpha).exp()
    return weight * kl(restricted(p, listed), q) + (1 - weight) * (1 - alpha)


REFERENCES: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "soft_ce": lambda p, q, listed: ce(restricted(p, listed), q),
    "hard_ce": lambda p, q, listed: -q[torch.arange(len(p)), p.argmax(-1)].log(),
    "forward_kl": lambda p, q, listed: kl(restricted(p, listed), q),
    "reverse_kl": merged_reverse_kl,
    "tv": lambda p, q, listed: 1 - overlap(p, q, listed),
    "lk_alpha": lambda p, q, listed: -overlap(p, q, listed).log(),
    "lk_lambda": hybrid,
}


@pytest.mark.parametrize("top_k", [VOCAB, 12])
@pytest.mark.parametrize("name", REFERENCES)
def test_a_loss_is_its_definition(name: str, top_k: int) -> None:
    logits, teacher, p, listed, q = case(top_k)
    got = loss_function(name, lk_decay=ETA)(logits, teacher)  # type: ignore[arg-type]
    assert torch.allclose(got, REFERENCES[name](p, q, listed), atol=2e-5)
    got.sum().backward()
    assert logits.grad is not None and bool(logits.grad.isfinite().all()) and bool(logits.grad.any())


def test_with_the_whole_teacher_the_distances_are_the_exact_ones() -> None:
    logits, teacher, p, _, q = case(VOCAB)
    assert torch.allclose(loss_function("tv", lk_decay=ETA)(logits, teacher), (p - q).abs().sum(-1) / 2, atol=1e-5)
    whole = restricted(p, torch.ones_like(p, dtype=torch.bool))
    assert torch.allclose(loss_function("reverse_kl", lk_decay=ETA)(logits, teacher), kl(q, whole), atol=2e-5)


def test_a_truncated_teacher_bounds_acceptance_and_divergence_from_the_careful_side() -> None:
    logits, whole, *_ = case(VOCAB)
    _, cut, *_ = case(12)
    assert bool((acceptance_rate(logits, cut) <= acceptance_rate(logits, whole) + 1e-6).all())
    reverse = loss_function("reverse_kl", lk_decay=ETA)
    assert bool((reverse(logits, cut) >= -1e-6).all())


def test_kl_has_the_gradient_of_cross_entropy_and_its_optimum_at_zero() -> None:
    logits, teacher, *_ = case(12)
    first = torch.autograd.grad(loss_function("soft_ce", lk_decay=ETA)(logits, teacher).sum(), logits)[0]
    second = torch.autograd.grad(loss_function("forward_kl", lk_decay=ETA)(logits, teacher).sum(), logits)[0]
    assert torch.allclose(first, second, atol=1e-6)
    reached = torch.zeros_like(logits).scatter_add(1, teacher.ids, teacher.restricted).clamp(min=1e-30).log()
    assert torch.allclose(loss_function("forward_kl", lk_decay=ETA)(reached, teacher), torch.zeros(ROWS), atol=1e-5)


def test_the_hybrid_is_kl_at_decay_zero_and_leaves_its_weight_out_of_the_gradient() -> None:
    logits, teacher, *_ = case(12)
    hybrid_at_zero = loss_function("lk_lambda", lk_decay=0.0)(logits, teacher)
    assert torch.allclose(hybrid_at_zero, loss_function("forward_kl", lk_decay=0.0)(logits, teacher))
    got = torch.autograd.grad(loss_function("lk_lambda", lk_decay=ETA)(logits, teacher).sum(), logits)[0]
    weight = torch.exp(-ETA * acceptance_rate(logits, teacher)).detach()[:, None]
    kl_grad = torch.autograd.grad(loss_function("forward_kl", lk_decay=ETA)(logits, teacher).sum(), logits)[0]
    tv_grad = torch.autograd.grad(loss_function("tv", lk_decay=ETA)(logits, teacher).sum(), logits)[0]
    assert torch.allclose(got, weight * kl_grad + (1 - weight) * tv_grad, atol=1e-6)


def test_a_teacher_sees_only_the_draft_vocabulary() -> None:
    head: Eagle3Head = random_head(tiny_target("llama"), draft_vocab=DRAFT)
    ids = torch.tensor([[3, DRAFT + 5, 9]])
    rows = DraftTeacher(head, ids, torch.tensor([[0.5, 0.2, 0.1]])).rows(torch.tensor([0]))
    assert rows.inside.tolist() == [[True, False, True]]
    assert rows.probs.tolist() == [[0.5, 0.0, pytest.approx(0.1)]] and float(rows.rest) == pytest.approx(0.2)
