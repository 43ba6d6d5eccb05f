"""The authors' layout, as their own code reads it: Llama keys, `draft_vocab_size`, and weights in `pytorch_model.bin`.

Source: SafeAILab/EAGLE eagle/model/ea_model.py, cnets.py and configs.py.
"""

from __future__ import annotations

from typing import Any

from eyas.heads.config import HeadConfig
from eyas.heads.layouts.rope import DEFAULT_THETA


def write(config: HeadConfig, dtype: str) -> dict[str, Any]:
    """The config.json for the authors' code; what that code cannot compute must have been refused before."""
    keys = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_attention_heads": config.num_attention_heads,
        "num_key_value_heads": config.num_key_value_heads,
        "head_dim": config.head_dim,
        "num_hidden_layers": 1,
        "vocab_size": config.vocab_size,
        "draft_vocab_size": config.draft_vocab_size,
        "max_position_embeddings": config.max_position_embeddings,
        "rms_norm_eps": config.rms_norm_eps,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "torch_dtype": dtype,
    }
    if config.target_hidden_size != config.hidden_size:  # its presence alone keeps their code from loading the embedding
        keys["target_hidden_size"] = config.target_hidden_size
    if config.rope["rope_type"] == "linear":
        keys["rope_scaling"] = {"type": "linear", "factor": float(config.rope["factor"])}
    elif config.rope["rope_theta"] != DEFAULT_THETA:
        keys["rope_theta"] = config.rope["rope_theta"]
    return keys
