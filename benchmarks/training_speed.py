"""Training speed and memory against a plain transcription of the published recipe, both from stored features.

    python benchmarks/training_speed.py [--quick] [--steps 10] [--turns 3]

The baseline does what the authors' trainer does (arXiv 2503.01840 and its code): texts padded to the longest of the batch;
the target's logits over the whole vocabulary, projected from stored final states; at every step of the unroll the argmax, the
draft rows and the softmax of all of them, an S x S mask, and every slot through layer and vocabulary; then logits and mask
moved on by one. It reads three taps and the final state in 16 bits, ours the feature store's 8-bit taps and teacher lists.
Both have our loss mask and normaliser, the same start, the same AdamW, the same micro-batches, float32.

`speed_ratio` is ours over theirs in tokens of text a second; `memory_ratio` ours over theirs in memory that the steps add on
top of the loaded head (peak resident set while training less that before it). The two alternate in processes of their own,
and of each the best turn counts; `noise` is the largest ratio between turns of the same arm. `loss_difference` is that
between the two losses when both are given the same taps and the teacher over the whole vocabulary: the same function.
`loss_difference_top_k` is what the store's rounding and its teacher of 32 tokens change. `compiled_over_ours` is the speed
with `compile` over that without, its minute of compiling left out (not with --quick).
"""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import study
import torch
import torch.nn.functional as F
from torch import Tensor

from eyas.chat import Sample
from eyas.data.batches import Batch
from eyas.data.features import Features, read_features
from eyas.heads.config import HeadConfig
from eyas.heads.eagle3 import Eagle3Head
from eyas.heads.rope import rotate
from eyas.target import Target
from eyas.training.config import TrainConfig
from eyas.training.loop import Trainer
from eyas.training.recipe import starting_head

# -- the published recipe ---------------------------------------------------------------------------------------------


@dataclasses.dataclass
class Padded:
    """A padded batch: `ids` int64 and `supervised` bool [B, S+1] (a text of S + 1 tokens has S slots), `taps` [B, S, 3H],
    `logits` [B, S, V] of the target at every slot's position, `real` bool [B, S] where a slot is."""

    ids: Tensor
    supervised: Tensor
    taps: Tensor
    logits: Tensor
    real: Tensor


def moved_on(x: Tensor) -> Tensor:
    """Shifted left along dimension 1, zeros behind."""
    return torch.cat([x[:, 1:], torch.zeros_like(x[:, :1])], 1)


def published_loss(head: Eagle3Head, batch: Padded, steps: int, weights: tuple[float, ...]) -> Tensor:
    """The loss of the authors' recipe, with a mask that follows the predicted token and the mask's sum as the normaliser."""
    rows, length = batch.real.shape
    heads, groups, d = head.config.num_attention_heads, head.config.num_key_value_heads, head.config.head_dim
    layer, attention = head.midlayer, head.midlayer.self_attn
    tokens = batch.ids[:, 1:]  # [B, S]
    starts = batch.supervised[:, 1:] & batch.real
    learns = moved_on(batch.supervised[:, 1:] & batch.real)  # the token after the slot's own
    target = moved_on(batch.logits)  # its distribution
    states = head.fc(batch.taps)  # [B, S, h]
    keys: list[Tensor] = []
    values: list[Tensor] = []
    total = states.new_zeros(())
    for step in range(steps):
        x = torch.cat([layer.input_layernorm(F.embedding(tokens, head.embedding)), layer.hidden_norm(states)], -1)
        positions = torch.arange(length).expand(rows, length) + step
        q = rotate(attention.q_proj(x).view(rows, length, heads, d), positions, head.inverse_frequencies).transpose(1, 2)
        k = rotate(attention.k_proj(x).view(rows, length, groups, d), positions, head.inverse_frequencies).transpose(1, 2)
        v = attention.v_proj(x).view(rows, length, groups, d).transpose(1, 2)
        keys.append(k.repeat_interleave(heads // groups, 1))  # [B, heads, S, d]
        values.append(v.repeat_interleave(heads // groups, 1))
        causal = torch.full((length, length), torch.finfo(x.dtype).min).triu(1)  # [S, S]
        padding = torch.where(batch.real, 0.0, torch.finfo(x.dtype).min)[:, None, None]  # [B, 1, 1, S]
        scores = q @ keys[0].transpose(2, 3) / d**0.5 + (causal + padding).clamp(min=torch.finfo(x.dtype).min)
        own = [(q * key).sum(-1, keepdim=True) / d**0.5 for key in keys[1:]]
        shares = torch.cat([scores, *own], -1).softmax(-1)
        attended = shares[..., :length] @ values[0]
        for i, value in enumerate(values[1:]):
            attended = attended + shares[..., length + i : length + i + 1] * value
        s = states + attention.o_proj(attended.transpose(1, 2).reshape(rows, length, -1))
        states = s + layer.mlp(layer.post_attention_layernorm(s))
        with torch.no_grad():
            mask = learns & starts & head.t2d[target.argmax(-1)]  # [B, S]
            p = target[..., head.t2d].softmax(-1)  # [B, S, D]
        log_q = head.lm_head(head.norm(states)).log_softmax(-1)  # [B, S, D]
        total = total - weights[step] * (mask * (p * log_q).sum(-1)).sum() / mask.sum()
        tokens, learns, target = moved_on(tokens), moved_on(learns), moved_on(target)
    return total


def padded(texts: list[tuple[Features, Tensor, Tensor]], lm_head: Tensor) -> Padded:
    """From texts with their taps [S, 3H] and final states [S, H] in whatever precision they are stored."""
    longest = max(len(taps) for _, taps, _ in texts)

    def pad(x: Tensor, length: int) -> Tensor:
        return F.pad(x, (*(0, 0) * (x.ndim - 1), 0, length - len(x)))

    ids = torch.stack([pad(text.ids, longest + 1) for text, _, _ in texts])
    supervised = torch.stack([pad(text.supervised, longest + 1) for text, _, _ in texts])
    taps = torch.stack([pad(t.float(), longest) for _, t, _ in texts])
    final = torch.stack([pad(f.float(), longest) for _, _, f in texts])
    real = torch.stack([torch.arange(longest) < len(t) for _, t, _ in texts])
    return Padded(ids, supervised, taps, final @ lm_head.T, real)


# -- one arm, in a process of its own ------------------------------------------------------------------------------------


def memory(key: str) -> int:
    """Bytes of VmRSS (now) or VmHWM (peak) of this process (Linux)."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith(key))


def run_arm(name: str, folder: Path, steps: int) -> dict[str, float]:
    """Take `steps` optimiser steps as `name` and say how many tokens a second, and how much memory they added."""
    made = torch.load(folder / "head.pt", weights_only=True)
    config = TrainConfig(**json.loads((folder / "config.json").read_text()))
    head = Eagle3Head(HeadConfig(**json.loads((folder / "shape.json").read_text())), made["embedding"], made["d2t"])
    head.load_state_dict(made["weights"])
    stored = torch.load(folder / ("published.pt" if name == "published" else "ours.pt"), weights_only=True, mmap=True)
    texts = [Features(**text) for text in stored["texts"]]
    step: Callable[[list[int]], Any]
    if name != "published":
        config = config.model_copy(update={"compile": name == "compiled"})
        trainer = Trainer(head, texts, texts[:1], config, folder)

        def step(numbers: list[int]) -> None:
            trainer._optimise([numbers])
    else:
        optimizer = torch.optim.AdamW(head.parameters(), lr=config.learning_rate, betas=config.betas, weight_decay=0.0)

        def step(numbers: list[int]) -> None:
            batch = padded([(texts[n], stored["taps"][n], stored["final"][n]) for n in numbers], stored["lm_head"])
            published_loss(head, batch, config.unroll, config.step_weights).backward()
            torch.nn.utils.clip_grad_norm_(head.parameters(), config.clip)
            optimizer.step()
            optimizer.zero_grad()

    before = memory("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins here
    seconds = tokens = 0.0
    batches = made["batches"]
    warm_up = len(batches) if name == "compiled" else 1  # new shapes are compiled anew
    for number in range(warm_up + steps):
        numbers = batches[number % len(batches)]
        start = time.perf_counter()
        step(numbers)
        if number >= warm_up:
            seconds += time.perf_counter() - start
            tokens += sum(len(texts[n].ids) for n in numbers)
    return {"tokens_per_s": tokens / seconds, "added": memory("VmHWM") - before, "whole": memory("VmHWM")}


# -- both -----------------------------------------------------------------------------------------------------------------


def prepare(target: Target, samples: list[Sample], config: TrainConfig, folder: Path) -> dict[str, float]:
    """Write what both arms read to `folder`; return how far their losses are apart."""
    counts = torch.zeros(target.vocab_size, dtype=torch.long)
    for s in samples:
        counts += torch.bincount(torch.tensor(s.ids), minlength=target.vocab_size)
    head = starting_head(target, config, counts)
    small = [read_features(target, s) for s in samples]
    read = [target.read(torch.tensor(s.ids)[None, :-1]) for s in samples]
    taps, final = [r.taps[0].clone() for r in read], [r.hidden[0].clone() for r in read]
    lm_head = target.lm_head_weight.detach().clone()
    drafted = sorted(range(len(samples)), key=lambda n: len(samples[n].ids))
    room, batches = 0, [[]]  # type: ignore[var-annotated]
    for n in drafted:
        if batches[-1] and room + len(samples[n].ids) > config.slots_per_batch:
            batches.append([])
            room = 0
        batches[-1].append(n)
        room += len(samples[n].ids)
    weights = {name: tensor.detach().clone() for name, tensor in head.state_dict().items()}
    torch.save({"embedding": head.embedding, "d2t": head.d2t, "weights": weights, "batches": batches}, folder / "head.pt")
    (folder / "config.json").write_text(config.model_dump_json())
    (folder / "shape.json").write_text(head.config.model_dump_json())
    texts = [{f.name: getattr(text, f.name) for f in dataclasses.fields(Features)} for text in small]
    torch.save({"texts": texts}, folder / "ours.pt")
    bare = [{**text, "taps": torch.zeros(0), "scales": torch.zeros(0)} for text in texts]
    halves = {"taps": [t.half() for t in taps], "final": [f.half() for f in final]}
    torch.save({"texts": bare, **halves, "lm_head": lm_head}, folder / "published.pt")
    few = batches[0][:2]
    exact, stored = [], [small[n] for n in few]
    for n in few:
        wanted = final[n][small[n].supervised[1:]] @ lm_head.T
        probs, ids = wanted.softmax(-1).topk(target.vocab_size)
        scales = torch.ones(len(taps[n]), 3)
        three = taps[n].unflatten(-1, (3, -1))
        exact.append(dataclasses.replace(small[n], taps=three, scales=scales, teacher_ids=ids, teacher_probs=probs))
    trainer = Trainer(head, exact, exact, config, folder)
    with torch.no_grad():
        plain = float(published_loss(head, padded([(small[n], taps[n], final[n]) for n in few], lm_head), config.unroll,
                                     config.step_weights))  # fmt: skip
        ours = [_loss(trainer, texts_) for texts_ in (exact, stored)]
    return {"loss": plain, "loss_difference": abs(ours[0] - plain), "loss_difference_top_k": abs(ours[1] - plain)}


def _loss(trainer: Trainer, texts: list[Features]) -> float:
    batch = Batch.of(texts)
    masks = trainer.objective.masks([batch], trainer.config.unroll)[0]
    return float(trainer.objective(batch, masks, masks.sum(1).float()).loss)


def main() -> None:
    if len(sys.argv) == 5 and sys.argv[1] == "--arm":
        print(json.dumps(run_arm(sys.argv[2], Path(sys.argv[3]), int(sys.argv[4]))))
        return
    args = study.arguments(
        __doc__,
        {"texts": 24, "steps": 8, "turns": 3, "unroll": 7, "vocab": 8192},
        {"texts": 8, "steps": 3, "turns": 1},
    )
    target = study.load_target("stock")
    samples = study.some_answers(args.answers, target, args.texts)
    config = TrainConfig(steps=1000, unroll=args.unroll, grow_until=0.0, draft_vocab_size=args.vocab, warmup=0.0)
    with tempfile.TemporaryDirectory() as folder:
        losses = prepare(target, samples, config, Path(folder))
        del target
        arms = ["ours", "published"] if args.quick else ["ours", "published", "compiled"]
        turns: dict[str, list[dict[str, float]]] = {name: [] for name in arms}
        for turn in range(args.turns):
            for name in arms if turn % 2 == 0 else arms[::-1]:
                command = [sys.executable, __file__, "--arm", name, folder, str(args.steps)]
                told = subprocess.run(command, capture_output=True, text=True)
                if told.returncode:
                    raise SystemExit(told.stderr)
                turns[name].append(json.loads(told.stdout.splitlines()[-1]))
                speed, added = turns[name][-1]["tokens_per_s"], turns[name][-1]["added"]
                print(f"{name:>10}: {speed:7.1f} tokens/s, {added / 1e6:7.0f} MB added", flush=True)
    speeds = {name: [t["tokens_per_s"] for t in told] for name, told in turns.items()}
    peaks = {name: min(t["added"] for t in told) for name, told in turns.items()}
    whole = {name: min(t["whole"] for t in told) for name, told in turns.items()}
    figures = {
        "speed_ratio": max(speeds["ours"]) / max(speeds["published"]),
        "memory_ratio": peaks["ours"] / peaks["published"],
        "whole_process_memory_ratio": whole["ours"] / whole["published"],
        "tokens_per_s": max(speeds["ours"]),
        **({"compiled_over_ours": max(speeds["compiled"]) / max(speeds["ours"])} if "compiled" in speeds else {}),
        "noise": max(max(s) / min(s) for s in speeds.values()),
    }
    rounded = {key: round(value, 3) for key, value in figures.items()}
    told = {key: float(f"{value:.3g}") for key, value in losses.items()}
    settings = {"unroll": args.unroll, "vocab": args.vocab, "slots_per_batch": config.slots_per_batch}
    print(json.dumps({**rounded, **told, **settings, "threads": torch.get_num_threads()}))


if __name__ == "__main__":
    main()
