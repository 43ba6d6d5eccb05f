"""What the decoding benchmarks share: the command line, the real target with a trained head, prompts, a timed run."""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from eyas.decoding.drafters import Eagle3Drafter
from eyas.decoding.engine import Engine, Request
from eyas.decoding.sampling import SamplingParams
from eyas.decoding.stats import Stats
from eyas.heads.eagle3 import Eagle3Head
from eyas.heads.files import load_head
from eyas.target import Target, transformers_quietly
from eyas.threads import choose_threads

HEAD = Path("runs/demo/head")
PROMPTS = (
    "Why is the sky blue?", "Write a short story about a lighthouse keeper.", "Explain how a bicycle stays upright.",
    "List five uses of a paper clip.", "What is the difference between weather and climate?",
    "Write a polite letter that declines an invitation.", "Describe the taste of an apple.",
    "How do I boil an egg so that the yolk stays soft?", "Tell me about the history of the printing press.",
    "What makes a good password?", "Write a dialogue between a cat and a dog.", "Why do leaves change their colour?",
    "Give advice to somebody who starts to run.", "What does a compiler do?", "Describe a market on a rainy morning.",
    "How does a vaccine work?",
)  # fmt: skip


def arguments(what: str) -> argparse.Namespace:
    """The command line of a benchmark whose docstring is `what`."""
    parser = argparse.ArgumentParser(description=what, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="shorter runs, under five minutes")
    parser.add_argument("--head", type=Path, default=HEAD, help="a head of the embedded target; `make demo` trains one")
    parser.add_argument("--weights", default="fp16", help="packing of target and head")
    args = parser.parse_args()
    if not args.head.is_dir():
        parser.error(f"there is no head in {args.head}: run `make demo`, or give one by --head")
    return args


@dataclass(frozen=True)
class Pair:
    """The embedded target and its head."""

    target: Target
    head: Eagle3Head

    @classmethod
    def load(cls, args: argparse.Namespace) -> Pair:
        transformers_quietly()
        print(choose_threads(), flush=True)
        target = Target.load("smollm2", weights=args.weights)
        return cls(target, load_head(args.head, target))

    def drafter(self) -> Eagle3Drafter:
        return Eagle3Drafter(self.target, self.head, weights=self.target.weights)

    def requests(self, count: int, params: SamplingParams) -> list[Request]:
        """`count` different requests: the prompts again and again, each time asked for otherwise."""
        engine = Engine(self.target, max_length=64)
        asked = []
        for number in range(count):
            again = f" Answer in {number // len(PROMPTS) + 2} sentences." if number >= len(PROMPTS) else ""
            message = {"role": "user", "content": PROMPTS[number % len(PROMPTS)] + again}
            asked.append(Request(engine.encode([message]), params, str(number)))
        return asked


@dataclass(frozen=True)
class Timed:
    """What a run of an engine took: `seconds` of the wall after prefill, `tokens` after each answer's first, `ids`."""

    seconds: float
    tokens: int
    stats: Stats
    ids: list[list[int]]


def timed(engine: Engine, requests: Sequence[Request]) -> Timed:
    start = time.perf_counter()
    results = engine.generate(requests)
    wall = time.perf_counter() - start
    stats = sum((r.stats for r in results), Stats())
    return Timed(wall - stats.prefill_s, stats.emitted, stats, [r.ids for r in results])
