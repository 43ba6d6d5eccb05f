"""A scaling study: nested texts, equal budgets, a fit that can be checked by hand, and nothing lost by stopping."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from eyas.bench.arithmetic import chain_length, quotient
from eyas.bench.figures import Interval
from eyas.chat import Sample
from eyas.errors import EyasError
from eyas.scaling.fit import fit
from eyas.scaling.measuring import Measured, difference, measure_head
from eyas.scaling.plan import StudyConfig, arms
from eyas.scaling.show import plot, sentences, table
from eyas.scaling.study import StudyResult, run_study
from eyas.scaling.texts import NestedTexts
from tests.test_training import corpus
from tests.tiny import tiny_target

SETTINGS = {"slots_per_batch": 60, "eval_depth": 3, "evaluations": 1}
STUDY = StudyConfig(
    sizes=(1, 2), texts=3, epochs=2, choose=2, test=4, answers=3, tree="2x2x3", tokens=8, settings=SETTINGS,
    drafters=("eagle3", "eagle1", "medusa"),
)  # fmt: skip


def texts(samples: list[Sample], study: StudyConfig = STUDY) -> NestedTexts:
    return NestedTexts.of(
        samples,
        largest=study.sizes[-1] * study.texts,
        choose=study.choose,
        test=study.test,
        max_length=study.max_length,
        seed=0,
    )


def test_no_text_is_learnt_from_and_measured_on_and_parts_are_nested() -> None:
    split = texts(corpus(20))
    names = [[s.id for s in part] for part in (split.learn, split.choose, split.test)]
    assert [len(part) for part in names] == [6, 2, 4] and len({name for part in names for name in part}) == 12
    assert texts(corpus(20)) == split
    with pytest.raises(EyasError, match="needs 12 texts of at most 384 tokens"):
        texts(corpus(11))


def test_another_answer_to_a_held_out_prompt_is_not_learnt_from() -> None:
    samples = corpus(20)
    again = [replace(s, id=f"{s.id}-again", ids=[*s.ids[:-1], s.ids[-1] - 1]) for s in samples]
    split = texts([*samples, *again])
    held = {tuple(s.ids[: s.spans[0][0]]) for s in (*split.choose, *split.test)}
    assert len(split.learn) == 6 and not held & {tuple(s.ids[: s.spans[0][0]]) for s in split.learn}


def test_arms_have_equal_epochs_and_equal_steps() -> None:
    learn = texts(corpus(20)).learn
    planned = arms(STUDY, learn)
    by_name = {arm.name: arm for arm in planned}
    one, two = by_name["eagle3-1x-epochs"], by_name["eagle3-2x-epochs"]
    assert one.steps == by_name["medusa-1x-epochs"].steps and one.steps < two.steps
    assert by_name["eagle1-2x-steps"].steps == one.steps and "eagle1-1x-steps" not in by_name
    assert (
        by_name["eagle1-1x-epochs"].config(STUDY).feature_noise == 0.2 and by_name["medusa-2x-epochs"].config(STUDY).unroll == 4
    )
    for wrong in ({"sizes": (2, 1)}, {"drafters": ("eagle3", "eagle3")}, {"sizes": (0, 1)}):
        with pytest.raises(ValueError):
            StudyConfig(**wrong)


def test_the_fit_is_the_line_through_the_arms() -> None:
    sizes = [1, 2, 4, 8]
    rounds = [[(int(100 * (1.5 + 0.2 * k)), 100), (int(100 * (1.5 + 0.2 * k)), 100)] for k in range(4)]
    curve = fit(sizes, rounds, quotient)
    assert curve.at_one == pytest.approx(1.5) and curve.per_doubling.value == pytest.approx(0.2)
    assert curve.factor == pytest.approx(2**0.5)
    noisy = np.random.default_rng(0).integers(100, 300, (4, 6))
    flat = fit(sizes, [[(int(n), 100) for n in noisy[0]]] * 4, quotient)
    assert float(chain_length(np.array([10.0, 5.0, 5.0, 1.0]))) == pytest.approx(1 + 0.5 + 0.5 * 0.2)
    assert flat.factor is None and flat.per_doubling.value == pytest.approx(0.0)


def test_a_study_that_is_stopped_goes_on_and_says_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target, samples = tiny_target("llama"), corpus(20)

    def run(out: str, study: StudyConfig = STUDY) -> StudyResult:
        return run_study(target, samples, tmp_path / out, study, features=tmp_path / "features")

    whole = run("whole")
    assert len(whole.outcomes) == 9 and all(o.measured.identical for o in whole.outcomes)
    assert {len(o.measured.rounds) for o in whole.outcomes} == {3} and {len(o.measured.chains) for o in whole.outcomes} == {4}

    seen: list[str] = []

    def stopped_once(folder: str, *rest: Any) -> Measured:
        seen.append(folder)
        if len(seen) == 3:
            raise KeyboardInterrupt
        return measure_head(folder, *rest)

    monkeypatch.setattr("eyas.scaling.study.measure_head", stopped_once)
    with pytest.raises(KeyboardInterrupt):
        run("stopped")
    again = run("stopped")
    assert len(seen) == 10 and len(set(seen)) == 9
    same = [(o.drafter, o.size, o.budget, o.measured.head, o.measured.rounds) for o in again.outcomes]
    assert same == [(o.drafter, o.size, o.budget, o.measured.head, o.measured.rounds) for o in whole.outcomes]
    assert StudyResult.read(tmp_path / "stopped/scaling.json").outcomes == again.outcomes

    assert all(again.curve(drafter, budget, "tau") for drafter in STUDY.drafters for budget in ("epochs", "steps"))
    told = sentences(again)
    assert len(told) == 16 and table(again).row_count == 9
    assert sum("with the last;" in one for one in told) == 6 and sum(" over " in one for one in told) == 4
    first, other = again.of("eagle3", "epochs")[0].measured, again.of("eagle1", "epochs")[0].measured
    assert difference(first, first) == Interval(value=0, low=0, high=0)
    assert difference(other, first).value == pytest.approx(first.tau_chain.value - other.tau_chain.value)
    plot(again, tmp_path / "a.svg")
    assert "<svg" in (tmp_path / "a.svg").read_text()
    with pytest.raises(EyasError, match="holds a study with texts 3, this one has 2"):
        run("stopped", STUDY.model_copy(update={"texts": 2}))
