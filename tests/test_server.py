"""Answers from a server: the tokens stored are those it saw and wrote, whatever goes wrong on the way."""

from __future__ import annotations

import json
import os
import signal
import threading
import time

import pytest

from eyas.chat import encode, render
from eyas.data.dialects import DIALECTS, Reply
from eyas.data.prompts import Prompt
from eyas.data.responses import respond
from eyas.data.samples import open_responses, read_responses
from eyas.data.self_prompts import write_own_prompts
from eyas.data.server import ServedTarget, ServerEngine
from eyas.data.temperatures import Temperatures
from eyas.decoding.sampling import SamplingParams
from eyas.errors import EyasError
from tests.fake_server import FakeServer
from tests.tiny import tiny_target
from tests.toy_tokenizers import CHATML, LLAMA3, assistant, toy_tokenizer, user

TOKENIZER = toy_tokenizer(CHATML)
PARAMS = SamplingParams(max_new_tokens=24, seed=3)
PROMPTS = [Prompt(f"p{i}", [user(f"hello {i}")]) for i in range(8)]


def served(tokenizer=TOKENIZER):
    return ServedTarget("toy-target", tokenizer, frozenset({tokenizer.eos_token_id}), len(tokenizer), 512)


def fake(say=lambda ids: f"you {len(ids)}", **more):
    return FakeServer(TOKENIZER, say, **more)


def rows(path):
    return {row["id"]: row for row in map(json.loads, path.read_text().splitlines()[1:])}


def run(server, out, prompts=PROMPTS, *, target=None, params=PARAMS, engine=None, **more):
    """`respond` through an engine of its own."""
    with server.running() as url:
        e = ServerEngine(url, target or served(), retries=1, **(engine or {}))
        return respond(e, prompts, out, params=params, **more)


@pytest.mark.parametrize("speaks", ["ids", "logprobs", "generate"])
def test_stored_tokens_are_exactly_those_the_server_saw_and_wrote(tmp_path, speaks):
    server, out = fake(speaks={speaks, "text"}), tmp_path / "r.jsonl"
    done = run(server, out)
    assert (done.written, done.retokenised, done.finish) == (8, 0, {"eos": 8})
    told = rows(out)
    seen = [body.get("prompt") or body["input_ids"] for body in server.asked]
    for prompt in PROMPTS:
        row = told[prompt.id]
        asked, answer = row["ids"][: row["prompt_len"]], row["ids"][row["prompt_len"] :]
        assert asked == render(TOKENIZER, prompt.messages)
        assert asked in seen
        assert answer == [*encode(TOKENIZER, f"you {len(asked)}"), TOKENIZER.eos_token_id]
        assert "retokenised" not in row
    header = json.loads(out.read_text().splitlines()[0])
    assert (header["target"], header["target_name"], header["served_as"]) == (None, "toy-target", "toy")
    assert len(read_responses(out, fingerprint="f" * 16, vocab_size=len(TOKENIZER), tokenizer=TOKENIZER)) == 8
    with pytest.raises(EyasError, match="another vocabulary"):
        read_responses(out, tokenizer=tiny_target().tokenizer)


def test_a_server_that_only_chats_is_refused_and_told_what_it_lacks(tmp_path):
    server = fake(speaks={"chat"})
    with pytest.raises(EyasError, match=r"has no /v1/completions \(HTTP 404: .*\): by its chat API alone the tokens") as caught:
        run(server, tmp_path / "r.jsonl")
    assert "\n" not in str(caught.value) and len(server.asked) == len(DIALECTS)


def test_sampling_is_told_to_the_server_and_each_answer_has_its_own_seed(tmp_path):
    server = fake()
    run(server, tmp_path / "r.jsonl", temperatures=Temperatures.parse("0,0.8"), params=SamplingParams(24, top_k=5, seed=1))
    bodies = server.asked
    assert {b["temperature"] for b in bodies} == {0.0, 0.8}
    assert len({b["seed"] for b in bodies}) == 8 and all(0 <= b["seed"] < 2**31 for b in bodies)
    assert all(b["max_tokens"] == 24 and b["top_k"] == 5 and "min_p" not in b and "stop" not in b for b in bodies)
    by_id = {r["id"]: r["temperature"] for r in rows(tmp_path / "r.jsonl").values()}
    mix = Temperatures.parse("0,0.8")
    assert by_id == {p.id: mix.draw(1, p.id) for p in PROMPTS}  # as the local engine draws them


def test_turns_carry_the_servers_own_answers(tmp_path):
    chat = [user("one"), assistant("given"), user("two"), user("three")]
    server, out = fake(), tmp_path / "r.jsonl"
    assert run(server, out, [Prompt("c", chat)]).written == 3
    (sample,) = read_responses(out)
    assert len(sample.spans) == 3 and "given" not in TOKENIZER.decode(sample.ids)


def test_requests_in_flight_are_bounded(tmp_path):
    server = fake(slow=0.05)
    assert run(server, tmp_path / "r.jsonl", engine={"max_rows": 3}).written == 8
    assert server.most_in_flight == 3


def test_answers_cut_at_the_limit_are_marked(tmp_path):
    done = run(fake(lambda ids: "you " * 40), tmp_path / "r.jsonl", PROMPTS[:2])
    assert done.finish == {"length": 2}
    assert all(len(r["ids"]) - r["prompt_len"] == 24 for r in rows(tmp_path / "r.jsonl").values())


def test_end_token_that_the_server_keeps_to_itself_is_put_back(tmp_path):
    run(fake(hides_end=True), tmp_path / "r.jsonl", PROMPTS[:2])
    assert all(r["ids"][-1] == TOKENIZER.eos_token_id and r["finish"] == "eos" for r in rows(tmp_path / "r.jsonl").values())


# -- text only ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("speaks", [{"text"}, {"text only"}])
def test_text_is_tokenised_again_marked_and_checked(tmp_path, speaks):
    out = tmp_path / "r.jsonl"
    done = run(fake(speaks=speaks), out, PROMPTS[:4])
    assert (done.written, done.retokenised, dict(done.doubted)) == (4, 4, {})
    assert "4 came as text and were tokenised again" in done.line()
    assert all(r["retokenised"] and "doubt" not in r and r["ids"][-1] == TOKENIZER.eos_token_id for r in rows(out).values())
    assert len(read_responses(out)) == 4


def test_text_that_does_not_round_trip_is_counted_and_left_out_of_training(tmp_path):
    # the server wrote "hello" letter by letter; tokenised again it is one token
    out = tmp_path / "r.jsonl"
    server = fake(lambda ids: "hello", speaks={"text"}, usage=lambda ids: len(ids) + 4 * (len(server.asked) == 6))
    done = run(server, out, PROMPTS[:3], engine={"max_rows": 1})
    assert sum(done.doubted.values()) == 1
    assert "left out of training (the server counted 6 tokens, its text has 2)" in done.line()
    read = open_responses(out)
    assert (len(read.samples), len(read.bad)) == (2, 1)
    assert "its tokens are in doubt: the server counted 6 tokens" in read.bad[0].why
    other = ServedTarget("x", TOKENIZER, frozenset({2, 6, 7}), len(TOKENIZER), 512)
    template_end = run(fake(speaks={"text"}), tmp_path / "b.jsonl", PROMPTS[:1], target=other)
    assert not template_end.doubted  # three ids may end a text, but the template ends a turn with one of them
    unknown = ServedTarget("x", toy_tokenizer(LLAMA3, bos="<s>", eos=None), frozenset({2, 7}), len(TOKENIZER), 512)
    assert sum(run(fake(speaks={"text"}), tmp_path / "c.jsonl", PROMPTS[:1], target=unknown).doubted.values()) == 1


# -- what goes wrong ---------------------------------------------------------------------------------------------------


def test_failures_are_retried_and_nothing_is_lost(tmp_path):
    troubles = {1: 503, 2: "drop", 4: 429, 6: "drop"}
    server = fake(trouble=troubles.get, headers={"retry-after-ms": "10"})
    done = run(server, tmp_path / "r.jsonl", engine={"max_rows": 2})
    assert (done.written, done.failed) == (8, [])
    assert len(server.asked) == 12


def test_retry_after_is_honoured(tmp_path):
    server = fake(trouble={0: 429}.get, headers={"Retry-After": "1"})
    start = time.monotonic()
    assert run(server, tmp_path / "r.jsonl", PROMPTS[:1]).written == 1
    assert time.monotonic() - start >= 1  # its own first back-off is half a second


def test_request_that_fails_for_good_is_said_and_asked_again_by_the_next_run(tmp_path):
    out = tmp_path / "r.jsonl"
    done = run(fake(trouble={3: 413}.get), out, engine={"max_rows": 1})
    assert (done.written, [why for _, why in done.failed]) == (7, ["HTTP 413: told to fail"])
    assert "1 failed" in done.line()
    server = fake()
    done = run(server, out)
    assert (done.kept, done.written, len(server.asked)) == (7, 1, 1)


def test_garbage_is_no_answer(tmp_path):
    done = run(fake(trouble={2: "garbage"}.get), tmp_path / "r.jsonl", PROMPTS[:4], engine={"max_rows": 1})
    assert (done.written, len(done.failed)) == (3, 1)


def test_server_that_goes_away_ends_the_job_in_one_line_and_keeps_the_answers(tmp_path):
    out = tmp_path / "r.jsonl"
    server = fake(trouble=lambda number: 503 if number >= 4 else None, headers={"retry-after-ms": "5"})
    with pytest.raises(EyasError, match=r"stopped answering \(HTTP 503: told to fail\).*run the same command again"):
        run(server, out, engine={"max_rows": 2})
    kept = rows(out)
    assert len(kept) == 4
    assert run(fake(), out).written == 4
    assert {name: rows(out)[name] for name in kept} == kept


def test_no_server_wrong_model_wrong_key_wrong_tokenizer_are_one_line(tmp_path):
    start = time.monotonic()
    with pytest.raises(EyasError, match=r"no server answers at http://127\.0\.0\.1:9 "):
        ServerEngine("http://127.0.0.1:9/v1", served())
    assert time.monotonic() - start < 5
    with fake(models=("a", "b")).running() as url:
        with pytest.raises(EyasError, match=r"there is no model 'c' \(it serves: a, b\)"):
            ServerEngine(url, served(), model="c")
        with pytest.raises(EyasError, match="several models; name one by --model"):
            ServerEngine(url, served())
        assert ServerEngine(url + "/v1/", served(), model="b").target.served_as == "b"
    with fake(key="secret").running() as url, pytest.raises(EyasError, match="wants a key: set OPENAI_API_KEY"):
        ServerEngine(url, served())
    with pytest.raises(EyasError, match="--target names another model"):
        run(fake(), tmp_path / "a.jsonl", target=served(tiny_target().tokenizer))
    with pytest.raises(EyasError, match="changes the prompt's tokens"):
        run(fake(changes_prompt=True), tmp_path / "b.jsonl")


def test_interrupt_stops_at_once_and_loses_nothing(tmp_path):
    out = tmp_path / "r.jsonl"
    server = fake(trouble=lambda number: time.sleep(6) if number >= 5 else None)

    def press_ctrl_c():
        while len(server.asked) < 7:
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGINT)

    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs are born deaf to it
    try:
        threading.Thread(target=press_ctrl_c).start()
        with pytest.raises(KeyboardInterrupt):
            run(server, out, engine={"max_rows": 2})
    finally:
        signal.signal(signal.SIGINT, before)
    assert len(rows(out)) == 5
    done = run(fake(), out)
    assert (done.kept, done.written) == (5, 3)


def test_server_writes_prompts_of_its_own_too():
    server = fake(lambda ids: f"what is the name of thing {len(server.asked)} hello")
    with server.running() as url:
        engine = ServerEngine(url, served(), max_rows=1)
        prompts = write_own_prompts(engine, 3, params=SamplingParams(), max_tokens=90)
    assert len({p.id for p in prompts}) == 3
    assert all(body["stop_token_ids"] == [TOKENIZER.eos_token_id] and body["temperature"] == 1 for body in server.asked)


def test_the_command(tmp_path, capsys, monkeypatch):
    from tests.test_cli import eyas

    folder, prompts, out = tmp_path / "target", tmp_path / "p.jsonl", tmp_path / "r.jsonl"
    target = tiny_target()
    target.model.config.save_pretrained(folder)  # no weights: the server has them
    target.tokenizer.save_pretrained(folder)
    prompts.write_text('{"prompt": "hello"}\n{"prompt": "bye"}\n')
    server = FakeServer(target.tokenizer, lambda ids: "hi")
    with server.running() as url:
        command = ("respond", prompts, "--out", out, "--server", url, "--target", folder)
        assert eyas(*command, "--max-new-tokens", 8, "--concurrency", 2) == 0
        assert len(rows(out)) == 2
        for more, why in [
            (("--model", "other"), "no model 'other'"), (("--features",), "a server gives no features"),
            (("--weights", "fp16"), "the weights are the server's"),
        ]:  # fmt: skip
            capsys.readouterr()
            assert eyas(*command, *more) == 2
            assert why in capsys.readouterr().err.replace("\n", " ")


def test_a_reply_of_vllm_is_read():
    """Recorded from vLLM 0.32 on a CPU, asked with three ids of prompt and `return_token_ids`."""
    choice = {
        "index": 0, "text": "══════", "logprobs": None, "finish_reason": "length", "stop_reason": None,
        "token_ids": [33651, 33651, 33651], "prompt_logprobs": None, "prompt_token_ids": [1, 9690, 198],
    }  # fmt: skip
    usage = {"prompt_tokens": 3, "total_tokens": 6, "completion_tokens": 3, "prompt_tokens_details": None}
    exact = DIALECTS[0]
    assert exact.read({"object": "text_completion", "model": "smol", "choices": [choice], "usage": usage}) == Reply(
        "══════", [33651] * 3, "length", None, [1, 9690, 198], 3, 3
    )
    with pytest.raises(TypeError):  # a server that knows the field but was not asked, or does not fill it
        exact.read({"choices": [{**choice, "token_ids": None}], "usage": usage})
