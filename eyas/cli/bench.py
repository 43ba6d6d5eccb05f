"""`eyas bench`, `eyas bench compare` and `eyas bench show`."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, TypeVar

import typer
from rich.console import Console

from eyas.bench.compare import compare as compare_reports
from eyas.bench.compare import comparison_table
from eyas.bench.contestants import Contestant, parse_contestants, taps_of
from eyas.bench.figures import RaceReport
from eyas.bench.grid import Report
from eyas.bench.live.asking import Elsewhere
from eyas.bench.page import write_html
from eyas.bench.prediction import ForwardTimes
from eyas.bench.race import Rules
from eyas.bench.report import markdown as as_markdown
from eyas.bench.report import sample_text, summary, table, title
from eyas.bench.run import Plan, run_bench
from eyas.bench.sources import split_names
from eyas.bench.suites import gather
from eyas.bench.sweep import BATCHES, parse_swept, run_sweep
from eyas.bench.sweep_table import sweep_table
from eyas.bench.training_log import read_training_log
from eyas.cli.bench_server import bench_server, refuse_ignored
from eyas.cli.options import TargetChoice, takes_target
from eyas.cli.output import stdout
from eyas.decoding.sampling import SamplingParams
from eyas.decoding.static_tree import parse_tree
from eyas.errors import EyasError

app = typer.Typer(help="Measure speculative against plain decoding.", invoke_without_command=True)
Number = TypeVar("Number", int, float)


@app.callback()
@takes_target()
def bench(
    ctx: typer.Context,
    target: TargetChoice,
    drafter: Annotated[
        list[str] | None,
        typer.Option(
            "--drafter",
            "--head",
            help="[NAME=]SOURCE\\[@TREE]: a head's folder, lookup, llm:MODEL, FOLDER+lookup, plain, or peer:KIND, another "
            "project's decoder (docs/peers.md lists them); repeatable",
        ),
    ] = None,
    suite: Annotated[
        list[str] | None,
        typer.Option(
            help="suites, commas between: a file, hub:NAME/CONFIG:SPLIT, a name in --suites, or mt_bench, humaneval, gsm8k, "
            "alpaca, sum, qa as published"
        ),
    ] = None,
    suites: Annotated[Path | None, typer.Option(help="folder of <name>.jsonl suites")] = None,
    prompts: Annotated[
        list[Path] | None, typer.Option(help="a file of prompts, of recorded answers or of logged requests; repeatable")
    ] = None,
    held_out: Annotated[
        float | None, typer.Option(help="of recorded answers take the share (or number) that training held out")
    ] = None,
    held_out_seed: Annotated[int, typer.Option(help="the seed of that training run")] = 0,
    limit: Annotated[int | None, typer.Option(help="prompts per suite, evenly spaced")] = None,
    temperature: Annotated[
        list[str] | None, typer.Option(help="0 = greedy (default); several, commas between, race apart")
    ] = None,
    top_p: Annotated[float, typer.Option(help="keep the likeliest tokens up to this probability")] = 1.0,
    top_k: Annotated[int, typer.Option(help="keep so many of the likeliest tokens; 0 = all")] = 0,
    min_p: Annotated[float, typer.Option(help="keep tokens of at least this share of the likeliest one's probability")] = 0.0,
    sampling: Annotated[
        str, typer.Option(help="coupled: the same text with any drafter; rejection: only the same distribution")
    ] = "coupled",
    seed: Annotated[int, typer.Option(help="of the sampling noise")] = 0,
    max_new_tokens: Annotated[int, typer.Option(help="per answer")] = 256,
    tree: Annotated[
        list[str] | None, typer.Option(help="auto (default), DEPTHxTOPKxTOTAL, chain:K or static; for a sweep repeatable")
    ] = None,
    batch: Annotated[
        list[str] | None, typer.Option(help="prompts decoded together (default 1); several, commas between, race apart")
    ] = None,
    exact: Annotated[bool, typer.Option(help="refuse a target whose tokens are not bit-equal by construction")] = False,
    sweep: Annotated[
        bool,
        typer.Option("--sweep", help="one drafter against batch and tree size, beside a prediction; answers ignore their EOS"),
    ] = False,
    write_forward_times: Annotated[
        Path | None, typer.Option(help="with --sweep: write what forwards cost on this machine, to predict it elsewhere")
    ] = None,
    forward_times: Annotated[
        Path | None,
        typer.Option(
            help="with --sweep: a file that --sweep --write-forward-times wrote on another machine, to predict that one"
        ),
    ] = None,
    json: Annotated[
        Path | None, typer.Option(help="write the report here, race by race; the same command goes on with it")
    ] = None,
    fresh: Annotated[bool, typer.Option("--fresh", help="begin anew though the report is there")] = False,
    html: Annotated[Path | None, typer.Option(help="write a page of it here")] = None,
    log: Annotated[Path | None, typer.Option(help="training log for the page; default: the head's own log.jsonl")] = None,
    server: Annotated[
        str | None, typer.Option(help="measure the live OpenAI-compatible server at this address instead")
    ] = None,
    baseline: Annotated[
        str | None, typer.Option(help="with --server: one without the head, its address or an earlier report")
    ] = None,
    concurrency: Annotated[str | None, typer.Option(help="with --server: requests at a time, e.g. 1,2,4,8")] = None,
    model: Annotated[str | None, typer.Option(help="with --server: its name for the model, where it serves several")] = None,
    api_key: Annotated[str | None, typer.Option(help="with --server: its key; default: OPENAI_API_KEY")] = None,
) -> None:
    """Race plain decoding against drafters on the same prompts: speed, acceptance, identical tokens or not."""
    if ctx.invoked_subcommand is not None:
        return
    for path in (json, html, write_forward_times):
        _refuse_unwritable(path)
    params = SamplingParams(
        max_new_tokens=max_new_tokens, top_p=top_p, top_k=top_k, min_p=min_p, seed=seed, ignore_eos=sweep
    )  # fmt: skip
    names = split_names(suite or [])
    temperatures, batches = _numbers("--temperature", temperature, float), _numbers("--batch", batch, int)
    if server:
        refuse_ignored(ctx)
        if len(temperatures) > 1:
            raise EyasError("a live server is measured at one temperature; give one")
        asked = gather(
            Elsewhere(), names, suites, prompts or [], held_out=held_out, held_out_seed=held_out_seed, limit=limit
        )  # fmt: skip
        params = replace(params, temperature=[*temperatures, 0.0][0])
        bench_server(
            server, asked, params, concurrency=concurrency, baseline=baseline, model=model, key=api_key, json=json, html=html
        )
        return
    if baseline or concurrency or model or api_key:
        raise EyasError("--baseline, --concurrency, --model and --api-key are for a live server; name it by --server")
    if len(tree or []) > 1 and not sweep:
        raise EyasError(
            "several trees: give --sweep, or one drafter for each, e.g. --drafter HEAD@chain:2 --drafter HEAD@3x3x5"
        )
    if (forward_times or write_forward_times) and not sweep:
        raise EyasError("forward times are read and written by a sweep; add --sweep")
    elsewhere = ForwardTimes.read(forward_times) if forward_times else None
    swept = parse_swept(drafter or []) if sweep else None
    contestants = [swept] if swept else parse_contestants(drafter or [], parse_tree(tree[0] if tree else "auto"))
    log = log or _log_beside(contestants)
    training = read_training_log(log) if html and log else None
    rules = Rules(sampling=sampling)
    plan = Plan([], params, temperatures or (0.0,), batches or (BATCHES if sweep else (1,)), rules)
    loaded = target.load(taps_of(contestants))
    items = gather(loaded, names, suites, prompts or [], held_out=held_out, held_out_seed=held_out_seed, limit=limit)
    plan = replace(plan, items=items)
    console = stdout()
    if swept is not None:
        report = run_sweep(loaded, swept, tree or None, plan, exact=exact, path=json, fresh=fresh, elsewhere=elsewhere)
    else:
        seen = _race_by_race(console) if len(plan.cells) > 1 else lambda _: None
        report = run_bench(loaded, contestants, plan, exact=exact, path=json, fresh=fresh, on_race=seen)
    _show(console, report)
    if write_forward_times and report.sweep:
        report.sweep.here.write(write_forward_times)
    if html:
        write_html(report, html, training)
    if any(cell in report.unfinished for cell in plan.cells):
        console.print("stopped; " + ("the same command goes on" if json else "with --json FILE the same command would go on"))
        raise typer.Exit(130)


@app.command()
def compare(
    first: Annotated[Path, typer.Argument(help="report of the earlier run")],
    second: Annotated[Path, typer.Argument(help="report of the later run")],
) -> None:
    """Say what changed between two reports beyond noise, for every temperature and batch size that both have."""
    stdout().print(comparison_table(compare_reports(first, second)))


@app.command()
def show(
    report: Annotated[Path, typer.Argument(help="what `eyas bench --json` wrote")],
    markdown: Annotated[bool, typer.Option("--markdown", help="as tables for a page of Markdown")] = False,
    html: Annotated[Path | None, typer.Option(help="write a page of it here")] = None,
    log: Annotated[Path | None, typer.Option(help="training log for the page")] = None,
) -> None:
    """Show a report again."""
    found = Report.read(report)
    if not found.races:
        raise EyasError(f"{report}: no race of it was run to a first answer")
    if html:
        _refuse_unwritable(html)
        write_html(found, html, read_training_log(log) if log else None)
    if markdown:
        typer.echo(as_markdown(found), nl=False)
    else:
        _show(stdout(), found)


def _race_by_race(console: Console) -> Callable[[RaceReport], None]:
    def show(race: RaceReport) -> None:
        console.print(title(race))
        console.print(table(race, explained=False))
        console.print()

    return show


def _show(console: Console, report: Report) -> None:
    if report.sweep is not None:
        console.print(sweep_table(report.sweep))
    elif len(report.races) > 1:
        console.print(summary(report))
    else:
        console.print(table(report.races[0]))
        console.print()
        console.print(sample_text(report.races[0]))


def _numbers(option: str, told: Sequence[str] | None, kind: type[Number]) -> list[Number]:
    """The numbers given to an option, where commas part them, each once."""
    try:
        return list(dict.fromkeys(kind(part) for one in told or [] for part in one.split(",")))
    except ValueError as error:
        wanted = "whole numbers" if kind is int else "numbers"
        raise EyasError(f"{option} {','.join(told or [])}: {wanted}, commas between") from error


def _log_beside(contestants: Sequence[Contestant]) -> Path | None:
    """The log that the trainer left in the folder of the only head."""
    logs = [path for c in contestants if (path := Path(c.source) / "log.jsonl").is_file()]
    return logs[0] if len(logs) == 1 else None


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
