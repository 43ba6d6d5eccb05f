"""The curve through a study's arms: tau = a + b log2(data), and what it says of the next +0.1."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from pydantic import BaseModel

from eyas.bench.figures import Interval

RESAMPLES = 2000
STEP = 0.1  # of tau, whose price is told


class Curve(BaseModel):
    """tau = `at_one` + `per_doubling` log2(size), least squares; the interval of `per_doubling` is over test texts, the same
    ones resampled for all arms. `factor` is how many times the data the next +0.1 of tau would take at this rate; None where
    the interval does not exclude that nothing is gained, or the factor exceeds a thousand."""

    at_one: float
    per_doubling: Interval
    factor: float | None


def fit(sizes: Sequence[int], counts: Sequence[Sequence[Sequence[int]]], figure: Callable[[np.ndarray], np.ndarray]) -> Curve:
    """Fit the arms of `sizes`, two or more; `figure` makes tau [...] of sums [..., C] of `counts` [arm][text][C]."""
    x = np.log2(np.array(sizes, dtype=float))  # [A]
    every = np.array(counts, dtype=float)  # [A, N, C]
    at_one, slope = _line(x, figure(every.sum(1)))
    picks = np.random.default_rng(0).integers(0, every.shape[1], (RESAMPLES, every.shape[1]))
    slopes = _line(x, figure(every[:, picks].sum(2)))[1]  # [RESAMPLES]
    low, high = np.percentile(slopes, [2.5, 97.5])
    factor = float(2.0 ** min(STEP / float(slope), 64.0)) if slope > 0 else float("inf")
    told = factor if low > 0 and factor <= 1000 else None
    return Curve(at_one=float(at_one), per_doubling=Interval(value=float(slope), low=low, high=high), factor=told)


def _line(x: np.ndarray, y: np.ndarray) -> tuple[Any, Any]:
    """Height at x = 0 and slope of the least-squares line through `y` [A, ...]."""
    centred = x - x.mean()
    slope = np.tensordot(centred, y, 1) / (centred**2).sum()
    return y.mean(0) - slope * x.mean(), slope
