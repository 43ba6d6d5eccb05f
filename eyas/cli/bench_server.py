"""`eyas bench --server`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import typer

from eyas.bench.items import Item
from eyas.bench.live.run import levels_of, measure_server
from eyas.bench.live.show import table, write_html
from eyas.cli.output import stdout
from eyas.decoding.sampling import SamplingParams
from eyas.errors import EyasError

TAKEN = {
    "suite", "suites", "prompts", "held_out", "held_out_seed", "limit", "temperature", "top_p", "top_k", "min_p", "seed",
    "max_new_tokens", "json", "html",
    "server", "baseline", "concurrency", "model", "api_key",
}  # fmt: skip


def refuse_ignored(ctx: typer.Context) -> None:
    """Raises EyasError for options that mean nothing to a live server, which has the model and the head."""
    given = [p for p in ctx.command.params if p.name and (told := ctx.get_parameter_source(p.name)) and told.name != "DEFAULT"]
    ignored = [p.opts[0] for p in given if p.name not in TAKEN]
    if ignored:
        raise EyasError(f"with --server the server has the model and the head: leave out {', '.join(ignored)}")


def bench_server(
    url: str, items: Sequence[Item], params: SamplingParams, *,
    concurrency: str | None, baseline: str | None, model: str | None, key: str | None, json: Path | None, html: Path | None,
) -> None:  # fmt: skip
    """Measure the live server `url` and show the report."""
    levels = levels_of(concurrency, len(items))
    report = measure_server(url, items, params, levels, baseline=baseline, model=model, key=key)
    stdout().print(table(report))
    if json:
        report.write(json)
    if html:
        write_html(report, html)
    if report.stopped:
        raise typer.Exit(130 if report.stopped == "interrupted" else 1)
