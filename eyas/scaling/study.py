"""Run a scaling study: read the features once, train every arm, measure it; what is finished is never done again."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import torch
from pydantic import BaseModel, ValidationError

from eyas import machine
from eyas.bench.arithmetic import chain_length, quotient
from eyas.chat import Sample, template_hash
from eyas.data.store import FeatureStore
from eyas.decoding.tree import TreeShape
from eyas.errors import EyasError
from eyas.estimate import Consent
from eyas.files import alone_in, write_text
from eyas.progress import console
from eyas.scaling.fit import Curve, fit
from eyas.scaling.measuring import Measured, measure_head
from eyas.scaling.plan import NAMES, Arm, Budget, StudyConfig, arms
from eyas.scaling.texts import NestedTexts
from eyas.target import Target
from eyas.training.config import DrafterName
from eyas.training.recipe import complete, train_on

RESULT = "scaling.json"


class Outcome(BaseModel):
    """One arm's head: how it was trained and what it is worth."""

    drafter: DrafterName
    size: int
    budget: Budget
    texts: int
    tokens: int  # supervised, to learn from
    steps: int
    measured: Measured


class StudyResult(BaseModel):
    """A study as far as it has run: its settings, what its numbers depend on, and the arms finished."""

    study: StudyConfig
    target: str
    fingerprint: str
    weights: str
    dtype: str
    template: str
    machine: str
    threads: int
    versions: dict[str, str]
    outcomes: list[Outcome]

    @classmethod
    def read(cls, path: Path) -> StudyResult:
        """Read a study's result. Raises EyasError when the file is none."""
        try:
            return cls.model_validate_json(path.read_text(encoding="utf-8"))
        except (OSError, ValidationError) as error:
            raise EyasError(f"{path} holds no scaling study") from error

    def curve(self, drafter: DrafterName, budget: Budget, figure: Literal["tau", "tau_chain"]) -> Curve | None:
        """The fit of a drafter's `figure` under `budget`; None while it has fewer than two sizes."""
        done = self.of(drafter, budget)
        if len(done) < 2:
            return None
        sizes = [o.size for o in done]
        if figure == "tau":
            return fit(sizes, [o.measured.rounds for o in done], quotient)
        return fit(sizes, [o.measured.chains for o in done], chain_length)

    def of(self, drafter: DrafterName, budget: Budget) -> list[Outcome]:
        """The arms of `drafter` under `budget`, by size. An arm whose equal epochs are the equal steps stands for both."""
        with_steps = {o.steps for o in self.outcomes if o.budget == "steps"}
        chosen = [
            o for o in self.outcomes
            if o.drafter == drafter and (o.budget == budget or (budget == "steps" and o.steps in with_steps))
        ]  # fmt: skip
        return sorted(chosen, key=lambda o: o.size)


def run_study(
    target: Target, samples: Sequence[Sample], out: Path, study: StudyConfig, *, features: Path, consent: Consent | None = None
) -> StudyResult:
    """Train and measure all arms of `study` on `samples`, in `out`; a study there is taken up where it stopped.

    `features` is the feature store: it gets the taps of all drafters in one reading. Raises EyasError when the data are too
    few or `out` holds another study; an interrupt loses nothing.
    """
    try:
        TreeShape.parse(study.tree)
    except EyasError as error:
        raise EyasError(f"a study's tree is DEPTHxTOPKxTOTAL or chain:K, not '{study.tree}'") from error
    count = study.sizes[-1] * study.texts
    texts = NestedTexts.of(
        samples, largest=count, choose=study.choose, test=study.test, max_length=study.max_length, seed=study.seed
    )  # fmt: skip
    planned = arms(study, texts.learn)
    for arm in planned:
        arm.config(study)  # a wrong setting shows before hours have passed
    with alone_in(out):
        result = _begun(target, out, study)
        every = target.tapped((*target.tap_ids, target.num_layers))
        with FeatureStore(features, every) as store:
            complete(store, every, [*texts.choose, *texts.test, *texts.learn], consent)
        finished = {(o.drafter, o.size, o.budget) for o in result.outcomes}
        for number, arm in enumerate(planned, 1):
            if (arm.drafter, arm.size, arm.budget) in finished:
                continue
            console.print(f"arm {number} of {len(planned)}: {NAMES[arm.drafter]}, {arm.texts} texts, {arm.steps} steps")
            result.outcomes.append(_train_and_measure(target, texts, out, study, arm, features))
            write_text(out / RESULT, result.model_dump_json(indent=1))
    return result


def _begun(target: Target, out: Path, study: StudyConfig) -> StudyResult:
    """The study in `out`, or a new one. Raises EyasError when it is another study."""
    result = StudyResult(
        study=study, target=target.name, fingerprint=target.fingerprint, weights=target.weights,
        dtype=str(target.dtype).removeprefix("torch."), template=template_hash(target.tokenizer),
        machine=machine.accelerated(target.device), threads=torch.get_num_threads(), versions=machine.versions(), outcomes=[],
    )  # fmt: skip
    if not (out / RESULT).is_file():
        return result
    before = StudyResult.read(out / RESULT)
    asked, had = json.loads(study.model_dump_json()), json.loads(before.study.model_dump_json())
    for key, value in {**asked, "target": target.fingerprint, "weights": target.weights}.items():
        kept = {**had, "target": before.fingerprint, "weights": before.weights}[key]
        if kept != value:
            raise EyasError(f"{out} holds a study with {key} {kept}, this one has {value}; name another folder")
    return before


def _train_and_measure(
    target: Target, texts: NestedTexts, out: Path, study: StudyConfig, arm: Arm, features: Path
) -> Outcome:  # fmt: skip
    learn = texts.learn[: arm.texts]
    folder = out / arm.name
    train_on(target, learn, texts.choose, folder, arm.config(study), features=features)
    return Outcome(
        drafter=arm.drafter, size=arm.size, budget=arm.budget, texts=arm.texts, steps=arm.steps,
        tokens=sum(s.supervised for s in learn),
        measured=measure_head(str(folder), target, features, texts.test, study),
    )  # fmt: skip
