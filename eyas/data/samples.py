"""Training texts: read from answers that a target wrote or made of given ones, then cut, split and counted."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from eyas.chat import Sample, check_spans, merge_turns, supervised_rows, tokenizer_hash
from eyas.data.hashing import content_id, derived_share
from eyas.data.prompts import Prompt, named_apart
from eyas.data.rows import BadRow, Record, is_header, read_rows, report_bad
from eyas.errors import EyasError

__all__ = [
    "ResponseFile", "Sample", "Statistics", "Truncated", "given_samples", "held_out_split", "open_responses",
    "read_responses", "statistics", "truncate",
]  # fmt: skip


@dataclass
class ResponseFile:
    """What a file of answers held: `samples`, the rows that were none, the header (empty where the file has none), and how
    many texts said, under another id, the same as an earlier one and were left out."""

    samples: list[Sample] = field(default_factory=list)
    bad: list[BadRow] = field(default_factory=list)
    header: dict[str, Any] = field(default_factory=dict)
    duplicates: int = 0


def open_responses(
    path: Path | str, *, fingerprint: str | None = None, vocab_size: int | None = None,
    tokenizer: PreTrainedTokenizerBase | None = None,
) -> ResponseFile:  # fmt: skip
    """Read rows {id, ids, prompt_len | spans, finish, temperature, category}, turns of one conversation joined where
    the later begins with the earlier. Of several answers under the id "x" the later ones are called "x#2" and so on.

    A row whose tokens are in doubt (an answer that a server gave as text) is a bad row. Raises EyasError when the file is
    missing or has no good row, when its header names another target than `fingerprint` or another vocabulary than the
    `tokenizer`'s, or when a row holds an id outside `vocab_size`.
    """
    path = Path(path)
    out = ResponseFile()
    turns: defaultdict[tuple[str, int], dict[int, Sample]] = defaultdict(dict)
    seen: defaultdict[tuple[str, int], set[tuple[int, ...]]] = defaultdict(set)  # the texts under each id or turn
    for number, record in enumerate(read_rows(path), 1):
        row, why = record.value, record.why
        if row is not None and is_header(row):
            out.header = row
            _check_target(path, row, fingerprint, tokenizer)
            continue
        if row is not None:
            sample, why = _sample(row)
            if sample is not None:
                turn = row.get("turn", 1) if sample.conversation else 0
                texts = seen[sample.conversation or sample.id, turn]
                if tuple(sample.ids) not in texts:
                    _check_ids(record, sample, vocab_size)
                    texts.add(tuple(sample.ids))
                    first = sample.conversation and len(texts) == 1
                    if len(texts) > 1 and not sample.conversation:
                        sample = replace(sample, conversation=sample.id)
                    turns[sample.conversation, 0 if first else number][turn] = sample
                    continue
                why = f"says again what an earlier row with the id {sample.id!r} says"
        out.bad.append(record.bad(why))
    joined = [s for told in turns.values() for s in merge_turns([told[turn] for turn in sorted(told)])]
    distinct: dict[tuple[tuple[int, ...], tuple[tuple[int, int], ...]], Sample] = {}
    for sample in joined:
        distinct.setdefault((tuple(sample.ids), tuple(sample.spans)), sample)
    out.duplicates = len(joined) - len(distinct)
    out.samples = named_apart(list(distinct.values()))
    if not out.samples:
        why = f"; the first, line {out.bad[0].line}: {out.bad[0].why}" if out.bad else ""
        raise EyasError(f"{path}: no answer to learn from in it ({len(out.bad)} bad rows{why})")
    return out


def read_responses(path: Path | str, **checks: Any) -> list[Sample]:
    """The samples of `open_responses`; bad rows are printed with file, line and reason, and skipped."""
    read = open_responses(path, **checks)
    report_bad(read.bad)
    return read.samples


def given_samples(
    prompts: Iterable[Prompt], tokenizer: PreTrainedTokenizerBase, *, eos_ids: Iterable[int] = (), **flags: Any
) -> tuple[list[Sample], list[tuple[str, str]]]:
    """Samples of conversations whose answers are taken as given (`chat.supervised_rows`); and (id, why) of the
    others."""
    samples: list[Sample] = []
    refused: list[tuple[str, str]] = []
    for p in prompts:
        try:
            samples += supervised_rows(
                tokenizer, p.messages, tools=p.tools, id=p.id, category=p.category, eos_ids=eos_ids, **flags
            )
        except EyasError as error:
            refused.append((p.id, str(error)))
    return samples, refused


@dataclass(frozen=True)
class Truncated:
    """`samples` that fit; how many of them were `cut`, and how many `dropped` because nothing supervised was left."""

    samples: list[Sample]
    cut: int
    dropped: int


def truncate(samples: Iterable[Sample], max_length: int) -> Truncated:
    """Keep the first `max_length` tokens of every sample. Raises EyasError when no sample keeps a supervised token."""
    kept: list[Sample] = []
    cut = dropped = 0
    for sample in samples:
        spans = [(start, min(end, max_length)) for start, end in sample.spans if start < max_length]
        if not spans or min(len(sample.ids), max_length) < 3:  # the first token that can be learnt is the third
            dropped += 1
        elif len(sample.ids) <= max_length:
            kept.append(sample)
        else:
            cut += 1
            kept.append(replace(sample, ids=sample.ids[:max_length], spans=spans))
    if dropped and not kept:
        raise EyasError(
            f"none of the {dropped} samples has a supervised token among its first {max_length}; raise the maximum length"
        )
    return Truncated(kept, cut, dropped)


def held_out_split(samples: Sequence[Sample], held_out: float, *, seed: int = 0) -> tuple[list[Sample], list[Sample]]:
    """(training, held out). `held_out` below 1 is a share, else a number of prompts.

    Who is held out is drawn from (seed, prompt) alone: ids, order and, for a share, the other samples do not matter. Answers
    to one prompt stay together, and so do rows of one conversation. Raises EyasError when either side would be empty.
    """
    if held_out <= 0:
        raise EyasError(f"the held-out part must be a positive share or number, not {held_out}")
    names = _names_of_prompts(samples)
    draws = {name: derived_share("held-out", seed, name) for name in names}
    if held_out < 1:
        chosen = {name for name, draw in draws.items() if draw < held_out}
    else:
        chosen = set(sorted(draws, key=lambda name: (draws[name], name))[: int(held_out)])
    aside = [s for s, name in zip(samples, names, strict=True) if name in chosen]
    rest = [s for s, name in zip(samples, names, strict=True) if name not in chosen]
    if not aside or not rest:
        empty, cure = ("training", "fewer") if aside else ("held-out", "more")
        raise EyasError(f"holding out {held_out:g} of {len(draws)} prompts leaves no {empty} sample; hold out {cure}")
    return rest, aside


@dataclass(frozen=True)
class Statistics:
    """Counts over samples. `finish`: how answers ended."""

    samples: int
    tokens: int
    supervised: int
    distinct: int
    longest: int
    finish: dict[str, int]

    def line(self) -> str:
        """The figures in one line."""
        share = 100 * self.supervised / self.tokens if self.tokens else 0.0
        ends = ", ".join(f"{name} {count:,}" for name, count in sorted(self.finish.items()))
        return (
            f"{self.samples:,} samples, {self.tokens:,} tokens (longest {self.longest:,}), {self.supervised:,} "
            f"supervised ({share:.0f}%), {self.distinct:,} distinct among them" + (f"; ends: {ends}" if ends else "")
        )


def statistics(samples: Iterable[Sample]) -> Statistics:
    """Count `samples`; `distinct` is the number of different tokens among the supervised ones."""
    rows = list(samples)
    distinct = {i for s in rows for start, end in s.spans for i in s.ids[start:end]}
    return Statistics(
        samples=len(rows),
        tokens=sum(len(s.ids) for s in rows),
        supervised=sum(s.supervised for s in rows),
        distinct=len(distinct),
        longest=max((len(s.ids) for s in rows), default=0),
        finish=dict(Counter(s.finish for s in rows if s.finish)),
    )


def _names_of_prompts(samples: Sequence[Sample]) -> list[str]:
    """For every sample a name of what it asks; rows of one conversation are called after the first of its prompts."""
    conversations = [sample.conversation or sample.id for sample in samples]
    prompts: dict[str, tuple[int, ...]] = {}  # by conversation: the shortest
    for sample, name in zip(samples, conversations, strict=True):
        prompt = sample.prompt
        prompts[name] = min(prompts.get(name, prompt), prompt, key=lambda ids: (len(ids), ids))
    names = {conversation: content_id(prompt) for conversation, prompt in prompts.items()}
    return [names[conversation] for conversation in conversations]


def _sample(row: dict[str, Any]) -> tuple[Sample | None, str]:
    """The sample that `row` holds, or None and why it holds none."""
    ids, name = row.get("ids"), row.get("id")
    if not isinstance(name, (str, int)) or not str(name):
        return None, "no id"
    if not isinstance(ids, list) or not ids:
        return None, "no token ids"
    if not all(type(i) is int and i >= 0 for i in ids):
        return None, "token ids that are no natural numbers"
    spans = row.get("spans")
    if spans is None:
        start = row.get("prompt_len")
        if type(start) is not int:
            return None, "neither prompt_len nor spans"
        if not 0 < start < len(ids):
            return None, f"prompt_len {start} leaves no answer among {len(ids)} tokens"
        spans = [(start, len(ids))]
    elif not isinstance(spans, list) or not all(
        isinstance(s, list) and len(s) == 2 and all(type(edge) is int for edge in s) for s in spans
    ):
        return None, "spans are no pairs of positions"
    spans = [(start, end) for start, end in spans]
    if wrong := check_spans(spans, len(ids)):
        return None, wrong
    if isinstance(row.get("doubt"), str):
        return None, f"its tokens are in doubt: {row['doubt']}"
    words = {key: row[key] for key in ("category", "finish") if isinstance(row.get(key), str)}
    temperature = row.get("temperature")
    conversation = row.get("conversation", "")
    if type(row.get("turn", 1)) is not int or not isinstance(conversation, str):
        return None, "turn is no number or conversation no name"
    heat = float(temperature) if isinstance(temperature, (int, float)) else None
    return Sample(str(name), ids, spans, temperature=heat, conversation=conversation, **words), ""


def _check_target(
    path: Path, header: dict[str, Any], fingerprint: str | None, tokenizer: PreTrainedTokenizerBase | None
) -> None:  # fmt: skip
    told, vocabulary = header.get("target"), header.get("tokenizer")
    if tokenizer is not None and vocabulary not in (None, tokenizer_hash(tokenizer)):
        raise EyasError(
            f"{path} was written by '{header.get('served_as', '?')}' with another vocabulary than that of the target in use"
        )
    if fingerprint is not None and told is not None and told != fingerprint:
        raise EyasError(
            f"{path} was written by the target '{header.get('target_name', '?')}' (fingerprint {told}), not by the one "
            f"in use ({fingerprint}); give that target or have this one write the answers anew"
        )


def _check_ids(record: Record, sample: Sample, vocab_size: int | None) -> None:
    if vocab_size is not None and max(sample.ids) >= vocab_size:
        raise EyasError(
            f"{record.file}:{record.line}: row '{sample.id}' holds the token id {max(sample.ids)}, but the target's "
            f"vocabulary has only {vocab_size}; the file belongs to another target"
        )
