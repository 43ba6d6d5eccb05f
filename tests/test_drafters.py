"""Every drafter is lossless by the same tests as EAGLE-3, and drafts what its kind should."""

from __future__ import annotations

import random
from dataclasses import replace
from functools import cache
from itertools import product
from pathlib import Path

import pytest
import torch
from torch import Tensor

from eyas.data.batches import Batch
from eyas.data.features import read_features
from eyas.decoding.drafters import Eagle1Drafter, Eagle3Drafter, JoinedDrafter, LLMDrafter, LookupDrafter, MedusaDrafter
from eyas.decoding.drafters.lookup import NGrams
from eyas.decoding.drafters.opening import open_drafter, split_tree, taps_named
from eyas.decoding.engine import Engine, Request, Result
from eyas.decoding.sampling import SamplingParams
from eyas.decoding.static_tree import EAGLE1, StaticTree
from eyas.decoding.tree import TreeShape
from eyas.errors import EyasError
from eyas.heads.files import load_any_head, load_head, save_head
from eyas.heads.head import DraftHead
from eyas.heads.start import new_medusa_head
from eyas.target import Target
from eyas.training.unroll import loss_masks, predictions, unroll
from tests.kinds import KINDS, eagle1_head, final, made, medusa_head
from tests.test_engine import COSTS, STEERED, assert_same, coming_and_going, plain, requests, steered
from tests.test_unroll import STEPS, random_head, some_sample
from tests.tiny import VOCAB, save_target, tiny_target

TREES = (TreeShape.chain(3), TreeShape(4, 3, 8), EAGLE1, None)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("temperature", [0.0, 0.7, 1.0])
def test_no_drafter_changes_a_token(kind: str, temperature: float) -> None:
    target = tiny_target("mistral" if kind == "llm" else "llama")
    asked = requests(temperature=temperature, top_p=0.95)
    want = plain(target, asked)
    for tree in TREES:
        of, drafter = made(kind, target)
        engine = Engine(of, drafter, tree=tree, max_rows=1 if tree == TREES[0] else 3, max_length=256, costs=COSTS)
        assert_same(engine.generate(asked), want)


@pytest.mark.parametrize("kind", KINDS)
def test_rejection_sampling_with_any_drafter_repeats_itself_and_is_greedy_at_0(kind: str) -> None:
    target = tiny_target("llama")
    for tree in (TreeShape.chain(3), TreeShape(3, 3, 6)):
        of, drafter = made(kind, target)
        engine = Engine(of, drafter, tree=tree, max_rows=3, max_length=256, sampling="rejection")
        assert_same(engine.generate(requests()), plain(target, requests()))
        warm = requests(temperature=0.9)
        assert_same(engine.generate(warm), engine.generate(warm))


@cache
def steered_answers(target: Target) -> tuple[list[Request], list[Result]]:
    """Requests under penalties, a bias and a grammar, and their plain answers."""
    ways = [steered(target, STEERED[way], temperature=0.9) for way in ("all", "JSON")]
    return [request for asked, _ in ways for request in asked], [result for _, want in ways for result in want]


@pytest.mark.parametrize("kind", KINDS)
def test_penalties_bias_and_grammar_are_the_same_with_any_drafter(kind: str) -> None:
    asked, want = steered_answers(tiny_target("llama"))
    of, drafter = made(kind, tiny_target("llama"))
    assert_same(Engine(of, drafter, tree=TreeShape(3, 3, 9), max_rows=3, max_length=256).generate(asked), want)


@cache
def few_tokens(target: Target) -> tuple[list[Request], list[Result]]:
    """Answers that end, in four ways, at each of their tokens 1 to 4, and of which a bias leaves two or three tokens."""
    few = {40: 100.0, 41: 100.0, 42: 100.0}
    asked = []
    for place in range(1, 5):
        usual = SamplingParams(max_new_tokens=12, temperature=1.0, seed=place, logit_bias=few)
        ids = [5, *random.Random(place).choices((40, 41, 42, 2), k=40)]  # something for look-up to find
        (whole,) = plain(target, [Request(ids, usual)])
        said = [target.tokenizer.decode([token]) for token in whole.ids]
        ways = {
            "eos": replace(usual, min_new_tokens=place, logit_bias={40: 100.0, 41: 100.0, 2: 200.0}),
            "length": replace(usual, max_new_tokens=place + 1),
            "stop": replace(usual, stop=("".join(said[place - 1 : place + 1]),)),
            "stop id": replace(usual, stop_ids=(whole.ids[place],)),
        }
        asked += [Request(ids, params, f"{way} {place}") for way, params in ways.items()]
    return asked, plain(target, asked)


@pytest.mark.parametrize("kind", KINDS)
def test_the_text_ends_inside_an_accepted_block_of_any_drafter_as_it_does_plainly(kind: str) -> None:
    """The tree holds every text of three likely tokens, so what a drafter proposes is always right (look-up's often)."""
    target = tiny_target("llama")
    asked, want = few_tokens(target)
    of, drafter = made(kind, target)
    branches = [branch for depth in (1, 2, 3) for branch in product(range(3), repeat=depth)]
    got = Engine(of, drafter, tree=StaticTree(tuple(branches)), max_rows=4, max_length=96).generate(asked)
    assert_same(got, want)
    assert {result.finish for result in got} == {"eos", "length", "stop"}
    inside = [result for result in got if result.accepted[-1]]
    if kind == "lookup":
        assert {result.finish for result in inside} == {"eos", "length", "stop"}
    else:
        assert inside == [result for result in got if (len(result.ids) - 1) % 4]  # all but each round's own token
    assert all(result.stats.emitted == len(result.ids) - 1 for result in got)


@cache
def greedy_and_sampled(target: Target) -> tuple[list[Request], list[Result]]:
    """Requests, every second one sampled, and their plain answers."""
    greedy, sampled = (requests(6, temperature=temperature, max_new_tokens=10) for temperature in (0.0, 0.9))
    asked = [pair[i % 2] for i, pair in enumerate(zip(greedy, sampled, strict=True))]
    return asked, plain(target, asked)


@pytest.mark.parametrize("kind", KINDS)
def test_rows_of_any_drafter_come_go_and_are_cancelled_without_touching_others(kind: str) -> None:
    asked, want = greedy_and_sampled(tiny_target("llama"))
    of, drafter = made(kind, tiny_target("llama"))
    engine = Engine(of, drafter, tree=TreeShape(3, 3, 6), max_rows=3, max_length=256)
    for seed in (2, 3):
        coming_and_going(engine, asked, want, random.Random(seed))


@pytest.mark.parametrize("kind", KINDS)
def test_a_row_with_a_shared_beginning_is_drafted_as_alone(kind: str) -> None:
    target = tiny_target("qwen2")
    generator = torch.Generator().manual_seed(2)
    system = torch.randint(3, VOCAB, (20,), generator=generator).tolist()
    prompts = [[*system, 9], [*system, 4, 4, 8], system, system[:3], [*system, 4, 4, 8]]
    asked = [Request(ids, SamplingParams(max_new_tokens=10), str(i)) for i, ids in enumerate(prompts)]

    def engine(rows: int) -> Engine:
        of, drafter = made(kind, target)
        return Engine(of, drafter, tree=TreeShape(3, 3, 6), max_rows=rows, max_length=64)

    alone = [engine(1).generate([request])[0] for request in asked]
    together = engine(4).generate(asked)
    assert_same(together, alone)
    for a, b in zip(together, alone, strict=True):
        assert (a.accepted, a.stats.accepted) == (b.accepted, b.stats.accepted)


def test_the_target_as_its_own_drafter_is_always_right() -> None:
    target = tiny_target("gemma3_text")
    drafter = LLMDrafter(target, target.tapped((0,)))
    engine = Engine(target, drafter, tree=TreeShape.chain(3), max_rows=3, max_length=256)
    for result in engine.generate(requests(max_new_tokens=25)):
        assert result.stats.accepted == result.stats.drafted - (-result.stats.emitted) % 4 or result.finish == "eos"
        assert result.stats.n_alpha[0] == 1.0


def test_the_small_llm_keeps_what_it_would_read_afresh() -> None:
    target, model = tiny_target("llama"), tiny_target("qwen3", seed=3)
    drafter = LLMDrafter(target, model)
    engine = Engine(target, drafter, tree=TreeShape(3, 3, 7), max_rows=2, max_length=128)
    for request in requests(2, max_new_tokens=14):
        engine.submit(request)
    while engine.busy:
        engine.step()
        for slot, row in enumerate(engine._rows):
            count = int(drafter.cache.lengths[slot])
            text = [*row.request.ids, *row.ids]
            assert count + len(row.unread) == len(text)
            fresh = Engine(model, max_length=128)
            fresh.submit(Request(text[:count], SamplingParams(max_new_tokens=2)))
            fresh.step()
            for mine, true in zip(drafter.cache.keys_values(7, slot), fresh.cache.keys_values(7, 0), strict=True):
                assert torch.allclose(mine, true[:, :count], atol=1e-4)


def test_another_vocabulary_is_refused(tmp_path: Path) -> None:
    target, other = tiny_target("llama"), tiny_target("qwen2", seed=9)
    folder = save_target(other, tmp_path)
    words = (folder / "tokenizer.json").read_text()
    (folder / "tokenizer.json").write_text(words.replace('"a"', '"ab"'))
    with pytest.raises(EyasError, match=r"vocabularies differ \(161 and 160 tokens, 2 of them"):
        open_drafter(f"llm:{folder}", target)
    with pytest.raises(EyasError, match="needs the name of a model"):
        open_drafter("llm:", target)


def test_a_small_llm_with_a_short_context_says_so() -> None:
    target = tiny_target("llama")
    model = tiny_target("qwen2", seed=3).tapped((0,))
    model.max_length = 40
    with pytest.raises(EyasError, match="holds texts of 40 tokens"):
        Engine(target, LLMDrafter(target, model), tree=TreeShape.chain(2), max_length=64)


def test_the_longest_match_counts_and_what_followed_it() -> None:
    ngrams = NGrams()
    for token in (1, 2, 3, 4, 5, 1, 2, 3, 9, 2, 3, 4, 1, 2, 3):
        ngrams.add(token)
    found = ngrams.after(())
    assert found is not None and found.length == 3 and found.counts == {4: 1, 9: 1}
    deeper = ngrams.after((4,))
    assert deeper is not None and deeper.length == 4 and deeper.counts == {5: 1}
    assert ngrams.after((7,)) is None and ngrams.after((4, 5, 1, 2)).counts == {3: 1}  # type: ignore[union-attr]


def test_lookup_copies_what_repeats_itself_and_drafts_nothing_where_nothing_does() -> None:
    target = tiny_target("llama")
    drafter = LookupDrafter(target)
    engine = Engine(target, drafter, tree=TreeShape.chain(4), max_length=256)
    fresh = engine.generate([Request([5, 6, 7, 8], SamplingParams(max_new_tokens=2))])[0]
    assert fresh.stats.drafted == 0
    repeated = [11, 12, 13, 14, 15, 16, 17, 18] * 3
    drafter.allocate(2, 64, 0)
    drafter.begin(0, repeated[0], 0, 0)
    drafter.begin(1, 3, 0, 0)
    tokens = torch.tensor([repeated[1:], [4] + [0] * 22])
    first = drafter.extend(tokens, torch.zeros(2, 23, 0), torch.tensor([23, 1]))
    assert int(first[0].argmax()) == 11 and bool((first[1] == float("-inf")).all())
    second = drafter.expand(torch.tensor([[11, 12], [0, 1]]), torch.zeros(2, 2, dtype=torch.long))
    assert int(second[0, 0].argmax()) == 12 and bool((second[0, 1] == float("-inf")).all())  # 17 18 12 never was
    third = drafter.expand(torch.tensor([[12, 11], [0, 1]]), torch.tensor([[0, 1], [0, 1]]))
    assert int(third[0, 0].argmax()) == 13 and bool((third[0, 1] == float("-inf")).all())  # 17 18 12 11 neither
    assert bool((second[1] == float("-inf")).all())


def test_a_joined_tree_holds_both_and_nothing_twice() -> None:
    target = tiny_target("llama")
    head = random_head(target, draft_vocab=40)
    repeated = [151, 152, 153, 154] * 4  # outside the head's vocabulary
    joined = JoinedDrafter(target, Eagle3Drafter(target, head))
    joined.allocate(1, 64, 16)
    joined.begin(0, repeated[0], 0, 0)
    taps = target.read(torch.tensor([repeated])).taps[:, :-1]
    count = torch.tensor([len(repeated) - 1])
    q = joined.extend(torch.tensor([repeated[1:]]), taps, count).exp()  # [1, V]
    alone = Eagle3Drafter(target, head)
    alone.allocate(1, 64, 16)
    own = alone.extend(torch.tensor([repeated[1:]]), taps, count).softmax(-1)
    w = float(q[0, 151])
    assert 0.5 < w < 1 and torch.allclose(q.sum(), torch.tensor(1.0), atol=1e-5)
    assert torch.allclose(q[:, alone.target_ids], (1 - w) * own, atol=1e-6)


def test_step_k_of_an_eagle1_unroll_is_the_kth_step_of_drafting() -> None:
    target = final(tiny_target("llama"))
    head = eagle1_head(target, spread=0.05)  # nothing norms the states, so larger weights would let rounding grow
    text = read_features(target, some_sample("a", 24, [(5, 24)]), top_k=VOCAB)
    batch = Batch.of([text])
    masks = loss_masks(head, batch, STEPS)
    with torch.no_grad():
        predicted = list(unroll(head, batch, masks))
    drafter = Eagle1Drafter(target, head)
    compared = 0
    for t in range(22):
        drafter.allocate(1, 64, 16)
        logits = drafter.extend(text.ids[None, 1 : t + 2], text.float_taps[None, : t + 1], torch.tensor([t + 1]))
        for step in range(min(STEPS, 22 - t)):
            if step:
                logits = drafter.expand(text.ids[t + 1 + step].view(1, 1), torch.zeros(1, 1, dtype=torch.long))[0]
            found = (predicted[step].slots == t).nonzero()
            if len(found):
                mine = predicted[step].logits[found[0, 0]]
                assert (mine - logits[0]).abs().max() < 1e-4 * mine.abs().max()
                compared += 1
    assert compared == int(masks.sum()) > 50


def test_medusas_predictions_in_training_are_those_of_drafting() -> None:
    target = final(tiny_target("llama"))
    head = medusa_head(target, vocabulary=VOCAB)
    text = read_features(target, some_sample("a", 24, [(5, 24)]), top_k=VOCAB)
    batch = Batch.of([text])
    drafter = MedusaDrafter(target, head)
    with torch.no_grad():
        predicted = list(predictions(head, batch, loss_masks(head, batch, 5)))
    t = 9
    level: Tensor = drafter.extend(text.ids[None, 1 : t + 2], text.float_taps[None, : t + 1], torch.tensor([t + 1]))
    for step in range(5):
        if step:
            level = drafter.expand(torch.tensor([[3, 4]]), torch.zeros(1, 2, dtype=torch.long))[:, 1]
        mine = predicted[step].logits[int((predicted[step].slots == t).nonzero())]
        assert torch.allclose(mine, level[0], atol=1e-5)
        assert int(predicted[step].token_index[int((predicted[step].slots == t).nonzero())]) == t + 2 + step
    untrained = new_medusa_head(target, torch.zeros(VOCAB, dtype=torch.long), 2)
    assert torch.allclose(untrained.logits(1, batch.taps), target.logits(batch.taps), atol=1e-4)


def test_a_tree_deeper_than_medusas_heads_is_refused_and_the_planner_stays_within() -> None:
    target = final(tiny_target("llama"))
    drafter = MedusaDrafter(target, medusa_head(target, heads=2))
    with pytest.raises(EyasError, match="more than the 2 levels"):
        Engine(target, drafter, tree=TreeShape.chain(3), max_length=64)
    assert Engine(target, drafter, max_length=64, costs=COSTS).policy.shape.depth == 2


@pytest.mark.parametrize("kind", ["medusa", "eagle1", "eagle3"])
def test_a_head_on_disk_is_opened_as_what_it_is(kind: str, tmp_path: Path) -> None:
    target = tiny_target("llama")
    head: DraftHead = {"medusa": medusa_head, "eagle1": eagle1_head, "eagle3": random_head}[kind](target)
    save_head(head, tmp_path)
    back = load_any_head(tmp_path, target)
    assert type(back) is type(head) and back.config == head.config
    state = head.state_dict()
    assert all(torch.equal(tensor, state[name]) for name, tensor in back.state_dict().items())
    opened = open_drafter(str(tmp_path), target)
    assert opened.target.tap_ids == head.config.taps(target) and len(opened.hash) == 12
    assert taps_named(str(tmp_path)) == (target.tap_ids if kind == "eagle3" else None)
    engine = Engine(opened.target, opened.drafter, tree=StaticTree(((0,), (1,), (0, 0))), max_length=128)
    assert_same(engine.generate(requests(2)), plain(target, requests(2)))
    joined = open_drafter(f"{tmp_path}+lookup", target)
    assert isinstance(joined.drafter, JoinedDrafter) and joined.hash == opened.hash
    if kind != "eagle3":
        with pytest.raises(EyasError, match="an EAGLE-3 head is wanted"):
            load_head(tmp_path, target)


def test_a_tree_may_follow_what_is_opened(tmp_path: Path) -> None:
    assert split_tree("lookup") == ("lookup", None)
    assert split_tree("a/head+lookup@3x3x5") == ("a/head+lookup", "3x3x5")
    assert split_tree("head@") == ("head", "")
    (tmp_path / "head@2").mkdir()
    assert split_tree(f"{tmp_path}/head@2") == (f"{tmp_path}/head@2", None)
    assert split_tree(f"{tmp_path}/head@2@static") == (f"{tmp_path}/head@2", "static")


def test_the_published_medusa_names_are_read(tmp_path: Path) -> None:
    target = tiny_target("llama")
    head = medusa_head(target, heads=2, vocabulary=VOCAB)
    save_head(head, tmp_path)
    from eyas.heads.checkpoint import read_checkpoint

    assert sorted(read_checkpoint(tmp_path).tensors) == [
        "0.0.linear.bias", "0.0.linear.weight", "0.1.weight", "1.0.linear.bias", "1.0.linear.weight", "1.1.weight",
    ]  # fmt: skip
