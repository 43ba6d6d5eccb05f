"""SGLang's own `llama_eagle3.py`, run on the CPU: its classes and its loader as they stand, the layers under them plain torch.

EYAS_SGLANG names an sglang wheel, or the folder that holds the package. Only that one file's code is run; the linear layers,
norms and attention it builds upon need a GPU and are stood in for here.
"""

from __future__ import annotations

import contextlib
import os
import sys
import types
import zipfile
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from eyas.heads.rope import inverse_frequencies, rotate

PLACE = os.environ.get("EYAS_SGLANG", "")


def source(name: str) -> str:
    """The text of a file of the package, e.g. "srt/models/llama_eagle3.py"."""
    if PLACE.endswith(".whl"):
        return zipfile.ZipFile(PLACE).read(f"sglang/{name}").decode()
    return (Path(PLACE) / "sglang" / name).read_text()


def load_whole(parameter: nn.Parameter, weight: Tensor, shard: Any = None) -> None:
    """Copy `weight`, or one of the parts that a stacked parameter is made of, and count what was filled."""
    part = parameter.data if shard is None else parameter.data[parameter.parts[shard]]  # type: ignore[attr-defined]
    assert part.shape == weight.shape, (tuple(part.shape), tuple(weight.shape))
    part.copy_(weight)
    parameter.filled = getattr(parameter, "filled", 0) + weight.numel()  # type: ignore[attr-defined]


class Stacked(nn.Linear):
    """Several projections in one, as serving engines keep them; `parts` names the rows of each."""

    def __init__(self, reads: int, sizes: dict[Any, int]) -> None:
        super().__init__(reads, sum(sizes.values()), bias=False)
        starts = [sum(list(sizes.values())[:i]) for i in range(len(sizes))]
        self.weight.parts = {k: slice(a, a + n) for a, (k, n) in zip(starts, sizes.items(), strict=True)}  # type: ignore[attr-defined]
        self.weight.weight_loader = load_whole  # type: ignore[attr-defined]


class QKV(Stacked):
    def __init__(self, reads: int, d: int, heads: int, kv: int, **_: Any) -> None:
        super().__init__(reads, {"q": heads * d, "k": kv * d, "v": kv * d})


class Norm(nn.RMSNorm):
    def forward(self, x: Tensor, residual: Tensor | None = None) -> Any:  # type: ignore[override]
        return super().forward(x) if residual is None else (super().forward(x + residual), x + residual)


class Mlp(nn.Module):
    def __init__(self, width: int, inner: int, *_: Any, **__: Any) -> None:
        super().__init__()
        self.gate_up_proj, self.down_proj = Stacked(width, {0: inner, 1: inner}), nn.Linear(inner, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate_up_proj(x).chunk(2, -1)
        return self.down_proj(F.silu(gate) * up)


class Attention(nn.Module):
    def __init__(self, config: Any) -> None:
        super().__init__()
        self.head_dim, self.rope = config.head_dim, config.rope_parameters
        self.total_num_heads, self.total_num_kv_heads = config.num_attention_heads, config.num_key_value_heads
        self.o_proj = nn.Linear(config.num_attention_heads * config.head_dim, config.hidden_size, bias=False)

    def forward(self, positions: Tensor, hidden_states: Tensor, forward_batch: Any) -> Tensor:
        sizes = [n * self.head_dim for n in (self.total_num_heads, self.total_num_kv_heads, self.total_num_kv_heads)]
        q, k, v = (t.unflatten(-1, (-1, self.head_dim)) for t in self.qkv_proj(hidden_states).split(sizes, -1))
        frequencies = inverse_frequencies(self.rope, self.head_dim)
        q, k = (rotate(t, positions, frequencies).transpose(0, 1) for t in (q, k))
        attended = F.scaled_dot_product_attention(q, k, v.transpose(0, 1), is_causal=True, enable_gqa=True)
        return self.o_proj(attended.transpose(0, 1).flatten(1))


class Layer(nn.Module):
    def __init__(self, config: Any, *_: Any, **__: Any) -> None:
        super().__init__()
        self.hidden_size, self.self_attn = config.hidden_size, Attention(config)
        self.input_layernorm = Norm(config.hidden_size, eps=config.rms_norm_eps)
        self.post_attention_layernorm = Norm(config.hidden_size, eps=config.rms_norm_eps)


class Rows(nn.Embedding):
    def __init__(self, count: int, width: int, *_: Any, **__: Any) -> None:
        super().__init__(count, width)


@contextlib.contextmanager
def sglang_modules() -> Iterator[None]:
    """Stand-ins for what `llama_eagle3.py` imports from its own package."""
    anything = type("Anything", (), {"__init__": lambda self, *a, **k: None, "SINGLE_GROUP": None})
    stands: dict[str, dict[str, Any]] = {
        "configs.draft_parallel": {"DraftParallelSpec": anything, "DraftTPExecution": anything},
        "runtime_context": {
            "get_spec": lambda: SimpleNamespace(speculative_draft_window_size=None),
            "get_parallel": lambda: SimpleNamespace(pp_group=None),
        },
        "utils": {"add_prefix": lambda name, prefix: f"{prefix}.{name}"},
        "layers.layer_boundary": {"layer_stack": contextlib.nullcontext},
        "layers.layernorm": {"RMSNorm": Norm},
        "layers.linear": {"QKVParallelLinear": QKV},
        "layers.logits_processor": {"LogitsProcessor": anything},
        "layers.quantization.base_config": {"QuantizationConfig": anything},
        "layers.vocab_parallel_embedding": {"ParallelLMHead": Rows, "VocabParallelEmbedding": Rows},
        "model_executor.forward_batch_info": {"ForwardBatch": anything, "PPProxyTensors": anything},
        "model_loader.weight_utils": {"default_weight_loader": load_whole},
        "models.llama": {"LlamaDecoderLayer": Layer, "LlamaForCausalLM": nn.Module, "LlamaMLP": Mlp},
    }
    added: dict[str, types.ModuleType] = {}
    for name, content in stands.items():
        parts = f"sglang.srt.{name}".split(".")
        for i in range(1, len(parts) + 1):
            added.setdefault(".".join(parts[:i]), types.ModuleType(".".join(parts[:i])))
        vars(added[".".join(parts)]).update(content)
    sys.modules.update(added)
    try:
        yield
    finally:
        for name in added:
            del sys.modules[name]


def draft_model(config: Any) -> Any:
    """SGLang's `LlamaForCausalLMEagle3` for a transformers config, its weights all NaN."""
    with sglang_modules():
        space: dict[str, Any] = {"__name__": "llama_eagle3"}
        exec(compile(source("srt/models/llama_eagle3.py"), "llama_eagle3.py", "exec"), space)
        model = space["LlamaForCausalLMEagle3"](config)
    for parameter in model.parameters():
        parameter.data.fill_(torch.nan)
    return model
