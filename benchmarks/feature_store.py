"""What small features cost in acceptance: bytes a token, and tau at equal steps against features in full precision.

    python benchmarks/feature_store.py [--quick] [--texts 300] [--steps 600]

`bytes_ratio` is the size of the store on disk per token over 4 x H x 2 bytes, what trainers store that keep three taps and the
final state in 16 bits. The full-precision arm learns from float32 taps and from the teacher over the whole draft vocabulary,
projected from float32 final states when a text is read; the other arms from the store, and from taps rounded to 6 and 4 bits
(rounded only: the store has 8). tau is that of a greedy chain of 5 drafts on held-out texts, from full-precision taps in every
arm, as in decoding; `noise` the change of tau_full between two seeds.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import study
import torch
from torch import Tensor

from eyas.chat import Sample
from eyas.data.features import CHUNK, Features, text_key
from eyas.data.fetching import Fetched
from eyas.heads.vocab import choose_vocabulary
from eyas.progress import progress
from eyas.target import Target
from eyas.training.config import TrainConfig

DEPTH = 5


class FullPrecision(Fetched):
    """Features of `samples` with float32 taps and final states in memory; the teacher lists the draft vocabulary `drafted`
    int64 [D], projected anew each time."""

    def __init__(self, target: Target, samples: Sequence[Sample], drafted: Tensor) -> None:
        self.target, self.samples, self.drafted = target, samples, drafted
        self._read = []
        with progress("full precision", sum(len(s.ids) for s in samples), "tokens") as meter:
            for sample in samples:
                out = target.read(torch.tensor(sample.ids)[None, :-1])
                self._read.append((out.taps[0].unflatten(-1, (3, -1)).clone(), out.hidden[0].clone()))
                meter.advance(len(sample.ids))

    def __len__(self) -> int:
        return len(self.samples)

    def fetch(self, number: int) -> Features:
        sample, (taps, hidden) = self.samples[number], self._read[number]
        supervised = torch.tensor(sample.mask())
        parts = [self._teacher(self.target.logits(part)) for part in hidden[supervised[1:]].split(CHUNK)]
        ids, probs = torch.cat([p[0] for p in parts]), torch.cat([p[1] for p in parts])
        scales = torch.ones(taps.shape[:2])
        return Features(text_key(sample), torch.tensor(sample.ids), supervised, taps, scales, ids, probs)

    def _teacher(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """The target's best token, then the draft vocabulary by probability (without its last, and without the best)."""
        p = logits.softmax(-1)  # [n, V]
        best = p.argmax(-1, keepdim=True)  # [n, 1]
        others = p.scatter(-1, best, -1.0)[:, self.drafted]  # [n, D]
        probs, order = others.topk(len(self.drafted) - 1)  # the best token itself, where it can be drafted, comes last
        return torch.cat([best, self.drafted[order]], -1), torch.cat([p.gather(-1, best), probs], -1)


class Rounded(Fetched):
    """Texts of the store, their taps rounded further to `bits`."""

    def __init__(self, texts: Sequence[Features], bits: int) -> None:
        self._texts, self._step = texts, 2 ** (8 - bits)

    def __len__(self) -> int:
        return len(self._texts)

    def fetch(self, number: int) -> Features:
        text = self._texts[number]
        taps = (text.taps.float() / self._step).round() * self._step
        return dataclasses.replace(text, taps=taps)


def main() -> None:
    args = study.arguments(
        __doc__,
        {"texts": 300, "held_out": 60, "steps": 600, "vocab": 4096},
        {"texts": 24, "held_out": 8, "steps": 12, "vocab": 2048},
    )
    data = study.Study.of(args)
    config = TrainConfig(steps=args.steps, unroll=DEPTH, draft_vocab_size=args.vocab, evaluations=1, eval_prompts=0)
    d2t = choose_vocabulary(data.counts, args.vocab)
    whole = FullPrecision(data.target, data.samples, torch.arange(len(d2t)) + d2t)
    learn = _Part(whole, 0, len(data.learn))
    held_out = _Part(whole, len(data.learn), len(whole))
    arms = {
        "full": partial(data.train, config, learn, held_out),
        "again": partial(data.train, config.model_copy(update={"seed": 1}), learn, held_out),
        "8_bits": partial(data.train, config),
        "6_bits": partial(data.train, config, Rounded(data.learn, 6)),
        "4_bits": partial(data.train, config, Rounded(data.learn, 4)),
    }
    found = {}
    for name, arm in arms.items():
        found[name] = study.by_text(arm(), held_out, DEPTH)
        print(f"{name:>8}: tau {study.together(found[name]).tau:.3f}", flush=True)
    taus = {name: study.together(parts).tau for name, parts in found.items()}
    figures = {
        "bytes_ratio": round(bytes_per_token(args.features) / (4 * data.target.hidden_size * 2), 3),
        "tau_ratio": round(taus["8_bits"] / taus["full"], 3),
        "tau_difference": study.tau_difference(found["full"], found["8_bits"]),
        "noise": round(abs(taus["again"] - taus["full"]), 3),
        **{f"tau_{name}": round(tau, 3) for name, tau in taus.items()},
    }
    settings = {"texts": len(data.learn), "held_out": args.held_out, "steps": args.steps, "vocab": args.vocab}
    print(json.dumps({**figures, **settings}))


class _Part(Fetched):
    """The texts first..last of others, still read when asked for."""

    def __init__(self, texts: Sequence[Features], first: int, last: int) -> None:
        self._texts, self._first, self._last = texts, first, last

    def __len__(self) -> int:
        return self._last - self._first

    def fetch(self, number: int) -> Features:
        return self._texts[self._first + number]


def bytes_per_token(folder: Path) -> float:
    """Size of a feature store on disk per token of its texts."""
    from safetensors import safe_open

    size = tokens = 0
    for shard in folder.glob("*.safetensors"):
        size += shard.stat().st_size
        with safe_open(shard, "pt") as file:
            tokens += file.get_slice("ids").get_shape()[0]
    return (size + (folder / "index.json").stat().st_size) / tokens


if __name__ == "__main__":
    main()
