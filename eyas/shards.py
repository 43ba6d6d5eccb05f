"""The weight files of a model folder, as published ones are laid out: safetensors or pickles, whole or in shards."""

from __future__ import annotations

import json
import pickle
import re
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from eyas.errors import EyasError

SAFETENSORS, PICKLE = "model.safetensors", "pytorch_model.bin"
_NUMBERED = re.compile(r"-(\d+)-of-(\d+)\.(?:safetensors|bin)$")


def weight_files(folder: Path) -> list[Path]:
    """The files that hold the weights in `folder`; safetensors go before pickles, a whole file before shards.

    Raises EyasError when there are none, or when an index or the shards' own numbering names files that are not there.
    """
    for whole in (SAFETENSORS, PICKLE):
        if (folder / whole).is_file():
            return [folder / whole]
        if index_path(folder, whole).is_file():
            return _indexed(folder, whole)
        shards = numbered_shards(folder, whole)
        if shards:
            return shards
    raise EyasError(f"{folder} has no {SAFETENSORS} and no {PICKLE}, whole or in shards")


def index_path(folder: Path, whole: str) -> Path:
    """Where the index of the shards of the file `whole` lies: `<whole>.index.json`."""
    return folder / f"{whole}.index.json"


def numbered_shards(folder: Path, whole: str) -> list[Path]:
    """Shards of the file `whole` by their names alone (`<stem>-00001-of-00003<suffix>`), in order.

    Raises EyasError when the names say that some are missing.
    """
    stem, suffix = Path(whole).stem, Path(whole).suffix
    shards = sorted(path for path in folder.glob(f"{stem}-*{suffix}") if _NUMBERED.search(path.name))
    numbers = [(int(found[1]), int(found[2])) for path in shards if (found := _NUMBERED.search(path.name))]
    for _, count in numbers:
        missing = sorted(set(range(1, count + 1)) - {n for n, of in numbers if of == count})
        if missing or len(numbers) != count:
            what = f"number {missing[0]} of {count} is missing" if missing else "two sets of shards lie there"
            raise EyasError(f"{folder}: the shards of {whole} are not complete ({what}); copy it again")
    return shards


def read_tensors(folder: Path, device: torch.device | str = "cpu") -> dict[str, Tensor]:
    """Every tensor of the weight files in `folder`, as stored. Pickles are read as plain data and never executed.

    Raises EyasError when a file is missing, damaged or no plain state dict, when shards overlap, or when an index names
    tensors that its files do not hold.
    """
    tensors: dict[str, Tensor] = {}
    files = weight_files(folder)
    for path in files:
        held = _read(path, device)
        twice = sorted(held.keys() & tensors.keys())
        if twice:
            raise EyasError(f"{folder}: two shards hold the tensor '{twice[0]}'")
        tensors.update(held)
    for whole in (SAFETENSORS, PICKLE):
        if len(files) > 1 and files[0].suffix == Path(whole).suffix and index_path(folder, whole).is_file():
            lost = sorted(_weight_map(folder, whole).keys() - tensors.keys())
            if lost:
                raise EyasError(f"{index_path(folder, whole)} names the tensor '{lost[0]}', which its files do not hold")
    return tensors


def _indexed(folder: Path, whole: str) -> list[Path]:
    names = sorted(set(_weight_map(folder, whole).values()))
    for name in names:
        if not (folder / name).is_file():
            raise EyasError(f"{index_path(folder, whole)} names the file '{name}', which is not there; copy it again")
    return [folder / name for name in names]


def _weight_map(folder: Path, whole: str) -> dict[str, str]:
    """Tensor name -> file name, as the index tells it."""
    path = index_path(folder, whole)
    try:
        told = json.loads(path.read_text(encoding="utf-8"))["weight_map"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise EyasError(f"{path} is damaged: it holds no weight_map") from error
    if not isinstance(told, dict) or not told or not all(isinstance(n, str) and Path(n).name == n for n in told.values()):
        raise EyasError(f"{path} is damaged: its weight_map must name files in the same folder")
    return told


def _read(path: Path, device: torch.device | str) -> dict[str, Tensor]:
    try:
        if path.suffix == ".safetensors":
            return load_file(path, device=str(device))
        state = torch.load(path, map_location=device, weights_only=True)
    except pickle.UnpicklingError as error:
        raise EyasError(
            f"{path} holds code beside tensors, or is damaged, and is therefore not opened; get it as safetensors"
        ) from error
    except (SafetensorError, OSError, EOFError, RuntimeError, ValueError, KeyError) as error:
        told = str(error).splitlines()
        raise EyasError(f"{path} is damaged: {told[0] if told else type(error).__name__}; copy it again") from error
    if not isinstance(state, dict) or not all(isinstance(t, Tensor) for t in state.values()):
        raise EyasError(f"{path} is no state dict: it must map names to tensors")
    return {str(name): tensor for name, tensor in state.items()}
