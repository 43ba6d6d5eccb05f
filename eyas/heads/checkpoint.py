"""A head's files as they lie on disk, read without building the network: the configuration, the tensors, whose layout."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from eyas.errors import EyasError
from eyas.heads.layouts.recognise import recognise
from eyas.shards import read_tensors

CONFIG = "config.json"


@dataclass(frozen=True)
class Checkpoint:
    """What a folder holds: `config` as in its config.json, `tensors` by their names and dtypes on disk.

    `layout` names the family of writers: "eyas", "safeailab", "specforge", "speculators" or "modelopt".
    """

    folder: Path
    config: dict[str, Any]
    tensors: dict[str, Tensor]
    layout: str


def read_checkpoint(folder: Path | str, device: torch.device | str = "cpu") -> Checkpoint:
    """The head in `folder`, unchecked: it may lack tensors or contradict itself.

    Raises EyasError when a file is missing, damaged or holds more than plain data.
    """
    folder = Path(folder)
    config = read_raw_config(folder)
    return Checkpoint(folder, config, read_tensors(folder, device), recognise(config))


def read_raw_config(folder: Path) -> dict[str, Any]:
    """config.json as it is. Raises EyasError when there is none or it is no JSON object."""
    path = folder / CONFIG
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError):
        raise EyasError(f"no head in {folder}: {CONFIG} is missing") from None
    except (OSError, ValueError) as error:
        raise EyasError(f"{path} is damaged: {error}") from error
    if not isinstance(config, dict):
        raise EyasError(f"{path} is damaged: it holds no JSON object")
    return config
