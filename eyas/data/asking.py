"""What this room wants of a decoding engine. `eyas.decoding` provides it; nothing of it is imported here."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol


@dataclass(frozen=True)
class Ask:
    """One request: prompt `ids`, the sampling parameters and the `id` under which the answer comes back."""

    ids: list[int]
    params: Any
    id: str


class Answer(Protocol):
    """What comes back: `ids` are the generated tokens alone, their EOS included; `finish` says how they ended."""

    id: str
    ids: list[int]
    finish: str


@dataclass(frozen=True)
class Failed:
    """What comes back where there is no answer, and `why`; the next run asks again."""

    id: str
    why: str


class AnsweringEngine(Protocol):
    """A `generate` that takes requests one by one as rows fall free and hands every answer, or `Failed`, to `on_finish` at
    once.

    `max_rows` is the batch, `max_length` the room of one row in tokens (prompt and answer).
    """

    target: Any
    max_rows: int
    max_length: int

    def generate(self, requests: Iterable[Any], on_finish: Callable[[Any], None] | None = None) -> Sequence[Any]: ...


def written_by(target: Any) -> dict[str, str]:
    """What the header of a file tells of the target that wrote it."""
    return {
        "target": target.fingerprint,
        "target_name": target.name,
        "dtype": str(target.dtype).removeprefix("torch."),
        "weights": getattr(target, "weights", "stock"),
    }
