"""`eyas respond`: the target answers prompts of yours, or its own."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated, Any

import typer

from eyas.chat import parse_flags
from eyas.cli.options import Force, TargetChoice, Yes, consent, takes_target
from eyas.data.prompts import Prompt, read_prompts
from eyas.data.responses import respond as answer
from eyas.data.rows import report_bad, report_skipped
from eyas.data.self_prompts import write_own_prompts
from eyas.data.server import ServedTarget, ServerEngine
from eyas.data.store import FeatureStore, features_beside
from eyas.data.temperatures import Temperatures
from eyas.decoding.engine import Engine
from eyas.decoding.sampling import SamplingParams
from eyas.errors import EyasError
from eyas.progress import console

OWN_PROMPTS_SHARE = 1 / 4  # of the time limit, at most, goes into the prompts themselves


@takes_target()
def respond(
    target: TargetChoice,
    prompts: Annotated[
        Path | None,
        typer.Argument(
            help="a JSONL, JSON, Parquet, CSV or text file, a folder of them, or a data set: hub:NAME:SPLIT, "
            "hub:NAME/CONFIG:SPLIT; left out with --self-prompts"
        ),
    ] = None,
    out: Annotated[Path, typer.Option(help="JSON-lines file of answers; an interrupted run goes on with it")] = Path(
        "responses.jsonl"
    ),
    self_prompts: Annotated[int, typer.Option(help="let the target write this many prompts itself", min=0)] = 0,
    max_new_tokens: Annotated[int, typer.Option(help="answers are cut there and marked", min=1)] = 256,
    temperature: Annotated[str, typer.Option(help="one for all, or a mixture: 0,0.8 (equal) or 0:60,0.8:40")] = "0",
    seed: Annotated[int, typer.Option(help="of prompts, temperatures and answers")] = 0,
    batch: Annotated[int, typer.Option(help="conversations decoded together", min=1)] = 8,
    server: Annotated[
        str | None, typer.Option(help="URL of an OpenAI-compatible server that runs the target (vLLM, SGLang)")
    ] = None,
    model: Annotated[str | None, typer.Option(help="the server's name for the target, where it serves several")] = None,
    concurrency: Annotated[int, typer.Option(help="requests in flight at the server", min=1)] = 16,
    max_length: Annotated[int, typer.Option(help="longest prompt and answer together, in tokens", min=2)] = 1024,
    minutes: Annotated[float | None, typer.Option(help="ask no further prompt after this long", min=0)] = None,
    keep_answers: Annotated[bool, typer.Option(help="keep given earlier answers; write only the last one anew")] = False,
    features: Annotated[
        bool, typer.Option("--features/--no-features", help="keep what training needs while answering (OUT.features)")
    ] = False,
    flag: Annotated[
        list[str] | None, typer.Option(help="for the chat template, e.g. enable_thinking=false; repeatable")
    ] = None,
    yes: Yes = False,
    force: Force = False,
) -> None:
    """Let the target answer prompts: the text that a draft head learns from.

    With --server only the target's tokenizer and template are read here, and the server writes the answers. Answers are
    appended to OUT one by one, so Ctrl-C or a full disk loses nothing: run the same command again.
    """
    if (prompts is None) == (self_prompts == 0):
        raise EyasError("give either a file of prompts or --self-prompts N")
    mix, flags = Temperatures.parse(temperature), parse_flags(flag or [])
    asked = _read(prompts) if prompts is not None else []
    params = SamplingParams(max_new_tokens=max_new_tokens, seed=seed)
    if server is None:
        engine: Any = Engine(target.load(), max_rows=batch, max_length=max_length)
    elif features:
        raise EyasError("a server gives no features; leave --features out, `eyas train` reads them from the target")
    elif target != TargetChoice(target.spec):
        raise EyasError("with --server the weights are the server's: --weights, --dtype, --device and --taps do nothing")
    else:
        told = ServedTarget.load(target.spec)
        engine = ServerEngine(server, told, model=model, max_rows=concurrency, max_length=max_length)
    start = time.monotonic()
    try:
        if prompts is None:
            asked = write_own_prompts(
                engine, self_prompts, params=params, seed=seed, out=out.with_suffix(".prompts.jsonl"), flags=flags,
                minutes=minutes and minutes * OWN_PROMPTS_SHARE,
            )  # fmt: skip
        left = None if minutes is None else max(0.0, minutes - (time.monotonic() - start) / 60)
        settings: dict[str, Any] = {
            "params": params, "temperatures": mix, "flags": flags, "rewrite": not keep_answers, "minutes": left,
            "consent": consent(yes, force),
        }  # fmt: skip
        if features:
            engine.features = True
            with FeatureStore(features_beside(out), engine.target) as store:
                done = answer(engine, asked, out, features=store, **settings)
        else:
            done = answer(engine, asked, out, **settings)
    except KeyboardInterrupt:
        console.print(f"stopped; what was finished is kept in {out}, run the same command again to go on", markup=False)
        raise typer.Exit(130) from None
    report_skipped(done.refused + done.failed)
    console.print(f"{out}: {done.line()}", markup=False)


def _read(path: Path) -> list[Prompt]:
    read = read_prompts(path)
    report_bad(read.bad)
    if read.duplicates:
        console.print(f"{read.duplicates:,} prompts say again what an earlier one says and are left out")
    return read.prompts
