"""Verification: one target forward over every row's tree, then a walk from the root along the tokens the target chooses.

One rule for chain and tree, greedy and sampled: at the node reached, the target chooses its token; if a child carries that
token it was drafted rightly and the walk moves there, else the token is the round's last, the bonus.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from eyas.decoding.cache import KVCache, committed_mask
from eyas.decoding.tree import DraftTree, ancestry
from eyas.target import Target, TargetOutput

# Up to this many nodes of all rows are projected to the vocabulary together, which reads its weights once; of more, only the
# nodes that the walk visits, which bounds the time and the memory of the logits.
PROJECTED_AT_ONCE = 64


def read_trees(target: Target, cache: KVCache, last: Tensor, tree: DraftTree) -> TargetOutput:
    """One forward over the rows' last tokens `last` int64 [B, 1] and their trees, behind what `cache` has committed."""
    rows, nodes = last.shape[0], tree.tokens.shape[1] + 1
    lengths = cache.lengths[:rows].to(last.device)  # [B]
    depths = torch.cat([torch.zeros_like(last), tree.depths], 1)  # [B, N+1]
    positions = lengths[:, None] + depths
    slots = lengths[:, None] + torch.arange(nodes, device=last.device)  # [B, N+1]
    view = cache.view(0, rows, slots)
    mask = committed_mask(lengths, nodes, view.end)  # [B, N+1, K]
    mask.scatter_(2, slots[:, None].expand(rows, nodes, nodes), ancestry(tree.parents))
    key_positions = torch.arange(view.end, device=last.device).repeat(rows, 1).scatter(1, slots, positions)  # [B, K]
    return target.forward(torch.cat([last, tree.tokens], 1), positions, view, mask[:, None], key_positions)


def projected(target: Target, out: TargetOutput) -> Tensor | None:
    """Logits [B, N+1, V] of all nodes where they are few; None where it is better to project what the walk visits."""
    few = out.hidden.shape[0] * out.hidden.shape[1] <= PROJECTED_AT_ONCE
    return target.logits(out.hidden) if few else None


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


# (nodes int64 [B], step, alive bool [B]) -> the tokens int64 [B] that the target chooses after these nodes; a row that is no
# longer alive has chosen its last token before
Choose = Callable[[Tensor, int, Tensor], Tensor]


def walk(tree: DraftTree, depth: int, choose: Choose) -> Walk:
    """Walk `tree` of at most `depth` levels. `choose` is called once per level reached, for the nodes visited only."""
    rows = tree.tokens.shape[0]
    node = tree.tokens.new_zeros(rows)  # [B]
    alive = torch.ones_like(node, dtype=torch.bool)  # [B]
    counts, offered = torch.zeros_like(node), torch.zeros_like(node)
    tokens, nodes = [], []
    for step in range(depth + 1):
        token = choose(node, step, alive)  # [B]
        tokens.append(token)
        nodes.append(node)
        counts = counts + alive.long()
        children = (tree.parents == node[:, None]) & (tree.depths == step + 1) & tree.real  # [B, N]
        offered = offered + (alive & children.any(1)).long()
        match = children & (tree.tokens == token[:, None])  # [B, N], at most one per row
        alive = alive & match.any(1)
        if not bool(alive.any()):
            break
        node = torch.where(alive, match.long().argmax(1) + 1, node)
    return Walk(torch.stack(tokens, 1), torch.stack(nodes, 1), counts, offered)
