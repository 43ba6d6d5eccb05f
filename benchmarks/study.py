"""What the training studies share: the real target, answers that it wrote with their features, heads trained on them, and
acceptance by text, so that arms can be compared in pairs."""

from __future__ import annotations

import argparse
import random
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import eyas  # noqa: F401  before torch: OpenMP reads how long threads spin when torch loads it

# isort: split
import torch

from eyas.chat import Sample
from eyas.data.batches import Batch
from eyas.data.features import Features, text_key
from eyas.data.fetching import Stored
from eyas.data.samples import read_responses
from eyas.data.store import FeatureStore
from eyas.heads.eagle3 import Eagle3Head
from eyas.heads.vocab import count_tokens
from eyas.target import Target, transformers_quietly
from eyas.threads import choose_threads
from eyas.training.acceptance import Acceptance, measure
from eyas.training.config import TrainConfig
from eyas.training.loop import Trainer
from eyas.training.recipe import complete, starting_head

ANSWERS = (Path("../shared/data/responses.jsonl.gz"), Path("runs/demo/responses.jsonl"))
LONGEST = 384  # tokens; longer texts are left out, so that the arms' batches are alike


def arguments(what: str, full: dict[str, Any], quick: dict[str, Any]) -> argparse.Namespace:
    """The command line of a study: `what` is its docstring, `full` its own settings, `quick` what --quick makes of them."""
    parser = argparse.ArgumentParser(description=what, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="small and short: that it runs, not what it shows")
    found = next((path for path in ANSWERS if path.is_file()), ANSWERS[-1])
    parser.add_argument("--answers", type=Path, default=found, help="answers of the target, as `eyas respond` writes them")
    parser.add_argument("--features", type=Path, default=Path("runs/studies/features"), help="kept between studies")
    parser.add_argument("--weights", default="fp16", help="packing of the target while features are read")
    for name, value in full.items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=type(value), help=f"default {value}")
    args = parser.parse_args()
    for name, value in full.items():
        if getattr(args, name) is None:
            setattr(args, name, quick.get(name, value) if args.quick else value)
    if not args.answers.exists():
        parser.error(f"there are no answers in {args.answers}; `make demo` writes some, or name others with --answers")
    return args


def load_target(weights: str) -> Target:
    """The embedded target, with the threads that are idle."""
    transformers_quietly()
    print(choose_threads(), flush=True)
    return Target.load("smollm2", weights=weights)


def some_answers(path: Path, target: Target, count: int) -> list[Sample]:
    """`count` answers to prompts of every kind, of at most `LONGEST` tokens, in an order of their own."""
    samples = [s for s in read_responses(path, vocab_size=target.vocab_size) if len(s.ids) <= LONGEST and s.supervised > 8]
    random.Random(0).shuffle(samples)
    return samples[:count]


@dataclass(frozen=True)
class Study:
    """A target, answers of its, those to learn from and those held out as features; `counts` int64 [V] of the supervised
    tokens to learn from."""

    target: Target
    samples: Sequence[Sample]
    learn: Sequence[Features]
    held_out: Sequence[Features]
    counts: torch.Tensor

    @classmethod
    def of(cls, args: argparse.Namespace) -> Study:
        """`args.texts` texts to learn from and `args.held_out` held out; features that the store lacks are read from the
        target."""
        target = load_target(args.weights)
        samples = some_answers(args.answers, target, args.texts + args.held_out)
        learn, held_out = samples[: -args.held_out], samples[-args.held_out :]
        with FeatureStore(args.features, target) as store:
            complete(store, target, samples)
        counts = count_tokens(((s.ids, s.spans) for s in learn), target.vocab_size)
        parts = (Stored(store, [text_key(s) for s in part]) for part in (learn, held_out))
        return cls(target, samples, *parts, counts)

    def train(
        self, config: TrainConfig, learn: Sequence[Features] | None = None, held_out: Sequence[Features] | None = None
    ) -> Eagle3Head:
        """A head trained under `config`, as it is at the end (not the best on the way); other texts may take the place of
        the study's own."""
        head = starting_head(self.target, config, self.counts)
        with tempfile.TemporaryDirectory() as out:
            trainer = Trainer(head, learn or self.learn, (held_out or self.held_out)[:1], config, Path(out))
            trainer.run()
        return head.eval()


def by_text(head: Eagle3Head, texts: Sequence[Features], depth: int) -> list[Acceptance]:
    """Acceptance of greedy chains of `depth` on each of `texts`."""
    return [measure(head, [Batch.of([text])], depth) for text in texts]


def together(parts: Sequence[Acceptance]) -> Acceptance:
    """The acceptance over all texts."""
    return Acceptance(
        tuple(map(sum, zip(*(a.offered for a in parts), strict=True))),
        tuple(map(sum, zip(*(a.accepted for a in parts), strict=True))),
    )


def tau_difference(one: Sequence[Acceptance], other: Sequence[Acceptance], turns: int = 400) -> tuple[float, float]:
    """95 % interval of tau(other) - tau(one), the texts drawn again and again, the same for both."""
    draw = random.Random(1)
    found = []
    for _ in range(turns):
        chosen = draw.choices(range(len(one)), k=len(one))
        found.append(together([other[i] for i in chosen]).tau - together([one[i] for i in chosen]).tau)
    found.sort()
    return round(found[turns // 40], 3), round(found[-turns // 40 - 1], 3)


def rounded(values: Sequence[float]) -> list[float]:
    """Figures as they are printed."""
    return [round(v, 3) for v in values]
