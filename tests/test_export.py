"""Exported heads: every trap of the engines avoided, what an engine cannot compute refused, nothing lost on the way."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig

from eyas.bench.figures import PLAIN
from eyas.bench.grid import Report
from eyas.cli.main import main
from eyas.decoding.sampling import SamplingParams
from eyas.errors import EyasError
from eyas.export.casting import cast
from eyas.export.run import ENGINES, export_head
from eyas.heads.config import HeadOptions
from eyas.heads.eagle3 import Eagle3Head
from eyas.heads.files import head_hash, load_head, read_checkpoint, save_head
from eyas.heads.start import new_head
from eyas.target import Target
from tests import sglang_code
from tests.published import publish, randn, safeailab
from tests.test_head_options import plain_forward
from tests.test_unroll import random_head, some_texts
from tests.tiny import VOCAB, save_target, tiny_target

LONG = {"qwen3": 1e6, "llama": 1e4}
WRITTEN_HERE = [name for name in ENGINES if name not in ("gguf", "openvino")]  # the others call converters: test_converters.py


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Tiny targets as users have them: Hugging Face directories."""
    folders = {}
    for family in ("llama", "qwen3"):
        folders[family] = tmp_path_factory.mktemp(family)
        save_target(tiny_target(family), folders[family])
    return folders


@pytest.fixture(scope="module")
def targets(models: dict[str, Path]) -> dict[str, Target]:
    return {family: Target.load(folder) for family, folder in models.items()}


def expected(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """The weights that vLLM's and SGLang's llama_eagle3.py look for under a config, before they stack q, k, v and gate, up.

    Transcribed from LlamaModel.__init__ and load_weights there; both call the layer `layers.0` and skip `t2d`.
    """
    h, d = config["hidden_size"], config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    q, kv, inner = config["num_attention_heads"] * d, config["num_key_value_heads"] * d, config["intermediate_size"]
    layer = {
        "self_attn.q_proj": (q, 2 * h), "self_attn.k_proj": (kv, 2 * h), "self_attn.v_proj": (kv, 2 * h),
        "self_attn.o_proj": (h, q), "mlp.gate_proj": (inner, h), "mlp.up_proj": (inner, h), "mlp.down_proj": (h, inner),
        "input_layernorm": (h,), "hidden_norm": (h,), "post_attention_layernorm": (h,),
    }  # fmt: skip
    rest = {"fc": (h, 3 * config.get("target_hidden_size", h)), "norm": (h,), "lm_head": (config["draft_vocab_size"], h)}
    named = {**{f"layers.0.{name}": shape for name, shape in layer.items()}, **rest}
    maps = {"d2t": (config["draft_vocab_size"],)} if config["draft_vocab_size"] != config["vocab_size"] else {}
    return {**{f"{name}.weight": shape for name, shape in named.items()}, **maps}


def numbered(tensors: dict[str, Tensor]) -> dict[str, tuple[int, ...]]:
    return {name.replace("midlayer.", "layers.0."): tuple(t.shape) for name, t in tensors.items() if name != "t2d"}


@pytest.mark.parametrize("family", ["llama", "qwen3"])
@pytest.mark.parametrize("to", ["vllm", "speculators", "sglang"])
def test_engines_find_every_weight_and_read_the_head_as_it_is(
    to: str, family: str, targets: dict[str, Target], tmp_path: Path
) -> None:
    target = targets[family]
    head = random_head(target)
    save_head(head, tmp_path / "head")
    out = export_head(tmp_path / "head", target, to, tmp_path / "out")
    checkpoint = read_checkpoint(out)
    config = checkpoint.config
    layer = {**config, **config.get("transformer_layer_config", {})}  # vLLM lays the one over the other
    assert numbered(checkpoint.tensors) == expected(layer)
    assert all(name.startswith("layers.0.") == (to == "speculators") for name in checkpoint.tensors if "layer" in name[:9])
    # taps: vLLM reads the top level as it stands, SGLang adds one to eagle_config's
    assert config["eagle_aux_hidden_state_layer_ids"] == list(target.tap_ids)
    if to != "speculators":
        assert [i + 1 for i in config["eagle_config"]["eagle_aux_hidden_state_layer_ids"]] == list(target.tap_ids)
        assert config["architectures"] == ["LlamaForCausalLMEagle3"] and config["model_type"] == "llama"
    # never tied; the vocabulary and the residual said; positions of the target; the base in both forms
    assert layer["tie_word_embeddings"] is False and layer["draft_vocab_size"] == 120
    assert config["norm_before_residual"] is False
    assert layer["max_position_embeddings"] >= target.max_length
    assert layer["rope_theta"] == LlamaConfig(**layer).rope_parameters["rope_theta"] == LONG[family]
    back = load_head(out, target)
    assert back.config == head.config
    assert all(torch.equal(back.state_dict()[name], tensor) for name, tensor in head.state_dict().items())


def test_the_speculators_config_has_what_its_reader_asks_for(targets: dict[str, Target], tmp_path: Path) -> None:
    target = targets["llama"]
    save_head(random_head(target), tmp_path / "head")
    config = read_checkpoint(export_head(tmp_path / "head", target, "speculators", tmp_path / "out")).config
    assert config["speculators_model_type"] == "eagle3" and config["architectures"] == ["Eagle3Speculator"]
    method = config["speculators_config"]
    assert method["proposal_methods"][0]["speculative_tokens"] == 3 and method["algorithm"] == "eagle3"
    assert method["default_proposal_method"] in [m["proposal_type"] for m in method["proposal_methods"]]
    assert method["verifier"] == {"name_or_path": target.name, "architectures": ["LlamaForCausalLM"]}
    assert config["transformer_layer_config"]["model_type"] == "llama"


def test_the_authors_code_finds_what_it_asks_for(targets: dict[str, Target], tmp_path: Path) -> None:
    """Against cnets.Model's state dict: strict names, the embedding where no index leads to the target's."""
    target = targets["llama"]
    save_head(random_head(target), tmp_path / "head")
    checkpoint = read_checkpoint(export_head(tmp_path / "head", target, "authors", tmp_path / "out"))
    assert (tmp_path / "out" / "pytorch_model.bin").is_file()
    assert {n.replace("midlayer.", "layers.0.") for n in checkpoint.tensors} == {
        *expected(checkpoint.config), "t2d", "embed_tokens.weight",
    }  # fmt: skip
    assert checkpoint.config["target_hidden_size"] == target.hidden_size  # or it would look for an index
    assert "rope_scaling" not in checkpoint.config and checkpoint.config["draft_vocab_size"] == 120
    assert load_head(tmp_path / "out", target).config.own_embedding is False
    assert (tmp_path / "out" / "pytorch_model.bin").stat().st_size < 400_000  # no storage shared with the target goes along


def test_a_whole_vocabulary_is_exported_without_maps(targets: dict[str, Target], tmp_path: Path) -> None:
    target = targets["llama"]
    save_head(random_head(target, draft_vocab=VOCAB), tmp_path / "head")
    checkpoint = read_checkpoint(export_head(tmp_path / "head", target, "vllm", tmp_path / "out"))
    assert not {"d2t", "t2d"} & checkpoint.tensors.keys()  # vLLM has no parameter for them then
    assert numbered(checkpoint.tensors) == expected(checkpoint.config)


# -- what an engine would compute otherwise ---------------------------------------------------------------------------

BIAS = {f"midlayer.self_attn.{p}_proj.bias": randn(n) for p, n in (("q", 64), ("k", 32), ("v", 32))}
QK = {f"midlayer.self_attn.{n}_norm.weight": 1 + randn(16) for n in "qk"}
LINEAR = {"rope_scaling": {"type": "linear", "factor": 2.0}}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
          "original_max_position_embeddings": 128}  # fmt: skip
OWN = {"embed_tokens.weight": randn(VOCAB, 64)}
FUSION = {f"fc_norm.{i}.weight": 1 + randn(64) for i in range(3)}
CARRIED: dict[str, tuple[dict[str, Any], dict[str, Tensor], dict[str, str]]] = {
    # keys and tensors beside SafeAILab's, and what each engine that refuses it says
    "plain": ({}, {}, {}),
    "normed residual": ({"norm_before_residual": True}, {}, {"sglang": "residual", "authors": "norm_before_residual"}),
    "qkv biases": ({}, BIAS, {"vllm": "together", "speculators": "together", "sglang": "no biases", "authors": "no biases"}),
    "fc bias": ({}, {"fc.bias": randn(64)}, {"vllm": "fusion", "speculators": "fusion", "authors": "no biases"}),
    "q/k norm": ({}, QK, {"vllm": "speculators instead", "sglang": "does not norm", "authors": "qk_norm"}),
    "EAGLE-3.1": ({"fc_norm": True, "norm_output": True}, FUSION, {"authors": "fc_norm"}),
    "own embedding": ({}, OWN, {"sglang": "replaces"}),
    "linear rope": (LINEAR, {}, {}),
    "linear rope, other base": ({**LINEAR, "rope_theta": 5e5}, {}, {"authors": "takes the base 10000, not 500000"}),
    "llama3 rope": ({"rope_scaling": LLAMA3, "rope_theta": 5e5}, {}, {"authors": "'llama3'"}),
}  # fmt: skip


@pytest.mark.parametrize("kind", CARRIED)
@pytest.mark.parametrize("to", WRITTEN_HERE)
def test_an_engine_gets_a_head_it_can_compute_or_none(to: str, kind: str, targets: dict[str, Target], tmp_path: Path) -> None:
    target = targets["llama"]
    keys, more, refusals = CARRIED[kind]
    config, tensors = safeailab()
    publish(tmp_path / "head", {**config, **keys}, {**tensors, **more})
    if to in refusals:
        with pytest.raises(EyasError, match=refusals[to]) as caught:
            export_head(tmp_path / "head", target, to, tmp_path / "out")
        assert "\n" not in str(caught.value) and not (tmp_path / "out").exists()
        return
    head = load_head(tmp_path / "head", target)
    back = load_head(export_head(tmp_path / "head", target, to, tmp_path / "out"), target)
    assert back.config == head.config
    assert all(torch.equal(back.state_dict()[name], tensor) for name, tensor in head.state_dict().items())


def test_taps_that_an_engine_cannot_be_told_are_refused(targets: dict[str, Target], tmp_path: Path) -> None:
    target = Target(targets["llama"].model, targets["llama"].tokenizer, name=targets["llama"].name, taps=(0, 3, 6))
    save_head(new_head(target, random_head(target).d2t, options=HeadOptions(taps=(0, 3, 6))), tmp_path / "head")
    for to, told in (("sglang", "tap 0"), ("authors", r"taps \[2, 4, 5\]")):
        with pytest.raises(EyasError, match=told):
            export_head(tmp_path / "head", target, to, tmp_path / to)
    back = load_head(export_head(tmp_path / "head", target, "vllm", tmp_path / "vllm"), target)
    assert back.config.tap_ids == (0, 3, 6)


def test_values_that_do_not_fit_the_precision_are_refused(targets: dict[str, Target], tmp_path: Path) -> None:
    target = targets["llama"]
    head = random_head(target)
    with torch.no_grad():
        head.fc.weight[3, 5] = 70000.0
    save_head(head, tmp_path / "head")
    with pytest.raises(EyasError, match=r"'fc\.weight' does not fit float16: its largest value is 70000") as caught:
        export_head(tmp_path / "head", target, "vllm", tmp_path / "out", dtype="float16")
    assert "\n" not in str(caught.value) and not (tmp_path / "out").exists()
    out = export_head(tmp_path / "head", target, "vllm", tmp_path / "out", dtype="bfloat16")
    checkpoint = read_checkpoint(out)
    assert checkpoint.config["torch_dtype"] == "bfloat16" and "--dtype bfloat16" in (out / "README.md").read_text()
    assert {t.dtype for t in checkpoint.tensors.values()} == {torch.bfloat16, torch.int64, torch.bool}
    with pytest.raises(EyasError, match="NaN or infinity"):
        cast({"w": torch.tensor([1.0, torch.nan])}, "float32")
    with pytest.raises(EyasError, match="int8"):
        cast({}, "int8")


# -- the README -------------------------------------------------------------------------------------------------------


def test_the_readme_holds_the_serving_command(targets: dict[str, Target], tmp_path: Path) -> None:
    target = targets["llama"]
    save_head(random_head(target), tmp_path / "head")
    wanted = {
        "vllm": ["--model", target.name, "--dtype", "float32", "--speculative-config"],
        "speculators": ["--model", str(tmp_path / "speculators out"), "--dtype", "float32"],
        "sglang": [
            "--model-path", target.name, "--dtype", "float32", "--speculative-algorithm", "EAGLE3",
            "--speculative-draft-model-path", str(tmp_path / "sglang out"), "--speculative-num-steps", "3",
            "--speculative-eagle-topk", "1", "--speculative-num-draft-tokens", "4",
        ],
    }  # fmt: skip
    for to in WRITTEN_HERE:
        out = export_head(tmp_path / "head", target, to, tmp_path / f"{to} out")
        readme = (out / "README.md").read_text()
        language, command = readme.split("```")[1].split("\n", 1)
        if language == "python":
            compile(command, "README", "exec")
            assert repr(str(out)) in command and repr(target.name) in command
            continue
        words = shlex.split(command.replace("\\\n", " "))  # as a shell joins lines
        assert words[:2] == ["python", "-m"] and words[3 : 3 + len(wanted[to])] == wanted[to]
        if to == "vllm":
            told = {"method": "eagle3", "model": str(out), "num_speculative_tokens": 3}
            assert json.loads(words[-1]) == told


def test_the_model_card_tells_target_data_acceptance_and_licence(targets: dict[str, Target], tmp_path: Path) -> None:
    target, folder = targets["llama"], tmp_path / "head"
    save_head(random_head(target), folder)
    bare = (export_head(folder, target, "vllm", tmp_path / "bare") / "README.md").read_text()
    assert "Not recorded" in bare and "Not measured" in bare and "Not given" in bare and "license:" not in bare
    (folder / "train.json").write_text(json.dumps({"texts": {"learn": ["text"] * 1234, "choose": []}}))
    report = raced(target, folder, tmp_path)
    out = export_head(folder, target, "vllm", tmp_path / "full", report=report, licence="apache-2.0")
    card = (out / "README.md").read_text()
    assert card.startswith(f"---\nbase_model: {target.name}\nlicense: apache-2.0\n")
    assert target.fingerprint in card and "2, 4, 5" in card and "1,234 texts" in card and head_hash(folder) in card
    taus = [line for line in card.splitlines() if line.startswith("| asked |")]
    found = Report.read(report).races[0].drafters["mine"]
    assert taus == [f"| asked | {found.answers} | {found.tau.value:.2f} |"]

    save_head(random_head(target, draft_vocab=90), tmp_path / "other")
    for wrong, given, told in ((tmp_path / "other", target, "without this head"), (folder, targets["qwen3"], "another target")):
        if given is not target:
            save_head(random_head(given), wrong)
        with pytest.raises(EyasError, match=told):
            export_head(wrong, given, "vllm", tmp_path / "wrong", report=report)
        assert not (tmp_path / "wrong").exists() and not list(tmp_path.glob(".wrong-*"))


def raced(target: Target, folder: Path, place: Path) -> Path:
    """The report of a real race of the head in `folder`, two prompts long."""
    from eyas.bench.contestants import parse_contestants
    from eyas.bench.items import Item
    from eyas.bench.run import Plan, run_bench

    items = [Item(str(i), "asked", "asked", ids=tuple(range(5 + i, 15 + i))) for i in range(2)]
    report = run_bench(target, parse_contestants([f"mine={folder}"]), Plan(items, SamplingParams(max_new_tokens=6)))
    assert set(report.races[0].drafters) == {PLAIN, "mine"}
    report.write(place / "report.json")
    return place / "report.json"


def test_the_command(models: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = Target.load(models["llama"], taps=(1, 3, 6))
    head = new_head(target, random_head(target).d2t, options=HeadOptions(taps=(1, 3, 6)))
    save_head(head, tmp_path / "head")

    def eyas(*arguments: object) -> int:
        with pytest.MonkeyPatch.context() as patch, pytest.raises(SystemExit) as ended:
            patch.setattr("sys.argv", ["eyas", "export", *map(str, arguments)])
            main()
        return int(ended.value.code or 0)

    given = (tmp_path / "head", "--target", models["llama"], "--out", tmp_path / "out")
    assert eyas(*given, "--to", "vllm") == 0  # loads the target with the head's own taps
    assert (tmp_path / "out" / "README.md").is_file()
    for arguments, told in (
        ((*given, "--to", "tgi"), "choose one of"),
        ((*given, "--to", "vllm"), "not empty"),
        ((tmp_path / "none", "--target", models["llama"], "--out", tmp_path / "b", "--to", "vllm"), "config.json is missing"),
    ):
        capsys.readouterr()
        assert eyas(*arguments) == 2
        assert told in capsys.readouterr().err


# -- SGLang's own code ------------------------------------------------------------------------------------------------


@pytest.mark.skipif(not sglang_code.PLACE, reason="set EYAS_SGLANG to an sglang wheel to run its own loader")
@pytest.mark.parametrize("kind", ["plain", "EAGLE-3.1", "llama3 rope", "whole vocabulary"])
def test_sglangs_own_code_loads_every_tensor_and_computes_the_head(
    kind: str, targets: dict[str, Target], tmp_path: Path
) -> None:
    target = targets["llama"]
    if kind == "whole vocabulary":
        save_head(random_head(target, draft_vocab=VOCAB), tmp_path / "head")
    else:
        config, tensors = safeailab()
        publish(tmp_path / "head", {**config, **CARRIED[kind][0]}, {**tensors, **CARRIED[kind][1]})
    head = load_head(tmp_path / "head", target)
    checkpoint = read_checkpoint(export_head(tmp_path / "head", target, "sglang", tmp_path / "out"))
    model = sglang_code.draft_model(LlamaConfig(**checkpoint.config))
    model.load_weights(list(checkpoint.tensors.items()))
    for name, parameter in model.named_parameters():
        if name != "model.embed_tokens.weight":
            assert getattr(parameter, "filled", 0) == parameter.numel(), f"{name} is not filled whole"
    used = sum(getattr(parameter, "filled", 0) for parameter in model.parameters())
    assert used == sum(t.numel() for n, t in checkpoint.tensors.items() if n not in ("d2t", "t2d"))
    if kind == "whole vocabulary":
        assert model.hot_token_id is None
    else:
        assert torch.equal(model.hot_token_id, Eagle3Head.draft_ids(head.d2t))
    model.model.embed_tokens.weight.data = target.embedding.data  # as set_embed does

    text = some_texts(target)[0]
    taps, tokens = text.float_taps[:-1], text.ids[1:-1]
    mode = SimpleNamespace(is_extend=lambda: False)
    batch = SimpleNamespace(mm_input_embeds=None, forward_mode=mode, spec_info=SimpleNamespace(hidden_states=taps))
    with torch.no_grad():
        hidden, (handed_on,) = model.model(tokens, torch.arange(len(tokens)), batch)
    states, logits = plain_forward(head, taps, tokens)
    assert torch.allclose(hidden @ model.lm_head.weight.T, logits, atol=1e-4)
    assert torch.allclose(handed_on, states, atol=1e-4)


@pytest.mark.skipif(not sglang_code.PLACE, reason="set EYAS_SGLANG to an sglang wheel to check its flags")
def test_sglang_has_the_flags_and_the_tap_convention_we_take_it_to_have() -> None:
    fields = sglang_code.source("srt/arg_groups/fields/spec.py")
    for flag in ("algorithm", "draft_model_path", "num_steps", "eagle_topk", "num_draft_tokens"):
        assert f"    speculative_{flag}: " in fields, flag
    assert "EAGLE3" in fields
    assert "layers_to_capture = [val + 1 for val in layer_ids]" in sglang_code.source("srt/models/llama.py")
    resolved = sglang_code.source("srt/model_executor/model_runner_components/spec_aux_hidden_state.py")
    assert 'eagle_config[\n                "eagle_aux_hidden_state_layer_ids"\n' in resolved
