"""`eyas bench` and `eyas bench compare`."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from eyas.bench.compare import compare as compare_reports
from eyas.bench.compare import comparison_table
from eyas.bench.figures import PLAIN
from eyas.bench.race import Rules
from eyas.bench.report import sample_text, table, write_html
from eyas.bench.run import run_bench
from eyas.bench.suites import gather
from eyas.bench.training_log import read_training_log
from eyas.cli.options import TargetChoice, takes_target
from eyas.decoding.sampling import SamplingParams
from eyas.decoding.static_tree import parse_tree
from eyas.errors import EyasError
from eyas.heads.files import tap_ids

app = typer.Typer(help="Measure speculative against plain decoding.", invoke_without_command=True)


@app.callback()
@takes_target()
def bench(
    ctx: typer.Context,
    target: TargetChoice,
    head: Annotated[list[str] | None, typer.Option(help="a head's folder, or NAME=FOLDER; repeatable, to race several")] = None,
    suite: Annotated[list[str] | None, typer.Option(help="suites of --suites by name, commas between")] = None,
    suites: Annotated[Path | None, typer.Option(help="folder of <name>.jsonl suites")] = None,
    prompts: Annotated[list[Path] | None, typer.Option(help="a file of prompts or of recorded answers; repeatable")] = None,
    held_out: Annotated[
        float | None, typer.Option(help="of recorded answers take the share (or number) that training held out")
    ] = None,
    held_out_seed: Annotated[int, typer.Option(help="the seed of that training run")] = 0,
    limit: Annotated[int | None, typer.Option(help="prompts per suite, evenly spaced")] = None,
    temperature: Annotated[float, typer.Option(help="0 = greedy")] = 0.0,
    seed: Annotated[int, typer.Option(help="of the sampling noise")] = 0,
    max_new_tokens: Annotated[int, typer.Option(help="per answer")] = 256,
    tree: Annotated[str, typer.Option(help="auto, DEPTHxTOPKxTOTAL, chain:K or static")] = "auto",
    batch: Annotated[int, typer.Option(help="prompts decoded together", min=1)] = 1,
    exact: Annotated[bool, typer.Option(help="refuse a target whose tokens are not bit-equal by construction")] = False,
    json: Annotated[Path | None, typer.Option(help="write the report here")] = None,
    html: Annotated[Path | None, typer.Option(help="write a page of it here")] = None,
    log: Annotated[Path | None, typer.Option(help="training log for the page; default: the head's own log.jsonl")] = None,
) -> None:
    """Race plain decoding against a head on the same prompts: speed, acceptance, identical tokens or not."""
    if ctx.invoked_subcommand is not None:
        return
    for path in (json, html):
        _refuse_unwritable(path)
    shape = parse_tree(tree)
    heads = _heads(head or [])
    log = log or _log_beside(heads)
    training = read_training_log(log) if html and log else None
    model = target.load(tap_ids(*heads.values()))
    names = [name.strip() for told in suite or [] for name in told.split(",")]
    items = gather(model, names, suites, prompts or [], held_out=held_out, held_out_seed=held_out_seed, limit=limit)
    params = SamplingParams(max_new_tokens=max_new_tokens, temperature=temperature, seed=seed)
    report = run_bench(model, heads, items, params, tree=shape, rules=Rules(batch=batch), exact=exact)
    console = Console(highlight=False)
    console.print(table(report))
    console.print()
    console.print(sample_text(report))
    if json:
        report.write(json)
    if html:
        write_html(report, html, training)
    if report.interrupted:
        raise typer.Exit(130)


@app.command()
def compare(
    first: Annotated[Path, typer.Argument(help="report of the earlier run")],
    second: Annotated[Path, typer.Argument(help="report of the later run")],
) -> None:
    """Say what changed between two reports beyond noise."""
    Console(highlight=False).print(comparison_table(compare_reports(first, second)))


def _heads(told: list[str]) -> dict[str, Path]:
    """NAME=FOLDER, or a folder: "EAGLE-3" where it is the only head, else called like its folder."""
    heads: dict[str, Path] = {}
    for one in told:
        name, mark, folder = one.partition("=")
        if not mark or Path(one).is_dir():
            name, folder = "EAGLE-3" if len(told) == 1 else Path(one).name, one
        if name in heads or name == PLAIN:
            raise EyasError(f"two drafters would be called '{name}'; tell them apart by --head NAME=FOLDER")
        heads[name] = Path(folder)
    return heads


def _log_beside(heads: dict[str, Path]) -> Path | None:
    """The log that the trainer left in the folder of the only head."""
    logs = [folder / "log.jsonl" for folder in heads.values()]
    return logs[0] if len(logs) == 1 and logs[0].is_file() else None


def _refuse_unwritable(path: Path | None) -> None:
    """Say so before the race rather than after it."""
    if path is None:
        return
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise EyasError(f"cannot write {path}: {error.strerror}") from error
    if path.is_dir() or not os.access(path.parent, os.W_OK):
        raise EyasError(f"cannot write {path}: {'it is a folder' if path.is_dir() else 'its folder is read-only'}")
