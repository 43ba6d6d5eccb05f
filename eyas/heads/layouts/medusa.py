"""The authors' layout of Medusa heads: `medusa_num_heads` in the config, tensors `I.0.linear.*` and `I.1.weight` for head I.

A reduced vocabulary, which the authors' heads have not, is told as EAGLE-3 tells it: `d2t`, `t2d` and `draft_vocab_size`.
Source: FasterDecoding/Medusa medusa/model/medusa_model.py.
"""

from __future__ import annotations

import re
from typing import Any

from torch import Tensor

from eyas.errors import EyasError
from eyas.heads.checkpoint import Checkpoint
from eyas.heads.config import MedusaConfig
from eyas.heads.layouts.record import read_record
from eyas.target import Target

HEADS = "medusa_num_heads"
_NAMES = {"0.linear.weight": "blocks.{}.weight", "0.linear.bias": "blocks.{}.bias", "1.weight": "lm_heads.{}.weight"}


def is_medusa(checkpoint: Checkpoint) -> bool:
    """Whether it holds Medusa heads."""
    return HEADS in checkpoint.config


def read(config: dict[str, Any], tensors: dict[str, Tensor], target: Target) -> MedusaConfig:
    """The configuration of the heads whose config.json is `config`; `tensors` go by our names.

    Raises EyasError for residual blocks of more than one layer.
    """
    if config.get("medusa_num_layers", 1) != 1:
        raise EyasError(f"Medusa heads of {config['medusa_num_layers']} residual layers are not supported, only of one")
    projection = tensors.get("lm_heads.0.weight")
    facts = {
        **read_record(config),
        "hidden_size": config.get("hidden_size") or (None if projection is None else projection.shape[1]),
        "vocab_size": config.get("vocab_size") or target.vocab_size,
        "draft_vocab_size": config.get("draft_vocab_size") or (None if projection is None else projection.shape[0]),
        "num_heads": config[HEADS],
    }
    known = {key: value for key, value in facts.items() if value is not None and key in MedusaConfig.model_fields}
    return MedusaConfig(**known)


def write(config: MedusaConfig, dtype: str) -> dict[str, Any]:
    """The config.json of Medusa heads."""
    return {
        "architectures": ["MedusaModel"],
        "model_type": "medusa",
        HEADS: config.num_heads,
        "medusa_num_layers": 1,
        "hidden_size": config.hidden_size,
        "vocab_size": config.vocab_size,
        "draft_vocab_size": config.draft_vocab_size,
        "torch_dtype": dtype,
    }


def to_ours(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """`tensors` under our names."""
    ours = {}
    for name, tensor in tensors.items():
        found = re.fullmatch(r"(?:medusa_head\.)?(\d+)\.(.+)", name)
        known = _NAMES.get(found[2]) if found else None
        ours[known.format(found[1]) if found and known else name] = tensor
    return ours


def to_theirs(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """`tensors` of ours under the authors' names."""
    return {_theirs(name): tensor for name, tensor in tensors.items()}


def _theirs(name: str) -> str:
    number = re.search(r"\d+", name)
    spelt = {own.format(number[0]): f"{number[0]}.{told}" for told, own in _NAMES.items()} if number else {}
    return spelt.get(name, name)
