"""Suites: the prompts a benchmark runs on, from wherever `sources` finds them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

from eyas.bench.items import Item
from eyas.bench.published import question_row
from eyas.bench.request_log import is_request, read_log
from eyas.bench.sources import ON_HUB, elsewhere, find_suite, suite_name
from eyas.data.hub import is_hub
from eyas.data.prompts import Prompt, read_prompts
from eyas.data.rows import is_header, read_rows, report_bad
from eyas.data.samples import held_out_split, open_responses
from eyas.errors import EyasError


class Known(Protocol):
    """What recorded answers are checked against: the target that shall answer their prompts, as far as it is known."""

    @property
    def fingerprint(self) -> str | None: ...

    @property
    def vocab_size(self) -> int | None: ...


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


def read_suite(path: Path, target: Known, *, name: str = "", held_out: float | None = None, held_out_seed: int = 0) -> Suite:
    """The suite in one file, folder or data set: {id, category, turns} records, any prompts eyas reads, rows of published
    benchmarks, a log of requests, or a responses file.

    Of a responses file the prompts are taken; with `held_out` only those that training with the same share (or number)
    and seed set aside. A record without a category belongs to one named after the suite. Bad rows are printed and
    skipped.
    Raises EyasError when the file is missing, holds no prompt, or was written by another target.
    """
    name = name or suite_name(path)
    first = next((row.value for row in read_rows(path) if row.value and not is_header(row.value)), {})
    if "ids" in first:
        return Suite(name, _answered(path, target, name, held_out, held_out_seed))
    if held_out is not None:
        raise EyasError(f"{path} holds prompts, not answers, so none of them was held out of training; drop --held-out")
    if is_request(first):
        return Suite(name, read_log(path, name))
    read = read_prompts(path, question_row)
    report_bad(read.bad)
    return Suite(name, [_item(prompt, name) for prompt in read.prompts])


def gather(
    target: Known,
    names: Sequence[str],
    folder: Path | None = None,
    files: Sequence[Path] = (),
    *,
    held_out: float | None = None,
    held_out_seed: int = 0,
    limit: int | None = None,
) -> list[Item]:
    """The prompts of the suites `names` (see `sources.find_suite`) and of `files`, at most `limit` of each, evenly spaced.

    Raises EyasError when there are none, or a prompt's name is used twice.
    """
    found = [_named(name, folder, target) for name in names]
    found += [read_suite(path, target, held_out=held_out, held_out_seed=held_out_seed) for path in files]
    items = [item for suite in found for item in suite.limited(limit).items]
    if not items:
        raise EyasError("no prompts to race on; give --suite NAME,... or --prompts FILE")
    doubles = [key for key, count in Counter((item.suite, item.id) for item in items).items() if count > 1]
    if doubles:
        raise EyasError(f"prompt '{doubles[0][1]}' of suite '{doubles[0][0]}' is there twice; give each file once")
    return items


def _named(name: str, folder: Path | None, target: Known) -> Suite:
    told, path = find_suite(name, folder)
    try:
        return read_suite(path, target, name=told)
    except EyasError as error:
        if name not in ON_HUB or not is_hub(path):
            raise
        raise EyasError(f"suite '{name}': {error}; {elsewhere(name)}") from error


def _answered(path: Path, target: Known, suite: str, held_out: float | None, seed: int) -> list[Item]:
    """Prompts of recorded answers: each sample's tokens up to its first supervised one."""
    read = open_responses(path, fingerprint=target.fingerprint, vocab_size=target.vocab_size)
    report_bad(read.bad)
    samples = read.samples if held_out is None else held_out_split(read.samples, held_out, seed=seed)[1]
    return [Item(s.id, suite, s.category or suite, ids=s.prompt) for s in samples]


def _item(prompt: Prompt, suite: str) -> Item:
    category = prompt.category or prompt.source or suite
    return Item(prompt.id, suite, category, tuple(prompt.open_messages()), tools=tuple(prompt.tools or ()))
