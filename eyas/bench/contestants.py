"""Who races: contestants as a command line names them, `[NAME=]SOURCE[@TREE]`, and their engines."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from eyas.bench.figures import PEER, PLAIN, Entry
from eyas.bench.peers import Peer, open_peer, peer_engine, peer_weights, require_able
from eyas.decoding.drafters.opening import Opened, open_drafter, split_tree, taps_named
from eyas.decoding.engine import Engine
from eyas.decoding.sampling import SamplingParams
from eyas.decoding.static_tree import StaticTree, parse_tree
from eyas.decoding.tree import TreeShape
from eyas.errors import EyasError
from eyas.target import Target


@dataclass(frozen=True)
class Contestant:
    """`source` is "plain", what `open_drafter` takes, or a peer; `tree` None leaves it to the planner."""

    name: str
    source: str
    tree: TreeShape | StaticTree | None = None


def parse_contestants(told: Sequence[str], tree: TreeShape | StaticTree | None = None) -> list[Contestant]:
    """The contestants that `told` names, plain decoding first; `tree` is that of those who name none.

    Raises EyasError, in one line, for a tree that cannot be read and for a name that is used twice.
    """
    found = [_parsed(one, tree) for one in told]
    contestants = [Contestant(PLAIN, PLAIN), *(c for c in found if (c.name, c.source) != (PLAIN, PLAIN))]
    for n, contestant in enumerate(contestants):
        if contestant.name in {other.name for other in contestants[:n]}:
            raise EyasError(
                f"two contestants would be called '{contestant.name}'; tell them apart by --drafter NAME={contestant.source}"
            )
    return contestants


def split_told(told: str) -> tuple[str, str, str | None]:
    """Name, source and tree of `[NAME=]SOURCE[@TREE]`: "" and None for what is not named."""
    name, source = "", told
    if "=" in told and not Path(told).exists():
        name, _, source = told.partition("=")
    return name, *split_tree(source)


def _parsed(told: str, tree: TreeShape | StaticTree | None) -> Contestant:
    name, source, shape = split_told(told)
    if shape is not None:
        tree = parse_tree(shape)
    if not source:
        raise EyasError(f"--drafter {told}: no drafter in it; write [NAME=]SOURCE[@TREE], e.g. mine=runs/head@chain:3")
    if source.startswith(PEER) and shape:
        raise EyasError(f"--drafter {told}: a peer drafts as it does, so it takes no tree")
    if source == PLAIN and shape:
        raise EyasError(f"--drafter {told}: plain decoding drafts nothing, so it takes no tree")
    return Contestant(name or _short(source) + (f"@{shape}" if shape else ""), source, tree)


def _short(source: str) -> str:
    """A source without the folders above it: `runs/head+lookup` is "head+lookup"; a peer by its kind."""
    if source.startswith(PEER):
        return source.removeprefix(PEER).partition(":")[0]
    return "+".join(Path(part).name or part for part in source.split("+"))


def taps_of(contestants: Sequence[Contestant]) -> tuple[int, ...] | None:
    """The taps to load their target with: those that the first of the drafters names; None: any will do."""
    named = (taps_named(c.source) for c in contestants if c.source != PLAIN and not c.source.startswith(PEER))
    return next((taps for taps in named if taps), None)


@dataclass(frozen=True)
class Entrant:
    """A contestant, opened; `opened.target` is the one that its engine is given. A peer has no drafter, but an engine of its
    own, named by `peer_engine`."""

    contestant: Contestant
    opened: Opened
    peer_engine: str = ""

    def require_able(self, params: SamplingParams) -> None:
        """Raises EyasError when it cannot answer as `params` ask; engines of ours can."""
        if self.peer_engine:
            require_able(self.contestant.source, params)

    def engine(self, *, max_rows: int, max_length: int, sampling: str = "coupled", exact: bool = False) -> Engine | Peer:
        """A fresh engine. Raises EyasError when the tree does not fit the drafter, the cache not the memory, and when a peer is
        not installed."""
        target, drafter = self.opened.target, self.opened.drafter
        if self.peer_engine:
            return open_peer(self.contestant.source, target, max_rows, max_length)
        return Engine(
            target, drafter, tree=self.contestant.tree, sampling=sampling, max_rows=max_rows, max_length=max_length, exact=exact
        )

    @property
    def entry(self) -> Entry:
        told = self.contestant
        tree = str(told.tree or "auto") if self.opened.drafter is not None else ""
        return Entry(name=told.name, source=told.source, hash=self.opened.hash, tree=tree, engine=self.peer_engine)


def enter(contestant: Contestant, target: Target) -> Entrant:
    """Open the contestant's drafter; a peer is opened for its race, by `Entrant.engine`.

    Raises EyasError, in one line, when there is no such drafter for `target`, or no such peer.
    """
    source = contestant.source
    if source.startswith(PEER):
        return Entrant(contestant, Opened(target, None, peer_weights(source)), peer_engine(source))
    return Entrant(contestant, Opened(target, None, "") if source == PLAIN else open_drafter(source, target))
