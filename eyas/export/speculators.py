"""vLLM through the speculators layout, whose config names the target: the folder alone is enough to serve."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from eyas.export.engine import Engine, Order
from eyas.export.vllm import launch, refused_biases
from eyas.heads.config import HeadConfig
from eyas.heads.files import write_head
from eyas.heads.layouts import speculators
from eyas.heads.layouts.names import to_numbered
from eyas.heads.layouts.record import write_record
from eyas.target import Target


def refusals(config: HeadConfig, target: Target) -> Iterator[str]:
    """What neither speculators' network nor vLLM's has a place for."""
    yield from refused_biases(config)
    if config.qk_norm and config.mlp_bias:
        yield "a layer that norms queries and keys has no bias in its MLP there"


def write(order: Order, folder: Path) -> None:
    config = speculators.write(
        order.config, order.dtype, verifier=order.served_target, architectures=[type(order.target.model).__name__],
        draft_tokens=order.draft_tokens,
    )  # fmt: skip
    write_head(folder, {**config, **write_record(order.config)}, to_numbered(order.tensors))


def serving(order: Order, place: Path) -> str:
    return launch(str(place), order.dtype)


ENGINE = Engine("vLLM 0.32 (speculators 0.9)", refusals, write, serving)
