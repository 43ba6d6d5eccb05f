"""What a round costs beside the target's forward.

    python benchmarks/round_overhead.py [--quick] [--head FOLDER] [--weights fp16]

The floor of a drafted level is its bytes over the memory's bandwidth: the head's layer and its vocabulary projection against
the target's layers and vocabulary projection, all in one packing. It is computed from the very models and printed.

The last line is one JSON object: draft_step_share (a one-row step of the head, with its projection and top-k, over a target
forward of one token), draft_tree_step_share (ten rows), overhead_share (time of a round outside target and draft forwards,
over the round; the tree is fixed), planned_overhead_share (the same with the planner), and noise (the target's forward against
itself, interleaved as the others are).
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable

import eyas  # noqa: F401  before torch: OpenMP reads how long threads spin when torch loads it

# isort: split
import torch
from decoding import Pair, arguments, timed

from eyas.decoding.cache import KVCache
from eyas.decoding.engine import Engine
from eyas.decoding.sampling import SamplingParams
from eyas.decoding.tree import DraftTree, TreeShape
from eyas.decoding.verify import projected, read_trees
from eyas.kernels.linear import PackedLinear

CONTEXT = 192  # committed tokens


def forwards(pair: Pair) -> dict[str, Callable[[], object]]:
    """A one-token target forward (twice, to see the noise) and the head's steps, to be called again and again."""
    target, drafter = pair.target, pair.drafter()
    cache = KVCache(target.layer_shapes, 1, CONTEXT + 8)
    cache.lengths[:] = CONTEXT
    none, last = DraftTree.empty(1), torch.zeros(1, 1, dtype=torch.long)
    drafter.allocate(1, CONTEXT + 8, 10)
    drafter.prefill(0, torch.zeros(CONTEXT, dtype=torch.long), torch.zeros(CONTEXT, 3 * target.hidden_size))
    drafter.extend(last, torch.zeros(1, 1, 3 * target.hidden_size), torch.ones(1, dtype=torch.long))
    fresh = drafter._states, drafter._seen, drafter._levels

    def read() -> object:
        return projected(target, read_trees(target, cache, last, none))

    def step(rows: int) -> Callable[[], object]:
        tokens = torch.zeros(1, rows, dtype=torch.long)

        def run() -> object:
            drafter._states, drafter._seen, drafter._levels = fresh
            return drafter.expand(tokens, tokens).log_softmax(-1).topk(10)

        return run

    return {"target": read, "target again": read, "step": step(1), "tree step": step(10)}


def weight_bytes(*modules: torch.nn.Module) -> int:
    return sum(m.packed.nbytes for module in modules for m in module.modules() if isinstance(m, PackedLinear))


@torch.inference_mode()
def main() -> None:
    args = arguments(__doc__ or "")
    pair = Pair.load(args)
    jobs = forwards(pair)
    seconds: dict[str, list[float]] = {name: [] for name in jobs}
    for turn in range(20 if args.quick else 100):
        for name, job in jobs.items() if turn % 2 else reversed(list(jobs.items())):
            start = time.perf_counter()
            job()
            if turn > 2:
                seconds[name].append(time.perf_counter() - start)
    median = {name: statistics.median(times) for name, times in seconds.items()}
    for name, value in median.items():
        print(f"{name:<14}{1e3 * value:7.2f} ms")
    shares = {}
    asked = pair.requests(4 if args.quick else 16, SamplingParams(max_new_tokens=48, ignore_eos=True))
    for name, tree in (("overhead_share", TreeShape()), ("planned_overhead_share", None)):
        engine = Engine(pair.target, pair.drafter(), tree=tree, max_length=160)
        timed(engine, asked[:1])
        stats = timed(engine, asked).stats
        shares[name] = stats.other_s / stats.seconds
        each = {part: 1e3 * s / stats.rounds for part, s in
                (("draft", stats.draft_s), ("verify", stats.verify_s), ("rest", stats.other_s))}  # fmt: skip
        print(f"{engine.policy}: " + ", ".join(f"{part} {ms:.2f} ms" for part, ms in each.items()) + f", tau {stats.tau:.2f}")
    floor = weight_bytes(pair.drafter().head) / weight_bytes(pair.target.model)
    print(f"floor of a step by bytes: {floor:.3f} of a target forward")
    figures = {
        "draft_step_share": median["step"] / median["target"],
        "draft_tree_step_share": median["tree step"] / median["target"],
        **shares,
        "floor_by_bytes": floor,
        "noise": median["target again"] / median["target"],
    }
    told = {name: round(value, 3) for name, value in figures.items()}
    print(json.dumps({**told, "weights": args.weights, "threads": torch.get_num_threads()}))


if __name__ == "__main__":
    main()
