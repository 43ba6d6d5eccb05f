"""Faults that other projects shipped, where no other test of ours has them, and the list of all in docs/faults.md."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from torch import Tensor

from eyas.chat import Sample
from eyas.data.batches import Batch
from eyas.data.features import read_features
from eyas.decoding.drafters import Eagle3Drafter
from eyas.decoding.engine import Engine
from eyas.decoding.sampling import BatchSampler, SamplingParams
from eyas.decoding.tree import TreeShape
from eyas.heads.eagle3 import Eagle3Head
from tests.test_engine import OracleDrafter, assert_same, plain, requests
from tests.test_unroll import random_head
from tests.tiny import tiny_target

ROOT = Path(__file__).parent.parent


def test_the_loss_falls_on_the_predicted_token_and_never_past_the_end() -> None:
    """Three tokens of prompt, three of answer: the last prompt token's tap and the first answer token predict the second."""
    target = tiny_target()
    head = random_head(target)
    batch = Batch.of([read_features(target, Sample("a", [5, 6, 7, 8, 9, 10], [(3, 6)]))])
    everything = torch.ones_like(head.t2d)
    assert [batch.carries_loss(step, everything).tolist() for step in range(3)] == [
        [False, False, True, True, False], [False, False, True, False, False], [False] * 5,
    ]  # fmt: skip


class EndDrafter(OracleDrafter):
    """Drafts the end of the text at every place."""

    def _logits(self, rows: int, width: int) -> Tensor:
        out = torch.zeros(rows, width, len(self.target_ids))
        out[..., 2] = 50.0
        return out


def test_a_drafted_end_that_the_target_rejects_ends_nothing() -> None:
    target = tiny_target()
    asked = requests()
    want = plain(target, asked)
    assert any(len(result.ids) > 5 for result in want)
    for rows in (1, 3):
        drafter = EndDrafter({}, right=True)
        assert_same(Engine(target, drafter, tree=TreeShape.chain(4), max_rows=rows, max_length=256).generate(asked), want)


def changed(head: Eagle3Head, **config: object) -> Eagle3Head:
    """`head` with other settings and the same weights."""
    other = Eagle3Head(head.config.model_copy(update=config), tiny_target().embedding.float(), head.d2t)
    other.load_state_dict(head.state_dict())
    return other


def test_positions_of_the_head_are_its_own_and_have_no_end() -> None:
    """Another rope base in the head leaves the target's states alone; texts may be longer than the head was made for."""
    target = tiny_target()
    head = random_head(target)
    other = changed(head, rope={"rope_type": "default", "rope_theta": 300.0})
    assert not torch.equal(head.inverse_frequencies, other.inverse_frequencies)
    ids = torch.arange(3, 60)[None]
    before = target.read(ids).hidden
    asked = requests()
    want = plain(target, asked)
    for one in (head, other, changed(head, max_position_embeddings=8)):
        got = Engine(target, Eagle3Drafter(target, one), tree=TreeShape(3, 3, 6), max_length=256).generate(asked)
        assert_same(got, want)
        assert torch.equal(target.read(ids).hidden, before)


@pytest.mark.parametrize("top_k", [0, 3])
def test_sampled_tokens_follow_the_targets_distribution(top_k: int) -> None:
    """Chi-square of 10,000 draws; drafting changes no token, so this is the law of speculative answers too."""
    draws = 10_000
    logits = torch.tensor([2.0, 1.5, 1.0, 0.5])
    sampler = BatchSampler([SamplingParams(temperature=1.3, top_k=top_k, seed=seed) for seed in range(draws)])
    chosen = sampler.choose(logits.expand(draws, 4), [seed % 7 for seed in range(draws)])
    law = (logits / 1.3).softmax(-1)
    if top_k:
        law[3] = 0
        law = law / law.sum()
    counts = chosen.bincount(minlength=4).double()
    expected = draws * law.double()
    kept = expected > 0
    assert float(counts[~kept].sum()) == 0
    assert float(((counts - expected)[kept] ** 2 / expected[kept]).sum()) < 16.3  # p = 0.001 at three degrees of freedom


def test_every_test_that_the_list_of_faults_names_is_there() -> None:
    told = (ROOT / "docs" / "faults.md").read_text(encoding="utf-8")
    names = re.findall(r"`(\w+)::(\w+)`", told)
    assert len(names) > 40
    for file, test in names:
        assert f"def {test}(" in (ROOT / "tests" / f"{file}.py").read_text(encoding="utf-8"), (file, test)
