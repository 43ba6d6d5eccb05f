"""Acceptance: a walk from the root along the tokens that the target itself chooses.

One rule for chain and tree, greedy and sampled: at the node reached, the target chooses its token; if a child carries that
token it was drafted rightly and the walk moves there, else the token is the round's last, the bonus.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from eyas.decoding.tree import DraftTree


@dataclass(frozen=True)
class Walk:
    """What a round yields. A = the tree's depth + 1.

    `tokens` int64 [B, A]: the tokens the target chose, the first `counts[b]` of them valid; all but the last of these were
    drafted. `nodes` int64 [B, A]: the node at which each was chosen (nodes[:, 0] is the root). `offered` int64 [B]: to how
    many depths in a row a draft was on offer along the walk.
    """

    tokens: Tensor
    nodes: Tensor
    counts: Tensor
    offered: Tensor


# (nodes int64 [B], step) -> the tokens int64 [B] that the target chooses after these nodes
Choose = Callable[[Tensor, int], Tensor]


def walk(tree: DraftTree, depth: int, choose: Choose) -> Walk:
    """Walk `tree` of at most `depth` levels. `choose` is called once per level reached, for the nodes visited only."""
    rows = tree.tokens.shape[0]
    node = tree.tokens.new_zeros(rows)  # [B]
    alive = torch.ones_like(node, dtype=torch.bool)  # [B]
    counts, offered = torch.zeros_like(node), torch.zeros_like(node)
    tokens, nodes = [], []
    for step in range(depth + 1):
        token = choose(node, step)  # [B]
        tokens.append(token)
        nodes.append(node)
        counts = counts + alive.long()
        children = (tree.parents == node[:, None]) & (tree.depths == step + 1)  # [B, N]
        offered = offered + (alive & children.any(1)).long()
        match = children & (tree.tokens == token[:, None])  # [B, N], at most one per row
        alive = alive & match.any(1)
        if not bool(alive.any()):
            break
        node = torch.where(alive, match.long().argmax(1) + 1, node)
    return Walk(torch.stack(tokens, 1), torch.stack(nodes, 1), counts, offered)
