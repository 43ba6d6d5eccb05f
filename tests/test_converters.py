"""Exports that other projects' converters write: how they are called, what they are given, and what is said without them."""

from __future__ import annotations

import copy
import json
import shlex
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from eyas.errors import EyasError
from eyas.export import gguf, openvino
from eyas.export.engine import Order
from eyas.export.run import export_head
from eyas.heads.config import HeadConfig
from eyas.heads.eagle3 import Eagle3Head
from eyas.heads.files import save_head
from eyas.target import Target
from tests.test_unroll import random_head
from tests.tiny import save_target, tiny_target

# Stands for a converter: keeps its arguments and what it was given, and writes what the real one does.
FAKE = """#!{python}
import json, pathlib, shutil, sys
words = sys.argv[1:]
given, out = pathlib.Path(words[{given}]), pathlib.Path(words[-1])
shutil.copytree(given, pathlib.Path({kept!r}))
pathlib.Path({kept!r}, "words.json").write_text(json.dumps(words))
(out / "openvino_model.xml" if out.is_dir() else out).write_text({written!r})
"""
IR = "<net><layers/><rt_info><conversion_parameters/>{}</rt_info></net>"


def fake(path: Path, given: int, kept: Path, written: str) -> Path:
    path.parent.mkdir(exist_ok=True)
    path.write_text(FAKE.format(python=sys.executable, given=given, kept=str(kept), written=written))
    path.chmod(0o755)
    return path


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Target:
    folder = tmp_path_factory.mktemp("target")
    save_target(tiny_target(), folder)
    return Target.load(folder)


@pytest.fixture
def head(target: Target, tmp_path: Path) -> Eagle3Head:
    """A head, kept in the folder "head"."""
    head = random_head(target)
    save_head(head, tmp_path / "head")
    return head


def test_llamacpps_converter_gets_the_head_and_the_target(
    target: Target, head: Eagle3Head, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = tmp_path / "given"
    fake(tmp_path / "llama.cpp" / gguf.CONVERTER, 0, kept, "GGUF")
    monkeypatch.setenv(gguf.SOURCE, str(tmp_path / "llama.cpp"))
    out = export_head(tmp_path / "head", target, "gguf", tmp_path / "out", dtype="bfloat16")
    assert sorted(path.name for path in out.iterdir()) == ["README.md", gguf.FILE]
    _, *words = json.loads((kept / "words.json").read_text())
    assert words[:-1] == ["--target-model-dir", target.name, "--outtype", "bf16", "--outfile"]
    config, tensors = json.loads((kept / "config.json").read_text()), load_file(kept / "model.safetensors")
    assert config["eagle_aux_hidden_state_layer_ids"] == list(target.tap_ids) and config["num_hidden_layers"] == 1
    assert torch.equal(tensors["fc.weight"], head.fc.weight.bfloat16()) and torch.equal(tensors["d2t"], head.d2t)

    *convert, serve = readme_lines(out)
    converter = str(tmp_path / "llama.cpp" / gguf.CONVERTER)
    assert [shlex.split(line)[:3] for line in convert] == [["python", converter, target.name]]  # the target as GGUF, too
    assert shlex.split(serve) == [
        "llama-server", "--model", "target.gguf", "--spec-type", "draft-eagle3", "--model-draft", str(out / gguf.FILE),
        "--spec-draft-n-max", "3",
    ]  # fmt: skip


def test_a_target_that_is_gguf_already_is_served_as_it_is(target: Target, tmp_path: Path) -> None:
    given = copy.copy(target)
    given.name = str(tmp_path / "target.gguf")
    order = Order(HeadConfig.for_target(target), {}, given, target.name, "float32")
    assert gguf.serving(order, tmp_path / "head").startswith(f"llama-server --model {given.name} --spec-type")


def readme_lines(out: Path) -> list[str]:
    """The commands in the README of an export, each on a line of its own."""
    return (out / "README.md").read_text().split("```")[1].split("\n", 1)[1].replace("\\\n", " ").splitlines()


def test_optimum_gets_the_head_in_full_precision_and_its_taps_are_noted(
    target: Target, head: Eagle3Head, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = tmp_path / "given"
    program = fake(tmp_path / "bin" / openvino.PROGRAM, 3, kept, IR.format('<eagle3_mode value="True"/>'))
    monkeypatch.setenv(openvino.NAMED, str(program))
    out = export_head(tmp_path / "head", target, "openvino", tmp_path / "out", dtype="bfloat16")
    assert sorted(path.name for path in out.iterdir()) == ["README.md", openvino.MODEL]
    words = json.loads((kept / "words.json").read_text())
    assert words[:3] == ["export", "openvino", "--model"] and words[words.index("--weight-format") + 1] == "fp32"
    tensors = load_file(kept / "model.safetensors")
    assert torch.equal(tensors["fc.weight"], head.fc.weight.bfloat16().float())  # as asked, in a precision it can write
    notes = ElementTree.parse(out / openvino.MODEL).find("rt_info")
    assert notes is not None and notes.find("eagle3_mode") is not None
    listed = notes.find("hidden_layers_list")
    assert listed is not None and [int(i) + 1 for i in listed.attrib["value"].split()] == list(target.tap_ids)
    code = "\n".join(readme_lines(out))
    compile(code, "README", "exec")
    assert repr(str(out)) in code and "num_assistant_tokens=3" in code and target.name in code


def test_a_model_that_is_not_marked_as_a_head_is_no_export(
    target: Target, head: Eagle3Head, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = fake(tmp_path / "bin" / openvino.PROGRAM, 3, tmp_path / "given", IR.format(""))
    monkeypatch.setenv(openvino.NAMED, str(program))
    with pytest.raises(EyasError, match="did not take the head for an EAGLE-3 head"):
        export_head(tmp_path / "head", target, "openvino", tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    "to, variable, told",
    [("gguf", gguf.SOURCE, "clone ggml-org/llama.cpp"), ("openvino", openvino.NAMED, "install optimum 2.3.0")],
)
def test_without_its_converter_an_export_says_how_to_get_it(
    to: str, variable: str, told: str, target: Target, head: Eagle3Head, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    for named in (None, str(tmp_path / "nowhere")):
        if named is None:
            monkeypatch.delenv(variable, raising=False)
        else:
            monkeypatch.setenv(variable, named)
        with pytest.raises(EyasError, match=told) as caught:
            export_head(tmp_path / "head", target, to, tmp_path / "out")
        assert variable in str(caught.value) and "\n" not in str(caught.value)
    assert not (tmp_path / "out").exists()


def test_a_converter_that_fails_is_quoted_in_one_line(
    target: Target, head: Eagle3Head, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / gguf.CONVERTER).write_text("import sys\nprint('some progress')\nsys.exit('no module named sentencepiece')\n")
    monkeypatch.setenv(gguf.SOURCE, str(tmp_path))
    with pytest.raises(EyasError, match=r"failed: no module named sentencepiece; .*'gguf'") as caught:
        export_head(tmp_path / "head", target, "gguf", tmp_path / "out")
    assert "\n" not in str(caught.value) and not (tmp_path / "out").exists()


REFUSED = {
    "normed residual": ({"norm_before_residual": True}, {"openvino"}),
    "EAGLE-3.1": ({"fc_norm": True, "norm_output": True}, {"gguf", "openvino"}),
    "q/k norm": ({"qk_norm": True}, {"gguf", "openvino"}),
    "biases": ({"qkv_bias": True}, {"gguf", "openvino"}),
    "two layers": ({"num_layers": 2}, {"gguf", "openvino"}),
    "own embedding": ({"own_embedding": True}, {"openvino"}),
    "tap 0": ({"tap_ids": (0, 3, 6)}, {"openvino"}),
    "taps out of order": ({"tap_ids": (3, 2, 6)}, {"openvino"}),
    "dynamic rope": ({"rope": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}}, {"gguf"}),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_what_an_engine_would_compute_otherwise_is_refused(kind: str, target: Target) -> None:
    changes, refusing = REFUSED[kind]
    config = HeadConfig.for_target(target).model_copy(update=changes)
    for name, engine in (("gguf", gguf.ENGINE), ("openvino", openvino.ENGINE)):
        assert bool(list(engine.refusals(config, target))) == (name in refusing), name
