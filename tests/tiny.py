"""Small random targets: a few layers, a small vocabulary and a ChatML-like template, made in milliseconds."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

from eyas.target import Target

VOCAB = 160
TEMPLATE = (
    "{% for m in messages %}<s>{{ m['role'] }}\n{{ m['content'] }}</s>\n{% endfor %}"
    "{% if add_generation_prompt %}<s>assistant\n{% endif %}"
)
SHAPE = {
    "vocab_size": VOCAB, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 8, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 512, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
}  # fmt: skip
FAMILIES = {
    "llama": {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}},
    "qwen2": {"rope_parameters": {"rope_type": "default", "rope_theta": 1000000.0}, "tie_word_embeddings": True},
    "qwen3": {"rope_parameters": {"rope_type": "default", "rope_theta": 1000000.0}, "head_dim": 32},
    "mistral": {"sliding_window": 11, "head_dim": 16},
    "gemma3_text": {
        "sliding_window": 9, "head_dim": 16, "query_pre_attn_scalar": 16,
        "layer_types": ["sliding_attention", "full_attention"] * 4,
    },
    "phi": {"partial_rotary_factor": 0.5},
    "phi3": {},
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "qwen3_moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48, "head_dim": 16},
    "deepseek_v3": {
        "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48, "q_lora_rank": 32, "kv_lora_rank": 24,
        "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 24, "n_group": 2, "topk_group": 1,
        "first_k_dense_replace": 2, "num_key_value_heads": 4,
    },
}  # fmt: skip


def tiny_tokenizer() -> PreTrainedTokenizerFast:
    """Byte-ish characters as tokens: three specials, then 157 byte-level symbols."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    keep = [c for c in alphabet if c.isascii()] + [c for c in alphabet if not c.isascii()]
    tokens = ["<pad>", "<s>", "</s>", *keep[: VOCAB - 3]]
    for needed in ("Ġ", "Ċ"):
        if needed not in tokens:
            tokens[-1 if needed == "Ġ" else -2] = needed
    backend = Tokenizer(models.BPE(vocab={t: i for i, t in enumerate(tokens)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", eos_token="</s>", pad_token="<pad>")
    tokenizer.chat_template = TEMPLATE
    return tokenizer


@cache
def tiny_target(family: str = "llama", seed: int = 0) -> Target:
    """A random 8-layer target of `family`: hidden 64, vocabulary 160. Its logits are spread so that text varies."""
    torch.manual_seed(seed)
    config = AutoConfig.for_model(family, **{**SHAPE, **FAMILIES.get(family, {})})
    model = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" not in name:
                parameter.normal_(0, 0.12)
            else:
                parameter.uniform_(0.7, 1.3)
    model.generation_config.eos_token_id = 2
    return Target(model, tiny_tokenizer(), name=f"tiny-{family}")


def save_target(target: Target, folder: Path) -> Path:
    """The target as a user would have it: a Hugging Face directory, which is returned."""
    target.model.save_pretrained(folder)
    target.tokenizer.save_pretrained(folder)
    return folder
