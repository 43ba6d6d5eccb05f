"""Prompts without a data set: the target writes the user's turns itself, from its chat template's opening.

The template is rendered up to where the user's text would begin and the target goes on from there (the idea of
Magpie, Xu et al., arXiv 2406.08464). What it writes until its end-of-turn token is a prompt of the kind it was
trained on.
"""

from __future__ import annotations

import dataclasses
import time
import unicodedata
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from eyas.chat import encode, render_text, special_ids, template_hash
from eyas.data.asking import AnsweringEngine, Ask, Failed, written_by
from eyas.data.hashing import content_id, derived_seed
from eyas.data.jsonl import GrowingFile
from eyas.data.prompts import Prompt
from eyas.errors import EyasError
from eyas.progress import Meter, console, progress

SENTINELS = ("Quartz", "7 eyas")  # two contents that share no first token: what their renderings share is the opening
MIN_WORDS, MAX_CHARACTERS = 3, 4000
TRIES_PER_PROMPT, MIN_TRIES = 20, 64
NEAR_DUPLICATE = 0.8  # share of a text's word triples that earlier texts have used already
LOOPING = 0.5  # share of a text's word triples that are different from each other, below which it repeats itself


@dataclass(frozen=True)
class Opening:
    """`ids` [P]: the rendering up to the user's text. `closing`: how the template ends that text: a special token, or a
    string where it writes none."""

    ids: list[int]
    closing: int | str


def user_opening(tokenizer: PreTrainedTokenizerBase, **flags: Any) -> Opening:
    """Where a user's first text would begin in the target's template.

    Found by rendering two different texts: the ids both share at the front are the opening. Raises EyasError when the
    template does not show the text exactly once or when the shared ids are not what is written before it.
    """
    texts = [render_text(tokenizer, [{"role": "user", "content": s}], generation_prompt=False, **flags) for s in SENTINELS]
    if any(text.count(s) != 1 for text, s in zip(texts, SENTINELS, strict=True)):
        raise EyasError("the chat template does not show the user's text exactly once, so the target cannot write its own")
    before, after = texts[0].split(SENTINELS[0])
    first, second = (encode(tokenizer, text) for text in texts)
    shared = 0
    while shared < min(len(first), len(second)) and first[shared] == second[shared]:
        shared += 1
    ids = first[:shared]
    spelled = str(tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False))
    if "".join(spelled.split()) != "".join(before.split()):
        raise EyasError(f"the chat template's opening {before[-40:]!r} cannot be told apart from the user's text in tokens")
    special = special_ids(tokenizer)
    closing = next((i for i in encode(tokenizer, after) if i in special), None)
    return Opening(ids, (after.strip() or "\n\n") if closing is None else closing)


def write_own_prompts(
    engine: AnsweringEngine, count: int, *, params: Any, seed: int = 0, temperature: float = 1.0,
    max_tokens: int = 96, minutes: float | None = None, out: Path | str | None = None,
    flags: dict[str, Any] | None = None,
) -> list[Prompt]:  # fmt: skip
    """`count` prompts that the engine's target writes as its own user, all different.

    Try i is sampled at `temperature` with a seed drawn from (`seed`, i) and `params` otherwise, so the list depends
    on the target and the seed alone. Dropped are texts that are cut at `max_tokens`, shorter than 3 words, with
    characters that do not print, looping in themselves, or near-duplicates of an earlier one. With `out` the prompts
    are kept in that file and an interrupted run goes on from it.

    Fewer prompts than asked for come back, with a warning, after `minutes` or 20 tries a prompt. Raises EyasError
    when there is none at all, or when the target's template cannot be opened (`user_opening`).
    """
    if count < 1:
        raise EyasError(f"the number of self-written prompts must be at least 1, not {count}")
    target, flags = engine.target, flags or {}
    opening = user_opening(target.tokenizer, **flags)
    if len(opening.ids) + max_tokens > engine.max_length:
        raise EyasError(f"self-written prompts of {max_tokens} tokens do not fit the engine's {engine.max_length}")
    stop = {"stop": (opening.closing,)} if isinstance(opening.closing, str) else {"stop_ids": (opening.closing,)}
    params = dataclasses.replace(params, temperature=temperature, max_new_tokens=max_tokens, seed=seed, **stop)
    writer = _Writer(engine, opening, params, count, max(MIN_TRIES, TRIES_PER_PROMPT * count), minutes)
    with progress("self-written prompts", count, "prompts") as meter:
        if out is None:
            writer.run(meter, None)
        else:
            with GrowingFile(Path(out), _header(target, params, flags)) as file:
                writer.take_over(file, meter)
                writer.run(meter, file)
    return writer.finished()


@dataclass
class _Writer:
    """One run of `write_own_prompts`; tries are numbered from 0 and judged in that order."""

    engine: AnsweringEngine
    opening: Opening
    params: Any
    count: int
    max_tries: int
    minutes: float | None
    prompts: list[Prompt] = field(default_factory=list)
    dropped: Counter[str] = field(default_factory=Counter)
    tries: int = 0

    def __post_init__(self) -> None:
        self.start = time.monotonic()
        self._waiting: dict[int, Any] = {}  # answers that came before an earlier try's
        self._seen: set[str] = set()
        self._triples: set[tuple[str, ...]] = set()  # distinct ones of all prompts kept
        self._said = 0  # all of theirs
        self._special = special_ids(self.engine.target.tokenizer)

    def take_over(self, file: GrowingFile, meter: Meter) -> None:
        """Take the prompts that the file holds and go on after the last of their tries."""
        for row in file.rows():
            if len(self.prompts) < self.count:
                self._accept(row["messages"][0]["content"])
                self.tries = row["try"] + 1
        meter.resume_at(len(self.prompts))

    def run(self, meter: Meter, file: GrowingFile | None) -> None:
        """Ask until there are enough; answers come in any order and are judged in the order of the tries."""

        def finish(result: Any) -> None:
            self._waiting[int(result.id)] = result
            while self.tries in self._waiting:
                self._judge(self.tries, self._waiting.pop(self.tries), file)
                self.tries += 1
            kept = len(self.prompts) / self.tries if self.tries else 0.0
            meter.at(len(self.prompts), kept=f"{kept:.0%}", distinct=f"{self._distinctness():.2f}")

        while len(self.prompts) < self.count and self.tries < self.max_tries and not self._out_of_time():
            self.engine.generate(self._asks(), on_finish=finish)

    def _asks(self) -> Iterator[Ask]:
        """The next tries, up to where there are enough if all that wait to be judged are good."""
        for number in range(self.tries, self.max_tries):
            if len(self.prompts) + len(self._waiting) >= self.count or self._out_of_time():
                return
            seed = derived_seed("own prompt", self.params.seed, number)
            yield Ask(self.opening.ids, dataclasses.replace(self.params, seed=seed), str(number))

    def finished(self) -> list[Prompt]:
        why = ", ".join(f"{number} {reason}" for reason, number in self.dropped.most_common())
        if not self.prompts:
            raise EyasError(
                f"the target wrote no usable prompt of its own in {self.tries} tries ({why or 'no time'}); give a file "
                "of prompts instead"
            )
        if len(self.prompts) < self.count:
            limit = "the time limit" if self._out_of_time() else f"{self.tries} tries"
            console.print(
                f"only {len(self.prompts)} of {self.count} self-written prompts after {limit} (dropped: {why})",
                style="yellow",
            )
        return self.prompts

    def _judge(self, number: int, result: Any, file: GrowingFile | None) -> None:
        if len(self.prompts) == self.count:
            return
        if isinstance(result, Failed):
            self.dropped["failed"] += 1
            return
        text, complete = self._text(result)
        if why := self._flaw(text) if complete else "unfinished":
            self.dropped[why] += 1
            return
        prompt = self._accept(text)
        if file is not None:
            file.append({"id": prompt.id, "try": number, "source": prompt.source, "messages": prompt.messages})

    def _text(self, result: Any) -> tuple[str, bool]:
        """What was written up to the first special token or the template's own closing, and whether there was such an
        end."""
        end = next((k for k, i in enumerate(result.ids) if i in self._special), len(result.ids))
        tokenizer = self.engine.target.tokenizer
        text = str(tokenizer.decode(result.ids[:end], clean_up_tokenization_spaces=False))
        closed = ""
        if isinstance(self.opening.closing, str):
            text, closed, _ = text.partition(self.opening.closing)
        return text.strip(), bool(closed) or end < len(result.ids) or result.finish in ("eos", "stop")

    def _flaw(self, text: str) -> str:
        """Why `text` is no prompt to keep; "" when it is one."""
        triples = _triples(text)
        if len(_words(text)) < MIN_WORDS:
            return "too short"
        if len(text) > MAX_CHARACTERS:
            return "too long"
        if not all(c.isprintable() or c in "\n\t" for c in text) or "\ufffd" in text:
            return "not printable"
        if len(set(triples)) < LOOPING * len(triples):
            return "looping"
        if " ".join(_words(text)) in self._seen:
            return "repeated"
        if triples and sum(t in self._triples for t in triples) >= NEAR_DUPLICATE * len(triples):
            return "nearly repeated"
        return ""

    def _accept(self, text: str) -> Prompt:
        messages = [{"role": "user", "content": text}]
        prompt = Prompt(content_id(messages, None), messages, source="self")
        self.prompts.append(prompt)
        self._seen.add(" ".join(_words(text)))
        self._triples.update(_triples(text))
        self._said += len(_triples(text))
        return prompt

    def _distinctness(self) -> float:
        """Distinct word triples over all word triples of the prompts kept: 1 when nothing is said twice."""
        return len(self._triples) / self._said if self._said else 1.0

    def _out_of_time(self) -> bool:
        return self.minutes is not None and time.monotonic() - self.start >= 60 * self.minutes


def _words(text: str) -> list[str]:
    """The words of `text`; its characters where it is written without spaces (Chinese, Japanese)."""
    folded = text.casefold()
    if any(unicodedata.east_asian_width(c) == "W" for c in folded):
        return [c for c in folded if not c.isspace()]
    return folded.split()


def _triples(text: str) -> list[tuple[str, ...]]:
    words = _words(text)
    return [tuple(words[k : k + 3]) for k in range(len(words) - 2)]


def _header(target: Any, params: Any, flags: dict[str, Any]) -> dict[str, Any]:
    return {
        "eyas": "prompts",
        **written_by(target),
        "template": template_hash(target.tokenizer, **flags),
        "sampling": dataclasses.asdict(params),
    }
