"""The door to heads on disk: every public layout is read, our own is written.

Our own is a flat `config.json` and `model.safetensors` under the authors' names, which serving engines read as it stands.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from pydantic import ValidationError
from safetensors.torch import save_file
from torch import Tensor, nn

from eyas.errors import EyasError
from eyas.files import replacing, sha256, write_text
from eyas.heads.checkpoint import CONFIG, Checkpoint, read_checkpoint, read_raw_config
from eyas.heads.config import HeadConfig, MedusaConfig
from eyas.heads.eagle1 import Eagle1Head
from eyas.heads.eagle3 import Eagle3Head
from eyas.heads.head import DraftHead
from eyas.heads.layouts import eagle1, flat, medusa, modelopt, speculators
from eyas.heads.layouts.names import spelling, to_ours
from eyas.heads.layouts.record import write_record
from eyas.heads.layouts.taps import read_taps
from eyas.heads.medusa import MedusaHead
from eyas.shards import PICKLE, SAFETENSORS, weight_files
from eyas.target import Target

__all__ = [
    "Checkpoint", "head_hash", "load_any_head", "load_eagle1_head", "load_head", "read_checkpoint",
    "save_head", "stored_tensors", "tap_ids", "write_head",
]  # fmt: skip

EMBEDDING = "embed_tokens.weight"
_READERS: dict[str, Callable[[dict[str, Any], dict[str, Tensor], Target], HeadConfig]] = {
    "eyas": flat.read,
    "specforge": flat.read,
    "safeailab": flat.read,
    "modelopt": modelopt.read,
    "speculators": speculators.read,
}


def load_head(folder: Path | str, target: Target, *, widen: bool = False) -> Eagle3Head:
    """Read the EAGLE-3 head in `folder`, of any public layout, for `target`; float32, on the target's device. With `widen`
    the target may have tokens after those that the head knows; none of them is drafted.

    Every tensor is used and every parameter set, or the load fails. An embedding equal to the target's is the target's.
    Raises EyasError, in one line, for a missing or damaged file, a missing or left-over tensor, a wrong shape, a variant of
    the network that eyas does not know, or a head that was made for another target.
    """
    checkpoint = read_checkpoint(folder, target.device)
    if eagle1.is_eagle1(checkpoint):
        raise EyasError(f"{checkpoint.folder} holds an EAGLE-1 head; an EAGLE-3 head is wanted here")
    if medusa.is_medusa(checkpoint):
        raise EyasError(f"{checkpoint.folder} holds Medusa heads; an EAGLE-3 head is wanted here")
    return _eagle3(checkpoint, target, widen)


def load_eagle1_head(folder: Path | str, target: Target) -> Eagle1Head:
    """Read the EAGLE-1 (or EAGLE-2) head in `folder` for `target`, as `load_head` does."""
    checkpoint = read_checkpoint(folder, target.device)
    if not eagle1.is_eagle1(checkpoint):
        raise EyasError(f"{checkpoint.folder} holds no EAGLE-1 head")
    return _eagle1(checkpoint, target)


def load_any_head(folder: Path | str, target: Target) -> DraftHead:
    """Read the head in `folder` for `target`, of whatever kind; the taps of `target` do not matter."""
    checkpoint = read_checkpoint(folder, target.device)
    if medusa.is_medusa(checkpoint):
        return _medusa(checkpoint, target)
    if eagle1.is_eagle1(checkpoint):
        return _eagle1(checkpoint, target)
    named = _taps(checkpoint.folder, checkpoint.config)
    return _eagle3(checkpoint, target.tapped(named) if named else target)


def _eagle3(checkpoint: Checkpoint, target: Target, widen: bool = False) -> Eagle3Head:
    with _about(checkpoint.folder):
        tensors = _without_targets_embedding(to_ours(checkpoint.tensors), target)
        config = _READERS[checkpoint.layout](checkpoint.config, tensors, target)
        if widen and config.vocab_size < target.vocab_size:
            config, tensors = _widened(config, tensors, target.vocab_size)
    config.check_target(target)
    with _about(checkpoint.folder):
        head = Eagle3Head(config, target.embedding.float(), _vocabulary(config, tensors).to(target.device))
        _fill(head, tensors, spelling(checkpoint.tensors), derived=("d2t", "t2d"))
    return head.to(target.device).eval()


def _eagle1(checkpoint: Checkpoint, target: Target) -> Eagle1Head:
    with _about(checkpoint.folder):
        tensors = _without_targets_embedding(checkpoint.tensors, target)
        config = eagle1.read(checkpoint.config, tensors)
    config.check_target(target.tapped(config.taps(target)))
    with _about(checkpoint.folder):
        head = Eagle1Head(config, target.embedding.float(), projection_of(target))
        _fill(head, tensors)
    return head.to(target.device).eval()


def _medusa(checkpoint: Checkpoint, target: Target) -> MedusaHead:
    with _about(checkpoint.folder):
        tensors = medusa.to_ours(checkpoint.tensors)
        config = medusa.read(checkpoint.config, tensors, target)
    config.check_target(target.tapped(config.taps(target)))
    with _about(checkpoint.folder):
        head = MedusaHead(config, _vocabulary(config, tensors).to(target.device))
        _fill(head, tensors, derived=("d2t", "t2d"))
    return head.to(target.device).eval()


def projection_of(target: Target) -> Tensor:
    """The target's vocabulary projection, float32 [V, H], for heads that end in it. Raises EyasError when it is quantised."""
    if not target.lm_head_weight.is_floating_point():
        raise EyasError(f"the vocabulary projection of '{target.name}' is quantised, and an EAGLE-1 head needs it as it was")
    return target.lm_head_weight.float()


def save_head(head: DraftHead, folder: Path | str) -> None:
    """Write `head` to `folder`, replacing what is there only when the new files are whole.

    Raises EyasError when the disk is full or the folder cannot be written.
    """
    dtype = str(next(head.parameters()).dtype).removeprefix("torch.")
    tensors = stored_tensors(head)
    if isinstance(head, Eagle3Head):
        config = flat.write(head.config, dtype)
    elif isinstance(head, Eagle1Head):
        config = eagle1.write(head.config, dtype)
    else:
        assert isinstance(head, MedusaHead)
        config, tensors = medusa.write(head.config, dtype), medusa.to_theirs(tensors)
    write_head(Path(folder), {**config, **write_record(head.config)}, tensors)


def stored_tensors(head: DraftHead) -> dict[str, Tensor]:
    """What of `head` is written, by our names, on the CPU; the maps of a whole vocabulary are left out as everywhere."""
    tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in head.state_dict().items()}
    if "d2t" in tensors and not head.d2t.any() and bool(head.t2d.all()):
        del tensors["d2t"], tensors["t2d"]
    return tensors


def write_head(folder: Path, config: dict[str, Any], tensors: dict[str, Tensor], *, weights: str = SAFETENSORS) -> None:
    """Write a config.json and the file `weights` ("model.safetensors" or "pytorch_model.bin") to `folder`."""
    with replacing(folder / weights) as part:
        if weights == PICKLE:
            torch.save({name: tensor.clone() for name, tensor in tensors.items()}, part)  # not what else shares its storage
        else:
            save_file(tensors, part, metadata={"format": "pt"})
        part.chmod(0o644)  # a server may run as another user
    write_text(folder / CONFIG, json.dumps(config, indent=2))


def tap_ids(*folders: Path | str) -> tuple[int, ...] | None:
    """The taps that the heads in `folders` name, to load their target with; None where they leave them to the default.

    Raises EyasError when two heads name different ones, since a target is loaded with one choice.
    """
    named: dict[tuple[int, ...], Path] = {}
    for folder in map(Path, folders):
        taps = _taps(folder, read_raw_config(folder))
        if taps:
            named.setdefault(taps, folder)
    if len(named) > 1:
        (taps, one), (others, other) = list(named.items())[:2]
        raise EyasError(f"the head {one} reads taps {list(taps)} and {other} {list(others)}; use them one at a time")
    return next(iter(named), None)


def _taps(folder: Path, config: dict[str, Any]) -> tuple[int, ...] | None:
    with _about(folder):
        return read_taps(config)


def head_hash(folder: Path | str) -> str:
    """12 hex digits naming the weights in `folder`; reported with every number measured with them."""
    digests = [sha256(path) for path in weight_files(Path(folder))]
    return (digests[0] if len(digests) == 1 else hashlib.sha256("".join(digests).encode()).hexdigest())[:12]


@contextmanager
def _about(folder: Path) -> Iterator[None]:
    """Faults found while reading the head in `folder`, told in one line that names it."""
    try:
        yield
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        raise EyasError(
            f"the head {folder}: {where + ': ' if where else ''}{first['msg'].removeprefix('Value error, ')}"
        ) from error
    except EyasError as error:
        raise EyasError(f"the head {folder}: {error}") from error


def _without_targets_embedding(tensors: dict[str, Tensor], target: Target) -> dict[str, Tensor]:
    """`tensors` without an embedding that is the target's own, in whatever precision it is stored; the target may have further
    tokens."""
    embedding = tensors.get(EMBEDDING)
    if embedding is None or not torch.equal(embedding, target.embedding[: len(embedding)].to(embedding.dtype)):
        return tensors
    return {name: tensor for name, tensor in tensors.items() if name != EMBEDDING}


def _widened(config: HeadConfig, tensors: dict[str, Tensor], vocab_size: int) -> tuple[HeadConfig, dict[str, Tensor]]:
    """The head for a target of `vocab_size` tokens, the last of which it has not seen: it does not draft them, and embeds them,
    where it has an embedding of its own, as the mean of the others."""
    more = vocab_size - config.vocab_size
    widened = dict(tensors)
    if config.draft_vocab_size == config.vocab_size:
        widened.setdefault("d2t", torch.zeros(config.vocab_size, dtype=torch.long))
    if "t2d" in tensors:
        widened["t2d"] = F.pad(tensors["t2d"], (0, more))
    if EMBEDDING in tensors:
        embedding = tensors[EMBEDDING]
        widened[EMBEDDING] = torch.cat([embedding, embedding.float().mean(0).to(embedding.dtype).expand(more, -1)])
    return HeadConfig(**{**config.model_dump(), "vocab_size": vocab_size}), widened


def _vocabulary(config: HeadConfig | MedusaConfig, tensors: dict[str, Tensor]) -> Tensor:
    """`d2t` int64 [D]; the maps must be there in full, point into the target's vocabulary, and agree."""
    t2d = tensors.get("t2d")
    if "d2t" not in tensors:
        if config.draft_vocab_size != config.vocab_size:
            raise EyasError("it has a reduced vocabulary but no tensor 'd2t' that says which one")
        d2t = torch.zeros(config.vocab_size, dtype=torch.long)
    else:
        d2t = tensors["d2t"]
    if d2t.shape != (config.draft_vocab_size,) or d2t.dtype != torch.long:
        raise EyasError(f"d2t is {d2t.dtype} of shape {list(d2t.shape)}, not int64 of [{config.draft_vocab_size}]")
    ids = Eagle3Head.draft_ids(d2t)
    if int(ids.min()) < 0 or int(ids.max()) >= config.vocab_size or len(ids.unique()) != len(ids):
        raise EyasError(
            f"d2t does not map draft ids one to one into the target's {config.vocab_size} tokens "
            "(it must hold offsets: target id = draft id + d2t)"
        )
    if t2d is not None and t2d.shape != (config.vocab_size,):
        raise EyasError(f"t2d has shape {list(t2d.shape)}, not [{config.vocab_size}]")
    if t2d is not None and (int(t2d.sum()) != len(ids) or not bool(t2d.to(ids.device)[ids].all())):
        raise EyasError("t2d and d2t name different tokens")
    return d2t


def _fill(
    network: nn.Module, tensors: dict[str, Tensor], spelt: Callable[[str], str] = str, derived: tuple[str, ...] = ()
) -> None:
    """Set every parameter and buffer of `network` from `tensors`, using each one; the `derived` ones may be absent.

    `spelt` gives a tensor's name as the file has it.
    """
    wanted = network.state_dict()
    for name in sorted(wanted.keys() | tensors.keys()):
        if name not in tensors:
            if name in derived:
                continue
            raise EyasError(f"it lacks the tensor '{spelt(name)}'")
        tensor = tensors[name]
        if name not in wanted:
            raise EyasError(f"it holds the tensor '{spelt(name)}', for which the network has no place")
        if tensor.shape != wanted[name].shape:
            raise EyasError(
                f"tensor '{spelt(name)}' has shape {list(tensor.shape)}, its config says {list(wanted[name].shape)}"
            )
        if wanted[name].is_floating_point() and tensor.dtype not in (torch.float32, torch.float16, torch.bfloat16):
            raise EyasError(f"tensor '{spelt(name)}' is {tensor.dtype}; quantised heads are not supported")
    network.load_state_dict({**wanted, **tensors})
