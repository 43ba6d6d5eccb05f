"""The two lossless rules draw from the target's distribution, whatever is drafted and by whichever drafter: chi-square."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor

from eyas.decoding.rejection import RejectionSampler
from eyas.decoding.sampling import BatchSampler, SamplingParams
from eyas.decoding.tree import Drafting, DraftTree, TreeShape, grow
from eyas.decoding.verify import walk
from eyas.errors import EyasError
from tests.kinds import KINDS, made
from tests.tiny import tiny_target

V, ROWS, DEPTH = 12, 100_000, 2
REAL_ROWS = 15_000  # with drafters of the real kinds
HEADS = ("good", "random", "adversarial", "reduced vocabulary", "few proposals")
TOKENS = torch.arange(8, 152, 13)  # [V] of a tiny target, three of them outside its heads' vocabulary


class Tables(NamedTuple):
    """The target's logits float32 [V + 1, V] by previous token (last: at the root), a drafter's [V + 1, D] and its
    vocabulary int64 [D]."""

    target: Tensor
    drafter: Tensor
    ids: Tensor


@cache
def tables(kind: str) -> Tables:
    """Of a synthetic head, or of a real drafter behind a text that repeats itself, both cut to the tokens `TOKENS`."""
    if kind in KINDS:
        return real_tables(kind)
    true = torch.randn(V + 1, V, generator=torch.Generator().manual_seed(3)).roll(-1, 0) * 1.5
    noise = torch.randn(V + 1, V, generator=torch.Generator().manual_seed(4)).roll(-1, 0)
    if kind == "good":
        return Tables(true, true + 0.3 * noise, torch.arange(V))
    if kind == "random":
        return Tables(true, noise, torch.arange(V))
    if kind == "adversarial":
        return Tables(true, -true, torch.arange(V))
    if kind == "few proposals":  # three tokens at the root, two after even ones, none after odd ones
        few = torch.full((V + 1, V), float("-inf"))
        few[-1, [2, 5, 8]] = true[-1, [2, 5, 8]]
        few[:-1:2, :2] = true[:-1:2, :2]
        return Tables(true, few, torch.arange(V))
    ids = torch.tensor([1, 4, 5, 9, 11])
    return Tables(true, (true + 0.3 * noise)[:, ids], ids)


@torch.inference_mode()
def real_tables(kind: str) -> Tables:
    target, drafter = made(kind, tiny_target())
    text = TOKENS[torch.randint(V, (40,), generator=torch.Generator().manual_seed(6))]  # [L]
    read = target.read(torch.cat([text.repeat(V, 1), TOKENS[:, None]], 1))  # [V, L + 1]
    true = torch.cat([target.logits(read.hidden[:, -1]), target.logits(read.hidden[:1, -2])])  # [V + 1, all]
    drafter.allocate(1, 64, V)
    drafter.begin(0, int(text[0]), 0, 0)
    root = drafter.extend(text[None, 1:], read.taps[:1, : len(text) - 1], torch.tensor([len(text) - 1]))  # [1, D]
    after = drafter.expand(TOKENS[None], torch.zeros(1, V, dtype=torch.long))[0]  # [V, D]
    known = torch.isin(drafter.target_ids, TOKENS)  # [D]
    ids = torch.searchsorted(TOKENS, drafter.target_ids[known])
    return Tables(true[:, TOKENS], torch.cat([after, root])[:, known], ids)


def two_tokens(sampler: BatchSampler, kind: str, shape: TreeShape, chain: bool) -> tuple[Tensor, Tensor]:
    """A round of every row: the first two tokens int64 [B, 2], -1 where there was only one; how many were drafted."""
    truth, logits, ids = tables(kind)
    rows = len(sampler.params)

    def expand(tokens: Tensor, parents: Tensor) -> Tensor:
        return logits[tokens]

    def rank(level: Tensor, depth: int) -> Tensor:
        return sampler.rank_drafts(level, [depth - 1] * rows, ids, depth)

    tree: DraftTree = grow(Drafting(logits[-1].repeat(rows, 1), expand, rank, ids), shape)

    def choose(nodes: Tensor, step: int, alive: Tensor) -> Tensor:
        tokens = torch.cat([torch.full((rows, 1), -1), tree.tokens], 1)  # [B, N + 1]
        previous = tokens.gather(1, nodes[:, None])[:, 0]
        return sampler.choose(truth[previous], [step] * rows, tree.chained(step) if chain else None)

    done = walk(tree, shape.depth, choose)
    tokens = torch.nn.functional.pad(done.tokens, (0, 2), value=-1)[:, :2].clone()
    tokens[done.counts < 2, 1] = -1
    return tokens, done.counts - 1


def chi_square(counts: Tensor, probabilities: Tensor) -> float:
    """How many standard deviations the statistic lies above its mean under the null hypothesis."""
    expected = probabilities * counts.sum()
    keep = expected > 5
    statistic = float(((counts[keep] - expected[keep]) ** 2 / expected[keep]).sum())
    freedom = int(keep.sum()) - 1
    return (statistic - freedom) / np.sqrt(2 * freedom)


WARM, CUT = SamplingParams(temperature=0.8), SamplingParams(temperature=1.0, top_p=0.9)


@cache
def texts(top_p: bool) -> list[SamplingParams]:
    return [replace(CUT if top_p else WARM, sample=i) for i in range(ROWS)]


@pytest.mark.parametrize(("kind", "top_p"), [*((kind, False) for kind in (*HEADS, *KINDS)), ("good", True)])
@pytest.mark.parametrize("rule", ["coupled", "rejection"])
@pytest.mark.parametrize("shape", [TreeShape.chain(DEPTH), TreeShape(DEPTH, 3, 7)], ids=["chain", "tree"])
def test_the_rounds_tokens_are_distributed_as_the_targets(kind: str, top_p: bool, rule: str, shape: TreeShape) -> None:
    params, asked = CUT if top_p else WARM, texts(top_p)[: REAL_ROWS if kind in KINDS else ROWS]
    chain = shape.top_k == 1
    sampler = BatchSampler(asked) if rule == "coupled" else RejectionSampler(asked, chain=chain)
    tokens, drafted = two_tokens(sampler, kind, shape, chain)
    true = BatchSampler([params]).filtered(tables(kind).target).softmax(-1)  # [V + 1, V]
    first = torch.bincount(tokens[:, 0], minlength=V).float()
    assert chi_square(first, true[-1]) < 5
    assert not bool(first[true[-1] == 0].any())
    further = tokens[tokens[:, 1] >= 0]  # the first was drafted rightly: the second must not know how
    given = int(further[:, 0].mode().values) if len(further) else 0
    second = further[further[:, 0] == given, 1]
    assert len(second) > 1000 or kind == "adversarial"
    if len(second) > 1000:
        assert chi_square(torch.bincount(second, minlength=V).float(), true[given]) < 5
    assert int(drafted.sum()) > 0 or kind == "adversarial"


def test_the_chi_square_notices_a_wrong_distribution() -> None:
    sampler = BatchSampler(texts(False))
    tokens, _ = two_tokens(sampler, "good", TreeShape.chain(1), True)
    wrong = (tables("good").target[-1] / 0.85).softmax(-1)
    assert chi_square(torch.bincount(tokens[:, 0], minlength=V).float(), wrong) > 20


def test_coupled_drafts_are_right_more_often_than_rejections() -> None:
    """The shared noise ranks the candidates: with several of them it finds the target's token more often."""
    asked = texts(False)
    found = {
        "coupled": two_tokens(BatchSampler(asked), "good", TreeShape(1, 3, 3), False)[1],
        "rejection": two_tokens(RejectionSampler(asked, chain=False), "good", TreeShape(1, 3, 3), False)[1],
    }
    assert found["coupled"].float().mean() > found["rejection"].float().mean() + 0.02


def test_rejection_keeps_a_draft_as_often_as_the_distributions_overlap() -> None:
    asked = texts(False)
    kept = two_tokens(RejectionSampler(asked, chain=True), "random", TreeShape.chain(1), True)[1].float().mean()
    p, q = ((table[-1] / 0.8).softmax(-1) for table in tables("random")[:2])
    assert abs(float(kept) - float(torch.minimum(p, q).sum())) < 0.01


@pytest.mark.parametrize(
    "wrong",
    [
        {"temperature": -1.0}, {"temperature": float("nan")}, {"top_p": 0.0}, {"min_p": 1.0}, {"stop": ("",)},
        {"repetition_penalty": 0.0}, {"presence_penalty": float("inf")}, {"logit_bias": {3: float("nan")}}, {"logprobs": -1},
        {"min_new_tokens": -1}, {"max_new_tokens": 0},
    ],
)  # fmt: skip
def test_parameters_that_make_no_sense_are_refused_in_one_line(wrong: dict[str, object]) -> None:
    with pytest.raises(EyasError) as caught:
        SamplingParams(**wrong)  # type: ignore[arg-type]
    assert next(iter(wrong)) in str(caught.value) and "\n" not in str(caught.value)
