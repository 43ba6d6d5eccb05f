"""`eyas export`: a head for a serving engine."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from eyas.cli.options import TargetChoice, TargetSpec
from eyas.export.run import ENGINES, engine_named, export_head
from eyas.heads.files import tap_ids
from eyas.target import Target


def export(
    head: Annotated[Path, typer.Argument(help="folder of a head, in any public layout")],
    to: Annotated[str, typer.Option(help=f"engine: {', '.join(ENGINES)}")],
    out: Annotated[Path, typer.Option(help="new folder to write")],
    target: TargetSpec = TargetChoice.spec,
    dtype: Annotated[str | None, typer.Option(help="float32, bfloat16 or float16; default: as the target is stored")] = None,
    report: Annotated[Path | None, typer.Option(help="report of `eyas bench --json`, for the model card")] = None,
    licence: Annotated[str | None, typer.Option(help="SPDX name, for the model card")] = None,
) -> None:
    """Write a head for a serving engine, with the command that serves it and a model card in its README."""
    engine_named(to)
    model = Target.load(target, taps=tap_ids(head))
    export_head(head, model, to, out, dtype=dtype, report=report, licence=licence)
    Console(highlight=False).print(f"wrote {out}; {out / 'README.md'} says how to serve it", soft_wrap=True)
