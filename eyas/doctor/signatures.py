"""Faults that no other reading undoes, each told by its own mark: the head must be trained again, or served otherwise."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from eyas.doctor.evidence import Evidence
from eyas.doctor.findings import Finding
from eyas.doctor.readings import Reading
from eyas.doctor.trials import DEPTHS, SURE
from eyas.target import Target
from eyas.training.acceptance import judge

HALF_MAX = float(torch.finfo(torch.float16).max)
UNNORMED = "unnormed-teacher"
LEAST_VOTES = 8  # positions on which the two teachers differ and the head sides with one of them


@torch.no_grad()
def signatures(reading: Reading, evidence: Evidence, target: Target) -> list[Finding]:
    """The marks that the head shows on the evidence, as `reading` has it."""
    head = reading.head(target)
    batch = evidence.with_taps(reading.config.tap_ids)
    ids = reading.target_ids.to(target.device)
    teachers: tuple[Tensor, Tensor, Tensor] | None = None
    with _largest(head) as largest:
        for depth, judged in enumerate(judge(head, batch, DEPTHS, ids)):
            if not depth:
                best = batch.teacher_ids[judged.step.teacher_row, 0]  # [n]
                teachers = ids[judged.step.logits.argmax(-1)], best, evidence.unnormed[judged.step.token_index]
    assert teachers is not None  # DEPTHS is at least 1
    return [*_overflow(largest), *_unnormed(*teachers)]


def _unnormed(drafted: Tensor, normed: Tensor, unnormed: Tensor) -> Iterator[Finding]:
    """Where the target with and without its final norm would go on differently, which of the two does the head follow?

    int64 [n], target ids: the head's best tokens, and those of the target with and without the norm.
    """
    differ = normed != unnormed
    for_norm = int((differ & (drafted == normed)).sum())
    against = int((differ & (drafted == unnormed)).sum())
    votes = for_norm + against
    if votes >= LEAST_VOTES and against - for_norm > SURE * votes**0.5:
        yield Finding(
            UNNORMED, "ill",
            f"where the target with and without its final norm would go on differently, the head follows the one without it "
            f"{against} times of {votes}: it was taught by states that had not been normed",
            "train it again with a teacher from the target's final, NORMED state",
        )  # fmt: skip


def _overflow(largest: dict[str, float]) -> Iterator[Finding]:
    worst = max(largest, key=lambda name: largest[name])
    if not largest[worst] <= HALF_MAX:  # also where it is no number
        yield Finding(
            "fp16-overflow", "ill",
            f"values around {worst} reach {largest[worst]:.3g}, and float16 ends at {HALF_MAX:.0f}: cast to it, the head gives "
            "logits that are no numbers, and every draft is refused without an error",
            "serve the target and the head in bfloat16 or float32 (--dtype bfloat16)",
        )  # fmt: skip


@contextmanager
def _largest(head: nn.Module) -> Iterator[dict[str, float]]:
    """Fills, while the block runs, the largest size of what enters and leaves every linear map and norm of `head`; the taps,
    which are the target's affair, are left out."""
    largest: dict[str, float] = {}

    def reads_taps(name: str) -> bool:
        return name.startswith("fc_norm") or (name == "fc" and "fc_norm.0" not in named)

    def watch(name: str) -> None:
        def note(module: nn.Module, args: tuple[Tensor, ...], out: Tensor) -> None:
            seen = [out] if reads_taps(name) else [out, *args]
            tops = [float(t.abs().max()) for t in seen if t.numel()]  # a NaN stays one
            largest[name] = max([largest.get(name, 0.0), *tops], key=lambda top: float("inf") if top != top else top)

        hooks.append(named[name].register_forward_hook(note))

    hooks: list[torch.utils.hooks.RemovableHandle] = []
    named = {n: m for n, m in head.named_modules() if isinstance(m, nn.Linear | nn.RMSNorm)}
    for name in named:
        watch(name)
    try:
        yield largest
    finally:
        for hook in hooks:
            hook.remove()
