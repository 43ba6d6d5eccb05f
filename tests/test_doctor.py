"""The doctor: a healthy head is called healthy, and the same head, broken in each known way, is diagnosed by name."""

from __future__ import annotations

import copy
import json
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from eyas.chat import Sample
from eyas.data.batches import Batch
from eyas.data.features import Features, read_features, teacher_rows
from eyas.decoding.engine import Engine, Request
from eyas.decoding.sampling import SamplingParams
from eyas.doctor.check import Checkup, check_head
from eyas.doctor.evidence import gather, write_answers
from eyas.doctor.readings import ENGINES, read_as
from eyas.doctor.static import Desk, examine
from eyas.errors import EyasError
from eyas.export.run import export_head
from eyas.heads.checkpoint import read_checkpoint
from eyas.heads.files import load_head
from eyas.heads.start import new_head
from eyas.target import Target
from eyas.training.acceptance import measure
from eyas.training.config import TrainConfig
from eyas.training.loop import Trainer
from eyas.training.recipe import train
from tests.test_cli import eyas
from tests.tiny import VOCAB, save_target, tiny_target

TEXTS = 32
CONFIG = TrainConfig(steps=100, unroll=3, slots_per_batch=400, learning_rate=3e-3, draft_vocab_size=120, evaluations=2)
FAMILY = "qwen3"  # whose rotary base is not the one that loaders assume
KEY = "eagle_aux_hidden_state_layer_ids"
TAPS = [2, 4, 5]
UNEVEN = torch.linspace(0.1, 4.0, 64)[torch.randperm(64, generator=torch.Generator().manual_seed(0))]  # a norm's weights
Break = Callable[[Path], None]


def target() -> Target:
    return tiny_target(FAMILY)


@pytest.fixture(scope="session")
def answers() -> list[Sample]:
    """What the target wrote, sampled among its four best tokens: varied, but not beyond a small head."""
    generator = torch.Generator().manual_seed(3)
    asked = [
        Request(
            torch.randint(3, VOCAB, (6,), generator=generator).tolist(),
            SamplingParams(max_new_tokens=32, temperature=1.0, top_k=4, seed=n, ignore_eos=True), str(n),
        )
        for n in range(64)
    ]  # fmt: skip
    results = Engine(target(), max_rows=64, max_length=48).generate(asked)
    return [Sample(r.id, [*q.ids, *r.ids], [(6, 6 + len(r.ids))]) for q, r in zip(asked, results, strict=True)]


@pytest.fixture(scope="session")
def healthy(answers: list[Sample], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A head as `eyas train` leaves it, its log beside it."""
    folder = tmp_path_factory.mktemp("healthy")
    train(target(), answers, folder / "head", CONFIG, features=folder / "features", held_out=8)
    return folder / "head"


def check(head: Path, answers: Sequence[Sample], *engines: str, against: Target | None = None) -> Checkup:
    return check_head(head, against or target(), engines=engines or ("vllm",), texts=answers[:TEXTS])


def copied(head: Path, place: Path, *breaks: Break) -> Path:
    """A copy of `head` without what only the trainer reads, broken in some ways."""
    shutil.copytree(head, place, ignore=shutil.ignore_patterns("state.pt"))
    for one in breaks:
        one(place)
    return place


def config(**values: Any) -> Break:
    """Set keys of config.json; None takes one away."""

    def change(folder: Path) -> None:
        told = {**json.loads((folder / "config.json").read_text()), **values}
        (folder / "config.json").write_text(json.dumps({k: v for k, v in told.items() if v is not None}))

    return change


def tensors(change: Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor | None]]) -> Break:
    """Replace tensors by what `change` makes of all of them; None takes one away."""

    def apply(folder: Path) -> None:
        held = load_file(folder / "model.safetensors")
        kept = {name: tensor for name, tensor in {**held, **change(held)}.items() if tensor is not None}
        save_file({name: tensor.contiguous() for name, tensor in kept.items()}, folder / "model.safetensors")

    return apply


def taps(top: list[int] | None, eagle: list[int] | None) -> Break:
    return config(**{KEY: top, "eagle_config": None if eagle is None else {KEY: eagle}})


def shifted(by: int) -> Break:
    return taps([t + by for t in TAPS], [t + by - 1 for t in TAPS])


def rope(base: float | None) -> Break:
    both = {"rope_theta": base, "rope_parameters": None if base is None else {"rope_type": "default", "rope_theta": base}}
    return config(**both)


def both(first: Break, second: Break) -> Break:
    def apply(folder: Path) -> None:
        first(folder)
        second(folder)

    return apply


def without(*names: str) -> Break:
    return tensors(lambda held: dict.fromkeys(names))


def absolute(held: dict[str, torch.Tensor]) -> dict[str, torch.Tensor | None]:
    return {"d2t": held["d2t"] + torch.arange(len(held["d2t"]))}


def zero_map(held: dict[str, torch.Tensor]) -> dict[str, torch.Tensor | None]:
    return {"d2t": torch.zeros_like(held["d2t"])}


def other_order(held: dict[str, torch.Tensor]) -> dict[str, torch.Tensor | None]:
    low, middle, high = held["fc.weight"].chunk(3, dim=1)
    return {"fc.weight": torch.cat([high, middle, low], dim=1)}


def halves(held: dict[str, torch.Tensor]) -> dict[str, torch.Tensor | None]:
    names = [f"midlayer.self_attn.{p}_proj.weight" for p in "qkv"]
    return {name: torch.cat(held[name].chunk(2, dim=1)[::-1], dim=1) for name in names}


def lost_norm(held: dict[str, torch.Tensor]) -> dict[str, torch.Tensor | None]:
    return {"norm.weight": torch.ones_like(held["norm.weight"])}


def large_inside(held: dict[str, torch.Tensor]) -> dict[str, torch.Tensor | None]:
    """The very same function, its inner values above what float16 holds."""
    up, down = "midlayer.mlp.up_proj.weight", "midlayer.mlp.down_proj.weight"
    return {up: held[up] * 2.0**18, down: held[down] / 2.0**18}


def cast_to_half(held: dict[str, torch.Tensor]) -> dict[str, torch.Tensor | None]:
    return {name: (t * 2.0**20).half() if name == "fc.weight" else t for name, t in held.items()}


BROKEN: dict[str, tuple[Break, str]] = {
    "taps one too high": (shifted(1), "taps-off-by-one"),
    "taps one too low": (shifted(-1), "taps-off-by-one"),
    "the fusion's blocks in another order": (tensors(other_order), "taps-permuted"),
    "no map of the vocabulary": (without("d2t"), "d2t-lost"),
    "neither map": (without("d2t", "t2d"), "d2t-lost"),
    "a map of zeros": (tensors(zero_map), "d2t-lost"),
    "absolute ids": (tensors(absolute), "d2t-absolute"),
    "another rotary base": (rope(10_000.0), "rope-base"),
    "another rotary base in a head without our record": (both(rope(100.0), config(eyas_head=None)), "rope-base"),
    "the other residual": (config(norm_before_residual=True), "norm-before-residual"),
    "state before embedding": (tensors(halves), "embedding-half-swapped"),
    "values beyond float16": (tensors(large_inside), "fp16-overflow"),
    "weights cast to float16": (tensors(cast_to_half), "fp16-overflow"),
}


def test_a_healthy_head_is_healthy_for_every_engine(healthy: Path, answers: list[Sample]) -> None:
    checkup = check(healthy, answers, *ENGINES)
    assert checkup.healthy and not checkup.findings and len(checkup.measured) == 1
    assert checkup.measured[0].engines == tuple(ENGINES.values()) and len(checkup.logged_n_alpha) == 3
    # the figures are those of the trainer's own measure
    target_ = target()
    batch = Batch.of([read_features(target_, sample) for sample in answers[:TEXTS]])
    told = measure(load_head(healthy, target_), [batch], 3)
    assert checkup.measured[0].n_alpha == pytest.approx(told.n_alpha, abs=0.05)


@pytest.mark.parametrize("fault", BROKEN)
def test_each_fault_is_told_by_name(fault: str, healthy: Path, answers: list[Sample], tmp_path: Path) -> None:
    break_it, name = BROKEN[fault]
    checkup = check(copied(healthy, tmp_path / "head", break_it), answers)
    ills = [finding.name for finding in checkup.findings if finding.severity == "ill"]
    assert ills == [name], checkup.findings
    assert not checkup.healthy and all(finding.cure for finding in checkup.findings)


CONFIGS: dict[str, tuple[Break, tuple[str, ...], str]] = {
    "SGLang's ids as vLLM's": (taps([1, 3, 4], [1, 3, 4]), ("sglang", "vllm"), "taps-off-by-one"),
    "vLLM's ids as SGLang's": (taps(TAPS, TAPS), ("sglang",), "taps-off-by-one"),
    "ids where llama.cpp does not look": (taps(None, [1, 3, 4]), ("vllm", "llamacpp"), "taps-off-by-one"),
    "no rotary base": (rope(None), ("vllm",), "rope-base"),
    "two rotary bases": (config(rope_theta=10_000.0), ("vllm",), "rope-base"),
    "ids of no layer": (taps([2, 4, 50], [1, 3, 49]), ("vllm",), "taps-out-of-range"),
    "ids that are none": (taps([2, 4], None), ("vllm",), "taps-malformed"),
    "tied embeddings": (config(tie_word_embeddings=True), ("sglang",), "tied-embeddings"),
    "no size of the vocabulary": (config(draft_vocab_size=None), ("llamacpp",), "draft-vocab-size"),
    "a wrong size of the vocabulary": (config(draft_vocab_size=119), ("vllm",), "wrong-shape"),
    "a short position limit": (config(max_position_embeddings=256), ("sglang",), "position-limit"),
    "a residual that SGLang does not know": (config(norm_before_residual=True), ("sglang",), "norm-before-residual"),
    "a lost tensor": (without("fc.weight"), ("vllm",), "missing-tensor"),
    "a left-over tensor": (tensors(lambda held: {"fc.extra": held["fc.weight"].clone()}), ("vllm",), "leftover-tensor"),
    "a value that is none": (tensors(lambda held: {"norm.weight": held["norm.weight"] / 0}), ("vllm",), "not-finite"),
    "maps that disagree": (tensors(lambda held: {"t2d": held["t2d"].roll(1)}), ("vllm",), "d2t-broken"),
    "another activation": (config(hidden_act="gelu"), ("vllm",), "unreadable"),
}


@pytest.mark.parametrize("fault", CONFIGS)
def test_what_the_files_tell_is_told_by_name(fault: str, healthy: Path, tmp_path: Path) -> None:
    break_it, engines, name = CONFIGS[fault]
    found, _ = examine(Desk(read_checkpoint(copied(healthy, tmp_path / "head", break_it)), target(), engines))
    assert name in [finding.name for finding in found if finding.severity == "ill"], found


def test_a_lost_final_norm_is_told(healthy: Path, answers: list[Sample], tmp_path: Path) -> None:
    head = copied(healthy, tmp_path / "head", tensors(lost_norm))
    found, _ = examine(Desk(read_checkpoint(head), target(), ("vllm",)))
    assert [(f.name, f.severity) for f in found] == [("norm-lost", "warning")]  # ill only where drafts miss it: tried below
    model = copy.copy(target())
    model.final_norm_weight = model.final_norm_weight * UNEVEN
    folded = tensors(lambda held: {"lm_head.weight": held["lm_head.weight"] / UNEVEN})
    head = copied(healthy, tmp_path / "folded", folded, tensors(lost_norm))
    assert [f.name for f in check(head, answers, against=model).findings if f.severity == "ill"] == ["norm-lost"]


def test_faults_that_come_together_are_undone_one_by_one(healthy: Path, answers: list[Sample], tmp_path: Path) -> None:
    head = copied(healthy, tmp_path / "head", tensors(zero_map), shifted(1))
    checkup = check(head, answers)
    assert {f.name for f in checkup.findings} == {"d2t-lost", "taps-off-by-one"}, checkup.findings
    one, good = checkup.measured[0], check(healthy, answers).measured[0]
    assert one.cured == ("d2t-lost", "taps-off-by-one") and one.cured_n_alpha == good.n_alpha
    assert any(str(TAPS) in finding.cure for finding in checkup.findings)


def test_another_target_is_told(healthy: Path, answers: list[Sample], tmp_path: Path) -> None:
    other = tiny_target(FAMILY, seed=1)
    named = check(healthy, answers, against=other)
    assert {"other-target", "wrong-target"} <= {f.name for f in named.findings} and not named.healthy
    nameless = copied(healthy, tmp_path / "head", config(eyas_head=None), lambda folder: (folder / "log.jsonl").unlink())
    assert "wrong-target" in [f.name for f in check(nameless, answers, against=other).findings]
    misfit = copied(healthy, tmp_path / "misfit", config(vocab_size=VOCAB + 1))
    told = check(misfit, answers)
    assert [f.name for f in told.findings if f.severity == "ill"][:1] == ["wrong-target"] and not told.measured


def unnormed(text: Features, model: Target) -> Features:
    """The features of a text whose teacher forgot the target's final norm."""
    states = model.states(text.ids[None, :-1], [model.num_layers])[1][model.num_layers][0]  # [S-1, H]
    ids, probs = teacher_rows(model.logits(states[text.supervised[1:]]), text.teacher_ids.shape[1])
    return Features(text.key, text.ids, text.supervised, text.taps, text.scales, ids.int(), probs.half())


def test_a_head_taught_by_unnormed_states_is_told(healthy: Path, answers: list[Sample], tmp_path: Path) -> None:
    model = tiny_target.__wrapped__(FAMILY)
    with torch.no_grad():  # as in grown models the norm decides much
        model.model.get_decoder().norm.weight.mul_(UNEVEN)
    learn = [unnormed(read_features(model, sample), model) for sample in answers]
    d2t = read_checkpoint(healthy).tensors["d2t"]
    Trainer(new_head(model, d2t), learn[:56], learn[56:], CONFIG.model_copy(update={"unroll": 1}), tmp_path).run()
    checkup = check(tmp_path, answers, against=model)
    assert [f.name for f in checkup.findings if f.severity == "ill"] == ["unnormed-teacher"], checkup.findings


def test_speculators_must_say_which_residual(healthy: Path, answers: list[Sample], tmp_path: Path) -> None:
    """vLLM assumes true for a config of speculators that does not say."""
    export_head(copied(healthy, tmp_path / "own"), target(), "speculators", tmp_path / "head", dtype="float32")
    assert check(tmp_path / "head", answers).healthy
    config(norm_before_residual=None)(tmp_path / "head")
    checkup = check(tmp_path / "head", answers, "vllm", "llamacpp")
    assert [f.name for f in checkup.findings if f.severity == "ill"] == ["norm-before-residual"]
    as_vllm, as_llamacpp = checkup.measured
    assert as_vllm.n_alpha != as_llamacpp.n_alpha and as_vllm.cured_n_alpha == as_llamacpp.n_alpha


def test_engines_read_taps_as_their_code_does(healthy: Path, tmp_path: Path) -> None:
    default = tuple(TAPS)
    for number, (break_it, want) in enumerate(
        [
            (taps([1, 3, 5], [0, 2, 4]), {"vllm": (1, 3, 5), "sglang": (1, 3, 5), "llamacpp": (1, 3, 5)}),
            (taps([1, 3, 5], None), {"vllm": (1, 3, 5), "sglang": default, "llamacpp": (1, 3, 5)}),
            (taps(None, [1, 3, 5]), {"vllm": (1, 3, 5), "sglang": (2, 4, 6), "llamacpp": default}),
            (taps(None, None), dict.fromkeys(("vllm", "sglang", "llamacpp"), default)),
        ]
    ):
        checkpoint = read_checkpoint(copied(healthy, tmp_path / str(number), break_it))
        assert {e: read_as(e, checkpoint, target()).config.tap_ids for e in want} == want


def test_the_states_of_any_layers_are_those_of_transformers() -> None:
    model = target()
    ids = torch.randint(3, VOCAB, (1, 11))
    hidden, states = model.states(ids, [0, 3, model.num_layers])
    with torch.no_grad():
        mask = torch.ones(11, 11, dtype=torch.bool).tril()[None, None]
        whole = model.model(input_ids=ids, attention_mask=mask, output_hidden_states=True)
    assert torch.equal(states[0], whole.hidden_states[0]) and torch.equal(states[3], whole.hidden_states[3])
    assert torch.equal(hidden, whole.hidden_states[-1]) and set(states) == {0, 3, model.num_layers}
    assert torch.allclose(model.model.get_decoder().norm(states[model.num_layers]), hidden, atol=1e-6)
    with pytest.raises(EyasError, match="has states"):
        model.states(ids, [model.num_layers + 1])


def test_the_teacher_and_the_unnormed_choice_are_the_targets(answers: list[Sample]) -> None:
    model, text = target(), answers[0]
    evidence = gather(model, [text], [2])
    hidden, states = model.states(torch.tensor([text.ids[:-1]]), [model.num_layers])
    raw = model.logits(states[model.num_layers])[0].argmax(-1)
    best = model.logits(hidden)[0].argmax(-1)
    for place in range(6, len(text.ids)):
        assert int(evidence.unnormed[place]) == int(raw[place - 1])
        assert int(evidence.batch.teacher_ids[evidence.batch.teacher_row[place], 0]) == int(best[place - 1])
    assert (evidence.unnormed[:6] == -1).all() and evidence.written == 32


def test_the_command_shows_one_screen_and_tells_by_its_code(
    healthy: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = target()
    save_target(model, tmp_path / "target")
    broken = copied(healthy, tmp_path / "broken", config(tie_word_embeddings=True))
    told = tmp_path / "told.json"
    assert eyas("check", broken, "--target", tmp_path / "target", "--engine", "sglang", "--json", told) == 1
    shown = capsys.readouterr().out
    assert "tied-embeddings" in shown and "cure:" in shown and len(shown.splitlines()) < 40
    record = json.loads(told.read_text())
    assert record["healthy"] is False and record["findings"][0]["name"] == "tied-embeddings" and record["tokens"] > 0
    assert eyas("check", broken, "--target", tmp_path / "target", "--engine", "abacus") == 2
    assert "unknown engine" in capsys.readouterr().err


def test_answers_are_the_targets_own_greedy_ones() -> None:
    model = target()
    written = write_answers(model, ["hello", "tell me of a"], 6)
    for sample in written:
        (start, end), ids = sample.spans[0], torch.tensor([sample.ids])
        best = model.logits(model.read(ids).hidden)[0].argmax(-1)
        assert best[start - 1 : end - 1].tolist() == sample.ids[start:end]
