"""What an arm's head is worth on texts that no arm has learnt from: estimated on the texts, and decoding their prompts."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from pydantic import BaseModel

from eyas.bench.arithmetic import bootstrap, chain_length
from eyas.bench.figures import PLAIN, Interval
from eyas.bench.items import Item
from eyas.bench.race import Rules, race
from eyas.chat import Sample
from eyas.data.batches import Batch
from eyas.data.features import text_key
from eyas.data.fetching import Stored
from eyas.data.store import FeatureStore
from eyas.decoding.drafters.opening import drafter_of
from eyas.decoding.engine import Engine
from eyas.decoding.sampling import SamplingParams
from eyas.decoding.tree import TreeShape
from eyas.heads.files import head_hash, load_any_head
from eyas.progress import progress
from eyas.scaling.plan import StudyConfig
from eyas.target import Target
from eyas.training.acceptance import measure

HEAD = "head"  # the racer beside plain decoding
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


def measure_head(folder: str, target: Target, features: Path, test: Sequence[Sample], study: StudyConfig) -> Measured:
    """Measure the head in `folder` on the texts `test`, whose `features` are stored; it races plain decoding on
    their prompts."""
    head = load_any_head(folder, target)
    reading = target.tapped(head.config.taps(target))
    drafter = drafter_of(reading, head, weights=target.weights)
    depth = min(DEPTH, drafter.depth or DEPTH)
    texts = Stored(FeatureStore(features, reading), [text_key(s) for s in test])
    by_text = [measure(head, [Batch.of([text])], depth) for text in texts]
    chains = [[*one.offered, *one.accepted] for one in by_text]

    prompts = [s.prompt for s in test[: study.answers]]
    items = [Item(str(number), "test", "test", ids=prompt) for number, prompt in enumerate(prompts)]
    params = SamplingParams(max_new_tokens=study.tokens, temperature=study.temperature, seed=study.seed)
    length = max(map(len, prompts)) + study.tokens
    racers = {
        PLAIN: Engine(target, max_length=length),
        HEAD: Engine(reading, drafter, tree=TreeShape.parse(study.tree), max_length=length),
    }
    with progress("answers", len(items), "prompts") as meter:
        raced = race(target, racers, items, params, rules=Rules(noise=0, samples=0), meter=meter)
    if raced.interrupted:
        raise KeyboardInterrupt
    runs = [row.runs[HEAD] for row in raced.rows]
    return Measured(
        head=head_hash(folder),
        tau_chain=bootstrap(np.array(chains, dtype=float), chain_length),
        n_alpha=[sum(c[depth + n] for c in chains) / max(sum(c[n] for c in chains), 1) for n in range(depth)],
        chains=chains,
        tau=raced.drafters[HEAD].tau,
        speedup=raced.drafters[HEAD].speedup,
        rounds=[(sum(run.rounds), len(run.rounds)) for run in runs],
        identical=all(run.identical for run in runs),
    )


def difference(one: Measured, other: Measured) -> Interval:
    """By how much `other`'s estimated tau is above `one`'s, the same test texts resampled for both."""
    columns = np.concatenate([np.array(m.chains, dtype=float) for m in (one, other)], axis=1)  # [N, C1 + C2]
    width = len(one.chains[0])
    return bootstrap(columns, lambda sums: chain_length(sums[..., width:]) - chain_length(sums[..., :width]))
