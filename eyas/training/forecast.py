"""What reading features and training will take, from short probes of the very work."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

import psutil

from eyas.chat import Sample
from eyas.data.features import read_features
from eyas.data.store import FeatureStore
from eyas.estimate import Estimate, peak_memory
from eyas.target import Target
from eyas.training.loop import Trainer

PROBED_TEXTS = 2


def reading_forecast(store: FeatureStore, target: Target, missing: Sequence[Sample]) -> Estimate:
    """What reading the features of `missing` will take; those of the first texts, which are timed, are then in the store."""
    probed, start = missing[:PROBED_TEXTS], time.monotonic()
    for sample in probed:
        store.add(read_features(target, sample))
    rate = (time.monotonic() - start) / sum(len(s.ids) for s in probed)  # seconds a token
    tokens = sum(len(s.ids) for s in missing)
    disk = store.bytes_needed(tokens, sum(s.supervised for s in missing))
    return Estimate(f"reading the features of {len(missing):,} texts", store.folder, disk, seconds=rate * tokens)


def training_forecast(trainer: Trainer, out: Path) -> Estimate:
    """What the rest of a run will take; one step of full depth is timed, and the weights stay as they are."""
    held = psutil.Process().memory_info().rss
    step = trainer.time_step()
    weights = sum(p.numel() * p.element_size() for p in trainer.workers.head().parameters())
    moments = 0 if trainer.optimizer.state else 2 * weights
    memory = max(peak_memory() - held, 0) + moments
    seconds = None if trainer.config.steps is None else (trainer.config.steps - trainer.step) * step
    disk = 2 * (3 * weights + weights)  # state and head, each written beside the one it replaces
    return Estimate("training", out, disk, memory, seconds)
