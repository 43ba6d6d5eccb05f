"""`eyas bench --server`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import typer
from rich.console import Console

from eyas.bench.items import Item
from eyas.bench.live.run import levels_of, measure_server
from eyas.bench.live.show import table, write_html
from eyas.decoding.sampling import SamplingParams


def bench_server(
    url: str, items: Sequence[Item], params: SamplingParams, *,
    concurrency: str | None, baseline: str | None, model: str | None, key: str | None, json: Path | None, html: Path | None,
) -> None:  # fmt: skip
    """Measure the live server `url` and show the report."""
    levels = levels_of(concurrency, len(items))
    report = measure_server(url, items, params, levels, baseline=baseline, model=model, key=key)
    Console(highlight=False).print(table(report))
    if json:
        report.write(json)
    if html:
        write_html(report, html)
    if report.stopped:
        raise typer.Exit(130 if report.stopped == "interrupted" else 1)
