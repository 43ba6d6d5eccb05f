"""The authors' layout, as their own code reads it: Llama keys, `draft_vocab_size`, and weights in `pytorch_model.bin`.

Source: SafeAILab/EAGLE eagle/model/ea_model.py, cnets.py and configs.py.
"""

from __future__ import annotations

from typing import Any

from eyas.heads.config import HeadConfig
from eyas.heads.layouts.llama import write_layer
from eyas.heads.layouts.rope import DEFAULT_THETA


def write(config: HeadConfig, dtype: str) -> dict[str, Any]:
    """The config.json for the authors' code; what that code cannot compute must have been refused before."""
    layer = write_layer(config)
    keys = {
        "architectures": ["LlamaForCausalLM"],
        **{key: value for key, value in layer.items() if not key.startswith("rope") and not key.endswith("_bias")},
        "num_hidden_layers": 1,
        "draft_vocab_size": config.draft_vocab_size,
        "torch_dtype": dtype,
    }
    if config.target_hidden_size != config.hidden_size:  # its presence alone keeps their code from loading the embedding
        keys["target_hidden_size"] = config.target_hidden_size
    if config.rope["rope_type"] == "linear":
        keys["rope_scaling"] = {"type": "linear", "factor": float(config.rope["factor"])}
    elif config.rope["rope_theta"] != DEFAULT_THETA:
        keys["rope_theta"] = config.rope["rope_theta"]
    return keys
