"""The planner: how much to draft, down to nothing, so that speculation is never slower than plain decoding.

A round over B rows that verifies N nodes a row yields B + sum of p tokens, p being every node's chance to be accepted, and
costs the drafted levels and a target forward over B (N + 1) tokens. The planner knows the costs (`costs`), learns the
chances, and drafts a level or verifies a node only where its tokens per second exceed those of the best round it could do
otherwise. Whatever it decides, the text is the same.

Chances: a node's score (the drafter's log-probability of its path) is calibrated against how often nodes of that score were
accepted, and scaled per row by how far that row's drafts have lately kept what they promised.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

from eyas.decoding.costs import Costs, Prices
from eyas.decoding.policy import Round
from eyas.decoding.row import Row
from eyas.decoding.tree import Drafting, DraftTree, Limits, TreeShape, grow

LARGEST = TreeShape(depth=8, top_k=3, total=16)  # what a plan may draft at most
PROBE_SHARE = 0.01  # of the time spent not drafting, for drafts that look whether it would pay again
PLAIN_EVERY = 100  # a round in so many is plain where drafting pays, to keep plain decoding's cost known
FOLLOWED = 0.6  # an accepted draft has its best child accepted about so often
DRIFT = 0.05  # weight of a round in running means, once there have been some


class Calibration:
    """How often nodes of a score are accepted, greedy and sampled apart, forgetting slowly.

    Scores are those of paths, in nats; at first a node is believed as the drafter believes in it.
    """

    EDGES = (0.02, 0.05, 0.1, 0.2, 0.35, 0.5, 0.75, 1.0, 1.5, 2.0, 2.5, 3.0, 4.0, 5.0, 6.5, 8.0)
    PRIOR = 4.0  # nodes that the first belief is worth
    MEMORY = 0.997  # what a round leaves of the counts before it

    def __init__(self) -> None:
        self._edges = torch.tensor(self.EDGES)
        middles = (torch.tensor([0.0, *self.EDGES]) + torch.tensor([*self.EDGES, 12.0])) / 2
        self._belief = (-middles).exp()  # [bins]
        self._offered = torch.zeros(2, len(self.EDGES) + 1)  # [2, bins]
        self._accepted = torch.zeros_like(self._offered)

    def chances(self, scores: Tensor, sampled: Tensor) -> Tensor:
        """The chance float32 [B, M] of nodes with `scores` [B, M] to be accepted; `sampled` bool [B]."""
        table = (self._accepted + self.PRIOR * self._belief) / (self._offered + self.PRIOR)  # [2, bins]
        return table.flatten()[self._bins(scores, sampled)] * (scores > float("-inf"))

    def learn(self, scores: Tensor, sampled: Tensor, accepted: Tensor) -> None:
        """Nodes with `scores` [B, N] were verified, and those of `accepted` bool [B, N] were right."""
        real = scores > float("-inf")
        if not real.any():
            return
        self._offered *= self.MEMORY
        self._accepted *= self.MEMORY
        bins = self._bins(scores, sampled)[real]
        self._offered.view(-1).index_add_(0, bins, torch.ones(len(bins)))
        self._accepted.view(-1).index_add_(0, bins, accepted[real].float())

    def _bins(self, scores: Tensor, sampled: Tensor) -> Tensor:
        return torch.bucketize(-scores, self._edges) + sampled[:, None].long() * (len(self.EDGES) + 1)


class Clock:
    """How far the forwards of today are from the measured costs.

    What slows all of them down alike changes no decision and is followed quickly, a sudden jump at once: something else runs
    on the machine. What remains between plain and tree forwards (longer texts, colder caches) is learnt slowly.
    """

    QUICK, SLOW, JUMP = 0.2, 0.05, 0.25

    def __init__(self) -> None:
        self._common = 0.0  # logarithm of seconds over expected ones
        self._tree = 0.0  # the same of tree forwards, beyond the common one

    def factor(self, kind: Literal["plain", "tree"]) -> float:
        """By what to multiply the expected seconds of such forwards before they are compared."""
        return math.exp(self._tree) if kind == "tree" else 1.0

    def saw(self, kind: Literal["plain", "tree"], ratio: float) -> None:
        """A forward took `ratio` times its expected seconds."""
        surprise = math.log(ratio) - self._common - (self._tree if kind == "tree" else 0.0)
        if abs(surprise) > self.JUMP:
            self._common += surprise
        else:
            self._common += self.QUICK * surprise
            self._tree += self.SLOW * (surprise if kind == "tree" else -surprise)


class Planner(Limits):
    """Chooses width, depth and node count of every round by `costs`, within `shape`."""

    def __init__(self, costs: Costs, shape: TreeShape = LARGEST) -> None:
        self.costs, self.shape = costs, shape
        self.calibration = Calibration()
        self._prices: dict[int, Prices] = {}  # by rows
        # What drafting offers: the mean chance of a row's n-th best candidate, and how deep the best n reach.
        self._offer = torch.tensor([0.6 * 0.7**n for n in range(shape.total)])  # [N]
        self._reach = torch.linspace(1, min(shape.depth, 4), shape.total)  # [N]
        self._remembered = 0  # rounds that these two are the mean of
        self._clock = Clock()
        self._idle = 0.0  # seconds since the last draft
        self._drafted = 0  # rounds drafted since the last plain one

    @staticmethod
    def largest(vocabulary: int, depth: int | None) -> TreeShape:
        """The most that is planned for a drafter of `vocabulary` tokens and at most `depth` levels."""
        return TreeShape(
            LARGEST.depth if depth is None else min(LARGEST.depth, depth), min(LARGEST.top_k, vocabulary), LARGEST.total
        )

    def __str__(self) -> str:
        return f"auto ({self.shape} at most)"

    # -- before a round -----------------------------------------------------------------------------------------------

    def drafts(self, rows: Sequence[Row]) -> bool:
        self._rows = len(rows)
        if self._rows not in self._prices:
            self._prices[self._rows] = self._priced(self._rows)
        self._price = self._prices[self._rows]
        self._sampled = torch.tensor([row.request.params.temperature > 0 for row in rows])  # [B]
        self._trust = torch.tensor([row.trust for row in rows])  # [B]
        plain = self._forward(0)
        tokens = self._rows + float(self._trust.sum()) * self._offer.cumsum(0)  # [N]
        verify = torch.tensor([self._forward(n) for n in range(1, self.shape.total + 1)])  # [N]
        best = float((tokens / (self._levels(self._reach) + verify)).max())
        self._rate = max(best, self._rows / plain)  # tokens per second of the best round
        self._probing = False
        if best > self._rows / plain:
            self._drafted += 1
            if self._drafted < PLAIN_EVERY:
                return True
            self._drafted = 0
            return False
        self._idle += plain
        unread = sum(len(row.unread) for row in rows)
        loss = unread * self.costs.read + self._price.first + self._forward(2) - plain
        self._probing = self._idle * PROBE_SHARE > loss
        return self._probing

    # -- within a round -----------------------------------------------------------------------------------------------

    def grow(self, drafting: Drafting) -> DraftTree:
        self._idle = 0.0
        return grow(drafting, TreeShape(self.shape.depth, self._price.width, self.shape.total), self)

    def deeper(self, depth: int, scores: Tensor) -> bool:
        """Draft another level while its likeliest node, verified, brings more than its time would otherwise."""
        chances = self.calibration.chances(scores.cpu(), self._sampled)[:, 0] * self._trust  # [B]
        price = self._price.level + self._forward(depth) - self._forward(depth - 1)
        return float(chances.sum()) * FOLLOWED > self._rate * price

    def total(self, scores: Tensor, depths: Tensor, most: int) -> int:
        chances = self.calibration.chances(scores.cpu(), self._sampled)  # [B, most]
        self._remember(chances, depths.cpu())
        if not most:
            return 0
        gained = (chances * self._trust[:, None]).sum(0).cumsum(0)  # [most]
        price = torch.tensor([self._forward(n) - self._forward(0) for n in range(1, most + 1)])  # [most]
        worth = gained - self._rate * price  # tokens above those that the same seconds bring otherwise
        best = int(worth.argmax())
        if float(worth[best]) > 0:
            return best + 1
        return min(2, most) if self._probing else 0

    # -- after a round ------------------------------------------------------------------------------------------------

    def learn(self, rows: Sequence[Row], done: Round) -> None:
        nodes = done.tree.tokens.shape[1]
        self._clock.saw("tree" if nodes else "plain", done.verify_s / self._price.forward[nodes])
        if nodes == 0:
            return
        walked = done.walked
        steps = torch.arange(walked.nodes.shape[1])  # [A]
        valid = steps[None] < walked.counts[:, None].cpu()  # [B, A]
        accepted = torch.zeros(len(rows), nodes + 1)  # [B, N+1]
        accepted.scatter_(1, walked.nodes.cpu() * valid, 1.0)
        accepted = accepted[:, 1:] > 0  # [B, N]
        scores = done.tree.scores.cpu()
        promised = self.calibration.chances(scores, self._sampled).sum(1)  # [B]
        for row, kept, hoped in zip(rows, accepted.sum(1).tolist(), promised.tolist(), strict=True):
            row.believe(kept, hoped)
        self.calibration.learn(scores, self._sampled, accepted)

    # -- inside -------------------------------------------------------------------------------------------------------

    def _priced(self, rows: int) -> Prices:
        """As wide as the shape lets it while a level costs little beside the forward, else a chain."""
        wide = self.costs.of(rows, self.shape.top_k, self.shape.total)
        return wide if wide.level < 0.25 * wide.forward[0] else self.costs.of(rows, 1, self.shape.total)

    def _forward(self, nodes: int) -> float:
        """Expected seconds of a target forward that verifies `nodes` per row."""
        return self._price.forward[nodes] * self._clock.factor("tree" if nodes else "plain")

    def _levels(self, depth: Tensor) -> Tensor:
        return self._price.first + (depth - 1) * self._price.level

    def _remember(self, chances: Tensor, depths: Tensor) -> None:
        """Update what drafting offers by this round's candidates, best first: `chances` and `depths` [B, M]."""
        count = chances.shape[1]
        self._remembered += 1
        weight = max(DRIFT, 1 / (self._remembered + 1))
        mean = torch.zeros_like(self._offer)
        mean[:count] = chances.mean(0)
        self._offer += weight * (mean - self._offer)
        reach = depths.cummax(1).values.float().mean(0)  # [M]
        self._reach[:count] += weight * (reach - self._reach[:count])
