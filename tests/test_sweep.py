"""Predictions of speculation's speed, and the sweep that holds them against measurements."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from rich.console import Console

from eyas.bench.contestants import Contestant
from eyas.bench.figures import PLAIN, Interval, RaceReport
from eyas.bench.grid import Report
from eyas.bench.items import Item
from eyas.bench.page import html
from eyas.bench.prediction import (
    BreakEven,
    ForwardTimes,
    beyond_timed,
    break_even,
    differences,
    level_widths,
    may_be,
    pays_up_to,
    round_seconds,
    speedup,
)
from eyas.bench.run import Plan
from eyas.bench.sweep import TREES, default_trees, parse_swept, run_sweep, tree_contestants
from eyas.bench.sweep_table import sweep_table
from eyas.cli.app import app
from eyas.decoding.costs import Costs
from eyas.decoding.sampling import SamplingParams
from eyas.decoding.static_tree import EAGLE1
from eyas.decoding.tree import TreeShape
from eyas.errors import EyasError
from eyas.heads.files import head_hash, save_head
from eyas.heads.start import new_head
from tests.test_drafters import final, medusa_head
from tests.tiny import tiny_target

# By rows and tokens per row: flat at one row, linear in the tokens at four.
COSTS = Costs(
    target={1: {1: 10.0, 2: 10.0, 6: 14.0}, 4: {1: 12.0, 2: 22.0, 6: 62.0}},
    draft={1: {1: 1.0, 3: 2.0}, 4: {1: 2.0, 3: 4.0}},
)


def test_the_drafter_reads_the_root_and_then_what_has_children() -> None:
    assert level_widths(TreeShape.chain(3)) == [1, 1, 1]
    assert level_widths(TreeShape(3, 4, 10)) == [1, 4, 4]
    assert level_widths(TreeShape.chain(0)) == []
    assert level_widths(EAGLE1) == [1, 4, 4, 1, 1]


def test_a_prediction_is_tau_times_forward_over_round() -> None:
    chain, tree = TreeShape.chain(1), TreeShape(3, 3, 5)
    assert round_seconds(COSTS, chain, 1) == pytest.approx(1.0 + 10.0)
    assert speedup(COSTS, chain, 1, 1.65) == pytest.approx(1.65 * 10 / 11)
    assert round_seconds(COSTS, tree, 1) == pytest.approx(1.0 + 2 * 2.0 + 14.0)  # 5 nodes and the root are 6 tokens
    assert speedup(COSTS, tree, 1, 2.85) == pytest.approx(2.85 * 10 / 19)
    assert round_seconds(COSTS, tree, 4) == pytest.approx(2.0 + 2 * 4.0 + 62.0)
    assert round_seconds(COSTS, chain, 2) == pytest.approx((1.0 + 1 / 3) + 10.0 + 4.0)  # between one and four rows


def test_the_break_even_batch_is_the_largest_that_pays() -> None:
    assert pays_up_to([1, 2, 4], [1.2, 1.0, 0.9]) == 2
    assert pays_up_to([1, 2, 4], [0.9, 0.8, 0.7]) == 0
    assert pays_up_to([1, 2, 32], [0.9, 0.8, 1.01]) == 0  # what pays again later is no end of what pays
    assert pays_up_to([1, 2, 4, 8], [1.3, 1.1, 0.9, 1.1]) == 2
    # chain:1 at tau 1.65: 1 row 16.5 / 11, 2 rows 1.65 x 32/3 / (46/3) = 1.15, 3 rows 1.65 x 34/3 / (59/3) = 0.95
    assert break_even(COSTS, TreeShape.chain(1), 1.65) == 2
    assert break_even(COSTS, TreeShape(3, 3, 5), 1.65) == 0
    assert break_even(COSTS, TreeShape.chain(1), 4.0) == 4  # as far as forwards were timed


def test_within_noise_the_break_even_batch_is_a_range() -> None:
    """Speed-ups 1.2, 1.02, 0.97 where differences up to 5 % are noise: sure up to 1, possible up to 4."""
    found = [Interval(value=v, low=v - 0.01, high=v + 0.01) for v in (1.2, 1.02, 0.97, 0.8)]
    least, most = zip(*(may_be(one, 0.05) for one in found), strict=True)
    assert may_be(found[0], 0.0) == (1.19, 1.21) and least[1] == pytest.approx(0.97)
    batches = [1, 2, 4, 8]
    assert (pays_up_to(batches, least), pays_up_to(batches, most)) == (1, 4)
    even = BreakEven(tree="t", measured=2, predicted=2, at_least=1, at_most=4)
    assert even.span == "2 (1 to 4)" and even.model_copy(update={"at_least": 0}).span == "2 (none to 4)"
    assert BreakEven(tree="t", measured=0, predicted=0, at_least=0, at_most=0).span == "none"
    assert BreakEven(tree="t", measured=2, predicted=2).span == "2"  # of an older report


def test_what_is_predicted_beyond_the_forwards_timed_is_told() -> None:
    trees = {"chain:1": TreeShape.chain(1), "3x3x5": TreeShape(3, 3, 5), "2x4x8": TreeShape(2, 4, 8), "auto": None}
    assert list(beyond_timed(COSTS, trees, [1, 2, 4, 8])) == [
        "levels of 2x4x8 (timed: up to 3 nodes)",
        "forwards of 2x4x8 at batch 1 (timed: up to 6 tokens a row)",
        "forwards of 2x4x8 at batch 2 (timed: up to 6 tokens a row)",
        "forwards of 2x4x8 at batch 4 (timed: up to 6 tokens a row)",
        "batch 8 (timed: up to 4)",
    ]
    assert not list(beyond_timed(COSTS, {"chain:1": TreeShape.chain(1), "auto": None}, [1, 4]))


def test_times_of_other_weights_or_another_drafter_are_told() -> None:
    here = ForwardTimes(machine="m", threads=2, fingerprint="f", weights="fp16", drafter="d", costs=COSTS)
    assert not list(differences(here, here.model_copy(update={"machine": "n", "threads": 9})))
    packed, drafter = differences(here, here.model_copy(update={"weights": "int8", "drafter": "e"}))
    assert "int8 weights, not with fp16" in packed and "drafter e, not with d" in drafter


def test_forward_times_survive_the_disk_and_nothing_else_is_taken_for_them(tmp_path: Path) -> None:
    times = ForwardTimes(machine="m", threads=2, fingerprint="f", weights="fp16", drafter="d", costs=COSTS)
    times.write(tmp_path / "t.json")
    assert ForwardTimes.read(tmp_path / "t.json") == times
    times.model_copy(update={"costs": Costs()}).write(tmp_path / "empty.json")
    (tmp_path / "other.json").write_text('{"rows": []}')
    for name, told in (("empty", "lacks the seconds"), ("other", "no forward times written by"), ("none", "cannot read")):
        with pytest.raises(EyasError, match=told):
            ForwardTimes.read(tmp_path / f"{name}.json")


def race_at(report: Report, batch: int) -> RaceReport:
    return next(race for race in report.races if race.cell == (0.0, batch))


def pooled_tau(report: Report, tree: str) -> float:
    rounds = [row.runs[tree].rounds for race in report.races for row in race.rows]
    return sum(map(sum, rounds)) / sum(map(len, rounds))


def test_a_sweep_races_every_tree_and_predicts_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("eyas.decoding.costs.cache_dir", lambda: tmp_path / "cache")
    monkeypatch.setattr("eyas.bench.race.WARM_UP_TOKENS", 2)
    save_head(new_head(tiny_target(), torch.zeros(tiny_target().vocab_size, dtype=torch.long)), tmp_path / "head")
    drafter = Contestant("head", str(tmp_path / "head"))
    params = SamplingParams(max_new_tokens=8, ignore_eos=True)
    plan = Plan([Item("p", "s", "c", ids=(10, 20))], params, batches=(1, 2))
    target = tiny_target()
    other = ForwardTimes(
        machine="a far one", threads=1, fingerprint=target.fingerprint, weights="fp16", drafter="d", costs=COSTS
    )
    path = tmp_path / "r.json"
    with pytest.raises(EyasError, match=rf"times are those of another target \(f, this is {target.fingerprint}\)"):
        run_sweep(target, drafter, None, plan, path=path, elsewhere=other.model_copy(update={"fingerprint": "f"}))
    assert not path.exists()
    report = run_sweep(target, drafter, ["chain:1", "2x2x3", "auto"], plan, path=path, elsewhere=other)
    assert Report.read(path) == report
    assert report.sweep is not None
    found = report.sweep
    assert found.here.drafter == head_hash(tmp_path / "head")
    assert (found.trees, found.batches) == (["chain:1", "2x2x3", "auto"], [1, 2])
    assert [len(race.rows) for race in report.races] == [1, 2]  # the one prompt fills the batch of two
    assert all(figures.identical for race in report.races for figures in race.speculative.values())
    shapes = {"chain:1": TreeShape.chain(1), "2x2x3": TreeShape(2, 2, 3)}
    taus = {tree: pooled_tau(report, tree) for tree in found.trees}
    for cell in found.cells:
        assert cell.speedup == race_at(report, cell.batch).drafters[cell.tree].speedup
        if cell.tree != "auto":
            assert cell.predicted == pytest.approx(speedup(found.here.costs, shapes[cell.tree], cell.batch, taus[cell.tree]))
    predicted = {(cell.tree, cell.batch): cell.predicted for cell in found.cells}
    assert predicted["auto", 2] == max(1.0, predicted["chain:1", 2], predicted["2x2x3", 2])
    evens = {one.tree: one for one in found.break_even}
    assert evens["auto"].predicted == max(evens["chain:1"].predicted, evens["2x2x3"].predicted)
    far = found.predicted_elsewhere["chain:1"]
    assert far[1] == pytest.approx(taus["chain:1"] * 10 / 11) and list(far) == [1, 2, 4]
    assert evens["chain:1"].elsewhere == break_even(COSTS, TreeShape.chain(1), taus["chain:1"])
    assert found.plain_elsewhere == {1: pytest.approx(1 / 10), 2: pytest.approx(2 / (10 + 2 / 3)), 4: pytest.approx(4 / 12)}
    told = "\n".join(found.notes)
    assert "timed with fp16 weights, not with stock" in told and "drafter d" in told
    console = Console(width=160, record=True, file=(tmp_path / "shown").open("w"))
    console.print(sweep_table(found))
    shown = console.export_text()
    assert "break-even batch" in shown and "a far one" in shown and "2x2x3" in shown
    rows = [line.split() for line in shown.splitlines()]
    assert ["batch", "plain", "tokens/s", "chain:1", "2x2x3", "auto"] in rows
    ratios = [f"{found.predicted_elsewhere[tree][4]:.2f}x" for tree in found.trees]
    assert ["4", "0.3", *ratios] in rows
    assert "not with stock" in shown
    text = html(report)
    assert "Break-even batch" in text and "Predicted on a far one" in text and text.count("<svg") >= 2
    assert "not with stock" in text and f"{found.predicted_elsewhere['2x2x3'][4]:.2f}&times;" in text


def test_the_usual_trees_are_those_that_the_drafter_is_deep_enough_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert default_trees(None) == list(TREES) and default_trees(4) == [tree for tree in TREES if tree != "5x5x16"]
    monkeypatch.setattr("eyas.decoding.costs.cache_dir", lambda: tmp_path / "cache")
    monkeypatch.setattr("eyas.bench.race.WARM_UP_TOKENS", 2)
    target = tiny_target()
    save_head(medusa_head(final(target), heads=2), tmp_path / "medusa")
    medusa = Contestant("medusa", str(tmp_path / "medusa"))
    plan = Plan([Item("p", "s", "c", ids=(10, 20))], SamplingParams(max_new_tokens=4, ignore_eos=True))
    found = run_sweep(target, medusa, None, plan).sweep
    assert found is not None and found.trees == ["chain:1", "2x2x3", "auto"]
    assert "3x3x5, 4x4x8, 5x5x16, deeper than the drafter's 2 levels" in " ".join(capsys.readouterr().err.split())
    with pytest.raises(EyasError, match="a tree 3 deep is more than the 2 levels"):
        run_sweep(target, medusa, ["3x3x5"], plan)


def test_a_sweep_refuses_what_it_cannot_compare() -> None:
    plan = Plan([], SamplingParams(), temperatures=(0.0, 1.0))
    with pytest.raises(EyasError, match="one temperature"):
        run_sweep(tiny_target(), Contestant("x", "x"), ["auto"], plan)
    with pytest.raises(EyasError, match="plain decoding has none"):
        run_sweep(tiny_target(), Contestant(PLAIN, PLAIN), ["auto"], Plan([], SamplingParams()))
    with pytest.raises(EyasError, match="'bushy'"):
        tree_contestants(Contestant("x", "x"), ["bushy"])
    with pytest.raises(EyasError, match="peer:lookup drafts as it does, race it without --sweep"):
        run_sweep(tiny_target(), Contestant("x", "peer:lookup"), None, Plan([], SamplingParams()))


@pytest.mark.parametrize(
    ("told", "why"),
    [
        (["peer:lookup"], "peer:lookup drafts as it does, race it without --sweep"),
        (["mine=head@3x3x5"], "give --drafter head --tree 3x3x5"),
        (["head@auto"], "give --drafter head --tree auto"),
        (["a", "b"], "not of 2"),
        (["plain"], "not of 0"),
        ([], "not of 0"),
    ],
)
def test_what_cannot_be_swept_is_refused_before_anything_is_loaded(told: list[str], why: str) -> None:
    with pytest.raises(EyasError, match=why) as found:
        parse_swept(told)
    assert "\n" not in str(found.value)
    named = [part for one in told for part in ("--drafter", one)]
    with pytest.raises(EyasError, match=why):
        app(["bench", "--sweep", "--target", "nowhere", *named], standalone_mode=False)


def test_a_named_drafter_is_swept_under_its_name() -> None:
    assert parse_swept(["mine=runs/head"]) == Contestant("mine", "runs/head")
