"""Heads in vLLM, as it is served: the layouts load, accept what our own chain accepts, and change no token.

Run with `make test-vllm`, which makes vLLM's environment; `EYAS_VLLM_PYTHON` names the interpreter of one at hand.
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Callable
from pathlib import Path

import pytest

from eyas.export.run import export_head
from eyas.export.vllm import launch
from eyas.heads.eagle3 import Eagle3Head
from eyas.target import Target
from tests.engines import broken
from tests.engines.conftest import DEPTH, FEW, MAX_TOKENS, readme_command
from tests.engines.counts import Counts, chain_counts
from tests.engines.vllm_server import vllm_server

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

LAYOUTS = ("vllm", "speculators")


@pytest.fixture(scope="module")
def python() -> Path:
    path = Path(os.environ.get("EYAS_VLLM_PYTHON", ".venv-vllm/bin/python"))
    if not path.is_file():
        pytest.skip(f"no vLLM here: {path} is missing; `make test-vllm` installs it")
    return path


@pytest.fixture(scope="module")
def plain_answers(
    python: Path, target_dir: Path, prompts: list[list[int]], tmp_path_factory: pytest.TempPathFactory
) -> list[list[int]]:
    """What vLLM writes without a head."""
    log = tmp_path_factory.mktemp("vllm") / "plain.log"
    with vllm_server(python, shlex.split(launch(str(target_dir), "float32")), log) as server:
        return server.complete(prompts, MAX_TOKENS)


def served(python: Path, folder: Path, prompts: list[list[int]]) -> tuple[list[list[int]], Counts]:
    """Run the command in the README of the exported head, ask the prompts; the answers, and what vLLM counted."""
    command = readme_command(folder)
    with vllm_server(python, command, folder.parent / "vllm.log") as server:
        return server.complete(prompts, MAX_TOKENS), server.counts(DEPTH)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_head_is_served_as_we_measure_it(
    layout: str, target: Target, head_dir: Path, ours: Counts, prompts: list[list[int]], python: Path,
    plain_answers: list[list[int]], tmp_path: Path,
) -> None:  # fmt: skip
    folder = export_head(head_dir, target, layout, tmp_path / "head", dtype="float32")
    answers, theirs = served(python, folder, prompts)
    print(f"\nvLLM: {theirs}\nours: {ours}")
    assert answers == plain_answers
    assert theirs.agrees(ours), (str(theirs), str(ours))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(
    "fault, same_fault", [(broken.move_taps, broken.taps_off_by_one), (broken.drop_d2t, broken.lost_d2t)], ids=["taps", "d2t"]
)
def test_a_broken_head_is_told_apart(
    layout: str, fault: Callable[[Path], None], same_fault: Callable[[Target, Eagle3Head], tuple[Target, Eagle3Head]],
    target: Target, head_dir: Path, head: Eagle3Head, prompts: list[list[int]], python: Path, tmp_path: Path,
) -> None:  # fmt: skip
    """vLLM says nothing and its text stays right; only the counters tell, and they are those of the same fault here."""
    folder = export_head(head_dir, target, layout, tmp_path / "head", dtype="float32")
    fault(folder)
    few = prompts[:FEW]
    _, theirs = served(python, folder, few)
    healthy = chain_counts(target, head, few, depth=DEPTH, max_tokens=MAX_TOKENS)
    expected = chain_counts(*same_fault(target, head), few, depth=DEPTH, max_tokens=MAX_TOKENS)
    print(f"\nvLLM: {theirs}\nours: {expected}; healthy: {healthy}")
    assert not theirs.agrees(healthy) and theirs.length < healthy.length, (str(theirs), str(healthy))
    assert theirs.agrees(expected), (str(theirs), str(expected))
