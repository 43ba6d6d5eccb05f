"""Progress of long jobs: done, total, rate, ETA and a few live figures, on a terminal and in a log file alike."""

from __future__ import annotations

import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn

console = Console(stderr=True, highlight=False)

LOG_EVERY_S = 15.0  # without a terminal one plain line is printed this often


def clock(seconds: float) -> str:
    """`seconds` as 1:02:03 or 4:05; a dash while it is unknown."""
    if seconds != seconds or seconds in (float("inf"), float("-inf")):
        return "-"
    minutes, s = divmod(int(max(seconds, 0)), 60)
    hours, m = divmod(minutes, 60)
    return f"{hours}:{m:02d}:{s:02d}" if hours else f"{m}:{s:02d}"


class Meter:
    """One job's progress. `advance` moves it by work done, `at` sets it; keyword figures are shown beside the ETA."""

    def __init__(self, label: str, total: float, unit: str) -> None:
        self.label, self.total, self.unit = label, total, unit
        self.done = 0.0
        self.start = time.monotonic()
        self._from = 0.0  # where this process began: resumed work does not count towards the rate
        self._last_line = self.start
        self._bar: Progress | None = None
        if console.is_terminal:
            self._bar = Progress(
                TextColumn("[bold]{task.description}"), BarColumn(bar_width=24), TextColumn("{task.fields[line]}"),
                console=console, transient=False,
            )  # fmt: skip
            self._task = self._bar.add_task(label, total=total, line="")

    def resume_at(self, done: float) -> None:
        """Count `done` units as finished by an earlier process."""
        self.done = self._from = done

    @property
    def eta(self) -> float:
        """Seconds to the end at the rate so far; infinity before the first unit."""
        worked, spent = self.done - self._from, time.monotonic() - self.start
        return (self.total - self.done) * spent / worked if worked > 0 else float("inf")

    def line(self, figures: dict[str, str]) -> str:
        share = 100 * self.done / self.total if self.total else 100.0
        shown = "  ".join(f"{k} {v}" for k, v in figures.items())
        return f"{share:3.0f}%  {self.done:,.0f}/{self.total:,.0f} {self.unit}  ETA {clock(self.eta)}  {shown}".rstrip()

    def at(self, done: float, **figures: str) -> None:
        self.done = done
        line = self.line(figures)
        if self._bar is not None:
            self._bar.update(self._task, completed=done, line=line)
        elif time.monotonic() - self._last_line >= LOG_EVERY_S:
            self._last_line = time.monotonic()
            print(f"{self.label}: {line}", file=sys.stderr, flush=True)

    def advance(self, units: float = 1.0, **figures: str) -> None:
        self.at(self.done + units, **figures)


@contextmanager
def progress(label: str, total: float, unit: str = "") -> Iterator[Meter]:
    """Show `label` moving towards `total` `unit`s while the block runs, and what it took when it ends."""
    meter = Meter(label, total, unit)
    if meter._bar is not None:
        meter._bar.start()
    try:
        yield meter
    finally:
        if meter._bar is not None:
            meter._bar.stop()
        took = clock(time.monotonic() - meter.start)
        console.print(f"{label}: {meter.done:,.0f}/{meter.total:,.0f} {unit} in {took}")


class Interrupt:
    """Turns the first Ctrl-C (or SIGTERM) into a flag that a long job looks at between two steps; the second one stops it.

    A context manager; `asked` says whether to finish cleanly. Outside the main thread it changes nothing.
    """

    def __init__(self) -> None:
        self.asked = False
        self._before: dict[int, object] = {}

    def __enter__(self) -> Interrupt:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                self._before[number] = signal.signal(number, self._first)
        return self

    def __exit__(self, *_: object) -> None:
        self._restore()

    def _first(self, *_: object) -> None:
        self.asked = True
        self._restore()

    def _restore(self) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)  # type: ignore[arg-type]
        self._before = {}
