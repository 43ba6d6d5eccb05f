"""How much a round drafts: the engine asks a policy, which is either one fixed tree or the planner."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from eyas.decoding.row import Row
from eyas.decoding.static_tree import StaticTree
from eyas.decoding.tree import Drafting, DraftTree, TreeShape, grow
from eyas.decoding.verify import Walk


@dataclass(frozen=True)
class Round:
    """What a round brought: the tree verified, the walk along it, and the seconds of the target's forward."""

    tree: DraftTree
    walked: Walk
    verify_s: float


class Policy(Protocol):
    """Decides what is drafted. `shape` is the most that ever is: the caches are laid out for it."""

    @property
    def shape(self) -> TreeShape | StaticTree: ...

    def drafts(self, rows: Sequence[Row]) -> bool:
        """Whether the coming round for these rows drafts at all; if not, the drafter is not even fed."""

    def grow(self, drafting: Drafting) -> DraftTree:
        """The trees of this round."""

    def learn(self, rows: Sequence[Row], done: Round) -> None:
        """What came of it."""


class Fixed:
    """The same tree in every round."""

    def __init__(self, shape: TreeShape | StaticTree) -> None:
        self.shape = shape

    def __str__(self) -> str:
        return str(self.shape)

    def drafts(self, rows: Sequence[Row]) -> bool:
        return self.shape.total > 0

    def grow(self, drafting: Drafting) -> DraftTree:
        return self.shape.grow(drafting) if isinstance(self.shape, StaticTree) else grow(drafting, self.shape)

    def learn(self, rows: Sequence[Row], done: Round) -> None:
        pass
