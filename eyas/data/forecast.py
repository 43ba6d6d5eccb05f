"""What answering will take, from a short probe with the user's own prompts."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from statistics import mean
from typing import Any, Protocol

from eyas.data.asking import AnsweringEngine, Ask
from eyas.estimate import Estimate

PROBED_TOKENS = 20_000  # jobs of fewer tokens are begun without a probe
PROBE_STEPS = 8
BYTES_PER_TOKEN, BYTES_PER_ROW = 6, 160  # of a file of answers


class FeatureSink(Protocol):
    """Where the features of answers go (`eyas.data.store.FeatureStore`)."""

    def take(self, result: Any) -> None: ...

    def bytes_needed(self, tokens: int, supervised: int) -> int: ...

    def bytes_unpacked(self, tokens: int) -> int: ...


def forecast(
    engine: AnsweringEngine, prompts: Sequence[list[int]], count: int, params: Any, *, answer_tokens: float, folder: Path,
    features: FeatureSink | None = None, probe: bool = True,
) -> Estimate:  # fmt: skip
    """What `count` answers of `answer_tokens` tokens will take, to prompts like the sample `prompts`.

    With `probe` the engine answers one batch of them twice, with 1 and with a few tokens; short jobs go unprobed.
    """
    prompt_tokens = mean(map(len, prompts)) if prompts else 0
    tokens = int(count * (prompt_tokens + answer_tokens))
    disk = tokens * BYTES_PER_TOKEN + count * BYTES_PER_ROW
    here = str(getattr(engine.target, "device", "cpu")) == "cpu"
    memory = getattr(engine, "cache_bytes", 0) if here else 0  # reserved when the engine was made, filled as it answers
    if features is not None:
        disk += features.bytes_needed(tokens, int(count * answer_tokens))
        memory += features.bytes_unpacked(engine.max_rows * int(prompt_tokens + answer_tokens))
    seconds = None
    if probe and prompts and count * answer_tokens >= PROBED_TOKENS:
        rows = min(engine.max_rows, count)
        asked = [prompts[i * len(prompts) // rows] for i in range(rows)]
        first = _timed(engine, asked, replace(params, max_new_tokens=1))
        step = max(_timed(engine, asked, replace(params, max_new_tokens=1 + PROBE_STEPS)) - first, 0.0) / PROBE_STEPS
        seconds = count / rows * (first + step * (answer_tokens - 1))
    return Estimate(f"answering {count:,} prompts", folder, disk, memory, seconds)


def _timed(engine: AnsweringEngine, prompts: Sequence[list[int]], params: Any) -> float:
    start = time.monotonic()
    engine.generate([Ask(ids, params, f"probe {number}") for number, ids in enumerate(prompts)], on_finish=lambda _: None)
    return time.monotonic() - start
