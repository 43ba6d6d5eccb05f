"""What a long job will take of disk, memory and time, said before it begins; what cannot fit is refused."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import psutil

from eyas.errors import EyasError
from eyas.machine import PeakMemory
from eyas.progress import clock, console

LONG_S = 3600.0  # a job this long is begun only with the user's consent, where there is somebody to ask
SHOWN_S, SHOWN_BYTES = 60.0, 100_000_000  # smaller jobs are not worth a line
CGROUPS = (("memory.max", "memory.current"), ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes"))


@dataclass(frozen=True)
class Consent:
    """`ask` puts a question to the user (None: there is nobody to ask, so nothing is asked); with `force` a job is begun
    though it does not seem to fit."""

    ask: Callable[[str], bool] | None = None
    force: bool = False


@dataclass(frozen=True)
class Estimate:
    """What `job` still needs: `disk` bytes below `folder`, `memory` bytes beyond what is in use, and `seconds`, None where the
    user has bounded them."""

    job: str
    folder: Path
    disk: int
    memory: int = 0
    seconds: float | None = None

    def line(self) -> str:
        """The figures in one line."""
        parts = [f"about {clock(self.seconds)}"] if self.seconds is not None else []
        parts += [f"{size(self.disk)} of disk"] + ([f"{size(self.memory)} more memory"] if self.memory else [])
        return f"{self.job}: {', '.join(parts)}"


def admit(estimate: Estimate, consent: Consent) -> None:
    """Say what the job needs where that is much. Raises EyasError when it cannot fit, or the user does not want it."""
    if (estimate.seconds or 0) >= SHOWN_S or estimate.disk >= SHOWN_BYTES or estimate.memory >= SHOWN_BYTES:
        console.print(estimate.line(), markup=False)
    for needed, free, what in (
        (estimate.disk, disk_free(estimate.folder), f"of disk in {estimate.folder}"),
        (estimate.memory, memory_free(), "of memory"),
    ):
        if needed > free:
            told = f"{estimate.job} needs about {size(needed)} {what}, and {size(free)} are free"
            if not consent.force:
                raise EyasError(f"{told}; make room, make the job smaller, or begin all the same with --force")
            console.print(f"{told}; begun all the same", style="yellow", markup=False)
    if (estimate.seconds or 0) >= LONG_S and consent.ask is not None and not consent.ask("begin?"):
        raise EyasError("not begun; --minutes bounds a job, --yes answers this question")


def size(count: float) -> str:
    """`count` bytes as people write them."""
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.0f} {unit}" if unit in ("B", "kB") else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.1f} TB"


def disk_free(folder: Path) -> int:
    """Bytes free where `folder` is, or will be."""
    there = folder.absolute()
    while not there.exists():
        there = there.parent
    return shutil.disk_usage(there).free


def memory_free(root: Path = Path("/sys/fs/cgroup")) -> int:
    """Bytes of memory that this process may still take: what the machine has free, within the limit of its control group."""
    free = psutil.virtual_memory().available
    for limit, used in CGROUPS:
        try:
            bound = int((root / limit).read_text()) - int((root / used).read_text())
        except (OSError, ValueError):  # no such group, or "max": no limit
            continue
        free = min(free, max(bound, 0))
    return free


def peak_memory() -> int:
    """The most bytes of memory that this process has held so far."""
    return round(PeakMemory().read() * 2**20)
