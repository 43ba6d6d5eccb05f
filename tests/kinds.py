"""Every kind of drafter, small and random, for the tests that all of them must pass."""

from __future__ import annotations

import torch

from eyas.decoding.drafters import (
    Drafter,
    Eagle1Drafter,
    Eagle3Drafter,
    JoinedDrafter,
    LLMDrafter,
    LookupDrafter,
    MedusaDrafter,
)
from eyas.heads.eagle1 import Eagle1Head
from eyas.heads.head import DraftHead
from eyas.heads.medusa import MedusaHead
from eyas.heads.start import new_eagle1_head, new_medusa_head
from eyas.heads.vocab import choose_vocabulary
from eyas.target import Target
from tests.test_unroll import random_head
from tests.tiny import VOCAB, tiny_target

ALONE = ("eagle3", "eagle1", "medusa", "llm", "itself", "lookup")
JOINED = ("eagle3+lookup", "eagle1+lookup", "medusa+lookup", "llm+lookup")
KINDS = ALONE + JOINED


def shaken(head: DraftHead, spread: float = 0.15) -> DraftHead:
    """With weights larger than at the start of training, so that a wrong state or position shows."""
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in head.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator) * spread)
    return head


def final(target: Target) -> Target:
    """The target read at its final state."""
    return target.tapped((target.num_layers,))


def eagle1_head(target: Target, spread: float = 0.15) -> Eagle1Head:
    head = shaken(new_eagle1_head(target, start="random"), spread)
    assert isinstance(head, Eagle1Head)
    return head


def medusa_head(target: Target, heads: int = 5, vocabulary: int = 120) -> MedusaHead:
    head = shaken(new_medusa_head(target, choose_vocabulary(torch.zeros(VOCAB, dtype=torch.long), vocabulary), heads))
    assert isinstance(head, MedusaHead)
    return head


def made(kind: str, target: Target) -> tuple[Target, Drafter]:
    """A drafter of `kind`, its weights packed as the target's are, and the target as it must be run for it."""
    alone, _, joined = kind.partition("+")
    of = final(target) if alone in ("eagle1", "medusa") else target
    drafter = _alone(alone, of)
    return of, JoinedDrafter(of, drafter) if joined else drafter


def _alone(kind: str, target: Target) -> Drafter:
    if kind == "eagle3":
        return Eagle3Drafter(target, random_head(target), weights=target.weights)
    if kind == "eagle1":
        return Eagle1Drafter(target, eagle1_head(target), weights=target.weights)
    if kind == "medusa":
        return MedusaDrafter(target, medusa_head(target), weights=target.weights)
    if kind == "llm":
        return LLMDrafter(target, tiny_target("qwen3", seed=3))
    if kind == "itself":
        return LLMDrafter(target, target.tapped((0,)))
    assert kind == "lookup"
    return LookupDrafter(target)
