"""How a head is trained: one validated record, saved beside every checkpoint."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field, model_validator

from eyas.heads.start import Start


class TrainConfig(BaseModel):
    """Settings of a run. The schedule is a function of progress: step / steps, or elapsed time / minutes.

    The unroll begins with one step and has its full depth `unroll` from progress `grow_until` on (0: from the start).
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    steps: int | None = Field(default=None, gt=0, description="optimiser steps; exact and repeatable")
    minutes: float | None = Field(default=None, gt=0, description="time budget instead of a number of steps")
    unroll: int = Field(default=5, ge=1, le=16, description="K, steps of training-time test")
    grow_until: float = Field(default=0.5, ge=0, le=1)
    step_weight: float = Field(default=0.8, gt=0, le=1, description="step i of the unroll counts step_weight ** i")
    learning_rate: float = Field(default=1e-3, gt=0)
    final_rate: float = Field(default=0.05, ge=0, le=1, description="share of the learning rate left at the end")
    warmup: float = Field(default=0.03, ge=0, le=1, description="share of the run with a rising learning rate")
    weight_decay: float = Field(default=0.0, ge=0)
    betas: tuple[float, float] = (0.9, 0.95)
    clip: float = Field(default=0.5, gt=0, description="largest gradient norm")
    slots_per_batch: int = Field(default=512, gt=0, description="slots of one micro-batch")
    accumulate: int = Field(default=1, ge=1, description="micro-batches per optimiser step")
    draft_vocab_size: int | None = Field(default=None, gt=0)
    start: Start = "warm"
    seed: int = 0
    evaluations: int = Field(default=8, ge=1, description="how often the held-out texts are measured during the run")

    @model_validator(mode="after")
    def _bounded(self) -> TrainConfig:
        if (self.steps is None) == (self.minutes is None):
            raise ValueError("give the length of the run either as steps or as minutes")
        return self

    def unroll_at(self, progress: float) -> int:
        """Depth of the unroll at `progress` in [0, 1]: 1 at first, growing evenly to the full depth at `grow_until`."""
        if progress >= self.grow_until:
            return self.unroll
        return 1 + int((self.unroll - 1) * progress / self.grow_until)

    def rate_at(self, progress: float) -> float:
        """Learning rate at `progress`: linear warm-up, then linear decay to `final_rate` of the peak."""
        if progress < self.warmup:
            return self.learning_rate * (progress + 1e-3) / (self.warmup + 1e-3)
        left = (1 - progress) / (1 - self.warmup) if self.warmup < 1 else 0.0
        return self.learning_rate * (self.final_rate + (1 - self.final_rate) * max(left, 0.0))
