"""Heads on disk and their vocabulary: bit-equal round trips, and one clear line for everything that does not fit."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

from eyas.decoding.drafters import Eagle3Drafter
from eyas.errors import EyasError
from eyas.heads.eagle3 import Eagle3Head
from eyas.heads.files import head_hash, load_head, save_head
from eyas.heads.rope import inverse_frequencies, rotate
from eyas.heads.start import new_head
from eyas.heads.vocab import choose_vocabulary, count_tokens, coverage
from eyas.shards import SAFETENSORS as WEIGHTS
from eyas.target import Target, default_taps
from tests.test_unroll import FAMILIES, random_head
from tests.tiny import FAMILIES as SHAPES
from tests.tiny import SHAPE, VOCAB, tiny_target, tiny_tokenizer


@pytest.mark.parametrize("family", FAMILIES)
def test_a_saved_head_comes_back_bit_equal(family: str, tmp_path: Path) -> None:
    target = tiny_target(family)
    head = random_head(target)
    save_head(head, tmp_path)
    back = load_head(tmp_path, target)
    assert back.config == head.config
    for name, tensor in head.state_dict().items():
        assert torch.equal(back.state_dict()[name], tensor), name
    first = head_hash(tmp_path)
    Eagle3Drafter(target, back, weights="fp16")  # packs a copy
    save_head(back, tmp_path)
    assert head_hash(tmp_path) == first


def other_target(**changes: int) -> Target:
    config = AutoConfig.for_model("llama", **{**SHAPE, **SHAPES["llama"], **changes})
    return Target(AutoModelForCausalLM.from_config(config), tiny_tokenizer(), name="other")


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"hidden_size": 32}, "hidden width"),
        ({"vocab_size": 170}, "vocabulary"),
        ({"num_hidden_layers": 9}, "number of layers"),
    ],
)
def test_a_head_for_another_target_is_refused(changes: dict[str, int], named: str, tmp_path: Path) -> None:
    save_head(random_head(tiny_target("llama")), tmp_path)
    with pytest.raises(EyasError, match=named) as caught:
        load_head(tmp_path, other_target(**changes))
    assert "\n" not in str(caught.value)


def drop(name: str) -> Callable[[Path], None]:
    return lambda folder: save_file({k: v for k, v in load_file(folder / WEIGHTS).items() if k != name}, folder / WEIGHTS)


def put(name: str, tensor: torch.Tensor) -> Callable[[Path], None]:
    return lambda folder: save_file({**load_file(folder / WEIGHTS), name: tensor}, folder / WEIGHTS)


def edit(**values: object) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        config = json.loads((folder / "config.json").read_text())
        config.update(values)
        (folder / "config.json").write_text(json.dumps(config))

    return change


BROKEN = {
    "a missing tensor": (drop("fc.weight"), "lacks the tensor 'fc.weight'"),
    "a left-over tensor": (put("extra.bias", torch.zeros(2)), "'extra.bias'"),
    "a wrong shape": (put("norm.weight", torch.zeros(3)), "norm.weight"),
    "a lost vocabulary map": (drop("d2t"), "d2t"),
    "absolute ids for offsets": (put("d2t", torch.arange(120) * 2), "offsets"),
    "maps that disagree": (put("t2d", torch.zeros(VOCAB, dtype=torch.bool)), "different tokens"),
    "a cut file": (lambda f: (f / WEIGHTS).write_bytes((f / WEIGHTS).read_bytes()[:500]), "damaged"),
    "no weights": (lambda f: (f / WEIGHTS).unlink(), "no model.safetensors"),
    "no config": (lambda f: (f / "config.json").unlink(), "config.json is missing"),
    "a broken config": (lambda f: (f / "config.json").write_text("{"), "damaged"),
    "an empty config": (lambda f: (f / "config.json").write_text("{}"), "hidden_size: Field required"),
    "a config that is no object": (lambda f: (f / "config.json").write_text("5"), "no JSON object"),
    "offsets that are no integers": (put("d2t", torch.zeros(120)), "int64"),
    "a rope without its parts": (edit(rope_parameters={"rope_type": "llama3", "rope_theta": 1e4}), "rope"),
    "heads that do not divide": (edit(num_key_value_heads=3), "evenly"),
    "other taps": (edit(eagle_aux_hidden_state_layer_ids=[1, 4, 6], eagle_config={}), "taps=[1, 4, 6]"),
}


@pytest.mark.parametrize("fault", BROKEN)
def test_a_broken_head_is_told_in_one_line(fault: str, tmp_path: Path) -> None:
    target = tiny_target("llama")
    save_head(random_head(target), tmp_path)
    break_it, told = BROKEN[fault]
    break_it(tmp_path)
    with pytest.raises(EyasError) as caught:
        load_head(tmp_path, target)
    assert told in str(caught.value) and "\n" not in str(caught.value)


@given(st.lists(st.integers(0, 30), max_size=200), st.integers(1, 31))
def test_the_draft_vocabulary_maps_one_to_one(ids: list[int], size: int) -> None:
    counts = count_tokens([(ids, [(0, len(ids))])], 31)
    d2t = choose_vocabulary(counts, size)
    chosen = Eagle3Head.draft_ids(d2t)
    assert len(chosen) == size and len(chosen.unique()) == size
    assert bool((chosen.diff() > 0).all()) and int(chosen.min()) >= 0 and int(chosen.max()) < 31
    if size < 31:
        left_out = torch.ones(31, dtype=torch.bool)
        left_out[chosen] = False
        assert int(counts[left_out].max()) <= int(counts[chosen].min())
    assert coverage(counts, choose_vocabulary(counts, 31)) == (1.0 if ids else 0.0)


def test_a_vocabulary_counts_supervised_tokens_only_and_fills_up_in_order() -> None:
    counts = count_tokens([([9, 9, 9, 4, 4, 7], [(3, 6)])], 12)
    assert counts[9] == 0 and counts[4] == 2 and counts[7] == 1
    assert Eagle3Head.draft_ids(choose_vocabulary(counts, 4)).tolist() == [0, 1, 4, 7]
    with pytest.raises(EyasError):
        choose_vocabulary(counts, 13)


def test_rope_is_transformers_own_in_every_supported_form() -> None:
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

    forms = [
        {"rope_type": "default", "rope_theta": 1e6},
        {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0},
        {
            "rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
            "original_max_position_embeddings": 128,
        },
    ]  # fmt: skip
    x, positions = torch.randn(1, 9, 4, 16), torch.arange(200, 209)[None]
    for rope in forms:
        config = AutoConfig.for_model("llama", **{**SHAPE, "rope_parameters": rope, "max_position_embeddings": 1024})
        cos, sin = LlamaRotaryEmbedding(config)(x, positions)
        want = apply_rotary_pos_emb(x.transpose(1, 2), x.transpose(1, 2), cos, sin)[0].transpose(1, 2)
        assert torch.allclose(rotate(x, positions, inverse_frequencies(rope, 16)), want, atol=1e-5), rope
    with pytest.raises(EyasError, match="yarn"):
        inverse_frequencies({"rope_type": "yarn"}, 16)


def test_the_warm_start_copies_what_the_target_has() -> None:
    for family in FAMILIES:
        target = tiny_target(family)
        d2t = choose_vocabulary(torch.zeros(VOCAB, dtype=torch.long), 100)
        head = new_head(target, d2t, start="warm")
        assert torch.equal(head.lm_head.weight, target.lm_head_weight[:100])
        assert torch.equal(head.norm.weight, target.final_norm_weight)
        assert head.lm_head.weight.data_ptr() != target.lm_head_weight.data_ptr()  # never tied


def test_taps_are_hidden_states_and_too_small_targets_are_refused() -> None:
    target = tiny_target("qwen3")
    ids = torch.randint(3, VOCAB, (2, 11))
    mask = torch.ones(11, 11, dtype=torch.bool).tril()[None, None].expand(2, 1, 11, 11)
    with torch.no_grad():
        whole = target.model(input_ids=ids, attention_mask=mask, output_hidden_states=True)
    taps = target.read(ids).taps.unflatten(-1, (3, -1))
    for number, tap in enumerate(target.tap_ids):
        assert torch.equal(taps[:, :, number], whole.hidden_states[tap])
    assert default_taps(30) == (2, 15, 27)
    for layers in (1, 4, 6):
        with pytest.raises(EyasError, match="by hand"):
            default_taps(layers)
