"""The plots of a measured server over its concurrency, in the page's own colours."""

from __future__ import annotations

from collections.abc import Callable

import matplotlib
from matplotlib.figure import Figure

from eyas.bench.live.figures import Level, LiveReport
from eyas.bench.plots import SERIES, STYLE, WIDTH, grid, svg


def throughput(report: LiveReport) -> str:
    """Output tokens per second at every concurrency."""
    return _over_concurrency(report, "throughput", "tokens/s", lambda level: level.tokens_per_s)


def per_token(report: LiveReport) -> str:
    """Median milliseconds per token after the first at every concurrency."""
    return _over_concurrency(report, "per-token", "ms per token, median", lambda level: 1000 * level.per_token.median)


def _over_concurrency(report: LiveReport, name: str, label: str, figure_of: Callable[[Level], float]) -> str:
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(WIDTH, 3.0), layout="constrained")
        axes = figure.subplots()
        for series, side in ((0, report.baseline), (1, report.server)):
            if side is not None:
                at, values = [level.concurrency for level in side.levels], [figure_of(level) for level in side.levels]
                axes.plot(at, values, color=SERIES[series], linewidth=1.8, marker="o", markersize=5)
        axes.set_xscale("log", base=2)
        levels = [level.concurrency for level in report.server.levels]
        axes.set_xticks(levels, [str(level) for level in levels])
        axes.minorticks_off()
        axes.set_ylim(0, None)
        axes.set_xlabel("requests at a time")
        axes.set_ylabel(label)
        grid(axes, "y")
        return svg(figure, name)
