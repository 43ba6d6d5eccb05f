"""Where training begins: another head, its vocabulary remapped; targets with an adapter, quantised, or spread by a map."""

from __future__ import annotations

import copy
import json
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from eyas.errors import EyasError
from eyas.heads.config import HeadOptions
from eyas.heads.eagle3 import Eagle3Head
from eyas.heads.files import load_head, save_head
from eyas.heads.start import head_from, new_head
from eyas.heads.vocab import choose_vocabulary
from eyas.target import Target
from eyas.training.config import TrainConfig
from eyas.training.recipe import starting_head, taps_wanted, train
from tests.kinds import medusa_head
from tests.test_training import CONFIG, corpus
from tests.test_unroll import random_head
from tests.tiny import VOCAB, save_target, tiny_target

NO_COUNTS = torch.zeros(VOCAB, dtype=torch.long)


def weights(head: Eagle3Head) -> dict[str, torch.Tensor]:
    return head.state_dict()


@pytest.fixture(scope="module")
def target_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_target(tiny_target("llama"), tmp_path_factory.mktemp("target"))


def test_a_head_to_start_from_is_taken_as_it_is(tmp_path: Path) -> None:
    target = tiny_target("llama")
    before = random_head(target, 70, num_layers=2)
    save_head(before, tmp_path)
    head = starting_head(target, TrainConfig(steps=1, init_from=str(tmp_path)), NO_COUNTS)
    assert head.training and all(torch.equal(weights(head)[name], tensor) for name, tensor in weights(before).items())
    assert taps_wanted(TrainConfig(steps=1, init_from=str(tmp_path))) == target.tap_ids


def test_a_remapped_vocabulary_keeps_the_rows_of_known_tokens(tmp_path: Path) -> None:
    target = tiny_target("llama")
    before = random_head(target, 70)
    save_head(before, tmp_path)
    counts = torch.arange(VOCAB)  # the most frequent tokens are the last ones
    settings = TrainConfig(steps=1, init_from=str(tmp_path), remap_vocabulary=True, draft_vocab_size=100)
    head = starting_head(target, settings, counts)
    old, new = before.draft_ids(before.d2t).tolist(), head.draft_ids(head.d2t).tolist()
    assert new == list(range(60, 160)) and int(head.t2d.sum()) == 100
    for row, token in enumerate(new):
        want = before.lm_head.weight[old.index(token)] if token in old else target.lm_head_weight[token]
        assert torch.equal(head.lm_head.weight[row], want)
    assert torch.equal(head.fc.weight, before.fc.weight)
    save_head(head, tmp_path / "again")
    assert torch.equal(load_head(tmp_path / "again", target).lm_head.weight, head.lm_head.weight)


def test_a_narrow_head_can_be_remapped_too(tmp_path: Path) -> None:
    target = tiny_target("llama")
    save_head(new_head(target, choose_vocabulary(NO_COUNTS, 70), options=HeadOptions(hidden_size=48)), tmp_path)
    head = head_from(tmp_path, target, NO_COUNTS, 90)
    assert head.lm_head.weight.shape == (90, 48) and head.embed_tokens is not None


def test_a_remapped_vocabulary_is_as_large_as_it_was_unless_told(tmp_path: Path) -> None:
    save_head(random_head(tiny_target("llama"), 70), tmp_path)
    settings = TrainConfig(steps=1, init_from=str(tmp_path), remap_vocabulary=True)
    head = starting_head(tiny_target("llama"), settings, torch.arange(VOCAB))
    assert head.draft_ids(head.d2t).tolist() == list(range(90, 160))


def grown_target(more: int) -> Target:
    """`tiny_target` with `more` tokens added after its own."""
    model = copy.deepcopy(tiny_target("llama").model)
    model.set_attn_implementation("eager")
    model.resize_token_embeddings(VOCAB + more, mean_resizing=False)
    return Target(model, tiny_target("llama").tokenizer, name="grown")


@pytest.mark.parametrize(("size", "width"), [(70, None), (VOCAB, None), (70, 48)])
def test_a_head_goes_on_with_a_target_that_has_tokens_added(size: int, width: int | None, tmp_path: Path) -> None:
    target, grown = tiny_target("llama"), grown_target(8)
    before = new_head(target, choose_vocabulary(NO_COUNTS, size), options=HeadOptions(hidden_size=width))
    save_head(before, tmp_path)
    settings = {"steps": 1, "init_from": str(tmp_path), "draft_vocab_size": 80}
    with pytest.raises(EyasError, match="its vocabulary is 160, that of 'grown' is 168"):
        starting_head(grown, TrainConfig(**{**settings, "draft_vocab_size": None}), torch.arange(VOCAB + 8))
    head = starting_head(grown, TrainConfig(**settings, remap_vocabulary=True), torch.arange(VOCAB + 8))
    ids = head.draft_ids(head.d2t).tolist()
    assert ids == list(range(88, 168)) and len(head.t2d) == len(head.embedding) == VOCAB + 8
    assert torch.equal(head.embedding[:VOCAB], before.embedding)
    known = dict(zip(before.draft_ids(before.d2t).tolist(), before.lm_head.weight, strict=True))
    for row, token in enumerate(ids):
        want = known.get(token, grown.lm_head_weight[token] if width is None else head.lm_head.weight[row])
        assert torch.equal(head.lm_head.weight[row], want)


def test_a_head_to_start_from_may_be_on_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = tiny_target("llama")
    save_head(random_head(target, 70), tmp_path / "snapshot")
    monkeypatch.setattr("eyas.hub.on_hub", lambda name, kind: name == "owner/head")
    monkeypatch.setattr("eyas.hub.snapshot_download", lambda name, allow_patterns: str(tmp_path / "snapshot"))
    settings = TrainConfig(steps=1, init_from="owner/head")
    assert taps_wanted(settings) == target.tap_ids
    assert len(starting_head(target, settings, NO_COUNTS).d2t) == 70
    with pytest.raises(EyasError, match="the hub shows no such model"):
        taps_wanted(TrainConfig(steps=1, init_from="owner/none"))


def test_what_a_warm_start_cannot_copy_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    target, quantised = tiny_target("llama"), copy.copy(tiny_target("llama"))
    new_head(target, choose_vocabulary(NO_COUNTS, 70))
    assert "warm start" not in capsys.readouterr().err
    quantised._last_layers = [
        {name: tensor.to(torch.int8) if tensor.ndim == 2 else tensor for name, tensor in layer.items()}
        for layer in target._last_layers
    ]
    new_head(quantised, choose_vocabulary(NO_COUNTS, 70))
    told = " ".join(capsys.readouterr().err.split())
    assert "leaves 7 of the head's matrices random, the first layers.0.self_attn.q_proj.weight" in told


def test_settings_that_contradict_the_head_are_told(tmp_path: Path) -> None:
    target = tiny_target("llama")
    save_head(random_head(target, 70), tmp_path)
    start = {"steps": 1, "init_from": str(tmp_path)}
    with pytest.raises(EyasError, match="remap_vocabulary"):
        starting_head(target, TrainConfig(**start, draft_vocab_size=90), NO_COUNTS)
    with pytest.raises(EyasError, match="under 'head'"):
        starting_head(target, TrainConfig(**start, head=HeadOptions(num_layers=2)), NO_COUNTS)
    with pytest.raises(EyasError, match="nowhere"):
        starting_head(target, TrainConfig(steps=1, init_from=str(tmp_path / "nowhere")), NO_COUNTS)


def test_a_head_that_is_no_start_is_refused_before_features_are_read(tmp_path: Path) -> None:
    target = tiny_target("llama")
    save_head(medusa_head(target), tmp_path / "medusa")
    settings = CONFIG.model_copy(update={"init_from": str(tmp_path / "medusa"), "draft_vocab_size": None})
    with pytest.raises(EyasError, match="holds Medusa heads"):
        train(target, corpus(8), tmp_path / "out", settings, features=tmp_path / "features", held_out=2)
    assert not (tmp_path / "features").exists()


def test_a_head_of_another_layout_goes_on_training(tmp_path: Path) -> None:
    """A base model's head as speculators names its tensors, for a target that was trained further."""
    base, tuned = tiny_target("llama"), tiny_target("llama", seed=1)
    before = random_head(base)
    save_head(before, tmp_path / "base")
    path = tmp_path / "base/model.safetensors"
    save_file({name.replace("midlayer.", "layers.0."): tensor for name, tensor in load_file(path).items()}, path)
    settings = CONFIG.model_copy(
        update={"steps": 2, "init_from": str(tmp_path / "base"), "evaluations": 1, "eval_prompts": 0, "draft_vocab_size": None}
    )
    samples = corpus(8)
    train(tuned, samples, tmp_path / "out", settings, features=tmp_path / "features", held_out=2)
    after = load_head(tmp_path / "out", tuned)
    assert after.config.target_fingerprint == tuned.fingerprint
    moved = (after.fc.weight - before.fc.weight).detach().abs().max()
    assert 0 < float(moved) < 0.05  # two steps away from where it began


def test_a_target_with_an_adapter_is_the_merged_model(target_dir: Path, tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    from transformers import AutoModelForCausalLM

    plain = AutoModelForCausalLM.from_pretrained(target_dir)
    adapted = peft.get_peft_model(plain, peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False))
    adapted.save_pretrained(tmp_path)
    ids = torch.randint(3, VOCAB, (1, 9))
    with torch.no_grad():
        want = adapted(input_ids=ids).logits
    target = Target.load(tmp_path)
    assert torch.allclose(target.logits(target.read(ids).hidden), want, atol=1e-4)
    base = Target.load(target_dir)
    assert target.fingerprint != base.fingerprint
    assert not torch.allclose(base.logits(base.read(ids).hidden), want, atol=1e-2)
    assert target.last_layers(1)[0].keys() == base.last_layers(1)[0].keys()  # a warm start finds what it needs


def test_an_adapter_without_peft_or_without_a_base_is_told(
    target_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": str(target_dir)}))
    monkeypatch.setitem(sys.modules, "peft", None)
    with pytest.raises(EyasError, match=r"needs peft; run: pip install 'eyas\[lora\]'"):
        Target.load(tmp_path)
    (tmp_path / "adapter_config.json").write_text("{}")
    with pytest.raises(EyasError, match="base_model_name_or_path"):
        Target.load(tmp_path)


def test_a_device_map_is_passed_on(target_dir: Path) -> None:
    ids = torch.randint(3, VOCAB, (1, 9))
    spread, plain = Target.load(target_dir, device_map={"": "cpu"}), Target.load(target_dir)
    assert torch.equal(spread.logits(spread.read(ids).hidden), plain.logits(plain.read(ids).hidden))


@pytest.mark.parametrize("bits", [4, 8])
def test_a_quantised_target_is_a_target(bits: int, target_dir: Path, tmp_path: Path) -> None:
    pytest.importorskip("bitsandbytes")
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig

    quantised = AutoModelForCausalLM.from_pretrained(
        target_dir, device_map="cpu", dtype=torch.float32,
        quantization_config=BitsAndBytesConfig(load_in_4bit=bits == 4, load_in_8bit=bits == 8),
    )  # fmt: skip
    target = Target(quantised, tiny_target("llama").tokenizer, name="quantised")
    head = new_head(target, choose_vocabulary(NO_COUNTS, 100))
    assert torch.equal(head.lm_head.weight, target.lm_head_weight[:100].float())
    assert all(bool(p.isfinite().all()) for p in head.parameters())
    settings = CONFIG.model_copy(update={"steps": 2, "evaluations": 1, "eval_tokens": 4})
    reached = train(target, corpus(8), tmp_path / "out", settings, features=tmp_path / "features", held_out=2)
    assert reached.tau is not None and reached.tau >= 1
