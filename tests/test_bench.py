"""The bench room: suites, the race and its arithmetic, comparisons."""

from __future__ import annotations

import io
import json
import re
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import pytest
import torch
from rich.console import Console

from eyas.bench import race as race_module
from eyas.bench.arithmetic import bootstrap, by_position, figures_of, quotient, rounds_of, speed_ratio
from eyas.bench.compare import compare, compare_races, comparison_table
from eyas.bench.figures import PLAIN, RaceReport, Run
from eyas.bench.grid import Report
from eyas.bench.items import Item
from eyas.bench.race import Rules, first_difference, race
from eyas.bench.suites import Suite, gather, read_suite
from eyas.chat import render
from eyas.decoding.drafters import Eagle3Drafter
from eyas.decoding.engine import Engine, Request, Result
from eyas.decoding.policy import Fixed
from eyas.decoding.sampling import SamplingParams
from eyas.decoding.stats import Stats
from eyas.decoding.tree import TreeShape
from eyas.errors import EyasError
from eyas.heads.start import new_head
from tests.tiny import tiny_target

PARAMS = SamplingParams(max_new_tokens=8)


# -- suites ------------------------------------------------------------------------------------------------------------


def write_lines(path: Path, *rows: dict) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def two_turns(name: str = "a", suite: str = "s") -> Item:
    return Item(name, suite, "chat", ({"role": "user", "content": "one"}, {"role": "user", "content": "two"}))


def test_suite_of_turns(tmp_path: Path) -> None:
    path = write_lines(
        tmp_path / "mt.jsonl",
        {"id": "x-1", "category": "writing", "turns": ["first", "second"]},
        {"id": "x-2", "turns": ["only"]},
    )
    suite = read_suite(path, tiny_target())
    assert suite.name == "mt"
    assert [(i.id, i.category, i.answers) for i in suite.items] == [("x-1", "writing", 2), ("x-2", "mt", 1)]


def test_second_turn_carries_the_models_own_answer() -> None:
    target = tiny_target()
    first, second = two_turns().prompt(target), two_turns().prompt(target, ["mine"])
    assert first == render(target.tokenizer, [{"role": "user", "content": "one"}])
    messages = [("user", "one"), ("assistant", "mine"), ("user", "two")]
    assert second == render(target.tokenizer, [{"role": r, "content": c} for r, c in messages])


def test_a_given_history_is_taken_as_it_stands(tmp_path: Path) -> None:
    told = [("system", "be brief"), ("user", "one"), ("assistant", "given"), ("user", "two"), ("assistant", "dropped")]
    messages = [{"role": role, "content": content} for role, content in told]
    path = write_lines(tmp_path / "own.jsonl", {"id": "p", "messages": messages})
    (item,) = read_suite(path, tiny_target()).items
    assert item.answers == 1
    assert item.prompt(tiny_target()) == render(tiny_target().tokenizer, messages[:4])


def test_recorded_answers_give_their_prompts(tmp_path: Path) -> None:
    path = write_lines(
        tmp_path / "responses.jsonl",
        {"id": "a", "ids": [5, 6, 7, 8, 9], "prompt_len": 2},
        {"id": "b", "ids": [5, 6, 7, 8, 9], "spans": [[3, 4], [4, 5]]},
    )
    items = read_suite(path, tiny_target()).items
    assert [(i.id, i.ids) for i in items] == [("a", (5, 6)), ("b", (5, 6, 7))]
    assert items[0].prompt(tiny_target()) == [5, 6]
    rendered = render(tiny_target().tokenizer, [{"role": "user", "content": "how so?"}])
    assert Item("c", "s", "c", ids=tuple(rendered)).question(tiny_target(), 1) == "how so?"


def test_held_out_takes_what_training_set_aside(tmp_path: Path) -> None:
    from eyas.data.samples import held_out_split, read_responses

    path = write_lines(
        tmp_path / "responses.jsonl", *({"id": f"r{i}", "ids": [5 + i, 6, 7], "prompt_len": 1} for i in range(40))
    )
    aside = [s.id for s in held_out_split(read_responses(path), 0.25)[1]]
    assert [i.id for i in read_suite(path, tiny_target(), held_out=0.25).items] == aside
    prompts = write_lines(tmp_path / "p.jsonl", {"id": "p", "prompt": "hi"})
    with pytest.raises(EyasError, match="held"):
        read_suite(prompts, tiny_target(), held_out=0.25)


def test_limit_is_spread_over_the_suite() -> None:
    suite = Suite("s", [Item(str(i), "s", "c", ids=(1,)) for i in range(80)])
    assert [i.id for i in suite.limited(4).items] == ["0", "20", "40", "60"]
    assert suite.limited(None) is suite
    assert suite.limited(100) is suite
    with pytest.raises(EyasError, match="1 or more"):
        suite.limited(0)


def test_faults_of_suites_are_told_in_one_line(tmp_path: Path) -> None:
    target = tiny_target()
    write_lines(tmp_path / "gsm8k.jsonl", {"id": "g", "turns": ["1+1?"]})
    with pytest.raises(EyasError, match="there is: gsm8k"):
        gather(target, ["gsm8k", "mt_bench"], tmp_path)
    with pytest.raises(EyasError, match="no such file"):
        read_suite(tmp_path / "none.jsonl", target)
    (tmp_path / "empty.jsonl").write_text("")
    with pytest.raises(EyasError, match="no prompt"):
        read_suite(tmp_path / "empty.jsonl", target)
    with pytest.raises(EyasError, match="--suites"):
        gather(target, ["sum_of_all"])
    with pytest.raises(EyasError, match="--prompts"):
        gather(target, [])
    with pytest.raises(EyasError, match="twice"):
        gather(target, ["gsm8k"], tmp_path, [tmp_path / "gsm8k.jsonl"])


# -- arithmetic --------------------------------------------------------------------------------------------------------


def test_rounds_end_with_the_targets_own_token() -> None:
    drafted, own = True, False
    assert rounds_of([own]) == []  # prefill's token alone: no round
    assert rounds_of([own, own, own]) == [1, 1]  # plain decoding
    assert rounds_of([own, drafted, drafted, own, own, drafted, own]) == [3, 1, 2]
    assert rounds_of([own, drafted, own, drafted]) == [2, 1]  # cut inside an accepted block


def test_rounds_agree_with_the_engines_own_count() -> None:
    target = tiny_target()
    engine = Engine(target, Eagle3Drafter(target, tiny_head()), tree=TreeShape(3, 4, 10), max_length=96)
    for result in engine.generate([Request([1, 9, 30 + i], SamplingParams(max_new_tokens=40)) for i in range(4)]):
        rounds = rounds_of(result.accepted)
        assert (len(rounds), sum(rounds)) == (result.stats.rounds, result.stats.emitted)


def test_tau_by_position_counts_a_round_where_it_began() -> None:
    early = a_run(rounds=[1] * 30 + [4, 1])  # the round of 4 begins at position 31 and ends at 34
    assert {name: part.tau for name, part in by_position([early]).items()} == {"0-31": 34 / 31, "32-63": 1.0}
    late = a_run(rounds=[1] * 31 + [4, 1])  # position 0 is prefill's
    assert {name: part.tau for name, part in by_position([late]).items()} == {"0-31": 1.0, "32-63": 2.5}


def test_bootstrap_interval_covers_and_is_reproducible() -> None:
    sums = np.random.default_rng(3).uniform(1, 3, (50, 2))
    found = bootstrap(sums, quotient)
    assert found.low < found.value < found.high
    assert found == bootstrap(sums, quotient)
    one = bootstrap(sums[:1], quotient)
    assert one.low == one.high == one.value


def test_speed_ratio_weighs_prompts_by_their_tokens() -> None:
    rows = np.array([[10.0, 1.0, 10.0, 2.0], [90.0, 9.0, 90.0, 9.0]])  # tokens, seconds; plain's tokens, seconds
    assert float(speed_ratio(rows.sum(0))) == pytest.approx(11 / 10)


def test_first_difference() -> None:
    assert first_difference([1, 2, 3], [1, 2, 3]) is None
    assert first_difference([1, 2, 3], [1, 9, 3]) == 1
    assert first_difference([1, 2], [1, 2, 3]) == 2


def a_run(**told: object) -> Run:
    usual = {
        "tokens": 10, "decode_s": 1.0, "prefill_s": 0.1, "target_forwards": 10, "rounds": [1] * 10, "drafted": 0,
        "accepted": 0, "draft_s": 0.0, "verify_s": 0.9, "identical": True, "first_difference": None, "digest": "d",
    }  # fmt: skip
    return Run.model_validate(usual | told)


# -- the race ----------------------------------------------------------------------------------------------------------


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class ScriptedEngine:
    """Answers like a function of the prompt, and takes the time it is told."""

    max_length = 100

    def __init__(self, name: str, clock: Clock, journal: list[str], *, per_token: float, per_round: int = 1) -> None:
        self.name, self.clock, self.journal, self.per_token = name, clock, journal, per_token
        self.per_round = per_round  # tokens emitted by a round
        self.policy = Fixed(TreeShape.chain(per_round - 1))
        self.prompts: list[list[int]] = []
        self.seeds: list[int] = []
        self.texts: list[str] = []
        self.flaw: int | None = None  # position at which an answer is made to differ
        self.interrupt_after: int | None = None

    def generate(self, requests: Iterable[Request]) -> list[Result]:
        return [self._answer(request) for request in requests]

    def _answer(self, request: Request) -> Result:
        if self.interrupt_after is not None and len(self.prompts) > self.interrupt_after:
            raise KeyboardInterrupt
        self.journal.append(self.name)
        self.prompts.append(request.ids)
        self.seeds.append(request.params.seed)
        count = request.params.max_new_tokens
        ids = [3 + (sum(request.ids) + i) % 100 for i in range(count)]
        if self.flaw is not None:
            ids[self.flaw] += 1
        accepted = [False] + [i % self.per_round != self.per_round - 1 for i in range(count - 1)]
        rounds = rounds_of(accepted)
        drafted = len(rounds) * (self.per_round - 1)
        stats = Stats(
            requests=1, rounds=len(rounds), emitted=count - 1, drafted=drafted, accepted=sum(accepted),
            target_forwards=len(rounds) + 1, prefill_s=0.5, draft_s=0.25 * self.per_token * (count - 1),
            verify_s=0.5 * self.per_token * (count - 1), by_depth_offered=[len(rounds)] * (self.per_round - 1),
            by_depth_accepted=[len(rounds)] * (self.per_round - 1),
        )  # fmt: skip
        self.clock.now += 0.5 + self.per_token * (count - 1)
        self.texts.append(f"answer {sum(ids)}")
        return Result(request.id, len(request.ids), ids, accepted, self.texts[-1], "length", stats)


@pytest.fixture
def scripted(monkeypatch: pytest.MonkeyPatch) -> dict[str, ScriptedEngine]:
    clock, journal = Clock(), []
    monkeypatch.setattr(race_module.time, "perf_counter", clock)
    return {
        PLAIN: ScriptedEngine(PLAIN, clock, journal, per_token=0.1),
        "fast": ScriptedEngine("fast", clock, journal, per_token=0.04, per_round=4),
    }


def run(engines: dict[str, ScriptedEngine], items: list[Item], params: SamplingParams = PARAMS, **rules: int) -> RaceReport:
    return race(tiny_target(), engines, items, params, rules=Rules(**{"noise": 0, **rules}))  # type: ignore[arg-type]


def prompts(count: int) -> list[Item]:
    return [Item(f"p{i}", "s", "even" if i % 2 == 0 else "odd", ids=(10 + i, 20)) for i in range(count)]


def test_order_turns_round_and_the_warm_up_is_left_out(scripted: dict) -> None:
    report = run(scripted, prompts(3))
    warm_up, measured = scripted[PLAIN].journal[:2], scripted[PLAIN].journal[2:]
    assert sorted(warm_up) == ["fast", PLAIN]
    assert measured == [PLAIN, "fast", "fast", PLAIN, PLAIN, "fast"]
    assert report.drafters[PLAIN].answers == 3


def test_figures_follow_their_definitions(scripted: dict) -> None:
    report = run(scripted, prompts(3), SamplingParams(max_new_tokens=9))
    plain, fast = report.drafters[PLAIN], report.drafters["fast"]
    assert plain.tokens == fast.tokens == 3 * 8  # prefill's token is not counted, for neither
    assert plain.tokens_per_s.value == pytest.approx(10)
    assert fast.tokens_per_s.value == pytest.approx(25)
    assert fast.speedup.value == pytest.approx(2.5)
    assert plain.speedup.value == pytest.approx(1)
    assert fast.speedup_with_prefill == pytest.approx((0.5 + 0.8) / (0.5 + 0.32))
    assert plain.tau.value == 1.0
    assert fast.tau.value == 4.0
    assert fast.n_alpha == fast.joint == [1.0, 1.0, 1.0]
    assert plain.prefill_s == pytest.approx(1.5)
    assert (fast.share_draft, fast.share_verify, fast.share_other) == pytest.approx((0.25, 0.5, 0.25))
    assert {part: found.tau for part, found in fast.parts["category"].items()} == {"even": 4.0, "odd": 4.0}
    assert list(fast.parts["turn"]) == ["1"]
    assert fast.k == 3.0
    assert report.conditions.max_new_tokens == 9
    assert report.conditions.fingerprint == tiny_target().fingerprint
    assert fast.tree == "chain:3"
    assert fast.peak_mib > 0


def test_suites_of_several_prompts_have_intervals(scripted: dict) -> None:
    items = [*prompts(3), Item("alone", "t", "c", ids=(7, 8))]
    report = run(scripted, items)
    rows = [row for row in report.rows if row.suite == "s"]
    for row, seconds in zip(rows, (0.1, 0.2, 0.3), strict=True):
        row.runs["fast"].decode_s, row.runs["fast"].rounds = seconds, [int(10 * seconds)] * 4
    figures = figures_of(report.rows, "fast", source="", head="", tree="", peak_mib=1.0)
    several, alone = figures.parts["suite"]["s"], figures.parts["suite"]["t"]
    assert several.tau_interval == bootstrap(np.array([[4.0, 4.0], [8.0, 4.0], [12.0, 4.0]]), quotient)
    assert several.speedup_interval is not None and several.speedup_interval.value == several.speedup
    assert several.speedup_interval.low < several.speedup_interval.value < several.speedup_interval.high
    assert alone.tau_interval is None and alone.speedup_interval is None and alone.speedup is not None
    others = [part for kind in ("category", "turn", "position") for part in figures.parts[kind].values()]
    assert not any(part.tau_interval or part.speedup_interval for part in others)


def test_categories_of_several_suites_are_not_pooled(scripted: dict) -> None:
    named = (("humaneval", "code"), ("codesearchnet", "code"), ("codesearchnet", "python"), ("gsm8k", "gsm8k"))
    report = run(scripted, [Item(str(i), *names, ids=(10 + i, 20)) for i, names in enumerate(named)])
    parts = report.drafters["fast"].parts
    assert list(parts["category"]) == ["humaneval/code", "codesearchnet/code", "codesearchnet/python", "gsm8k"]
    alone = run(scripted, [Item("a", "mt", "writing", ids=(1, 2)), Item("b", "mt", "coding", ids=(3, 4))])
    assert list(alone.drafters["fast"].parts["category"]) == ["writing", "coding"]


def test_every_drafter_reads_plain_decodings_answer(scripted: dict) -> None:
    scripted["fast"].flaw = 2
    report = run(scripted, [two_turns()])
    first = scripted[PLAIN].texts[-2]
    assert first != scripted["fast"].texts[-2]
    assert scripted[PLAIN].prompts[-1] == two_turns().prompt(tiny_target(), [first])
    assert scripted["fast"].prompts[-1] == scripted[PLAIN].prompts[-1]
    assert [row.turn for row in report.rows] == [1, 2]
    assert [part.tau for part in report.drafters["fast"].parts["turn"].values()] == [3.5, 3.5]


def test_a_differing_answer_is_seen_and_placed(scripted: dict) -> None:
    scripted["fast"].flaw = 5
    report = run(scripted, prompts(2))
    assert report.drafters["fast"].differing == 2
    assert not report.drafters["fast"].identical
    assert report.drafters[PLAIN].identical
    assert report.rows[0].runs["fast"].first_difference == 5


def test_plain_against_itself_tells_the_noise(scripted: dict) -> None:
    report = run(scripted, prompts(4), noise=2)
    assert report.noise is not None
    assert report.noise.answers == 2
    assert report.noise.ratio.value == pytest.approx(1)
    assert report.noise.differing == 0
    assert scripted[PLAIN].journal[2:8] == [PLAIN, "fast", PLAIN, PLAIN, "fast", PLAIN]
    assert report.drafters[PLAIN].answers == 4  # the second runs are not counted


def test_prompts_without_room_are_left_out_and_listed(scripted: dict) -> None:
    long = Item("long", "s", "c", ids=tuple([5] * 95))
    report = run(scripted, [*prompts(1), long])
    assert [s.id for s in report.skipped] == ["long"]
    assert [r.id for r in report.rows] == ["p0"]
    with pytest.raises(EyasError, match="'long'"):
        run(scripted, [long])


def test_every_prompt_has_a_seed_of_its_own_and_all_drafters_the_same(scripted: dict) -> None:
    run(scripted, prompts(3), SamplingParams(max_new_tokens=8, temperature=1.0, seed=7))
    assert scripted[PLAIN].seeds[1:] == scripted["fast"].seeds[1:] == [7, 8, 9]


def test_ctrl_c_keeps_what_was_measured(scripted: dict) -> None:
    scripted["fast"].interrupt_after = 2  # warm-up and two prompts
    report = run(scripted, prompts(5))
    assert report.interrupted
    assert [r.id for r in report.rows] == ["p0", "p1"]
    scripted["fast"].interrupt_after = 0
    with pytest.raises(KeyboardInterrupt):
        run(scripted, prompts(5))


def test_batch_decodes_groups_and_shares_seconds_by_tokens(scripted: dict) -> None:
    report = run(scripted, prompts(4), batch=2)
    assert scripted[PLAIN].journal[4:] == [PLAIN, PLAIN, "fast", "fast", "fast", "fast", PLAIN, PLAIN]
    assert report.drafters["fast"].speedup.value == pytest.approx(2.5)
    assert report.conditions.batch == 2


def test_several_drafters_race_together(scripted: dict) -> None:
    scripted["faster"] = ScriptedEngine("faster", scripted[PLAIN].clock, scripted[PLAIN].journal, per_token=0.02, per_round=2)
    report = run(scripted, prompts(2))
    assert list(report.drafters) == [PLAIN, "fast", "faster"]
    assert report.drafters["faster"].speedup.value == pytest.approx(5)


def test_a_race_needs_plain_decoding_and_prompts(scripted: dict) -> None:
    with pytest.raises(EyasError, match="plain"):
        race(tiny_target(), {"fast": scripted["fast"]}, prompts(1), PARAMS)
    with pytest.raises(EyasError, match="at least one prompt"):
        race(tiny_target(), scripted, [], PARAMS)
    with pytest.raises(EyasError, match="second token"):
        run(scripted, prompts(1), SamplingParams(max_new_tokens=1))


def a_report(*races: RaceReport) -> Report:
    return Report(contestants=[], planned=[one.cell for one in races], races=list(races))


def test_report_survives_the_disk(scripted: dict, tmp_path: Path) -> None:
    report = a_report(run(scripted, prompts(2), noise=1))
    report.write(tmp_path / "a.json")
    assert Report.read(tmp_path / "a.json") == report
    (tmp_path / "b.json").write_text('{"rows": []}')
    with pytest.raises(EyasError, match="not a report"):
        Report.read(tmp_path / "b.json")
    with pytest.raises(EyasError, match="cannot read"):
        Report.read(tmp_path / "c.json")
    (tmp_path / "d.json").write_bytes(b"\xff\xfe")
    with pytest.raises(EyasError, match="no text"):
        Report.read(tmp_path / "d.json")
    with pytest.raises(EyasError, match="cannot write"):
        report.write(tmp_path / "a.json" / "b.json")  # under a file


# -- comparisons -------------------------------------------------------------------------------------------------------


def test_compare_tells_change_from_noise(scripted: dict) -> None:
    before = run(scripted, prompts(6), noise=3)
    again = compare_races(before, before)
    assert {c.verdict for c in again.changes if c.figure != "tokens/s"} == {"same"}
    assert not again.conditions
    scripted["fast"].per_token = 0.03
    after = run(scripted, prompts(6), noise=3)
    found = {(c.drafter, c.figure): c for c in compare_races(before, after).changes}
    assert found["fast", "speed-up"].verdict == "up"
    assert found["fast", "speed-up"].ratio.value == pytest.approx(4 / 3)
    assert found["fast", "tau"].verdict == "same"
    assert found["fast", "tokens/s"].ratio.value == pytest.approx(4 / 3)
    verdicts = {(c.drafter, c.figure): c.verdict for c in compare_races(after, before).changes}
    assert verdicts["fast", "speed-up"] == "down"


def test_compare_gives_no_verdict_on_what_the_machine_does(scripted: dict) -> None:
    """Everything half as fast the next day, steadily: no drafter is slower for it."""
    before = run(scripted, prompts(6), noise=3)
    for engine in scripted.values():
        engine.per_token *= 2
    found = compare_races(before, run(scripted, prompts(6), noise=3))
    told = {(c.drafter, c.figure): (c.verdict, round(c.ratio.value, 6)) for c in found.changes}
    assert told[PLAIN, "tokens/s"] == told["fast", "tokens/s"] == ("", 0.5)
    assert told["fast", "speed-up"] == told["fast", "tau"] == ("same", 1.0)
    console = Console(file=io.StringIO(), width=200)
    console.print(comparison_table(compare(a_report(before), a_report(before))))
    shown = console.file.getvalue()  # type: ignore[attr-defined]
    assert re.search(r"fast +tokens/s .* -\s*\n", shown) and "tokens/s has no verdict" in shown


def test_compare_does_not_call_noise_a_change(scripted: dict) -> None:
    before = run(scripted, prompts(6), noise=3)
    assert before.noise is not None
    before.noise.ratio.high = 1.05
    scripted["fast"].per_token = 0.04 / 1.03
    found = {(c.drafter, c.figure): c for c in compare_races(before, run(scripted, prompts(6))).changes}
    assert found["fast", "speed-up"].ratio.low > 1.02
    assert found["fast", "speed-up"].verdict == "same"


def test_compare_names_conditions_and_changed_answers(scripted: dict) -> None:
    before = run(scripted, prompts(3))
    scripted["fast"].flaw = 1
    after = run(scripted, prompts(4), SamplingParams(max_new_tokens=8, seed=5))
    found = compare_races(before, after)
    assert ("seed", "0", "5") in found.conditions
    assert (found.prompts, found.left_out) == (3, 1)
    assert found.answers_changed == {PLAIN: 0, "fast": 3}
    strangers = [Item("q", "s", "c", ids=(1, 2))]
    with pytest.raises(EyasError, match="share no prompt"):
        compare_races(before, run(scripted, strangers))


def test_compare_pairs_the_races_of_two_grids(scripted: dict) -> None:
    cold, warm = (run(scripted, prompts(3), SamplingParams(max_new_tokens=8, temperature=t)) for t in (0.0, 1.0))
    wide = run(scripted, prompts(4), batch=2)
    found = compare(a_report(cold, warm), a_report(warm, wide, cold))
    assert [(one.temperature, one.batch) for one in found.races] == [(0.0, 1), (1.0, 1)]
    assert {change.verdict for one in found.races for change in one.changes} == {"same", ""}
    assert found.left_out == ["T 0, batch 2"]
    assert comparison_table(found)
    with pytest.raises(EyasError, match="first: T 1 at batch 1; second: T 0 at batch 2"):
        compare(a_report(warm), a_report(wide))


# -- with the real engine ----------------------------------------------------------------------------------------------


def tiny_head(seed: int = 0) -> object:
    return new_head(tiny_target(), torch.zeros(tiny_target().vocab_size, dtype=torch.long), seed=seed)


@pytest.mark.parametrize(("temperature", "batch"), [(0.0, 1), (1.0, 1), (0.0, 3)])
def test_race_of_the_real_engine(temperature: float, batch: int) -> None:
    target = tiny_target()
    drafter = Eagle3Drafter(target, tiny_head())
    engines = {
        PLAIN: Engine(target, max_rows=batch, max_length=300),
        "EAGLE-3": Engine(target, drafter, tree=TreeShape(3, 4, 10), max_rows=batch, max_length=300),
    }
    params = SamplingParams(max_new_tokens=24, temperature=temperature)
    items = [two_turns("a"), two_turns("b"), *prompts(2)]
    report = race(target, engines, items, params, rules=Rules(batch=batch, noise=1))
    head = report.drafters["EAGLE-3"]
    assert head.identical
    assert len(report.rows) == 6
    assert report.drafters[PLAIN].tau.value == 1.0
    assert report.drafters[PLAIN].target_forwards == report.drafters[PLAIN].tokens + 6
    assert head.tau.value == pytest.approx(head.tokens / head.rounds)
    most = head.tokens - head.rounds + head.answers  # a last round may be cut before the target's own token
    assert head.tokens - head.rounds <= head.accepted <= most
    assert 0.5 < head.share_draft + head.share_verify <= 1.0
