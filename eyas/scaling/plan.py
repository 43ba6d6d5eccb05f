"""What a scaling study trains: every drafter on every share of the data, with equal epochs and once with equal steps."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from eyas.chat import Sample
from eyas.data.batches import shuffled_batches
from eyas.training.config import DrafterName, TrainConfig

Budget = Literal["epochs", "steps"]
NAMES: dict[DrafterName, str] = {"eagle3": "EAGLE-3", "eagle1": "EAGLE-2", "medusa": "Medusa"}  # as the study decodes them


class StudyConfig(BaseModel):
    """Settings of a study; the result names them all."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    drafters: tuple[DrafterName, ...] = Field(default=("eagle3", "eagle1"), min_length=1)
    sizes: tuple[int, ...] = Field(default=(1, 2, 4, 8), min_length=1, description="multiples of `texts`")
    texts: int = Field(default=100, gt=0, description="texts to learn from at size 1")
    epochs: float = Field(default=2.0, gt=0, description="of every arm where epochs are equal")
    equal_steps: bool = Field(default=True, description="train every size once more for the steps of the middle one")
    choose: int = Field(default=24, gt=0, description="texts that choose each arm's checkpoint")
    test: int = Field(default=40, gt=1, description="texts that acceptance is estimated on")
    answers: int = Field(default=20, gt=1, description="of these, how many prompts are answered by decoding")
    max_length: int = Field(default=384, ge=3, description="longer texts are left out, in tokens")
    tree: str = Field(default="4x4x8", description="dynamic tree of all arms")
    tokens: int = Field(default=48, ge=2, description="of each answer to a test prompt")
    temperature: float = Field(default=0.0, ge=0, description="of these answers")
    settings: dict[str, object] = Field(default_factory=dict, description="of training, the same for every arm")
    seed: int = 0

    @model_validator(mode="after")
    def _sizes_ascend(self) -> StudyConfig:
        if list(self.sizes) != sorted(set(self.sizes)) or self.sizes[0] < 1:
            raise ValueError(f"sizes must be ascending multiples, e.g. 1,2,4,8, not {list(self.sizes)}")
        if self.answers > self.test:
            raise ValueError(f"{self.answers} answers need as many test texts, there are {self.test}")
        if len(set(self.drafters)) != len(self.drafters):
            raise ValueError("name every drafter once")
        return self


@dataclass(frozen=True)
class Arm:
    """One head to train: a `drafter` on the first `texts` texts for `steps` optimiser steps."""

    drafter: DrafterName
    size: int
    budget: Budget
    texts: int
    steps: int

    @property
    def name(self) -> str:
        return f"{self.drafter}-{self.size}x-{self.budget}"

    def config(self, study: StudyConfig) -> TrainConfig:
        """How it is trained."""
        usual = {"evaluations": 4, "eval_prompts": 0}  # checkpoints are chosen by the estimated tau, which costs little
        given = {**usual, **study.settings, "drafter": self.drafter, "steps": self.steps, "seed": study.seed}
        return TrainConfig.model_validate(given)


def arms(study: StudyConfig, learn: list[Sample]) -> list[Arm]:
    """All heads of `study`, small ones first, so that a study that is stopped has something to show."""
    batches = {size: _batches(learn[: size * study.texts], study) for size in study.sizes}
    epochs = {size: max(round(study.epochs * count), 1) for size, count in batches.items()}
    middle = epochs[study.sizes[(len(study.sizes) - 1) // 2]]
    planned = [
        Arm(drafter, size, "epochs", size * study.texts, epochs[size]) for size in study.sizes for drafter in study.drafters
    ]
    if study.equal_steps and len(study.sizes) > 1:
        planned += [
            Arm(drafter, size, "steps", size * study.texts, middle)
            for size in study.sizes
            if epochs[size] != middle
            for drafter in study.drafters
        ]
    return planned


def _batches(texts: list[Sample], study: StudyConfig) -> int:
    """Optimiser steps of one epoch over `texts`."""
    config = Arm("eagle3", 1, "epochs", len(texts), 1).config(study)
    batches = shuffled_batches([len(s.ids) - 1 for s in texts], config.slots_per_batch, study.seed, 0)
    return max(sum(1 for _ in batches) // config.accumulate, 1)
