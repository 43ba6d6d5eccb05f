"""`eyas train`: a head for a target, from answers that the target wrote."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
from pydantic import ValidationError

from eyas.chat import parse_flags
from eyas.cli.options import Force, TargetChoice, Yes, consent, takes_target
from eyas.data.store import features_beside
from eyas.data.texts import training_texts
from eyas.errors import EyasError, first_fault
from eyas.progress import console
from eyas.training.config import TrainConfig
from eyas.training.recipe import train as run

DEFAULTS = {name: field.default for name, field in TrainConfig.model_fields.items()}


@takes_target()
def train(
    responses: Annotated[Path, typer.Argument(help="answers of the target, as `eyas respond` writes them; or conversations")],
    target: TargetChoice,
    out: Annotated[Path, typer.Option(help="folder of the head; an interrupted run goes on there")] = Path("head"),
    minutes: Annotated[float | None, typer.Option(help="length of the run in minutes")] = None,
    steps: Annotated[int | None, typer.Option(help="length of the run in optimiser steps (repeatable)")] = None,
    features: Annotated[Path | None, typer.Option(help="feature store; default: RESPONSES with .features")] = None,
    held_out: Annotated[
        float, typer.Option(help="share, or number, of texts kept for races; as many again choose the head", min=0)
    ] = 0.05,
    max_length: Annotated[int, typer.Option(help="texts are cut there, in tokens", min=3)] = 1024,
    vocab: Annotated[int | None, typer.Option(help="draft vocabulary")] = None,
    unroll: Annotated[int, typer.Option(help="steps of training-time test")] = DEFAULTS["unroll"],
    grow_until: Annotated[float, typer.Option(help="share of the run in which the unroll grows to its depth")] = DEFAULTS[
        "grow_until"
    ],
    start: Annotated[str, typer.Option(help="warm (from the target's weights) or random")] = DEFAULTS["start"],
    learning_rate: Annotated[float, typer.Option()] = DEFAULTS["learning_rate"],
    batch_slots: Annotated[int, typer.Option(help="slots of one micro-batch")] = DEFAULTS["slots_per_batch"],
    accumulate: Annotated[int, typer.Option(help="micro-batches per optimiser step")] = DEFAULTS["accumulate"],
    seed: Annotated[int, typer.Option()] = DEFAULTS["seed"],
    flag: Annotated[list[str] | None, typer.Option(help="for the chat template of conversations; repeatable")] = None,
    yes: Yes = False,
    force: Force = False,
) -> None:
    """Train an EAGLE-3 head on RESPONSES. Ctrl-C loses nothing: run the same command again."""
    settings: dict[str, Any] = {
        "minutes": minutes, "steps": steps, "draft_vocab_size": vocab, "unroll": unroll, "grow_until": grow_until,
        "start": start, "learning_rate": learning_rate, "slots_per_batch": batch_slots, "accumulate": accumulate,
        "seed": seed,
    }  # fmt: skip
    try:
        config = TrainConfig(**settings)
    except ValidationError as error:
        raise EyasError(first_fault(error)) from error
    model = target.load()
    samples = training_texts(responses, model, **parse_flags(flag or []))
    try:
        reached = run(
            model, samples, out, config, features=features or features_beside(responses), held_out=held_out,
            max_length=max_length, consent=consent(yes, force),
        )  # fmt: skip
    except KeyboardInterrupt:
        console.print(f"stopped; the run is kept in {out}, run the same command again to go on", markup=False)
        raise typer.Exit(130) from None
    alphas = " ".join(f"{a:.3f}" for a in reached.n_alpha)
    console.print(f"{out}: estimated tau {reached.tau:.2f} for a greedy chain, n-alpha {alphas}", markup=False)
