"""Where a command's answer goes."""

from __future__ import annotations

import os

from rich.console import Console

WIDTH = 120  # of a race's tables


def stdout() -> Console:
    """The console of standard output, wide enough for tables where no terminal says how wide it is."""
    console = Console(highlight=False)
    if not console.is_terminal and "COLUMNS" not in os.environ:
        console.width = WIDTH
    return console
