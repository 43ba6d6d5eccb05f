"""How many threads the products use: as many as there are idle cores.

Threads that wait for each other spin; beside a busy process two of them can run many times slower than one.
"""

from __future__ import annotations

import os

import psutil
import torch

LOOK_S = 0.3  # how long the machine is watched


def choose_threads() -> str:
    """Set torch's thread count to the cores that are idle now, and say so in one line.

    OMP_NUM_THREADS, where set, decides instead.
    """
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    if "OMP_NUM_THREADS" in os.environ:
        return f"{torch.get_num_threads()} threads (OMP_NUM_THREADS)"
    busy = psutil.cpu_percent(interval=LOOK_S) / 100 * (os.cpu_count() or 1)
    idle = max(1, min(cores, round(cores - busy)))
    torch.set_num_threads(idle)
    why = "" if idle == cores else f", the others are busy; OMP_NUM_THREADS={cores} overrides"
    return f"{idle} of {cores} cores{why}"
