"""What every trial is held against: texts of the target's own, its distributions, and its states while it reads them.

The target is asked once. All the states that a hypothesis may want are caught in one forward over each text, so that trying
other taps costs the head's own work only.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from eyas.chat import Sample, render
from eyas.data.batches import Batch
from eyas.data.features import TEACHER_TOP_K, Features, teacher_rows
from eyas.decoding.engine import Engine, Request
from eyas.decoding.sampling import SamplingParams
from eyas.errors import EyasError
from eyas.progress import progress
from eyas.target import Target

# The everyday requests that instruct models are trained and asked with.
PROMPTS = (
    "Can you give me some tips for staying focused while I work from home?",
    "I'm planning a weekend trip with my family. What should I think of before we leave?",
    "Can you help me write a short thank-you note to a colleague?",
    "What are some easy and healthy meals that I can cook on a weeknight?",
    "I'd like to start a small garden at home. How should I begin?",
    "Can you explain how vaccines work in simple terms?",
    "I'm looking for creative ideas for a birthday party. Could you suggest some?",
    "Can you give me a list of books for someone who likes history?",
    "How can I improve my sleep?",
    "I want to learn to play the guitar. What steps should I take?",
    "Can you help me understand the difference between a virus and a bacterium?",
    "Write a short story about a lighthouse keeper who finds a message in a bottle.",
)
ANSWER_TOKENS = 80


@dataclass(frozen=True)
class Evidence:
    """Texts end to end as a `Batch` without taps; its teacher are the target's distributions.

    `states`: layer -> float32 [T, H], the state entering that layer at every slot (layer L: what leaves the last one, raw).
    `unnormed` int64 [N]: for every token that the target wrote the one that its vocabulary projection would have preferred,
    had the final norm been left out; -1 for the others.
    """

    batch: Batch
    states: dict[int, Tensor]
    unnormed: Tensor
    fingerprint: str  # of the target

    @property
    def written(self) -> int:
        """How many tokens the target wrote."""
        return int((self.unnormed >= 0).sum())

    @property
    def commonest(self) -> float:
        """The share of the commonest token among them: what a drafter without any sight of the text would get right."""
        return float(self.batch.tokens[self.unnormed >= 0].bincount().max()) / self.written

    def offers(self, tap_ids: Iterable[int]) -> bool:
        """Whether the states for these taps are at hand."""
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
    asked = [Request(ids, params, str(n)) for n, ids in enumerate(chats)]
    with progress("answers", len(asked), "answers") as meter:
        results = engine.generate(asked, on_finish=lambda _: meter.advance())
    answers = [
        Sample(r.id, [*ids, *r.ids], [(len(ids), len(ids) + len(r.ids))])
        for ids, r in zip(chats, results, strict=True)
        if len(r.ids) > 1
    ]
    if not answers:
        raise EyasError(f"the target '{target.name}' ends every answer at once, so no draft can be measured on it")
    return answers


def gather(target: Target, texts: Sequence[Sample], layers: Iterable[int]) -> Evidence:
    """Read `texts` once with the target and keep the states entering `layers`."""
    wanted = sorted({*layers, target.num_layers})
    read = [_read(target, text, wanted) for text in texts]
    states = {layer: torch.cat([kept[layer] for _, kept, _ in read]) for layer in wanted}
    batch = Batch.of([features for features, _, _ in read], target.device)
    return Evidence(batch, states, torch.cat([unnormed for _, _, unnormed in read]), target.fingerprint)


def _read(target: Target, text: Sample, layers: list[int]) -> tuple[Features, dict[int, Tensor], Tensor]:
    """Of one text of S tokens: features with empty taps, `layers`' states [S-1, H] and the un-normed choice [S]."""
    hidden, states = target.states(torch.tensor([text.ids[:-1]], device=target.device), layers)
    written = torch.tensor(text.mask()[1:], device=target.device)  # [S-1]
    teacher = teacher_rows(target.logits(hidden[0, written]), TEACHER_TOP_K)
    unnormed = torch.full((len(text.ids),), -1, device=target.device)
    unnormed[1:][written] = target.logits(states[target.num_layers][0, written]).argmax(-1)
    no_taps = torch.zeros(len(text.ids) - 1, 1, 1)
    features = Features.pack(text, no_taps, (teacher[0].cpu(), teacher[1].cpu()))
    return features, {layer: state[0].float() for layer, state in states.items()}, unnormed
