"""vLLM: our own layout as it stands."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator
from pathlib import Path

from eyas.export.engine import Engine, Order
from eyas.heads.config import HeadConfig
from eyas.heads.files import write_head
from eyas.heads.layouts import flat
from eyas.heads.layouts.record import write_record
from eyas.target import Target


def refusals(config: HeadConfig, target: Target) -> Iterator[str]:
    """What vLLM's `llama_eagle3.py` has no place for."""
    yield from refused_biases(config)
    if config.qk_norm:
        yield "a plain config has no norm of queries and keys there; export to speculators instead"


def refused_biases(config: HeadConfig) -> Iterator[str]:
    """Biases that vLLM's EAGLE-3 networks do not have."""
    if config.fc_bias:
        yield "its fusion has no bias"
    if config.qkv_bias != config.o_bias:
        yield "it gives queries, keys, values and the output projection a bias together or not at all"


def write(order: Order, folder: Path) -> None:
    """The layout that vLLM, SGLang and llama.cpp share."""
    write_head(folder, {**flat.write(order.config, order.dtype), **write_record(order.config)}, order.tensors)


def serving(order: Order, place: Path) -> str:
    """The dtype is named because vLLM would else serve a float32 target in half precision."""
    told = json.dumps({"method": "eagle3", "model": str(place), "num_speculative_tokens": order.draft_tokens})
    return f"{launch(order.served_target, order.dtype)} \\\n  --speculative-config {shlex.quote(told)}"


def launch(model: str, dtype: str) -> str:
    """The module rather than the `vllm` command, which the builds for CPUs do not start from."""
    return f"python -m vllm.entrypoints.openai.api_server --model {shlex.quote(model)} --dtype {dtype}"


ENGINE = Engine("vLLM 0.32", refusals, write, serving)
