"""How many draft steps pay at which concurrency, from what two servers were measured to do.

A round of k steps emits 1 + (share of rounds that accept the first draft) + ... + (that accept the first k) tokens. The joint
acceptance of a chain does not depend on how far behind a draft the chain goes on, so the counters of K steps tell it for every
k up to K. Counted over all levels, since it does not depend on the load either. A server that tells no more than its mean
acceptance length L and its K steps (SGLang) is taken to accept every draft, given those before it, with the same chance a:
1 + a + ... + a^K = L.

What a round costs is known at two points: a plain step (k = 0) is the baseline's time per token, a round of K steps the
server's time per token times its tokens per round. In between it is taken to grow evenly with k, each step costing one more
pass of the head and one more token to verify.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import numpy as np

from eyas.bench.live.figures import Acceptance, Advice, Level, Side

ASSUMPTIONS = (
    "the cost of a round is taken to grow evenly from a plain step to the round measured, the acceptance at a depth not to "
    "depend on how many steps follow, nor on the load"
)


def tokens_per_round(server: Side) -> list[float]:
    """Tokens that a round of k = 0, 1, ..., K draft steps emits; empty where the server does not count by position, nor tells
    how many steps it drafts."""
    told = [level.acceptance for level in server.levels if level.acceptance]
    counted = [one for one in told if one.per_position]
    if counted:
        return list(accumulate(_pooled(counted), initial=1.0))
    if not told or not told[0].steps:
        return []
    steps = told[0].steps
    chance = even_chance(sum(one.length for one in told) / len(told), steps)
    return list(accumulate((chance**k for k in range(1, steps + 1)), initial=1.0))


def estimated(server: Side) -> bool:
    """Whether `tokens_per_round` has no counts by position to go by."""
    return not any(level.acceptance and level.acceptance.per_position for level in server.levels)


def even_chance(length: float, steps: int) -> float:
    """The chance a in [0, 1] of every draft for which chains of `steps` drafts have the mean acceptance length `length`."""
    if length <= 1:
        return 0.0
    roots = np.roots([*[1.0] * steps, 1.0 - length])  # of 1 + a + ... + a^steps = length; one of them is positive
    return min(max(float(root.real) for root in roots if abs(root.imag) < 1e-9), 1.0)


def advise(both: Sequence[tuple[Level, Level]], tokens: Sequence[float]) -> list[Advice]:
    """What k = 0, ..., K steps would bring at each level, out of pairs of the server's and the baseline's.

    `tokens` are those of `tokens_per_round`; without them there is no advice.
    """
    return [advice for level, base in both if (advice := _advice(level, base, tokens)) is not None]


def _advice(level: Level, base: Level, tokens: Sequence[float]) -> Advice | None:
    drafting, plain = level.token_s, base.token_s
    if not drafting or not plain or len(tokens) < 2:
        return None
    steps = len(tokens) - 1
    cost = drafting * tokens[-1] / plain
    speedups = [emitted / (1 + (cost - 1) * k / steps) for k, emitted in enumerate(tokens)]
    return Advice(concurrency=level.concurrency, round_cost=cost, speedups=speedups)


def _pooled(told: Sequence[Acceptance]) -> list[float]:
    """Joint acceptance by position over all levels."""
    rounds = sum(a.rounds for a in told)
    return [sum(counts) / rounds for counts in zip(*(a.per_position for a in told), strict=True)]
