"""What every engine is tested with: the real target, a trained head, 20 prompts, and our own counts of both."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from eyas.chat import render
from eyas.errors import EyasError
from eyas.heads.eagle3 import Eagle3Head
from eyas.heads.files import load_head
from eyas.locate import locate
from eyas.target import Target
from tests.engines.counts import Counts, chain_counts

DEPTH = 3  # drafts of a round, the engines' k
MAX_TOKENS = 96
FEW = 8  # prompts that tell a broken head
QUESTIONS = """\
Why is the sky blue?
How do I plan a garden for a small balcony?
Can you suggest a healthy breakfast for a busy morning?
What are the benefits of walking every day?
Write a short story about a lighthouse keeper.
Explain how a bicycle stays upright.
Can you give me advice on how to learn a new language?
List three prime numbers and say why they are prime.
How can I save money when I travel?
Write a Python function that adds up a list of numbers.
What should I think about before I start a small business?
Can you explain what an algorithm is?
Write an email that thanks a colleague for her help.
How do bees make honey?
What is the difference between weather and climate?
Can you suggest ways to sleep better at night?
Describe a day at the beach in a few sentences.
How do I prepare for a job interview?
What makes a good teacher?
Give me five tips for writing clearly.""".splitlines()


def readme_command(folder: Path) -> list[str]:
    """The command that the README of the exported head in `folder` tells the user to type."""
    block = re.search(r"^```bash\n(.*?)^```$", (folder / "README.md").read_text(), re.MULTILINE | re.DOTALL)
    assert block
    return shlex.split(block[1].replace("\\\n", " "))


@pytest.fixture(scope="session")
def target() -> Target:
    try:
        return Target.load("smollm2")
    except EyasError as error:
        pytest.skip(str(error))


@pytest.fixture(scope="session")
def target_dir(target: Target) -> Path:
    """The target as a plain Hugging Face directory in float32."""
    return Path(locate(target.name))


@pytest.fixture(scope="session")
def head_dir() -> Path:
    """The head in $EYAS_TEST_HEAD; without it one that is trained here in three minutes and kept in `runs`."""
    given = os.environ.get("EYAS_TEST_HEAD")
    return Path(given) if given else _trained(Path("runs/engines"))


@pytest.fixture(scope="session")
def head(target: Target, head_dir: Path) -> Eagle3Head:
    return load_head(head_dir, target)


def _trained(home: Path) -> Path:
    """A small head: 100 seconds of answers, 80 seconds of training, with the public commands."""
    answers, head = home / "responses.jsonl", home / "head"
    steps = [
        ["respond", "--self-prompts", "400", "--out", answers, "--minutes", "1.7", "--max-new-tokens", "128",
         "--batch", "64", "--features", "--weights", "fp16"],
        ["train", answers, "--out", head, "--minutes", "1.3", "--held-out", "8", "--vocab", "4096", "--weights", "fp16"],
    ]  # fmt: skip
    if not (home / "done").is_file():
        for step in steps:
            subprocess.run([sys.executable, "-m", "eyas.cli.main", *map(str, step)], check=True)
        (home / "done").touch()
    return head


@pytest.fixture(scope="session")
def prompts(target: Target) -> list[list[int]]:
    return [render(target.tokenizer, [{"role": "user", "content": question}]) for question in QUESTIONS]


@pytest.fixture(scope="session")
def ours(target: Target, head: Eagle3Head, prompts: list[list[int]]) -> Counts:
    """What our own chain of 3 counts on the prompts."""
    return chain_counts(target, head, prompts, depth=DEPTH, max_tokens=MAX_TOKENS)
