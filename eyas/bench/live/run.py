"""A benchmark of a live server from addresses to a report: warm up, load at every concurrency, count, compare, advise."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import httpx2
import numpy as np

from eyas import machine
from eyas.bench.arithmetic import bootstrap, speed_ratio
from eyas.bench.figures import Interval
from eyas.bench.items import Item, asked_of, filled
from eyas.bench.live import metrics
from eyas.bench.live.advice import advise, estimated, tokens_per_round
from eyas.bench.live.asking import ask, beyond_openai, key_of
from eyas.bench.live.figures import Answer, Level, LiveConditions, LiveReport, Side
from eyas.bench.live.load import load
from eyas.data.connection import Connection
from eyas.data.hashing import content_id
from eyas.decoding.sampling import SamplingParams
from eyas.errors import EyasError
from eyas.progress import progress

ANSWER_S = 600.0  # of silence, before a request is given up
WARM_UP_TOKENS = 8  # of every prompt's answer, at the greatest concurrency: compilation, graphs, the prefix cache
USUAL = (1, 2, 4, 8, 16, 32, 64)


def levels_of(told: str | None, prompts: int) -> list[int]:
    """The concurrencies in `told`, like "1,2,4"; None: powers of two up to 64, as far as there are `prompts`.

    Raises EyasError for what is no such list.
    """
    if told is None:
        return [n for n in USUAL if n <= prompts]
    try:
        levels = sorted({int(part) for part in told.split(",")})
    except ValueError as error:
        raise EyasError(f"--concurrency {told}: numbers with commas between, e.g. 1,2,4,8") from error
    if levels[0] < 1:
        raise EyasError(f"--concurrency {told}: at least one request must be in flight")
    return levels


def measure_server(
    url: str, items: Sequence[Item], params: SamplingParams, levels: Sequence[int], *,
    baseline: str | None = None, model: str | None = None, key: str | None = None,
) -> LiveReport:  # fmt: skip
    """Ask the server `url` the first question of every prompt, at each of the concurrencies `levels`; see `LiveReport`.

    The first prompts are asked again where their number is no multiple of a concurrency, as a race fills its batches.
    `baseline` serves the same model without a head: its address, or the file of a report that was measured there. Two
    addresses take turns, level by level. `model` is the server's name for the model, needed where it serves several, `key`
    what it wants instead of OPENAI_API_KEY. Ctrl-C, and a server that stops answering, end it early: the levels that were
    finished are reported, and `stopped` says why there are no more.

    Raises EyasError when a server cannot be asked or nothing was measured.
    """
    conditions = conditions_of(items, params)
    earlier = _earlier(baseline, conditions) if baseline and "://" not in baseline else None
    addresses = [url, baseline] if baseline and earlier is None else [url]
    servers = [Connection(address, key) for address in addresses]
    sides = [Side(url=server.root, model=asyncio.run(server.find_model(model))[0]) for server in servers]
    stopped = ""
    asked = sum(len(filled(items, concurrency)) for concurrency in (max(levels), *levels))
    with progress("live", len(sides) * asked, "answers") as meter:
        try:
            asyncio.run(_measure(list(zip(servers, sides, strict=True)), items, params, levels, meter.advance))
        except KeyboardInterrupt:
            stopped = "interrupted"
        except EyasError as error:
            stopped = str(error)
    if not sides[0].levels:
        if stopped == "interrupted":
            raise KeyboardInterrupt
        raise EyasError(stopped)
    return _report(conditions, sides[0], earlier or (sides[1] if len(sides) > 1 else None), stopped)


def conditions_of(items: Sequence[Item], params: SamplingParams) -> LiveConditions:
    """What can be known of the conditions from outside the server."""
    return LiveConditions(
        prompts=len(items),
        digest=content_id([[key_of(i), list(i.ids), list(i.messages), list(i.tools), i.sampling] for i in items]),
        beyond_openai=sorted({name for item in items for name in beyond_openai(item.params(params))}),
        machine=machine.processor(),
        eyas=machine.versions()["eyas"],
        **asked_of(items, params),
    )


@dataclass(frozen=True)
class _Open:
    """A server with what it is asked through, and what has been measured of it."""

    server: Connection
    side: Side
    client: Any  # openai's
    http: httpx2.Client  # for what is beside the API

    async def loaded(
        self, items: Sequence[Item], params: SamplingParams, concurrency: int, tick: Callable[[], None]
    ) -> Level:  # fmt: skip
        async def one(item: Item) -> Answer:
            return await ask(self.client, self.side.model, item, params)

        return await load(one, filled(items, concurrency), concurrency, self.server, tick)

    async def measured(
        self, items: Sequence[Item], params: SamplingParams, concurrency: int, tick: Callable[[], None]
    ) -> None:  # fmt: skip
        """Add a level to the side, with what the server's counters say of it."""
        before = metrics.read(self.http, self.server, self.side.model)
        level = await self.loaded(items, params, concurrency, tick)
        after = metrics.read(self.http, self.server, self.side.model)
        level.acceptance = metrics.between(before, after)
        self.side.remark = after.remark
        self.side.levels.append(level)


async def _measure(
    sides: Sequence[tuple[Connection, Side]], items: Sequence[Item], params: SamplingParams, levels: Sequence[int],
    tick: Callable[[], None],
) -> None:  # fmt: skip
    """Fill the sides with their levels. The order of two servers turns round from level to level."""
    few = replace(params, max_new_tokens=min(WARM_UP_TOKENS, params.max_new_tokens))
    async with AsyncExitStack() as stack:
        http = stack.enter_context(httpx2.Client(timeout=metrics.READ_S))
        opened = []
        for server, side in sides:
            client = await stack.enter_async_context(server.client(retries=0, seconds=ANSWER_S))
            opened.append(_Open(server, side, client, http))
        for one in opened:
            await one.loaded(items, few, max(levels), tick)
        for number, concurrency in enumerate(levels):
            for one in reversed(opened) if number % 2 else opened:
                await one.measured(items, params, concurrency, tick)


def _earlier(path: str, conditions: LiveConditions) -> Side:
    """The server of an earlier report, as a baseline. Raises EyasError when it was asked something else."""
    report = LiveReport.read(Path(path))
    for name in ("digest", "max_new_tokens", "temperature", "top_p", "top_k", "min_p", "seed"):
        then, now = getattr(report.conditions, name), getattr(conditions, name)
        if then != now:
            what = "other prompts (or tools or sampling of theirs)" if name == "digest" else f"{name} {then}, this is {now}"
            raise EyasError(f"the baseline {path} was measured with {what}; measure both alike")
    return report.server


def _report(conditions: LiveConditions, server: Side, baseline: Side | None, stopped: str) -> LiveReport:
    tokens = tokens_per_round(server)
    both = [(level, base) for level in server.levels if baseline and (base := baseline.at(level.concurrency))]
    return LiveReport(
        conditions=conditions,
        server=server,
        baseline=baseline,
        speedups={level.concurrency: ratio for level, base in both if (ratio := speedup(level, base))},
        tokens_per_round=tokens,
        estimated=bool(tokens) and estimated(server),
        advice=advise(both, tokens),
        stopped=stopped,
    )


def speedup(level: Level, base: Level) -> Interval | None:
    """Tokens per second of an answer's time over the baseline's, on the prompts that both answered; None without any.

    The answers to a prompt that was asked again are resampled together.
    """
    theirs = {answer.prompt: answer for answer in base.answers}
    columns: dict[str, list[float]] = {}
    for a in level.answers:
        if (b := theirs.get(a.prompt)) is not None:
            sums = columns.setdefault(a.prompt.rpartition("/")[0], [0.0] * 4)
            sums[:] = map(sum, zip(sums, (a.tokens, a.seconds, b.tokens, b.seconds), strict=True))
    return bootstrap(np.array(list(columns.values())), speed_ratio) if columns else None
