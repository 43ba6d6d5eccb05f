"""The engine's promise: the same tokens with any head, any tree, any batch, greedy or sampled."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from eyas.decoding.costs import Costs
from eyas.decoding.drafters import Eagle3Drafter
from eyas.decoding.engine import Engine, Request, Result
from eyas.decoding.grammar import Grammar
from eyas.decoding.sampling import SamplingParams
from eyas.decoding.static_tree import EAGLE1
from eyas.decoding.tree import TreeShape
from eyas.errors import EyasError
from eyas.target import Target
from tests.test_unroll import random_head
from tests.tiny import FAMILIES, VOCAB, tiny_target

TREES = (
    TreeShape.chain(1), TreeShape.chain(4), TreeShape(4, 4, 12), TreeShape(3, 2, 5), TreeShape(0, 1, 0), EAGLE1,
    None,  # the planner's
)  # fmt: skip
# Costs under which the planner changes its mind: a random head's drafts are worth little.
COSTS = Costs(target={1: {1: 1.0, 32: 1.4}, 3: {1: 1.2, 32: 9.0}}, draft={1: {1: 0.02, 3: 0.03}, 3: {1: 0.03, 3: 0.05}})


class OracleDrafter:
    """Knows the text that plain decoding will write and drafts it where `right` says so of the place, else any other token."""

    target_ids = torch.arange(VOCAB)
    depth = None

    def __init__(self, texts: dict[tuple[int, ...], list[int]], *, right: bool | Callable[[int], bool]) -> None:
        self.texts = texts
        self.right = right if callable(right) else lambda place: right

    def allocate(self, rows: int, length: int, scratch: int) -> int:
        self.written: list[list[int]] = [[] for _ in range(rows)]
        return 0

    def begin(self, row: int, first: int, source: int, count: int) -> None:
        self.written[row] = self.written[source][:count]

    def prefill(self, row: int, tokens: Tensor, taps: Tensor) -> None:
        self.written[row] += tokens.tolist()

    def extend(self, tokens: Tensor, taps: Tensor, counts: Tensor) -> Tensor:
        for row, (new, count) in enumerate(zip(tokens.tolist(), counts.tolist(), strict=True)):
            self.written[row] += new[:count]
        self.level = 0
        return self._logits(len(tokens), 1)[:, 0]

    def expand(self, tokens: Tensor, parents: Tensor) -> Tensor:
        self.level += 1
        return self._logits(*tokens.shape)

    def _logits(self, rows: int, width: int) -> Tensor:
        out = torch.zeros(rows, width, VOCAB)
        for row, written in enumerate(self.written[:rows]):
            whole = next((t for p, t in self.texts.items() if list(p[1:]) == written[: len(p) - 1] and written), None)
            at = len(written) + 1 + self.level  # the prompt's first token is never given
            if whole is not None and at < len(whole):
                out[row, :, whole[at]] = 50.0 if self.right(at) else -50.0
        return out

    def move(self, source: int, to: int) -> None:
        self.written[to] = list(self.written[source])


def requests(count: int = 4, **params: object) -> list[Request]:
    generator = torch.Generator().manual_seed(7)
    out = []
    for i in range(count):
        ids = torch.randint(3, VOCAB, (3 + 7 * i % 23,), generator=generator).tolist()
        given = {"max_new_tokens": 12 + 5 * i, "seed": i, **params}
        out.append(Request(ids, SamplingParams(**given), id=str(i)))  # type: ignore[arg-type]
    return out


def plain(target: Target, asked: list[Request]) -> list[Result]:
    return [Engine(target, max_length=256).generate([r])[0] for r in asked]


def assert_same(got: list[Result], want: list[Result]) -> None:
    for a, b in zip(got, want, strict=True):
        assert (a.id, a.ids, a.finish, a.text) == (b.id, b.ids, b.finish, b.text)


@pytest.mark.parametrize("family", FAMILIES)
def test_plain_decoding_is_transformers_own_greedy(family: str) -> None:
    """Token by token without a cache, by the model as transformers built it, its own attention and masks included."""
    target = tiny_target(family)
    asked = requests(3, max_new_tokens=14)
    results = plain(target, asked)
    target.model.set_attn_implementation("eager")
    try:
        for request, result in zip(asked, results, strict=True):
            ids = torch.tensor([request.ids])
            for token in result.ids:
                with torch.no_grad():
                    logits = target.model(input_ids=ids, use_cache=False).logits[0, -1]
                assert int(logits.argmax()) == token
                ids = torch.cat([ids, torch.tensor([[token]])], 1)
    finally:
        target._caught.clear()
        target.model.set_attn_implementation("eyas")


@pytest.mark.parametrize("family", ["mamba", "qwen3_next", "falcon_h1", "gemma2", "gpt2", "cohere"])
def test_a_family_that_cannot_be_supported_is_refused_by_name(family: str) -> None:
    with pytest.raises(EyasError) as caught:
        tiny_target(family)
    assert "\n" not in str(caught.value) and (family in str(caught.value) or "softcap" in str(caught.value))


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("temperature", [0.0, 0.7, 1.0])
def test_a_head_does_not_change_a_token(family: str, temperature: float) -> None:
    target = tiny_target(family)
    asked = requests(temperature=temperature, top_p=0.95)
    want = plain(target, asked)
    for tree in TREES if family == "llama" else TREES[1:3]:
        rows = 1 if tree is not None and tree.top_k == 1 else 3
        drafter = Eagle3Drafter(target, random_head(target))
        engine = Engine(target, drafter, tree=tree, max_rows=rows, max_length=256, costs=COSTS)
        assert_same(engine.generate(asked), want)


STEERED: dict[str, dict[str, object]] = {
    "bias": {"logit_bias": {7: 3.0, 9: -50.0}},
    "repetition": {"repetition_penalty": 1.4},
    "presence and frequency": {"presence_penalty": 0.8, "frequency_penalty": 0.4},
    "least length": {"logit_bias": {2: 40.0}, "min_new_tokens": 9},
    "all": {"logit_bias": {7: 2.0}, "repetition_penalty": 1.2, "frequency_penalty": 0.3, "min_new_tokens": 5, "top_k": 20},
    "JSON": {"grammar": Grammar.json({"type": "array", "items": {"type": "integer"}, "maxItems": 3})},
    "regex": {"grammar": Grammar.regex("([a-f]{2}-){3}[0-9]+")},
}


def steered(target: Target, params: dict[str, object], temperature: float) -> tuple[list[Request], list[Result]]:
    """Requests under `params` but for one among them, and their plain answers, which are not those without `params`."""
    asked, free = (requests(4, temperature=temperature, **given) for given in (params, {}))
    asked[1] = free[1]
    want = plain(target, asked)
    assert [w.ids for w in want[2:]] != [f.ids for f in plain(target, free[2:])]
    return asked, want


@pytest.mark.parametrize("params", STEERED.values(), ids=STEERED.keys())
@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_penalties_bias_and_grammar_change_the_text_alike_with_and_without_a_head(
    params: dict[str, object], temperature: float
) -> None:
    target = tiny_target()
    asked, want = steered(target, params, temperature)
    texts = {tuple(r.ids): [*r.ids, *w.ids] for r, w in zip(asked, want, strict=True)}
    for drafter in (Eagle3Drafter(target, random_head(target)), OracleDrafter(texts, right=True)):
        for tree, rows in ((TreeShape.chain(4), 1), (TreeShape(3, 3, 9), 3), (None, 3)):
            engine = Engine(target, drafter, tree=tree, max_rows=rows, max_length=256, costs=COSTS)
            assert_same(engine.generate(asked), want)


def test_penalties_are_those_of_transformers() -> None:
    from transformers import LogitsProcessorList, RepetitionPenaltyLogitsProcessor

    target = tiny_target()
    request = requests(1, max_new_tokens=20, repetition_penalty=1.5)[0]
    ids = torch.tensor([request.ids])
    theirs = LogitsProcessorList([RepetitionPenaltyLogitsProcessor(1.5)])
    for token in plain(target, [request])[0].ids:
        logits = target.logits(target.read(ids).hidden)[:, -1]
        assert int(theirs(ids, logits).argmax()) == token  # type: ignore[arg-type]
        ids = torch.cat([ids, torch.tensor([[token]])], 1)


def test_constrained_answers_are_what_the_grammar_allows() -> None:
    import json
    import re

    target = tiny_target()
    schema = {"type": "array", "items": {"type": "integer"}, "maxItems": 3}
    ways = {"grammar": Grammar.json(schema)}, {"grammar": Grammar.regex("([a-f]{2}-){3}[0-9]{1,4}")}
    for n, params in enumerate(ways):
        for result in plain(target, requests(4, temperature=1.0, max_new_tokens=60, **params)):
            if result.finish == "eos":
                assert (
                    isinstance(json.loads(result.text), list)
                    if n == 0
                    else re.fullmatch("([a-f]{2}-){3}[0-9]{1,4}", result.text)
                )
    for wrong in ("((", "a(?=b)"):
        with pytest.raises(EyasError):
            Grammar.regex(wrong)
    with pytest.raises(EyasError, match="line 1"):
        Grammar.json("{")


def test_log_probabilities_are_the_targets_own() -> None:
    target = tiny_target()
    asked = requests(3, temperature=0.8, logprobs=2, presence_penalty=0.5)
    want = plain(target, asked)
    got = Engine(
        target, Eagle3Drafter(target, random_head(target)), tree=TreeShape(3, 3, 8), max_rows=2, max_length=256
    ).generate(asked)
    assert_same(got, want)
    for request, result in zip(asked, got, strict=True):
        assert result.logprobs is not None and [entry.id for entry in result.logprobs] == result.ids
        text = torch.tensor([[*request.ids, *result.ids]])
        true = target.logits(target.read(text).hidden)[0].log_softmax(-1)  # [L, V]
        for place, entry in enumerate(result.logprobs, len(request.ids) - 1):
            assert entry.logprob == pytest.approx(float(true[place, entry.id]), abs=1e-4)
            assert [i for i, _ in entry.top] == true[place].topk(2).indices.tolist()
    assert plain(target, requests(1))[0].logprobs is None


@pytest.mark.parametrize("tree", [TreeShape.chain(3), TreeShape(3, 3, 8), None])
def test_rejection_sampling_is_greedy_at_temperature_0_and_repeats_itself(tree: TreeShape | None) -> None:
    target = tiny_target()

    def run(temperature: float) -> list[Result]:
        drafter = Eagle3Drafter(target, random_head(target))
        engine = Engine(target, drafter, tree=tree, sampling="rejection", max_rows=3, max_length=256, costs=COSTS)
        return engine.generate(requests(temperature=temperature))

    assert_same(run(0.0), plain(target, requests()))
    if tree is not None:
        assert_same(run(0.9), run(0.9))


def test_a_bias_on_a_token_that_is_none_is_refused() -> None:
    with pytest.raises(EyasError, match="token 999"):
        Engine(tiny_target()).submit(Request([5], SamplingParams(logit_bias={999: 1.0})))
    with pytest.raises(EyasError, match="grammar"):
        SamplingParams(grammar=Grammar.regex("a"), ignore_eos=True)
    with pytest.raises(EyasError, match="sampling rule"):
        Engine(tiny_target(), sampling="other")  # type: ignore[arg-type]


def test_two_runs_on_one_engine_are_equal() -> None:
    target = tiny_target()
    engine = Engine(target, Eagle3Drafter(target, random_head(target)), max_rows=2, max_length=256, costs=COSTS)
    asked = requests(4, temperature=0.9)
    assert_same(engine.generate(asked), engine.generate(asked))


def test_a_drafter_that_lags_behind_reads_on_before_it_drafts_again() -> None:
    """A planner that drafts now and then, rows that share a prompt: the head's cache is always that of the true taps."""
    target = tiny_target()
    head = random_head(target)
    drafter = Eagle3Drafter(target, head)
    engine = Engine(target, drafter, tree=TreeShape(3, 3, 7), max_rows=3, max_length=256)
    chance = random.Random(5)
    engine.policy.drafts = lambda rows: chance.random() < 0.2  # type: ignore[method-assign]
    system = requests(3)[2].ids
    asked = [Request(system + r.ids, r.params, r.id) for r in requests(6, max_new_tokens=40)]
    want = plain(target, asked)
    for request in asked:
        engine.submit(request)
    done: dict[str, Result] = {}
    while engine.busy:
        done.update({event.result.id: event.result for event in engine.step() if event.result})
        for slot, row in enumerate(engine._rows):
            text = torch.tensor([[*row.request.ids, *row.ids]])
            read = int(drafter.cache.lengths[slot])
            assert read + len(row.unread) == text.shape[1] - 1
            again = Eagle3Drafter(target, head)
            again.allocate(1, 256, 0)
            again.prefill(0, text[0, 1 : read + 1], target.read(text[:, : max(read, 1)]).taps[0, :read])
            for mine, true in zip(drafter.cache.keys_values(0, slot), again.cache.keys_values(0, 0), strict=True):
                assert torch.allclose(mine, true, atol=1e-4)
    assert_same([done[r.id] for r in asked], want)


@pytest.mark.parametrize("right", [True, False])
@pytest.mark.parametrize("tree", [TreeShape.chain(4), TreeShape(3, 2, 6)])
def test_a_drafter_that_is_always_right_or_always_wrong(right: bool, tree: TreeShape) -> None:
    target = tiny_target("llama")
    asked = requests()
    want = plain(target, asked)
    texts = {tuple(r.ids): [*r.ids, *w.ids] for r, w in zip(asked, want, strict=True)}
    for rows in (1, 3):
        got = Engine(target, OracleDrafter(texts, right=right), tree=tree, max_rows=rows, max_length=256).generate(asked)
        assert_same(got, want)
        for result, plainly in zip(got, want, strict=True):
            emitted = len(plainly.ids) - 1
            if right:
                assert result.stats.rounds == -(-emitted // (tree.depth + 1))
                assert all(a == 1.0 for a in result.stats.n_alpha)
            else:
                assert result.stats.tau == 1.0 and result.stats.accepted == 0


@given(st.lists(st.booleans(), min_size=1, max_size=7), st.sampled_from([1, 3]), st.booleans())
@settings(max_examples=15, deadline=None)
def test_any_pattern_of_right_and_wrong_drafts(pattern: list[bool], rows: int, planned: bool) -> None:
    target = tiny_target("llama")
    asked = requests(temperature=0.6)
    want = plain(target, asked)
    texts = {tuple(r.ids): [*r.ids, *w.ids] for r, w in zip(asked, want, strict=True)}
    drafter = OracleDrafter(texts, right=lambda place: pattern[place % len(pattern)])
    engine = Engine(
        target, drafter, tree=None if planned else TreeShape(3, 2, 5), max_rows=rows, max_length=256, costs=COSTS
    )  # fmt: skip
    got = engine.generate(asked)
    assert_same(got, want)
    for result in got:
        stats = result.stats
        assert stats.emitted == len(result.ids) - 1 == stats.accepted + sum(not a for a in result.accepted[1:])
        assert stats.accepted <= stats.drafted


@pytest.mark.parametrize("offset", range(1, 9))
def test_the_text_ends_inside_a_block_as_it_does_plainly(offset: int) -> None:
    """EOS, a stop string and the token limit at every place of a block that an always-right drafter fills."""
    target = tiny_target("llama")
    base = requests(1, max_new_tokens=24)[0]
    whole = plain(target, [base])[0]
    texts = {tuple(base.ids): [*base.ids, *whole.ids]}
    pieces = [target.tokenizer.decode([t], skip_special_tokens=True) for t in whole.ids]

    def run(params: SamplingParams, eos: frozenset[int]) -> tuple[Result, Result]:
        kept, target.eos_ids = target.eos_ids, eos
        try:
            request = Request(base.ids, params)
            engine = Engine(target, OracleDrafter(texts, right=True), tree=TreeShape.chain(4), max_length=256)
            return engine.generate([request])[0], plain(target, [request])[0]
        finally:
            target.eos_ids = kept

    ways = [
        (SamplingParams(max_new_tokens=24), frozenset({whole.ids[offset], 999})),
        (SamplingParams(max_new_tokens=offset), frozenset()),
        (SamplingParams(max_new_tokens=24, stop=(pieces[offset] + pieces[offset + 1],)), frozenset()),
        (SamplingParams(max_new_tokens=24, stop_ids=(whole.ids[offset],)), frozenset()),
    ]
    for (params, eos), finish in zip(ways, ("eos", "length", "stop", "stop"), strict=True):
        got, want = run(params, eos)
        assert_same([got], [want])
        assert got.finish == finish
        assert got.stats.emitted == len(got.ids) - 1  # nothing after the end is counted


def test_caches_hold_the_committed_tokens_but_the_last() -> None:
    """After every round: the target's cache equals a fresh prefill, and the head's equals one with true taps."""
    target = tiny_target("qwen3")
    head = random_head(target)
    drafter = Eagle3Drafter(target, head)
    engine = Engine(target, drafter, tree=TreeShape(3, 3, 7), max_rows=3, max_length=256)
    asked = requests(3, max_new_tokens=18)
    for request in asked:
        engine.submit(request)
    while engine.busy:
        engine.step()
        for slot, row in enumerate(engine._rows):
            text = torch.tensor([[*row.request.ids, *row.ids]])
            fresh = Engine(target, max_length=256)
            fresh.submit(Request(text[0, :-1].tolist(), SamplingParams(max_new_tokens=2)))
            fresh.step()
            length = text.shape[1] - 1
            assert int(engine.cache.lengths[slot]) == length
            for layer in range(target.num_layers):
                for mine, true in zip(engine.cache.keys_values(layer, slot), fresh.cache.keys_values(layer, 0), strict=True):
                    assert torch.allclose(mine, true[:, :length], atol=1e-4)
            again = Eagle3Drafter(target, head)
            again.allocate(1, 256, 0)
            read = int(drafter.cache.lengths[slot])
            assert read + len(row.unread) == length
            again.prefill(0, text[0, 1 : read + 1], target.read(text[:, :read]).taps[0])
            for mine, true in zip(drafter.cache.keys_values(0, slot), again.cache.keys_values(0, 0), strict=True):
                assert torch.allclose(mine, true, atol=1e-4)


def coming_and_going(engine: Engine, asked: list[Request], want: list[Result], chance: random.Random) -> None:
    """Submit and cancel at random while others are decoded: what is answered is what was wanted."""
    waiting = chance.sample(range(len(asked)), len(asked))
    cancelled = set(chance.sample(range(len(asked)), chance.randrange(3)))
    tickets: dict[int, int] = {}
    done: dict[int, Result] = {}
    while waiting or engine.busy:
        if waiting and chance.random() < 0.5:
            number = waiting.pop()
            tickets[engine.submit(asked[number])] = number
        for ticket, number in tickets.items():
            if number in cancelled and chance.random() < 0.3:
                engine.cancel(ticket)
        for event in engine.step():
            if event.result is not None:
                done[tickets[event.ticket]] = event.result
    for number, result in done.items():
        assert_same([result], [want[number]])
    assert set(range(len(asked))) - cancelled <= set(done)
    assert not engine.busy


@given(st.integers(0, 2**32), st.sampled_from([0.0, 0.9]))
@settings(max_examples=10, deadline=None)
def test_joining_late_and_leaving_early_changes_no_row(seed: int, temperature: float) -> None:
    target = tiny_target("llama")
    asked = requests(6, temperature=temperature, max_new_tokens=14)
    want = plain(target, asked)
    engine = Engine(target, Eagle3Drafter(target, random_head(target)), tree=TreeShape(3, 3, 6), max_rows=3, max_length=256)
    coming_and_going(engine, asked, want, random.Random(seed))


@pytest.mark.parametrize("features", [False, True])
def test_a_shared_beginning_changes_nothing(features: bool) -> None:
    """Prompts that begin alike are prefilled once; tokens, acceptance, caches and features are those of each alone."""
    target = tiny_target("qwen2")
    generator = torch.Generator().manual_seed(2)
    system = torch.randint(3, VOCAB, (20,), generator=generator).tolist()
    ends = [torch.randint(3, VOCAB, (n,), generator=generator).tolist() for n in (1, 4, 9)]
    prompts = [*(system + end for end in ends), system, system + ends[1], system[:3]]
    asked = [Request(ids, SamplingParams(max_new_tokens=10), str(i)) for i, ids in enumerate(prompts)]

    def engine(rows: int) -> Engine:
        drafter = Eagle3Drafter(target, random_head(target))
        return Engine(target, drafter, tree=TreeShape(3, 3, 6), max_rows=rows, max_length=64, features=features)

    alone = [engine(1).generate([request])[0] for request in asked]
    together = engine(4).generate(asked)
    assert_same(together, alone)
    for a, b in zip(together, alone, strict=True):
        assert (a.accepted, a.stats.accepted, a.stats.drafted) == (b.accepted, b.stats.accepted, b.stats.drafted)
        if features:
            assert a.features is not None and b.features is not None
            assert torch.allclose(a.features.float_taps, b.features.float_taps, atol=1e-4)


def test_streaming_gives_the_same_text_in_whole_characters() -> None:
    target = tiny_target("llama")
    request = requests(1, max_new_tokens=30)[0]
    want = plain(target, [request])[0]
    engine = Engine(target, Eagle3Drafter(target, random_head(target)), tree=TreeShape(3, 3, 6), max_length=256)
    pieces = list(engine.stream(request))
    assert "".join(p.text for p in pieces) == want.text
    assert [i for p in pieces for i in p.ids] == want.ids
    for _ in engine.stream(request):  # leaving early frees the slot
        break
    assert not engine.busy


def test_features_of_generation_are_those_of_reading() -> None:
    from eyas.chat import Sample
    from eyas.data.features import read_features

    target = tiny_target("qwen2")
    engine = Engine(
        target, Eagle3Drafter(target, random_head(target)), tree=TreeShape(3, 3, 6), max_rows=2, max_length=256,
        features=True,
    )  # fmt: skip
    for request, result in zip(requests(3), engine.generate(requests(3)), strict=True):
        ids = [*request.ids, *result.ids]
        read = read_features(target, Sample("", ids, [(len(request.ids), len(ids))]))
        assert result.features is not None and result.features.key == read.key
        assert torch.allclose(result.features.float_taps, read.float_taps, atol=0.05)
        assert torch.equal(result.features.teacher_ids[:, 0], read.teacher_ids[:, 0])
        assert torch.allclose(result.features.teacher_probs, read.teacher_probs, atol=1e-3)


def test_prompts_that_do_not_fit_are_refused_in_one_line() -> None:
    engine = Engine(tiny_target("llama"), max_length=32)
    for ids in ([], [5] * 32, [5] * 400):
        with pytest.raises(EyasError) as caught:
            engine.submit(Request(ids))
        assert "\n" not in str(caught.value)
    with pytest.raises(EyasError, match="at least 1 row"):
        Engine(tiny_target("llama"), max_rows=0)
    result = engine.generate([Request([5] * 30, SamplingParams(max_new_tokens=50, ignore_eos=True))])[0]
    assert result.finish == "length" and len(result.ids) == 2
