"""The target answers prompts: one line a finished answer, resumable, the tokens exactly as the engine saw and wrote
them."""

from __future__ import annotations

import dataclasses
import json
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from statistics import mean
from typing import Any

from transformers import PreTrainedTokenizerBase

from eyas.chat import Message, render, template_hash
from eyas.data.asking import Answer, AnsweringEngine, Ask, Failed, ServedAnswer, written_by
from eyas.data.forecast import FeatureSink, forecast
from eyas.data.hashing import content_id, derived_seed, derived_share
from eyas.data.jsonl import GrowingFile
from eyas.data.prompts import Prompt
from eyas.data.temperatures import Temperatures
from eyas.errors import EyasError
from eyas.estimate import Consent, Estimate, admit
from eyas.progress import Meter, progress

CALLING_ROLES = {"tool", "function", "ipython"}
RENDERED = 64  # prompts from which the length of all is estimated
ENOUGH_KNOWN = 16  # answers whose mean length is taken for that of the others; before, the limit is


@dataclass
class Summary:
    """What a run of `respond` did. Counts are answers, `tokens` generated ones.

    `kept` were in the file before, `too_long` had no room for prompt and answer, `duplicates` asked what another
    prompt asked, `refused` could not be rendered and `failed` were not answered (id and reason), `finish` says how the
    new answers ended, `out_of_time` whether the time limit left prompts unasked. Of answers that came as text,
    `retokenised` counts all, `doubted` by reason those whose tokens are not certain: training leaves them out.
    """

    written: int = 0
    kept: int = 0
    too_long: int = 0
    duplicates: int = 0
    tokens: int = 0
    seconds: float = 0.0
    out_of_time: bool = False
    refused: list[tuple[str, str]] = field(default_factory=list)
    failed: list[tuple[str, str]] = field(default_factory=list)
    retokenised: int = 0
    doubted: Counter[str] = field(default_factory=Counter)
    finish: Counter[str] = field(default_factory=Counter)

    def line(self) -> str:
        """The figures in one line."""
        parts = [f"{self.written:,} answers written ({self.tokens:,} tokens in {self.seconds:.0f} s)"]
        parts += [f"{self.finish['length']:,} cut at the limit"] if self.finish["length"] else []
        parts += [f"{self.retokenised:,} came as text and were tokenised again"] if self.retokenised else []
        parts += [f"{count:,} of them are left out of training ({why})" for why, count in self.doubted.most_common()]
        parts += [f"{self.kept:,} there before"] if self.kept else []
        parts += [f"{self.too_long:,} prompts too long"] if self.too_long else []
        parts += [f"{self.duplicates:,} repeated"] if self.duplicates else []
        parts += [f"{len(self.refused):,} refused by the template"] if self.refused else []
        parts += [f"{len(self.failed):,} failed"] if self.failed else []
        parts += ["stopped by the time limit"] if self.out_of_time else []
        return ", ".join(parts)


def respond(
    engine: AnsweringEngine, prompts: Sequence[Prompt], out: Path | str, *, params: Any,
    temperatures: Temperatures | None = None, flags: dict[str, Any] | None = None, rewrite: bool = True,
    minutes: float | None = None, features: FeatureSink | None = None, consent: Consent | None = None,
) -> Summary:  # fmt: skip
    """Let the engine's target answer `prompts` and append the answers to `out` as they finish.

    A conversation of several user turns is answered turn by turn, each of the given answers replaced by the target's
    own (`rewrite`); one with tool calls, or any when `rewrite` is off, keeps its answers and gets only the last one
    written. `params` are the sampling parameters; each answer has a seed of its own drawn from (`params.seed`, its
    id) and, with `temperatures`, its temperature likewise, so an answer depends neither on the batch nor on the
    order. `flags` go to the chat template.

    `out` begins with a header (target, template, sampling) and then has rows {id, content, temperature, prompt_len,
    finish, ids}, `ids` being prompt and answer, to which answers of several turns add {conversation, turn}. What was
    asked before (by `content`, whatever its id) is kept and not asked again. After `minutes` no further prompt is asked;
    what is in flight is still finished. `features` takes those of every result before its line is written; `eyas train`
    reads anew what a crash kept it from flushing. What a long job will take is measured and said first (`consent`).

    Raises EyasError for no prompts, a file begun with other settings, a job that cannot fit, a full disk, or when there is
    no answer in the end though there was time for one.
    """
    if not prompts:
        raise EyasError("no prompts to answer")
    tokenizer = engine.target.tokenizer
    mix = temperatures or Temperatures.of(params.temperature)
    with GrowingFile(Path(out), _header(engine, params, mix, flags or {}, rewrite)) as file:
        job = _Job(engine, file, params, mix, flags or {}, minutes, features)
        conversations = job.distinct([_Conversation.of(p, rewrite) for p in prompts])
        conversations.sort(key=lambda c: derived_share("order", params.seed, c.id))  # a run cut short is a fair sample
        job.take_over(conversations, tokenizer)
        admit(job.forecast(conversations), consent or Consent())
        with progress("respond", sum(len(c.asks) for c in conversations), "answers") as meter:
            meter.resume_at(job.summary.kept)
            for turn in range(max(len(c.asks) for c in conversations)):
                job.run([c for c in conversations if len(c.asks) > turn], turn, meter)
    return job.finished(out)


@dataclass
class _Conversation:
    """`asks[k]` are the messages that come after answer k-1 and before answer k; `answers` the target's texts so
    far; `content` names what is asked."""

    id: str
    content: str
    category: str
    tools: list[dict[str, Any]] | None
    asks: list[list[Message]]
    answers: list[str] = field(default_factory=list)

    @classmethod
    def of(cls, prompt: Prompt, rewrite: bool) -> _Conversation:
        messages = prompt.open_messages()
        calls = any(m["role"] in CALLING_ROLES or m.get("tool_calls") for m in messages)
        asks = _asks(messages) if rewrite and not calls else [messages]
        return cls(prompt.id, content_id(asks, prompt.tools), prompt.category, prompt.tools, asks)

    def answer_id(self, turn: int) -> str:
        return f"{self.id}#{turn + 1}" if len(self.asks) > 1 else self.id

    def prompt(self, turn: int) -> list[Message]:
        """The messages before answer `turn`, with the target's own earlier answers."""
        messages = list(self.asks[0])
        for answer, ask in zip(self.answers[:turn], self.asks[1 : turn + 1], strict=True):
            messages += [{"role": "assistant", "content": answer}, *ask]
        return messages


def _asks(messages: Sequence[Message]) -> list[list[Message]]:
    """`messages` cut after each user turn; answers that follow a user turn are left out, to be written by the
    target."""
    asks: list[list[Message]] = [[]]
    complete = False  # whether the last of `asks` has its user turn
    for message in messages:
        if complete and message["role"] == "assistant":
            continue
        if complete:
            asks.append([])
        asks[-1].append(message)
        complete = message["role"] == "user"
    if len(asks) > 1 and not complete:  # closing messages without a user turn belong to the turn before
        asks[-2] += asks.pop()
    return asks


@dataclass
class _Job:
    """One run of `respond`."""

    engine: AnsweringEngine
    file: GrowingFile
    params: Any
    mix: Temperatures
    flags: dict[str, Any]
    minutes: float | None
    features: FeatureSink | None
    summary: Summary = field(default_factory=Summary)

    def __post_init__(self) -> None:
        self.start = time.monotonic()
        self._answered: set[tuple[str, int]] = set()  # content and turn
        self._lengths: list[int] = []  # of the answers that were there before, in tokens
        self._asked: dict[str, tuple[_Conversation, int, Ask]] = {}  # in flight, by the conversation's id

    def distinct(self, conversations: list[_Conversation]) -> list[_Conversation]:
        """Without those that ask what an earlier one asks. Raises EyasError when one id stands for two of them."""
        by_content = {c.content: c for c in reversed(conversations)}
        kept = list(reversed(by_content.values()))
        self.summary.duplicates = len(conversations) - len(kept)
        twice = [name for name, count in Counter(c.id for c in kept).items() if count > 1]
        if twice:
            raise EyasError(f"the id '{twice[0]}' stands for two different prompts; ids must be unique")
        return kept

    def take_over(self, conversations: Sequence[_Conversation], tokenizer: PreTrainedTokenizerBase) -> None:
        """Take note of the answers that the file holds already."""
        wanted = {(c.content, turn) for c in conversations for turn in range(len(c.asks))}
        texts: dict[tuple[str, int], str] = {}
        for row in self.file.rows():
            if not isinstance(row.get("ids"), list) or not isinstance(row.get("prompt_len"), int):
                raise EyasError(f"{self.file.path}: the row '{row.get('id')}' has no ids or prompt_len; mend or remove it")
            key = str(row.get("content")), int(row.get("turn", 1)) - 1
            if key in wanted:
                self._answered.add(key)
                self._lengths.append(len(row["ids"]) - row["prompt_len"])
                texts[key] = answer_text(tokenizer, row["ids"][row["prompt_len"] :], self.params.stop)
        for c in conversations:
            while (c.content, len(c.answers)) in texts:
                c.answers.append(texts[c.content, len(c.answers)])
        self.summary.kept = len(self._answered)

    def forecast(self, conversations: Sequence[_Conversation]) -> Estimate:
        """What the answers that are not there yet will take."""
        left = [c for c in conversations if len(c.answers) < len(c.asks)]
        known = len(self._lengths) >= ENOUGH_KNOWN
        prompts = []
        for c in left[:: max(1, len(left) // RENDERED)][:RENDERED]:
            with suppress(EyasError):  # it will be refused when its turn comes
                ids = render(self.engine.target.tokenizer, c.prompt(len(c.answers)), tools=c.tools, **self.flags)
                prompts.append(ids[: self.engine.max_length - self.params.max_new_tokens])
        return forecast(
            self.engine, [ids for ids in prompts if ids], sum(len(c.asks) - len(c.answers) for c in left), self.params,
            answer_tokens=mean(self._lengths) if known else self.params.max_new_tokens, folder=self.file.path.parent,
            features=self.features, probe=self.minutes is None,
        )  # fmt: skip

    def run(self, conversations: Sequence[_Conversation], turn: int, meter: Meter) -> None:
        """Ask for answer `turn` of all `conversations` that have come that far."""

        def finish(result: Answer | Failed) -> None:
            if isinstance(result, Failed):
                conversation, turn, _ = self._asked.pop(result.id)
                self.summary.failed.append((conversation.id, result.why))
                meter.total -= len(conversation.asks) - turn
                return
            self._keep(result)
            rate = self.summary.tokens / max(time.monotonic() - self.start, 1e-9)
            meter.advance(1, **{"tokens/s": f"{rate:.0f}", **self._time_left()})

        self.engine.generate(self._admit(conversations, turn, meter), on_finish=finish)

    def finished(self, out: Path | str) -> Summary:
        self.summary.seconds = time.monotonic() - self.start
        done = self.summary
        if not done.written and not done.kept and not done.out_of_time:
            why = "".join(f"; {reason}" for _, reason in (done.refused + done.failed)[:1])
            raise EyasError(f"{out}: no prompt could be answered ({done.line()}{why})")
        return done

    def _admit(self, conversations: Sequence[_Conversation], turn: int, meter: Meter) -> Iterator[Ask]:
        for c in conversations:
            if (c.content, turn) in self._answered or len(c.answers) < turn:
                continue
            if self.minutes is not None and time.monotonic() - self.start >= 60 * self.minutes:
                self.summary.out_of_time = True
                return
            try:
                ids = render(self.engine.target.tokenizer, c.prompt(turn), tools=c.tools, **self.flags)
            except EyasError as error:
                self.summary.refused.append((c.id, str(error)))
                meter.total -= len(c.asks) - turn
                continue
            if len(ids) + self.params.max_new_tokens > self.engine.max_length:
                self.summary.too_long += 1
                meter.total -= len(c.asks) - turn
                continue
            ask = Ask(ids, self._params(c.answer_id(turn)), c.id)
            self._asked[ask.id] = (c, turn, ask)
            yield ask

    def _params(self, answer_id: str) -> Any:
        temperature = self.mix.draw(self.params.seed, answer_id)
        return dataclasses.replace(
            self.params, temperature=temperature, seed=derived_seed("answer", self.params.seed, answer_id)
        )

    def _keep(self, result: Answer) -> None:
        conversation, turn, ask = self._asked.pop(result.id)
        if self.features is not None:
            self.features.take(result)
        row: dict[str, Any] = {
            "id": conversation.answer_id(turn), "content": conversation.content, "temperature": ask.params.temperature,
            "prompt_len": len(ask.ids), "finish": result.finish, "ids": [*ask.ids, *result.ids],
        }  # fmt: skip
        if len(conversation.asks) > 1:
            row |= {"conversation": conversation.id, "turn": turn + 1}
        if isinstance(result, ServedAnswer) and not result.exact:
            row["retokenised"] = True
            self.summary.retokenised += 1
            if result.doubt:
                row["doubt"] = result.doubt
                self.summary.doubted[result.doubt] += 1
        if conversation.category:
            row["category"] = conversation.category
        self.file.append(row)
        conversation.answers.append(answer_text(self.engine.target.tokenizer, result.ids, self.params.stop))
        self._answered.add((conversation.content, turn))
        self.summary.written += 1
        self.summary.tokens += len(result.ids)
        self.summary.finish[result.finish] += 1

    def _time_left(self) -> dict[str, str]:
        if self.minutes is None:
            return {}
        left = max(0.0, 60 * self.minutes - (time.monotonic() - self.start))
        return {"limit in": f"{left:.0f} s"}


def answer_text(tokenizer: PreTrainedTokenizerBase, ids: Sequence[int], stop: Sequence[str] = ()) -> str:
    """What the target said, as the next turn's history holds it: without special tokens and from a stop string on."""
    text = str(tokenizer.decode(list(ids), skip_special_tokens=True, clean_up_tokenization_spaces=False))
    return text[: min((at for at in map(text.find, stop) if at >= 0), default=len(text))]


def _header(
    engine: AnsweringEngine, params: Any, mix: Temperatures, flags: dict[str, Any], rewrite: bool
) -> dict[str, Any]:  # fmt: skip
    target = engine.target
    sampling = dataclasses.asdict(params) | {"temperature": str(mix)}
    return {
        "eyas": "responses",
        **written_by(target),
        "template": template_hash(target.tokenizer),
        "render": json.loads(json.dumps(flags, default=str)),
        "rewrite": rewrite,
        "sampling": sampling,
    }
