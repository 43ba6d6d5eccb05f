"""What speculation should bring, from nothing but the seconds of forwards and how many tokens a round yields.

A round of a fixed tree over B rows drafts the tree's levels and verifies N nodes a row in one target forward; it yields tau
tokens a row, where plain decoding yields one for a forward over B tokens:

    speed-up = tau x forward(B, 0) / (sum of the levels' seconds + forward(B, N))

(Leviathan et al., arXiv 2211.17192, theorem 3.8, with costs as measured instead of one ratio.) tau belongs to target,
drafter and text, not to the machine, so forwards timed elsewhere predict the other machine. What a round takes beside
forwards, in sampling and bookkeeping, is left out.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import takewhile
from pathlib import Path

from pydantic import BaseModel, ValidationError

from eyas.bench.figures import Interval
from eyas.decoding.costs import Costs
from eyas.decoding.static_tree import StaticTree
from eyas.decoding.tree import TreeShape
from eyas.errors import EyasError, first_fault
from eyas.files import write_text

Tree = TreeShape | StaticTree


class ForwardTimes(BaseModel):
    """Seconds of forwards, and what they were measured with."""

    machine: str
    threads: int
    fingerprint: str  # of the target
    weights: str
    drafter: str  # the hash of its weights; its name where it has none
    costs: Costs

    @classmethod
    def read(cls, path: Path) -> ForwardTimes:
        """Forward times from a JSON file. Raises EyasError when it is missing or holds none."""
        try:
            found = cls.model_validate_json(path.read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError) as error:
            raise EyasError(f"cannot read the forward times {path}: {getattr(error, 'strerror', None) or error}") from error
        except ValidationError as error:
            told = "written by `eyas bench --sweep --write-forward-times`"
            raise EyasError(f"{path} holds no forward times {told} ({first_fault(error)})") from error
        sizes = [*found.costs.target.values(), *found.costs.draft.values()]
        if not found.costs.target or not found.costs.draft or not all(sizes):
            raise EyasError(f"{path} lacks the seconds of target forwards or of drafting")
        return found

    def write(self, path: Path) -> None:
        write_text(path, self.model_dump_json(indent=1))


class Cell(BaseModel):
    """One tree at one batch size. Of the planner, whose trees change, the best of the other trees or plain decoding is
    predicted."""

    tree: str
    batch: int
    tokens_per_s: Interval
    speedup: Interval
    tau: float
    predicted: float


class BreakEven(BaseModel):
    """The batch up to which a tree is nowhere slower than plain decoding; 0 = it is slower at the smallest.

    Within noise the measured one may be anything from `at_least` to `at_most`.
    """

    tree: str
    measured: int
    predicted: int
    elsewhere: int | None = None
    at_least: int | None = None
    at_most: int | None = None

    @property
    def span(self) -> str:
        """The measured batch, and what it may as well be."""
        told = str(self.measured or "none")
        if self.at_least is None or self.at_least == self.at_most:
            return told
        return f"{told} ({self.at_least or 'none'} to {self.at_most})"


class Sweep(BaseModel):
    """Speed against batch and tree size, and what was predicted."""

    drafter: str
    temperature: float
    batches: list[int]
    trees: list[str]
    cells: list[Cell]
    break_even: list[BreakEven]
    here: ForwardTimes
    elsewhere: ForwardTimes | None = None
    predicted_elsewhere: dict[str, dict[int, float]] = {}  # tree and batch to speed-up
    plain_elsewhere: dict[int, float] = {}  # batch to tokens/s of plain decoding, as predicted
    notes: list[str] = []  # what a reader has to know of the predictions


def level_widths(tree: Tree) -> list[int]:
    """Nodes per row that the drafter reads for each level of the tree: the root, then what has children."""
    if isinstance(tree, StaticTree):
        parents = {path[:-1] for path in tree.paths}
        return [sum(len(path) == depth for path in parents) for depth in range(tree.depth)]
    return [1, *[tree.top_k] * (tree.depth - 1)][: tree.depth]


def round_seconds(costs: Costs, tree: Tree, rows: int) -> float:
    """Seconds of a round of `rows` rows: the levels drafted, and the forward that verifies the tree."""
    drafting = sum(costs.of(rows, width, tree.total).level for width in level_widths(tree))
    return drafting + costs.of(rows, tree.top_k, tree.total).forward[tree.total]


def speedup(costs: Costs, tree: Tree, rows: int, tau: float) -> float:
    """Speed of speculation with `tree` over plain decoding's, for `rows` rows."""
    return tau * costs.of(rows, 1, 0).forward[0] / round_seconds(costs, tree, rows)


def speedups(costs: Costs, trees: Mapping[str, Tree | None], rows: int, taus: Mapping[str, float]) -> dict[str, float]:
    """The predicted speed-up of each of `trees`; of the planner (None) that of the best of them, or 1."""
    found = {name: speedup(costs, tree, rows, taus[name]) for name, tree in trees.items() if tree is not None}
    best = max(found.values(), default=1.0)
    return {name: found.get(name, max(best, 1.0)) for name in trees}


def plain_speed(costs: Costs, rows: int) -> float:
    """The tokens/s that plain decoding of `rows` rows is predicted to have."""
    return rows / costs.of(rows, 1, 0).forward[0]


def pays_up_to(batches: Sequence[int], speedups: Sequence[float]) -> int:
    """The last of the ascending `batches` up to which every speed-up is 1 or more; 0 where the first is less."""
    paying = takewhile(lambda pair: pair[1] >= 1, zip(batches, speedups, strict=True))
    return max((batch for batch, _ in paying), default=0)


def may_be(speedup: Interval, floor: float) -> tuple[float, float]:
    """The least and the most that a measured speed-up may be, where differences up to `floor` are noise."""
    return min(speedup.low, speedup.value - floor), max(speedup.high, speedup.value + floor)


def break_even(costs: Costs, tree: Tree, tau: float) -> int:
    """The batch, at most the largest that forwards were timed for, up to which `tree` is predicted to pay."""
    batches = range(1, max(costs.target) + 1)
    return pays_up_to(batches, [speedup(costs, tree, batch, tau) for batch in batches])


def break_evens(costs: Costs, trees: Mapping[str, Tree | None], taus: Mapping[str, float]) -> dict[str, int]:
    """The break-even batch of each of `trees`; of the planner (None) the largest of them."""
    found = {name: break_even(costs, tree, taus[name]) for name, tree in trees.items() if tree is not None}
    return {name: found.get(name, max(found.values(), default=0)) for name in trees}


def beyond_timed(costs: Costs, trees: Mapping[str, Tree | None], batches: Sequence[int]) -> Iterator[str]:
    """What of `trees` is predicted from more than was timed, where a line through the last two sizes is carried on."""
    widest = min(max(levels) for levels in costs.draft.values())
    fixed = {name: tree for name, tree in trees.items() if tree is not None}
    wide = [name for name, tree in fixed.items() if max(level_widths(tree), default=0) > widest]
    if wide:
        yield f"levels of {', '.join(wide)} (timed: up to {widest} nodes)"
    for batch in batches:
        rows = min((timed for timed in costs.target if timed >= batch), default=None)
        if rows is None:
            yield f"batch {batch} (timed: up to {max(costs.target)})"
            continue
        most = max(costs.target[rows])
        large = [name for name, tree in fixed.items() if tree.total + 1 > most]
        if large:
            yield f"forwards of {', '.join(large)} at batch {batch} (timed: up to {most} tokens a row)"


def differences(here: ForwardTimes, elsewhere: ForwardTimes) -> Iterator[str]:
    """In what, beside the machine, the two were not timed alike, a line each."""
    if elsewhere.weights != here.weights:
        yield f"elsewhere is timed with {elsewhere.weights} weights, not with {here.weights}: it predicts such a target"
    if elsewhere.drafter != here.drafter:
        yield f"elsewhere is timed with the drafter {elsewhere.drafter}, not with {here.drafter}; the acceptance is this one's"
