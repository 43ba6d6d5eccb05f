"""A program that decodes elsewhere (its own environment, its own language), asked a line at a time."""

from __future__ import annotations

import subprocess
import tempfile
import weakref
from collections.abc import Sequence
from pathlib import Path

from eyas.errors import EyasError

WORDS = 200  # of a program's last words, characters


class Worker:
    """A running program that answers every line written to it with lines of its own; it ends with this process's interest in
    it. What it says of itself goes to a file, whose end is told when it fails."""

    def __init__(self, name: str, command: Sequence[str | Path], environment: dict[str, str] | None = None) -> None:
        self.name = name
        self._said = tempfile.TemporaryFile("w+", errors="replace")  # noqa: SIM115
        self._process = subprocess.Popen(
            [str(word) for word in command], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._said, bufsize=0,
            env=environment,
        )  # fmt: skip
        self._end = weakref.finalize(self, _stop, self._process)

    def say(self, line: str) -> None:
        """Raises EyasError when the program has ended."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(f"{line}\n".encode())
        except OSError:
            self._fail()

    def hear(self, until: bytes) -> str:
        """What it says up to and with the character `until`. Raises EyasError when it ends before."""
        assert self._process.stdout is not None
        told = bytearray()
        while not told.endswith(until):
            piece = self._process.stdout.read(1)
            if not piece:
                self._fail()
            told += piece
        return told.decode()

    def close(self) -> None:
        self._end()

    def _fail(self) -> None:
        code = self._process.wait()
        self._said.seek(0)
        words = " ".join(self._said.read().split())[-WORDS:]
        raise EyasError(f"{self.name} ended with {code}: {words or 'it said nothing'}")


def _stop(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait()
