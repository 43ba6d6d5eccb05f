"""Rows of a data set on the hub, or of a folder as the library `datasets` lays it out, streamed where possible."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import httpx2

from eyas.errors import EyasError
from eyas.hub import Unreachable, on_hub

PREFIX = "hub:"


def is_hub(source: Path) -> bool:
    """Whether `source` names a data set rather than a file."""
    return str(source).startswith(PREFIX)


def hub_rows(source: Path) -> Iterator[dict[str, Any]]:
    """The rows of `hub:NAME[/CONFIG][:SPLIT]`; NAME is a hub id or a folder. Without a split it is train, or the only one.

    Raises EyasError in one line when there is no such data set, configuration or split, or the hub cannot be reached.
    """
    told, _, split = str(source).removeprefix(PREFIX).partition(":")
    name, config = _name_and_config(told)
    yield from _rows(str(source), lambda datasets: datasets.load_dataset(name, config, streaming=True), split)


def saved_rows(folder: Path) -> Iterator[dict[str, Any]]:
    """The rows of a folder that `save_to_disk` wrote. Raises EyasError when it is broken."""
    yield from _rows(str(folder), lambda datasets: datasets.load_from_disk(str(folder)), "")


def is_saved(folder: Path) -> bool:
    """Whether `save_to_disk` wrote the folder."""
    return any((folder / name).is_file() for name in ("state.json", "dataset_dict.json"))


def _rows(source: str, load: Any, split: str) -> Iterator[dict[str, Any]]:
    try:
        found = load(_library())
        yield from _split_of(source, found, split) if isinstance(found, Mapping) else found
    except EyasError:
        raise
    except (httpx2.HTTPError, OSError, ValueError, KeyError, TypeError, RuntimeError, ImportError) as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise EyasError(f"{source}: {reason}") from error


def _split_of(source: str, found: Mapping[str, Any], split: str) -> Any:
    wanted = split or ("train" if "train" in found else next(iter(found)) if len(found) == 1 else "")
    if wanted not in found:
        asked = f"there is no split '{split}'" if split else "there are several splits; name one, e.g. NAME:test"
        raise EyasError(f"{source}: {asked} (it has: {', '.join(map(str, found))})")
    return found[wanted]


def _name_and_config(told: str) -> tuple[str, str | None]:
    """NAME and CONFIG of `told`: a folder, NAME, OWNER/NAME, NAME/CONFIG or OWNER/NAME/CONFIG, as the hub has it."""
    if told and Path(told).is_dir():
        return told, None
    parts = told.split("/")
    readings: list[tuple[str, str | None]] = [("/".join(parts[:2]), "/".join(parts[2:]) or None)]
    if len(parts) == 2:
        readings.append((parts[0], parts[1]))
    if not all(parts) or len(parts) > 3:
        raise EyasError(f"'{PREFIX}{told}' is no folder, and a data set is named hub:NAME[/CONFIG][:SPLIT]")
    try:
        for reading in readings:
            if on_hub(reading[0], "dataset"):
                return reading
    except Unreachable as gone:
        if os.environ.get("HF_HUB_OFFLINE") in ("1", "ON", "YES", "TRUE"):
            return readings[0]  # the library may have it in its cache, and asks nobody
        raise EyasError(f"data set '{told}': {gone}; a copy in the cache is read with HF_HUB_OFFLINE=1") from gone
    raise EyasError(f"data set '{told}': the hub shows none of that name (a private one needs `hf auth login` or HF_TOKEN)")


def _library() -> ModuleType:
    try:
        import datasets
    except ImportError as error:
        raise EyasError("reading data sets needs the package datasets; run: pip install 'eyas[data]'") from error
    datasets.disable_progress_bars()
    return datasets
