"""The layout of vLLM's speculators: Llama keys under `transformer_layer_config`, tensors `layers.0.*`.

Source: speculators/models/eagle3/config.py, core.py and model_definitions.py (0.9); read by vLLM in
transformers_utils/configs/speculators/algos.py.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from eyas.errors import EyasError
from eyas.heads.config import HeadConfig
from eyas.heads.layouts.llama import read_layer, write_layer
from eyas.heads.layouts.record import read_record
from eyas.heads.layouts.taps import KEY, read_taps
from eyas.target import Target, default_taps

VERSION = "0.9.0"  # of the package whose configuration is written
_ATTENTION = "midlayer.self_attn."


def read(config: dict[str, Any], tensors: dict[str, Tensor], target: Target) -> HeadConfig:
    """The configuration of the head whose config.json is `config`; `tensors` go by our names.

    Raises EyasError for a variant that eyas heads do not know, ValidationError for keys that make no sense.
    """
    kind, layer = config["speculators_model_type"], config.get("transformer_layer_config")
    if kind != "eagle3":
        raise EyasError(f"speculators_model_type is '{kind}'; eyas reads 'eagle3'")
    if not isinstance(layer, dict):
        raise EyasError("transformer_layer_config is missing")
    if not isinstance(config.get("norm_before_residual"), bool):
        raise EyasError("norm_before_residual is not given, and its readers differ in what they then take; write it there")
    if layer.get("model_type", "llama") not in ("llama", "qwen3"):
        raise EyasError(f"its layer is of the type '{layer['model_type']}'; eyas reads 'llama' and 'qwen3'")
    wanted = ["q_norm.weight", "k_norm.weight"] if layer.get("model_type") == "qwen3" else []
    if layer.get("attention_bias"):
        wanted += [f"{projection}.bias" for projection in ("q_proj", "k_proj", "v_proj", "o_proj")]
    for name in wanted:
        if _ATTENTION + name not in tensors:
            raise EyasError(f"it lacks the tensor 'layers.0.self_attn.{name}', which its config tells of")
    verifier = (config.get("speculators_config") or {}).get("verifier") or {}
    found = read_layer({**layer, "norm_before_fc": config.get("norm_before_fc")}, tensors)
    facts = {
        **found,
        "target_name": verifier.get("name_or_path") or "",
        "target_layers": target.num_layers,
        **read_record(config),
        "target_hidden_size": config.get("target_hidden_size") or found.get("hidden_size"),
        "draft_vocab_size": config.get("draft_vocab_size"),
        "tap_ids": read_taps(config) or default_taps(target.num_layers),
        "norm_before_residual": config["norm_before_residual"],
        "fc_norm": bool(config.get("fc_norm")),
        "norm_output": bool(config.get("norm_output")),
    }
    return HeadConfig(**{key: value for key, value in facts.items() if value is not None})


def write(config: HeadConfig, dtype: str, *, verifier: str, architectures: list[str], draft_tokens: int) -> dict[str, Any]:
    """The config.json of this layout. `verifier` is where the target lies; engines draft `draft_tokens` by default."""
    layer = {
        **write_layer(config),
        "model_type": "qwen3" if config.qk_norm else "llama",
        "num_hidden_layers": config.num_layers,
        "torch_dtype": dtype,
    }
    return {
        "architectures": ["Eagle3Speculator"],
        "speculators_model_type": "eagle3",
        "speculators_version": VERSION,
        "draft_vocab_size": config.draft_vocab_size,
        "target_hidden_size": config.target_hidden_size,
        "norm_before_residual": config.norm_before_residual,
        "norm_before_fc": False,
        "fc_norm": config.fc_norm,
        "norm_output": config.norm_output,
        "embed_requires_grad": False,
        KEY: list(config.tap_ids),
        "tie_word_embeddings": False,
        "torch_dtype": dtype,
        "transformer_layer_config": layer,
        "speculators_config": {
            "algorithm": "eagle3",
            "default_proposal_method": "greedy",
            "proposal_methods": [
                {
                    "proposal_type": "greedy",
                    "speculative_tokens": draft_tokens,
                    "verifier_accept_k": 1,
                    "accept_tolerance": 0.0,
                }
            ],
            "verifier": {"name_or_path": verifier, "architectures": architectures},
        },
    }
