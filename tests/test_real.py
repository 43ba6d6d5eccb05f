"""The promises on the real target, SmolLM2-135M-Instruct: the same tokens, bit-equal logits, training that is drafting."""

from __future__ import annotations

from functools import cache

import pytest
import torch
from transformers import AutoModelForCausalLM

from eyas.chat import Sample
from eyas.data.batches import Batch
from eyas.data.features import read_features
from eyas.decoding.cache import KVCache
from eyas.decoding.costs import Costs
from eyas.decoding.drafters import Eagle3Drafter
from eyas.decoding.engine import Engine, Request
from eyas.decoding.sampling import SamplingParams
from eyas.decoding.tree import TreeShape
from eyas.heads.eagle3 import Eagle3Head
from eyas.heads.start import new_head
from eyas.heads.vocab import choose_vocabulary
from eyas.locate import locate
from eyas.target import Target
from eyas.training.unroll import loss_masks, unroll

pytestmark = pytest.mark.real

COSTS = Costs(target={1: {1: 1.0, 32: 1.4}, 3: {1: 1.2, 32: 9.0}}, draft={1: {1: 0.02, 3: 0.03}, 3: {1: 0.03, 3: 0.05}})
QUESTIONS = ("Why is the sky blue?", "Write a haiku about rain.", "List three prime numbers and say why they are prime.")


@cache
def real_target(weights: str) -> Target:
    return Target.load("smollm2", weights=weights)


def warm_head(target: Target) -> Eagle3Head:
    return new_head(target, choose_vocabulary(torch.zeros(target.vocab_size, dtype=torch.long), 4096))


def asked(engine: Engine, **params: object) -> list[Request]:
    return [
        Request(engine.encode([{"role": "user", "content": q}]), SamplingParams(max_new_tokens=24, **params), q)  # type: ignore[arg-type]
        for q in QUESTIONS
    ]


def test_plain_decoding_is_transformers_generate() -> None:
    engine = Engine(real_target("stock"), max_length=256)
    untouched = AutoModelForCausalLM.from_pretrained(locate("smollm2"), dtype=torch.float32)
    for request in asked(engine):
        ids = torch.tensor([request.ids])
        with torch.no_grad():
            told = untouched.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=24, do_sample=False)
        assert engine.generate([request])[0].ids == told[0, ids.shape[1] :].tolist()


@pytest.mark.parametrize("weights", ["stock", "fp16"])
@pytest.mark.parametrize(
    "params", [{}, {"temperature": 0.7, "top_p": 0.9, "seed": 1}, {"temperature": 1.0, "top_p": 0.95, "seed": 2}]
)
def test_a_head_does_not_change_a_token(weights: str, params: dict[str, float]) -> None:
    target = real_target(weights)
    plain = Engine(target, max_length=256)
    requests = asked(plain, **params)
    want = [plain.generate([r])[0] for r in requests]
    for tree, rows in ((TreeShape.chain(3), 1), (TreeShape(4, 4, 11), 3), (None, 3)):  # None: the planner's
        drafter = Eagle3Drafter(target, warm_head(target), weights=target.weights)
        got = Engine(target, drafter, tree=tree, max_rows=rows, max_length=256, costs=COSTS).generate(requests)
        assert [(r.ids, r.text, r.finish) for r in got] == [(r.ids, r.text, r.finish) for r in want]


def test_packed_logits_are_bit_equal_in_any_company() -> None:
    """A text read at once, token by token, and beside another row gives the very same bits."""
    target = real_target("fp16")
    if target.weights != "fp16":
        pytest.skip("the packed kernels could not be built here")
    ids = torch.tensor([Engine(target, max_length=64).encode([{"role": "user", "content": QUESTIONS[0]}])])
    whole = target.logits(target.read(ids).hidden)[0]
    length = ids.shape[1]
    cache = KVCache(target.layer_shapes, 2, length)
    for place in range(length):
        slots = torch.full((2, 1), place)
        both = torch.cat([ids[:, place : place + 1], ids[:, length - 1 - place : length - place]])
        mask = torch.ones(2, 1, 1, place + 1, dtype=torch.bool)
        out = target.forward(both, slots, cache.view(0, 2, slots), mask, torch.arange(place + 1).expand(2, -1))
        assert torch.equal(target.logits(out.hidden)[0, 0], whole[place]), place


def test_step_k_of_the_unroll_is_the_kth_step_of_drafting() -> None:
    target = real_target("stock")
    engine = Engine(target, max_length=256)
    request = asked(engine)[0]
    result = engine.generate([request])[0]
    ids = [*request.ids, *result.ids]
    text = read_features(target, Sample("a", ids, [(len(request.ids), len(ids))]))
    head = warm_head(target)
    batch = Batch.of([text])
    masks = loss_masks(head, batch, 4)
    with torch.no_grad():
        steps = list(unroll(head, batch, masks))
    drafter = Eagle3Drafter(target, head)
    compared = 0
    for t in range(len(request.ids) - 1, len(ids) - 2):
        drafter.allocate(1, 256, 8)
        logits = drafter.extend(text.ids[None, 1 : t + 2], text.float_taps[None, : t + 1], torch.tensor([t + 1]))
        for k in range(min(4, len(ids) - 2 - t)):
            if k:
                token = text.ids[t + 1 + k].view(1, 1)
                logits = drafter.expand(token, torch.zeros(1, 1, dtype=torch.long))[0]
            found = (steps[k].slots == t).nonzero()
            if len(found):
                assert (steps[k].logits[found[0, 0]] - logits[0]).abs().max() < 1e-3 * logits.abs().max()
                compared += 1
    assert compared == int(masks.sum()) > 20
