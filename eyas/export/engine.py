"""What an export needs to know of an engine, and what it is asked to write."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from eyas.heads.config import HeadConfig
from eyas.target import Target


@dataclass(frozen=True)
class Order:
    """One head for one engine. `tensors` go by our names, already in `dtype` ("float32", "bfloat16" or "float16")."""

    config: HeadConfig
    tensors: dict[str, Tensor]
    target: Target
    served_target: str  # what the engine is told to load: a directory or a hub id
    dtype: str
    draft_tokens: int = 3  # drafted a round where the engine asks for a number


@dataclass(frozen=True)
class Engine:
    """An engine as a place to export to.

    `refusals(config, target)` gives the reasons, if any, why the engine would compute something else than the head does;
    `write(order, folder)` writes the files; `serving(order, place)` is the command, as it is typed, that serves the target
    with the head at `place`, in the language `language` of a Markdown block.
    """

    name: str  # with the version it was checked against
    refusals: Callable[[HeadConfig, Target], Iterator[str]]
    write: Callable[[Order, Path], None]
    serving: Callable[[Order, Path], str]
    language: str = "bash"
