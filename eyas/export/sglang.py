"""SGLang: our own layout as it stands; what its loader would pass over in silence is refused here."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from pathlib import Path

from eyas.export.engine import Engine, Order
from eyas.export.vllm import write
from eyas.heads.config import HeadConfig
from eyas.target import Target


def refusals(config: HeadConfig, target: Target) -> Iterator[str]:
    """What SGLang's `llama_eagle3.py` has no place for, or computes in another way."""
    if config.norm_before_residual:
        yield "its residual is always the state before the norm"
    if config.qkv_bias or config.o_bias or config.mlp_bias:
        yield "its layer has no biases"
    if config.qk_norm:
        yield "its layer does not norm queries and keys"
    if config.num_layers > 1:
        yield "its later layers norm their input by another tensor"
    if config.own_embedding and config.hidden_size == config.target_hidden_size:
        yield "it replaces the head's own embedding by the target's"
    if 0 in config.tap_ids:
        yield "it taps what layers give, so not the embedding (tap 0)"


def serving(order: Order, place: Path) -> str:
    """A chain: one drafted token a step, the bonus token counted among the draft tokens."""
    return (
        f"python -m sglang.launch_server --model-path {shlex.quote(order.served_target)} --dtype {order.dtype} \\\n"
        f"  --speculative-algorithm EAGLE3 --speculative-draft-model-path {shlex.quote(str(place))} \\\n"
        f"  --speculative-num-steps {order.draft_tokens} --speculative-eagle-topk 1 "
        f"--speculative-num-draft-tokens {order.draft_tokens + 1}"
    )


ENGINE = Engine("SGLang 0.5.23", refusals, write, serving)
