"""Does speculation pay at this batch size? Tokens/s over plain decoding's at batch 1 to 64, with and without the planner.

    python benchmarks/batch_sweep.py [--quick] [--head FOLDER] [--weights fp16]

At every batch size plain decoding, the same again, the planner and a fixed tree answer the same requests in turns, in an
order that turns round. Greedy; no answer ends early. Tokens/s count tokens after an answer's first over the seconds after
prefill. All answers must be plain decoding's.

The last line is one JSON object: ratios and ratios_without_planner by batch size, min_ratio (of the first), break_even_batch
(the largest batch at which the fixed tree is not slower than plain; with the planner that is every batch whose ratio is at
least 1 within the noise), noise (plain again over plain, by batch size).
"""

from __future__ import annotations

import json

import eyas  # noqa: F401  before torch: OpenMP reads how long threads spin when torch loads it

# isort: split
import torch
from decoding import Pair, arguments, timed

from eyas.decoding.engine import Engine
from eyas.decoding.sampling import SamplingParams
from eyas.decoding.tree import TreeShape

BATCHES = (1, 2, 4, 8, 16, 32, 64)
TREE = TreeShape()
PLAIN, AGAIN, PLANNED, FIXED = "plain", "plain again", "planner", "fixed tree"


def sweep(pair: Pair, batch: int, tokens: int, turns: int) -> dict[str, float]:
    """Tokens/s of every way at one batch size."""
    asked = pair.requests(batch * turns, SamplingParams(max_new_tokens=tokens, ignore_eos=True))
    length = max(len(r.ids) for r in asked) + tokens
    plain = Engine(pair.target, max_rows=batch, max_length=length)
    engines = {
        PLAIN: plain,
        AGAIN: plain,
        PLANNED: Engine(pair.target, pair.drafter(), max_rows=batch, max_length=length),
        FIXED: Engine(pair.target, pair.drafter(), tree=TREE, max_rows=batch, max_length=length),
    }
    seconds, emitted = dict.fromkeys(engines, 0.0), dict.fromkeys(engines, 0)
    for engine in engines.values():  # touch the caches, load what is loaded late
        timed(engine, asked[:1])
    for turn in range(turns):
        group = asked[turn * batch : (turn + 1) * batch]
        order = list(engines.items())
        truth = None
        for name, engine in order if turn % 2 == 0 else reversed(order):
            run = timed(engine, group)
            truth = truth or run.ids
            assert run.ids == truth, f"{name} wrote other tokens at batch {batch}"
            seconds[name] += run.seconds
            emitted[name] += run.tokens
    return {name: emitted[name] / seconds[name] for name in engines}


def main() -> None:
    args = arguments(__doc__ or "")
    pair = Pair.load(args)
    tokens, turns = (24, 2) if args.quick else (64, 4)
    ratios, fixed, noise = {}, {}, {}
    for batch in BATCHES:
        speed = sweep(pair, batch, tokens, turns * max(1, 4 // batch))
        ratios[batch], fixed[batch], noise[batch] = (
            round(speed[name] / speed[PLAIN], 3) for name in (PLANNED, FIXED, AGAIN)
        )  # fmt: skip
        print(f"batch {batch:>2}: " + ", ".join(f"{name} {s:.1f}" for name, s in speed.items()) + " tokens/s", flush=True)
    paying = [batch for batch in BATCHES if fixed[batch] >= 1]
    figures = {
        "ratios": ratios, "ratios_without_planner": fixed, "min_ratio": min(ratios.values()),
        "break_even_batch": max(paying, default=0), "noise": noise, "tree": str(TREE), "new_tokens": tokens,
        "weights": args.weights, "threads": torch.get_num_threads(),
    }  # fmt: skip
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
