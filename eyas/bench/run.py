"""A benchmark from contestants to a report: open the drafters, then one race for every temperature and batch size.

The report is written after every race, and a file that is there already is gone on with.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from eyas import machine
from eyas.bench.contestants import Contestant, Entrant, enter
from eyas.bench.figures import RaceReport
from eyas.bench.grid import Cell, Report
from eyas.bench.items import Item, filled
from eyas.bench.race import Rules, conditions_of, race
from eyas.decoding.sampling import SamplingParams
from eyas.errors import EyasError
from eyas.progress import Meter, progress
from eyas.target import Target


@dataclass(frozen=True)
class Plan:
    """What is raced: `items` under `params`, once for every temperature and batch size."""

    items: Sequence[Item]
    params: SamplingParams
    temperatures: Sequence[float] = (0.0,)
    batches: Sequence[int] = (1,)
    rules: Rules = field(default_factory=Rules)

    def __post_init__(self) -> None:
        for batch in self.batches:
            if batch < 1:
                raise EyasError(f"a batch holds 1 prompt or more, not {batch}")
        for temperature in self.temperatures:
            replace(self.params, temperature=temperature)

    @property
    def cells(self) -> list[Cell]:
        return [(temperature, batch) for temperature in self.temperatures for batch in self.batches]

    def of(self, cell: Cell) -> tuple[list[Item], SamplingParams, Rules]:
        """What one race is run with; prompts are asked again until every batch is full."""
        temperature, batch = cell
        return filled(self.items, batch), replace(self.params, temperature=temperature), replace(self.rules, batch=batch)


def run_bench(
    target: Target,
    contestants: Sequence[Contestant],
    plan: Plan,
    *,
    exact: bool = False,
    path: Path | None = None,
    fresh: bool = False,
    on_race: Callable[[RaceReport], None] = lambda _: None,
) -> Report:
    """Race `contestants` over the whole `plan`. `on_race` sees every race that is run now, when it has ended.

    With `path` the report is written there after every race, and races that the file holds already are not run again, one
    that was interrupted goes on; `fresh` begins anew. Ctrl-C ends the run early; the report then says so.
    The caches are as long as the longest prompt with its answers needs, within the target's limit. Raises EyasError when a
    drafter cannot be opened or does not fit, when a peer does not sample as some prompt or temperature asks, when the file's
    races were run under other conditions, and with `exact` for a target that is not bit-exact by construction.
    """
    entrants = [enter(contestant, target) for contestant in contestants]
    _require_able(entrants, plan)
    report = _begun(path if not fresh else None, target, entrants, plan)
    length = min(target.max_length, max((item.room(target, plan.params) for item in plan.items), default=1))
    total = {cell: sum(item.answers for item in plan.of(cell)[0]) for cell in plan.cells}
    finished = [cell for cell in plan.cells if (kept := report.race(cell)) is not None and not kept.interrupted]
    with progress("bench", sum(total.values()), "answers") as meter:
        meter.resume_at(sum(total[cell] for cell in finished))
        for cell in plan.cells:
            if cell in finished:
                continue
            try:
                found = _race(target, entrants, plan, cell, length, exact, report.race(cell), meter)
            except KeyboardInterrupt:
                if not report.races:
                    raise
                break
            report.put(found)
            if path is not None:
                report.write(path)
            on_race(found)
            if found.interrupted:
                break
    return report


def _race(
    target: Target, entrants: Sequence[Entrant], plan: Plan, cell: Cell, length: int, exact: bool, kept: RaceReport | None,
    meter: Meter,
) -> RaceReport:  # fmt: skip
    """One race, with fresh engines, so that no race depends on those before it; they are gone when it ends."""
    items, params, rules = plan.of(cell)
    racers = {
        e.contestant.name: e.engine(max_rows=rules.batch, max_length=length, sampling=rules.sampling, exact=exact)
        for e in entrants
    }
    entries = {e.contestant.name: e.entry for e in entrants}
    return race(target, racers, items, params, entries=entries, rules=rules, kept=kept, meter=meter)


def _require_able(entrants: Sequence[Entrant], plan: Plan) -> None:
    """Raises EyasError when an entrant cannot answer as some race or prompt asks: before the first race, not in the middle."""
    for entrant in entrants:
        for temperature in plan.temperatures:
            params = replace(plan.params, temperature=temperature)
            entrant.require_able(params)
            for item in plan.items:
                try:
                    entrant.require_able(item.params(params))
                except EyasError as error:
                    raise EyasError(f"prompt '{item.id}' of suite '{item.suite}': {error}") from error


def _begun(path: Path | None, target: Target, entrants: Sequence[Entrant], plan: Plan) -> Report:
    """The report in `path` where there is one, planned on. Raises EyasError when it does not belong to this plan."""
    entries = [entrant.entry for entrant in entrants]
    report = Report(contestants=entries, planned=[])
    if path is not None and path.exists():
        report = Report.read(path)
        items, params, rules = plan.of(plan.cells[0])
        other = report.difference(entries, conditions_of(target, params, items, rules)) if items else ""
        if other:
            raise EyasError(
                f"{path} was begun with {other}; give the same settings to go on with it, --fresh to begin anew or another name"
            )
    report.plan(plan.cells, machine.command_line())
    return report
