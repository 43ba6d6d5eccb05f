"""Fused twins: they agree with the eager reference, keep a row's bits its own, and stand in only for what they reproduce."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM

from eyas.decoding.cache import KVCache
from eyas.kernels.build import kernels_ready
from eyas.kernels.fused import FusedAttention, FusedLayer, FusedMLP, FusedNorm
from eyas.kernels.packed import pack_linears
from eyas.kernels.twins import INTERFACE, fused_twin, usual_attention, usual_mlp, usual_norm
from eyas.target import Target
from tests.tiny import tiny_tokenizer

pytestmark = pytest.mark.skipif(not kernels_ready(), reason="the kernels need a C++ compiler")

USUAL = ["llama", "qwen2", "qwen3", "mistral"]


@pytest.fixture(autouse=True)
def _threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def model_of(family: str, **settings: object) -> Any:
    """A random model of 2 layers: hidden 36, heads of 12."""
    common: dict[str, object] = {
        "vocab_size": 64, "hidden_size": 36, "intermediate_size": 50, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 12, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
    }  # fmt: skip
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **{**common, **settings}))
    for name, parameter in model.named_parameters():
        if "norm" in name:
            parameter.data.uniform_(0.5, 1.5)
        else:
            parameter.data.normal_(0, 0.3)  # biases too
    model.set_attn_implementation(INTERFACE)
    return model.eval().requires_grad_(False)


def surroundings(batch: int, queries: int, dim: int) -> tuple[tuple[Tensor, Tensor], Tensor]:
    """Cosines and sines of positions 5, 6, ... and a causal mask."""
    angles = torch.arange(5, 5 + queries)[None, :, None] / 10 ** torch.linspace(0, 3, dim // 2)  # [1, Q, dim / 2]
    angles = torch.cat([angles, angles], -1).expand(batch, -1, -1)  # [B, Q, dim]
    causal = torch.ones(queries, queries, dtype=torch.bool).tril()
    return (angles.cos(), angles.sin()), causal.expand(batch, 1, queries, queries)


class Kept:
    """A cache with a past of three keys before those it is given."""

    def __init__(self, batch: int) -> None:
        torch.manual_seed(9)
        self.past = torch.randn(2, batch, 2, 3, 12)

    def update(self, keys: Tensor, values: Tensor, layer: int) -> tuple[Tensor, Tensor]:
        self.layer, self.keys, self.values = layer, keys, values
        return torch.cat([self.past[0], keys], 2), torch.cat([self.past[1], values], 2)


def close(got: Tensor, want: Tensor, tolerance: float = 1e-5) -> bool:
    return got.shape == want.shape and bool((got - want).abs().max() <= tolerance * (1 + want.abs().max()))


@pytest.mark.parametrize("family", USUAL)
def test_attention_agrees_with_its_reference_and_with_transformers(family: str) -> None:
    module = model_of(family).model.layers[1].self_attn
    twin = fused_twin(module, "fp32")
    assert isinstance(twin, FusedAttention)
    assert (twin.q_norm is not None) == (family == "qwen3")
    x = torch.randn(2, 5, 36)
    turns, causal = surroundings(2, 5, 12)
    mask = torch.cat([torch.ones(2, 1, 5, 3, dtype=torch.bool), causal], -1)
    given = {"hidden_states": x, "position_embeddings": turns, "attention_mask": mask}
    caches = [Kept(2) for _ in range(3)]
    want = usual_attention(module, x, turns, mask, caches[0])
    theirs = module(**given, cache=type("Theirs", (), {"update": lambda _, k, v, i, **__: caches[1].update(k, v, i)})())
    got = twin(**given, cache=caches[2])
    assert close(theirs[0], want)
    assert close(got[0], want)
    assert got[1] is None
    for other in caches[1:]:
        assert other.layer == 1
        assert close(other.keys, caches[0].keys)
        assert close(other.values, caches[0].values)
    given["attention_mask"] = causal
    assert close(twin(**given)[0], module(**given)[0])  # without a cache


@pytest.mark.parametrize("family", USUAL)
def test_layers_agree_with_transformers(family: str) -> None:
    layer = model_of(family).model.layers[0]
    twin = fused_twin(layer, "fp32")
    assert isinstance(twin, FusedLayer)
    turns, mask = surroundings(1, 4, 12)  # one row of turns for both rows of x
    given = {"hidden_states": torch.randn(2, 4, 36), "position_embeddings": turns, "attention_mask": mask.expand(2, -1, -1, -1)}
    assert close(twin(**given), layer(**given))


@pytest.mark.parametrize("weights", ["fp32", "fp16", "int8"])
@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_a_row_has_the_same_bits_in_any_company(family: str, weights: str) -> None:
    layer = fused_twin(model_of(family).model.layers[0], weights)  # type: ignore[arg-type]
    assert isinstance(layer, FusedLayer)
    x = torch.randn(3, 50, 36)
    turns, mask = surroundings(3, 50, 12)
    torch.set_num_threads(1)
    alone = torch.cat([layer(x[b : b + 1], mask[:1], tuple(t[:1] for t in turns)) for b in range(3)])
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        assert torch.equal(layer(x, mask, turns), alone)
        for queries in (1, 2, 7, 33):
            part = layer(x[:, :queries], mask[..., :queries, :queries], tuple(t[:, :queries] for t in turns))
            assert torch.equal(part, alone[:, :queries])


@pytest.mark.parametrize("weights", ["fp32", "fp16", "int8"])
@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_a_target_of_twins_decodes_with_the_same_bits(family: str, weights: str) -> None:
    """A text read at once, and token by token in the second row of a batch, gives the same logits and the same cache."""
    stock = Target(model_of(family, num_hidden_layers=3), tiny_tokenizer(), name="tiny", taps=(0, 1, 2))
    packed = Target(model_of(family, num_hidden_layers=3), tiny_tokenizer(), name="tiny", taps=(0, 1, 2), weights=weights)  # type: ignore[arg-type]
    assert all(isinstance(layer, FusedLayer) for layer in packed._base.layers)
    ids = torch.randint(3, 64, (1, 11))
    whole = packed.read(ids)
    assert close(whole.taps, stock.read(ids).taps, {"fp32": 1e-4, "fp16": 1e-2, "int8": 0.2}[weights])
    cache, read = KVCache(packed.layer_shapes, 2, 20), KVCache(packed.layer_shapes, 2, 20)
    for place in range(11):
        slots = torch.full((2, 1), place)
        both = torch.cat([ids[:, 10 - place : 11 - place], ids[:, place : place + 1]])
        out = packed.forward(both, slots, cache.view(0, 2, slots), torch.ones(2, 1, 1, place + 1, dtype=torch.bool))
        assert torch.equal(out.taps[1], whole.taps[0, place : place + 1])
        assert torch.equal(packed.logits(out.hidden)[1, 0], packed.logits(whole.hidden)[0, place])
    slots = torch.arange(11)[None]
    packed.forward(ids, slots, read.view(1, 1, slots), torch.ones(11, 11, dtype=torch.bool).tril()[None, None])
    cache.lengths[:], read.lengths[:] = 11, 11
    for layer in range(3):
        for one, other in zip(cache.keys_values(layer, 1), read.keys_values(layer, 1), strict=True):
            assert torch.equal(one, other)


def different(module: nn.Module, change: Any) -> nn.Module:
    """`module` with another forward, as a class of the same name."""
    kind = type(module)
    module.__class__ = type(kind.__name__, (kind,), {"forward": change(kind.forward)})
    return module


def test_what_is_done_differently_is_left_alone() -> None:
    def attention(change: Any) -> nn.Module:
        return different(model_of("qwen3").model.layers[0].self_attn, change)

    def clipped(forward: Any) -> Any:
        def changed(self: Any, hidden_states: Tensor, position_embeddings: Any, attention_mask: Any, cache: Any = None) -> Any:
            return forward(self, hidden_states.clamp(-30, 30), position_embeddings, attention_mask, cache=cache)

        return changed

    def without_positions(forward: Any) -> Any:
        def changed(self: Any, hidden_states: Tensor, position_embeddings: Any, attention_mask: Any, cache: Any = None) -> Any:
            cos, sin = position_embeddings
            return forward(self, hidden_states, (torch.ones_like(cos), torch.zeros_like(sin)), attention_mask, cache=cache)

        return changed

    def called_otherwise(forward: Any) -> Any:
        return lambda self, hidden_states, freqs, mask: forward(self, hidden_states, freqs, mask)

    for change in (clipped, without_positions, called_otherwise):
        assert fused_twin(attention(change), "fp32") is None
    stock = model_of("llama")
    stock.set_attn_implementation("sdpa")  # whose masks are not ours
    assert fused_twin(stock.model.layers[0].self_attn, "fp32") is None
    lone = model_of("qwen3").model.layers[0].self_attn
    lone.k_norm = None
    assert fused_twin(lone, "fp32") is None
    mlp = different(model_of("llama").model.layers[0].mlp, lambda forward: lambda self, x: forward(self, x).clamp(-50, 50))
    assert fused_twin(mlp, "fp32") is None
    assert fused_twin(model_of("llama").double().model.layers[0].self_attn, "fp32") is None


@pytest.mark.parametrize(
    ("family", "settings", "kinds"),
    [
        ("granite", {"residual_multiplier": 0.5}, {FusedAttention, FusedMLP, FusedNorm}),
        ("gemma", {}, {FusedAttention}),  # its norm multiplies by 1 + weight, its gate is gelu
        ("olmo2", {}, {FusedMLP, FusedNorm}),  # norms all heads at once
        ("glm", {}, {FusedNorm}),  # turns neighbours, and half of them
        ("cohere", {}, {FusedMLP}),
        ("qwen3_moe", {"num_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": 24}, {FusedAttention, FusedNorm}),
    ],
)
def test_other_families_keep_what_they_do_differently(family: str, settings: dict[str, object], kinds: set[type]) -> None:
    model = model_of(family, **settings)
    ids = torch.randint(3, 64, (2, 7))
    mask = torch.ones(7, 7, dtype=torch.bool).tril()[None, None].expand(2, 1, 7, 7)
    told = {"input_ids": ids, "attention_mask": mask, "use_cache": False}
    before = model(**told).logits
    pack_linears(model, "fp32")
    fused = {type(m) for m in model.model.layers.modules()} & {FusedAttention, FusedLayer, FusedMLP, FusedNorm}
    assert fused == kinds
    assert close(model(**told).logits, before, 1e-4)


def test_a_layer_without_positions_keeps_its_attention() -> None:
    model = model_of("smollm3", no_rope_layers=[1, 0])
    pack_linears(model, "fp32")
    turning, other = model.model.layers
    assert isinstance(turning, FusedLayer)
    assert not isinstance(other, FusedLayer)
    assert not isinstance(other.self_attn, FusedAttention)
    assert isinstance(other.mlp, FusedMLP)


def test_twins_can_be_traced() -> None:
    layer = fused_twin(model_of("qwen3").model.layers[0], "fp16")
    assert isinstance(layer, FusedLayer)
    turns, mask = surroundings(2, 5, 12)
    x = torch.randn(2, 5, 36)
    with torch.inference_mode():
        traced = torch.compile(layer, backend="aot_eager", fullgraph=True)
        assert torch.equal(traced(x, mask, turns), layer(x, mask, turns))
    own, mlp = layer.self_attn, layer.mlp
    heads = (x, *own.qkv.parts, own.q_norm, own.k_norm, own.head_eps, *turns, 4, 2, 12)
    window = (torch.zeros(2, 2, 5, 12), torch.zeros(2, 2, 5, 12), torch.arange(5).expand(2, 5))
    operators = torch.ops.eyas
    for operator, given in (
        (operators.project_heads, heads),
        (operators.gated_mlp, (x, *mlp.parts)),
        (operators.decoder_layer, (x, *turns, mask, *window, *layer.parts)),
    ):
        torch.library.opcheck(operator.default, given, test_utils=("test_schema", "test_faketensor"))


def test_references_are_what_transformers_computes() -> None:
    layer = model_of("qwen3").model.layers[0]
    x = torch.randn(4, 36)
    assert close(usual_norm(layer.input_layernorm, x), layer.input_layernorm(x))
    assert close(usual_mlp(layer.mlp, x), layer.mlp(x))
