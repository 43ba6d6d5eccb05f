"""What a forward costs on this machine, measured once per target, drafter and thread count, and kept.

The floor of a target forward is the larger of the bytes of its weights over the memory's bandwidth and its FLOPs over the
cores' rate, so its time is flat in the number of tokens until the second overtakes the first; where that is depends on the
machine, the packing and the batch, which is why it is measured and not derived.
"""

from __future__ import annotations

import hashlib
import json
from bisect import bisect_left
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from pydantic import BaseModel, ValidationError

from eyas import machine
from eyas.decoding.cache import KVCache
from eyas.decoding.drafters import Drafter
from eyas.decoding.tree import Drafting, DraftTree, TreeShape, grow
from eyas.decoding.verify import projected, read_trees
from eyas.errors import EyasError
from eyas.files import cache_dir, write_text
from eyas.progress import console
from eyas.target import Target

CONTEXT = 192  # committed tokens behind which a forward is timed
REPEATS = 5  # of every measurement; the fastest counts
TOKENS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32)  # per row
READ = 64  # tokens of a text that the drafter is timed reading
LARGEST = 96  # tokens of a forward timed, beyond the first few per row


class Costs(BaseModel):
    """Seconds. `target` maps rows and tokens per row to a target forward, its projection to the vocabulary as the engine does
    it included; `draft` maps rows and nodes per row to one level of drafting: the drafter's step and its candidates; `read`
    is one token of a text that the drafter reads."""

    target: dict[int, dict[int, float]] = {}
    draft: dict[int, dict[int, float]] = {}
    read: float = 0.0

    def of(self, rows: int, width: int, most: int) -> Prices:
        """The prices of rounds of `rows`, with levels of at most `width` nodes and at most `most` nodes verified a row."""
        forwards = {b: [_between(costs, n + 1) for n in range(most + 1)] for b, costs in _levelled(self.target).items()}
        levels = _levelled(self.draft)
        narrow, wide = ({b: _between(costs, k) for b, costs in levels.items()} for k in (1, width))
        return Prices(
            width,
            [_between({b: costs[n] for b, costs in forwards.items()}, rows) for n in range(most + 1)],
            _between(narrow, rows),
            _between(wide, rows),
        )


@dataclass(frozen=True)
class Prices:
    """Seconds, for one number of rows: `forward[n]` of a target forward that verifies n nodes a row, `first` of the first
    drafted level and `level` of every further one, which has `width` nodes a row."""

    width: int
    forward: list[float]
    first: float
    level: float


def _levelled(costs: Mapping[int, Mapping[int, float]]) -> dict[int, dict[int, float]]:
    """More work never takes less time: a forward that took longer than a larger one was disturbed, and has that one's time."""
    return {
        rows: {n: min(t for b, row in costs.items() if b >= rows for m, t in row.items() if m >= n) for n in measured_row}
        for rows, measured_row in costs.items()
    }


def _between(costs: Mapping[int, float], size: int) -> float:
    sizes = sorted(costs)
    if size in costs or len(sizes) == 1:
        return costs[size] if size in costs else costs[sizes[0]]
    upper = min(max(bisect_left(sizes, size), 1), len(sizes) - 1)
    low, high = sizes[upper - 1], sizes[upper]
    slope = max(costs[high] - costs[low], 0.0) / (high - low)
    return costs[low] + slope * (size - low)


@dataclass(frozen=True)
class Bench:
    """What is timed: `target` over `cache`, and `drafter`, whose rows must be free."""

    target: Target
    cache: KVCache
    drafter: Drafter

    def key(self) -> str:
        """Names everything that a measurement depends on."""
        target = self.target
        device = torch.cuda.get_device_name(target.device) if target.device.type == "cuda" else machine.processor()
        facts = [target.fingerprint, target.weights, str(target.dtype), device, torch.get_num_threads(), torch.__version__]
        facts += [repr(self.drafter), CONTEXT]
        return hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:16]


def measured(bench: Bench, width: int) -> Costs:
    """The costs of batches up to `bench.cache.rows` and of drafting up to `width` nodes a row: from disk, or measured now.

    Measuring takes seconds; the rows' caches are used as scratch and left empty.
    """
    path = cache_dir() / "costs" / f"{bench.key()}.json"
    try:
        costs = Costs.model_validate_json(path.read_text())
    except (OSError, ValidationError):
        costs = Costs()
    batches = [b for b in (2**i for i in range(20)) if b < bench.cache.rows] + [bench.cache.rows]
    missing = [b for b in batches if b not in costs.target or b not in costs.draft or width not in costs.draft[b]]
    if not missing:
        return costs
    console.print(f"measuring what a forward costs here, once (kept in {path})", style="dim", markup=False)
    for rows in missing:
        tokens = [n for n in TOKENS if (n <= 3 or rows * n <= LARGEST) and n < bench.cache.length - 1]
        costs.target[rows] = _timed({n: _target_forward(bench, rows, n) for n in tokens})
        costs.draft[rows] = _timed({k: _draft_level(bench, rows, k) for k in sorted({1, width})})
    count = min(READ, bench.cache.length - 1)
    costs.read = _timed({count: _drafter_reading(bench, count)})[count] / count
    try:
        write_text(path, costs.model_dump_json(indent=1))
    except EyasError as error:
        console.print(f"note: {error}; it will be measured again next time", style="yellow", markup=False)
    return costs


def _timed(jobs: Mapping[int, Callable[[], float]]) -> dict[int, float]:
    """The fastest of several runs of every job, in turns, so that a slow moment of the machine hits all alike."""
    best = dict.fromkeys(jobs, float("inf"))
    for turn in range(REPEATS + 1):
        for size, job in jobs.items():
            seconds = job()
            if turn:  # the first warms up
                best[size] = min(best[size], seconds)
    return best


def _seconds(device: torch.device, work: Callable[[], object]) -> float:
    start = machine.clock(device)
    work()
    return machine.clock(device) - start


def _target_forward(bench: Bench, rows: int, tokens: int) -> Callable[[], float]:
    target, cache = bench.target, bench.cache
    drafts = torch.zeros(rows, tokens - 1, dtype=torch.long, device=target.device)  # [B, N]
    chain = torch.arange(tokens - 1, device=target.device).expand_as(drafts)  # [B, N]
    tree = DraftTree(drafts, chain, chain + 1, drafts.float())
    last = torch.zeros(rows, 1, dtype=torch.long, device=target.device)  # [B, 1]

    @torch.inference_mode()
    def run() -> float:
        cache.lengths[:rows] = min(CONTEXT, cache.length - tokens - 1)
        seconds = _seconds(target.device, lambda: projected(target, read_trees(target, cache, last, tree)))
        cache.lengths[:rows] = 0
        return seconds

    return run


def _draft_level(bench: Bench, rows: int, width: int) -> Callable[[], float]:
    """One level of drafting: a tree of two levels needs one step of the drafter, and ranks twice, a little too much."""
    target, drafter = bench.target, bench.drafter
    token = torch.zeros(rows, 1, dtype=torch.long, device=target.device)  # [B, 1]
    taps = torch.zeros(
        rows, 1, len(target.tap_ids) * target.hidden_size, dtype=target.dtype, device=target.device
    )  # [B, 1, nH]
    counts = torch.ones(rows, dtype=torch.long)  # [B]
    two = TreeShape(2, width, width)

    def rank(logits: torch.Tensor, depth: int) -> torch.Tensor:
        return logits.float().log_softmax(-1)

    @torch.inference_mode()
    def run() -> float:
        root = drafter.extend(token, taps, counts)
        seconds = _seconds(target.device, lambda: grow(Drafting(root, drafter.expand, rank, drafter.target_ids), two))
        for row in range(rows):
            drafter.begin(row, 0, row, 0)
        return seconds

    return run


def _drafter_reading(bench: Bench, count: int) -> Callable[[], float]:
    target, drafter = bench.target, bench.drafter
    tokens = torch.zeros(count, dtype=torch.long, device=target.device)  # [M]
    taps = torch.zeros(count, len(target.tap_ids) * target.hidden_size, dtype=target.dtype, device=target.device)  # [M, nH]

    def run() -> float:
        seconds = _seconds(target.device, lambda: drafter.prefill(0, tokens, taps))
        drafter.begin(0, 0, 0, 0)
        return seconds

    return run
