"""What acceptance is compared by, and our own side of the comparison.

Engines count every verified draft, also what lies behind the token that ends a text; `eyas` cuts its own statistics there.
`chain_counts` therefore lets our engine write past the end and counts every round that began before it, the last one whole:
the engines' definition on the same tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from eyas.decoding.drafters import Eagle3Drafter
from eyas.decoding.engine import Engine, Request
from eyas.decoding.sampling import SamplingParams
from eyas.decoding.tree import TreeShape
from eyas.heads.eagle3 import Eagle3Head
from eyas.target import Target

ROWS = 5  # prompts decoded together
TOLERANCE = 0.03


@dataclass(frozen=True)
class Counts:
    """`rounds` that verified a draft, and in how many of them the first 1, 2, ... drafts were all accepted."""

    rounds: int
    accepted: tuple[int, ...]

    @property
    def length(self) -> float:
        """Mean acceptance length: accepted drafts and the bonus token of a round."""
        return 1 + sum(self.accepted) / self.rounds

    @property
    def rates(self) -> list[float]:
        """Share of the rounds in which the first 1, 2, ... drafts were all accepted."""
        return [accepted / self.rounds for accepted in self.accepted]

    def agrees(self, other: Counts) -> bool:
        """Whether the acceptance length and the rate at every depth lie within 3 % of the `other`'s (of a rate: or within
        one draft, where 3 % are less than that)."""
        near = [abs(a - b) <= max(TOLERANCE * b, 1 / other.rounds) for a, b in zip(self.rates, other.rates, strict=True)]
        return abs(self.length - other.length) <= TOLERANCE * other.length and all(near)

    def __str__(self) -> str:
        return f"acceptance length {self.length:.3f} ({self.rounds} rounds, accepted {list(self.accepted)})"


def chain_counts(target: Target, head: Eagle3Head, prompts: Sequence[Sequence[int]], *, depth: int, max_tokens: int) -> Counts:
    """What our chain of `depth` counts on `prompts`, greedy, up to the round that reaches EOS or `max_tokens`."""
    longest = max(map(len, prompts)) + max_tokens + depth + 1
    drafter = Eagle3Drafter(target, head)
    engine = Engine(target, drafter, tree=TreeShape.chain(depth), max_rows=ROWS, max_length=longest)
    params = SamplingParams(max_new_tokens=max_tokens + depth + 1, ignore_eos=True)
    answers = {engine.submit(Request(list(prompt), params)): list[int]() for prompt in prompts}
    rounds, accepted = 0, [0] * depth
    while engine.busy:
        for event in engine.step():
            answer = answers[event.ticket]
            if answer:  # the first piece is the prefill's token, which no draft was made for
                rounds += 1
                for place in range(sum(event.piece.accepted)):
                    accepted[place] += 1
            answer += event.piece.ids
            end = next((n for n, token in enumerate(answer, 1) if token in target.eos_ids), max_tokens)
            if len(answer) >= end:
                engine.cancel(event.ticket)
    return Counts(rounds, tuple(accepted))
