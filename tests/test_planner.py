"""The planner: drafts where it pays, not where it does not, and loses little to find out. No clock: costs are given."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from eyas.decoding.costs import Bench, Costs, measured
from eyas.decoding.drafters import Eagle3Drafter
from eyas.decoding.engine import Engine, Request
from eyas.decoding.planner import Calibration, Clock, Planner
from eyas.decoding.policy import Round
from eyas.decoding.row import Row
from eyas.decoding.sampling import SamplingParams
from eyas.decoding.static_tree import EAGLE1, StaticTree, parse_tree
from eyas.decoding.tree import Drafting, DraftTree, TreeShape
from eyas.decoding.verify import walk
from eyas.errors import EyasError
from tests.test_unroll import random_head
from tests.tiny import tiny_target

FLAT = Costs(target={1: {1: 1.0, 32: 1.1}}, draft={1: {1: 0.08, 3: 0.1}}, read=0.01)  # verifying is almost free
STEEP = Costs(target={1: {1: 1.0, 32: 32.0}}, draft={1: {1: 0.08, 3: 0.1}}, read=0.01)  # each token costs a forward


class World:
    """Rounds without a model: drafts of depth n are right with the chance `right`, and seconds are `costs`."""

    def __init__(self, planner: Planner, right: float, rows: int = 1) -> None:
        self.planner, self.right = planner, right
        self.chance = torch.Generator().manual_seed(0)
        target = tiny_target()
        self.rows = [
            Row(i, Request([5]), target.tokenizer, target.eos_ids, 10**6, []) for i in range(rows)
        ]  # fmt: skip
        self.seconds = self.tokens = 0.0
        self.nodes: list[int] = []

    def round(self) -> None:
        planner, count = self.planner, len(self.rows)
        prices = planner.costs.of(count, planner.shape.top_k, planner.shape.total)
        tree = DraftTree.empty(count)
        seconds = 0.0
        if planner.drafts(self.rows):
            levels = [1]

            def expand(tokens: Tensor, parents: Tensor) -> Tensor:
                levels.append(1)
                return self._logits(count, tokens.shape[1])

            def rank(logits: Tensor, depth: int) -> Tensor:
                return logits.log_softmax(-1)

            tree = planner.grow(Drafting(self._logits(count, 1)[:, 0], expand, rank, torch.arange(8)))
            seconds += prices.first + (len(levels) - 1) * prices.level
        nodes = tree.tokens.shape[1]
        seconds += prices.forward[nodes]
        draws = torch.rand(count, planner.shape.depth + 1, generator=self.chance) < self.right

        def choose(at: Tensor, step: int, alive: Tensor) -> Tensor:
            return torch.where(draws[:, step], 0, 7)  # the likeliest draft is token 0

        done = walk(tree, planner.shape.depth, choose)
        planner.learn(self.rows, Round(tree, done, prices.forward[nodes]))
        self.seconds += seconds
        self.tokens += float(done.counts.sum())
        self.nodes.append(nodes)

    def _logits(self, rows: int, width: int) -> Tensor:
        """A head that is 80 % sure of token 0."""
        logits = torch.full((rows, width, 8), 0.2 / 7).log()
        logits[..., 0] = torch.tensor(0.8).log()
        return logits

    def speed(self) -> float:
        """Tokens a second over plain decoding's."""
        plain = len(self.rows) / self.planner.costs.of(len(self.rows), 1, 0).forward[0]
        return self.tokens / self.seconds / plain


def played(costs: Costs, right: float, rounds: int = 400, rows: int = 1) -> World:
    world = World(Planner(costs), right, rows)
    for _ in range(rounds):
        world.round()
    return world


def test_it_drafts_deep_where_verifying_is_free_and_drafts_are_right() -> None:
    world = played(FLAT, right=0.8)
    assert world.speed() > 2.3  # a chain of 8 gives (1 - 0.8**9) / 0.2 = 4.3 tokens for 1.1 + 0.8 seconds
    assert sum(n > 3 for n in world.nodes) > 350


@pytest.mark.parametrize(("costs", "right"), [(STEEP, 0.8), (FLAT, 0.0), (STEEP, 0.0)])
def test_it_stops_where_drafting_does_not_pay_and_loses_little(costs: Costs, right: float) -> None:
    world = played(costs, right, rounds=1000)
    assert world.speed() > 0.97
    assert sum(n > 0 for n in world.nodes[200:]) < 100  # only probes


def test_it_notices_when_acceptance_falls_to_nothing_and_when_it_returns() -> None:
    world = played(FLAT, right=0.8)
    world.right, world.seconds, world.tokens = 0.0, 0.0, 0.0
    for _ in range(400):
        world.round()
    assert world.speed() > 0.95
    world.right, world.seconds, world.tokens = 0.8, 0.0, 0.0
    for _ in range(1500):
        world.round()
    assert world.speed() > 1.4


def test_one_bad_row_does_not_spoil_the_belief_in_the_others() -> None:
    planner = Planner(Costs(target={4: {1: 1.0, 32: 1.1}}, draft={4: {1: 0.08, 3: 0.1}}, read=0.01))
    world = World(planner, right=0.8, rows=4)
    for _ in range(100):
        world.round()
    good = world.rows[0].trust
    bad = world.rows[3]
    for _ in range(40):
        bad.believe(0, 2)
    assert bad.trust < 0.2 < 0.7 < good


def test_the_calibration_learns_how_often_scores_come_true() -> None:
    calibration = Calibration()
    chance = torch.Generator().manual_seed(1)
    scores, sampled = torch.full((1, 4), -0.1), torch.tensor([False])
    assert float(calibration.chances(scores, sampled)[0, 0]) == pytest.approx(0.86, abs=0.1)  # believed at first
    for _ in range(300):
        calibration.learn(scores, sampled, torch.rand(1, 4, generator=chance) < 0.3)
    assert float(calibration.chances(scores, sampled)[0, 0]) == pytest.approx(0.3, abs=0.05)
    assert float(calibration.chances(scores, ~sampled)[0, 0]) > 0.8  # sampled rows are a matter of their own


def test_a_passing_load_changes_no_decision() -> None:
    clock = Clock()
    for ratio in [1.0] * 20 + [30.0] * 20 + [1.0] * 20:
        clock.saw("plain", ratio)
    assert clock.factor("tree") == pytest.approx(1.0, abs=0.1)
    for number in range(400):
        kind = "plain" if number % 20 < 10 else "tree"
        clock.saw(kind, 1.2 if kind == "tree" else 1.0)
    assert clock.factor("tree") == pytest.approx(1.2, abs=0.08)


def test_costs_between_and_beyond_what_was_measured() -> None:
    costs = Costs(target={1: {1: 1.0, 2: 9.0, 4: 2.0, 8: 3.0}, 4: {1: 3.0, 4: 8.0}}, draft={1: {1: 0.1}, 4: {1: 0.4}})
    prices = costs.of(1, 1, 15)
    assert prices.forward[0] == 1.0 and prices.forward[3] == 2.0
    assert prices.forward[1] == 2.0  # slower than four tokens: it was disturbed
    assert prices.forward[15] == 5.0  # as the last two go on
    assert costs.of(2, 1, 0).forward[0] == pytest.approx(1 + 2 / 3)
    assert costs.of(2, 1, 0).first == pytest.approx(0.2)


def test_costs_are_measured_once_and_leave_the_caches_empty(tmp_path: object, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("eyas.decoding.costs.cache_dir", lambda: tmp_path)
    target = tiny_target()
    drafter = Eagle3Drafter(target, random_head(target))
    engine = Engine(target, drafter, max_rows=3, max_length=64)
    assert isinstance(engine.policy, Planner)
    costs = engine.policy.costs
    assert set(costs.target) == set(costs.draft) == {1, 2, 3}
    assert all(seconds > 0 for by_tokens in costs.target.values() for seconds in by_tokens.values())
    assert not bool(engine.cache.lengths.any()) and not bool(drafter.cache.lengths.any())
    assert measured(Bench(target, engine.cache, drafter), 3) == costs  # from disk: timing it again would differ
    plain = Engine(target, max_length=64).generate([Request([5, 6, 7], SamplingParams(max_new_tokens=9))])
    assert engine.generate([Request([5, 6, 7], SamplingParams(max_new_tokens=9))])[0].ids == plain[0].ids


def test_trees_are_read_from_the_command_line() -> None:
    assert parse_tree("auto") is None
    assert parse_tree("static") == EAGLE1 and EAGLE1.total == 25 and EAGLE1.depth == 5
    assert parse_tree("static:0,1,00") == StaticTree(((0,), (1,), (0, 0)))
    assert parse_tree("chain:3") == TreeShape.chain(3)
    for wrong in ("", "3x3", "static:", "static:0,11", "static:00", "static:0,0", "chain:x"):
        with pytest.raises(EyasError) as caught:
            parse_tree(wrong)
        assert "\n" not in str(caught.value)
