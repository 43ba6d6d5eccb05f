"""A live server, measured: against a server of this process that answers what is known, as fast as is known."""

from __future__ import annotations

import json
import re
import threading
from dataclasses import replace

import httpx2
import numpy as np
import pytest

from eyas.bench.items import Item
from eyas.bench.live import advice, metrics, run
from eyas.bench.live.figures import Acceptance, Answer, Level, LiveReport, Side
from eyas.bench.live.run import levels_of, measure_server, speedup
from eyas.bench.live.show import footnotes, html, table
from eyas.chat import encode
from eyas.cli.app import app
from eyas.data.connection import Connection
from eyas.decoding.sampling import SamplingParams
from eyas.errors import EyasError
from tests.fake_server import FakeServer
from tests.tiny import tiny_tokenizer

TOKENIZER = tiny_tokenizer()
GREEDY = SamplingParams(max_new_tokens=40)
ITEMS = [Item(f"q{n}", "toy", "toy", ({"role": "user", "content": "ask " + "again " * n},)) for n in range(6)]
UNREACHABLE = "http://127.0.0.1:9"


def answer_to(prompt: list[int]) -> str:
    """An answer as long as its prompt's length says."""
    return "word " * (1 + len(prompt) % 5)


def fake(**told) -> FakeServer:
    return FakeServer(TOKENIZER, answer_to, **told)


def lengths() -> tuple[list[int], list[int]]:
    """Tokens of every prompt and of its answer, EOS included."""
    prompts = [encode(TOKENIZER, item.messages[0]["content"]) for item in ITEMS]
    return [len(p) for p in prompts], [len(encode(TOKENIZER, answer_to(p))) + 1 for p in prompts]


def page(drafts: int, accepted: tuple[int, ...] = (), *, suffix: str = "_total", model: str = "toy", engine: int = 0) -> str:
    """vLLM's counters after `drafts` rounds of len(accepted) drafts."""
    labels = f'engine="{engine}",model_name="{model}"'
    lines = [
        f"vllm:spec_decode_num_drafts{suffix}{{{labels}}} {drafts}.0",
        f"vllm:spec_decode_num_drafts_created{{{labels}}} 1.7e+09",
        f"vllm:spec_decode_num_draft_tokens{suffix}{{{labels}}} {drafts * len(accepted)}.0",
        f"vllm:spec_decode_num_accepted_tokens{suffix}{{{labels}}} {sum(accepted)}.0",
    ]
    for place, count in enumerate(accepted):
        lines.append(f'vllm:spec_decode_num_accepted_tokens_per_pos{suffix}{{{labels},position="{place}"}} {count}.0')
    return "\n".join(lines) + "\n"


def level(
    concurrency: int, token_s: float, *, tokens: int = 11, answers: int = 4, acceptance: Acceptance | None = None
) -> Level:
    """Answers that begin after 0.5 s and then take `token_s` a token."""
    told = [
        Answer(prompt=f"s/p{n}/1", prompt_tokens=5, tokens=tokens, first_s=0.5, seconds=0.5 + token_s * (tokens - 1))
        for n in range(answers)
    ]
    return Level(concurrency=concurrency, most_in_flight=concurrency, seconds=1, answers=told, acceptance=acceptance)


def test_tokens_are_the_servers_own_counts_and_the_warm_up_is_left_out():
    prompts, answers = lengths()
    server = fake(usage=lambda ids: len(ids) + 100)  # a count that no text could give
    with server.running() as url:
        report = measure_server(url + "/v1", ITEMS, GREEDY, [1, 3])
    for found in report.server.levels:
        by_name = {a.prompt: a for a in found.answers}
        assert [by_name[f"toy/q{n}/1"].tokens for n in range(6)] == [count + 100 for count in answers]
        assert [by_name[f"toy/q{n}/1"].prompt_tokens for n in range(6)] == prompts
        assert found.tokens == sum(answers) + 600
        assert found.tokens_per_s == pytest.approx(found.tokens / found.seconds)
        assert not found.failures
    warm_up, measured = server.asked[:6], server.asked[6:]
    assert len(measured) == 12
    assert {body["max_tokens"] for body in warm_up} == {run.WARM_UP_TOKENS}
    assert {body["max_tokens"] for body in measured} == {40}
    assert all(body["stream"] and body["stream_options"] == {"include_usage": True} for body in server.asked)

    def asked(bodies):
        return sorted(json.dumps(body["messages"]) for body in bodies)

    assert asked(measured[:6]) == asked(measured[6:]) == asked(warm_up)


@pytest.mark.parametrize("concurrency", [1, 2, 5])
def test_the_concurrency_is_reached_and_never_exceeded(concurrency: int):
    """No request is answered before as many as wanted are waiting."""
    reached = threading.Event()

    def wait(_: int) -> None:
        if server.in_flight >= concurrency:
            reached.set()
        assert reached.wait(60)

    server = fake(trouble=wait)
    with server.running() as url:
        (found,) = measure_server(url, ITEMS, GREEDY, [concurrency]).server.levels
    assert server.most_in_flight == found.most_in_flight == concurrency


def test_times_are_those_of_the_stream():
    server = fake(slow=0.05, pace=0.01)
    with server.running() as url:
        (found,) = measure_server(url, ITEMS[:2], GREEDY, [2]).server.levels
    for answer in found.answers:
        assert 0.05 <= answer.first_s < answer.seconds
        assert answer.per_token_s >= 0.01
        assert answer.seconds == pytest.approx(answer.first_s + answer.per_token_s * (answer.tokens - 1))
    assert max(a.seconds for a in found.answers) <= found.seconds
    assert found.first.median == pytest.approx(np.median([a.first_s for a in found.answers]))
    assert found.answer.p95 == pytest.approx(np.percentile([a.seconds for a in found.answers], 95))


def test_acceptance_is_what_a_level_added_to_the_counters():
    moments = iter([page(100, (60, 30)), page(140, (80, 42)), page(140, (80, 42)), page(190, (110, 52))])
    with fake(pages={"/metrics": lambda: next(moments)}).running() as url:
        report = measure_server(url, ITEMS, GREEDY, [1, 2])
    first, second = (found.acceptance for found in report.server.levels)
    assert (first.rounds, first.drafted, first.accepted, first.per_position) == (40, 80, 32, [20, 12])
    assert first.length == 1 + 32 / 40
    assert second.joint == [30 / 50, 10 / 50]
    assert report.tokens_per_round == pytest.approx([1, 1 + 50 / 90, 1 + 50 / 90 + 22 / 90])
    assert report.advice == [] and any("needs --baseline" in line for line in footnotes(report))


def test_counters_are_summed_over_engines_and_told_from_another_models():
    text = page(10, (5, 2)) + page(20, (8, 4), engine=1) + page(500, (400, 300), model="other")
    assert metrics.parse(text, "toy") == metrics.Reading(30, 60, 19, (13, 6))
    assert metrics.parse(page(7, (3,), suffix=""), "toy") == metrics.Reading(7, 7, 3, (3,))
    assert metrics.parse(page(7, (3,)), "called otherwise").drafts == 7
    assert metrics.between(metrics.Reading(30), metrics.Reading(5)) is None  # the server began anew
    assert metrics.between(metrics.Reading(), metrics.Reading(remark="none")) is None


def test_what_sglang_tells_and_what_is_missing():
    gauge = 'sglang:spec_accept_length{model_name="toy"} 2.5\n'
    info = json.dumps({"internal_states": [{"avg_spec_accept_length": 1.75}], "speculative_num_steps": 3})
    cases = [
        ({"/metrics": lambda: gauge}, 2.5, 0, "^$"),
        ({"/metrics": lambda: gauge, "/server_info": lambda: info}, 2.5, 3, "^$"),
        ({"/get_server_info": lambda: info}, 1.75, 3, "since its start"),
        ({"/metrics": lambda: "up 1\n", "/server_info": lambda: info}, 1.75, 3, "since its start"),
        ({}, None, 0, "no /metrics .HTTP 404"),
        ({"/metrics": lambda: "up 1\n"}, None, 0, "does not draft, or does not say"),
        ({"/metrics": lambda: "<html>busy"}, None, 0, "cannot be read"),
        ({"/metrics": lambda: gauge.replace("2.5", "0.0"), "/server_info": lambda: "[]"}, None, 0, "nothing has been drafted"),
    ]
    http = httpx2.Client()
    for pages, length, steps, remark in cases:
        with fake(pages=pages).running() as url:
            read = metrics.read(http, Connection(url), "toy")
        assert (read.length, read.steps) == (length, steps) and re.search(remark, read.remark), pages
        assert "\n" not in read.remark


def test_advice_by_hand():
    """Plain: 10 ms a token. With 2 steps: 9 ms a token alone, 16 ms at eight at a time; of 100 rounds 60 accept the first
    draft, 30 both: 1, 1.6 and 1.9 tokens a round."""
    counted = Acceptance(length=1.9, rounds=100, drafted=200, accepted=90, per_position=[60, 30])
    drafting = [level(1, 0.009, acceptance=counted), level(8, 0.016, acceptance=counted)]
    tokens = advice.tokens_per_round(Side(url="x", model="m", levels=drafting))
    assert tokens == pytest.approx([1, 1.6, 1.9])
    alone, eight = advice.advise([(found, level(found.concurrency, 0.010)) for found in drafting], tokens)
    assert alone.round_cost == pytest.approx(0.009 * 1.9 / 0.010)  # 1.71 plain steps for two draft steps, 1.355 for one
    assert alone.speedups == pytest.approx([1, 1.6 / 1.355, 1.9 / 1.71])
    assert alone.best == 1
    assert eight.speedups == pytest.approx([1, 1.6 / (1 + 2.04 / 2), 1.9 / 3.04])
    assert eight.best == 0  # drafting does not pay here
    assert alone.speedups[-1] == pytest.approx(0.010 / 0.009)  # the step count measured: what was measured
    no_positions = Side(url="x", model="m", levels=[level(1, 0.01, acceptance=Acceptance(length=2))])
    assert advice.tokens_per_round(no_positions) == []
    assert advice.advise([(drafting[0], level(1, 0.01))], []) == []


@pytest.mark.parametrize(("chance", "steps"), [(0.6, 1), (0.35, 3), (0.9, 5), (1.0, 4)])
def test_a_mean_acceptance_length_is_taken_for_one_chance_at_all_depths(chance: float, steps: int):
    length = sum(chance**k for k in range(steps + 1))
    assert advice.even_chance(length, steps) == pytest.approx(chance)
    assert advice.even_chance(1.0, steps) == 0 and advice.even_chance(steps + 2.0, steps) == 1
    server = Side(
        url="x", model="m", levels=[level(n, 0.01, acceptance=Acceptance(length=length, steps=steps)) for n in (1, 2)]
    )
    assert advice.estimated(server)
    assert advice.tokens_per_round(server) == pytest.approx([sum(chance**k for k in range(n + 1)) for n in range(steps + 1)])


def test_sglang_gets_advice_that_says_what_it_is_estimated_from():
    info = json.dumps({"internal_states": [{"avg_spec_accept_length": 1.75}], "speculative_num_steps": 2})
    for pages, told in (
        (
            {"/server_info": lambda: info},
            "tokens a round: 1.50 with 1, 1.75 with 2 draft steps, estimated from the",
        ),
        ({"/metrics": lambda: "sglang:spec_accept_length 1.75\n"}, "advice: none, for the server tells neither its acceptance"),
    ):
        with fake().running() as plain_url, fake(pages=pages).running() as url:
            report = measure_server(url, ITEMS, GREEDY, [1], baseline=plain_url)
        assert any(line.startswith(told) for line in footnotes(report)), footnotes(report)
        assert len(report.advice) == (1 if report.tokens_per_round else 0)


def test_what_a_logged_request_asks_for_is_sent():
    asked = {
        "top_k": 9, "stop": ("\n\n",), "stop_ids": (7, 8), "min_new_tokens": 30, "repetition_penalty": 1.1,
        "presence_penalty": 0.5, "frequency_penalty": -0.25, "logit_bias": {12: -100.0},
    }  # fmt: skip
    tool = {"type": "function", "function": {"name": "now", "parameters": {}}}
    item = replace(ITEMS[0], sampling=asked, tools=(tool,))
    server = fake()
    with server.running() as url:
        report = measure_server(url, [item], GREEDY, [1])
    few, body = server.asked
    sent = {
        "top_k": 9, "stop": ["\n\n"], "stop_token_ids": [7, 8], "min_tokens": 30, "repetition_penalty": 1.1,
        "presence_penalty": 0.5, "frequency_penalty": -0.25, "logit_bias": {"12": -100.0}, "tools": [tool],
    }  # fmt: skip
    assert {name: body[name] for name in sent} == sent
    assert few["min_tokens"] == few["max_tokens"] == run.WARM_UP_TOKENS  # never more than the most
    line = next(line for line in footnotes(report) if "which OpenAI's API lacks" in line)
    assert line.startswith("asked for by min_tokens, repetition_penalty, stop_token_ids, top_k, which")
    plain = run.conditions_of([ITEMS[0]], GREEDY)
    assert plain.beyond_openai == []
    others = [replace(ITEMS[0], sampling={"top_p": 0.5}), replace(ITEMS[0], tools=(tool,))]
    assert len({plain.digest, *(run.conditions_of([other], GREEDY).digest for other in others)}) == 3


def test_prompts_are_asked_again_where_more_are_wanted_at_a_time():
    server = fake()
    with server.running() as url:
        report = measure_server(url, ITEMS[:3], GREEDY, [2, 8])
    assert [found.asked for found in report.server.levels] == [4, 8] and len(server.asked) == 8 + 4 + 8
    assert {a.prompt for a in report.server.levels[1].answers} == {f"toy/q{n % 3}/{1 + n // 3}" for n in range(8)}
    assert "server, 8 at a time: 5 of 8 requests ask a prompt again" in footnotes(report)


def test_answers_to_a_prompt_asked_again_are_resampled_together():
    """Two prompts asked twice each are two rows: their interval is that of the two prompts asked once."""
    once, again = level(1, 0.01, answers=2), level(2, 0.01, answers=4)
    for found in (once, again):
        for n, answer in enumerate(found.answers):
            answer.prompt, answer.seconds = f"s/p{n % 2}/{1 + n // 2}", answer.seconds * (1 + n % 2)
    base = [level(1, 0.01, answers=2), level(2, 0.01, answers=4)]
    for found in base:
        for n, answer in enumerate(found.answers):
            answer.prompt = f"s/p{n % 2}/{1 + n // 2}"
    assert speedup(again, base[1]) == speedup(once, base[0])


def test_a_speed_up_has_an_interval_over_the_prompts_that_both_answered():
    twice = speedup(level(1, 0.01, tokens=101), level(1, 0.025, tokens=101))
    assert (twice.value, twice.low, twice.high) == pytest.approx((3.0 / 1.5,) * 3)
    fewer = level(1, 0.01, answers=2)
    fewer.answers[0].seconds *= 3
    mixed = speedup(fewer, level(1, 0.01))
    assert mixed.low < mixed.value < mixed.high == pytest.approx(1)
    assert speedup(level(1, 0.01, answers=0), level(1, 0.01)) is None


def test_a_baseline_is_another_server_or_an_earlier_report(tmp_path):
    counted = iter([page(0, (0, 0)), page(50, (30, 10))])
    with fake().running() as plain_url:
        earlier = measure_server(plain_url, ITEMS, GREEDY, [1, 2])
        earlier.write(tmp_path / "plain.json")
        drafting = fake(pages={"/metrics": lambda: next(counted)})
        with drafting.running() as url:
            report = measure_server(url, ITEMS, GREEDY, [1], baseline=plain_url)
            assert len(drafting.asked) == 12
            drafting.pages = {}
            by_file = measure_server(url, ITEMS, GREEDY, [1], baseline=str(tmp_path / "plain.json"))
            with pytest.raises(EyasError, match="measured with other prompts"):
                measure_server(url, ITEMS[:3], GREEDY, [1], baseline=str(tmp_path / "plain.json"))
            with pytest.raises(EyasError, match="max_new_tokens 40, this is 9; measure both alike"):
                measure_server(url, ITEMS, SamplingParams(max_new_tokens=9), [1], baseline=str(tmp_path / "plain.json"))
            with pytest.raises(EyasError, match="cannot read the report"):
                measure_server(url, ITEMS, GREEDY, [1], baseline=str(tmp_path / "none.json"))
    assert list(report.speedups) == [1] and len(report.advice) == 1
    assert by_file.baseline == earlier.server and list(by_file.speedups) == [1] and by_file.advice == []


def test_failures_are_counted_and_a_server_that_always_fails_is_given_up():
    with fake(trouble=lambda number: 500 if number in (7, 9) else None).running() as url:
        (found,) = measure_server(url, ITEMS, GREEDY, [1]).server.levels
    assert found.failures == {"HTTP 500: told to fail": 2} and len(found.answers) == 4
    with fake(trouble=lambda number: 503).running() as url, pytest.raises(
        EyasError, match=r"failed every request at 2 at a time \(\d times: HTTP 503: told to fail\)"
    ):  # fmt: skip
        measure_server(url, ITEMS, GREEDY, [2])


def test_what_was_measured_is_kept_when_the_server_dies_or_the_user_stops(monkeypatch):
    with fake(trouble=lambda number: "drop" if number >= 12 else None).running() as url:
        report = measure_server(url, ITEMS, GREEDY, [1, 2])
    assert [found.concurrency for found in report.server.levels] == [1]
    assert "at 2 at a time" in report.stopped
    real = run.load

    async def interrupted(ask, items, concurrency, server, tick):
        level = await real(ask, items, concurrency, server, tick)
        if concurrency == 2 and len(fake_server.asked) == 18:  # warm-up, the first level, the second
            raise KeyboardInterrupt
        return level

    monkeypatch.setattr(run, "load", interrupted)
    fake_server = fake()
    with fake_server.running() as url:
        report = measure_server(url, ITEMS, GREEDY, [1, 2])
    assert [found.concurrency for found in report.server.levels] == [1] and report.stopped == "interrupted"


def test_what_is_wrong_is_told_in_one_line():
    with pytest.raises(EyasError, match=rf"no server answers at {re.escape(UNREACHABLE)}"):
        measure_server(UNREACHABLE, ITEMS, GREEDY, [1])
    with fake(models=("a", "b")).running() as url:
        with pytest.raises(EyasError, match=r"there is no model 'c' \(it serves: a, b\)"):
            measure_server(url, ITEMS, GREEDY, [1], model="c")
        with pytest.raises(EyasError, match="there are several models"):
            measure_server(url, ITEMS, GREEDY, [1])
    with fake(key="secret").running() as url:
        with pytest.raises(EyasError, match="wants a key: set OPENAI_API_KEY"):
            measure_server(url, ITEMS, GREEDY, [1])
        assert measure_server(url, ITEMS, GREEDY, [1], key="secret").server.levels
    with fake(counts_tokens=False).running() as url, pytest.raises(EyasError, match="does not count tokens"):
        measure_server(url, ITEMS, GREEDY, [1])
    with pytest.raises(EyasError, match="numbers with commas between"):
        levels_of("1,x", 6)
    with pytest.raises(EyasError, match="at least one request"):
        levels_of("0,1", 6)
    assert levels_of("4,1,8", 6) == [1, 4, 8] and levels_of(None, 6) == [1, 2, 4]


def test_ready_made_tokens_are_sent_as_tokens():
    item = Item("r", "toy", "toy", ids=tuple(encode(TOKENIZER, "ask me")))
    server = fake()
    with server.running() as url:
        (found,) = measure_server(
            url, [item], SamplingParams(max_new_tokens=40, temperature=0.7, top_k=5, seed=3), [1]
        ).server.levels
    assert found.answers[0].prompt_tokens == len(item.ids)
    asked = server.asked[-1]
    assert asked["prompt"] == list(item.ids)
    assert (asked["temperature"], asked["top_k"], asked["seed"], asked["top_p"]) == (0.7, 5, 3, 1.0)
    assert "min_p" not in asked


def test_the_command(tmp_path, capsys):
    counted = iter([page(0, (0, 0)), page(40, (30, 10)), page(40, (30, 10)), page(90, (60, 20))])
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("\n".join(json.dumps({"prompt": item.messages[0]["content"]}) for item in ITEMS))
    told = ["--prompts", str(prompts), "--concurrency", "1,2", "--max-new-tokens", "12"]
    written = ["--json", str(tmp_path / "r.json"), "--html", str(tmp_path / "r.html")]
    with fake().running() as plain_url, fake(pages={"/metrics": lambda: next(counted)}).running() as url:
        app(["bench", "--server", url, "--baseline", plain_url, *told, *written], standalone_mode=False)
    out = capsys.readouterr().out
    for wanted in ("tokens/s", "per token", "speed-up", "1 step", "a round costs", "best", "tokens a round: 1.67 with 1"):
        assert wanted in out, wanted
    assert "…" not in out  # nothing is cut off at 80 columns
    report = LiveReport.read(tmp_path / "r.json")
    assert [found.concurrency for found in report.server.levels] == [1, 2] and len(report.advice) == 2
    whole = (tmp_path / "r.html").read_text()
    assert whole == html(report) and whole.count("<svg") == 2
    assert not re.search(r"(?:src|href)=\"(?!#)", whole) and "{{" not in whole
    assert table(report)
    with pytest.raises(EyasError, match="name it by --server"):
        app(["bench", "--concurrency", "1"], standalone_mode=False)
    for told, why in (
        (
            ["--exact", "--target", "x", "--fresh", "--forward-times", "f"],
            "leave out --exact, --forward-times, --fresh, --target$",
        ),
        (["--weights", "fp16"], "leave out --weights"),
        (["--head", "h"], "leave out --drafter"),
        (["--temperature", "0,1"], "at one temperature"),
    ):
        with pytest.raises(EyasError, match=why):
            app(["bench", "--server", url, *told], standalone_mode=False)
    with pytest.raises(EyasError, match="--api-key are for a live server"):
        app(["bench", "--api-key", "k"], standalone_mode=False)
