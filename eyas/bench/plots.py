"""The report's plots as SVG to be set into a page, drawn in the page's own colours and type.

matplotlib writes colours as hex numbers; the plots are drawn with reserved numbers (`INK`, `SERIES`, ...) which are
then replaced by the page's CSS variables, so that one drawing serves light, dark and paper.
"""

from __future__ import annotations

import io
import re
from collections.abc import Sequence
from typing import Any, Literal

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from eyas.bench.figures import RaceReport
from eyas.bench.prediction import Sweep
from eyas.bench.training_log import TrainingLog

INK, MUTED, GRID, PAPER = "#0000e0", "#0000e1", "#0000e2", "#0000e3"
SERIES = [f"#0000f{i:x}" for i in range(12)]  # 0 = plain decoding
VARIABLES = {INK: "--ink", MUTED: "--muted", GRID: "--line", PAPER: "--paper"} | {
    colour: f"--series-{i}" for i, colour in enumerate(SERIES)
}
WIDTH = 6.1  # inches of 72 units: half the page, where a unit is about a pixel

STYLE: Any = {
    "svg.fonttype": "none",
    "font.size": 12,
    "axes.edgecolor": GRID,
    "axes.labelcolor": MUTED,
    "axes.titlecolor": INK,
    "axes.titlesize": 12,
    "axes.titlelocation": "left",
    "axes.titlepad": 10,
    "axes.linewidth": 0.8,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.spines.left": False,
    "text.color": INK,
    "xtick.color": MUTED,
    "ytick.color": MUTED,
    "xtick.major.size": 0,
    "ytick.major.size": 0,
    "grid.color": GRID,
    "grid.linewidth": 0.8,
    "legend.frameon": False,
    "lines.solid_capstyle": "round",
    "figure.facecolor": "none",
    "axes.facecolor": "none",
}


def series(number: int) -> int:
    """The colour of contestant `number`: plain decoding, number 0, shares its own with nobody."""
    return number if number < len(SERIES) else 1 + (number - 1) % (len(SERIES) - 1)


def speed(race: RaceReport, key: str) -> str:
    """Tokens/s of every drafter with its 95 % interval, as horizontal bars. `key` is a name that no other plot of the page
    has."""
    names = list(race.drafters)
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(WIDTH, 0.75 + max(1.7, 0.55 * len(names))), layout="constrained")
        axes = figure.subplots()
        widest = max(f.tokens_per_s.high for f in race.drafters.values())
        for i, name in enumerate(names):
            found = race.drafters[name].tokens_per_s
            axes.barh(i, found.value, height=0.6, color=SERIES[series(i)])
            if found.high > found.low:
                axes.plot([found.low, found.high], [i, i], color=INK, linewidth=1.4)
            axes.text(found.high + widest * 0.015, i, f"{found.value:.1f}", va="center", weight="bold")
        axes.set_yticks(range(len(names)), names, color=INK)
        axes.invert_yaxis()
        axes.set_xlim(0, widest * 1.12)
        axes.set_xlabel("tokens/s")
        axes.xaxis.set_major_locator(MaxNLocator(6))
        grid(axes, "x")
        return svg(figure, key)


def acceptance(race: RaceReport, key: str) -> str:
    """n-alpha by depth: conditional rates as bars, joint rates as rings (one drafter's are joined by a line)."""
    drafters = {n: (i, f) for i, (n, f) in enumerate(race.drafters.items()) if f.n_alpha}
    if not drafters:
        return ""
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(WIDTH, 3.0), layout="constrained")
        axes = figure.subplots()
        width = 0.72 / len(drafters)
        for place, (number, found) in enumerate(drafters.values()):
            at = np.arange(1, len(found.n_alpha) + 1) + (place - (len(drafters) - 1) / 2) * width
            colour = SERIES[series(number)]
            axes.bar(at, found.n_alpha, width * 0.94, color=colour, alpha=0.85)
            axes.plot(at, found.joint, color=INK, linewidth=1.6 if len(drafters) == 1 else 0, marker="o",
                      markersize=5, markerfacecolor=PAPER, markeredgewidth=1.6)  # fmt: skip
            if len(drafters) == 1:
                for x, value in zip(at, found.n_alpha, strict=True):
                    axes.text(x, value + 0.02, f"{value:.2f}", ha="center", va="bottom", weight="bold")
        deepest = max(len(f.n_alpha) for _, f in drafters.values())
        axes.set_xticks(range(1, deepest + 1))
        axes.set_ylim(0, 1.08)
        axes.set_yticks([0, 0.25, 0.5, 0.75, 1])
        axes.set_xlabel("depth of the draft")
        grid(axes, "y")
        return svg(figure, key)


def position(race: RaceReport, key: str) -> str:
    """tau of every drafter by position in the answer, a line each; "" where all rounds lie in one bucket."""
    numbers = {name: i for i, name in enumerate(race.drafters)}
    if all(len(f.parts["position"]) < 2 for f in race.speculative.values()):
        return ""
    with matplotlib.rc_context(STYLE):
        figure, axes = _lines("position in the answer, tokens", "tau")
        for name, f in race.speculative.items():
            parts = f.parts["position"]
            starts = [int(part.partition("-")[0]) for part in parts]
            taus = [part.tau for part in parts.values()]
            axes.plot(starts, taus, color=SERIES[series(numbers[name])], linewidth=1.6, marker="o", markersize=5)
        axes.axhline(1, color=MUTED, linewidth=1, linestyle=":")
        return svg(figure, key)


def batches(races: Sequence[RaceReport]) -> list[tuple[float, str]]:
    """(temperature, plot of every drafter's speed-up by batch size) where there are several sizes."""
    found: list[tuple[float, str]] = []
    for temperature in dict.fromkeys(race.cell[0] for race in races):
        of_it = [race for race in races if race.cell[0] == temperature]
        sizes = [race.cell[1] for race in of_it]
        if len(sizes) < 2 or not of_it[0].speculative:
            continue
        with matplotlib.rc_context(STYLE):
            figure, axes = _lines("batch", "speed-up")
            for i, name in enumerate(of_it[0].drafters):
                spans = [race.drafters[name].speedup for race in of_it]
                values = [s.value for s in spans]
                around = [[max(s.value - s.low, 0) for s in spans], [max(s.high - s.value, 0) for s in spans]]
                axes.errorbar(sizes, values, around, color=SERIES[series(i)], linewidth=1.6, marker="o", markersize=5)
            _powers(axes, sizes)
            found.append((temperature, svg(figure, f"batches{len(found)}")))
    return found


def sweep(found: Sweep) -> list[str]:
    """tokens/s by batch size, a line a tree; speed-up measured (dots) and predicted (dashes) by batch size."""
    cells = {(cell.tree, cell.batch): cell for cell in found.cells}
    sizes = sorted({cell.batch for cell in found.cells})
    trees = [tree for tree in found.trees if any((tree, size) in cells for size in sizes)]
    with matplotlib.rc_context(STYLE):
        speeds, by_speed = _lines("batch", "tokens/s")
        ratios, by_ratio = _lines("batch", "speed-up, measured; dashed: predicted")
        for i, tree in enumerate(trees, 1):
            colour, at = SERIES[series(i)], [size for size in sizes if (tree, size) in cells]
            own = [cells[tree, size] for size in at]
            by_speed.plot(at, [c.tokens_per_s.value for c in own], color=colour, linewidth=1.6, marker="o", markersize=5)
            by_ratio.plot(at, [c.speedup.value for c in own], color=colour, linewidth=1.6, marker="o", markersize=5)
            by_ratio.plot(at, [c.predicted for c in own], color=colour, linewidth=1.4, linestyle="--")
        plain = [next(c.tokens_per_s.value / c.speedup.value for c in found.cells if c.batch == size) for size in sizes]
        by_speed.plot(sizes, plain, color=SERIES[0], linewidth=1.6, marker="o", markersize=5)
        by_ratio.axhline(1, color=SERIES[0], linewidth=1.6)
        for axes in (by_speed, by_ratio):
            _powers(axes, sizes)
        return [svg(speeds, "sweepspeed"), svg(ratios, "sweepratio")]


def _lines(across: str, up: str) -> tuple[Figure, Axes]:
    figure = Figure(figsize=(WIDTH, 3.0), layout="constrained")
    axes = figure.subplots()
    axes.set_xlabel(across)
    axes.set_ylabel(up)
    axes.yaxis.set_major_locator(MaxNLocator(5))
    grid(axes, "y")
    return figure, axes


def _powers(axes: Axes, sizes: Sequence[int]) -> None:
    """Batch sizes at even distances."""
    axes.set_xscale("log", base=2)
    axes.set_xticks(list(sizes), [str(size) for size in sizes])
    axes.minorticks_off()


def training(log: TrainingLog) -> list[str]:
    """Three plots over the minutes of training: loss and accuracy per unroll step, and tau on held-out text."""
    with matplotlib.rc_context(STYLE):
        loss = _per_step("Loss per unroll step", log.minutes, log.loss)
        accuracy = _per_step("Accuracy per unroll step", log.minutes, log.accuracy)
        accuracy.axes[0].set_ylim(0, None)
        return [svg(loss, "loss"), svg(accuracy, "accuracy"), *([svg(_tau(log), "tau")] if log.eval_tau else [])]


def _per_step(title: str, minutes: Sequence[float], rows: Sequence[Sequence[float]]) -> Figure:
    """One line per unroll step, the deeper the fainter; a step's line begins when the unroll reaches it."""
    figure, axes = _over_minutes(title)
    deepest = max((len(row) for row in rows), default=0)
    for k in range(deepest):
        shown = [(m, row[k]) for m, row in zip(minutes, rows, strict=True) if len(row) > k]
        at, values = [m for m, _ in shown], smooth([v for _, v in shown])
        axes.plot(at, values, color=SERIES[1], linewidth=1.6, alpha=1 - 0.75 * k / deepest)
        if k in (0, deepest - 1):
            axes.annotate(f"depth {k + 1}", (at[-1], values[-1]), xytext=(5, 0), textcoords="offset points",
                          va="center", fontsize=11, color=MUTED)  # fmt: skip
    return figure


def _tau(log: TrainingLog) -> Figure:
    figure, axes = _over_minutes("tau on held-out text, estimated")
    axes.plot(log.eval_minutes, log.eval_tau, color=SERIES[1], linewidth=1.6, marker="o", markersize=5)
    axes.annotate(f"{log.eval_tau[-1]:.2f}", (log.eval_minutes[-1], log.eval_tau[-1]), xytext=(7, 0),
                  textcoords="offset points", va="center", weight="bold")  # fmt: skip
    return figure


def _over_minutes(title: str) -> tuple[Figure, Axes]:
    figure = Figure(figsize=(4.2, 2.9), layout="constrained")
    axes = figure.subplots()
    axes.set_title(title)
    axes.margins(x=0.02)
    axes.set_xlabel("minutes")
    axes.yaxis.set_major_locator(MaxNLocator(5))
    grid(axes, "y")
    return figure, axes


def smooth(values: Sequence[float]) -> list[float]:
    """`values` with an exponential mean over about a twentieth of them, started without a bias towards zero."""
    keep = 1 - 1 / max(1.0, len(values) / 20)
    out, total, weight = [], 0.0, 0.0
    for value in values:
        total, weight = keep * total + (1 - keep) * value, keep * weight + (1 - keep)
        out.append(total / weight)
    return out


def grid(axes: Axes, axis: Literal["x", "y"]) -> None:
    """Lines across `axis`, behind what is drawn."""
    axes.set_axisbelow(True)
    axes.grid(True, axis=axis)


def svg(figure: Figure, name: str) -> str:
    """The figure as an <svg> element: page colours, page type, ids that cannot clash with another plot's."""
    buffer = io.StringIO()
    with matplotlib.rc_context({"svg.hashsalt": name}):
        figure.savefig(buffer, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    text = buffer.getvalue()
    text = re.sub(r"<metadata>.*?</metadata>", "", text[text.index("<svg") :], flags=re.DOTALL)
    head = rf'<svg viewBox="\1" class="plot" role="img" aria-label="{name}">'
    text = re.sub(r'<svg [^>]*?viewBox="([^"]+)"[^>]*>', head, text, count=1, flags=re.DOTALL)
    text = re.sub(r'\bid="', f'id="{name}-', text)
    text = re.sub(r"(url\(|href=\")#", rf"\1#{name}-", text).replace("xlink:href", "href")
    text = re.sub(r"font: ([^;\"]*?)(\d+(?:\.\d+)?)px [^;\"]*", _type, text)
    for colour, variable in VARIABLES.items():
        text = text.replace(colour, f"var({variable})")
    return text


def _type(match: re.Match[str]) -> str:
    """matplotlib's font shorthand without its family: the page's is inherited."""
    weight = "font-weight: 650; " if re.search(r"bold|[67]00", match[1]) else ""
    return f"{weight}font-size: {match[2]}px"
