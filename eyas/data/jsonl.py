"""A JSON-lines file that grows by whole lines and survives crashes: what was written stays, what was half written
goes."""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Any

from eyas.errors import EyasError, why_not_written


class GrowingFile:
    """`path`, opened to append JSON objects, the first of which (the header) tells the settings of the whole file.

    A last line that a crash left unfinished is dropped. One process at a time may hold the file.
    Raises EyasError when the file cannot be opened, is held by another process, or holds a line that is no JSON object;
    and when its header differs from `header`, naming the setting.
    """

    def __init__(self, path: Path, header: dict[str, Any]) -> None:
        self.path = path
        if path.suffix == ".gz":
            raise EyasError(f"{path}: a growing file cannot be gzipped; drop the .gz and compress it when it is finished")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._fd = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        except OSError as error:
            raise EyasError(f"{path}: cannot be written: {error.strerror}") from error
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os.close(self._fd)
            raise EyasError(f"{path}: another process is writing to it") from error
        try:
            self._size = self._begin(json.loads(json.dumps(header)))
        except BaseException:
            os.close(self._fd)
            raise

    def __enter__(self) -> GrowingFile:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        os.close(self._fd)

    def rows(self) -> Iterator[dict[str, Any]]:
        """The rows that are there, without the header."""
        with self.path.open("rb") as file:
            for number, raw in enumerate(file, 1):
                row = _parsed(raw)
                if row is None:
                    raise EyasError(f"{self.path}:{number}: not a JSON object; mend or remove the line")
                if number > 1:
                    yield row

    def append(self, row: dict[str, Any]) -> None:
        """Add one line. Raises EyasError when it cannot be written (a full disk); the file is then as it was before."""
        self._size = self._write(_line(row), self._size)

    def _write(self, data: bytes, at: int) -> int:
        """Write `data` at byte `at`, the end of what counts; the new end."""
        left = memoryview(data)
        try:
            os.lseek(self._fd, at, os.SEEK_SET)
            while left:
                left = left[os.write(self._fd, left) :]
        except OSError as error:
            os.ftruncate(self._fd, at)
            raise EyasError(
                f"{self.path}: {why_not_written(error)}; what was written so far is kept, run the same command again to go on"
            ) from error
        return at + len(data)

    def _begin(self, header: dict[str, Any]) -> int:
        """Check the header, or write it where there is none yet; the size in bytes of what the file holds."""
        with self.path.open("rb") as file:
            first = file.readline()
        if _line(header).startswith(first) and not first.endswith(b"\n"):  # nothing, or less than the header
            os.ftruncate(self._fd, 0)
            return self._write(_line(header), 0)
        old = _parsed(first)
        if old is None or old.get("eyas") != header["eyas"]:
            raise EyasError(f"{self.path}: exists already and holds no {header['eyas']} by eyas; choose another name")
        for key in header:
            if old.get(key) != header[key]:
                told = _difference(key, old.get(key), header[key])
                raise EyasError(
                    f"{self.path}: was begun with {told}; give the same settings to go on with it, or another name to "
                    "begin anew"
                )
        return self._mend()

    def _mend(self) -> int:
        """Cut off an unfinished last line; the size in bytes of what is kept."""
        start = size = 0
        raw = b""
        with self.path.open("rb") as file:
            for raw in file:
                start, size = size, size + len(raw)
        if _parsed(raw) is None:
            os.ftruncate(self._fd, start)
            return start
        return size if raw.endswith(b"\n") else self._write(b"\n", size)


def _line(row: dict[str, Any]) -> bytes:
    return json.dumps(row, ensure_ascii=False, separators=(",", ":")).encode("utf-8", "replace") + b"\n"


def _parsed(raw: bytes) -> dict[str, Any] | None:
    try:
        row = json.loads(raw)
    except ValueError:
        return None
    return row if isinstance(row, dict) else None


def _difference(key: str, old: Any, new: Any) -> str:
    if isinstance(old, dict) and isinstance(new, dict):
        inner = next(k for k in [*old, *new] if old.get(k) != new.get(k))
        return _difference(f"{key}.{inner}", old.get(inner), new.get(inner))
    return f"{key} = {old}, not {new}"
