"""What an arm's head is worth on texts that no arm has learnt from: estimated on the texts, and decoding their prompts."""

from __future__ import annotations

import time
from collections.abc import Sequence

import numpy as np
from pydantic import BaseModel

from eyas.bench.arithmetic import bootstrap, chain_length, quotient, speed_ratio
from eyas.bench.figures import Interval
from eyas.chat import Sample
from eyas.data.batches import Batch
from eyas.data.features import Features
from eyas.decoding.drafters.opening import open_drafter
from eyas.decoding.engine import Engine, Request, Result
from eyas.decoding.sampling import SamplingParams
from eyas.decoding.tree import TreeShape
from eyas.heads.files import load_any_head
from eyas.progress import Interrupt, progress
from eyas.scaling.plan import StudyConfig
from eyas.target import Target
from eyas.training.acceptance import measure

DEPTH = 5  # of the chains whose acceptance is estimated


class Measured(BaseModel):
    """`tau_chain` and `n_alpha`, depths 1 to 5 (Medusa: as many as it has heads), of a greedy chain estimated on every position
    of the test texts; `tau` and `speedup` of answering their prompts with the study's tree, with 95 % intervals over prompts.
    `chains` holds every text's chains offered at depths 1, 2, ... and then those accepted, `rounds` (tokens, rounds) of every
    prompt, so that intervals of what is fitted to many arms can be resampled.
    `identical`: every answer was plain decoding's."""

    head: str
    tau_chain: Interval
    n_alpha: list[float]
    tau: Interval
    speedup: Interval
    chains: list[list[int]]
    rounds: list[tuple[int, int]]
    identical: bool


def measure_head(
    folder: str, target: Target, texts: Sequence[Features], prompts: Sequence[Sample], study: StudyConfig
) -> Measured:  # fmt: skip
    """Measure the head in `folder`; plain decoding runs between its answers. `texts` carry the taps that the head reads."""
    opened = open_drafter(folder, target)
    assert opened.drafter is not None
    depth = min(DEPTH, opened.drafter.depth or DEPTH)
    head = load_any_head(folder, target)
    by_text = [measure(head, [Batch.of([text])], depth) for text in texts]
    chains = [[*one.offered, *one.accepted] for one in by_text]
    length = max(s.spans[0][0] for s in prompts) + study.tokens
    engines = {
        "plain": Engine(target, max_length=length),
        "head": Engine(opened.target, opened.drafter, tree=TreeShape.parse(study.tree), max_length=length),
    }
    rows, columns, identical = [], [], True
    with progress("answers", len(prompts), "prompts") as meter, Interrupt() as interrupt:
        for number, sample in enumerate(prompts):
            params = SamplingParams(max_new_tokens=study.tokens, temperature=study.temperature, seed=study.seed + number)
            request = Request(sample.ids[: sample.spans[0][0]], params)
            order = list(engines) if number % 2 else list(reversed(engines))
            done = {name: _timed(engines[name], request) for name in order}
            (plain, plain_s), (drafted, drafted_s) = done["plain"], done["head"]
            identical &= plain.ids == drafted.ids
            tokens = float(plain.stats.emitted)
            columns.append((tokens, drafted_s, tokens, plain_s))
            rows.append((drafted.stats.emitted, drafted.stats.rounds))
            meter.advance(1)
            if interrupt.asked:
                raise KeyboardInterrupt
    return Measured(
        head=opened.hash,
        tau_chain=bootstrap(np.array(chains, dtype=float), chain_length),
        n_alpha=[sum(c[depth + n] for c in chains) / max(sum(c[n] for c in chains), 1) for n in range(depth)],
        chains=chains,
        tau=bootstrap(np.array(rows, dtype=float), quotient),
        speedup=bootstrap(np.array(columns), speed_ratio),
        rounds=rows,
        identical=identical,
    )


def _timed(engine: Engine, request: Request) -> tuple[Result, float]:
    """An answer and the seconds it took after prefill."""
    start = time.perf_counter()
    result = engine.generate([request])[0]
    return result, max(time.perf_counter() - start - result.stats.prefill_s, 1e-9)
