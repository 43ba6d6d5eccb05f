"""Drafters by what a command line calls them: the door for `generate`, `bench` and whoever else is told a drafter's name."""

from __future__ import annotations

from dataclasses import dataclass

from eyas.decoding.drafters import Drafter, Eagle3Drafter
from eyas.heads.files import head_hash, load_head
from eyas.target import Target


@dataclass(frozen=True)
class Opened:
    """A `drafter`, the `target` as it must be run for it (its taps are those that the drafter reads), and the `hash` of the
    drafter's weights ("" where it has none)."""

    target: Target
    drafter: Drafter
    hash: str


def open_drafter(source: str, target: Target) -> Opened:
    """The drafter called `source`, for `target`: the folder of a head.

    Raises EyasError, in one line, when there is no such drafter or it does not fit the target.
    """
    head = load_head(source, target)
    return Opened(target, Eagle3Drafter(target, head, weights=target.weights), head_hash(source))
