"""How a head is trained: one validated record, saved beside every checkpoint (read by `eyas.training.settings`)."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from eyas.decoding.tree import TreeShape
from eyas.errors import EyasError
from eyas.heads.config import HeadOptions
from eyas.training.losses import LossName

DrafterName = Literal["eagle3", "eagle1", "medusa"]
Precision = Literal["fp32", "bf16", "fp16"]


# What EAGLE-1's and Medusa's own papers train with, where it differs from what suits EAGLE-3.
_PUBLISHED: dict[Any, dict[str, Any]] = {
    "eagle1": {
        "unroll": 1, "grow_until": 0.0, "step_weight": (0.1,), "feature_weight": 10.0, "feature_noise": 0.2, "eval_depth": 5,
    },
    "medusa": {"unroll": 4, "grow_until": 0.0, "loss": "hard_ce"},
}  # fmt: skip


class TrainConfig(BaseModel):
    """Settings of a run. The schedule is a function of progress: step / steps, or elapsed time / minutes.

    The unroll begins with one step and has its full depth `unroll` from progress `grow_until` on (0: from the start).
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    steps: int | None = Field(default=None, gt=0, description="optimiser steps; exact and repeatable")
    minutes: float | None = Field(default=None, gt=0, description="time budget instead of a number of steps")

    drafter: DrafterName = Field(default="eagle3", description="eagle3, eagle1 (EAGLE-2 decodes the same head) or medusa")
    init_from: str = Field(default="target", description="target (warm start), random, or a head: its folder or hub id")
    remap_vocabulary: bool = Field(default=False, description="give a head to start from a vocabulary chosen from the texts")
    draft_vocab_size: int | None = Field(default=None, gt=0, description="D; None: 8192, or that of the head to start from")
    head: HeadOptions = Field(default=HeadOptions(), description="shape of a new head")

    unroll: int = Field(default=5, ge=1, le=16, description="K, steps of training-time test")
    grow_until: float = Field(default=0.5, ge=0, le=1, description="share of the run in which the unroll grows to K")
    loss: LossName = Field(default="soft_ce", description="see eyas.training.losses")
    lk_decay: float = Field(default=3.0, ge=0, description="eta of lk_lambda: how soon it turns from KL to acceptance")
    step_weight: float | tuple[float, ...] = Field(
        default=0.8, description="w: step i of the unroll counts w ** i; or one weight for each of the K steps"
    )
    feature_weight: float = Field(
        default=0.0, ge=0, description="of EAGLE-1's feature loss (10 there) beside the token loss; EAGLE-3 has none"
    )
    feature_noise: float = Field(default=0.0, ge=0, description="width of the uniform noise on the taps (EAGLE-1: 0.2)")

    learning_rate: float = Field(default=1e-3, gt=0)
    final_rate: float = Field(default=0.05, ge=0, le=1, description="share of the learning rate left at the end")
    warmup: float = Field(default=0.03, ge=0, le=1, description="share of the run with a rising learning rate")
    weight_decay: float = Field(default=0.0, ge=0)
    betas: tuple[float, float] = (0.9, 0.95)
    clip: float = Field(default=0.5, gt=0, description="largest gradient norm")
    slots_per_batch: int = Field(default=512, gt=0, description="slots of one micro-batch")
    accumulate: int = Field(default=1, ge=1, description="micro-batches per optimiser step and process")
    precision: Precision = Field(default="fp32", description="of products in the forward; weights and sums stay float32")
    compile: bool = Field(default=False, description="torch.compile the MLPs and the loss (a minute to start)")
    shard: bool = Field(default=False, description="FSDP2 instead of DDP when several processes train")
    seed: int = 0

    evaluations: int = Field(default=8, ge=1, description="how often the held-out texts are measured during the run")
    eval_prompts: int = Field(default=8, ge=0, description="held-out prompts the engine answers at each; 0: none")
    eval_tokens: int = Field(default=48, ge=2, description="tokens of each of these answers")
    eval_tree: str = Field(default="3x3x5", description="draft tree they are answered with")
    eval_depth: int | None = Field(default=None, gt=0, description="depth of the chains estimated; None: the unroll's")
    patience: int | None = Field(default=None, gt=0, description="evaluations without a better head that end the run")

    @model_validator(mode="before")
    @classmethod
    def _as_published(cls, given: Any) -> Any:
        """Other drafters begin with their own papers' settings."""
        if not isinstance(given, dict) or given.get("drafter") not in _PUBLISHED:
            return given
        return {**_PUBLISHED[given["drafter"]], **given}

    @model_validator(mode="after")
    def _consistent(self) -> TrainConfig:
        if (self.steps is None) == (self.minutes is None):
            raise ValueError("give the length of the run either as steps or as minutes")
        weights = self.step_weight if isinstance(self.step_weight, tuple) else (self.step_weight,) * self.unroll
        if len(weights) != self.unroll:
            raise ValueError(f"step_weight gives {len(weights)} weights for an unroll of {self.unroll}")
        if min(weights) < 0 or max(weights) <= 0:
            raise ValueError("step_weight must be positive")
        if self.drafter != "eagle3" and (self.init_from not in ("target", "random") or self.head != HeadOptions()):
            raise ValueError(f"a drafter of the kind {self.drafter} has one shape, and starts from target or random only")
        if self.drafter == "eagle1" and self.draft_vocab_size is not None:
            raise ValueError("an EAGLE-1 head drafts the whole vocabulary; leave out draft_vocab_size")
        if self.drafter == "medusa" and self.init_from == "random":
            raise ValueError("Medusa heads start from the target's projection; leave init_from at target")
        if self.drafter == "medusa" and self.feature_weight:
            raise ValueError("Medusa heads predict no features; leave feature_weight at 0")
        if self.remap_vocabulary and self.init_from in ("target", "random"):
            raise ValueError("remap_vocabulary needs a head to start from (init_from)")
        try:
            depth = TreeShape.parse(self.eval_tree).depth
        except EyasError as error:
            raise ValueError(str(error)) from error
        if self.drafter == "medusa" and max(depth, self.eval_depth or 0) > self.unroll:
            raise ValueError(f"{self.unroll} Medusa heads draft no deeper than {self.unroll}; lower eval_tree or eval_depth")
        return self

    @property
    def step_weights(self) -> tuple[float, ...]:
        """One weight for each of the K steps of the unroll."""
        w = self.step_weight
        return w if isinstance(w, tuple) else tuple(w**i for i in range(self.unroll))

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
