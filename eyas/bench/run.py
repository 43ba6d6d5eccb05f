"""A benchmark from heads on disk to a report: load, make room, race."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from eyas.bench.figures import PLAIN, RaceReport
from eyas.bench.race import Rules, race
from eyas.bench.suites import Item
from eyas.decoding.drafters import Eagle3Drafter
from eyas.decoding.engine import Engine
from eyas.decoding.sampling import SamplingParams
from eyas.decoding.static_tree import StaticTree
from eyas.decoding.tree import TreeShape
from eyas.heads.files import head_hash, load_head
from eyas.target import Target


def run_bench(
    target: Target,
    heads: Mapping[str, Path],
    items: Sequence[Item],
    params: SamplingParams,
    *,
    tree: TreeShape | StaticTree | None = None,
    rules: Rules = Rules(),
    exact: bool = False,
) -> RaceReport:
    """Race plain decoding against each of `heads` (name -> the head's folder) on `items`; see `race`.

    The caches are as long as the longest prompt with its answers needs, within the target's limit. Raises EyasError with
    `exact` for a target that is not bit-exact by construction.
    """
    length = min(target.max_length, max((item.room(target, params.max_new_tokens) for item in items), default=1))
    engines = {PLAIN: Engine(target, max_rows=rules.batch, max_length=length, exact=exact)}
    for name, folder in heads.items():
        drafter = Eagle3Drafter(target, load_head(folder, target), weights=target.weights)
        engines[name] = Engine(target, drafter, tree=tree, max_rows=rules.batch, max_length=length)
    hashes = {name: head_hash(folder) for name, folder in heads.items()}
    return race(target, engines, items, params, heads=hashes, rules=rules)
