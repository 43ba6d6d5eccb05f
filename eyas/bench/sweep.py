"""Speed against batch and tree size for one drafter: every tree races at every batch size, beside what was predicted."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from eyas import machine
from eyas.bench.arithmetic import tau_of
from eyas.bench.contestants import Contestant, enter
from eyas.bench.figures import PLAIN, RaceReport
from eyas.bench.grid import Report
from eyas.bench.prediction import BreakEven, Cell, ForwardTimes, Sweep, break_evens, pays_up_to, speedups
from eyas.bench.report import span
from eyas.bench.run import Plan, run_bench
from eyas.decoding.costs import CONTEXT
from eyas.decoding.planner import Planner
from eyas.decoding.static_tree import parse_tree
from eyas.errors import EyasError
from eyas.target import Target

BATCHES = (1, 2, 4, 8, 16, 32)
TREES = ("chain:1", "2x2x3", "3x3x5", "4x4x8", "5x5x16", "auto")
ROOM = CONTEXT + 64  # tokens of the texts behind which forwards are timed

RULE = (
    "predicted: tau x a forward's seconds / a round's seconds, from forwards timed alone; what a round does beside forwards is "
    "left out; of auto the best of the other trees is predicted. Break-even: the largest batch at which speculation is not "
    "slower than plain decoding"
)


def tree_contestants(drafter: Contestant, trees: Sequence[str]) -> list[Contestant]:
    """Plain decoding, and `drafter` once with every tree, called by it. Raises EyasError for a tree that cannot be read."""
    shapes = [parse_tree(tree) for tree in dict.fromkeys(trees)]
    return [Contestant(PLAIN, PLAIN), *(Contestant(str(shape or "auto"), drafter.source, shape) for shape in shapes)]


def run_sweep(
    target: Target, drafter: Contestant, trees: Sequence[str], plan: Plan, *,
    exact: bool = False, path: Path | None = None, fresh: bool = False, elsewhere: ForwardTimes | None = None,
) -> Report:  # fmt: skip
    """Race `drafter` with each of `trees` at every batch size of `plan`, as `run_bench` does, and predict the same.

    `elsewhere` are another machine's forward times, for which the break-even batch is predicted from the acceptance measured
    here. Of an interrupted sweep nothing is said yet. Raises EyasError like `run_bench`, and when `plan` has several
    temperatures or `drafter` drafts nothing.
    """
    if len(plan.temperatures) != 1:
        raise EyasError("a sweep is run at one temperature; give one")
    if drafter.source == PLAIN:
        raise EyasError("a sweep compares trees of a drafter; plain decoding has none")
    contestants = tree_contestants(drafter, trees)
    report = run_bench(target, contestants, plan, exact=exact, path=path, fresh=fresh)
    report.sweep = None  # of an earlier, smaller one
    if any(cell in report.unfinished for cell in plan.cells):
        return report
    races = [race for cell in sorted(plan.cells) if (race := report.race(cell)) is not None]
    here = forward_times(target, drafter, max(plan.batches))
    report.sweep = analysed(drafter, contestants, races, here, elsewhere)
    if path is not None:
        report.write(path)
    return report


def forward_times(target: Target, drafter: Contestant, rows: int) -> ForwardTimes:
    """What forwards over up to `rows` rows cost on this machine, as the planner knows it; measured where it does not yet."""
    engine = enter(replace(drafter, tree=None), target).engine(max_rows=rows, max_length=ROOM)
    assert isinstance(engine.policy, Planner)
    costs = engine.policy.costs
    return ForwardTimes(
        machine=machine.accelerated(target.device), threads=torch.get_num_threads(), fingerprint=target.fingerprint,
        weights=target.weights, drafter=drafter.source, costs=costs,
    )  # fmt: skip


def analysed(
    drafter: Contestant, contestants: Sequence[Contestant], races: Sequence[RaceReport], here: ForwardTimes,
    elsewhere: ForwardTimes | None = None,
) -> Sweep:  # fmt: skip
    """The races of a sweep, side by side and beside what forward times predict. tau is that of all races together: which
    drafts are accepted does not depend on the batch."""
    batches = [race.cell[1] for race in races]
    trees = {c.name: c.tree for c in contestants if c.source != PLAIN}
    taus = {name: tau_of(row.runs[name] for race in races for row in race.rows) for name in trees}
    predicted = {batch: speedups(here.costs, trees, batch, taus) for batch in batches}
    cells = [
        Cell(
            tree=name,
            batch=race.cell[1],
            tokens_per_s=race.drafters[name].tokens_per_s,
            speedup=race.drafters[name].speedup,
            tau=race.drafters[name].tau.value,
            predicted=predicted[race.cell[1]][name],
        )
        for name in trees
        for race in races
    ]
    evens = break_evens(here.costs, trees, taus)
    far: dict[str, int] = {}
    far_speedups: dict[int, dict[str, float]] = {}
    if elsewhere is not None:
        far = break_evens(elsewhere.costs, trees, taus)
        sizes = sorted({*batches, *elsewhere.costs.target})
        far_speedups = {batch: speedups(elsewhere.costs, trees, batch, taus) for batch in sizes}
    return Sweep(
        drafter=drafter.name,
        temperature=races[0].cell[0],
        batches=batches,
        trees=list(trees),
        cells=cells,
        break_even=[
            BreakEven(
                tree=name,
                measured=pays_up_to(batches, [c.speedup.value for c in cells if c.tree == name]),
                predicted=evens[name],
                elsewhere=far.get(name),
            )
            for name in trees
        ],
        here=here,
        elsewhere=elsewhere,
        predicted_elsewhere={name: {batch: found[name] for batch, found in far_speedups.items()} for name in trees if far},
    )


def sweep_table(sweep: Sweep) -> RenderableType:
    """The sweep for a terminal: tokens/s, speed-up and prediction by batch and tree, then the break-even batches."""
    shown = _columns("tree", "batch", "tokens/s", "tau", "speed-up", "predicted", "off by")
    for cell in sweep.cells:
        told = [f"{cell.predicted:.2f}x", f"{100 * (cell.predicted / cell.speedup.value - 1):+.0f} %"]
        speed = [f"{cell.tokens_per_s.value:.1f}", f"{cell.tau:.2f}", span(cell.speedup)]
        shown.add_row(*map(Text, [cell.tree, str(cell.batch), *speed, *told]))
    evens = _columns("break-even batch", "measured", "predicted", *(["elsewhere"] if sweep.elsewhere else []))
    for one in sweep.break_even:
        largest = [one.measured, one.predicted, *([one.elsewhere] if sweep.elsewhere else [])]
        evens.add_row(Text(one.tree), *[Text("-" if batch is None else str(batch or "none")) for batch in largest])
    lines = [RULE + f" (measured up to {max(sweep.batches)}, predicted up to {max(sweep.here.costs.target)})."]
    lines += [f"{told}: {times.machine}, {times.threads or '?'} threads, weights {times.weights or '?'}" for told, times in (
        ("forwards timed on", sweep.here), ("elsewhere", sweep.elsewhere)) if times is not None]  # fmt: skip
    return Group(shown, "", evens, "", *[Text(line, "dim") for line in lines])


def _columns(first: str, *others: str) -> Table:
    shown = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 2, 0, 0))
    shown.add_column(first, no_wrap=True)
    for name in others:
        shown.add_column(name, justify="right", no_wrap=True)
    return shown
