"""The trainer's log as columns, for the report's training curve."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from eyas.errors import EyasError


@dataclass
class TrainingLog:
    """Logged steps, and evaluations on held-out text; `minutes` are those of training."""

    minutes: list[float] = field(default_factory=list)
    loss: list[list[float]] = field(default_factory=list)  # per logged step: one value per unroll step
    accuracy: list[list[float]] = field(default_factory=list)  # likewise
    eval_minutes: list[float] = field(default_factory=list)
    eval_tau: list[float] = field(default_factory=list)
    eval_n_alpha: list[list[float]] = field(default_factory=list)

    @property
    def best_n_alpha(self) -> list[float]:
        """n-alpha on held-out text of the head that was kept: the one with the best tau. Empty before the first evaluation."""
        return max(zip(self.eval_tau, self.eval_n_alpha, strict=True), default=(0.0, []))[1]

    def __bool__(self) -> bool:
        return bool(self.minutes or self.eval_minutes)


def read_training_log(path: Path) -> TrainingLog:
    """The log in `path` (one JSON object a line). A last line cut off by a running trainer is left out.

    Raises EyasError when the file is missing or is no training log.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise EyasError(f"cannot read the training log {path}: {error.strerror}") from error
    log = TrainingLog()
    for n, line in enumerate(lines, start=1):
        try:
            _add(log, json.loads(line))
        except (json.JSONDecodeError, KeyError, TypeError) as error:
            if n == len(lines):
                break
            raise EyasError(f"{path}, line {n} is not a line of a training log: {line[:60]!r}") from error
    if not log:
        raise EyasError(f"the training log {path} holds no step yet")
    return log


def _add(log: TrainingLog, entry: dict[str, Any]) -> None:
    if entry.get("eval"):
        log.eval_minutes.append(float(entry["minutes"]))
        log.eval_tau.append(float(entry["tau_estimate"]))
        log.eval_n_alpha.append([float(value) for value in entry["n_alpha"]])
        return
    log.minutes.append(float(entry["minutes"]))
    log.loss.append([float(value) for value in entry["loss"]])
    log.accuracy.append([float(value) for value in entry["accuracy"]])
