"""Who races, and over which grid: contestants by name, a report that grows race by race and is gone on with."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from eyas.bench.contestants import Contestant, enter, parse_contestants
from eyas.bench.figures import PLAIN, RaceReport
from eyas.bench.grid import Report
from eyas.bench.items import Item
from eyas.bench.race import Rules
from eyas.bench.report import condition_rows
from eyas.bench.run import Plan, run_bench
from eyas.decoding.engine import Engine
from eyas.decoding.sampling import SamplingParams
from eyas.decoding.static_tree import EAGLE1
from eyas.decoding.tree import TreeShape
from eyas.errors import EyasError
from eyas.heads.files import head_hash, save_head
from eyas.heads.start import new_head
from tests.tiny import tiny_target

ITEMS = [
    Item("talk", "chats", "chat", ({"role": "user", "content": "one"}, {"role": "user", "content": "two"})),
    *(Item(f"p{n}", "ids", "ids", ids=(10 + n, 20)) for n in range(2)),
]


@pytest.fixture(scope="module")
def head(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("grid") / "head"
    save_head(new_head(tiny_target(), torch.zeros(tiny_target().vocab_size, dtype=torch.long)), folder)
    return folder


# -- contestants ------------------------------------------------------------------------------------------------------


def test_contestants_are_read_as_a_command_line_names_them(tmp_path: Path) -> None:
    usual = TreeShape(3, 3, 5)
    told = ["runs/demo/head", "mine=runs/demo/head@chain:3", "lookup@2x2x4", "llm:org/model", "a/head+lookup@static", "plain"]
    assert parse_contestants(told, usual) == [
        Contestant(PLAIN, PLAIN),
        Contestant("head", "runs/demo/head", usual),
        Contestant("mine", "runs/demo/head", TreeShape.chain(3)),
        Contestant("lookup@2x2x4", "lookup", TreeShape(2, 2, 4)),
        Contestant("model", "llm:org/model", usual),
        Contestant("head+lookup@static", "a/head+lookup", EAGLE1),
    ]
    odd = tmp_path / "a=b@c"
    odd.mkdir()
    assert parse_contestants([str(odd)])[1:] == [Contestant("a=b@c", str(odd))]  # what exists is taken as it stands
    assert parse_contestants(["again=plain"])[1:] == [Contestant("again", PLAIN)]
    assert parse_contestants(["x@auto"], usual)[1].tree is None


@pytest.mark.parametrize(
    ("told", "why"),
    [
        (["a/head", "b/head"], "two contestants would be called 'head'; .*--drafter NAME=b/head"),
        (["plain=runs/head"], "called 'plain'"),
        (["head@bushy"], "'bushy' is none of"),
        (["plain@chain:2"], "takes no tree"),
        (["name="], "no drafter in it"),
        (["@chain:2"], "no drafter in it"),
    ],
)
def test_faults_of_contestants_are_one_line(told: list[str], why: str) -> None:
    with pytest.raises(EyasError, match=why) as found:
        parse_contestants(told)
    assert "\n" not in str(found.value)


def test_a_drafter_is_opened_with_its_target(head: Path) -> None:
    plain, mine = parse_contestants([f"mine={head}@2x2x4"])
    assert enter(plain, tiny_target()).opened.drafter is None
    entrant = enter(mine, tiny_target())
    assert entrant.entry.hash == head_hash(head) and entrant.entry.tree == "2x2x4"
    engine = entrant.engine(max_rows=2, max_length=64)
    assert str(engine.policy) == "2x2x4" and engine.max_rows == 2
    assert enter(parse_contestants(["lookup@chain:3"])[1], tiny_target()).entry.hash == ""
    with pytest.raises(EyasError, match="none"):
        enter(Contestant("x", str(head.parent / "none")), tiny_target())
    with pytest.raises(EyasError, match="top_k 200 is more than"):
        enter(Contestant("x", str(head), TreeShape(1, 200, 200)), tiny_target()).engine(max_rows=1, max_length=64)


# -- the grid ---------------------------------------------------------------------------------------------------------


@pytest.fixture(autouse=True)
def short_warm_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("eyas.bench.race.WARM_UP_TOKENS", 2)


def plan(**told: object) -> Plan:
    usual = {"temperatures": (0.0, 1.0), "batches": (1, 2)}
    return Plan(ITEMS, SamplingParams(max_new_tokens=6), **{**usual, **told})  # type: ignore[arg-type]


def contestants(head: Path) -> list[Contestant]:
    return parse_contestants([f"tree={head}@2x2x4"])


@pytest.fixture(scope="module")
def whole(head: Path) -> Report:
    """A grid that was run in one go."""
    return run_bench(tiny_target(), contestants(head), plan())


def digests(race: RaceReport) -> dict[tuple[object, ...], list[str]]:
    return {(row.key, row.turn): [run.digest for run in row.runs.values()] for row in race.rows}


def interrupt_after(calls: int, patch: pytest.MonkeyPatch) -> None:
    """Ctrl-C in the midst of the answer after so many."""
    real, left = Engine.generate, iter(range(calls))

    def generate(self: Engine, *told: object) -> object:
        if next(left, None) is None:
            raise KeyboardInterrupt
        return real(self, *told)  # type: ignore[arg-type]

    patch.setattr(Engine, "generate", generate)


def test_a_grid_is_a_race_for_every_temperature_and_batch(head: Path, whole: Report) -> None:
    assert whole.planned == [race.cell for race in whole.races] == [(0, 1), (0, 2), (1, 1), (1, 2)]
    assert whole.unfinished == []
    cold, wide, warm, _ = whole.races
    assert (cold.conditions.prompts, cold.conditions.repeated, wide.conditions.repeated) == (3, 0, 1)
    assert cold.conditions.prompts_id == wide.conditions.prompts_id
    assert len(wide.rows) == 6  # the talk's two turns twice
    assert all(figures.identical for race in whole.races for figures in race.speculative.values())
    assert digests(cold).items() <= digests(wide).items()
    assert digests(cold) != digests(warm)
    figures = cold.drafters["tree"]
    for parts in figures.parts.values():  # every split sums up to the whole
        assert sum(part.rounds for part in parts.values()) == figures.rounds
        assert sum(part.emitted for part in parts.values()) == figures.tokens
    assert figures.tau.value == pytest.approx(figures.tokens / figures.rounds)
    assert set(figures.parts["suite"]) == {"chats", "ids"}
    assert (figures.source, figures.head) == (str(head), head_hash(head))


def test_an_interrupted_grid_goes_on_where_it_stopped(
    head: Path, whole: Report, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, target = tmp_path / "r.json", tiny_target()
    with monkeypatch.context() as patch:
        # Answers of the first race: 2 to warm up, 4 heats of plain, tree and plain again. Of the second: 2 and two heats of
        # the first group (talk and p0); then the second group is begun.
        interrupt_after(14 + 2 + 6 + 1, patch)
        stopped = run_bench(target, contestants(head), plan(), path=path)
    assert [race.interrupted for race in stopped.races] == [False, True]
    assert stopped.unfinished == [(0, 2), (1, 1), (1, 2)]
    assert Report.read(path) == stopped
    seen: list[tuple[float, int]] = []
    resumed = run_bench(target, contestants(head), plan(), path=path, on_race=lambda race: seen.append(race.cell))
    assert seen == stopped.unfinished == [(0, 2), (1, 1), (1, 2)]
    assert resumed.unfinished == [] and Report.read(path) == resumed
    assert resumed.races[0] == stopped.races[0]  # not run again
    assert len(stopped.races[1].rows) == 3
    assert resumed.races[1].rows[:3] == stopped.races[1].rows  # with its seconds
    assert [digests(race) for race in resumed.races] == [digests(race) for race in whole.races]
    n_alphas = [[race.drafters["tree"].n_alpha for race in report.races] for report in (resumed, whole)]
    assert n_alphas[0] == n_alphas[1]
    interrupt_after(0, monkeypatch)
    assert run_bench(target, contestants(head), plan(), path=path) == resumed  # nothing is left to run
    with pytest.raises(KeyboardInterrupt):
        run_bench(target, contestants(head), plan(), path=path, fresh=True)


def test_a_report_takes_further_races_but_no_others(head: Path, tmp_path: Path) -> None:
    path, target = tmp_path / "r.json", tiny_target()
    first = run_bench(target, contestants(head), plan(temperatures=(0.0,), batches=(1,)), path=path)
    more = run_bench(target, contestants(head), plan(temperatures=(0.0,)), path=path)
    assert [race.cell for race in more.races] == [(0, 1), (0, 2)] and more.races[0] == first.races[0]
    others = {
        "max new tokens 6, not 9": (contestants(head), Plan(ITEMS, SamplingParams(max_new_tokens=9))),
        "prompts id": (contestants(head), Plan([*ITEMS[:2], Item("p1", "ids", "ids", ids=(1, 1))], plan().params)),
        r"'tree' \(.*2x2x4\), not without it": (parse_contestants([]), plan()),
        "no 'new'": ([*contestants(head), Contestant("new", PLAIN)], plan()),
        r"'tree' \(.*2x2x4\), not 'tree' .*2x2x3": (parse_contestants([f"tree={head}@2x2x3"]), plan()),
    }
    for told, (entered, other) in others.items():
        with pytest.raises(EyasError, match=f"was begun with {told}.*--fresh"):
            run_bench(target, entered, other, path=path)
    path.write_text("{}")
    with pytest.raises(EyasError, match="not a report"):
        run_bench(target, contestants(head), plan(), path=path)


def test_rejection_sampling_races_by_its_own_draws(head: Path, tmp_path: Path) -> None:
    path, target, rules = tmp_path / "r.json", tiny_target(), Rules(sampling="rejection", noise=0)
    asked = plan(batches=(1,), rules=rules)
    cold, warm = run_bench(target, contestants(head), asked, path=path).races
    assert cold.drafters["tree"].same == "yes" and warm.drafters["tree"].same == "own draws"
    assert warm.drafters[PLAIN].differing == 0
    assert ("seed", "0, rejection sampling") in condition_rows(warm.conditions)
    with pytest.raises(EyasError, match="was begun with rule rejection, not coupled"):
        run_bench(target, contestants(head), plan(batches=(1,)), path=path)
    with pytest.raises(EyasError, match="unknown sampling rule 'luck'"):
        run_bench(target, contestants(head), plan(rules=Rules(sampling="luck")))


def test_a_plan_refuses_what_cannot_be_run() -> None:
    with pytest.raises(EyasError, match="1 prompt or more, not 0"):
        plan(batches=(1, 0))
    with pytest.raises(EyasError, match="temperature must be 0 or more"):
        plan(temperatures=(0.0, -1.0))
