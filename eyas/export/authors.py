"""The authors' own code (SafeAILab/EAGLE), which reads its taps and its embedding from places of its own."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from eyas.export.engine import Engine, Order
from eyas.heads.config import HeadConfig
from eyas.heads.files import EMBEDDING, write_head
from eyas.heads.layouts import safeailab
from eyas.heads.layouts.record import write_record
from eyas.heads.layouts.rope import DEFAULT_THETA
from eyas.shards import PICKLE, SAFETENSORS, index_path
from eyas.target import Target

TARGETS = ("LlamaForCausalLM", "MixtralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")


def refusals(config: HeadConfig, target: Target) -> Iterator[str]:
    """What `cnets.py` and `ea_model.py` have no place for, or compute in another way."""
    family, layers = type(target.model).__name__, target.num_layers
    if family not in TARGETS:
        yield f"it knows no target of the kind {family}"
    if config.tap_ids != (2, layers // 2, layers - 3):
        yield f"it reads the taps {[2, layers // 2, layers - 3]}, whatever a config says"
    if config.norm_before_residual or config.fc_norm or config.norm_output or config.qk_norm:
        yield "it has none of norm_before_residual, fc_norm, norm_output and qk_norm"
    if config.num_layers > 1:
        yield "it has one layer"
    if config.qkv_bias or config.o_bias or config.mlp_bias or config.fc_bias:
        yield "it has no biases"
    kind, theta = config.rope["rope_type"], config.rope["rope_theta"]
    if kind not in ("default", "linear"):
        yield f"it has no rotary scaling of the type '{kind}'"
    elif kind == "linear" and theta != DEFAULT_THETA:
        yield f"with linear rotary scaling it takes the base {DEFAULT_THETA:g}, not {theta:g}"


def write(order: Order, folder: Path) -> None:
    """Their code finds the target's embedding through an index of shards only; without one it goes along."""
    tensors, config = order.tensors, safeailab.write(order.config, order.dtype)
    sharded = any(index_path(Path(order.served_target), whole).is_file() for whole in (SAFETENSORS, PICKLE))
    if EMBEDDING not in tensors and not sharded:
        tensors = {**tensors, EMBEDDING: order.target.embedding.to(next(iter(tensors.values())).dtype).cpu()}
    if EMBEDDING in tensors:
        config["target_hidden_size"] = order.config.target_hidden_size  # keeps their code from looking for an index
    write_head(folder, {**config, **write_record(order.config)}, tensors, weights=PICKLE)


def serving(order: Order, place: Path) -> str:
    return (
        "import torch\n"
        "from eagle.model.ea_model import EaModel\n\n"
        f"model = EaModel.from_pretrained(\n    use_eagle3=True, base_model_path={order.served_target!r},\n"
        f"    ea_model_path={str(place)!r}, total_token=60, depth=7, top_k=10, torch_dtype=torch.{order.dtype},\n)"
    )


ENGINE = Engine("the authors' code (SafeAILab/EAGLE)", refusals, write, serving, language="python")
