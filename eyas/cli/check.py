"""`eyas check`: the doctor for heads."""

from __future__ import annotations

import json as writer
from pathlib import Path
from typing import Annotated

import typer

from eyas.cli.options import TargetChoice, TargetSpec
from eyas.cli.output import stdout
from eyas.data.samples import read_responses
from eyas.doctor.check import check_head, load_target
from eyas.doctor.readings import ENGINES
from eyas.doctor.show import screen
from eyas.files import write_text


def check(
    head: Annotated[Path, typer.Argument(help="folder of a head, in any public layout")],
    target: TargetSpec = TargetChoice.spec,
    engine: Annotated[
        list[str] | None, typer.Option(help=f"as this engine would load it: {', '.join(ENGINES)}; default: all of them")
    ] = None,
    texts: Annotated[
        Path | None, typer.Option(help="answers to judge drafts on, as `eyas respond` writes them; default: a few are written")
    ] = None,
    json: Annotated[Path | None, typer.Option(help="write the findings here")] = None,
    weights: Annotated[str, typer.Option(help="packing of the target: stock, fp32, fp16 or int8")] = "stock",
) -> None:
    """Say what is wrong with a head, and the cure: its files, its settings, its drafts. The exit code is 1 when it is ill."""
    model = load_target(target, head, weights=weights)
    given = read_responses(texts, fingerprint=model.fingerprint, vocab_size=model.vocab_size) if texts else None
    checkup = check_head(head, model, engines=engine or tuple(ENGINES), texts=given)
    if json:
        write_text(json, writer.dumps(checkup.as_json(), indent=1))
    stdout().print(screen(checkup))
    raise typer.Exit(0 if checkup.healthy else 1)
