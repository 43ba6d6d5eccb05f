"""Converters of other projects, run as programs of their own."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Sequence
from pathlib import Path

from eyas.errors import EyasError
from eyas.export.engine import Order


def run_tool(command: Sequence[str | Path], hint: str) -> None:
    """Run `command` and wait for it, offline. Raises EyasError with the last line it printed, and `hint`, when it fails."""
    words = [str(word) for word in command]
    environment = {**os.environ, "HF_HUB_OFFLINE": "1"}
    try:
        done = subprocess.run(words, capture_output=True, text=True, errors="replace", env=environment)
    except OSError as error:
        raise EyasError(f"cannot run {words[0]}: {error.strerror}; {hint}") from error
    if done.returncode:
        told = (done.stderr.strip() or done.stdout.strip() or f"it ended with code {done.returncode}").splitlines()[-1]
        raise EyasError(f"{' '.join(Path(word).name for word in words[:2])} failed: {told}; {hint}")


def target_folder(order: Order) -> Path:
    """The folder the target lies in, for converters that read files. Raises EyasError for a hub id."""
    folder = Path(order.served_target)
    if not folder.is_dir():
        raise EyasError(f"this converter reads the target from a folder: download {order.served_target} and give its folder")
    return folder
