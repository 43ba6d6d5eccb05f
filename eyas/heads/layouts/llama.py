"""The keys of a Llama configuration that every layout shares, and the variants that eyas heads do not know."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from eyas.errors import EyasError
from eyas.heads.config import LayerConfig
from eyas.heads.layouts.rope import read_rope, write_rope

# what a head of ours cannot be, and the value that means it is not
_PLAIN: dict[str, Any] = {
    "hidden_act": "silu",
    "norm_before_fc": False,
    "use_aux_norm": False,
    "num_aux_hidden_states": 3,
    "logit_scale": 1.0,
    "parallel_drafting": False,
    "quantization_config": None,
}


def read_layer(config: dict[str, Any], tensors: dict[str, Tensor]) -> dict[str, Any]:
    """What the keys of `config` say of the decoder layer, as fields of our configuration; absent keys are left out.

    `tensors` go by our names and tell which biases and norms there are: several writers copy the target's `attention_bias`
    into the config of a head that has none. Raises EyasError for a variant that eyas heads do not know.
    """
    for key, plain in _PLAIN.items():
        if config.get(key) not in (None, plain):
            raise EyasError(f"'{key}' is {config[key]}, which eyas heads cannot compute (only {plain})")
    if "sliding_attention" in (config.get("layer_types") or []):
        raise EyasError("its attention is a sliding window, which eyas heads cannot compute")
    heads, width = config.get("num_attention_heads"), config.get("hidden_size")
    derived = width // heads if isinstance(width, int) and isinstance(heads, int) and heads else None
    attention, mlp = "midlayer.self_attn.", "midlayer.mlp."
    found = {
        "hidden_size": width,
        "intermediate_size": config.get("intermediate_size"),
        "num_attention_heads": heads,
        "num_key_value_heads": config.get("num_key_value_heads") or heads,
        "head_dim": config.get("head_dim") or derived,
        "vocab_size": config.get("vocab_size"),
        "rms_norm_eps": config.get("rms_norm_eps"),
        "rope": read_rope(config),
        "max_position_embeddings": config.get("max_position_embeddings") or 2048,
        "qkv_bias": any(f"{attention}{p}.bias" in tensors for p in ("q_proj", "k_proj", "v_proj")),
        "o_bias": f"{attention}o_proj.bias" in tensors,
        "mlp_bias": any(f"{mlp}{p}.bias" in tensors for p in ("gate_proj", "up_proj", "down_proj")),
        "fc_bias": "fc.bias" in tensors,
        "qk_norm": bool(config.get("qk_norm")) or any(f"{attention}{n}.weight" in tensors for n in ("q_norm", "k_norm")),
        "num_layers": config.get("num_hidden_layers"),
        "own_embedding": "embed_tokens.weight" in tensors,
    }
    return {key: value for key, value in found.items() if value is not None}


def write_layer(config: LayerConfig) -> dict[str, Any]:
    """The keys of a Llama configuration for a head of ours."""
    return {
        "model_type": "llama",
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_attention_heads": config.num_attention_heads,
        "num_key_value_heads": config.num_key_value_heads,
        "head_dim": config.head_dim,
        "vocab_size": config.vocab_size,
        "max_position_embeddings": config.max_position_embeddings,
        "rms_norm_eps": config.rms_norm_eps,
        **write_rope(config.rope),
        "hidden_act": "silu",
        "attention_bias": config.qkv_bias,
        "mlp_bias": config.mlp_bias,
        "tie_word_embeddings": False,  # a head never ties, whatever its target does
    }
