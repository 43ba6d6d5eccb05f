"""The race: every drafter answers the same prompts, interleaved in one process, and is measured alike.

Per prompt the order turns round (A B, then B A), so that a machine that slows down or speeds up favours nobody. Turns
after the first carry plain decoding's answer forward for all, so that every drafter reads the same prompt.
"""

from __future__ import annotations

import datetime
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from eyas import machine
from eyas.bench.arithmetic import bootstrap, by_prompt, figures_of, rounds_of, speed_columns, speed_ratio, tau_of
from eyas.bench.colour import stretches
from eyas.bench.figures import PLAIN, Conditions, Depths, Noise, RaceReport, Run, Sample, Skipped, Turn
from eyas.bench.suites import Item
from eyas.chat import template_hash
from eyas.data.hashing import content_id
from eyas.decoding.engine import Engine, Request, Result
from eyas.decoding.sampling import SamplingParams
from eyas.decoding.stats import Stats
from eyas.errors import EyasError
from eyas.progress import progress
from eyas.target import Target

AGAIN = "plain again"  # plain decoding's second run on the first prompts: what the clock alone does
WARM_UP_TOKENS = 16


@dataclass(frozen=True)
class Rules:
    """How a race is run.

    batch     prompts decoded together
    noise     prompts on which plain decoding runs twice, to see how much two equal runs differ
    samples   answers kept as text in the report
    """

    batch: int = 1
    noise: int = 4
    samples: int = 2


def race(
    target: Target,
    engines: Mapping[str, Engine],
    items: Sequence[Item],
    params: SamplingParams,
    *,
    heads: Mapping[str, str] | None = None,
    rules: Rules = Rules(),
) -> RaceReport:
    """Let `engines` answer `items` under `params` and report every figure of `figures.DEFINITIONS`.

    `engines` maps a drafter's name to its engine; "plain" must be among them and is what the others are compared with.
    `heads` maps names to the hash of a head's weights. Item number n is sampled with seed `params.seed + n`. A prompt
    that does not fit an engine is left out and listed in `skipped`. Ctrl-C ends the race early; what was measured by
    then is reported, marked `interrupted`.

    Raises EyasError when there is nothing to measure.
    """
    if PLAIN not in engines:
        raise EyasError(f"a race needs an engine named {PLAIN!r} to compare with; got {', '.join(engines) or 'none'}")
    if not items:
        raise EyasError("a race needs at least one prompt; give a suite or a file of prompts")
    course = _Course(target, dict(engines), params, rules)
    interrupted = False
    try:
        course.warm_up(items[0])
        course.run(items)
    except KeyboardInterrupt:
        if not course.rows:
            raise
        interrupted = True
    return course.report(conditions_of(target, params, items, rules), heads or {}, interrupted)


def conditions_of(target: Target, params: SamplingParams, items: Sequence[Item], rules: Rules) -> Conditions:
    """What the numbers of a race of these depend on."""
    return Conditions(
        target=target.name,
        fingerprint=target.fingerprint,
        dtype=str(target.dtype).removeprefix("torch."),
        weights=target.weights,
        device=target.device.type,
        template=template_hash(target.tokenizer),
        temperature=params.temperature,
        top_p=params.top_p,
        top_k=params.top_k,
        min_p=params.min_p,
        seed=params.seed,
        max_new_tokens=params.max_new_tokens,
        batch=rules.batch,
        suites=list(dict.fromkeys(item.suite for item in items)),
        prompts=len(items),
        machine=machine.accelerated(target.device),
        threads=torch.get_num_threads(),
        bit_exact=target.inexact is None,
        date=datetime.datetime.now().astimezone().isoformat(timespec="seconds"),
        **machine.versions(),
    )


class _Conversation:
    """A prompt on its way through its turns; `answers` are plain decoding's."""

    def __init__(self, number: int, item: Item) -> None:
        self.number, self.item = number, item
        self.answers: list[str] = []


@dataclass(frozen=True)
class _Finish:
    """One engine's answers to a group of requests, and how long it took (wall clock, prefill left out)."""

    results: list[Result]
    decode_s: float


class _Course:
    """The race while it is run: the engines and all that has been measured so far."""

    def __init__(self, target: Target, engines: dict[str, Engine], params: SamplingParams, rules: Rules) -> None:
        self.target, self.engines, self.params, self.rules = target, engines, params, rules
        self.rows: list[Turn] = []
        self.stats = {name: Stats() for name in engines}
        self.peaks = dict.fromkeys(engines, 0.0)
        self.again: list[Turn] = []  # rows whose runs are plain decoding's first and second
        self.skipped: list[Skipped] = []
        self.samples: list[Sample] = []
        self._heats = 0

    def warm_up(self, item: Item) -> None:
        """A short run of every engine that nobody measures: allocations, lazy compilation, caches."""
        ids = item.prompt(self.target)
        params = replace(self.params, max_new_tokens=WARM_UP_TOKENS)
        for engine in self.engines.values():
            engine.generate([Request(ids[: max(1, engine.max_length - WARM_UP_TOKENS)], params)])

    def run(self, items: Sequence[Item]) -> None:
        batch = max(1, self.rules.batch)
        groups = [
            [_Conversation(n, items[n]) for n in range(start, min(start + batch, len(items)))]
            for start in range(0, len(items), batch)
        ]
        with progress("race", sum(item.answers for item in items), "answers") as meter:
            for group in groups:
                for turn in range(1, max(c.item.answers for c in group) + 1):
                    present = [c for c in group if c.item.answers >= turn == len(c.answers) + 1]
                    self._heat(present, turn)
                    meter.advance(sum(c.item.answers >= turn for c in group), **self._live())

    def _heat(self, group: list[_Conversation], turn: int) -> None:
        """One turn of a group of prompts, answered by every engine."""
        prompts = {c.number: c.item.prompt(self.target, c.answers) for c in group}
        group = [c for c in group if self._fits(c, turn, len(prompts[c.number]))]
        if not group:
            return
        requests = [
            Request(prompts[c.number], replace(self.params, seed=self.params.seed + c.number), c.item.id) for c in group
        ]
        order = list(self.engines)
        twice = group[0].number < self.rules.noise
        if twice:
            order.append(AGAIN)
        if self._heats % 2:
            order.reverse()
        self._heats += 1
        finishes = {name: self._timed(name, requests) for name in order}
        again = finishes.pop(AGAIN, None)
        base = finishes[PLAIN]
        for place, conversation in enumerate(group):
            item, ids = conversation.item, prompts[conversation.number]
            truth = base.results[place].ids
            runs = {name: _run(finish, place, truth) for name, finish in finishes.items()}
            self.rows.append(_row(item, turn, len(ids), runs))
            if again is not None:
                both = {PLAIN: runs[PLAIN], AGAIN: _run(again, place, truth)}
                self.again.append(_row(item, turn, len(ids), both))
            if conversation.number < self.rules.samples and turn == 1:
                self._keep(item, {name: f.results[place] for name, f in finishes.items()})
            conversation.answers.append(base.results[place].text)
        for name, finish in finishes.items():
            self.stats[name] = sum((r.stats for r in finish.results), self.stats[name])

    def _fits(self, conversation: _Conversation, turn: int, prompt: int) -> bool:
        room = min(engine.max_length for engine in self.engines.values())
        if prompt + self.params.max_new_tokens <= room:
            return True
        why = f"prompt of {prompt} tokens + {self.params.max_new_tokens} new ones > {room}"
        self.skipped.append(Skipped(id=conversation.item.id, turn=turn, why=why))
        return False

    def _timed(self, name: str, requests: list[Request]) -> _Finish:
        engine = self.engines[PLAIN if name == AGAIN else name]
        memory = machine.PeakMemory()
        memory.restart()
        start = time.perf_counter()
        results = engine.generate(requests)
        wall = time.perf_counter() - start
        if name != AGAIN:
            self.peaks[name] = max(self.peaks[name], memory.read())
        return _Finish(results, max(wall - sum(r.stats.prefill_s for r in results), 1e-9))

    def _keep(self, item: Item, results: dict[str, Result]) -> None:
        """Keep the answers to a prompt's first turn as text."""
        for name, result in results.items():
            if name != PLAIN:
                told = [(s.text, s.accepted) for s in stretches(result.ids, result.accepted, self.target.tokenizer)]
                question = item.question(self.target, 1)
                self.samples.append(Sample(id=item.id, drafter=name, prompt=question, stretches=told))

    def _live(self) -> dict[str, str]:
        """What the progress line shows of the last drafter."""
        name = list(self.engines)[-1]
        if name == PLAIN or not self.rows:
            return {}
        speedup = float(speed_ratio(speed_columns([self.rows], [name, PLAIN]).sum(0)))
        return {"tau": f"{tau_of(row.runs[name] for row in self.rows):.2f}", "speed-up": f"{speedup:.2f}x"}

    def report(self, conditions: Conditions, heads: Mapping[str, str], interrupted: bool) -> RaceReport:
        if not sum(row.runs[PLAIN].tokens for row in self.rows):
            why = f"; {self.skipped[0].id!r}: {self.skipped[0].why}" if self.skipped else ""
            raise EyasError(f"no answer had a second token, so there is no speed to measure{why}")
        noise = None
        if self.again:
            columns = speed_columns(by_prompt(self.again), [AGAIN, PLAIN])
            differing = sum(not row.runs[AGAIN].identical for row in self.again)
            noise = Noise(answers=len(self.again), ratio=bootstrap(columns, speed_ratio), differing=differing)
        drafters = {
            name: figures_of(
                self.rows,
                name,
                Depths(n_alpha=self.stats[name].n_alpha, joint=self.stats[name].joint),
                head=heads.get(name, ""),
                tree=str(engine.policy) if name != PLAIN else "",
                peak_mib=self.peaks[name],
            )
            for name, engine in sorted(self.engines.items(), key=lambda pair: pair[0] != PLAIN)
        }
        return RaceReport(
            conditions=conditions,
            drafters=drafters,
            noise=noise,
            rows=self.rows,
            skipped=self.skipped,
            samples=self.samples,
            interrupted=interrupted,
        )


def _row(item: Item, turn: int, prompt_tokens: int, runs: dict[str, Run]) -> Turn:
    return Turn(
        id=item.id, suite=item.suite, category=item.category, turn=turn, prompt_tokens=prompt_tokens, runs=runs
    )  # fmt: skip


def _run(finish: _Finish, place: int, truth: list[int]) -> Run:
    """The figures of one answer out of a group's; the group's seconds are shared out by tokens."""
    result = finish.results[place]
    counts = [max(0, len(r.ids) - 1) for r in finish.results]
    share = counts[place] / sum(counts) if sum(counts) else 1 / len(counts)
    stats = result.stats
    return Run(
        tokens=counts[place],
        decode_s=finish.decode_s * share,
        prefill_s=stats.prefill_s,
        target_forwards=stats.target_forwards,
        rounds=rounds_of(result.accepted),
        drafted=stats.drafted,
        accepted=stats.accepted,
        draft_s=stats.draft_s,
        verify_s=stats.verify_s,
        near_ties=stats.near_ties,
        identical=result.ids == truth,
        first_difference=first_difference(result.ids, truth),
        digest=content_id(result.ids),
    )


def first_difference(a: Sequence[int], b: Sequence[int]) -> int | None:
    """The first position at which two answers differ (the shorter one's length when it is the other's beginning)."""
    if list(a) == list(b):
        return None
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
