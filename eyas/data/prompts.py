"""Prompts and conversations from the files people have, each with an id of its own."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import count
from pathlib import Path
from typing import Any, TypeVar

from eyas.chat import Message, Sample
from eyas.data.conversations import conversation, tools_of
from eyas.data.hashing import content_id
from eyas.data.rows import BadRow, is_header, read_rows
from eyas.errors import EyasError


@dataclass(frozen=True)
class Prompt:
    """A conversation to be answered or, where it ends with an answer, to be learned from.

    `id` is the one given in the file, or a hash of the content. `source` and `category` are the file's own words.
    """

    id: str
    messages: list[Message]
    source: str = ""
    category: str = ""
    tools: list[dict[str, Any]] | None = None

    @property
    def answered(self) -> bool:
        """Whether the conversation ends with an answer that could be trained on as it is."""
        return self.messages[-1]["role"] == "assistant"

    def open_messages(self) -> list[Message]:
        """The messages up to the last turn that is not the assistant's: what the target is asked to answer."""
        end = len(self.messages)
        while end and self.messages[end - 1]["role"] == "assistant":
            end -= 1
        return self.messages[:end]


@dataclass
class PromptFile:
    """What a file held: `prompts`, the rows that were no prompt, and how many said the same as an earlier one."""

    prompts: list[Prompt] = field(default_factory=list)
    bad: list[BadRow] = field(default_factory=list)
    duplicates: int = 0


def read_prompts(path: Path | str, adapt: Callable[[dict[str, Any]], dict[str, Any]] = lambda row: row) -> PromptFile:
    """Every conversation in `path` (see `rows.read_rows` for what that may be, `conversations.conversation` for the
    layouts of a row), in its order and without repetitions; `adapt` turns rows of other layouts into one of those. Of several
    under the id "x", as when the ids of every shard begin at 0, the later ones are called "x#2" and so on.

    Raises EyasError when the file is missing or unreadable or holds no good row; single bad rows are collected instead.
    """
    path = Path(path)
    out = PromptFile()
    seen: set[str] = set()
    for record in read_rows(path):
        if record.value is None:
            out.bad.append(record.bad(record.why))
        elif not is_header(record.value):
            try:
                prompt, content = _prompt(adapt(record.value))
            except EyasError as error:
                out.bad.append(record.bad(str(error)))
                continue
            if content in seen:
                out.duplicates += 1
            else:
                out.prompts.append(prompt)
                seen.add(content)
    out.prompts = named_apart(out.prompts)
    if not out.prompts:
        first = f"; the first, line {out.bad[0].line}: {out.bad[0].why}" if out.bad else ""
        raise EyasError(f"{path}: no prompt in it ({len(out.bad)} bad rows{first})")
    return out


NamedT = TypeVar("NamedT", Prompt, Sample)


def named_apart(named: Sequence[NamedT]) -> list[NamedT]:
    """`named` with ids that are all different: the second of an id gets the first number after it that is free."""
    taken, given = {one.id for one in named}, set[str]()
    numbers: defaultdict[str, Iterator[int]] = defaultdict(lambda: count(2))  # per id, those not tried yet
    out = []
    for one in named:
        if one.id in given:
            name = next(name for k in numbers[one.id] if (name := f"{one.id}#{k}") not in taken)
            taken.add(name)
            one = replace(one, id=name)
        given.add(one.id)
        out.append(one)
    return out


def _prompt(row: dict[str, Any]) -> tuple[Prompt, str]:
    messages, tools = conversation(row), tools_of(row)
    content = content_id(messages, tools)
    given = row.get("id")
    name = str(given).strip() if isinstance(given, (str, int)) and not isinstance(given, bool) else ""
    words = {key: row[key] for key in ("source", "category") if isinstance(row.get(key), str)}
    return Prompt(name or content, messages, tools=tools, **words), content
