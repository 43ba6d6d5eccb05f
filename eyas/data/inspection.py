"""A look at training data: one text with its supervised tokens coloured, the counts, and what looks wrong."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.text import Text
from transformers import PreTrainedTokenizerBase

from eyas.chat import Sample, render, role_counts
from eyas.data.prompts import Prompt, read_prompts
from eyas.data.rows import BadRow, is_header, read_rows
from eyas.data.samples import given_samples, open_responses
from eyas.errors import EyasError

SUPERVISED, END = "green", "bold magenta"


@dataclass
class Look:
    """What `look` found: the samples, the messages per role (empty for files of token ids), the rows that were
    skipped and, for each warning, how many samples it concerns and the first of them."""

    samples: list[Sample]
    roles: Counter[str] = field(default_factory=Counter)
    bad: list[BadRow] = field(default_factory=list)
    refused: list[tuple[str, str]] = field(default_factory=list)
    warnings: dict[str, tuple[int, str]] = field(default_factory=dict)


def look(path: Path | str, target: Any, **flags: Any) -> Look:
    """Read a file of answers (token ids) or of conversations, the latter rendered with the template of `target`.

    Raises EyasError as `open_responses` and `read_prompts` do, or when the template refuses every conversation.
    """
    path = Path(path)
    first = next((r.value for r in read_rows(path) if r.value is not None and not is_header(r.value)), None)
    if first is not None and "ids" in first:
        answers = open_responses(path, fingerprint=target.fingerprint, vocab_size=target.vocab_size, tokenizer=target.tokenizer)
        found = Look(answers.samples, bad=answers.bad)
    else:
        found = _conversations(path, target, flags)
    for sample in found.samples:
        for warning in sample_warnings(sample, target.tokenizer, target.eos_ids):
            count, name = found.warnings.get(warning, (0, sample.id))
            found.warnings[warning] = (count + 1, name)
    return found


def sample_warnings(sample: Sample, tokenizer: PreTrainedTokenizerBase, eos_ids: Iterable[int]) -> list[str]:
    """What looks wrong in `sample`, as a list of short sentences."""
    ends, bos = set(eos_ids), tokenizer.bos_token_id
    found = []
    if not sample.supervised:
        found.append("nothing is supervised")
    if bos is not None and sample.ids[:2] == [bos, bos]:
        found.append("begins with two BOS tokens")
    if any(bos in sample.ids[start:end] for start, end in sample.spans) and bos not in ends:
        found.append("a BOS token is supervised")
    if any(start == 0 for start, _ in sample.spans):
        found.append("the first token is supervised, though nothing comes before it")
    whole = sample.finish not in ("length", "stop")
    if whole and any(sample.ids[end - 1] not in ends for _, end in sample.spans):
        found.append("an answer has no end-of-turn token supervised")
    return found


def coloured(sample: Sample, tokenizer: PreTrainedTokenizerBase, eos_ids: Iterable[int]) -> Text:
    """The text of `sample`: supervised tokens green, the end-of-turn tokens among them magenta, the rest dim."""
    ends = set(eos_ids)
    shown = Text()
    at = 0
    for start, end in sample.spans:
        close = end - (sample.ids[end - 1] in ends)
        shown.append(_spelled(tokenizer, sample.ids[at:start]), "dim")
        shown.append(_spelled(tokenizer, sample.ids[start:close]), SUPERVISED)
        shown.append(_spelled(tokenizer, sample.ids[close:end]), END)
        at = end
    shown.append(_spelled(tokenizer, sample.ids[at:]), "dim")
    return shown


def _conversations(path: Path, target: Any, flags: dict[str, Any]) -> Look:
    read = read_prompts(path)
    found = Look([], bad=read.bad)
    for prompt in read.prompts:
        found.roles.update(role_counts(prompt.messages))
    answered = [p for p in read.prompts if any(m["role"] == "assistant" for m in p.messages[1:])]
    found.samples, found.refused = given_samples(answered, target.tokenizer, eos_ids=target.eos_ids, **flags)
    if not answered:
        found.samples = _unsupervised(read.prompts, target.tokenizer, flags)
    if not found.samples:
        raise EyasError(f"{path}: no conversation can be rendered; the first: {found.refused[0][1]}")
    return found


def _unsupervised(prompts: Sequence[Prompt], tokenizer: PreTrainedTokenizerBase, flags: dict[str, Any]) -> list[Sample]:
    return [Sample(p.id, render(tokenizer, p.messages, tools=p.tools, **flags), [], p.category) for p in prompts]


def _spelled(tokenizer: PreTrainedTokenizerBase, ids: list[int]) -> str:
    return str(tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)) if ids else ""
