"""Names and draws that depend on content alone: the same on every machine, in every order."""

from __future__ import annotations

import hashlib
import json
from typing import Any


def _digest(parts: tuple[Any, ...]) -> bytes:
    told = json.dumps(parts, sort_keys=True, ensure_ascii=False, separators=(",", ":"), default=str)
    return hashlib.blake2b(told.encode("utf-8", "surrogatepass"), digest_size=8).digest()


def content_id(*parts: Any) -> str:
    """16 hex digits that name a content."""
    return _digest(parts).hex()


def derived_seed(*parts: Any) -> int:
    """A seed in [0, 2^63) drawn from `parts`, e.g. (seed, id)."""
    return int.from_bytes(_digest(parts), "big") >> 1


def derived_share(*parts: Any) -> float:
    """A number in [0, 1) drawn evenly from `parts`."""
    return int.from_bytes(_digest(parts)[:6], "big") / 2**48
