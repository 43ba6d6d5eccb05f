"""What this room wants of a decoding engine. `eyas.decoding` provides it; nothing of it is imported here."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from eyas.chat import tokenizer_hash


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
class ServedAnswer:
    """An `Answer` of a server. Where it told no ids (`exact` is False), `ids` are its text tokenised again, and `doubt` says
    why they may not be what it generated ("" where nothing speaks against them)."""

    id: str
    ids: list[int]
    finish: str
    exact: bool = True
    doubt: str = ""


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


def written_by(target: Any) -> dict[str, Any]:
    """What the header of a file tells of the target that wrote it: the weights' fingerprint and form or, of one behind a
    server, the server's name for it and the tokenizer that its tokens are of."""
    told = {"target": target.fingerprint, "target_name": target.name}
    if served_as := getattr(target, "served_as", ""):
        return {**told, "served_as": served_as, "tokenizer": tokenizer_hash(target.tokenizer)}
    return {**told, "dtype": str(target.dtype).removeprefix("torch."), "weights": getattr(target, "weights", "stock")}
