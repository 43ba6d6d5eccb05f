"""What every trial is held against: answers that the target wrote greedily, and its states while it reads them.

The target is asked once. The states of every layer that a hypothesis may want are caught in the one forward over each text,
so that trying other taps costs the head's own work only.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from eyas.chat import Sample, render
from eyas.data.batches import Batch
from eyas.data.features import Features
from eyas.decoding.engine import Engine, Request
from eyas.decoding.sampling import SamplingParams
from eyas.errors import EyasError
from eyas.target import Target

PROMPTS = (
    "Why is the sky blue? Explain it to a child.",
    "Write a short story about a lighthouse keeper who finds a message in a bottle.",
    "List five fruits and say in one sentence each what they taste like.",
    "Write a Python function that returns the n-th Fibonacci number, and explain how it works.",
    "What is 17 times 23? Show the steps.",
    "Summarise the plot of Romeo and Juliet in three sentences.",
    "Give me a recipe for pancakes with exact amounts.",
    "Write a polite e-mail to a colleague asking to move a meeting to Thursday.",
    "What are the main differences between a virus and a bacterium?",
    "Translate into French: 'Where is the nearest train station?'",
    "Describe how a bicycle stays upright while it is moving.",
    "Give three tips for someone who wants to learn to play the guitar.",
)
ANSWER_TOKENS = 80


@dataclass(frozen=True)
class Evidence:
    """Texts end to end as a `Batch` without taps, and `states`: layer -> float32 [T, H], the state entering that layer at every
    slot (layer L: what leaves the last one, un-normed)."""

    batch: Batch
    states: dict[int, Tensor]

    @property
    def tokens(self) -> int:
        """How many tokens the target wrote."""
        return int(self.batch.supervised.sum())

    def offers(self, tap_ids: Iterable[int]) -> bool:
        return all(tap in self.states for tap in tap_ids)

    def with_taps(self, tap_ids: Sequence[int]) -> Batch:
        """The batch whose taps [T, 3H] are the states entering `tap_ids`."""
        return dataclasses.replace(self.batch, taps=torch.cat([self.states[tap] for tap in tap_ids], dim=-1))


def write_answers(target: Target, prompts: Sequence[str] = PROMPTS, tokens: int = ANSWER_TOKENS) -> list[Sample]:
    """The target's own greedy answers to `prompts`, at most `tokens` long.

    Raises EyasError when a prompt does not fit the target or no answer has the two tokens that a draft needs.
    """
    chats = [render(target.tokenizer, [{"role": "user", "content": p}]) for p in prompts]
    params = SamplingParams(max_new_tokens=tokens)
    engine = Engine(target, max_rows=len(chats), max_length=max(map(len, chats)) + tokens)
    results = engine.generate(Request(ids, params, str(n)) for n, ids in enumerate(chats))
    answers = [
        Sample(r.id, [*ids, *r.ids], [(len(ids), len(ids) + len(r.ids))])
        for ids, r in zip(chats, results, strict=True)
        if len(r.ids) > 1
    ]
    if not answers:
        raise EyasError(f"the target '{target.name}' ends every answer at once, so no draft can be measured on it")
    return answers


def gather(target: Target, answers: Sequence[Sample], layers: Iterable[int]) -> Evidence:
    """Read `answers` once with the target and keep the states entering `layers`."""
    wanted = sorted(set(layers))
    read = [target.states(torch.tensor([a.ids[:-1]], device=target.device), wanted) for a in answers]
    states = {layer: torch.cat([text[layer][0] for text in read]).float() for layer in wanted}
    return Evidence(Batch.of([_without_taps(a) for a in answers], target.device), states)


def _without_taps(answer: Sample) -> Features:
    """Features whose teacher is the written token itself and whose taps are empty."""
    written = torch.tensor([answer.ids[i] for i in range(1, len(answer.ids)) if answer.mask()[i]])  # [P]
    taps = torch.zeros(len(answer.ids) - 1, 3)
    return Features.pack(answer, taps, (written[:, None], torch.ones(len(written), 1)))
