"""Conversations as token ids, rendered with the target's own chat template, and which of those tokens are supervised.

Supervision is found at the boundary between two renderings and never by searching the text: what a rendering in full
adds to the rendering of the messages before it (with the generation prompt) is what the model would have written
itself.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, cast

from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase

from eyas.errors import EyasError

Message = dict[str, Any]

PROBE = "eyas sentinel"  # stands for a message's content where a template is examined


@dataclass(frozen=True)
class Sample:
    """One training text. `ids` [S] are the tokens the server saw; `spans` are the half-open, ascending ranges of
    positions whose tokens the target wrote itself (its end-of-turn token included) and which are therefore
    supervised.

    `finish` says how the answers ended ("length": one of them was cut at the limit; else the last one's "eos" or
    "stop"; "": unknown), `temperature` at which the last was sampled. `conversation` names what the text was made of
    where that is not the text itself (one of several turns, one of several answers); those stay on one side of a split.
    """

    id: str
    ids: list[int]
    spans: list[tuple[int, int]]
    category: str = ""
    finish: str = ""
    temperature: float | None = None
    conversation: str = ""

    @property
    def prompt(self) -> tuple[int, ...]:
        """The tokens before the first that the target wrote; all of them where it wrote none."""
        return tuple(self.ids[: self.spans[0][0]] if self.spans else self.ids)

    @property
    def supervised(self) -> int:
        """The number of supervised tokens."""
        return sum(end - start for start, end in self.spans)

    def mask(self) -> list[bool]:
        """[S], True where the token is supervised."""
        flags = [False] * len(self.ids)
        for start, end in self.spans:
            flags[start:end] = [True] * (end - start)
        return flags


def plain_messages(messages: Sequence[Message]) -> list[Message]:
    """`messages` as serving engines hand them to a template.

    Keys that are None are dropped, a list of text parts becomes their text joined by newlines, and tool-call
    arguments that are a JSON string become the object they spell. Everything else (reasoning, tool results, names) is
    left to the template. Raises EyasError for a content that is no text.
    """
    return [_plain(message, number) for number, message in enumerate(messages, 1)]


def render_text(
    tokenizer: PreTrainedTokenizerBase, messages: Sequence[Message], *, generation_prompt: bool = True,
    tools: list[dict[str, Any]] | None = None, **flags: Any,
) -> str:  # fmt: skip
    """The conversation as text, special tokens spelled out. `flags` (such as `enable_thinking`) go to the template.

    Raises EyasError when the tokenizer has no chat template or the template refuses the conversation.
    """
    if tokenizer.chat_template is None and "chat_template" not in flags:
        raise EyasError(
            "the target's tokenizer has no chat template, so conversations cannot be rendered; use an "
            "instruction-tuned target or set tokenizer.chat_template"
        )
    if not messages:
        raise EyasError("an empty conversation cannot be rendered")
    plain = plain_messages(messages)
    try:
        text = tokenizer.apply_chat_template(
            plain, tools=cast(Any, tools or None), add_generation_prompt=generation_prompt, tokenize=False, **flags
        )
    except (TemplateError, TypeError, ValueError) as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise EyasError(f"the target's chat template refuses the conversation: {reason}") from error
    assert isinstance(text, str)
    return text


def encode(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    """The ids of a rendered text. No special tokens are added: the template has written them already."""
    return list(tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])


def render(
    tokenizer: PreTrainedTokenizerBase, messages: Sequence[Message], *, generation_prompt: bool = True,
    tools: list[dict[str, Any]] | None = None, **flags: Any,
) -> list[int]:  # fmt: skip
    """The ids [S] a server would see for the conversation; with one BOS where the template writes one.

    Raises EyasError as `render_text` does.
    """
    text = render_text(tokenizer, messages, generation_prompt=generation_prompt, tools=tools, **flags)
    return encode(tokenizer, text)


def supervised_rows(
    tokenizer: PreTrainedTokenizerBase, messages: Sequence[Message], *, tools: list[dict[str, Any]] | None = None,
    id: str = "", category: str = "", eos_ids: Iterable[int] = (), **flags: Any,
) -> list[Sample]:  # fmt: skip
    """The training rows of a conversation with given answers.

    A template that only appends gives one row with a span per assistant turn; one that rewrites history (strips the
    reasoning of earlier turns, say) gives a row of its own to every turn that a later rendering changes. A span runs
    from the end of the generation prompt to the end-of-turn token, that token included and whatever the template
    writes after it left out. `eos_ids` adds the ids that end a turn to those that template and tokenizer show
    (`end_of_turn_ids`). An assistant message that opens the conversation answers nothing and is not supervised.

    Raises EyasError when there is no assistant turn, or names the turn where the rendering with the generation prompt
    is no prefix of the rendering in full.
    """
    ends = end_of_turn_ids(tokenizer, **flags) | set(eos_ids)
    rows: list[Sample] = []
    for i, message in enumerate(messages):
        if i > 0 and message.get("role") == "assistant":
            ids, start = _one_turn(tokenizer, messages[: i + 1], len(rows) + 1, ends, tools, flags)
            rows.append(Sample(id, ids, [(start, len(ids))], category))
    if not rows:
        raise EyasError("the conversation has no assistant turn after a first message, so nothing of it is supervised")
    merged = merge_turns(rows)
    if len(merged) == 1:
        return merged
    return [replace(row, id=f"{id}#{number}", conversation=id) for number, row in enumerate(merged, 1)]


def merge_turns(rows: Sequence[Sample]) -> list[Sample]:
    """Join rows of one conversation, in order of its turns, wherever a row begins with the whole of the row before
    it."""
    merged: list[Sample] = []
    for row in rows:
        if merged and row.ids[: len(merged[-1].ids)] == merged[-1].ids:
            before = merged.pop()
            finish = "length" if before.finish == "length" else row.finish
            row = replace(row, spans=before.spans + row.spans, finish=finish)
        merged.append(row)
    return merged


def special_ids(tokenizer: PreTrainedTokenizerBase) -> set[int]:
    """Every id that the tokenizer marks as a special token."""
    added = {i for i, token in tokenizer.added_tokens_decoder.items() if token.special}
    return added | set(tokenizer.all_special_ids)


def end_of_turn_ids(tokenizer: PreTrainedTokenizerBase, **flags: Any) -> set[int]:
    """The ids that end an assistant turn: the tokenizer's EOS and the first special token the template writes after
    it."""
    ends = set() if tokenizer.eos_token_id is None else {int(tokenizer.eos_token_id)}
    probe = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": PROBE}]
    try:
        _, found, tail = render_text(tokenizer, probe, generation_prompt=False, **flags).rpartition(PROBE)
    except EyasError:  # this template wants another conversation; the tokenizer's EOS has to do
        return ends
    special = special_ids(tokenizer)
    first = next((i for i in encode(tokenizer, tail) if i in special), None) if found else None
    return ends if first is None else ends | {first}


def template_hash(tokenizer: PreTrainedTokenizerBase, **flags: Any) -> str:
    """16 hex digits over the template's text and the flags: part of the key of everything rendered with them."""
    told = json.dumps([tokenizer.chat_template, flags], sort_keys=True, default=str)
    return hashlib.sha256(told.encode()).hexdigest()[:16]


def tokenizer_hash(tokenizer: PreTrainedTokenizerBase) -> str:
    """16 hex digits that name the vocabulary: every token with its id."""
    told = json.dumps(sorted(tokenizer.get_vocab().items(), key=lambda pair: pair[1]), ensure_ascii=False)
    return hashlib.sha256(told.encode("utf-8", "surrogatepass")).hexdigest()[:16]


def parse_flags(texts: Iterable[str]) -> dict[str, Any]:
    """Template flags out of `name=value` texts; values are JSON where they can be (`enable_thinking=false`).

    Raises EyasError for a text without a name or an equals sign.
    """
    flags: dict[str, Any] = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not equals or not name.isidentifier():
            raise EyasError(f"template flag '{text}' is not of the form name=value, e.g. enable_thinking=false")
        try:
            flags[name] = json.loads(value)
        except ValueError:
            flags[name] = value
    return flags


def role_counts(messages: Sequence[Message]) -> dict[str, int]:
    """How many messages each role has, in order of first appearance."""
    counts: dict[str, int] = {}
    for message in messages:
        counts[message["role"]] = counts.get(message["role"], 0) + 1
    return counts


def _plain(message: Message, number: int) -> Message:
    plain = {key: value for key, value in message.items() if value is not None}
    content = plain.get("content")
    if isinstance(content, list):
        parts = [part.get("text") if isinstance(part, dict) else part for part in content]
        texts = [part for part in parts if isinstance(part, str)]
        if len(texts) < len(parts):
            raise EyasError(f"message {number} holds a part that is not text (an image or audio?); eyas reads text only")
        plain["content"] = "\n".join(texts)
    elif content is not None and not isinstance(content, str):
        raise EyasError(f"message {number} has a content that is no text but {type(content).__name__}")
    if plain.get("tool_calls"):
        if not isinstance(plain["tool_calls"], list):
            raise EyasError(f"message {number} has tool_calls that are no list")
        plain["tool_calls"] = [_plain_call(call, number) for call in plain["tool_calls"]]
    return plain


def _plain_call(call: Any, number: int) -> Any:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("arguments"), str):
        return call
    try:
        arguments = json.loads(function["arguments"] or "{}")
    except ValueError as error:
        raise EyasError(f"message {number} calls a tool with arguments that are no JSON: {error}") from error
    return {**call, "function": {**function, "arguments": arguments}}


def _one_turn(
    tokenizer: PreTrainedTokenizerBase, messages: Sequence[Message], turn: int, ends: set[int],
    tools: list[dict[str, Any]] | None, flags: dict[str, Any],
) -> tuple[list[int], int]:  # fmt: skip
    """The ids of `messages`, which end with an assistant turn, up to its end-of-turn token; and where that turn
    begins."""
    asked = render_text(tokenizer, messages[:-1], tools=tools, **flags)
    answered = render_text(tokenizer, messages, generation_prompt=False, tools=tools, **flags)
    prompt, full = encode(tokenizer, asked), encode(tokenizer, answered)
    if full[: len(prompt)] == prompt:
        reply = full[len(prompt) :]
    elif answered.startswith(asked):  # a token reaches over the boundary; the server had the prompt's own ids before it
        reply = encode(tokenizer, answered[len(asked) :])
        if _spelled(tokenizer, prompt + reply) != _spelled(tokenizer, full):
            raise _unstable(turn, asked, answered)
    else:
        raise _unstable(turn, asked, answered)
    if not reply:
        raise EyasError(f"assistant turn {turn}: the chat template does not write the answer at all")
    end = next((k for k, i in enumerate(reply) if i in ends), None)
    reply = reply[: end + 1] if end is not None else _without_tail(tokenizer, reply)
    return prompt + reply, len(prompt)


def _without_tail(tokenizer: PreTrainedTokenizerBase, reply: list[int]) -> list[int]:
    """A reply that holds no known end: cut after its last special token (an end that only this turn uses, as after a
    tool call), else before the white space that the template closes it with."""
    special = special_ids(tokenizer)
    last = next((k for k in range(len(reply) - 1, -1, -1) if reply[k] in special), None)
    if last is not None:
        return reply[: last + 1]
    end = len(reply)
    while end > 1 and not _spelled(tokenizer, reply[end - 1 : end]).strip():
        end -= 1
    return reply[:end]


def _spelled(tokenizer: PreTrainedTokenizerBase, ids: list[int]) -> str:
    text = tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
    assert isinstance(text, str)
    return text


def _unstable(turn: int, asked: str, answered: str) -> EyasError:
    shorter = min(len(asked), len(answered))
    here = next((k for k in range(shorter) if asked[k] != answered[k]), shorter)
    begin = max(0, here - 20)
    one, other = asked[begin : here + 30], answered[begin : here + 30]
    return EyasError(
        f"assistant turn {turn}: the chat template is unstable there: with the generation prompt it writes "
        f"...{one!r}, in full ...{other!r}, so what the target would have written is unknown; give the template flags "
        "that the answers were generated with, or let the target write the answers"
    )


def check_spans(spans: Sequence[tuple[int, int]], length: int) -> str:
    """Why `spans` are no ascending, separate, non-empty ranges within `length`; "" when they are."""
    if not spans:
        return "no supervised span"
    if any(not 0 <= start < end <= length for start, end in spans):
        return f"a span lies outside 0..{length} or is empty"
    if any(b[0] < a[1] for a, b in pairwise(spans)):
        return "spans overlap or are out of order"
    return ""
