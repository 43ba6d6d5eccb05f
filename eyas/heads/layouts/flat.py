"""A flat Llama config.json with the EAGLE-3 keys in it: SafeAILab's and SpecForge's layout, and what we write ourselves.

Sources: SafeAILab/EAGLE eagle/traineagle3/config.json and eagle/model/cnets.py; sgl-project/SpecForge configs/*-eagle3.json
and specforge/modeling/draft/llama3_eagle.py; read by vLLM and SGLang in llama_eagle3.py.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from eyas.heads.config import HeadConfig
from eyas.heads.layouts.llama import read_layer, write_layer
from eyas.heads.layouts.record import read_record
from eyas.heads.layouts.taps import read_taps, write_taps
from eyas.target import Target, default_taps


def read(config: dict[str, Any], tensors: dict[str, Tensor], target: Target) -> HeadConfig:
    """The configuration of the head whose config.json is `config`; `tensors` go by our names.

    Raises EyasError for a variant that eyas heads do not know, ValidationError for keys that make no sense.
    """
    layer = read_layer(config, tensors)
    lm_head = tensors.get("lm_head.weight")
    facts = {
        "target_layers": target.num_layers,
        **read_record(config),
        **layer,
        "target_hidden_size": config.get("target_hidden_size") or layer.get("hidden_size"),
        "draft_vocab_size": config.get("draft_vocab_size") or (None if lm_head is None else lm_head.shape[0]),
        "tap_ids": read_taps(config) or default_taps(target.num_layers),
        "norm_before_residual": config.get("norm_before_residual"),
        "fc_norm": config.get("fc_norm"),
        "norm_output": config.get("norm_output"),
    }
    return HeadConfig(**{key: value for key, value in facts.items() if value is not None})


def write(config: HeadConfig, dtype: str) -> dict[str, Any]:
    """The config.json that vLLM, SGLang and llama.cpp read as it stands; `dtype` is that of the weights, e.g. "float32"."""
    return {
        "architectures": ["LlamaForCausalLMEagle3"],
        **write_layer(config),
        "num_hidden_layers": config.num_layers,
        "target_hidden_size": config.target_hidden_size,
        "draft_vocab_size": config.draft_vocab_size,
        "norm_before_residual": config.norm_before_residual,
        "fc_norm": config.fc_norm,
        "norm_output": config.norm_output,
        "qk_norm": config.qk_norm,
        "bias": config.fc_bias,  # SGLang's name for it
        "torch_dtype": dtype,
        **write_taps(config.tap_ids),
    }
