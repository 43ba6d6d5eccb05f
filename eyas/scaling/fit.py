"""The curve through a study's arms: tau = a + b log2(data), and what it says of the next +0.1."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from pydantic import BaseModel

from eyas.bench.arithmetic import bootstrap
from eyas.bench.figures import Interval

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
    centred = x - x.mean()
    columns = np.concatenate(np.array(counts, dtype=float), axis=1)  # [N, A C]

    def taus(sums: np.ndarray) -> np.ndarray:  # [..., A C] -> [..., A]
        return figure(sums.reshape(*sums.shape[:-1], len(x), -1))

    slope = bootstrap(columns, lambda sums: taus(sums) @ centred / (centred @ centred))
    at_one = taus(columns.sum(0)).mean() - slope.value * x.mean()
    factor = 2.0 ** min(STEP / slope.value, 64.0) if slope.value > 0 else float("inf")
    told = factor if slope.low > 0 and factor <= 1000 else None
    return Curve(at_one=float(at_one), per_doubling=slope, factor=told)
