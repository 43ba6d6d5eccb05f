"""`eyas train`: a head for a target, from answers that the target wrote."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from eyas.chat import parse_flags
from eyas.cli.options import Force, TargetChoice, Yes, consent, takes_target
from eyas.data.store import features_folder
from eyas.data.texts import training_texts
from eyas.progress import console
from eyas.training.recipe import taps_wanted
from eyas.training.recipe import train as run
from eyas.training.settings import describe_settings, read_train_config
from eyas.training.workers import first_process, own_device


def _show_settings(asked: bool) -> None:
    if asked:
        typer.echo(describe_settings())
        raise typer.Exit


@takes_target()
def train(
    responses: Annotated[Path, typer.Argument(help="answers of the target, as `eyas respond` writes them; or conversations")],
    target: TargetChoice,
    out: Annotated[Path, typer.Option(help="folder of the head; an interrupted run goes on there")] = Path("head"),
    minutes: Annotated[float | None, typer.Option(help="length of the run in minutes")] = None,
    steps: Annotated[int | None, typer.Option(help="length of the run in optimiser steps (repeatable)")] = None,
    drafter: Annotated[str | None, typer.Option(help="eagle3 (default), eagle1 (EAGLE-2's head as well) or medusa")] = None,
    init_from: Annotated[str | None, typer.Option(help="target (warm start), random, or a head: its folder or hub id")] = None,
    vocab: Annotated[int | None, typer.Option(help="draft vocabulary")] = None,
    unroll: Annotated[int | None, typer.Option(help="steps of training-time test")] = None,
    seed: Annotated[int | None, typer.Option()] = None,
    config: Annotated[Path | None, typer.Option(help="YAML file of settings (flags and --set win over it)")] = None,
    set_: Annotated[
        list[str] | None, typer.Option("--set", help="any other setting, e.g. loss=lk_lambda or head.num_layers=2; repeatable")
    ] = None,
    features: Annotated[
        Path | None,
        typer.Option(
            help="feature store; default: RESPONSES with .features. none: no disk, but a forward of the target for every text "
            "in every epoch"
        ),
    ] = None,
    held_out: Annotated[
        float, typer.Option(help="share, or number, of texts kept for races; as many again choose the head", min=0)
    ] = 0.05,
    max_length: Annotated[int, typer.Option(help="texts are cut there, in tokens", min=3)] = 1024,
    flag: Annotated[list[str] | None, typer.Option(help="for the chat template of conversations; repeatable")] = None,
    track: Annotated[list[str] | None, typer.Option(help="a tracker of accelerate's, e.g. tensorboard; repeatable")] = None,
    show_settings: Annotated[
        bool,
        typer.Option("--show-settings", help="print every setting as YAML, and end", callback=_show_settings, is_eager=True),
    ] = False,
    yes: Yes = False,
    force: Force = False,
) -> None:
    """Train a head, EAGLE-3 unless told otherwise, on RESPONSES. Ctrl-C loses nothing: run the same command again.

    Several processes: `torchrun --nproc-per-node N -m eyas.cli.main train ...`.
    """
    settings = read_train_config(
        config, set_ or [],
        {
            "minutes": minutes, "steps": steps, "drafter": drafter, "init_from": init_from, "draft_vocab_size": vocab,
            "unroll": unroll, "seed": seed,
        },
    )  # fmt: skip
    console.quiet = not first_process()
    model = replace(target, device=own_device(target.device, target.device_map)).load(taps_wanted(settings))
    samples = training_texts(responses, model, **parse_flags(flag or []))
    try:
        reached = run(
            model, samples, out, settings, features=features_folder(features, responses, settings.drafter), held_out=held_out,
            max_length=max_length, track=track or (), consent=consent(yes, force),
        )  # fmt: skip
    except KeyboardInterrupt:
        console.print(f"stopped; the run is kept in {out}, run the same command again to go on", markup=False)
        raise typer.Exit(130) from None
    alphas = " ".join(f"{a:.3f}" for a in reached.acceptance.n_alpha)
    measured = f"tau {reached.tau:.2f} measured on held-out prompts, " if reached.tau is not None else ""
    console.print(f"{out}: {measured}{reached.acceptance.tau:.2f} estimated for a greedy chain, n-alpha {alphas}", markup=False)
