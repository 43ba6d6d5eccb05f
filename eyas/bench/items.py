"""One prompt of a suite: what is asked, turn by turn, and how its answers are sampled."""

from __future__ import annotations

import datetime
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from eyas.chat import Message, render, render_text
from eyas.decoding.sampling import SamplingParams
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
    sampling: dict[str, Any] = field(default_factory=dict)  # fields of SamplingParams that the prompt asks for itself
    copy_number: int = 1  # above 1: asked again to fill a batch

    @property
    def key(self) -> tuple[str, str, int]:
        """Names the prompt, a repetition of it as well."""
        return self.suite, self.id, self.copy_number

    def params(self, usual: SamplingParams) -> SamplingParams:
        """How its answers are sampled: by `usual` but for what it asks for itself; never longer than `usual`."""
        own = replace(usual, **self.sampling)
        return replace(own, max_new_tokens=min(own.max_new_tokens, usual.max_new_tokens))

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

    def room(self, target: Target, usual: SamplingParams) -> int:
        """Tokens that the longest turn may need, its answer included."""
        whole = self.prompt(target) if self.ids else render(target.tokenizer, self.messages, tools=list(self.tools) or None)
        return len(whole) + self.answers * (self.params(usual).max_new_tokens + TURN_SLACK)


def asked_of(items: Sequence[Item], params: SamplingParams) -> dict[str, Any]:
    """What every report says of the question it answers: suites and sampling, by the fields' names, and the date."""
    sampling = ("temperature", "top_p", "top_k", "min_p", "seed", "max_new_tokens")
    return {
        "suites": list(dict.fromkeys(item.suite for item in items)),
        **{name: getattr(params, name) for name in sampling},
        "date": datetime.datetime.now().astimezone().isoformat(timespec="seconds"),
    }


def filled(items: Sequence[Item], batch: int) -> list[Item]:
    """`items`, the first of them asked again until every batch is full."""
    count = -(-len(items) // batch) * batch if items else 0
    return [replace(items[n % len(items)], copy_number=1 + n // len(items)) for n in range(count)]
