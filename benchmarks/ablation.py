"""The ablation that EAGLE-3 rests on, at equal steps: one tap or three, with and without training-time test, with and without
EAGLE-1's feature loss.

    python benchmarks/ablation.py [--quick] [--texts 400] [--steps 800]

Every arm learns from the same texts in the same order, from the same warm start, and is measured on the same held-out texts:
tau and n-alpha of a greedy chain of 5 drafts. Differences to the full head come with a 95 % interval over the texts (paired
bootstrap); `noise` is the difference between two full heads that differ in the seed alone, and is the larger uncertainty.
"Top tap only" feeds the head zeros for the low and the middle tap; "without training-time test" unrolls one step in training.
The feature loss draws the state of a step to the high tap of the position in whose place it is read next, ten times the
weight of the token loss, as in EAGLE-1.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Sequence

import study

from eyas.data.features import Features
from eyas.data.fetching import Fetched
from eyas.training.config import TrainConfig

DEPTH = 5


class TopTap(Fetched):
    """Texts whose low and middle tap are silent."""

    def __init__(self, texts: Sequence[Features]) -> None:
        self._texts = texts

    def __len__(self) -> int:
        return len(self._texts)

    def fetch(self, number: int) -> Features:
        text = self._texts[number]
        scales = text.scales.clone()
        scales[:, :2] = 0
        return dataclasses.replace(text, scales=scales)


def main() -> None:
    args = study.arguments(
        __doc__,
        {"texts": 400, "held_out": 60, "steps": 800, "vocab": 4096},
        {"texts": 40, "held_out": 10, "steps": 12, "vocab": 2048},
    )
    data = study.Study.of(args)
    base = TrainConfig(steps=args.steps, unroll=DEPTH, draft_vocab_size=args.vocab, evaluations=1, eval_prompts=0)
    arms = {
        "full": (base, False),
        "again": (base.model_copy(update={"seed": 1}), False),
        "top_tap": (base, True),
        "no_ttt": (base.model_copy(update={"unroll": 1}), False),
        "feature_loss": (base.model_copy(update={"feature_weight": 10.0}), False),
    }
    found = {}
    for name, (config, top_only) in arms.items():
        learn, held_out = (TopTap(data.learn), TopTap(data.held_out)) if top_only else (data.learn, data.held_out)
        found[name] = study.by_text(data.train(config, learn, held_out), held_out, DEPTH)
        whole = study.together(found[name])
        alphas = " ".join(f"{a:.3f}" for a in whole.n_alpha)
        print(f"{name:>12}: tau {whole.tau:.3f}, n-alpha {alphas}", flush=True)
    figures: dict[str, object] = {}
    for name, parts in found.items():
        whole = study.together(parts)
        offered = max(whole.offered[0], 1)
        figures |= {f"tau_{name}": round(whole.tau, 3), f"n_alpha_{name}": study.rounded(whole.n_alpha)}
        if name != "full":
            figures[f"difference_{name}"] = study.tau_difference(found["full"], parts)
    figures["n_alpha_1_standard_error"] = round(0.5 / math.sqrt(offered), 4)
    figures["noise"] = round(abs(study.together(found["again"]).tau - study.together(found["full"]).tau), 3)
    settings = {"texts": len(data.learn), "held_out": args.held_out, "steps": args.steps, "vocab": args.vocab}
    print(json.dumps({**figures, **settings}))


if __name__ == "__main__":
    main()
