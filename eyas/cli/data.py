"""`eyas data`: look at training data before a long run learns from it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from eyas.chat import parse_flags
from eyas.cli.options import TargetChoice, takes_target
from eyas.data.inspection import coloured, warnings_of
from eyas.data.rows import report_bad, report_skipped
from eyas.data.samples import statistics
from eyas.data.texts import load_texts, split_for_training
from eyas.errors import EyasError


@takes_target()
def show(
    file: Annotated[Path, typer.Argument(help="answers (token ids) or conversations, as for `eyas train`")],
    target: TargetChoice,
    sample: Annotated[int, typer.Option(help="which text to print, counted from 1", min=1)] = 1,
    held_out: Annotated[float, typer.Option(help="as for `eyas train`", min=0)] = 0.05,
    max_length: Annotated[int, typer.Option(help="as for `eyas train`", min=3)] = 1024,
    seed: Annotated[int, typer.Option(help="as for `eyas train`")] = 0,
    flag: Annotated[
        list[str] | None, typer.Option(help="for the chat template, e.g. enable_thinking=false; repeatable")
    ] = None,
) -> None:
    """Print one text of FILE with its supervised tokens coloured, the counts of all, and what looks wrong."""
    model, flags = target.load(), parse_flags(flag or [])
    found = load_texts(file, model, **flags)
    shown = found.samples or found.unanswered
    if sample > len(shown):
        raise EyasError(f"{file} has only {len(shown)} samples, so there is no sample {sample}")
    chosen = shown[sample - 1]
    out = Console(highlight=False)
    out.print(f"sample {sample} of {len(shown)}: {chosen.id}", markup=False, style="bold")
    out.print(coloured(chosen, model.tokenizer, model.eos_ids))
    out.print(f"{chosen.supervised} of {len(chosen.ids)} tokens supervised (green; end of turn magenta)\n")
    out.print(statistics(shown).line(), markup=False)
    if found.roles:
        out.print("messages: " + ", ".join(f"{role} {count:,}" for role, count in found.roles.items()))
    if found.samples and found.unanswered:
        out.print(f"{len(found.unanswered):,} conversations have no answer and are left out")
    if found.duplicates:
        out.print(f"{found.duplicates:,} say again what an earlier one says and are left out")
    try:
        out.print(split_for_training(shown, held_out=held_out, max_length=max_length, seed=seed).line(), markup=False)
    except EyasError as error:
        out.print(f"`eyas train` would refuse it: {error}", style="yellow", markup=False)
    for warning, (count, first) in warnings_of(found, model, **flags).items():
        out.print(f"warning: {count:,} samples: {warning} (first: {first})", style="yellow", markup=False)
    report_bad(found.bad)
    report_skipped(found.refused)
