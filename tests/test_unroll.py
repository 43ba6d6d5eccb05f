"""Training-time test: the unroll is sequential drafting, and every token of the mask is predicted exactly once per step."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from eyas.chat import Sample
from eyas.data.batches import Batch
from eyas.data.features import Features, read_features
from eyas.decoding.drafters import Eagle3Drafter
from eyas.heads.config import HeadOptions
from eyas.heads.eagle3 import Eagle3Head
from eyas.heads.start import new_head
from eyas.heads.vocab import choose_vocabulary
from eyas.target import Target
from eyas.training.unroll import loss_masks, unroll
from tests.tiny import VOCAB, tiny_target

STEPS = 5
FAMILIES = ("llama", "qwen2", "qwen3")


def some_sample(name: str, length: int, spans: list[tuple[int, int]]) -> Sample:
    generator = torch.Generator().manual_seed(length)
    return Sample(name, torch.randint(3, VOCAB, (length,), generator=generator).tolist(), spans)


def some_texts(target: Target) -> list[Features]:
    samples = [
        some_sample("a", 24, [(9, 24)]),
        some_sample("b", 31, [(5, 14), (20, 31)]),  # two turns
        some_sample("c", 7, [(5, 7)]),
    ]
    return [read_features(target, s, top_k=VOCAB) for s in samples]


def random_head(target: Target, draft_vocab: int = 120, **options: object) -> Eagle3Head:
    d2t = choose_vocabulary(torch.zeros(VOCAB, dtype=torch.long), draft_vocab)
    head = new_head(target, d2t, start="random", options=HeadOptions(**options))
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():  # larger than at the start of training, so that a wrong state or position shows
        for parameter in head.parameters():
            if parameter.ndim == 2:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.15)
            else:
                parameter.copy_(1 + torch.randn(parameter.shape, generator=generator) * 0.2)
    return head


OPTIONS: list[dict[str, object]] = [
    {"fc_norm": True, "norm_output": True},
    {"norm_output": True, "num_layers": 2},
    {"qk_norm": True},
    {"hidden_size": 48},
    {"num_layers": 3, "qk_norm": True, "fc_norm": True, "hidden_size": 80, "intermediate_size": 56},
]


@pytest.mark.parametrize(("family", "options"), [*((f, {}) for f in FAMILIES), *(("qwen3", o) for o in OPTIONS)])
def test_step_k_of_the_unroll_is_the_kth_step_of_drafting(family: str, options: dict[str, object]) -> None:
    target = tiny_target(family)
    head = random_head(target, **options)
    texts = some_texts(target)
    batch = Batch.of(texts)
    masks = loss_masks(head, batch, STEPS)
    compared = 0
    with torch.no_grad():
        predicted = list(unroll(head, batch, masks))
    drafter = Eagle3Drafter(target, head)
    for text, (start, _) in zip(texts, batch.text_slots, strict=True):
        for t in range(len(text.ids) - 2):
            drafter.allocate(1, 64, 16)
            logits = drafter.extend(text.ids[None, 1 : t + 2], text.float_taps[None, : t + 1], torch.tensor([t + 1]))
            for step in range(min(STEPS, len(text.ids) - 2 - t)):
                if step:
                    token = text.ids[t + 1 + step].view(1, 1)
                    logits = drafter.expand(token, torch.zeros(1, 1, dtype=torch.long))[0]
                found = (predicted[step].slots == start + t).nonzero()
                if len(found):
                    difference = (predicted[step].logits[found[0, 0]] - logits[0]).abs().max()
                    assert difference < 1e-4, (family, text.key, t, step)
                    compared += 1
    assert compared == int(masks.sum())


@given(st.lists(st.tuples(st.integers(2, 20), st.lists(st.booleans(), min_size=20, max_size=20)), min_size=1, max_size=4))
@settings(max_examples=60, deadline=None)
def test_the_mask_names_each_supervised_token_once_per_step(shapes: list[tuple[int, list[bool]]]) -> None:
    texts = []
    for number, (length, flags) in enumerate(shapes):
        spans = [(i, i + 1) for i in range(length) if flags[i]]
        sample = some_sample(str(number), length, spans)
        taught = sum(flags[1:length])
        teacher = torch.arange(taught * 2).view(taught, 2) % VOCAB, torch.full((taught, 2), 0.5)
        texts.append(Features.pack(sample, torch.zeros(length - 1, 3, 2), teacher))
    batch = Batch.of(texts)
    everything = torch.ones(VOCAB, dtype=torch.bool)
    for step in range(STEPS):
        slots = batch.carries_loss(step, everything).nonzero()[:, 0]
        got = sorted((batch.place[slots] + 2 + step).tolist())
        want, before = [], 0
        for length, flags in shapes:
            # written from the definition: x[t+2+i] supervised and in the text, x[t+1] supervised
            want += [before + t + 2 + step for t in range(length - 2 - step) if flags[t + 2 + step] and flags[t + 1]]
            before += length
        assert got == want
        assert len(set(got)) == len(got)


def test_the_teacher_row_is_the_targets_distribution_over_the_predicted_token() -> None:
    target = tiny_target("llama")
    head = random_head(target)
    texts = some_texts(target)
    batch = Batch.of(texts)
    for step in unroll(head, batch, loss_masks(head, batch, STEPS)):
        for slot, token, row in zip(step.slots, step.token_index, step.teacher_row, strict=True):
            number = next(n for n, (a, b) in enumerate(batch.text_slots) if a <= slot < b)
            inside = int(token) - sum(len(t.ids) for t in texts[:number])  # place in its text
            logits = target.logits(target.read(texts[number].ids[None]).hidden)[0, inside - 1]
            expected = logits.softmax(-1)[batch.teacher_ids[row]]
            assert torch.allclose(batch.teacher_probs[row], expected, atol=1e-3)
            assert int(batch.teacher_ids[row, 0]) == int(logits.argmax())


def test_a_positions_teacher_outside_the_draft_vocabulary_is_masked() -> None:
    target = tiny_target("llama")
    head = random_head(target, draft_vocab=40)
    batch = Batch.of(some_texts(target))
    everything = torch.ones(VOCAB, dtype=torch.bool)
    some, all_of_them = batch.carries_loss(0, head.t2d), batch.carries_loss(0, everything)
    rows = batch.teacher_row[batch.place[all_of_them & ~some] + 2]
    assert 0 < int(some.sum()) < int(all_of_them.sum())
    assert not head.t2d[batch.teacher_ids[rows, 0]].any()
