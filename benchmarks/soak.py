"""A hundred requests of mixed lengths that join, leave and are cancelled at random: nothing may be left behind.

    python benchmarks/soak.py [--quick] [--head FOLDER] [--weights fp16]

The last line is one JSON object: requests, cancelled, slots_leaked (slots still taken, or entries of a cache still counted for
no request, when all is over), rss_growth_mb (resident memory at the end over that after a third of the requests).
"""

from __future__ import annotations

import json
import random
from dataclasses import replace

import psutil
from decoding import Pair, arguments

from eyas.decoding.engine import Engine, Request
from eyas.decoding.sampling import SamplingParams
from eyas.progress import progress

ROWS = 6


def main() -> None:
    args = arguments(__doc__ or "")
    count, longest = (100, 24) if args.quick else (100, 128)
    pair = Pair.load(args)
    chance = random.Random(0)
    asked = [
        Request(r.ids * chance.choice((1, 1, 2, 4)), replace(r.params, seed=n, max_new_tokens=chance.randint(1, longest)), r.id)
        for n, r in enumerate(pair.requests(count, SamplingParams(temperature=0.7, top_p=0.95)))
    ]
    engine = Engine(pair.target, pair.drafter(), max_rows=ROWS, max_length=max(len(r.ids) for r in asked) + longest)
    process = psutil.Process()
    waiting, running, done, cancelled, early = list(asked), set(), 0, 0, 0
    with progress("soak", count, "requests") as meter:
        while waiting or engine.busy:
            while waiting and chance.random() < 0.5:
                running.add(engine.submit(waiting.pop()))
            for ticket in list(running):
                if chance.random() < 0.01:
                    engine.cancel(ticket)
                    running.discard(ticket)
                    cancelled += 1
                    meter.advance(1)
            for event in engine.step():
                if event.result is not None:
                    running.discard(event.ticket)
                    done += 1
                    meter.advance(1)
            if not early and done + cancelled >= count // 3:
                early = process.memory_info().rss
    left = len(engine._rows) + len(engine._waiting) + len(running)
    filled = engine.generate([replace(asked[0], params=SamplingParams(max_new_tokens=2))] * ROWS)  # every slot can be had again
    assert done + cancelled == count and len(filled) == ROWS
    growth = (process.memory_info().rss - early) / 2**20
    print(json.dumps({"requests": count, "cancelled": cancelled, "slots_leaked": left, "rss_growth_mb": round(growth, 1)}))


if __name__ == "__main__":
    main()
