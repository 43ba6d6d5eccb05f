"""A look at training texts: one with its supervised tokens coloured, and what looks wrong in all of them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from rich.text import Text
from transformers import PreTrainedTokenizerBase

from eyas.chat import PROBE, Sample, render_text, template_hash
from eyas.data.texts import Texts
from eyas.errors import EyasError

SUPERVISED, END = "green", "bold magenta"
LOOKED_BACK = 64  # tokens: more than a generation prompt has


def warnings_of(texts: Texts, target: Any, **flags: Any) -> dict[str, tuple[int, str]]:
    """What looks wrong, each with how many samples it concerns and the id of the first."""
    tokenizer = target.tokenizer
    begin = _generation_prompt(tokenizer, {**texts.header.get("render", {}), **flags})
    told: dict[str, tuple[int, str]] = {}

    def warn(what: str, sample: Sample) -> None:
        count, first = told.get(what, (0, sample.id))
        told[what] = (count + 1, first)

    template = texts.header.get("template")
    for sample in texts.samples or texts.unanswered:
        for what in sample_warnings(sample, tokenizer, target.eos_ids):
            warn(what, sample)
        if template not in (None, template_hash(tokenizer)):
            warn("rendered with another chat template than the target's", sample)
        elif not all(_before(sample, start, tokenizer).endswith(begin) for start, _ in sample.spans):
            warn("the template's generation prompt does not stand before an answer (another template, or other flags?)", sample)
    return told


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
    if sample.finish == "length":
        found.append("an answer was cut at the limit")
    if sample.finish not in ("length", "stop") and any(sample.ids[end - 1] not in ends for _, end in sample.spans):
        found.append("an answer has no end-of-turn token supervised")
    if any(end - start == 1 and sample.ids[start] in ends for start, end in sample.spans):
        found.append("an answer is nothing but its end")
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


def _generation_prompt(tokenizer: PreTrainedTokenizerBase, flags: dict[str, Any]) -> str:
    """What the template writes before every answer; "" where it cannot be told."""
    question = [{"role": "user", "content": PROBE}]
    try:
        bare = render_text(tokenizer, question, generation_prompt=False, **flags)
        whole = render_text(tokenizer, question, **flags)
    except EyasError:  # a template that wants more than a question
        return ""
    return whole.removeprefix(bare) if whole.startswith(bare) else ""


def _before(sample: Sample, start: int, tokenizer: PreTrainedTokenizerBase) -> str:
    """The end of what stands before position `start`."""
    return _spelled(tokenizer, sample.ids[max(0, start - LOOKED_BACK) : start])


def _spelled(tokenizer: PreTrainedTokenizerBase, ids: list[int]) -> str:
    return str(tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)) if ids else ""
