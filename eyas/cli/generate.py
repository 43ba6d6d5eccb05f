"""`eyas generate`: one answer, streamed, with what was drafted in colour."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from eyas.bench.colour import Colourer, styled
from eyas.chat import render
from eyas.cli.options import TargetChoice, takes_target
from eyas.decoding.drafters.opening import Opened, open_drafter, split_tree, taps_named
from eyas.decoding.engine import Engine, Request
from eyas.decoding.grammar import read_grammar
from eyas.decoding.sampling import SamplingParams
from eyas.decoding.static_tree import parse_tree
from eyas.decoding.stats import Stats


@takes_target()
def generate(
    prompt: Annotated[str, typer.Argument(help="what to ask; - reads it from the standard input")],
    target: TargetChoice,
    drafter: Annotated[
        str | None,
        typer.Option(
            "--drafter",
            "--head",
            help="SOURCE\\[@TREE]: a head's folder, lookup, llm:MODEL or FOLDER+lookup; none: plain decoding",
        ),
    ] = None,
    temperature: Annotated[float, typer.Option(help="0 = greedy")] = 0.0,
    top_p: Annotated[float, typer.Option(help="keep the likeliest tokens up to this probability")] = 1.0,
    top_k: Annotated[int, typer.Option(help="keep so many of the likeliest tokens; 0 = all")] = 0,
    min_p: Annotated[float, typer.Option(help="keep tokens of at least this share of the likeliest one's probability")] = 0.0,
    repetition_penalty: Annotated[float, typer.Option(help="over 1: what was said is less likely")] = 1.0,
    seed: Annotated[int, typer.Option(help="of the sampling noise")] = 0,
    max_new_tokens: Annotated[int, typer.Option(help="at most this many")] = 256,
    stop: Annotated[list[str] | None, typer.Option(help="a string that ends the answer; repeatable")] = None,
    json_schema: Annotated[Path | None, typer.Option(help="file with a JSON schema that the answer must fit")] = None,
    regex: Annotated[str | None, typer.Option(help="pattern that the whole answer must match")] = None,
    sampling: Annotated[
        str, typer.Option(help="coupled: the same text with any head; rejection: only the same distribution")
    ] = "coupled",
    tree: Annotated[str, typer.Option(help="auto, DEPTHxTOPKxTOTAL, chain:K or static")] = "auto",
    exact: Annotated[bool, typer.Option(help="refuse a target whose tokens are not bit-equal by construction")] = False,
    show_drafts: Annotated[bool, typer.Option("--show-drafts/--plain", help="colour the accepted drafts, or not")] = True,
) -> None:
    """Answer one prompt. Drafted and accepted tokens are bold green; the last line says what the head brought."""
    source, own_tree = split_tree(drafter or "")
    shape = parse_tree(tree if own_tree is None else own_tree)
    params = SamplingParams(
        max_new_tokens=max_new_tokens, temperature=temperature, top_p=top_p, top_k=top_k, min_p=min_p, seed=seed,
        repetition_penalty=repetition_penalty, stop=tuple(stop or ()), grammar=read_grammar(json_schema, regex),
    )  # fmt: skip
    model = target.load(taps_named(source) if source else None)
    opened = open_drafter(source, model) if source else Opened(model, None, "")
    asked = sys.stdin.read() if prompt == "-" else prompt
    ids = render(model.tokenizer, [{"role": "user", "content": asked}])
    engine = Engine(
        opened.target, opened.drafter, tree=shape, max_length=len(ids) + max_new_tokens, sampling=sampling, exact=exact
    )  # fmt: skip
    show(engine, Request(ids, params), Console(highlight=False), show_drafts=show_drafts)


def show(engine: Engine, request: Request, console: Console, *, show_drafts: bool) -> None:
    """Stream the answer to `request` to `console`, then a line of what it took."""
    colourer = Colourer(engine.target.tokenizer)
    start = time.perf_counter()
    for piece in engine.stream(request):
        accepted = piece.accepted if show_drafts else [False] * len(piece.ids)
        console.print(styled(colourer.feed(piece.ids, accepted)), end="", soft_wrap=True)
    seconds = time.perf_counter() - start
    console.print(styled(colourer.rest()), soft_wrap=True)
    bit_exact = engine.target.inexact is None
    console.print(statistics_line(engine.stats, seconds, bit_exact=bit_exact), style="dim")


def statistics_line(stats: Stats, seconds: float, *, bit_exact: bool) -> str:
    """What an answer took, in one line; `seconds` are those of the wall, prefill included."""
    decode = max(seconds - stats.prefill_s, 1e-9)
    parts = [
        f"{stats.emitted + 1} tokens in {seconds:.1f} s",
        f"{stats.emitted / decode:.1f} tokens/s after {stats.prefill_s:.1f} s of prefill",
        f"tau {stats.tau:.2f}",
        f"{stats.target_forwards} target forwards",
    ]
    if stats.drafted:
        parts.append(f"{stats.accepted} of {stats.drafted} drafted tokens accepted")
    parts.append("bit-exact" if bit_exact else f"{stats.near_ties} near-ties")
    return ", ".join(parts)
