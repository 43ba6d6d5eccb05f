"""Heads as others publish them: loaded whole or refused by name, computed as their authors do, given back bit for bit."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor

from eyas.decoding.drafters import Eagle3Drafter
from eyas.errors import EyasError
from eyas.export.engine import Order
from eyas.export.run import ENGINES, export_head
from eyas.heads.eagle3 import Eagle3Head
from eyas.heads.files import load_eagle1_head, load_head, read_checkpoint, save_head, stored_tensors, tap_ids
from eyas.heads.rope import rotate
from eyas.target import Target
from tests.published import (
    DRAFT,
    PUBLISHED,
    WIDTH,
    eagle1,
    eagle1_tensors,
    eagle3_tensors,
    publish,
    randn,
    safeailab,
    speculators,
)
from tests.test_head_options import plain_forward, rms
from tests.test_unroll import random_head, some_texts
from tests.tiny import VOCAB, save_target, tiny_target

Tensors = dict[str, Tensor]
WRITERS = {"safeailab": "authors", "specforge": "vllm", "speculators": "speculators"}  # layout: the export that writes it


def same_bits(a: Tensor, b: Tensor) -> bool:
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(a, b)


def halved(tensors: Tensors, dtype: torch.dtype = torch.float16) -> Tensors:
    return {name: t.to(dtype) if t.is_floating_point() else t for name, t in tensors.items()}


def check_drafting(head: Eagle3Head, target: Target) -> None:
    """What the drafter computes with `head` is what the formulas give."""
    text = some_texts(target)[0]
    taps, tokens = text.float_taps[:-1], text.ids[1:-1]
    drafter = Eagle3Drafter(target, head)
    drafter.allocate(1, 64, 16)
    logits = drafter.extend(tokens[None], taps[None], torch.tensor([len(tokens)]))
    assert torch.allclose(logits[0], plain_forward(head, taps, tokens)[1][-1], atol=1e-4)


@pytest.mark.parametrize("weights", ["model.safetensors", "pytorch_model.bin"])
@pytest.mark.parametrize("layout", PUBLISHED)
def test_every_public_layout_loads_whole_and_drafts(layout: str, weights: str, tmp_path: Path) -> None:
    target = tiny_target("llama")
    config, tensors = PUBLISHED[layout]()
    tensors = halved(tensors)
    publish(tmp_path, config, tensors, weights)
    assert read_checkpoint(tmp_path).layout == layout
    head = load_head(tmp_path, target)
    state = head.state_dict()
    for name, tensor in tensors.items():
        loaded = state[name.replace("layers.0.", "midlayer.")]
        assert torch.equal(loaded, tensor.to(loaded.dtype)), name
    assert head.config.tap_ids == (2, 4, 5)
    assert head.config.norm_before_residual == (layout == "speculators")
    assert head.config.rope["rope_theta"] == {"safeailab": 1e4, "specforge": 1e6}.get(layout, 5e5)
    check_drafting(head, target)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize(("layout", "engine"), WRITERS.items())
def test_a_published_head_is_given_back_bit_for_bit(layout: str, engine: str, dtype: str, tmp_path: Path) -> None:
    target = tiny_target("llama")
    config, tensors = PUBLISHED[layout]()
    tensors = halved(tensors, getattr(torch, dtype))
    head = load_head(publish(tmp_path / "a", config, tensors), target)
    stored = halved(stored_tensors(head), getattr(torch, dtype))
    (tmp_path / "target").mkdir()
    (tmp_path / "target" / "model.safetensors.index.json").write_text("{}")  # where the authors' code finds an embedding
    ENGINES[engine].write(Order(head.config, stored, target, str(tmp_path / "target"), dtype), tmp_path / "b")
    back = read_checkpoint(tmp_path / "b")
    assert back.tensors.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert same_bits(back.tensors[name], tensor), name
    assert load_head(tmp_path / "b", target).config == head.config


@pytest.mark.parametrize("layout", PUBLISHED)
def test_a_published_head_survives_our_own_layout(layout: str, tmp_path: Path) -> None:
    target = tiny_target("llama")
    head = load_head(publish(tmp_path / "a", *PUBLISHED[layout]()), target)
    save_head(head, tmp_path / "b")
    back = load_head(tmp_path / "b", target)
    assert back.config == head.config and read_checkpoint(tmp_path / "b").layout == "eyas"
    assert all(same_bits(back.state_dict()[name], tensor) for name, tensor in head.state_dict().items())


# -- variants ---------------------------------------------------------------------------------------------------------


def biases(layer: str, names: str, sizes: dict[str, int]) -> Tensors:
    return {f"{layer}{name}.bias": randn(sizes[name]) for name in names.split()}


ATTENTION = {"self_attn.q_proj": 64, "self_attn.k_proj": 32, "self_attn.v_proj": 32, "self_attn.o_proj": 64}
ALL = {**ATTENTION, "mlp.gate_proj": 96, "mlp.up_proj": 96, "mlp.down_proj": 64}
QKV = "self_attn.q_proj self_attn.k_proj self_attn.v_proj"
VARIANTS: dict[str, tuple[dict[str, Any], Tensors, dict[str, Any]]] = {
    # what of SafeAILab's is changed in the config, in the tensors, and what our configuration must say
    "an embedding of its own": ({}, {"embed_tokens.weight": randn(VOCAB, WIDTH)}, {"own_embedding": True}),
    "qkv biases": ({"attention_bias": True}, biases("midlayer.", QKV, ATTENTION), {"qkv_bias": True, "o_bias": False}),
    "all biases": (
        {"attention_bias": True, "mlp_bias": True, "bias": True},
        {**biases("midlayer.", " ".join(ALL), ALL), "fc.bias": randn(64)},
        {"qkv_bias": True, "o_bias": True, "mlp_bias": True, "fc_bias": True},
    ),
    "a bias that the config copied from its target": ({"attention_bias": True}, {}, {"qkv_bias": False, "o_bias": False}),
    "head_dim that does not divide": ({"head_dim": 24}, eagle3_tensors("midlayer.", head_dim=24), {"head_dim": 24}),
    "a narrow head": (
        {"hidden_size": 48, "target_hidden_size": WIDTH, "head_dim": 16},
        {**eagle3_tensors("midlayer.", width=48), "embed_tokens.weight": randn(VOCAB, 48)},
        {"hidden_size": 48, "target_hidden_size": WIDTH, "own_embedding": True},
    ),
    "norms of queries and keys": (
        {},
        {"midlayer.self_attn.q_norm.weight": 1 + randn(16), "midlayer.self_attn.k_norm.weight": 1 + randn(16, seed=1)},
        {"qk_norm": True},
    ),
    "EAGLE-3.1": (
        {"fc_norm": True, "norm_output": True},
        {f"fc_norm.{i}.weight": 1 + randn(WIDTH, seed=i) for i in range(3)},
        {"fc_norm": True, "norm_output": True},
    ),
    "the residual normed first": ({"norm_before_residual": True}, {}, {"norm_before_residual": True}),
}  # fmt: skip


@pytest.mark.parametrize("variant", VARIANTS)
def test_variants_load_compute_and_survive(variant: str, tmp_path: Path) -> None:
    target = tiny_target("llama")
    config, tensors = safeailab()
    changed, more, wanted = VARIANTS[variant]
    head = load_head(publish(tmp_path / "a", {**config, **changed}, {**tensors, **more}), target)
    assert {key: getattr(head.config, key) for key in wanted} == wanted
    check_drafting(head, target)
    save_head(head, tmp_path / "b")
    back = load_head(tmp_path / "b", target)
    assert back.config == head.config
    assert all(same_bits(back.state_dict()[name], tensor) for name, tensor in head.state_dict().items())


def test_a_whole_vocabulary_needs_no_maps_and_gets_none(tmp_path: Path) -> None:
    target = tiny_target("llama")
    config, _ = safeailab()
    tensors = eagle3_tensors("midlayer.", draft=VOCAB)
    zeros = {"d2t": torch.zeros(VOCAB, dtype=torch.long), "t2d": torch.ones(VOCAB, dtype=torch.bool)}
    for name, maps in {"without": {}, "with": zeros}.items():  # with zeros, as some Vicuna heads have them
        head = load_head(publish(tmp_path / name, {**config, "draft_vocab_size": VOCAB}, {**tensors, **maps}), target)
        assert torch.equal(head.draft_ids(head.d2t), torch.arange(VOCAB)) and bool(head.t2d.all())
        save_head(head, tmp_path / "saved")
        assert read_checkpoint(tmp_path / "saved").tensors.keys() == tensors.keys()
    reduced = publish(tmp_path / "no-size", {k: v for k, v in config.items() if k != "draft_vocab_size"}, safeailab()[1])
    assert load_head(reduced, target).config.draft_vocab_size == DRAFT


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_embedding_that_is_the_targets_is_shared(dtype: torch.dtype, tmp_path: Path) -> None:
    target = tiny_target("llama")
    config, tensors = safeailab()
    head = load_head(publish(tmp_path, config, {**tensors, "embed_tokens.weight": target.embedding.to(dtype)}), target)
    assert not head.config.own_embedding and head.embedding.data_ptr() == target.embedding.data_ptr()


# -- rope and taps ----------------------------------------------------------------------------------------------------

LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 128}
ROPES: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({}, {"rope_type": "default", "rope_theta": 1e4}),  # not the target's 1e6
    ({"rope_theta": 500000}, {"rope_type": "default", "rope_theta": 5e5}),
    ({"rope_theta": 5e5, "rope_scaling": None}, {"rope_type": "default", "rope_theta": 5e5}),
    ({"rope_scaling": {"type": "linear", "factor": 2.0}}, {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}),
    (
        {"rope_theta": 5e5, "rope_scaling": {"rope_type": "llama3", **LLAMA3}},
        {"rope_type": "llama3", "rope_theta": 5e5, **LLAMA3},
    ),
    ({"rope_parameters": {"rope_type": "default", "rope_theta": 7.0}}, {"rope_type": "default", "rope_theta": 7.0}),
    (
        {"rope_parameters": {"rope_type": "llama3", "rope_theta": 5e5, **LLAMA3}, "rope_theta": 5e5,
         "rope_scaling": {"type": "llama3", **LLAMA3}},
        {"rope_type": "llama3", "rope_theta": 5e5, **LLAMA3},
    ),
    (
        {"rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 3.0}, "sliding_attention": {}}},
        {"rope_type": "default", "rope_theta": 3.0},
    ),
]  # fmt: skip


@pytest.mark.parametrize(("keys", "wanted"), ROPES)
def test_rope_is_read_in_both_forms_and_never_borrowed(keys: dict[str, Any], wanted: dict[str, Any], tmp_path: Path) -> None:
    target = tiny_target("qwen3")
    config, tensors = safeailab()
    head = load_head(publish(tmp_path / "a", {**config, **keys}, tensors), target)
    assert head.config.rope == wanted
    save_head(head, tmp_path / "b")
    assert load_head(tmp_path / "b", target).config.rope == wanted


TAPS: list[tuple[dict[str, Any], tuple[int, ...]]] = [
    ({}, (2, 4, 5)),
    ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": []}}, (2, 4, 5)),
    ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 2, 6]}}, (1, 3, 7)),
    ({"eagle_aux_hidden_state_layer_ids": [1, 3, 7]}, (1, 3, 7)),
    (
        {"eagle_aux_hidden_state_layer_ids": [1, 3, 7], "eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 2, 6]}},
        (1, 3, 7),
    ),
]  # fmt: skip


@pytest.mark.parametrize(("keys", "wanted"), TAPS)
def test_taps_are_read_in_both_conventions(keys: dict[str, Any], wanted: tuple[int, ...], tmp_path: Path) -> None:
    tiny = tiny_target("llama")
    target = Target(tiny.model, tiny.tokenizer, name="tapped", taps=wanted)
    config, tensors = safeailab()
    assert load_head(publish(tmp_path, {**config, **keys}, tensors), target).config.tap_ids == wanted
    assert tap_ids(tmp_path) == (None if wanted == (2, 4, 5) else wanted)


def test_heads_of_different_taps_do_not_share_a_target(tmp_path: Path) -> None:
    config, tensors = safeailab()
    for name, ids in {"a": None, "b": [1, 3, 7], "c": [1, 3, 6]}.items():
        publish(tmp_path / name, {**config, "eagle_aux_hidden_state_layer_ids": ids}, tensors)
    assert tap_ids() is None and tap_ids(tmp_path / "a", tmp_path / "b") == (1, 3, 7)
    with pytest.raises(EyasError, match=r"taps \[1, 3, 7\] and .*c \[1, 3, 6\]"):
        tap_ids(tmp_path / "a", tmp_path / "b", tmp_path / "c")


# -- what is refused --------------------------------------------------------------------------------------------------


def without(name: str) -> Callable[[dict[str, Any], Tensors], None]:
    return lambda config, tensors: tensors.__delitem__(name)


def having(**keys: Any) -> Callable[[dict[str, Any], Tensors], None]:
    return lambda config, tensors: config.update(keys)


def also(name: str, tensor: Tensor) -> Callable[[dict[str, Any], Tensors], None]:
    return lambda config, tensors: tensors.update({name: tensor})


SWA = {**speculators()[0]["transformer_layer_config"], "layer_types": ["sliding_attention"]}
QWEN3 = {**speculators()[0]["transformer_layer_config"], "model_type": "qwen3"}
BIASED = {**speculators()[0]["transformer_layer_config"], "attention_bias": True}
REFUSED: dict[str, tuple[str, Callable[[dict[str, Any], Tensors], None], str]] = {
    "a lost norm": ("safeailab", without("midlayer.hidden_norm.weight"), "lacks the tensor 'midlayer.hidden_norm.weight'"),
    "a lost norm elsewhere": ("modelopt", without("layers.0.hidden_norm.weight"), "lacks the tensor 'layers.0.hidden_norm"),
    "a lost map": ("modelopt", without("d2t"), "no tensor 'd2t'"),
    "one bias of three": ("safeailab", also("midlayer.self_attn.k_proj.bias", randn(32)), "lacks the tensor"),
    "a tensor too many": ("specforge", also("midlayer.rotary.inv_freq", randn(8)), "'midlayer.rotary.inv_freq'"),
    "a second layer": ("specforge", also("layers.1.norm.weight", randn(8)), "'layers.1.norm.weight'"),
    "a layer twice": ("modelopt", also("midlayer.hidden_norm.weight", randn(64)), "the same one twice"),
    "a quantised weight": ("modelopt", also("fc.weight", torch.zeros(64, 192, dtype=torch.int8)), "torch.int8"),
    "quantised": ("modelopt", having(quantization_config={"quant_method": "fp8"}), "quantization_config"),
    "a map of another size": ("safeailab", also("t2d", torch.ones(7, dtype=torch.bool)), "t2d"),
    "ids that disagree": (
        "specforge", having(eagle_aux_hidden_state_layer_ids=[1, 3, 4]), "in eagle_config [1, 3, 4], where it must be one less",
    ),
    "two ids": ("specforge", having(eagle_config={"eagle_aux_hidden_state_layer_ids": [1, 3]}), "three distinct"),
    "bases that disagree": ("specforge", having(rope_parameters={"rope_theta": 5e5}), "two rotary bases"),
    "scalings that disagree": (
        "safeailab", having(rope_parameters={"rope_type": "default"}, rope_scaling={"type": "linear", "factor": 2.0}),
        "contradict each other",
    ),
    "a partial rope": ("safeailab", having(partial_rotary_factor=0.5), "partial_rotary_factor"),
    "an unknown rope": ("safeailab", having(rope_scaling={"type": "dynamic", "factor": 2.0}), "'dynamic'"),
    "one norm over all taps": ("speculators", having(norm_before_fc=True), "norm_before_fc"),
    "another activation": ("safeailab", having(hidden_act="gelu"), "hidden_act"),
    "a sliding window": ("speculators", having(transformer_layer_config=SWA), "sliding window"),
    "an unsaid residual": ("speculators", having(norm_before_residual=None), "norm_before_residual is not given"),
    "another speculator": ("speculators", having(speculators_model_type="mtp"), "'mtp'"),
    "no layer": ("speculators", having(transformer_layer_config=None), "transformer_layer_config"),
    "lost norms": ("speculators", having(transformer_layer_config=QWEN3), "layers.0.self_attn.q_norm.weight"),
    "lost biases": ("speculators", having(transformer_layer_config=BIASED), "layers.0.self_attn.q_proj.bias"),
    "no taps": ("modelopt", lambda c, t: c["eagle_config"].update(use_aux_hidden_state=False), "use_aux_hidden_state"),
    "parallel heads": ("modelopt", lambda c, t: c["eagle_config"].update(parallel_draft_step=4), "parallel_draft_step"),
    "a borrowed narrow embedding": ("safeailab", having(hidden_size=48, target_hidden_size=64), "embed_tokens.weight"),
    "another target's width": ("safeailab", having(hidden_size=96), "another target (unnamed): its hidden width"),
    "another vocabulary": ("speculators", lambda c, t: c["transformer_layer_config"].update(vocab_size=170), "someone/tiny"),
    "no sizes": ("safeailab", lambda c, t: c.__delitem__("intermediate_size"), "intermediate_size: Field required"),
}  # fmt: skip


@pytest.mark.parametrize("fault", REFUSED)
def test_what_cannot_be_read_whole_is_refused_in_one_line(fault: str, tmp_path: Path) -> None:
    layout, break_it, told = REFUSED[fault]
    config, tensors = PUBLISHED[layout]()
    if fault == "a borrowed narrow embedding":
        tensors = eagle3_tensors("midlayer.", width=48)
    break_it(config, tensors)
    publish(tmp_path, config, tensors)
    with pytest.raises(EyasError) as caught:
        load_head(tmp_path, tiny_target("llama"))
    assert told in str(caught.value) and "\n" not in str(caught.value), str(caught.value)


class Payload:
    """What a pickle would run when it is opened."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.mark),)


def test_a_pickle_is_never_executed(tmp_path: Path) -> None:
    config, tensors = safeailab()
    mark = tmp_path / "ran"
    publish(tmp_path / "head", config, {**tensors, "norm.weight": Payload(mark)}, "pytorch_model.bin")  # type: ignore[dict-item]
    with pytest.raises(EyasError, match="code") as caught:
        load_head(tmp_path / "head", tiny_target("llama"))
    assert not mark.exists() and "\n" not in str(caught.value)
    torch.load(tmp_path / "head" / "pytorch_model.bin", weights_only=False)
    assert mark.exists()  # the pickle was a real one
    for content in (b"", b"PK\x03\x04 cut", b"no pickle"):
        (tmp_path / "head" / "pytorch_model.bin").write_bytes(content)
        with pytest.raises(EyasError, match="pytorch_model"):
            load_head(tmp_path / "head", tiny_target("llama"))


# -- shards -----------------------------------------------------------------------------------------------------------


def shard(folder: Path, index: bool, suffix: str = ".safetensors") -> list[Path]:
    """Split the weights of a head or a model in three, as `save_pretrained` names them."""
    whole = folder / "model.safetensors"
    tensors = load_file(whole)
    names, stem = sorted(tensors), "model" if suffix == ".safetensors" else "pytorch_model"
    files = [folder / f"{stem}-{i + 1:05}-of-00003{suffix}" for i in range(3)]
    for i, path in enumerate(files):
        part = {name: tensors[name] for name in names[i::3]}
        if suffix == ".safetensors":
            save_file(part, path, metadata={"format": "pt"})
        else:
            torch.save(part, path)
    if index:
        weight_map = {name: files[i % 3].name for i, name in enumerate(names)}
        (folder / f"{stem}{suffix}.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    whole.unlink()
    return files


@pytest.mark.parametrize("suffix", [".safetensors", ".bin"])
@pytest.mark.parametrize("index", [True, False])
def test_shards_are_one_head(index: bool, suffix: str, tmp_path: Path) -> None:
    target = tiny_target("llama")
    whole = load_head(publish(tmp_path, *safeailab()), target).state_dict()
    shard(tmp_path, index, suffix)
    assert all(same_bits(load_head(tmp_path, target).state_dict()[name], tensor) for name, tensor in whole.items())


def test_incomplete_shards_are_refused_by_name(tmp_path: Path) -> None:
    target = tiny_target("llama")

    def fault(break_it: Callable[[Path, list[Path]], object], index: bool = True) -> str:
        folder = tmp_path / "head"
        shutil.rmtree(folder, ignore_errors=True)
        publish(folder, *safeailab())
        break_it(folder, shard(folder, index))
        with pytest.raises(EyasError) as caught:
            load_head(folder, target)
        assert "\n" not in str(caught.value)
        return str(caught.value)

    def unnamed(folder: Path, files: list[Path]) -> None:
        save_file({"fc.weight": randn(2)}, files[1])

    index = "model.safetensors.index.json"
    assert "names the file 'model-00002-of-00003.safetensors'" in fault(lambda folder, files: files[1].unlink())
    assert "number 2 of 3 is missing" in fault(lambda folder, files: files[1].unlink(), index=False)
    assert "two sets of shards" in fault(lambda f, files: shutil.copy(files[0], f / "model-00001-of-00001.safetensors"), False)
    assert "two shards hold the tensor" in fault(lambda folder, files: shutil.copy(files[0], files[1]))
    assert "which its files do not hold" in fault(unnamed)
    assert "no weight_map" in fault(lambda folder, files: (folder / index).write_text("{}"))
    outside = json.dumps({"weight_map": {"fc.weight": "../elsewhere.safetensors"}})
    assert "same folder" in fault(lambda folder, files: (folder / index).write_text(outside))


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("index", [None, True, False])
def test_targets_in_shards_tied_and_untied(
    index: bool | None, tied: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EYAS_CACHE", str(tmp_path / "cache"))
    tiny = tiny_target("qwen2" if tied else "llama")
    save_target(tiny, tmp_path / "model")
    if index is not None:
        shard(tmp_path / "model", index)
    target = Target.load(tmp_path / "model")
    assert target.fingerprint == tiny.fingerprint
    assert torch.equal(target.lm_head_weight, tiny.lm_head_weight)
    assert (target.lm_head_weight.data_ptr() == target.embedding.data_ptr()) == tied
    ids = torch.arange(3, 20)[None]
    assert torch.equal(target.read(ids).taps, tiny.read(ids).taps)
    head = random_head(target)
    save_head(head, tmp_path / "head")
    back = load_head(tmp_path / "head", target)
    assert back.config == head.config
    assert all(same_bits(back.state_dict()[name], tensor) for name, tensor in head.state_dict().items())
    assert bool(list((tmp_path / "model").glob("*.index.json"))) == bool(index)  # the user's folder is left as it was


def test_a_target_that_lacks_a_shard_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EYAS_CACHE", str(tmp_path / "cache"))
    tiny = tiny_target("llama")
    save_target(tiny, tmp_path / "model")
    shard(tmp_path / "model", index=False)[1].unlink()
    with pytest.raises(EyasError, match="number 2 of 3 is missing"):
        Target.load(tmp_path / "model")


@pytest.mark.real
def test_a_head_on_a_gguf_target_is_saved_loaded_and_exported(tmp_path: Path) -> None:
    target = Target.load("smollm2")
    head = random_head(target, draft_vocab=64)
    save_head(head, tmp_path / "head")
    back = load_head(tmp_path / "head", target)
    assert back.config == head.config
    assert all(same_bits(back.state_dict()[name], tensor) for name, tensor in head.state_dict().items())
    readme = (export_head(tmp_path / "head", target, "vllm", tmp_path / "out") / "README.md").read_text()
    served = readme.split("--model ")[1].split()[0]
    assert (Path(served) / "config.json").is_file()  # a folder that an engine can load, not the GGUF file


# -- EAGLE-1 ----------------------------------------------------------------------------------------------------------

EAGLE1: dict[str, tuple[dict[str, Any], Tensors]] = {
    "vicuna": ({}, eagle1_tensors()),
    "llama3": ({"bias": False, "rope_theta": 500000.0}, eagle1_tensors(bias=False)),
    "qwen2": (
        {"bias": True, "qkv_bias": True}, {**eagle1_tensors(), **biases("layers.0.", QKV, ATTENTION)},
    ),
}  # fmt: skip


@pytest.mark.parametrize("kind", EAGLE1)
def test_an_eagle1_head_loads_computes_and_survives(kind: str, tmp_path: Path) -> None:
    target = tiny_target("llama")
    keys, tensors = EAGLE1[kind]
    tensors = halved(tensors)
    head = load_eagle1_head(publish(tmp_path / "a", {**eagle1()[0], **keys}, tensors, "pytorch_model.bin"), target)
    state = head.state_dict()
    assert state.keys() == tensors.keys() and all(torch.equal(state[n], t.float()) for n, t in tensors.items())
    assert head.config.rope["rope_theta"] == keys.get("rope_theta", 1e4)

    def linear(x: Tensor, name: str) -> Tensor:
        return x @ state[f"{name}.weight"].T + state.get(f"{name}.bias", torch.zeros(()))

    ids = torch.arange(3, 20)
    features, tokens, positions = target.read(ids[None]).hidden[0, :-1], ids[1:], torch.arange(16)
    x = linear(torch.cat([state["embed_tokens.weight"][tokens], features], -1), "fc")  # written from cnets1.Model.forward
    layer = "layers.0.self_attn."
    q, k, v = (linear(x, f"{layer}{name}_proj").view(16, -1, 16) for name in "qkv")
    q, k = (rotate(t, positions, head.inverse_frequencies).transpose(0, 1) for t in (q, k))
    attended = F.scaled_dot_product_attention(q, k, v.transpose(0, 1), is_causal=True, enable_gqa=True).transpose(0, 1)
    s = x + linear(attended.flatten(1), f"{layer}o_proj")
    y = rms(s, state["layers.0.post_attention_layernorm.weight"])
    mlp = linear(F.silu(linear(y, "layers.0.mlp.gate_proj")) * linear(y, "layers.0.mlp.up_proj"), "layers.0.mlp.down_proj")

    fused, residual = head.read(0, head.fuse(features), tokens)
    keys_, values = head.keys_values(0, fused, positions)
    queries = head.queries(0, fused, positions).transpose(0, 1)
    keys_, values = keys_.transpose(0, 1), values.transpose(0, 1)
    own = F.scaled_dot_product_attention(queries, keys_, values, is_causal=True, enable_gqa=True)
    predicted = head.finish(0, residual, own.transpose(0, 1))
    assert torch.allclose(predicted, s + mlp, atol=1e-4)
    assert torch.allclose(head.logits(predicted), target.logits(predicted), atol=1e-4)

    save_head(head, tmp_path / "b")
    back = load_eagle1_head(tmp_path / "b", target)
    assert back.config == head.config
    assert all(same_bits(back.state_dict()[name], tensor) for name, tensor in state.items())


def test_eagle1_and_eagle3_are_not_taken_for_each_other(tmp_path: Path) -> None:
    target = tiny_target("llama")
    publish(tmp_path / "one", *eagle1())
    publish(tmp_path / "three", *safeailab())
    with pytest.raises(EyasError, match="holds an EAGLE-1 head"):
        load_head(tmp_path / "one", target)
    with pytest.raises(EyasError, match="holds no EAGLE-1 head"):
        load_eagle1_head(tmp_path / "three", target)
    for change, told in (
        ({"vocab_size": 170}, "vocabulary"),
        ({"hidden_size": 32}, "hidden width"),
        ({"num_hidden_layers": 2}, "2 layers"),
    ):
        publish(tmp_path / "one", {**eagle1()[0], **change}, eagle1_tensors())
        with pytest.raises(EyasError, match=told):
            load_eagle1_head(tmp_path / "one", target)
    publish(tmp_path / "one", eagle1()[0], {**eagle1_tensors(), "norm.weight": randn(64)})
    with pytest.raises(EyasError, match=r"norm\.weight"):
        load_eagle1_head(tmp_path / "one", target)
