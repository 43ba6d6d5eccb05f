"""A mixture of temperatures, so that one data set holds greedy and sampled answers alike."""

from __future__ import annotations

from dataclasses import dataclass

from eyas.data.hashing import derived_share
from eyas.errors import EyasError


@dataclass(frozen=True)
class Temperatures:
    """Temperatures with their shares, which sum to 1. Which of them an answer gets is drawn from (seed, id)."""

    shares: tuple[tuple[float, float], ...]

    @classmethod
    def of(cls, temperature: float) -> Temperatures:
        """One temperature for all."""
        return cls(((float(temperature), 1.0),))

    @classmethod
    def parse(cls, text: str) -> Temperatures:
        """`0.7`, `0,0.8` (equal shares) or `0:60,0.8:40` (weights). Raises EyasError for anything else."""
        try:
            pairs = [[float(number) for number in part.split(":")] for part in text.split(",")]
            weighted = [(pair[0], pair[1] if len(pair) > 1 else 1.0) for pair in pairs]
            total = sum(weight for _, weight in weighted)
            good = all(len(pair) <= 2 and 0 <= pair[0] < float("inf") for pair in pairs) and all(w > 0 for _, w in weighted)
        except ValueError:
            good = False
        if not good or not total < float("inf"):
            raise EyasError(f"temperature '{text}' is neither a number nor a mixture such as 0,0.8 or 0:60,0.8:40")
        return cls(tuple((temperature, weight / total) for temperature, weight in weighted))

    def draw(self, seed: int, name: str) -> float:
        """The temperature of the answer called `name`."""
        left = derived_share("temperature", seed, name)
        for temperature, share in self.shares:
            left -= share
            if left < 0:
                return temperature
        return self.shares[-1][0]

    def __str__(self) -> str:
        return ",".join(f"{temperature:g}:{share:.4g}" for temperature, share in self.shares)
