"""Two processes (gloo, CPU) do what one does: the same gradients, the same weights, one head, one log."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from eyas.heads.files import load_head
from tests.test_unroll import random_head
from tests.tiny import tiny_target
from tests.two_processes import MICRO_BATCHES, STEPS, some_steps


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("two")
    command = [
        sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "tests/two_processes.py",
        str(folder),
    ]  # fmt: skip
    root = str(Path(__file__).parent.parent)
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": root}
    done = subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True, timeout=800)
    assert done.returncode == 0, done.stderr[-3000:]
    return folder


@pytest.fixture(scope="module")
def one(tmp_path_factory: pytest.TempPathFactory) -> dict[str, torch.Tensor]:
    accumulating = STEPS.model_copy(update={"accumulate": 2})
    return some_steps(tmp_path_factory.mktemp("one"), accumulating, MICRO_BATCHES)


@pytest.mark.parametrize("shard", [False, True], ids=["ddp", "fsdp2"])
def test_two_processes_have_the_gradient_and_the_weights_of_one(shard: bool, two: Path, one: dict[str, torch.Tensor]) -> None:
    result = torch.load(two / f"result-{shard}.pt", weights_only=True)
    assert result.keys() == one.keys()
    start = random_head(tiny_target("llama")).state_dict()
    for name, tensor in one.items():
        off = float((result[name].float() - tensor.float()).norm())
        if name.startswith("grad."):
            assert off <= 1e-5 * float(tensor.norm()), name
        else:  # AdamW makes a whole step of a gradient that is rounding alone, so the weights are held against their way
            assert off <= 2e-2 * float((tensor.float() - start[name].float()).norm()), name


def test_a_run_of_two_processes_leaves_one_head_and_one_log(two: Path) -> None:
    rows = [json.loads(line) for line in (two / "head/log.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows if "loss" in row] == [1, 2, 3] and sum("eval" in row for row in rows) == 1
    assert load_head(two / "head", tiny_target("llama")).config.draft_vocab_size == 120


def test_two_processes_that_read_on_the_fly_train_the_same_head(two: Path) -> None:
    stored, read = (load_head(two / out, tiny_target("llama")).state_dict() for out in ("head", "on the fly"))
    assert all(torch.equal(read[name], tensor) for name, tensor in stored.items())
