"""The command line: the demo's commands in a row on a small target, and one line for everything that goes wrong."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from eyas.cli.main import main
from eyas.cli.options import TargetChoice
from tests.tiny import save_target, tiny_target


@pytest.fixture(scope="module")
def target_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny target as a user would have it: a Hugging Face directory."""
    return save_target(tiny_target("qwen3"), tmp_path_factory.mktemp("target"))


def eyas(*arguments: object) -> int:
    """Run a command in this process; its exit code."""
    before = sys.argv
    sys.argv = ["eyas", *map(str, arguments)]
    try:
        main()
    except SystemExit as ended:
        return int(ended.code or 0)
    finally:
        sys.argv = before
    return 0


def test_the_commands_in_a_row(target_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    answers, head, target = tmp_path / "answers.jsonl", tmp_path / "head", ("--target", target_dir)
    prompts = tmp_path / "prompts.jsonl"
    rows = [{"id": str(i), "messages": [{"role": "user", "content": f"tell me of {w}"}]} for i, w in enumerate("abcdefgh")]
    prompts.write_text("".join(json.dumps(row) + "\n" for row in rows))
    respond = ("respond", prompts, "--out", answers, "--max-new-tokens", 20, "--batch", 4, "--features", *target)
    assert eyas(*respond) == 0
    written = answers.read_bytes()
    assert written.count(b"\n") == 9  # a header and eight answers
    assert eyas(*respond) == 0 and answers.read_bytes() == written  # nothing is asked twice

    train = ("train", answers, "--out", head, "--steps", 4, "--unroll", 2, "--vocab", 100, "--held-out", 2, *target)
    assert eyas(*train) == 0
    assert {f.name for f in head.iterdir()} == {"config.json", "model.safetensors", "train.json", "log.jsonl", "state.pt"}
    assert eyas(*train) == 0  # finished already

    report, page = tmp_path / "report.json", tmp_path / "report.html"
    bench = ("bench", "--drafter", head, "--prompts", answers, "--held-out", 2, "--max-new-tokens", 12, *target)
    capsys.readouterr()
    assert eyas(*bench, "--json", report, "--html", page) == 0
    table = capsys.readouterr().out
    assert "tokens identical" in table and "yes" in table and "tau" in table
    assert "http" not in page.read_text().replace("http://www.w3.org", "")  # self-contained
    assert eyas("generate", "hello", "--head", head, "--max-new-tokens", 8, *target) == 0
    assert eyas("bench", "compare", report, report) == 0
    assert eyas("bench", "show", report, "--html", tmp_path / "again.html") == 0
    capsys.readouterr()
    assert eyas("bench", "show", report, "--markdown") == 0
    shown = capsys.readouterr().out
    assert "| drafter | tau |" in shown and f"eyas bench --drafter {head} " in shown
    grid = ("bench", "--head", f"mine={head}@chain:1", "--prompts", prompts, "--limit", 2, "--temperature", "0,1", *target)
    capsys.readouterr()
    assert eyas(*grid, "--batch", 1, "--batch", 2, "--max-new-tokens", 4, "--json", tmp_path / "grid.json", "--html", page) == 0
    assert "T 1, batch 2" in capsys.readouterr().out and page.read_text().count('class="race"') == 4
    assert eyas("data", "show", answers, *target) == 0


def test_the_other_drafters_and_the_study(target_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    answers, target = tmp_path / "answers.jsonl", ("--target", target_dir)
    asked = [{"messages": [{"role": "user", "content": f"tell me of {w}"}]} for w in "abcdefghijkl"]
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in asked))
    assert eyas("respond", tmp_path / "prompts.jsonl", "--out", answers, "--max-new-tokens", 16, "--batch", 4, *target) == 0
    for drafter in ("eagle1", "medusa"):
        out = tmp_path / drafter
        train = ("train", answers, "--drafter", drafter, "--out", out, "--steps", 2, "--held-out", 2, *target)
        assert eyas(*train, *(("--vocab", 100) if drafter == "medusa" else ())) == 0
    texts = set()
    for source in (
        "lookup",
        f"llm:{target_dir}",
        tmp_path / "eagle1",
        tmp_path / "medusa",
        f"{tmp_path / 'medusa'}+lookup@2x2x3",
    ):
        capsys.readouterr()
        assert eyas("generate", "abc abc abc", "--drafter", source, "--max-new-tokens", 12, "--plain", *target) == 0
        texts.add(capsys.readouterr().out.rpartition("13 tokens in")[0].rpartition("12 tokens in")[0])
    assert len(texts) == 1

    study = (
        "scaling", answers, "--out", tmp_path / "study", "--texts", 2, "--sizes", "1,2", "--epochs", 1, "--choose", 2,
        "--test", 3, "--answers", 2, "--tokens", 6, "--tree", "2x2x3", "--set", "slots_per_batch=80", "--weights", "stock",
        *target,
    )  # fmt: skip
    capsys.readouterr()
    assert eyas(*study) == 0
    told = capsys.readouterr().out
    assert "EAGLE-2, equal epochs: a chain's tau changes by" in told and (tmp_path / "study/scaling.svg").is_file()
    assert eyas(*study) == 0 and told.splitlines()[-1] == capsys.readouterr().out.splitlines()[-1]  # nothing is done twice
    for wrong, why in (
        (("--sizes", "2,1"), "ascending"), (("--sizes", "one"), "sizes"), (("--drafters", "eagle9"), "drafters"),
        (("--texts", 50), "needs 105 texts"), (("--tree", "bushy"), "bushy"), (("--set", "heat=3"), "heat"),
        (("--epochs", 2), "holds a study with epochs"), (("--set", "loss"), "key=value"),
    ):  # fmt: skip
        capsys.readouterr()
        assert eyas(*study, *wrong) == 2, wrong
        assert why in one_line(capsys), wrong


def test_every_command_that_loads_a_target_takes_the_same_options(target_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for command in (["respond"], ["train"], ["generate"], ["bench"], ["scaling"], ["data", "show"], ["demo"]):
        capsys.readouterr()
        assert eyas(*command, "--help") == 0
        told = capsys.readouterr().out
        assert all(f"--{name}" in told for name in ("target", "weights", "dtype", "device", "taps")), command
        assert ("SOURCE[@TREE]" in told) == (command in (["generate"], ["bench"])), command  # brackets are no markup
    how = ("--target", target_dir, "--taps", "1,4,6", "--dtype", "bfloat16", "--device", "cpu", "--max-new-tokens", 2)
    assert eyas("generate", "hello", *how) == 0
    assert TargetChoice("x", weights="fp16", taps="1,2,3").arguments() == [
        "--target", "x", "--weights", "fp16", "--taps", "1,2,3",
    ]  # fmt: skip


def one_line(capsys: pytest.CaptureFixture[str]) -> str:
    """What was printed as the error; there must be exactly one such line."""
    lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error:")]
    assert len(lines) == 1
    return lines[0]


def test_bad_input_is_one_line_and_a_code(
    target_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    target = ("--target", target_dir)
    empty, masked, not_a_head = tmp_path / "empty.jsonl", tmp_path / "masked.jsonl", tmp_path / "bare"
    empty.write_text("")
    prompt = tmp_path / "prompt.jsonl"
    prompt.write_text(json.dumps({"prompt": "hello"}) + "\n")
    masked.write_text("".join(json.dumps({"id": str(i), "ids": [5, 6, 7], "prompt_len": 3}) + "\n" for i in range(4)))
    not_a_head.mkdir()
    cases: list[tuple[tuple[object, ...], str]] = [
        (("respond", *target), "--self-prompts"),
        (("respond", empty, *target, "--out", tmp_path / "o.jsonl"), "empty.jsonl"),
        (("respond", tmp_path / "nothing.jsonl", *target), "nothing.jsonl"),
        (("train", masked, *target, "--out", tmp_path / "h", "--steps", 2), "masked.jsonl"),
        (("train", empty, *target, "--out", tmp_path / "h", "--steps", 2), "empty.jsonl"),
        (("train", masked, *target, "--out", tmp_path / "h"), "steps or as minutes"),
        (("train", masked, *target, "--out", tmp_path / "h", "--steps", 2, "--init-from", tmp_path / "cold"), "cold"),
        (("train", masked, *target, "--steps", 2, "--set", "heat=3"), "--show-settings"),
        (("train", masked, *target, "--steps", 2, "--set", "loss"), "key=value"),
        (("train", masked, *target, "--steps", 2, "--config", empty), "empty.jsonl"),
        (("train", masked, *target, "--steps", 2, "--set", "step_weight=[1,1]"), "step_weight"),
        (("scaling", masked, *target, "--set", "unroll=["), "cannot be read as YAML"),
        (("generate", "x", "--target", tmp_path / "no" / "such"), "no such directory"),
        (("generate", "x", "--target", "nobody/nothing-here"), "nobody/nothing-here"),
        (("generate", "x", "--target", tmp_path / "no.gguf"), "GGUF"),
        (("generate", "x", "--target", not_a_head), "config.json"),
        (("generate", "x", *target, "--head", not_a_head), "config.json is missing"),
        (("generate", "x", *target, "--drafter", "plain"), "no drafter 'plain': give the folder of a head, lookup, llm:MODEL"),
        (("generate", "x", *target, "--drafter", "+lookup"), "no drafter ''"),
        (("generate", "x", *target, "--drafter", "lookup@bushy"), "bushy"),
        (("generate", "x", *target, "--json-schema", empty), "empty.jsonl"),
        (("generate", "x", *target, "--tree", "bushy"), "bushy"),
        (("generate", "x", *target, "--weights", "fp4"), "fp4"),
        (("generate", "x", *target, "--dtype", "fp4"), "fp4"),
        (("generate", "x", *target, "--device", "moon"), "device 'moon' cannot be used here"),
        (("generate", "x", *target, "--taps", "low"), "--taps low: it takes three distinct layer numbers"),
        (("generate", "x", *target, "--taps", "0,1"), "three distinct layer numbers"),
        (("generate", "x " * 600, *target), "tokens"),
        (("generate", "x", *target, "--temperature", "-1"), "temperature"),
        (("bench", *target, "--prompts", tmp_path / "nothing.jsonl"), "nothing.jsonl"),
        (("bench", *target, "--suite", empty), "no prompt in it"),
        (("bench", *target, "--suite", "nosuch"), "where is the suite 'nosuch'"),
        (("bench", *target, "--drafter", not_a_head, "--prompts", prompt), "config.json is missing"),
        (("bench", *target, "--prompts", prompt, "--batch", "1,0"), "a batch holds 1 prompt or more, not 0"),
        (("bench", *target, "--prompts", prompt, "--batch", "two"), "--batch two: whole numbers"),
        (("bench", *target, "--prompts", prompt, "--temperature", "0,-1"), "temperature must be 0 or more"),
        (("bench", *target, "--prompts", prompt, "--tree", "2x2x3", "--tree", "auto"), "several trees"),
        (("bench", *target, "--prompts", prompt, "--sweep"), "give --drafter once"),
        (("bench", *target, "--prompts", prompt, "--forward-times", prompt), "add --sweep"),
        (("bench", *target, "--prompts", prompt, "--sweep", "--forward-times", prompt), "holds no forward times"),
        (("bench", *target, "--prompts", prompt, "--json", prompt), "is not a report written by"),
        (("bench", "compare", prompt, prompt), "is not a report written by"),
        (("bench", "show", prompt), "is not a report written by"),
    ]
    for arguments, told in cases:
        capsys.readouterr()
        assert eyas(*arguments) == 2, arguments
        assert told in one_line(capsys), arguments


def test_an_interrupt_is_one_line_and_a_code(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("eyas.target.Target.load", interrupted)
    for command in (["generate", "hello"], ["bench", "--drafter", "lookup"]):
        capsys.readouterr()
        assert eyas(*command) == 130
        assert capsys.readouterr().err.splitlines()[-1] == "stopped"
