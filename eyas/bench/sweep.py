"""Speed against batch and tree size for one drafter: every tree races at every batch size, beside what was predicted."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import torch

from eyas import machine
from eyas.bench.arithmetic import tau_of
from eyas.bench.contestants import Contestant, Entrant, enter, parse_contestants, split_told
from eyas.bench.figures import PEER, PLAIN, RaceReport
from eyas.bench.grid import Report
from eyas.bench.prediction import (
    BreakEven,
    Cell,
    ForwardTimes,
    Sweep,
    Tree,
    beyond_timed,
    break_evens,
    differences,
    may_be,
    pays_up_to,
    plain_speed,
    speedups,
)
from eyas.bench.run import Plan, run_bench
from eyas.decoding.costs import CONTEXT
from eyas.decoding.planner import Planner
from eyas.decoding.static_tree import parse_tree
from eyas.errors import EyasError
from eyas.progress import console
from eyas.target import Target

BATCHES = (1, 2, 4, 8, 16, 32)
TREES = ("chain:1", "2x2x3", "3x3x5", "4x4x8", "5x5x16", "auto")
ROOM = CONTEXT + 64  # tokens of the texts behind which forwards are timed


def parse_swept(told: Sequence[str]) -> Contestant:
    """The drafter of a sweep, as a command line names it. Raises EyasError when it is not one, or cannot be swept."""
    drafters = [contestant for contestant in parse_contestants(told) if contestant.source != PLAIN]
    if len(drafters) != 1:
        raise EyasError(f"a sweep is one of one drafter, not of {len(drafters)}; give --drafter once")
    for one in told:
        _, source, tree = split_told(one)
        if tree is not None and source != PLAIN:
            raise EyasError(f"--drafter {one}: the trees of a sweep are named by --tree; give --drafter {source} --tree {tree}")
    _require_trees(drafters[0])
    return drafters[0]


def _require_trees(drafter: Contestant) -> None:
    """Raises EyasError when `drafter` cannot be raced with one tree after the other."""
    if drafter.source == PLAIN:
        raise EyasError("a sweep compares trees of a drafter; plain decoding has none")
    if drafter.source.startswith(PEER):
        raise EyasError(f"a sweep compares trees of a drafter; {drafter.source} drafts as it does, race it without --sweep")


def default_trees(depth: int | None) -> list[str]:
    """The usual trees, as far as a drafter of `depth` levels (None: of any number) can grow them."""
    return [tree for tree in TREES if depth is None or (shape := parse_tree(tree)) is None or shape.depth <= depth]


def tree_contestants(drafter: Contestant, trees: Sequence[str]) -> list[Contestant]:
    """Plain decoding, and `drafter` once with every tree, called by it. Raises EyasError for a tree that cannot be read."""
    shapes = [parse_tree(tree) for tree in dict.fromkeys(trees)]
    return [Contestant(PLAIN, PLAIN), *(Contestant(str(shape or "auto"), drafter.source, shape) for shape in shapes)]


def run_sweep(
    target: Target, drafter: Contestant, trees: Sequence[str] | None, plan: Plan, *,
    exact: bool = False, path: Path | None = None, fresh: bool = False, elsewhere: ForwardTimes | None = None,
) -> Report:  # fmt: skip
    """Race `drafter` with each of `trees` at every batch size of `plan`, as `run_bench` does, and predict the same.

    Without `trees` the usual ones are raced, as far as the drafter is deep enough. `elsewhere` are another machine's forward
    times, for which speeds and the break-even batch are predicted from the acceptance measured here. Of an interrupted sweep
    nothing is said yet. Raises EyasError like `run_bench`, and when `plan` has several temperatures, `drafter` has no trees or
    `elsewhere` is of another target.
    """
    if len(plan.temperatures) != 1:
        raise EyasError("a sweep is run at one temperature; give one")
    _require_trees(drafter)
    if elsewhere is not None and elsewhere.fingerprint != target.fingerprint:
        raise EyasError(
            f"the forward times are those of another target ({elsewhere.fingerprint}, this is {target.fingerprint}); "
            "write them by a sweep of this target on the other machine"
        )
    opened = enter(Contestant(drafter.name, drafter.source), target)
    contestants = tree_contestants(drafter, _usual(opened) if trees is None else trees)
    report = run_bench(target, contestants, plan, exact=exact, path=path, fresh=fresh)
    report.sweep = None  # of an earlier, smaller one
    if any(cell in report.unfinished for cell in plan.cells):
        return report
    races = [race for cell in sorted(plan.cells) if (race := report.race(cell)) is not None]
    report.sweep = analysed(drafter, contestants, races, forward_times(opened, max(plan.batches)), elsewhere)
    if path is not None:
        report.write(path)
    return report


def _usual(opened: Entrant) -> list[str]:
    """The usual trees for an opened drafter; says which are left out."""
    assert opened.opened.drafter is not None
    depth = opened.opened.drafter.depth
    trees = default_trees(depth)
    if left_out := [tree for tree in TREES if tree not in trees]:
        console.print(f"not in this sweep: {', '.join(left_out)}, deeper than the drafter's {depth} levels", style="dim")
    return trees


def forward_times(entrant: Entrant, rows: int) -> ForwardTimes:
    """What forwards over up to `rows` rows cost on this machine, as the planner knows it; measured where it does not yet.

    `entrant` is a drafter that leaves its trees to the planner.
    """
    target = entrant.opened.target
    engine = entrant.engine(max_rows=rows, max_length=ROOM)
    assert isinstance(engine.policy, Planner)
    return ForwardTimes(
        machine=machine.accelerated(target.device), threads=torch.get_num_threads(), fingerprint=target.fingerprint,
        weights=target.weights, drafter=entrant.opened.hash or entrant.contestant.source, costs=engine.policy.costs,
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
    found = Sweep(
        drafter=drafter.name,
        temperature=races[0].cell[0],
        batches=batches,
        trees=list(trees),
        cells=cells,
        break_even=_break_evens(races, here, trees, taus),
        here=here,
        notes=list(_beyond("here", here, trees, batches)),
    )
    if elsewhere is not None:
        _add_elsewhere(found, elsewhere, trees, taus)
    return found


def _break_evens(
    races: Sequence[RaceReport], here: ForwardTimes, trees: dict[str, Tree | None], taus: dict[str, float]
) -> list[BreakEven]:
    """Where every tree stops to pay, as measured, with what noise leaves open, and as predicted."""
    batches = [race.cell[1] for race in races]
    floors = [race.noise.floor if race.noise is not None else 0.0 for race in races]
    predicted = break_evens(here.costs, trees, taus)
    evens = []
    for name in trees:
        measured = [race.drafters[name].speedup for race in races]
        least, most = zip(*map(may_be, measured, floors), strict=True)
        evens.append(
            BreakEven(
                tree=name,
                measured=pays_up_to(batches, [speedup.value for speedup in measured]),
                predicted=predicted[name],
                at_least=pays_up_to(batches, least),
                at_most=pays_up_to(batches, most),
            )
        )
    return evens


def _add_elsewhere(sweep: Sweep, elsewhere: ForwardTimes, trees: dict[str, Tree | None], taus: dict[str, float]) -> None:
    """Predict the other machine: speeds at the batches raced here and those timed there, and the break-even batch."""
    sizes = sorted({*sweep.batches, *elsewhere.costs.target})
    found = {batch: speedups(elsewhere.costs, trees, batch, taus) for batch in sizes}
    evens = break_evens(elsewhere.costs, trees, taus)
    sweep.elsewhere = elsewhere
    sweep.predicted_elsewhere = {name: {batch: found[batch][name] for batch in sizes} for name in trees}
    sweep.plain_elsewhere = {batch: plain_speed(elsewhere.costs, batch) for batch in sizes}
    for one in sweep.break_even:
        one.elsewhere = evens[one.tree]
    sweep.notes += [*differences(sweep.here, elsewhere), *_beyond("elsewhere", elsewhere, trees, sizes)]


def _beyond(where: str, times: ForwardTimes, trees: dict[str, Tree | None], batches: Sequence[int]) -> Iterator[str]:
    told = "; ".join(beyond_timed(times.costs, trees, batches))
    if told:
        yield f"{where} these were not timed, but taken from a line through the two largest sizes timed: {told}"
