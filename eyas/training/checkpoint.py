"""The state of an interrupted run, written atomically beside the head."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from eyas.errors import EyasError
from eyas.files import replacing

STATE = "state.pt"


def save_state(folder: Path, state: dict[str, Any]) -> None:
    """Replace the saved state by `state`; an interruption leaves the old one whole. Raises EyasError when the disk is full."""
    with replacing(folder / STATE, "; the state before it is kept") as part:
        torch.save(state, part)


def load_state(folder: Path) -> dict[str, Any] | None:
    """The saved state, on the CPU, or None where there is none. Raises EyasError when it is damaged."""
    path = folder / STATE
    if not path.is_file():
        return None
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
        if set(state) - {"scaler"} != {"head", "optimizer", "place"}:
            raise ValueError("it holds other things")
        return state
    except Exception as error:
        raise EyasError(f"{path} is damaged ({type(error).__name__}); delete it to train from the start") from error
