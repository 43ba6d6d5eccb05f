"""What a measurement was taken on and with: processor, libraries, memory."""

from __future__ import annotations

import platform
import resource
import shlex
import sys
import time
from importlib.metadata import version
from pathlib import Path

import torch


def processor() -> str:
    """The processor's name as the system gives it."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    named = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return named[0] if named else platform.processor() or platform.machine()


def accelerated(device: torch.device) -> str:
    """Processor, and the accelerator where the target runs on one."""
    return f"{torch.cuda.get_device_name(device)}, {processor()}" if device.type == "cuda" else processor()


def versions() -> dict[str, str]:
    return {name: version(name) for name in ("torch", "transformers", "eyas")}


def command_line() -> str:
    """What this process was called with, to be typed again."""
    program, *told = sys.argv
    called = "eyas" if Path(program).parts[-2:] in (("bin", "eyas"), ("cli", "main.py")) else program
    return shlex.join([called, *told])


def clock(device: torch.device) -> float:
    """The time in seconds when `device` has done what it was told: an accelerator's kernels are queued, not waited for."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


class PeakMemory:
    """The process's largest resident memory, in MiB, since `restart`; on an accelerator the most that was allocated there.

    Linux forgets its high-water mark on request, which makes the figure one of a single run; elsewhere it is the
    process's largest so far.
    """

    def __init__(self, device: torch.device = torch.device("cpu")) -> None:
        self._device = device

    def restart(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self._device)
            return
        try:
            Path("/proc/self/clear_refs").write_text("5")  # 5 = reset VmHWM (Linux, proc(5))
        except OSError:
            return

    def read(self) -> float:
        if self._device.type == "cuda":
            return float(torch.cuda.max_memory_allocated(self._device) / 2**20)
        try:
            status = Path("/proc/self/status").read_text()
        except OSError:
            status = ""
        peaks = [int(line.split()[1]) / 1024 for line in status.splitlines() if line.startswith("VmHWM:")]
        if peaks:
            return peaks[0]
        unit = 2**20 if sys.platform == "darwin" else 2**10  # getrusage counts bytes there, KiB elsewhere
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / unit
