"""Heads broken on purpose: what an engine is made to load, and the same fault in our own engine."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from eyas.heads.checkpoint import CONFIG
from eyas.heads.eagle3 import Eagle3Head
from eyas.shards import SAFETENSORS
from eyas.target import Target


def move_taps(folder: Path) -> None:
    """Make an engine tap each layer one later than the head in `folder` was trained on."""
    config = json.loads((folder / CONFIG).read_text())
    config["eagle_aux_hidden_state_layer_ids"] = [tap + 1 for tap in config["eagle_aux_hidden_state_layer_ids"]]
    (folder / CONFIG).write_text(json.dumps(config))


def drop_d2t(folder: Path) -> None:
    """Lose the map from draft ids to the target's."""
    tensors = load_file(folder / SAFETENSORS)
    del tensors["d2t"]
    save_file(tensors, folder / SAFETENSORS, metadata={"format": "pt"})


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
