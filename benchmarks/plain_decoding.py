"""Plain decoding by this engine against transformers' own `generate`: the same target, prompts and tokens.

    python benchmarks/plain_decoding.py [--quick] [--threads N]

Two races (`eyas.bench.race`), at batch 1 and at batch 8, in which `generate` in float32 is the base and every packing of the
target a contestant. Runs are interleaved prompt by prompt, `generate` also races against itself (`noise`), and tokens/s
count the tokens after an answer's first over the seconds after the prompt was read. Greedy; no answer ends early.

The last line is one JSON object: plain_over_generate_b1 and _b8 (tokens/s of `packing`, the fastest, over generate's),
fp32_over_generate_b1, exact_cost (tokens/s of the fastest packing that is bit-exact by construction over stock products, which
are not: above 1, exactness costs nothing), each with its 95 % interval, the tokens/s, and the noise.
"""

from __future__ import annotations

import argparse
import json
from typing import Any

import eyas  # noqa: F401  before torch: OpenMP reads how long threads spin when torch loads it

# isort: split
import torch
from decoding import PROMPTS

from eyas.bench.arithmetic import bootstrap, by_prompt, speed_columns, speed_ratio
from eyas.bench.figures import PLAIN, Interval, RaceReport
from eyas.bench.items import Item
from eyas.bench.peers import open_peer
from eyas.bench.race import Rules, race
from eyas.decoding.engine import Engine
from eyas.decoding.sampling import SamplingParams
from eyas.target import Target, transformers_quietly

PACKINGS = ("fp32", "fp16", "int8")
MAX_LENGTH = 256


def ratio(report: RaceReport, name: str, base: str) -> Interval:
    """tokens/s of one contestant over another's, with its interval over prompts."""
    return bootstrap(speed_columns(by_prompt(report.rows), [name, base]), speed_ratio)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer prompts, shorter answers")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    transformers_quietly()
    alone, together, tokens = (4, 8, 32) if args.quick else (8, 16, 64)

    targets = {weights: Target.load("smollm2", weights=weights) for weights in ("stock", *PACKINGS)}
    stock = targets["stock"]
    items = [Item(str(i), "plain", "", ({"role": "user", "content": p},)) for i, p in enumerate(PROMPTS)]
    params = SamplingParams(max_new_tokens=tokens, ignore_eos=True)
    reports = {}
    for batch, count in ((1, alone), (8, together)):
        engines: dict[str, Any] = {PLAIN: open_peer("peer:generate", stock, batch, MAX_LENGTH)}
        for weights in ("stock", *PACKINGS) if batch == 1 else PACKINGS:
            engines[weights] = Engine(targets[weights], max_rows=batch, max_length=MAX_LENGTH, exact=weights != "stock")
        reports[batch] = race(stock, engines, items[:count], params, rules=Rules(batch=batch, noise=count // 2, samples=0))

    figures: dict[str, Any] = {}
    for batch, report in reports.items():
        best = max(PACKINGS, key=lambda name, of=report: of.drafters[name].speedup.value)
        figures |= {f"plain_over_generate_b{batch}": report.drafters[best].speedup, f"packing_b{batch}": best}
        if batch == 1:
            figures["fp32_over_generate_b1"] = report.drafters["fp32"].speedup
            figures["exact_cost"] = ratio(report, best, "stock")
        speeds = {name: round(f.tokens_per_s.value, 1) for name, f in report.drafters.items()}
        figures[f"tokens_per_s_b{batch}"] = {"generate": speeds.pop(PLAIN), **speeds}
        figures[f"differing_b{batch}"] = {name: f.differing for name, f in report.speculative.items()}
        assert report.noise is not None
        figures[f"noise_b{batch}"] = report.noise.ratio
    for name, value in list(figures.items()):
        if isinstance(value, Interval):
            figures[name] = round(value.value, 3)
            figures[f"{name}_interval"] = [round(value.low, 3), round(value.high, 3)]
        print(f"{name:<24}{figures[name]} {figures.get(f'{name}_interval', '')}")
    print(json.dumps({**figures, "threads": args.threads, "prompts": [alone, together], "new_tokens": tokens}))


if __name__ == "__main__":
    main()
