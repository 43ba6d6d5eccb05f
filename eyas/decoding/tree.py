"""Draft trees: EAGLE-2's dynamic tree (arXiv 2406.16858, section 4), grown for a whole batch at once.

Node 0 is the root, the last committed token; nodes 1..N are drafts in an order in which parents precede children. A chain is
the tree of top_k 1; no draft at all is the tree of N = 0.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from eyas.errors import EyasError


@dataclass(frozen=True)
class TreeShape:
    """How much is drafted per round: `depth` levels, the `top_k` best nodes expanded by `top_k` at each, and of all these
    the `total` best nodes verified (the root not counted).

    The authors' default (their depth 7, top-k 10, 60 tokens with the root) is TreeShape(8, 10, 59) here.
    """

    depth: int = 3
    top_k: int = 3
    total: int = 5

    def __post_init__(self) -> None:
        if self.depth < 0 or self.top_k < 1 or self.total < 0:
            raise EyasError(f"a draft tree needs depth >= 0, top_k >= 1 and total >= 0, not {self}")
        offered = self.top_k + max(self.depth - 1, 0) * self.top_k**2 if self.depth else 0
        object.__setattr__(self, "total", min(self.total, offered))

    @classmethod
    def chain(cls, length: int) -> TreeShape:
        """`length` drafts in a row."""
        return cls(length, 1, length)

    @classmethod
    def parse(cls, text: str) -> TreeShape:
        """Read "chain:3" or "depth x top_k x total", e.g. "5x8x24". Raises EyasError for anything else."""
        try:
            if text.startswith("chain:"):
                return cls.chain(int(text.removeprefix("chain:")))
            depth, top_k, total = (int(part) for part in text.split("x"))
        except ValueError:
            raise EyasError(f"draft tree '{text}' is none of auto, chain:K, static and DEPTHxTOPKxTOTAL, e.g. 5x8x24") from None
        return cls(depth, top_k, total)

    def __str__(self) -> str:
        return f"chain:{self.depth}" if self.top_k == 1 else f"{self.depth}x{self.top_k}x{self.total}"

    @property
    def scratch(self) -> int:
        """How many nodes the drafter reads per row: all levels but the last."""
        return self.top_k * max(self.depth - 1, 0)


@dataclass(frozen=True)
class DraftTree:
    """`tokens` int64 [B, N] in the target's vocabulary, `parents` int64 [B, N] as node numbers (0 is the root),
    `depths` int64 [B, N] counted from 1, `scores` float32 [B, N]: cumulative log-scores, -inf for a node that stands in for a
    proposal the row has not."""

    tokens: Tensor
    parents: Tensor
    depths: Tensor
    scores: Tensor

    @classmethod
    def empty(cls, rows: int, device: torch.device | str = "cpu") -> DraftTree:
        """No drafts: the round that follows is plain decoding."""
        none = torch.zeros(rows, 0, dtype=torch.long, device=device)
        return cls(none, none, none, none.float())

    @property
    def real(self) -> Tensor:
        """bool [B, N]: the nodes that were proposed."""
        return self.scores > float("-inf")

    def chained(self, step: int) -> Tensor | None:
        """Of a chain: the token int64 [B] drafted at `step`, -1 where there is none; None beyond the chain."""
        if step >= self.tokens.shape[1]:
            return None
        return self.tokens[:, step].masked_fill(~self.real[:, step], -1)


# (tokens int64 [B, k] in the target's vocabulary, their parents' places int64 [B, k] in the level before) -> logits [B, k, D]
Expand = Callable[[Tensor, Tensor], Tensor]
# (logits [B, n, D], depth) -> log-scores [B, n, D], none above 0
Rank = Callable[[Tensor, int], Tensor]


@dataclass(frozen=True)
class Drafting:
    """What a tree grows from: the drafter's `logits` [B, D] at the last committed token, how to `expand` a level and `rank`
    its candidates, and `target_ids` int64 [D], the target's id of every draft id."""

    logits: Tensor
    expand: Expand
    rank: Rank
    target_ids: Tensor


class Limits:
    """How far a dynamic tree grows: as far as its shape lets it. A planner knows better."""

    def deeper(self, depth: int, scores: Tensor) -> bool:
        """Whether to draft level `depth` too, given the log-scores [B, k] of the nodes it would continue."""
        return True

    def total(self, scores: Tensor, depths: Tensor, most: int) -> int:
        """How many nodes to verify, at most `most`, of candidates with log-scores [B, M] and depths [B, M], best first."""
        return most


def grow(drafting: Drafting, shape: TreeShape, limits: Limits | None = None) -> DraftTree:
    """Grow a dynamic tree of at most `shape`, within `limits`.

    A node's score is the sum of log-scores on its path, so a child never outranks its parent; ties are broken towards the
    root, so no child is kept without its parent.
    """
    limits, target_ids = limits or Limits(), drafting.target_ids
    rows, k = drafting.logits.shape[0], shape.top_k
    if shape.total == 0:
        return DraftTree.empty(rows, drafting.logits.device)
    score, ids = drafting.rank(drafting.logits[:, None], 1)[:, 0].topk(k)  # [B, k]
    tokens, scores = [target_ids[ids]], [score]
    parents, depths = [torch.zeros_like(ids)], [torch.ones_like(ids)]
    frontier_token, frontier_score = tokens[0], score  # [B, k]
    frontier_node = torch.arange(1, k + 1, device=ids.device).expand(rows, k)  # [B, k] candidate numbers
    frontier_parent = torch.zeros_like(ids)  # [B, k] places in the level before
    offset = k + 1
    for depth in range(2, shape.depth + 1):
        if not bool((frontier_score > float("-inf")).any()) or not limits.deeper(depth, frontier_score):
            break
        logits = drafting.expand(frontier_token, frontier_parent)  # [B, k, D]
        score, ids = drafting.rank(logits, depth).topk(k)  # [B, k, k]
        score = (frontier_score[..., None] + score).flatten(1)  # [B, k*k]
        token = target_ids[ids.flatten(1)]  # [B, k*k]
        tokens.append(token)
        scores.append(score)
        parents.append(frontier_node.repeat_interleave(k, dim=1))
        depths.append(torch.full_like(token, depth))
        if depth < shape.depth:
            frontier_score, best = score.topk(k)  # [B, k]
            frontier_token, frontier_parent = token.gather(1, best), best // k
            frontier_node = offset + best
            offset += k * k
    candidates = DraftTree(torch.cat(tokens, 1), torch.cat(parents, 1), torch.cat(depths, 1), torch.cat(scores, 1))
    return _best(candidates, shape.total, limits)


def _best(candidates: DraftTree, most: int, limits: Limits) -> DraftTree:
    """Keep the best of all `candidates` [B, M], renumbered 1..N in candidate order (levels ascend); no more than some row has
    proposed."""
    most = min(most, int(candidates.real.sum(1).max()))
    scores, order = candidates.scores.sort(dim=1, descending=True, stable=True)  # ties: the shallower candidate comes first
    total = limits.total(scores[:, :most], candidates.depths.gather(1, order[:, :most]), most)
    kept = order[:, :total].sort(1).values  # [B, N]
    numbers = torch.arange(1, total + 1, device=kept.device).expand_as(kept)  # [B, N]
    renumber = kept.new_zeros(scores.shape[0], scores.shape[1] + 1)  # [B, M+1], root stays 0
    renumber.scatter_(1, kept + 1, numbers)
    return DraftTree(
        candidates.tokens.gather(1, kept),
        renumber.gather(1, candidates.parents.gather(1, kept)),
        candidates.depths.gather(1, kept),
        candidates.scores.gather(1, kept),
    )


def ancestry(parents: Tensor) -> Tensor:
    """bool [B, N+1, N+1]: entry (i, j) is True when node j lies on the path from the root to node i, i included."""
    rows, nodes = parents.shape[0], parents.shape[1] + 1
    reach = torch.eye(nodes, device=parents.device).repeat(rows, 1, 1)  # [B, N+1, N+1]
    if nodes > 1:
        reach[:, 1:].scatter_(2, parents[..., None], 1.0)  # each node sees itself and its parent
    seen = 1
    while seen < nodes:  # paths of doubling length; nodes - 1 bounds the depth
        reach = (reach @ reach).clamp_(max=1.0)
        seen *= 2
    return reach > 0
