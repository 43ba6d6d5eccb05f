"""The two lossless rules draw from the target's distribution, whatever is drafted: 1e5 verified rounds each, chi-square."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import numpy as np
import pytest
import torch
from torch import Tensor

from eyas.decoding.rejection import RejectionSampler
from eyas.decoding.sampling import BatchSampler, SamplingParams
from eyas.decoding.tree import Drafting, DraftTree, TreeShape, grow
from eyas.decoding.verify import walk
from eyas.errors import EyasError

V, ROWS, DEPTH = 12, 100_000, 2
HEADS = ("good", "random", "adversarial", "reduced vocabulary", "few proposals")


def target_logits(previous: Tensor) -> Tensor:
    """The target's logits float32 [B, V] after `previous` int64 [B] (-1: at the root): a fixed table."""
    table = torch.randn(V + 1, V, generator=torch.Generator().manual_seed(3)) * 1.5
    return table[previous + 1]


def head(kind: str) -> tuple[Tensor, Tensor]:
    """A head's logits [V + 1, D] by previous token and its vocabulary int64 [D]."""
    true = target_logits(torch.arange(-1, V))  # [V + 1, V]
    noise = torch.randn(V + 1, V, generator=torch.Generator().manual_seed(4))
    ids = torch.arange(V)
    if kind == "good":
        return true + 0.3 * noise, ids
    if kind == "random":
        return noise, ids
    if kind == "adversarial":
        return -true, ids
    if kind == "few proposals":  # three tokens at the root, two after even ones, none after odd ones
        table = torch.full((V + 1, V), float("-inf"))
        table[0, [2, 5, 8]] = true[0, [2, 5, 8]]
        table[1::2, :2] = true[1::2, :2]
        return table, ids
    ids = torch.tensor([1, 4, 5, 9, 11])
    return (true + 0.3 * noise)[:, ids], ids


def two_tokens(sampler: BatchSampler, kind: str, shape: TreeShape, chain: bool) -> tuple[Tensor, Tensor]:
    """A round of every row: the first two tokens int64 [ROWS, 2], -1 where there was only one; how many were drafted."""
    logits, ids = head(kind)
    indices = [0] * ROWS

    def expand(tokens: Tensor, parents: Tensor) -> Tensor:
        return logits[tokens + 1]

    def rank(level: Tensor, depth: int) -> Tensor:
        return sampler.rank_drafts(level, [depth - 1] * ROWS, ids, depth)

    tree: DraftTree = grow(Drafting(logits[indices], expand, rank, ids), shape)

    def choose(nodes: Tensor, step: int, alive: Tensor) -> Tensor:
        tokens = torch.cat([torch.full((ROWS, 1), -1), tree.tokens], 1)  # [ROWS, N + 1]
        previous = tokens.gather(1, nodes[:, None])[:, 0]
        return sampler.choose(target_logits(previous), [step] * ROWS, tree.chained(step) if chain else None)

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


@pytest.mark.parametrize(("kind", "top_p"), [*((kind, False) for kind in HEADS), ("good", True)])
@pytest.mark.parametrize("rule", ["coupled", "rejection"])
@pytest.mark.parametrize("shape", [TreeShape.chain(DEPTH), TreeShape(DEPTH, 3, 7)], ids=["chain", "tree"])
def test_the_rounds_tokens_are_distributed_as_the_targets(kind: str, top_p: bool, rule: str, shape: TreeShape) -> None:
    params, asked = CUT if top_p else WARM, texts(top_p)
    chain = shape.top_k == 1
    sampler = BatchSampler(asked) if rule == "coupled" else RejectionSampler(asked, chain=chain)
    tokens, drafted = two_tokens(sampler, kind, shape, chain)
    truth = BatchSampler([params]).filtered(target_logits(torch.tensor([-1]))).softmax(-1)[0]  # [V]
    first = torch.bincount(tokens[:, 0], minlength=V).float()
    assert chi_square(first, truth) < 5
    assert not bool(first[truth == 0].any())
    given = int(first.argmax())
    second = tokens[(tokens[:, 0] == given) & (tokens[:, 1] >= 0), 1]
    after = BatchSampler([params]).filtered(target_logits(torch.tensor([given]))).softmax(-1)[0]  # [V]
    if len(second) > 1000:  # its first token was drafted rightly: the second must not know how
        assert chi_square(torch.bincount(second, minlength=V).float(), after) < 5
    assert int(drafted.sum()) > 0 or kind == "adversarial"


def test_the_chi_square_notices_a_wrong_distribution() -> None:
    sampler = BatchSampler(texts(False))
    tokens, _ = two_tokens(sampler, "good", TreeShape.chain(1), True)
    wrong = (target_logits(torch.tensor([-1])) / 0.85).softmax(-1)[0]
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
    p, q = (target_logits(torch.tensor([-1]))[0] / 0.8).softmax(-1), (head("random")[0][0] / 0.8).softmax(-1)
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
