"""The kernels are right, and a row's bits depend on nothing but the row: not on batch, siblings, layout or threads."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM

from eyas.errors import EyasError
from eyas.kernels.attention import attend
from eyas.kernels.build import kernels_ready
from eyas.kernels.fused import FusedMLP, FusedNorm
from eyas.kernels.linear import PackedLinear
from eyas.kernels.packed import pack_linears

PACKINGS = ["fp32", "fp16", "int8"]
needs_kernels = pytest.mark.skipif(not kernels_ready(), reason="the kernels need a C++ compiler")


@pytest.fixture(autouse=True)
def _threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def linear(inputs: int, outputs: int, *, bias: bool = True, seed: int = 0) -> nn.Linear:
    torch.manual_seed(seed)
    return nn.Linear(inputs, outputs, bias=bias)


def packed_like(layer: nn.Linear, weights: str) -> PackedLinear:
    return PackedLinear(layer.weight, layer.bias, weights)  # type: ignore[arg-type]


def close(got: Tensor, want: Tensor, tolerance: float) -> bool:
    return bool((got.double() - want.double()).abs().max() <= tolerance * (1 + want.abs().max()))


# -- products ---------------------------------------------------------------------------------------------------------


@needs_kernels
@pytest.mark.parametrize("weights", PACKINGS)
@pytest.mark.parametrize(("inputs", "outputs"), [(1, 1), (7, 5), (8, 16), (33, 49), (300, 70), (64, 160)])
def test_product_equals_the_float64_reference(weights: str, inputs: int, outputs: int) -> None:
    layer = linear(inputs, outputs)
    packed = packed_like(layer, weights)
    steps = {"fp32": 0.0, "fp16": 2**-11, "int8": 0.5 / 127}[weights]  # rounding, of the row's largest
    largest = layer.weight.abs().amax(dim=1, keepdim=True)
    assert bool(((packed.weight - layer.weight).abs() <= steps * largest + 1e-7).all())
    for rows in (1, 2, 3, 4, 7, 13, 40):
        x = torch.randn(rows, inputs)
        want = x.double() @ packed.weight.double().T + layer.bias.double()
        assert close(packed(x), want, 2e-6)


@needs_kernels
@pytest.mark.parametrize("weights", PACKINGS)
@pytest.mark.parametrize(("inputs", "outputs"), [(31, 50), (300, 70)])
def test_a_row_has_the_same_bits_at_every_row_count_and_thread_count(weights: str, inputs: int, outputs: int) -> None:
    packed = packed_like(linear(inputs, outputs), weights)
    x = torch.randn(1200, inputs)
    torch.set_num_threads(1)
    alone = torch.cat([packed(x[i : i + 1]) for i in range(len(x))])
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        for rows in [*range(1, 71), 333, 1200]:  # beyond a row block of L2 as well
            assert torch.equal(packed(x[:rows]), alone[:rows])
            assert torch.equal(packed(x[-rows:]), alone[-rows:])


@needs_kernels
@settings(max_examples=60, deadline=None)
@given(
    inputs=st.integers(1, 80), outputs=st.integers(1, 80), rows=st.integers(1, 70), start=st.integers(0, 69),
    weights=st.sampled_from(PACKINGS), bias=st.booleans(),
)  # fmt: skip
def test_any_slice_of_the_rows_gives_a_slice_of_the_result(
    inputs: int, outputs: int, rows: int, start: int, weights: str, bias: bool
) -> None:
    packed = packed_like(linear(inputs, outputs, bias=bias, seed=inputs), weights)
    x = torch.randn(rows, inputs)
    start = min(start, rows - 1)
    assert torch.equal(packed(x)[start:], packed(x[start:]))


@needs_kernels
def test_shapes_layouts_and_empty_input() -> None:
    packed = packed_like(linear(24, 20), "fp32")
    x = torch.randn(3, 5, 24)
    flat = packed(x.reshape(15, 24))
    assert torch.equal(packed(x), flat.view(3, 5, 20))
    assert torch.equal(packed(x.transpose(0, 1)), flat.view(3, 5, 20).transpose(0, 1))
    assert torch.equal(packed(x[0, 0]), flat[0])
    assert packed(x[:0]).shape == (0, 5, 20)
    with pytest.raises(RuntimeError, match="24 input features expected"):
        packed(torch.randn(2, 23))
    with pytest.raises(RuntimeError, match="float32 activations"):
        packed(torch.randn(2, 24, dtype=torch.float64))


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(40, 24)
        self.inner = nn.Sequential(nn.Linear(24, 24), nn.SiLU())
        self.again = self.inner
        self.head = nn.Linear(24, 40, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.inner(self.embedding(ids)))


@needs_kernels
@pytest.mark.parametrize("weights", PACKINGS)
def test_packing_a_model_keeps_its_tied_embedding_and_its_outputs(weights: str) -> None:
    model = Tied().eval().requires_grad_(False)
    ids = torch.arange(12).view(3, 4)
    before, table = model(ids), model.embedding.weight.clone()
    report = pack_linears(model, weights)
    assert (report.weights, report.products, report.left, report.row_invariant) == (weights, 2, (), True)
    assert report.bytes == (32 * 24 + 48 * 24) * {"fp32": 4, "fp16": 2, "int8": 1}[weights]
    assert model.again[0] is model.inner[0]
    assert torch.equal(model.embedding.weight, table)
    assert (model.head.in_features, model.head.out_features, model.head.bias) == (24, 40, None)
    assert close(model(ids), before, {"fp32": 1e-6, "fp16": 1e-3, "int8": 2e-2}[weights])


@needs_kernels
def test_what_cannot_be_packed_is_said() -> None:
    with pytest.raises(EyasError, match="unknown weight packing 'int4'"):
        pack_linears(Tied(), "int4")  # type: ignore[arg-type]
    with pytest.raises(EyasError, match="packs float32 models"):
        pack_linears(Tied().bfloat16(), "fp32")
    large = Tied()
    large.inner[0].weight.data[3, 2] = 1e5
    with pytest.raises(EyasError, match="too large for 'fp16'"):
        pack_linears(large, "fp16")
    with pytest.raises(EyasError, match="inference only"):
        packed_like(linear(8, 8), "fp32")(torch.randn(1, 8, requires_grad=True))
    stock = Tied()
    assert pack_linears(stock, "stock").row_invariant is False
    assert type(stock.head) is nn.Linear


def test_without_kernels_the_model_stays_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("eyas.kernels.packed.kernels_ready", lambda: False)
    model = Tied()
    assert pack_linears(model, "fp16").weights == "stock"
    assert type(model.head) is nn.Linear


# -- attention --------------------------------------------------------------------------------------------------------


def problem(
    batch: int, heads: int, kv_heads: int, queries: int, keys: int, dim: int, value_dim: int, seed: int = 0
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Random q, k, v and a mask with at least one allowed key a query; k and v are views of a longer cache."""
    torch.manual_seed(seed)
    q = torch.randn(batch, queries, heads, dim).transpose(1, 2)
    k = torch.randn(batch, kv_heads, keys + 9, dim)[:, :, 3 : keys + 3]
    v = torch.randn(batch, kv_heads, keys + 9, value_dim)[:, :, 3 : keys + 3]
    mask = torch.rand(batch, 1, queries, keys) < 0.6
    mask[..., 0] |= ~mask.any(dim=-1)
    return q, k, v, mask


def reference(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scale: float) -> Tensor:
    """Attention in float64 by definition; q [B, Hq, Q, D] -> [B, Q, Hq, Dv]."""
    groups = q.shape[1] // k.shape[1]
    k, v = (t.double().repeat_interleave(groups, dim=1) for t in (k, v))
    scores = (scale * q.double() @ k.transpose(-1, -2)).masked_fill(~mask, -torch.inf)
    return (scores.softmax(dim=-1) @ v).transpose(1, 2)


@settings(max_examples=60, deadline=None)
@given(
    batch=st.integers(1, 3), kv_heads=st.integers(1, 3), group=st.integers(1, 8), queries=st.integers(1, 20),
    keys=st.integers(1, 150), dim=st.integers(1, 70), value_dim=st.integers(1, 70),
)  # fmt: skip
def test_attention_equals_the_float64_reference(
    batch: int, kv_heads: int, group: int, queries: int, keys: int, dim: int, value_dim: int
) -> None:
    q, k, v, mask = problem(batch, kv_heads * group, kv_heads, queries, keys, dim, value_dim, seed=keys)
    assert close(attend(q, k, v, mask, dim**-0.5), reference(q, k, v, mask, dim**-0.5), 1e-5)


@pytest.mark.parametrize("kernels", [pytest.param(True, marks=needs_kernels), False])
def test_attention_equals_sdpa_for_broadcast_masks_and_large_scores(kernels: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("eyas.kernels.attention.kernels_ready", lambda: kernels)
    q, k, v, _ = problem(2, 6, 2, 30, 30, 16, 16)
    causal = torch.ones(30, 30, dtype=torch.bool).tril()[None, None]
    want = nn.functional.scaled_dot_product_attention(q * 20, k, v, is_causal=True, enable_gqa=True).transpose(1, 2)
    assert close(attend(q * 20, k, v, causal, 16**-0.5), want, 1e-5)
    nothing = attend(q, k, v, torch.zeros(1, 1, 1, 30, dtype=torch.bool), 1.0)
    assert nothing.shape == (2, 30, 6, 16)
    assert not nothing.any()


@needs_kernels
@pytest.mark.parametrize("threads", [1, 2, 3])
@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(9, 3, 64), (4, 1, 24), (8, 1, 13), (2, 2, 32)])
def test_gaps_batch_queries_and_threads_leave_no_trace(heads: int, kv_heads: int, dim: int, threads: int) -> None:
    batch, queries, keys = 3, 17, 200
    q, k, v, mask = problem(batch, heads, kv_heads, queries, keys, dim, dim)
    torch.set_num_threads(threads)
    together = attend(q, k, v, mask, dim**-0.5)
    torch.set_num_threads(1)
    for b in range(batch):
        for i in range(queries):
            allowed = mask[b, 0, i].nonzero()[:, 0]
            one_q, one_k, one_v = q[b : b + 1, :, i : i + 1], k[b : b + 1, :, allowed], v[b : b + 1, :, allowed]
            everything = torch.ones(1, 1, 1, len(allowed), dtype=torch.bool)
            assert torch.equal(attend(one_q, one_k, one_v, everything, dim**-0.5)[0, 0], together[b, i])


@needs_kernels
def test_a_tree_node_gets_the_bits_of_its_path() -> None:
    """Prompt of 70, then a root with two children and two grandchildren, against plain decoding of one path."""
    q, k, v, _ = problem(1, 6, 2, 5, 75, 32, 32)
    parent = [-1, 0, 0, 1, 2]
    mask = torch.zeros(1, 1, 5, 75, dtype=torch.bool)
    mask[..., :70] = True
    for node in range(5):
        at = node
        while at >= 0:
            mask[0, 0, node, 70 + at] = True
            at = parent[at]
    tree = attend(q, k, v, mask, 0.2)
    path = [0, 2, 4]
    kept = [*range(70), *(70 + node for node in path)]
    for depth, node in enumerate(path):
        seen = torch.ones(1, 1, 1, 71 + depth, dtype=torch.bool)
        plain = attend(q[:, :, node : node + 1], k[:, :, kept[: 71 + depth]], v[:, :, kept[: 71 + depth]], seen, 0.2)
        assert torch.equal(plain[:, 0], tree[:, node])


@needs_kernels
def test_attention_names_what_does_not_fit() -> None:
    q, k, v, mask = problem(1, 4, 2, 3, 10, 8, 8)
    with pytest.raises(RuntimeError, match="shapes do not fit"):
        attend(q, k[:, :, :9], v, mask, 1.0)
    with pytest.raises(RuntimeError, match="mask bool"):
        attend(q, k, v, mask.float(), 1.0)


# -- norms and gates ---------------------------------------------------------------------------------------------------


def tiny_llama(family: str) -> nn.Module:
    common = {
        "vocab_size": 64, "hidden_size": 36, "intermediate_size": 50, "num_hidden_layers": 2, "num_attention_heads": 3,
        "num_key_value_heads": 1, "head_dim": 12, "tie_word_embeddings": True,
    }  # fmt: skip
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **common))
    for name, parameter in model.named_parameters():
        if "norm" in name:
            parameter.data.uniform_(0.5, 1.5)
    return model.eval().requires_grad_(False)


@needs_kernels
@pytest.mark.parametrize(("family", "fused"), [("llama", 8), ("qwen2", 8), ("qwen3", 12), ("gemma", 1)])
def test_a_packed_model_agrees_with_the_stock_one(family: str, fused: int) -> None:
    model = tiny_llama(family)
    ids = torch.randint(0, 64, (2, 9))
    before, table = model(ids).logits, model.get_input_embeddings().weight.clone()
    report = pack_linears(model, "fp32")
    assert (report.fused, report.left, report.row_invariant) == (fused, (), True)
    assert torch.equal(model.get_input_embeddings().weight, table)
    assert close(model(ids).logits, before, 1e-5)


@needs_kernels
@pytest.mark.parametrize("width", [1, 24, 577])
def test_norms_and_gates_are_right_and_their_rows_alone(width: int) -> None:
    torch.manual_seed(width)
    x = torch.randn(300, 2, width) * 3
    norm = FusedNorm(nn.Parameter(torch.rand(width), requires_grad=False), 1e-6)
    want = norm.weight.double() * x.double() / (x.double().square().mean(-1, keepdim=True) + 1e-6).sqrt()
    assert close(norm(x), want, 2e-6)
    mlp = FusedMLP(linear(width, 19), linear(width, 19, seed=1), linear(19, width, seed=2), "fp32")
    gate, up = (half.flatten(-2)[..., :19] for half in mlp.gate_up(x).double().unflatten(-1, (2, 2, 16)).unbind(-2))
    want = nn.functional.silu(gate) * up @ mlp.down.weight.double().T + mlp.down.bias.double()
    assert close(mlp(x), want, 2e-6)
    for module in (norm, mlp):
        torch.set_num_threads(1)
        alone = torch.cat([module(x[i : i + 1]) for i in range(len(x))])
        for threads in (2, 5):
            torch.set_num_threads(threads)
            assert torch.equal(module(x), alone)
            assert torch.equal(module(x[7:40]), alone[7:40])


@needs_kernels
def test_gates_at_extreme_values() -> None:
    gate = torch.tensor([-1e30, -100.0, -88.5, -1e-20, 0.0, 88.5, 100.0, 1e30])
    same, ones = nn.Linear(8, 8), nn.Linear(8, 8)
    for layer, weight, bias in ((same, torch.eye(8), 0.0), (ones, torch.zeros(8, 8), 1.0)):
        layer.weight.data, layer.bias.data = weight, torch.full((8,), bias)
    got = FusedMLP(same, ones, same, "fp32")(gate)
    assert torch.allclose(got, nn.functional.silu(gate), rtol=1e-6, atol=1e-8)


# -- both -------------------------------------------------------------------------------------------------------------


@needs_kernels
def test_both_operators_can_be_traced() -> None:
    layer = packed_like(linear(24, 20), "int8")
    q, k, v, mask = problem(2, 4, 2, 3, 10, 8, 6)

    def step(x: Tensor) -> tuple[Tensor, Tensor]:
        return layer(x) * 2, attend(q, k, v, mask, 0.3)

    x = torch.randn(2, 3, 24)
    traced = torch.compile(step, backend="aot_eager", fullgraph=True)
    with torch.inference_mode():
        for got, want in zip(traced(x), step(x), strict=True):
            assert torch.equal(got, want)
    for operator, given_ in (
        (torch.ops.eyas.packed_linear, (x, layer.packed, layer.scale, layer.bias, None, 20)),
        (torch.ops.eyas.attend, (q, k, v, mask, 0.3)),
    ):
        torch.library.opcheck(operator.default, given_, test_utils=("test_schema", "test_faketensor"))
