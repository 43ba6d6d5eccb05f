"""Heads as other projects publish them, made small: key lists and configs transcribed from their public code.

SafeAILab: eagle/model/cnets.py (EAGLE-3), eagle/model/cnets1.py and eagle/train/*_config.json (EAGLE-1).
SpecForge 0.2: specforge/modeling/draft/llama3_eagle.py and configs/*-eagle3.json.
speculators 0.9: speculators/models/eagle3/core.py, config.py, model_definitions.py.
ModelOpt 0.47: modelopt/torch/export/plugins/hf_spec_export.py (LLAMA_EAGLE_SINGLE_LAYER) and hf_spec_configs.py.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from eyas.heads.vocab import choose_vocabulary
from tests.tiny import SHAPE, VOCAB

WIDTH, DRAFT = SHAPE["hidden_size"], 120
SIZES = {
    "hidden_size": WIDTH, "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": VOCAB,
    "num_hidden_layers": 1, "rms_norm_eps": 1e-6, "max_position_embeddings": 512, "hidden_act": "silu",
}  # fmt: skip
LLAMA = {**SIZES, "model_type": "llama", "tie_word_embeddings": False, "torch_dtype": "float16", "use_cache": True}


def randn(*shape: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed + sum(shape))
    return torch.randn(shape, generator=generator) * 0.15


def attention(prefix: str, reads: int, width: int = WIDTH, head_dim: int = 16) -> dict[str, Tensor]:
    """Four query heads on two key heads, as SIZES has it."""
    return {
        f"{prefix}q_proj.weight": randn(4 * head_dim, reads),
        f"{prefix}k_proj.weight": randn(2 * head_dim, reads, seed=1),
        f"{prefix}v_proj.weight": randn(2 * head_dim, reads, seed=2),
        f"{prefix}o_proj.weight": randn(width, 4 * head_dim),
    }


def mlp(prefix: str, width: int = WIDTH) -> dict[str, Tensor]:
    names = {"gate_proj": (96, width), "up_proj": (96, width), "down_proj": (width, 96)}
    return {f"{prefix}{name}.weight": randn(*shape, seed=i) for i, (name, shape) in enumerate(names.items())}


def vocabulary() -> dict[str, Tensor]:
    d2t = choose_vocabulary(torch.arange(VOCAB) % 7, DRAFT)
    t2d = torch.zeros(VOCAB, dtype=torch.bool)
    t2d[torch.arange(DRAFT) + d2t] = True
    return {"d2t": d2t, "t2d": t2d}


def eagle3_tensors(layer: str, *, draft: int = DRAFT, width: int = WIDTH, head_dim: int = 16) -> dict[str, Tensor]:
    """The tensors of an EAGLE-3 head without its vocabulary maps; `layer` is "midlayer." or "layers.0."."""
    return {
        "fc.weight": randn(width, 3 * WIDTH),
        **attention(f"{layer}self_attn.", 2 * width, width, head_dim),
        **mlp(f"{layer}mlp.", width),
        f"{layer}input_layernorm.weight": 1 + randn(width),
        f"{layer}hidden_norm.weight": 1 + randn(width, seed=1),
        f"{layer}post_attention_layernorm.weight": 1 + randn(width, seed=2),
        "norm.weight": 1 + randn(width, seed=3),
        "lm_head.weight": randn(draft, width),
    }


def eagle1_tensors(*, bias: bool = True) -> dict[str, Tensor]:
    """cnets1.Model: no first norm, no final norm, no vocabulary of its own, an embedding."""
    return {
        "embed_tokens.weight": randn(VOCAB, WIDTH),
        "fc.weight": randn(WIDTH, 2 * WIDTH),
        **({"fc.bias": randn(WIDTH)} if bias else {}),
        **attention("layers.0.self_attn.", WIDTH),
        **mlp("layers.0.mlp."),
        "layers.0.post_attention_layernorm.weight": 1 + randn(WIDTH),
    }


EAGLE_CONFIG = {"eagle_aux_hidden_state_layer_ids": [1, 3, 4]}  # outputs of these layers: hidden_states[2, 4, 5], 8 layers
MODELOPT_FLAGS = {
    "use_aux_hidden_state": True, "use_input_layernorm_in_first_layer": True, "use_last_layernorm": True,
    "use_mtp_layernorm": False, "next_layer_regular": True, "parallel_draft_step": 1, "parallel_draft_heads_num_layers": None,
}  # fmt: skip


def safeailab() -> tuple[dict[str, Any], dict[str, Tensor]]:
    config = {**LLAMA, "architectures": ["LlamaForCausalLM"], "draft_vocab_size": DRAFT}
    return config, {**eagle3_tensors("midlayer."), **vocabulary()}


def specforge() -> tuple[dict[str, Any], dict[str, Tensor]]:
    config = {
        **LLAMA, "architectures": ["LlamaForCausalLMEagle3"], "draft_vocab_size": DRAFT, "head_dim": 16, "rope_theta": 1000000,
        "rope_scaling": None, "eagle_config": EAGLE_CONFIG, "tie_word_embeddings": True,
    }  # fmt: skip
    return config, {**eagle3_tensors("midlayer."), **vocabulary()}


def speculators() -> tuple[dict[str, Any], dict[str, Tensor]]:
    rope = {"rope_type": "default", "rope_theta": 500000.0}
    config = {
        "architectures": ["Eagle3Speculator"], "speculators_model_type": "eagle3", "speculators_version": "0.9.0",
        "draft_vocab_size": DRAFT, "norm_before_residual": True, "norm_before_fc": False, "fc_norm": False,
        "norm_output": False, "target_hidden_size": None, "eagle_aux_hidden_state_layer_ids": [2, 4, 5],
        "transformer_layer_config": {**LLAMA, "head_dim": 16, "rope_parameters": rope, "attention_bias": False},
        "speculators_config": {
            "algorithm": "eagle3", "default_proposal_method": "greedy",
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": 3}],
            "verifier": {"name_or_path": "someone/tiny", "architectures": ["LlamaForCausalLM"]},
        },
    }  # fmt: skip
    return config, {**eagle3_tensors("layers.0."), **vocabulary(), "embed_tokens.weight": randn(VOCAB, WIDTH)}


def modelopt() -> tuple[dict[str, Any], dict[str, Tensor]]:
    config = {
        **LLAMA, "architectures": ["LlamaForCausalLMEagle3"], "draft_vocab_size": DRAFT, "head_dim": 16, "rope_theta": 500000.0,
        "rope_scaling": None, "attention_bias": False, "mlp_bias": False, "pretraining_tp": 1,
        "eagle_config": {**MODELOPT_FLAGS, **EAGLE_CONFIG},
    }  # fmt: skip
    return config, {**eagle3_tensors("layers.0."), "d2t": vocabulary()["d2t"]}


def eagle1() -> tuple[dict[str, Any], dict[str, Tensor]]:
    config = {**LLAMA, "architectures": ["LlamaForCausalLM"], "pad_token_id": 0}
    return config, eagle1_tensors()


PUBLISHED = {"safeailab": safeailab, "specforge": specforge, "speculators": speculators, "modelopt": modelopt}


def publish(folder: Path, config: dict[str, Any], tensors: dict[str, Tensor], weights: str = "model.safetensors") -> Path:
    """Write a head as its author would; the format follows from the file's name."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    if weights.endswith(".bin"):
        torch.save(tensors, folder / weights)
    else:
        save_file(tensors, folder / weights)
    return folder
