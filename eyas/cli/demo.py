"""`eyas demo`: the main job from end to end, as nothing but the public commands in a row."""

from __future__ import annotations

import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Annotated

import typer

from eyas.cli.options import TargetChoice, takes_target
from eyas.errors import EyasError
from eyas.progress import clock, console

OVERHEAD = 2.5  # minutes for loading, the race and the sample text; the first run also converts the target and compiles
RESPOND, TRAIN = 0.51, 0.49  # shares of the rest
PROMPT = "Explain to a child why the sky is blue."


@takes_target(weights="fp16")
def demo(
    target: TargetChoice,
    minutes: Annotated[float, typer.Option(help="bound of the whole run", min=4)] = 14,
    out: Annotated[Path, typer.Option(help="where everything is kept; the same command goes on there")] = Path("runs/demo"),
) -> None:
    """From a target alone to a faster, identical answer: prompts, answers, features, a head, a race, a report.

    Every step is the command that is printed before it, and works the same for a model of yours.
    """
    start, work = time.monotonic(), minutes - OVERHEAD
    answers, head = out / "responses.jsonl", out / "head"
    common = target.arguments()
    if not (head / "train.json").is_file():  # once training has begun its texts are settled
        _run("respond", "--self-prompts", "2000", "--out", str(answers), "--minutes", f"{work * RESPOND:.2f}",
             "--max-new-tokens", "160", "--batch", "64", "--features", *common)  # fmt: skip
    _run("train", str(answers), "--out", str(head), "--minutes", f"{work * TRAIN:.2f}", "--held-out", "20",
         "--vocab", "4096", *common)  # fmt: skip
    report, page = out / "report.json", out / "report.html"
    _run("bench", "--drafter", f"EAGLE-3={head}", "--fresh", "--prompts", str(answers), "--held-out", "20", "--limit", "12",
         "--max-new-tokens", "96", "--json", str(report), "--html", str(page), "--log", str(head / "log.jsonl"),
         *common)  # fmt: skip
    _run("generate", PROMPT, "--head", str(head), "--max-new-tokens", "120", *common)
    console.print(f"\nthe report is {page}; the head is {head}; all in {clock(time.monotonic() - start)}", markup=False)


def _run(*arguments: str) -> None:
    """Run one public command in a process of its own, as a user would; its failure ends the demo.

    Ctrl-C goes to that process, which saves its work; the demo waits for it.
    """
    console.print(f"\n$ eyas {shlex.join(arguments)}", style="bold cyan", markup=False, soft_wrap=True)
    start = time.monotonic()
    before = signal.signal(signal.SIGINT, lambda *_: None)
    try:
        code = subprocess.Popen([sys.executable, "-m", "eyas.cli.main", *arguments]).wait()
    finally:
        signal.signal(signal.SIGINT, before)
    if code in (130, -signal.SIGINT):
        raise KeyboardInterrupt
    if code:
        raise EyasError(f"the demo stops here: `eyas {arguments[0]}` ended with code {code}")
    console.print(f"({arguments[0]}: {clock(time.monotonic() - start)})", style="dim", markup=False)
