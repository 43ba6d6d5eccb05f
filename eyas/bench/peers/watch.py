"""When the forwards of a module happen, and over how many tokens: seen from outside, by hooks."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch import nn

from eyas.machine import clock


@dataclass
class Forward:
    """One forward over `tokens` tokens a row, of which `known` were in the cache before; times of `perf_counter`."""

    tokens: int
    known: int
    begun: float
    ended: float = 0.0

    @property
    def seconds(self) -> float:
        return self.ended - self.begun


@contextmanager
def watched(module: nn.Module) -> Iterator[list[Forward]]:
    """The forwards of `module`, a causal LM of transformers, that happen while the block runs."""
    seen: list[Forward] = []

    def begin(_: nn.Module, __: Any, told: dict[str, Any]) -> None:
        cache = told.get("cache", told.get("past_key_values"))
        known = cache.get_seq_length() if cache is not None else 0
        seen.append(Forward(told["input_ids"].shape[1], int(known), clock(told["input_ids"].device)))

    def end(_: nn.Module, __: Any, told: dict[str, Any], ___: Any) -> None:
        seen[-1].ended = clock(told["input_ids"].device)

    hooks = [module.register_forward_pre_hook(begin, with_kwargs=True), module.register_forward_hook(end, with_kwargs=True)]
    try:
        yield seen
    finally:
        for hook in hooks:
            hook.remove()
