"""The race: every drafter answers the same prompts, interleaved in one process, and is measured alike.

Per prompt the order turns round (A B, then B A), so that a machine that slows down or speeds up favours nobody. Turns
after the first carry plain decoding's answer forward for all, so that every drafter reads the same prompt.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch

from eyas import machine
from eyas.bench.arithmetic import bootstrap, by_prompt, figures_of, rounds_of, speed_columns, speed_ratio, tau_of
from eyas.bench.colour import stretches
from eyas.bench.figures import PEER, PLAIN, Conditions, Entry, Noise, RaceReport, Run, Sample, Skipped, Turn
from eyas.bench.items import Item, asked_of
from eyas.chat import template_hash
from eyas.data.hashing import content_id
from eyas.decoding.engine import Request, Result
from eyas.decoding.sampling import SamplingParams
from eyas.errors import EyasError
from eyas.progress import Meter
from eyas.target import Target

AGAIN = "plain again"  # plain decoding's second run on the first prompts: what the clock alone does
WARM_UP_TOKENS = 16


@dataclass(frozen=True)
class Rules:
    """How a race is run.

    batch     prompts decoded together
    noise     prompts on which plain decoding runs twice, to see how much two equal runs differ
    samples   answers kept as text in the report
    sampling  the rule by which drafts are accepted where T > 0, as `Engine` has it
    """

    batch: int = 1
    noise: int = 4
    samples: int = 2
    sampling: str = "coupled"


class Racer(Protocol):
    """What a race asks of a contestant: an engine, or what behaves like one. One that decodes in another process, whose
    memory is not this one's, says so by an attribute `apart`."""

    max_length: int  # tokens of a prompt and its answer

    @property
    def policy(self) -> object:
        """Its text says what is drafted."""

    def generate(self, requests: Iterable[Request]) -> list[Result]: ...


def race(
    target: Target,
    racers: Mapping[str, Racer],
    items: Sequence[Item],
    params: SamplingParams,
    *,
    entries: Mapping[str, Entry] | None = None,
    rules: Rules = Rules(),
    kept: RaceReport | None = None,
    meter: Meter | None = None,
) -> RaceReport:
    """Let `racers` answer `items` under `params` and report every figure of `figures.DEFINITIONS`.

    `racers` maps names to who answers; "plain" must be among them and is what the others are compared with. `entries` says
    of the same names where they come from. Item number n is sampled with seed `params.seed + n`. A prompt that does not fit
    a racer is left out and listed in `skipped`. Ctrl-C ends the race early; what was measured by then is reported, marked
    `interrupted`; given as `kept` it is not measured again. `meter` is advanced by every answer.

    Raises EyasError when there is nothing to measure.
    """
    if PLAIN not in racers:
        raise EyasError(f"a race needs a racer named {PLAIN!r} to compare with; got {', '.join(racers) or 'none'}")
    if not items:
        raise EyasError("a race needs at least one prompt; give a suite or a file of prompts")
    course = _Course(target, dict(racers), params, rules)
    groups = course.groups(items)
    if kept is not None:
        left = course.take_over(kept, groups)
        if meter is not None:
            meter.resume_at(meter.done + _answers(groups) - _answers(left))
        groups = left
    interrupted = False
    try:
        course.warm_up(items[0])
        course.run(groups, meter)
    except KeyboardInterrupt:
        if not course.rows:
            raise
        interrupted = True
    return course.report(conditions_of(target, params, items, rules), entries or {}, interrupted)


def conditions_of(target: Target, params: SamplingParams, items: Sequence[Item], rules: Rules) -> Conditions:
    """What the numbers of a race of these depend on."""
    return Conditions(
        target=target.name,
        fingerprint=target.fingerprint,
        dtype=str(target.dtype).removeprefix("torch."),
        weights=target.weights,
        device=target.device.type,
        template=template_hash(target.tokenizer),
        prompts_id=content_id([(i.suite, i.id, i.messages, i.ids, i.tools, i.sampling) for i in items if i.copy_number == 1]),
        ignore_eos=params.ignore_eos,
        batch=rules.batch,
        rule=rules.sampling,
        prompts=sum(item.copy_number == 1 for item in items),
        repeated=sum(item.copy_number > 1 for item in items),
        machine=machine.accelerated(target.device),
        threads=torch.get_num_threads(),
        bit_exact=target.inexact is None,
        **{**asked_of(items, params), **machine.versions()},
    )


class _Conversation:
    """A prompt on its way through its turns; `answers` are plain decoding's."""

    def __init__(self, number: int, item: Item) -> None:
        self.number, self.item = number, item
        self.answers: list[str] = []


@dataclass(frozen=True)
class _Finish:
    """One racer's answers to a group of requests, and how long it took (wall clock, prefill left out)."""

    results: list[Result]
    decode_s: float


_Group = list[_Conversation]


def _answers(groups: Sequence[_Group]) -> int:
    return sum(conversation.item.answers for group in groups for conversation in group)


class _Course:
    """The race while it is run: the racers and all that has been measured so far."""

    def __init__(self, target: Target, racers: dict[str, Racer], params: SamplingParams, rules: Rules) -> None:
        self.target, self.racers, self.params, self.rules = target, racers, params, rules
        self.rows: list[Turn] = []
        self.peaks = dict.fromkeys(racers, 0.0)
        self.again: list[Turn] = []  # rows whose runs are plain decoding's first and second
        self.skipped: list[Skipped] = []
        self.samples: list[Sample] = []
        self._heats = 0

    def groups(self, items: Sequence[Item]) -> list[_Group]:
        """The prompts that are decoded together."""
        batch = self.rules.batch
        return [
            [_Conversation(n, items[n]) for n in range(start, min(start + batch, len(items)))]
            for start in range(0, len(items), batch)
        ]

    def take_over(self, kept: RaceReport, groups: list[_Group]) -> list[_Group]:
        """Count what an earlier, interrupted run of this race measured of whole groups; the groups that are left."""
        answered = Counter(row.key for row in kept.rows)
        left_out = {one.key for one in kept.skipped}
        whole = [g for g in groups if all(answered[c.item.key] == c.item.answers or c.item.key in left_out for c in g)]
        done = {c.item.key for group in whole for c in group}
        names = {c.item.id for group in whole for c in group}
        self.rows = [row for row in kept.rows if row.key in done]
        self.again = [row for row in kept.again if row.key in done]
        self.skipped = [one for one in kept.skipped if one.key in done]
        self.samples = [sample for sample in kept.samples if sample.id in names]
        self.peaks = {name: kept.drafters[name].peak_mib for name in self.racers}
        self._heats = sum(max(c.item.answers for c in group) for group in whole)
        return [group for group in groups if group not in whole]

    def warm_up(self, item: Item) -> None:
        """A short run of every racer, at full batch, that nobody measures: allocations, lazy compilation, caches."""
        ids = item.prompt(self.target)
        params = replace(self.params, max_new_tokens=WARM_UP_TOKENS)
        for racer in self.racers.values():
            request = Request(ids[: max(1, racer.max_length - WARM_UP_TOKENS)], params)
            racer.generate([request] * self.rules.batch)

    def run(self, groups: list[_Group], meter: Meter | None) -> None:
        for group in groups:
            for turn in range(1, max(c.item.answers for c in group) + 1):
                present = [c for c in group if c.item.answers >= turn == len(c.answers) + 1]
                self._heat(present, turn)
                if meter is not None:
                    meter.advance(sum(c.item.answers >= turn for c in group), **self._live())

    def _heat(self, group: list[_Conversation], turn: int) -> None:
        """One turn of a group of prompts, answered by every racer."""
        prompts = {c.number: c.item.prompt(self.target, c.answers) for c in group}
        group = [c for c in group if self._fits(c, turn, len(prompts[c.number]))]
        if not group:
            return
        requests = [Request(prompts[c.number], self._params(c), c.item.id) for c in group]
        order = list(self.racers)
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

    def _params(self, conversation: _Conversation) -> SamplingParams:
        return replace(conversation.item.params(self.params), seed=self.params.seed + conversation.number)

    def _fits(self, conversation: _Conversation, turn: int, prompt: int) -> bool:
        item, room = conversation.item, min(racer.max_length for racer in self.racers.values())
        new = self._params(conversation).max_new_tokens
        if prompt + new <= room:
            return True
        why = f"prompt of {prompt} tokens + {new} new ones > {room}"
        self.skipped.append(Skipped(suite=item.suite, id=item.id, copy_number=item.copy_number, turn=turn, why=why))
        return False

    def _timed(self, name: str, requests: list[Request]) -> _Finish:
        racer = self.racers[PLAIN if name == AGAIN else name]
        memory = machine.PeakMemory(self.target.device)
        memory.restart()
        start = time.perf_counter()
        results = racer.generate(requests)
        wall = time.perf_counter() - start
        if name != AGAIN and not getattr(racer, "apart", False):
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
        """What the progress line shows: which race this is, and how its last drafter does."""
        shown = {"T": f"{self.params.temperature:g}", "batch": str(self.rules.batch)}
        name = list(self.racers)[-1]
        if name == PLAIN or not self.rows:
            return shown
        speedup = float(speed_ratio(speed_columns([self.rows], [name, PLAIN]).sum(0)))
        return shown | {"tau": f"{tau_of(row.runs[name] for row in self.rows):.2f}", "speed-up": f"{speedup:.2f}x"}

    def report(self, conditions: Conditions, entries: Mapping[str, Entry], interrupted: bool) -> RaceReport:
        if not sum(row.runs[PLAIN].tokens for row in self.rows):
            why = f"; {self.skipped[0].id!r}: {self.skipped[0].why}" if self.skipped else ""
            raise EyasError(f"no answer had a second token, so there is no speed to measure{why}")
        noise = None
        if self.again:
            columns = speed_columns(by_prompt(self.again), [AGAIN, PLAIN])
            differing = sum(not row.runs[AGAIN].identical for row in self.again)
            noise = Noise(answers=len(self.again), ratio=bootstrap(columns, speed_ratio), differing=differing)
        rejects = self.rules.sampling == "rejection"
        ordered = sorted(self.racers, key=lambda name: name != PLAIN)
        told = {name: entries.get(name, Entry(name=name, source=name)) for name in ordered}
        drafters = {
            name: figures_of(
                self.rows,
                name,
                source=told[name].source,
                head=told[name].hash,
                tree=str(self.racers[name].policy) if name != PLAIN else "",
                peak_mib=self.peaks[name],
                own_noise=conditions.temperature > 0 and (rejects or told[name].source.startswith(PEER)),
            )
            for name in ordered
        }
        return RaceReport(
            conditions=conditions,
            drafters=drafters,
            noise=noise,
            rows=self.rows,
            again=self.again,
            skipped=self.skipped,
            samples=self.samples,
            interrupted=interrupted,
        )


def _row(item: Item, turn: int, prompt_tokens: int, runs: dict[str, Run]) -> Turn:
    return Turn(
        id=item.id, copy_number=item.copy_number, suite=item.suite, category=item.category, turn=turn,
        prompt_tokens=prompt_tokens, runs=runs,
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
        offered_by_depth=stats.by_depth_offered,
        accepted_by_depth=stats.by_depth_accepted,
        identical=result.ids == truth,
        first_difference=first_difference(result.ids, truth),
        digest=content_id(result.ids),
    )


def first_difference(a: Sequence[int], b: Sequence[int]) -> int | None:
    """The first position at which two answers differ (the shorter one's length when it is the other's beginning)."""
    if list(a) == list(b):
        return None
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
