"""What the warm start, the growing unroll and the other losses bring: estimated tau at equal minutes, everything else equal.

    python benchmarks/warm_start.py [--quick] [--texts 300] [--minutes 5]

Heads are trained on the same answers for the same time, one after the other: a random or a warm start, with the full unroll
from the first step or a growing one; then, from a warm start with a growing unroll, once with each other loss. tau is that of
a greedy chain as deep as the unroll, estimated on held-out answers (eyas.training.acceptance), best of the evaluations on the
way. Soft cross-entropy is `tau_warm_growing`; `tau_best_loss` is the best of the others, `best_loss` its name, and
`tau_again` a second seed of `tau_warm_growing`: what differs by no more than that says nothing.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any, get_args

import study

from eyas.training.config import TrainConfig
from eyas.training.loop import Trainer
from eyas.training.losses import LossName
from eyas.training.recipe import starting_head

ARMS: dict[str, dict[str, Any]] = {
    "tau_random": {"init_from": "random", "grow_until": 0.0},
    "tau_random_growing": {"init_from": "random"},
    "tau_warm": {"grow_until": 0.0},
    "tau_warm_growing": {},
    "tau_again": {"seed": 1},
    **{f"tau_{loss}": {"loss": loss} for loss in get_args(LossName) if loss != "soft_ce"},
}


def main() -> None:
    args = study.arguments(
        __doc__,
        {"texts": 300, "held_out": 40, "minutes": 5.0, "vocab": 4096},
        {"texts": 30, "held_out": 8, "minutes": 0.2, "vocab": 2048},
    )
    data = study.Study.of(args)
    figures: dict[str, Any] = {}
    for name, settings in ARMS.items():
        config = TrainConfig(minutes=args.minutes, draft_vocab_size=args.vocab, evaluations=2, eval_prompts=0, **settings)
        head = starting_head(data.target, config, data.counts)
        with tempfile.TemporaryDirectory() as out:
            reached = Trainer(head, data.learn, data.held_out, config, Path(out)).run().acceptance
        figures[name] = round(reached.tau, 3)
        figures[name.replace("tau", "n_alpha")] = study.rounded(reached.n_alpha)
        print(f"{name}: {reached.tau:.3f}", flush=True)
    losses = {loss: figures[f"tau_{loss}"] for loss in get_args(LossName) if loss != "soft_ce"}
    best = max(losses, key=lambda loss: losses[loss])
    settings = {"minutes": args.minutes, "texts": args.texts, "held_out": args.held_out, "vocab": args.vocab}
    print(json.dumps({"tau_best_loss": losses[best], "best_loss": best, **figures, **settings}))


if __name__ == "__main__":
    main()
