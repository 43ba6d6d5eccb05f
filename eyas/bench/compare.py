"""Two reports side by side: what changed, race by race, and whether it is more than noise."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
from pydantic import BaseModel
from rich.console import Group, RenderableType
from rich.text import Text

from eyas.bench.arithmetic import bootstrap, by_prompt, quotient, speed_columns, speed_ratio, tau_columns
from eyas.bench.figures import PLAIN, Interval, RaceReport, Turn
from eyas.bench.grid import Report
from eyas.errors import EyasError
from eyas.tables import bare_table

RULE = (
    "ratio: second / first on the prompts both have, with its 95 % bootstrap interval over prompts; a change is real "
    "when the interval leaves out 1 and, for speed-ups, the ratio is further from 1 than plain decoding was from itself. "
    "tokens/s has no verdict: how the machine itself changed between the runs is in it; in a speed-up it cancels"
)


class Change(BaseModel):
    """One figure of one drafter in both reports."""

    drafter: str
    figure: str
    first: float
    second: float
    ratio: Interval
    floor: float = 0.0  # relative difference that is noise by itself
    verdict: str = ""  # "up", "down" or "same"; "" where drift of the machine cannot be told from a change


class Comparison(BaseModel):
    """What changed from a race of the first report to that of the same temperature and batch size of the second."""

    temperature: float
    batch: int
    prompts: int  # in both
    left_out: int  # in one only
    conditions: list[tuple[str, str, str]]  # (name, first, second) where they differ
    changes: list[Change]
    answers_changed: dict[str, int]  # per drafter: answers whose tokens are not the same in both reports
    answers: int


class Compared(BaseModel):
    """Two reports, race by race."""

    races: list[Comparison]
    left_out: list[str]  # races and drafters that are in one report only


def compare(first: Path | Report, second: Path | Report) -> Compared:
    """Compare the races of two reports that have the same temperature and batch size.

    Raises EyasError when a file is no report, or when they share no such race, or no prompt.
    """
    a = first if isinstance(first, Report) else Report.read(first)
    b = second if isinstance(second, Report) else Report.read(second)
    pairs = [(race, other) for race in a.races if (other := b.race(race.cell)) is not None]
    if not pairs:
        told = ["; ".join("T {:g} at batch {}".format(*race.cell) for race in report.races) or "none" for report in (a, b)]
        raise EyasError(f"the two reports share no temperature and batch size (first: {told[0]}; second: {told[1]})")
    shared = {race.cell for race, _ in pairs}
    lonely = [f"T {t:g}, batch {n}" for t, n in dict.fromkeys(r.cell for r in (*a.races, *b.races)) if (t, n) not in shared]
    names = [{entry.name for entry in report.contestants} for report in (a, b)]
    return Compared(races=[compare_races(*pair) for pair in pairs], left_out=lonely + sorted(names[0] ^ names[1]))


def compare_races(a: RaceReport, b: RaceReport) -> Comparison:
    """Compare two races on the prompts they share. Raises EyasError when they share none."""
    keys_a, keys_b = {_key(r): r for r in a.rows}, {_key(r): r for r in b.rows}
    shared = [key for key in keys_a if key in keys_b]
    names = [name for name in a.drafters if name in b.drafters]
    if not shared:
        raise EyasError("the two reports share no prompt (same suite, id and turn), so there is nothing to compare")
    rows_a, rows_b = [keys_a[k] for k in shared], [keys_b[k] for k in shared]
    floor = max((r.noise.floor for r in (a, b) if r.noise is not None), default=0.0)
    changes = [change for name in names for change in _changes(name, by_prompt(rows_a), by_prompt(rows_b), floor)]
    return Comparison(
        temperature=a.conditions.temperature,
        batch=a.conditions.batch,
        prompts=len({key[:2] for key in shared}),
        left_out=len({key[:2] for key in keys_a.keys() ^ keys_b.keys()}),
        conditions=_differences(a, b, names),
        changes=changes,
        answers_changed={
            n: sum(x.runs[n].digest != y.runs[n].digest for x, y in zip(rows_a, rows_b, strict=True)) for n in names
        },
        answers=len(shared),
    )


def _key(row: Turn) -> tuple[str, str, int, int]:
    return *row.key, row.turn


def _changes(name: str, a: list[list[Turn]], b: list[list[Turn]], floor: float) -> list[Change]:
    speeds = [speed_columns(side, [name, PLAIN]) for side in (a, b)]  # 2 x [N, 4]
    changes = [_change(name, "tokens/s", speeds, quotient)]
    if name != PLAIN:
        taus = [tau_columns(side, name) for side in (a, b)]
        changes.append(_judged(_change(name, "speed-up", speeds, speed_ratio), floor))
        changes.append(_judged(_change(name, "tau", taus, quotient), 0.0))
    return changes


def _judged(change: Change, floor: float) -> Change:
    """`change` with its verdict, given the relative difference that is noise by itself."""
    ratio = change.ratio
    beyond = (ratio.low > 1 or ratio.high < 1) and abs(ratio.value - 1) > floor
    verdict = "same" if not beyond else "up" if ratio.value > 1 else "down"
    return change.model_copy(update={"floor": floor, "verdict": verdict})


def _change(name: str, figure: str, sides: Sequence[np.ndarray], value: Callable[[np.ndarray], np.ndarray]) -> Change:
    """Both values and their ratio; prompts are resampled for both sides together."""
    width = sides[0].shape[1]

    def ratio(sums: np.ndarray) -> np.ndarray:  # [..., 2 x width] -> [...]
        before, after = value(sums[..., :width]), value(sums[..., width:])
        return np.divide(after, before, out=np.ones_like(after), where=before > 0)

    first, second = (float(value(side.sum(0))) for side in sides)
    return Change(
        drafter=name, figure=figure, first=first, second=second, ratio=bootstrap(np.concatenate(sides, axis=1), ratio)
    )


def _differences(a: RaceReport, b: RaceReport, names: list[str]) -> list[tuple[str, str, str]]:
    """Conditions that are not the same in both; the date is left out."""
    one, two = a.conditions.model_dump(exclude={"date"}), b.conditions.model_dump(exclude={"date"})
    found = [(key, str(one[key]), str(two[key])) for key in one if one[key] != two[key]]
    for name in names:
        for key in ("source", "head", "tree"):
            x, y = getattr(a.drafters[name], key), getattr(b.drafters[name], key)
            if x != y:
                found.append((f"{name}'s {key}", x or "-", y or "-"))
    return found


def comparison_table(compared: Compared) -> RenderableType:
    """The comparison for a terminal: race by race what differed in the conditions, then every figure with its verdict."""
    parts: list[RenderableType] = []
    for race in compared.races:
        if len(compared.races) > 1:
            parts.append(Text(f"T {race.temperature:g}, batch {race.batch}", "bold underline"))
        parts += [_race_table(race), ""]
    if compared.left_out:
        parts.append(Text(f"in one report only: {', '.join(compared.left_out)}", "dim"))
    return Group(*parts, Text(f"{RULE}.", "dim"))


def _race_table(comparison: Comparison) -> RenderableType:
    shown = bare_table(["drafter", "figure", "first", "second", "ratio", "verdict"], left=2)
    colours = {"up": "bold green", "down": "bold red", "same": "dim", "": "dim"}
    words = {"same": "within noise", "": "-"}
    for c in comparison.changes:
        ratio = f"{c.ratio.value:.3f} [{c.ratio.low:.3f}, {c.ratio.high:.3f}]"
        verdict = words.get(c.verdict, f"{c.verdict} {100 * (c.ratio.value - 1):+.1f} %")
        cells = [c.drafter, c.figure, f"{c.first:.2f}", f"{c.second:.2f}", ratio]
        shown.add_row(*map(Text, cells), Text(verdict, colours[c.verdict]))
    lines = [Text(f"{name}: {x} -> {y}") for name, x, y in comparison.conditions]
    if not lines:
        lines = [Text("conditions: the same", "dim")]
    for name, count in comparison.answers_changed.items():
        if count:
            lines.append(Text(f"{name}: {count} of {comparison.answers} answers have other tokens than before", "bold"))
    shared = f"{comparison.prompts} prompts in both, {comparison.left_out} in one only and left out"
    return Group(*lines, "", shown, "", Text(shared, "dim"))
