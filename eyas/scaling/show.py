"""A study's result as people read it: a table, sentences on what more data would bring, and a plot."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Literal, get_args

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from rich.table import Table

from eyas.bench.figures import Interval
from eyas.files import replacing
from eyas.scaling.fit import STEP, Curve
from eyas.scaling.measuring import difference
from eyas.scaling.plan import NAMES, Budget
from eyas.scaling.study import StudyResult
from eyas.tables import bare_table
from eyas.training.config import DrafterName

Panel = Literal["tau_chain", "tau", "speedup"]
PANELS: dict[Panel, str] = {
    "tau_chain": "tau of a greedy chain, estimated",
    "tau": "tau of decoding",
    "speedup": "speed-up over plain decoding",
}
TOLD: dict[Budget, str] = {"epochs": "equal epochs", "steps": "equal steps"}


def table(result: StudyResult) -> Table:
    """One row an arm, under what its numbers hold for."""
    rows = []
    for o in sorted(result.outcomes, key=lambda o: (o.budget, o.drafter, o.size)):
        m = o.measured
        speedup = f"{m.speedup.value:.2f}x" + ("" if m.identical else " TEXT DIFFERS")
        rows.append([
            NAMES[o.drafter], f"{o.size}x", f"{o.tokens:,}", TOLD[o.budget], f"{o.steps:,}",
            _interval(m.tau_chain, 2), _interval(m.tau, 2), speedup,
        ])  # fmt: skip
    headings = ["drafter", "data", "tokens", "budget", "steps", "tau of a chain", "tau", "speed-up"]
    shown = bare_table(headings, rows)
    shown.title = f"acceptance against data: {result.target}, tree {result.study.tree}, T {result.study.temperature:g}"
    return shown


def sentences(result: StudyResult) -> list[str]:
    """What the curves say: what a doubling of the data brings, on average and the last time, what more would take, and how far
    the drafters are apart."""
    told: list[str] = []
    for budget in get_args(Budget):
        for drafter in result.study.drafters:
            told += _growth(result, drafter, budget)
    for budget in get_args(Budget):
        first, *others = result.study.drafters
        for other in others:
            pairs = {o.size: (o, p) for o in result.of(other, budget) for p in result.of(first, budget) if o.size == p.size}
            ahead = ", ".join(f"{size}x {_signed(difference(o.measured, p.measured))}" for size, (o, p) in pairs.items())
            if ahead:
                told.append(f"{NAMES[first]} over {NAMES[other]}, {TOLD[budget]}, a chain's tau on the same texts: {ahead}")
    return told


def _growth(result: StudyResult, drafter: DrafterName, budget: Budget) -> Iterator[str]:
    named: dict[Literal["tau_chain", "tau"], str] = {"tau_chain": "a chain's tau", "tau": "tau of decoding"}
    for figure, what in named.items():
        curve = result.curve(drafter, budget, figure)
        if curve is None:
            continue
        grows = f"{what} changes by {_interval(curve.per_doubling)} with every doubling of the data"
        before, last = result.of(drafter, budget)[-2:]
        if figure == "tau_chain" and last.size == 2 * before.size:
            grows += f", by {_signed(difference(before.measured, last.measured))} with the last"
        yield f"{NAMES[drafter]}, {TOLD[budget]}: {grows}; {_price(curve)}"


def plot(result: StudyResult, path: Path) -> None:
    """tau and speed-up against data, with intervals and fits, as an image at `path` (svg or png)."""
    budgets: list[Budget] = [b for b in get_args(Budget) if any(result.of(d, b) for d in result.study.drafters)]
    with matplotlib.rc_context({"svg.hashsalt": "eyas", "font.size": 10}):
        figure = Figure(figsize=(5.2 * len(budgets), 9.6), layout="constrained")
        panels = figure.subplots(len(PANELS), len(budgets), squeeze=False, sharey="row")
        for column, budget in enumerate(budgets):
            for row, (name, label) in enumerate(PANELS.items()):
                _panel(panels[row, column], result, budget, name)
                panels[row, 0].set_ylabel(label)
            panels[0, column].set_title(TOLD[budget])
        with replacing(path) as part:
            figure.savefig(part, format=path.suffix.removeprefix("."), metadata={"Date": None} if path.suffix == ".svg" else {})


def _panel(axes: Axes, result: StudyResult, budget: Budget, figure: Panel) -> None:
    for number, drafter in enumerate(result.study.drafters):
        done = result.of(drafter, budget)
        found: list[Interval] = [getattr(o.measured, figure) for o in done]
        values = [f.value for f in found]
        below, above = [f.value - f.low for f in found], [f.high - f.value for f in found]
        sizes = [o.size for o in done]
        axes.errorbar(sizes, values, (below, above), fmt="o", capsize=3, color=f"C{number}", label=NAMES[drafter])
        curve = None if figure == "speedup" else result.curve(drafter, budget, figure)
        if curve is not None:
            ends = [result.study.sizes[0], result.study.sizes[-1]]
            bits = np.log2(ends)
            axes.plot(ends, curve.at_one + curve.per_doubling.value * bits, color=f"C{number}", alpha=0.6)
    axes.set_xscale("log", base=2)
    axes.set_xticks(result.study.sizes, [f"{size}x" for size in result.study.sizes])
    axes.set_xlabel(f"training data (1x = {result.study.texts} texts)")
    axes.grid(alpha=0.3)
    axes.legend(frameon=False)


def _interval(found: Interval, digits: int = 3) -> str:
    return f"{found.value:.{digits}f} [{found.low:.{digits}f}, {found.high:.{digits}f}]"


def _signed(found: Interval) -> str:
    return f"{found.value:+.3f} [{found.low:+.3f}, {found.high:+.3f}]"


def _price(curve: Curve) -> str:
    if curve.factor is None:
        return f"no amount of data for the next +{STEP} can be told from this"
    return f"the next +{STEP} of tau would take {curve.factor:.1f} times the data"
