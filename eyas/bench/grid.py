"""A benchmark's report: one race for every temperature and batch size, in one JSON file that grows race by race."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from pydantic import BaseModel, ValidationError

from eyas.bench.figures import DEFINITIONS, Conditions, Entry, RaceReport
from eyas.bench.prediction import Sweep
from eyas.errors import EyasError, first_fault
from eyas.files import write_text

Cell = tuple[float, int]  # temperature and batch size
FREE = {"temperature", "batch", "repeated", "date"}  # conditions in which the races of one report may differ


class Report(BaseModel):
    """`races` in the order of `planned`, as far as they have been run, by `commands`."""

    eyas: str = "bench"
    version: int = 2
    definitions: dict[str, str] = DEFINITIONS
    contestants: list[Entry]
    planned: list[Cell]
    races: list[RaceReport] = []
    commands: list[str] = []
    sweep: Sweep | None = None

    @property
    def unfinished(self) -> list[Cell]:
        """The planned races that are missing or were not run to their end."""
        return [cell for cell in self.planned if (race := self.race(cell)) is None or race.interrupted]

    def race(self, cell: Cell) -> RaceReport | None:
        return next((race for race in self.races if race.cell == cell), None)

    def put(self, race: RaceReport) -> None:
        """Add a race, or replace the one with its temperature and batch size."""
        self.races = [other for other in self.races if other.cell != race.cell] + [race]
        order = {cell: n for n, cell in enumerate(self.planned)}
        self.races.sort(key=lambda one: order[one.cell])

    def plan(self, cells: list[Cell], command: str) -> None:
        """Add what is to be raced, by `command`, to what there is."""
        self.planned = sorted({*self.planned, *cells})
        if command not in self.commands:
            self.commands.append(command)

    @classmethod
    def read(cls, path: Path) -> Report:
        """The report in a JSON file. Raises EyasError when it is missing or is no such report."""
        try:
            return cls.model_validate_json(path.read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError) as error:
            reason = getattr(error, "strerror", None) or "it is no text"
            raise EyasError(f"cannot read the report {path}: {reason}") from error
        except ValidationError as error:
            raise EyasError(f"{path} is not a report written by `eyas bench --json` ({first_fault(error)})") from error

    def write(self, path: Path) -> None:
        write_text(path, self.model_dump_json(indent=1))

    def difference(self, contestants: Sequence[Entry], conditions: Conditions) -> str:
        """The first thing, in words, in which a race of these would not belong into this report; "" where it does."""
        told = {one.name: one for one in contestants}
        for one in self.contestants:
            if told.get(one.name) != one:
                return f"{one}, not {told.get(one.name, 'without it')}"
        new = [one for one in contestants if one not in self.contestants]
        if new:
            return f"no {new[0]}"
        now = conditions.model_dump(exclude=FREE)
        for race in self.races:
            before = race.conditions.model_dump(exclude=FREE)
            for key in before:
                if before[key] != now[key]:
                    return f"{key.replace('_', ' ')} {before[key]}, not {now[key]}"
        return ""
