"""`eyas data`: look at training data before a long run learns from it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from eyas.chat import parse_flags
from eyas.cli.options import TargetChoice, takes_target
from eyas.cli.respond import report_refused
from eyas.data.inspection import coloured, look
from eyas.data.rows import report_bad
from eyas.data.samples import statistics
from eyas.errors import EyasError


@takes_target()
def show(
    file: Annotated[Path, typer.Argument(help="answers (token ids) or conversations")],
    target: TargetChoice,
    sample: Annotated[int, typer.Option(help="which text to print, counted from 1", min=1)] = 1,
    flag: Annotated[
        list[str] | None, typer.Option(help="for the chat template, e.g. enable_thinking=false; repeatable")
    ] = None,
) -> None:
    """Print one text of FILE with its supervised tokens coloured, the counts of all, and what looks wrong."""
    model = target.load()
    found = look(file, model, **parse_flags(flag or []))
    if sample > len(found.samples):
        raise EyasError(f"{file} has only {len(found.samples)} samples, so there is no sample {sample}")
    chosen = found.samples[sample - 1]
    out = Console(highlight=False)
    out.print(f"sample {sample} of {len(found.samples)}: {chosen.id}", markup=False, style="bold")
    out.print(coloured(chosen, model.tokenizer, model.eos_ids))
    out.print(f"{chosen.supervised} of {len(chosen.ids)} tokens supervised (green; end of turn magenta)\n")
    out.print(statistics(found.samples).line(), markup=False)
    if found.roles:
        out.print("messages: " + ", ".join(f"{role} {count:,}" for role, count in found.roles.items()))
    for warning, (count, first) in found.warnings.items():
        out.print(f"warning: {count:,} samples: {warning} (first: {first})", style="yellow", markup=False)
    report_bad(found.bad)
    report_refused(found.refused)
