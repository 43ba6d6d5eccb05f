"""Heads in OpenVINO GenAI, through `eyas export --to openvino`: accepted as our own chain's, no token changed.

Run with `make test-openvino`, which makes OpenVINO's environment; `EYAS_OPENVINO_PYTHON` names the interpreter of one at hand.

GenAI counts accepted drafts per answer, not per depth. It drafts no further than the limit and cuts at it, as our own
statistics do: so its acceptance length is tokens emitted by rounds / rounds, where every emitted token is an accepted draft
or ends a round.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from eyas.decoding.drafters import Eagle3Drafter
from eyas.decoding.engine import Engine, Request
from eyas.decoding.sampling import SamplingParams
from eyas.decoding.tree import TreeShape
from eyas.export import openvino
from eyas.export.run import export_head
from eyas.heads.eagle3 import Eagle3Head
from eyas.target import Target
from tests.engines import broken
from tests.engines.conftest import DEPTH, FEW, MAX_TOKENS
from tests.engines.counts import ROWS, TOLERANCE

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]


@pytest.fixture(scope="module")
def python() -> Path:
    path = Path(os.environ.get("EYAS_OPENVINO_PYTHON", ".venv-openvino/bin/python"))
    if not path.is_file():
        pytest.skip(f"no OpenVINO here: {path} is missing; `make test-openvino` installs it")
    return path


@pytest.fixture(scope="module")
def exporter(python: Path) -> Iterator[Path]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(openvino.NAMED, str(python.with_name(openvino.PROGRAM)))
        yield Path(openvino.find_exporter())


@pytest.fixture(scope="module")
def model(exporter: Path, target_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The target as an OpenVINO model in float32."""
    folder = tmp_path_factory.mktemp("target")
    command = [exporter, "export", "openvino", "--model", target_dir, "--task", "text-generation-with-past"]
    subprocess.run([*command, "--weight-format", "fp32", folder], check=True, env={**os.environ, "HF_HUB_OFFLINE": "1"})
    return folder


@pytest.fixture(scope="module")
def exported(exporter: Path, target: Target, head_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return export_head(head_dir, target, "openvino", tmp_path_factory.mktemp("openvino") / "head", dtype="float32")


def ask(python: Path, model: Path, prompts: list[list[int]], head: Path | None = None) -> tuple[list[list[int]], float]:
    """GenAI's answers, and its mean acceptance length with the drafts of `head`."""
    command = [python, Path(__file__).with_name("openvino_chain.py"), model, *([head] if head else [])]
    job = json.dumps({"prompts": prompts, "max_tokens": MAX_TOKENS, "depth": DEPTH})
    told = json.loads(subprocess.run(command, input=job, stdout=subprocess.PIPE, text=True, check=True).stdout)
    emitted = sum(len(answer) - 1 for answer in told["answers"])
    return told["answers"], emitted / (emitted - told["accepted"])


def our_length(target: Target, head: Eagle3Head, prompts: list[list[int]]) -> float:
    """tau of our chain, as the engine reports it."""
    engine = Engine(target, Eagle3Drafter(target, head), tree=TreeShape.chain(DEPTH), max_rows=ROWS, max_length=512)
    engine.generate(Request(prompt, SamplingParams(max_new_tokens=MAX_TOKENS)) for prompt in prompts)
    return engine.stats.tau


def test_a_head_is_run_as_we_measure_it(
    python: Path, model: Path, exported: Path, target: Target, head: Eagle3Head, prompts: list[list[int]]
) -> None:
    plain, _ = ask(python, model, prompts)
    drafted, theirs = ask(python, model, prompts, exported)
    ours = our_length(target, head, prompts)
    print(f"\nOpenVINO: {theirs:.4f}\nours: {ours:.4f}")
    assert drafted == plain
    assert theirs == pytest.approx(ours, rel=TOLERANCE)


def test_an_export_without_its_taps_is_told_apart(
    python: Path, model: Path, exported: Path, target: Target, head: Eagle3Head, prompts: list[list[int]]
) -> None:
    """Without our note GenAI takes the outputs of layers 2, L//2 and L-3: taps off by one."""
    path = exported / openvino.MODEL
    noted = path.read_text()
    path.write_text(re.sub("<hidden_layers_list [^>]*/>", "", noted))
    try:
        _, theirs = ask(python, model, prompts[:FEW], exported)
    finally:
        path.write_text(noted)
    healthy = our_length(target, head, prompts[:FEW])
    expected = our_length(*broken.taps_off_by_one(target, head), prompts[:FEW])
    print(f"\nOpenVINO: {theirs:.4f}\nours: {expected:.4f}; healthy: {healthy:.4f}")
    assert theirs == pytest.approx(expected, rel=TOLERANCE)
    assert theirs < (1 - TOLERANCE) * healthy
