"""Heads broken on purpose: what an engine is made to load, and the same fault in our own engine."""

from __future__ import annotations

import torch

from eyas.heads.eagle3 import Eagle3Head
from eyas.target import Target


def taps_off_by_one(target: Target, head: Eagle3Head) -> tuple[Target, Eagle3Head]:
    """The head reading each tap one layer later than it was trained on, and the target that serves it so."""
    taps = tuple(tap + 1 for tap in head.config.tap_ids)
    config = head.config.model_copy(update={"tap_ids": taps})
    return Target.load(target.name, taps=taps), _rebuilt(head, Eagle3Head(config, head.embedding, head.d2t))


def lost_d2t(target: Target, head: Eagle3Head) -> tuple[Target, Eagle3Head]:
    """The head whose draft ids are taken for the target's own."""
    return target, _rebuilt(head, Eagle3Head(head.config, head.embedding, torch.zeros_like(head.d2t)))


def _rebuilt(head: Eagle3Head, fresh: Eagle3Head) -> Eagle3Head:
    """`fresh` with the weights of `head`; its vocabulary maps stay its own."""
    maps = {name: tensor for name, tensor in fresh.state_dict().items() if name in ("d2t", "t2d")}
    fresh.load_state_dict({**head.state_dict(), **maps})
    return fresh.eval()
