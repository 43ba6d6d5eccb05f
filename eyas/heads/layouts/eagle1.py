"""The authors' layout of an EAGLE-1 or EAGLE-2 head: Llama keys, `bias` of the fusion, tensors `layers.0.*`.

Source: SafeAILab/EAGLE eagle/train/*_config.json and eagle/model/cnets1.py.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from eyas.errors import EyasError
from eyas.heads.checkpoint import Checkpoint
from eyas.heads.config import Eagle1Config
from eyas.heads.layouts.llama import read_layer, write_layer
from eyas.heads.layouts.names import OURS, to_ours
from eyas.heads.layouts.record import read_record


def is_eagle1(checkpoint: Checkpoint) -> bool:
    """Whether it holds an EAGLE-1 head: no vocabulary of its own in the config, no norm of a hidden state in the weights."""
    own_vocabulary = "draft_vocab_size" in checkpoint.config or "d2t" in checkpoint.tensors
    normed = any(name.endswith("hidden_norm.weight") or name.startswith(OURS) for name in checkpoint.tensors)
    return checkpoint.layout in ("safeailab", "eyas") and not own_vocabulary and not normed


def read(config: dict[str, Any], tensors: dict[str, Tensor]) -> Eagle1Config:
    """The configuration of the head whose config.json is `config`; raises as the readers of EAGLE-3 heads do."""
    known = {**read_record(config), **read_layer(config, to_ours(tensors))}
    if known.get("num_layers", 1) != 1:
        raise EyasError(f"an EAGLE-1 head of {known['num_layers']} layers is not supported")
    return Eagle1Config(**{key: value for key, value in known.items() if key in Eagle1Config.model_fields})


def write(config: Eagle1Config, dtype: str) -> dict[str, Any]:
    """The config.json of an EAGLE-1 head."""
    return {
        "architectures": ["LlamaForCausalLM"],
        **write_layer(config),
        "num_hidden_layers": 1,
        "qkv_bias": config.qkv_bias,
        "bias": config.fc_bias,
        "torch_dtype": dtype,
    }
