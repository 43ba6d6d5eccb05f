"""A sweep for a terminal."""

from __future__ import annotations

from collections.abc import Iterator

from rich.console import Group, RenderableType
from rich.text import Text

from eyas.bench.prediction import Sweep
from eyas.bench.report import span
from eyas.tables import bare_table

RULE = (
    "predicted: tau x a forward's seconds / a round's seconds, from forwards timed alone; what a round does beside forwards is "
    "left out; of auto the best of the other trees is predicted. Break-even: up to this batch speculation is nowhere slower "
    "than plain decoding; in brackets what it may be within noise"
)


def sweep_table(sweep: Sweep) -> RenderableType:
    """tokens/s, speed-up and prediction by batch and tree, the break-even batches, and what another machine would do."""
    shown = bare_table(["tree", "batch", "tokens/s", "tau", "speed-up", "predicted", "off by"])
    for cell in sweep.cells:
        told = [f"{cell.predicted:.2f}x", f"{100 * (cell.predicted / cell.speedup.value - 1):+.0f} %"]
        speed = [f"{cell.tokens_per_s.value:.1f}", f"{cell.tau:.2f}", span(cell.speedup)]
        shown.add_row(*map(Text, [cell.tree, str(cell.batch), *speed, *told]))
    evens = bare_table(["break-even batch", "measured", "predicted", *["elsewhere"] * (sweep.elsewhere is not None)])
    for one in sweep.break_even:
        largest = [one.predicted, *([one.elsewhere] if sweep.elsewhere else [])]
        evens.add_row(Text(one.tree), one.span, *["-" if batch is None else str(batch or "none") for batch in largest])
    lines = [RULE + f" (measured up to {max(sweep.batches)}, predicted up to {max(sweep.here.costs.target)})."]
    lines += [f"{told}: {times.machine}, {times.threads or '?'} threads, weights {times.weights or '?'}" for told, times in (
        ("forwards timed on", sweep.here), ("elsewhere", sweep.elsewhere)) if times is not None]  # fmt: skip
    return Group(shown, "", evens, "", *_elsewhere(sweep), *[Text(line, "dim") for line in (*lines, *sweep.notes)])


def _elsewhere(sweep: Sweep) -> Iterator[RenderableType]:
    """The other machine's tokens/s without drafts, and the speed-up of every tree, by batch."""
    if not sweep.plain_elsewhere:
        return
    shown = bare_table(["batch", "plain tokens/s", *sweep.trees])
    for batch, speed in sweep.plain_elsewhere.items():
        ratios = [f"{sweep.predicted_elsewhere[tree][batch]:.2f}x" for tree in sweep.trees]
        shown.add_row(str(batch), f"{speed:.1f}", *ratios)
    yield from ("predicted elsewhere: plain decoding's speed, and the trees' speed-up", shown, "")
