"""Static trees: EAGLE-1's and Medusa's, the same nodes in every round whatever the drafter's confidence.

A node is named by its path of ranks: (0,) is the root's likeliest child, (0, 1) the second likeliest child of that one.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from eyas.decoding.tree import Drafting, DraftTree, TreeShape
from eyas.errors import EyasError

Path = tuple[int, ...]


@dataclass(frozen=True)
class StaticTree:
    """The tree of `paths`; raises EyasError where a node's parent is missing, a path empty or given twice."""

    paths: tuple[Path, ...]

    def __post_init__(self) -> None:
        known = set(self.paths)
        for path in self.paths:
            if not path or min(path) < 0 or (len(path) > 1 and path[:-1] not in known):
                raise EyasError(f"static tree: node {list(path)} has no parent among the nodes; name every node above it")
        if len(known) != len(self.paths) or not known:
            raise EyasError("static tree: it needs at least one node, and each of them once")
        object.__setattr__(self, "paths", tuple(sorted(self.paths, key=lambda p: (len(p), p))))

    @property
    def depth(self) -> int:
        return len(self.paths[-1])

    @property
    def total(self) -> int:
        return len(self.paths)

    @property
    def top_k(self) -> int:
        """The largest rank that a node asks for, counted from 1."""
        return 1 + max(path[-1] for path in self.paths)

    @property
    def scratch(self) -> int:
        """How many nodes the drafter reads per row: those with children."""
        return len(self._inner)

    @property
    def _inner(self) -> set[Path]:
        return {path[:-1] for path in self.paths if len(path) > 1}

    def __str__(self) -> str:
        return "static:" + ",".join("".join(map(str, path)) for path in self.paths)

    def grow(self, drafting: Drafting) -> DraftTree:
        """The tree of the drafter's likeliest tokens at these places."""
        rows, device = drafting.logits.shape[0], drafting.logits.device
        number = {path: n for n, path in enumerate(self.paths, 1)}
        place: dict[Path, int] = {(): 0}  # of the expanded nodes in their level
        score = torch.zeros(rows, 1, device=device)  # [B, expanded nodes of the level before]
        logits = drafting.logits[:, None]  # [B, expanded, D]
        tokens, scores = [], []
        for depth in range(1, self.depth + 1):
            level = [path for path in self.paths if len(path) == depth]
            best, ids = drafting.rank(logits, depth).topk(self.top_k)  # [B, expanded, top_k]
            above = torch.tensor([place[path[:-1]] for path in level], device=device)  # [n]
            ranks = torch.tensor([path[-1] for path in level], device=device)  # [n]
            tokens.append(drafting.target_ids[ids[:, above, ranks]])  # [B, n]
            scores.append(score[:, above] + best[:, above, ranks])
            inner = [at for at, path in enumerate(level) if path in self._inner]
            if inner:
                parents = above[inner].expand(rows, -1)  # [B, e]
                logits, score = drafting.expand(tokens[-1][:, inner], parents), scores[-1][:, inner]
                place = {level[at]: e for e, at in enumerate(inner)}
        parents = torch.tensor([number.get(path[:-1], 0) for path in self.paths], device=device).repeat(rows, 1)  # [B, N]
        depths = torch.tensor([len(path) for path in self.paths], device=device).repeat(rows, 1)  # [B, N]
        return DraftTree(torch.cat(tokens, 1), parents, depths, torch.cat(scores, 1))


def _named(names: str) -> StaticTree:
    """The tree of nodes given as digits, one rank a level, commas between. Raises EyasError for anything else."""
    nodes = names.split(",")
    if not all(node.isdecimal() for node in nodes):
        raise EyasError(f"static tree '{names}': nodes are digits, one rank a level, e.g. static:0,1,00")
    return StaticTree(tuple(tuple(int(rank) for rank in node) for node in nodes))


# The tree of EAGLE-1 (arXiv 2401.15077, figure 8; the authors' mc_sim_7b_63): 25 nodes, 5 deep.
EAGLE1 = _named(
    "0,1,2,3,00,01,02,10,11,20,21,30,000,001,002,010,011,020,021,100,0000,0001,0002,00000,00001"
)  # fmt: skip


def parse_tree(text: str) -> TreeShape | StaticTree | None:
    """Read a tree as the command line gives it; "auto" leaves it to the planner: None.

    "5x8x24" (DEPTHxTOPKxTOTAL) is dynamic, "chain:3" a chain, "static" EAGLE-1's tree and "static:0,1,00" the nodes named.
    Raises EyasError for anything else.
    """
    if text == "auto":
        return None
    if text == "static":
        return EAGLE1
    if text.startswith("static:"):
        return _named(text.removeprefix("static:"))
    return TreeShape.parse(text)
