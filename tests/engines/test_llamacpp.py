"""Heads in llama.cpp, through `eyas export --to gguf`: accepted as our own chain's, no token changed.

Run with `make test-llamacpp`, which fetches llama.cpp and builds `llamacpp_chain.cpp` against it; `EYAS_LLAMACPP_HOME` names a
folder that `llamacpp.sh` filled before.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from eyas.export import gguf
from eyas.export.run import export_head
from eyas.heads.eagle3 import Eagle3Head
from eyas.target import Target
from tests.engines import broken
from tests.engines.conftest import DEPTH, FEW, MAX_TOKENS
from tests.engines.counts import Counts, chain_counts

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]


@pytest.fixture(scope="module")
def home() -> Path:
    path = Path(os.environ.get("EYAS_LLAMACPP_HOME", ".llamacpp"))
    if not (path / "lib" / "chain").is_file():
        pytest.skip(f"no llama.cpp in {path}; `make test-llamacpp` puts it there")
    return path


@pytest.fixture(scope="module")
def converter(home: Path) -> Iterator[Path]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(gguf.SOURCE, str(home / "source"))
        yield gguf.find_converter()


@pytest.fixture(scope="module")
def model(converter: Path, target_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The target as a GGUF file in float32."""
    path = tmp_path_factory.mktemp("target") / "target.gguf"
    convert(converter, target_dir, path)
    return path


def convert(converter: Path, folder: Path, out: Path, *options: str) -> None:
    subprocess.run([sys.executable, converter, folder, "--outtype", "f32", "--outfile", out, *options], check=True)


def answers(home: Path, model: Path, prompts: list[list[int]], head: Path | None = None) -> tuple[list[list[int]], Counts]:
    """The token ids of llama.cpp's greedy answers in float32, and what it accepted of the drafts of `head`."""
    command = [home / "lib" / "chain", "--model", model, "--ctx-size", "1024", "--batch-size", "1024", "--flash-attn", "off"]
    command += [word for cache in ("-ctk", "-ctv", "-ctkd", "-ctvd") for word in (cache, "f32")]
    command += ["--threads", os.environ.get("OMP_NUM_THREADS", str(os.cpu_count()))]
    if head is not None:
        command += ["--model-draft", head, "--spec-type", "draft-eagle3", "--spec-draft-n-max", str(DEPTH)]
    asked = "".join(" ".join(map(str, [MAX_TOKENS, *prompt])) + "\n" for prompt in prompts)
    told = subprocess.run(command, input=asked, stdout=subprocess.PIPE, text=True, check=True).stdout.splitlines()
    rounds, *accepted = (int(word) for word in told[-1].removeprefix("counts ").split())
    return [[int(word) for word in line.replace("|", "").split()] for line in told[:-1]], Counts(rounds, tuple(accepted))


def test_a_head_is_run_as_we_measure_it(
    home: Path, model: Path, target: Target, head_dir: Path, ours: Counts, prompts: list[list[int]], tmp_path: Path,
) -> None:  # fmt: skip
    folder = export_head(head_dir, target, "gguf", tmp_path / "head", dtype="float32")
    plain, _ = answers(home, model, prompts)
    drafted, theirs = answers(home, model, prompts, folder / gguf.FILE)
    print(f"\nllama.cpp: {theirs}\nours: {ours}")
    assert drafted == plain
    assert theirs.agrees(ours), (str(theirs), str(ours))


def test_taps_off_by_one_are_told_apart(
    home: Path, converter: Path, model: Path, target: Target, target_dir: Path, head_dir: Path, head: Eagle3Head,
    prompts: list[list[int]], tmp_path: Path,
) -> None:  # fmt: skip
    """A head without `d2t` does not load in llama.cpp; one with other taps does, and only its acceptance tells."""
    folder = export_head(head_dir, target, "vllm", tmp_path / "head", dtype="float32")
    broken.move_taps(folder)
    convert(converter, folder, tmp_path / "head.gguf", "--target-model-dir", str(target_dir))
    few = prompts[:FEW]
    _, theirs = answers(home, model, few, tmp_path / "head.gguf")
    healthy = chain_counts(target, head, few, depth=DEPTH, max_tokens=MAX_TOKENS)
    expected = chain_counts(*broken.taps_off_by_one(target, head), few, depth=DEPTH, max_tokens=MAX_TOKENS)
    print(f"\nllama.cpp: {theirs}\nours: {expected}; healthy: {healthy}")
    assert not theirs.agrees(healthy) and theirs.length < healthy.length, (str(theirs), str(healthy))
    assert theirs.agrees(expected), (str(theirs), str(expected))
