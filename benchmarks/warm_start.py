"""What the warm start and the growing unroll bring: estimated tau at equal minutes, everything else equal.

    python benchmarks/warm_start.py [--quick] [--answers runs/demo/responses.jsonl] [--minutes 5]

Four heads are trained on the same answers for the same time, one after the other: random or warm start, full unroll from
the first step or a growing one. tau is that of a greedy chain as deep as the unroll, estimated on held-out answers
(eyas.training.acceptance). Answers come from `eyas respond --features`; `make demo` leaves some in runs/demo.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path

from eyas.data.samples import read_responses
from eyas.data.store import features_beside
from eyas.target import Target, transformers_quietly
from eyas.threads import choose_threads
from eyas.training.config import TrainConfig
from eyas.training.recipe import train

ARMS = {
    "tau_random": {"start": "random", "grow_until": 0.0},
    "tau_random_growing": {"start": "random"},
    "tau_warm": {"start": "warm", "grow_until": 0.0},
    "tau_warm_growing": {"start": "warm"},
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="0.8 minutes an arm")
    parser.add_argument("--answers", type=Path, default=Path("runs/demo/responses.jsonl"))
    parser.add_argument("--minutes", type=float, default=5.0, help="training time of each arm")
    parser.add_argument("--weights", default="fp16", help="packing the answers were written with")
    args = parser.parse_args()
    minutes = 0.8 if args.quick else args.minutes
    transformers_quietly()
    print(f"{choose_threads()}, {minutes} minutes an arm")
    target = Target.load("smollm2", weights=args.weights)
    samples = read_responses(args.answers, fingerprint=target.fingerprint)
    figures: dict[str, object] = {"minutes": minutes, "texts": len(samples)}
    with tempfile.TemporaryDirectory() as folder:
        for name, settings in ARMS.items():
            config = TrainConfig(minutes=minutes, draft_vocab_size=4096, evaluations=2, **settings)
            out = Path(folder) / name
            reached = train(target, samples, out, config, features=features_beside(args.answers), held_out=24)
            figures[name] = round(reached.tau, 3)
            figures[name.replace("tau", "n_alpha")] = [round(a, 3) for a in reached.n_alpha]
            print(f"{name}: {reached.tau:.3f}", flush=True)
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
