"""A load of so many requests at a time: as one is answered the next goes out, so that the number in flight is held."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence

import httpx2

from eyas.bench.items import Item
from eyas.bench.live.figures import Answer, Level
from eyas.data.connection import Connection, reason_of
from eyas.errors import EyasError

BROKEN_OFF = (httpx2.HTTPError, ValueError)  # what the client raises for an answer that breaks off in the middle
IN_A_ROW = 3  # requests that fail one after the other, at least, before the server is given up

Ask = Callable[[Item], Awaitable[Answer]]


async def load(ask: Ask, items: Sequence[Item], concurrency: int, server: Connection, tick: Callable[[], None]) -> Level:
    """Ask `items`, `concurrency` at a time; `tick` is called after each. Failed requests are counted by their reason.

    Raises EyasError when every request failed, or as many in a row as are in flight, and when the server wants a key.
    """
    waiting = iter(items)
    answers: list[Answer] = []
    failures: Counter[str] = Counter()
    in_flight = most = in_a_row = 0

    async def work() -> None:
        nonlocal in_flight, most, in_a_row
        for item in waiting:
            in_flight += 1
            most = max(most, in_flight)
            try:
                answers.append(await ask(item))
                in_a_row = 0
            except (server.openai.OpenAIError, *BROKEN_OFF) as error:
                if isinstance(error, server.openai.APIStatusError):
                    server.refuse_key(error)
                failures[reason_of(error)] += 1
                in_a_row += 1
                if in_a_row >= max(IN_A_ROW, concurrency):
                    return
            finally:
                in_flight -= 1
            tick()

    begun = time.perf_counter()
    workers = [asyncio.create_task(work()) for _ in range(concurrency)]
    try:
        await asyncio.gather(*workers)
    finally:
        for worker in workers:
            worker.cancel()
        await asyncio.gather(*workers, return_exceptions=True)
    seconds = time.perf_counter() - begun
    if not answers or in_a_row >= max(IN_A_ROW, concurrency):
        what = "stopped answering" if answers else "failed every request"
        reasons = "; ".join(f"{count} times: {reason}" for reason, count in failures.most_common(3))
        raise EyasError(f"{server.root} {what} at {concurrency} at a time ({reasons})")
    return Level(
        concurrency=concurrency, most_in_flight=most, seconds=seconds, answers=answers, failures=dict(failures)
    )  # fmt: skip
