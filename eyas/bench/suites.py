"""Suites: the prompts a benchmark runs on, from files, from a folder of files, or from answers kept out of training."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from eyas.chat import Message, render, render_text
from eyas.data.prompts import Prompt, read_prompts
from eyas.data.rows import is_header, read_rows, report_bad
from eyas.data.samples import held_out_split, open_responses
from eyas.errors import EyasError
from eyas.target import Target

PROBE = "Which words are the user's?"  # rendered to learn what the template puts around a question
TURN_SLACK = 16  # tokens: an answer that is rendered again as history may take a few more than it had


@dataclass(frozen=True)
class Item:
    """One prompt of a suite: `messages` of a conversation, or `ids`, ready-made prompt tokens of one target.

    The model answers after every user message that no assistant message follows, so a list of user turns becomes a
    conversation in which the model's own answers are carried forward, and a given history is taken as it stands.
    """

    id: str
    suite: str
    category: str
    messages: tuple[Message, ...] = ()
    ids: tuple[int, ...] = ()
    tools: tuple[dict[str, Any], ...] = ()

    @property
    def asked(self) -> list[int]:
        """The places of the messages that the model answers."""
        roles = [m["role"] for m in self.messages] + ["user"]
        return [i for i in range(len(self.messages)) if roles[i] in ("user", "tool") and roles[i + 1] == "user"]

    @property
    def answers(self) -> int:
        """How many answers this prompt asks for."""
        return 1 if self.ids else len(self.asked)

    def prompt(self, target: Target, answers: Sequence[str] = ()) -> list[int]:
        """Token ids [L] of the prompt for the next turn, after the model's `answers` to the turns before it."""
        if self.ids:
            return list(self.ids)
        messages: list[Message] = []
        asked = self.asked
        for i, message in enumerate(self.messages[: asked[len(answers)] + 1]):
            messages.append(message)
            if i in asked[: len(answers)]:
                messages.append({"role": "assistant", "content": answers[asked.index(i)]})
        return render(target.tokenizer, messages, tools=list(self.tools) or None)

    def question(self, target: Target, turn: int) -> str:
        """What turn `turn` (from 1) asks, as text."""
        if not self.ids:
            return str(self.messages[self.asked[turn - 1]]["content"])
        before, _, after = render_text(target.tokenizer, [{"role": "user", "content": PROBE}]).partition(PROBE)
        whole = str(target.tokenizer.decode(list(self.ids), skip_special_tokens=False))
        if whole.startswith(before) and whole.endswith(after):
            return whole[len(before) : len(whole) - len(after)]
        return str(target.tokenizer.decode(list(self.ids), skip_special_tokens=True))

    def room(self, target: Target, max_new_tokens: int) -> int:
        """Tokens that the longest turn may need, its answer included."""
        whole = self.prompt(target) if self.ids else render(target.tokenizer, self.messages)
        return len(whole) + self.answers * (max_new_tokens + TURN_SLACK)


@dataclass(frozen=True)
class Suite:
    """A named list of prompts."""

    name: str
    items: list[Item]

    def limited(self, count: int | None) -> Suite:
        """At most `count` prompts, evenly spaced, so that a suite sorted by category keeps all its categories.

        Raises EyasError for a count below 1.
        """
        if count is None or count >= len(self.items):
            return self
        if count < 1:
            raise EyasError(f"a limit of {count} leaves suite '{self.name}' without a prompt; give 1 or more")
        return replace(self, items=[self.items[i * len(self.items) // count] for i in range(count)])


def read_suite(path: Path, target: Target, *, name: str = "", held_out: float | None = None, held_out_seed: int = 0) -> Suite:
    """The suite in one file: {id, category, turns} records, any prompt file eyas reads, or a responses file.

    Of a responses file the prompts are taken; with `held_out` only those that training with the same share (or number)
    and seed set aside. A record without a category belongs to one named after the suite. Bad rows are printed and
    skipped.
    Raises EyasError when the file is missing, holds no prompt, or was written by another target.
    """
    name = name or path.name.split(".")[0]
    if _holds_answers(path):
        return Suite(name, _answered(path, target, name, held_out, held_out_seed))
    if held_out is not None:
        raise EyasError(f"{path} holds prompts, not answers, so none of them was held out of training; drop --held-out")
    read = read_prompts(path)
    report_bad(read.bad)
    return Suite(name, [_item(prompt, name) for prompt in read.prompts])


def read_suites(folder: Path, names: Sequence[str], target: Target) -> list[Suite]:
    """The suites `names` out of a folder that holds one <name>.jsonl file each.

    Raises EyasError when a name has no file there, and says which names there are.
    """
    found = {p.name.split(".")[0]: p for p in sorted(folder.glob("*.jsonl*"))}
    missing = [n for n in names if n not in found]
    if missing:
        there = ", ".join(found) or "no .jsonl file"
        raise EyasError(f"no suite {', '.join(map(repr, missing))} in {folder}; there is: {there}")
    return [read_suite(found[n], target, name=n) for n in names]


def gather(
    target: Target,
    names: Sequence[str],
    folder: Path | None,
    files: Sequence[Path],
    *,
    held_out: float | None = None,
    held_out_seed: int = 0,
    limit: int | None = None,
) -> list[Item]:
    """The prompts of the suites `names` in `folder` and of `files`, at most `limit` of each, evenly spaced.

    Raises EyasError when there are none, or a prompt's name is used twice.
    """
    if names and folder is None:
        raise EyasError(f"where is the suite '{names[0]}'? give the folder that holds {names[0]}.jsonl by --suites")
    found = read_suites(folder, names, target) if folder else []
    found += [read_suite(path, target, held_out=held_out, held_out_seed=held_out_seed) for path in files]
    items = [item for suite in found for item in suite.limited(limit).items]
    if not items:
        raise EyasError("no prompts to race on; give --prompts FILE, or --suites FOLDER with --suite NAME")
    doubles = [key for key, count in Counter((item.suite, item.id) for item in items).items() if count > 1]
    if doubles:
        raise EyasError(f"prompt '{doubles[0][1]}' of suite '{doubles[0][0]}' is there twice; give each file once")
    return items


def _holds_answers(path: Path) -> bool:
    """Whether the file's first row is one of token ids."""
    first = next((row.value for row in read_rows(path) if row.value and not is_header(row.value)), None)
    return first is not None and "ids" in first


def _answered(path: Path, target: Target, suite: str, held_out: float | None, seed: int) -> list[Item]:
    """Prompts of recorded answers: each sample's tokens up to its first supervised one."""
    read = open_responses(path, fingerprint=target.fingerprint, vocab_size=target.vocab_size)
    report_bad(read.bad)
    samples = read.samples if held_out is None else held_out_split(read.samples, held_out, seed=seed)[1]
    return [Item(s.id, suite, s.category or suite, ids=tuple(s.ids[: s.spans[0][0]])) for s in samples]


def _item(prompt: Prompt, suite: str) -> Item:
    category = prompt.category or prompt.source or suite
    return Item(prompt.id, suite, category, tuple(prompt.open_messages()), tools=tuple(prompt.tools or ()))
