"""From whatever file the user has to the texts of a training run: read, told what was left out, cut and split."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from eyas.chat import Sample, render, role_counts
from eyas.data.prompts import read_prompts
from eyas.data.rows import BadRow, is_header, read_rows, report_bad, report_skipped
from eyas.data.samples import given_samples, held_out_split, open_responses, truncate
from eyas.errors import EyasError
from eyas.progress import console


@dataclass
class Texts:
    """What a file held. `given` says whether the answers are the file's own rather than tokens that a target wrote; only
    then are there `roles`, the messages counted by role, and `unanswered` conversations, rendered but not supervised.
    `bad` rows, `refused` conversations (id, why) and `duplicates` were left out; `header` is eyas' own first line."""

    samples: list[Sample]
    given: bool = False
    roles: Counter[str] = field(default_factory=Counter)
    unanswered: list[Sample] = field(default_factory=list)
    bad: list[BadRow] = field(default_factory=list)
    refused: list[tuple[str, str]] = field(default_factory=list)
    duplicates: int = 0
    header: dict[str, Any] = field(default_factory=dict)


def load_texts(path: Path, target: Any, **flags: Any) -> Texts:
    """Read answers (token ids), or conversations, which are rendered with the template of `target` and `flags`.

    Raises EyasError as `open_responses` and `read_prompts` do, or when the template refuses every conversation.
    """
    first = next((r.value for r in read_rows(path) if r.value is not None and not is_header(r.value)), None)
    if first is not None and "ids" in first:
        checks = {"fingerprint": target.fingerprint, "vocab_size": target.vocab_size, "tokenizer": target.tokenizer}
        told = open_responses(path, **checks)
        return Texts(told.samples, bad=told.bad, duplicates=told.duplicates, header=told.header)
    read = read_prompts(path)
    found = Texts([], given=True, bad=read.bad, duplicates=read.duplicates)
    for prompt in read.prompts:
        found.roles.update(role_counts(prompt.messages))
        if any(m["role"] == "assistant" for m in prompt.messages[1:]):
            samples, refused = given_samples([prompt], target.tokenizer, eos_ids=target.eos_ids, **flags)
            found.samples += samples
            found.refused += refused
        else:
            try:
                ids = render(target.tokenizer, prompt.messages, tools=prompt.tools, **flags)
                found.unanswered.append(Sample(prompt.id, ids, [], prompt.category))
            except EyasError as error:
                found.refused.append((prompt.id, str(error)))
    if not found.samples and not found.unanswered:
        raise EyasError(f"{path}: no conversation can be rendered; the first: {found.refused[0][1]}")
    return found


def training_texts(path: Path, target: Any, **flags: Any) -> list[Sample]:
    """The samples to train on; what is left out is printed, and so is the advice to let the target write the answers.

    Raises EyasError when there is nothing to learn from.
    """
    found = load_texts(path, target, **flags)
    report_bad(found.bad)
    report_skipped(found.refused)
    if found.duplicates:
        console.print(f"{found.duplicates:,} texts say again what an earlier one says and are left out")
    if found.unanswered:
        console.print(f"{len(found.unanswered):,} conversations have no answer and are left out")
    if not found.samples:
        raise EyasError(f"{path}: no conversation has an answer; `eyas respond {path}` lets the target write them")
    if found.given:
        console.print(
            "the answers are trained on as they stand; a head drafts better after answers that the target itself wrote: "
            f"`eyas respond {path}`",
            style="yellow", markup=False,
        )  # fmt: skip
    return found.samples


@dataclass(frozen=True)
class Split:
    """The texts of a run: `learn` from, `choose` the best head by, and `aside`, which the run never sees. `cut` were
    shortened; `dropped` had nothing supervised within the length."""

    learn: list[Sample]
    choose: list[Sample]
    aside: list[Sample]
    cut: int
    dropped: int

    def line(self) -> str:
        """The counts in one line."""
        parts = f"{len(self.learn):,} to learn from, {len(self.choose):,} to choose by, {len(self.aside):,} kept for races"
        return f"training: {parts}; {self.cut:,} cut at the maximum length, {self.dropped:,} with nothing supervised within it"


def split_for_training(samples: Sequence[Sample], *, held_out: float, max_length: int, seed: int) -> Split:
    """Cut the samples at `max_length` and split them: `held_out` (a share or a number) aside, as many again to choose by.

    Raises EyasError when nothing is left of one of the three.
    """
    cut = truncate(samples, max_length)
    rest, aside = held_out_split(cut.samples, held_out, seed=seed)
    learn, choose = held_out_split(rest, held_out, seed=seed + 1)
    return Split(learn, choose, aside, cut.cut, cut.dropped)
