"""The features of many texts, each fetched when it is asked for: from the store, or from the target itself."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

from eyas.chat import Sample
from eyas.data.features import Features, read_features
from eyas.data.store import FeatureStore
from eyas.target import Target

KEPT_BYTES = 1 << 28  # of features read on the fly


class Fetched(Sequence[Features], ABC):
    """Texts by number; the numbers that a slice names are fetched one by one."""

    @abstractmethod
    def fetch(self, number: int) -> Features:
        """The features of text `number`, 0 <= number < len(self)."""

    @property
    def lengths(self) -> list[int]:
        """The tokens of every text."""
        return [len(text.ids) for text in self]

    def __getitem__(self, number: Any) -> Any:
        numbers = range(len(self))[number]
        return self.fetch(numbers) if isinstance(numbers, int) else [self.fetch(n) for n in numbers]


class Stored(Fetched):
    """Texts of a feature store, by their `keys`."""

    def __init__(self, store: FeatureStore, keys: list[str]) -> None:
        self._store, self._keys = store, keys

    def __len__(self) -> int:
        return len(self._keys)

    def fetch(self, number: int) -> Features:
        return self._store[self._keys[number]]


class OnTheFly(Fetched):
    """Texts that `target` reads whenever they are asked for, which takes no disk and one forward each time. What the store
    would give is the same, bit for bit. The first that fit into `kept` bytes of memory are read once."""

    def __init__(self, target: Target, samples: Sequence[Sample], kept: int = KEPT_BYTES) -> None:
        self._target, self._samples, self._room = target, samples, kept
        self._kept: dict[int, Features] = {}

    def __len__(self) -> int:
        return len(self._samples)

    @property
    def lengths(self) -> list[int]:
        return [len(sample.ids) for sample in self._samples]

    def fetch(self, number: int) -> Features:
        if number in self._kept:
            return self._kept[number]
        text = read_features(self._target, self._samples[number])
        if text.nbytes <= self._room:
            self._kept[number] = text
            self._room -= text.nbytes
        return text
