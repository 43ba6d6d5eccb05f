"""Heads in vLLM, as it is served: the layouts load, accept what our own chain accepts, and change no token.

Run with `make test-vllm`, which makes vLLM's environment; `EYAS_VLLM_PYTHON` names the interpreter of one at hand.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from eyas.heads.eagle3 import Eagle3Head
from eyas.heads.files import CONFIG, WEIGHTS, save_head
from eyas.target import Target
from tests.engines import broken
from tests.engines.conftest import DEPTH, MAX_TOKENS
from tests.engines.counts import Counts, chain_counts
from tests.engines.vllm_server import vllm_server

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

FEW = 8  # prompts that tell a broken head

LAYOUTS = {"plain": save_head}


@pytest.fixture(scope="module")
def python() -> Path:
    path = Path(os.environ.get("EYAS_VLLM_PYTHON", ".venv-vllm/bin/python"))
    if not path.is_file():
        pytest.skip(f"no vLLM here: {path} is missing; `make test-vllm` installs it")
    return path


@pytest.fixture(scope="module")
def plain_answers(python: Path, target_dir: Path, prompts: list[list[int]], tmp_path_factory: pytest.TempPathFactory) -> list:
    """What vLLM writes without a head."""
    log = tmp_path_factory.mktemp("vllm") / "plain.log"
    with vllm_server(python, target_dir, log) as server:
        return server.complete(prompts, MAX_TOKENS)


@pytest.fixture
def serve(python: Path, target_dir: Path, tmp_path: Path) -> Callable[[Path, list[list[int]]], tuple[list[list[int]], Counts]]:
    """Serve the head of a folder, ask it prompts, and return the answers and what vLLM counted."""

    def ask(folder: Path, prompts: list[list[int]]) -> tuple[list[list[int]], Counts]:
        config = {"method": "eagle3", "model": str(folder), "num_speculative_tokens": DEPTH}
        with vllm_server(python, target_dir, tmp_path / "vllm.log", config) as server:
            return server.complete(prompts, MAX_TOKENS), server.counts()

    return ask


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_head_is_served_as_we_measure_it(layout, head, prompts, ours, plain_answers, serve, tmp_path) -> None:
    LAYOUTS[layout](head, tmp_path / "head")
    answers, theirs = serve(tmp_path / "head", prompts)
    print(f"vLLM {theirs}\nours {ours}")
    assert answers == plain_answers
    assert theirs.agrees(ours), (str(theirs), str(ours))


def move_taps(folder: Path) -> None:
    config = json.loads((folder / CONFIG).read_text())
    config["eagle_aux_hidden_state_layer_ids"] = [tap + 1 for tap in config["eagle_aux_hidden_state_layer_ids"]]
    (folder / CONFIG).write_text(json.dumps(config))


def drop_d2t(folder: Path) -> None:
    tensors = load_file(folder / WEIGHTS)
    del tensors["d2t"]
    save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(
    "fault, same_fault", [(move_taps, broken.taps_off_by_one), (drop_d2t, broken.lost_d2t)], ids=["taps", "d2t"]
)
def test_a_broken_head_is_told_apart(
    layout: str, fault: Callable[[Path], None], same_fault: Callable[[Target, Eagle3Head], tuple[Target, Eagle3Head]],
    target, head, prompts, serve, tmp_path,
) -> None:  # fmt: skip
    """vLLM says nothing and its text stays right; only the counters tell, and they are those of the same fault here."""
    LAYOUTS[layout](head, tmp_path / "head")
    fault(tmp_path / "head")
    _, theirs = serve(tmp_path / "head", prompts[:FEW])
    healthy, expected = (
        chain_counts(*pair, prompts[:FEW], depth=DEPTH, max_tokens=MAX_TOKENS)
        for pair in ((target, head), same_fault(target, head))
    )
    print(f"vLLM {theirs}\nours {expected}, healthy {healthy}")
    assert not theirs.agrees(healthy) and theirs.length < healthy.length, (str(theirs), str(healthy))
    assert theirs.agrees(expected), (str(theirs), str(expected))
