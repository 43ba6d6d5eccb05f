"""Which texts a scaling study learns from: nested parts of one shuffled whole, and the same texts to measure on for all."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

from eyas.chat import Sample
from eyas.errors import EyasError


@dataclass(frozen=True)
class NestedTexts:
    """`learn` holds the largest part, whose beginnings are the smaller ones; `choose` picks checkpoints and `test` measures,
    and no head has learnt from either, nor from another answer to the same prompt."""

    learn: list[Sample]
    choose: list[Sample]
    test: list[Sample]

    @classmethod
    def of(
        cls, samples: Sequence[Sample], *, largest: int, choose: int, test: int, max_length: int, seed: int
    ) -> NestedTexts:  # fmt: skip
        """Of `samples` of at most `max_length` tokens. Raises EyasError when there are not enough."""
        fitting = [s for s in samples if len(s.ids) <= max_length and s.supervised > 1]
        random.Random(seed).shuffle(fitting)
        held, rest = fitting[: choose + test], fitting[choose + test :]
        asked = {s.prompt for s in held}
        learn = [s for s in rest if s.prompt not in asked]
        if len(learn) < largest:
            raise EyasError(
                f"the study needs {largest + choose + test} texts of at most {max_length} tokens ({largest} to learn from), "
                f"the data have {len(held) + len(learn)}; give more answers, a smaller --texts, or a larger --max-length"
            )
        return cls(learn[:largest], held[test:], held[:test])
