"""Files that are whole or not there: every result, state and index is written beside its place and then moved into it."""

from __future__ import annotations

import fcntl
import hashlib
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from safetensors import SafetensorError

from eyas.errors import EyasError, why_not_written
from eyas.progress import console


def cache_dir() -> Path:
    """Where converted targets and compiled kernels are kept: $EYAS_CACHE, else ~/.cache/eyas."""
    return Path(os.environ.get("EYAS_CACHE", Path.home() / ".cache" / "eyas"))


@contextmanager
def replacing(path: Path, hint: str = "") -> Iterator[Path]:
    """Where to write what shall take the place of `path`; it does so when the block ends well, else nothing has changed.

    Raises EyasError, `hint` at its end, when the disk does not take it.
    """
    part = path.with_name(path.name + ".part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        yield part
        part.replace(path)
    except (OSError, SafetensorError, RuntimeError) as error:  # torch.save tells of a full disk by a RuntimeError
        reason = why_not_written(error)
        if type(error) is RuntimeError and reason != "the disk is full":
            raise
        raise EyasError(f"cannot write {path}: {reason}{hint}") from error
    finally:
        with suppress(OSError):
            part.unlink(missing_ok=True)


@contextmanager
def alone_in(folder: Path) -> Iterator[None]:
    """Make `folder` and hold it for one run: two in one folder would write over each other's state.

    Raises EyasError when another process holds it, or it cannot be made.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        held = os.open(folder, os.O_RDONLY)
    except OSError as error:
        raise EyasError(f"cannot write {folder}: {why_not_written(error)}") from error
    try:
        if not _locked(held):
            raise EyasError(f"another run is going on in {folder}; wait for it, stop it, or name another folder")
        yield
    finally:
        os.close(held)


@contextmanager
def in_turn(lock: Path, waiting: str) -> Iterator[None]:
    """Hold the file `lock`, which is made where it is missing, once no other process holds it; `waiting` is printed if one
    does. Raises EyasError when it cannot be made."""
    try:
        lock.parent.mkdir(parents=True, exist_ok=True)
        held = os.open(lock, os.O_RDWR | os.O_CREAT, 0o644)
    except OSError as error:
        raise EyasError(f"cannot write {lock}: {why_not_written(error)}") from error
    try:
        if not _locked(held):
            console.print(waiting, style="yellow", markup=False)
            fcntl.flock(held, fcntl.LOCK_EX)
        yield
    finally:
        os.close(held)


def _locked(descriptor: int) -> bool:
    """Lock the file unless another process has; whether it is locked now."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def write_text(path: Path, text: str) -> None:
    """Replace `path` by a file holding `text`. Raises EyasError when the disk does not take it."""
    with replacing(path) as part:
        part.write_text(text, encoding="utf-8")


def sha256(path: Path) -> str:
    """The checksum of a file, in hex."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
