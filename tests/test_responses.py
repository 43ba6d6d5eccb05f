"""Answers written by the target: resumable, independent of batch and order, and read back as training samples."""

from __future__ import annotations

import errno
import gzip
import json
import os
import random
from dataclasses import replace
from types import SimpleNamespace

import pytest

from eyas.chat import render
from eyas.data.features import text_key
from eyas.data.inspection import warnings_of
from eyas.data.jsonl import GrowingFile
from eyas.data.prompts import Prompt
from eyas.data.responses import respond
from eyas.data.samples import (
    Sample,
    given_samples,
    held_out_split,
    open_responses,
    read_responses,
    statistics,
    truncate,
)
from eyas.data.self_prompts import write_own_prompts
from eyas.data.store import FeatureStore
from eyas.data.temperatures import Temperatures
from eyas.data.texts import load_texts, split_for_training, training_texts
from eyas.decoding.sampling import SamplingParams
from eyas.errors import EyasError
from tests.fake_engine import FakeEngine
from tests.toy_tokenizers import CHATML, LLAMA3, QWEN3, assistant, toy_tokenizer, user

PARAMS = SamplingParams(max_new_tokens=24, seed=3)
PROMPTS = [Prompt(f"p{i}", [user(f"hello {i}")], category="even" if i % 2 == 0 else "") for i in range(12)]


def engine(say=lambda ask: f"you {ask.params.seed % 97}", template=CHATML, **more):
    return FakeEngine(toy_tokenizer(template), say, **more)


def rows(path):
    """The rows of a file of answers by id, without the header."""
    return {row["id"]: row for row in map(json.loads, path.read_text().splitlines()[1:])}


# -- answering ---------------------------------------------------------------------------------------------------------


def test_stored_tokens_are_the_prompts_the_engine_saw_and_what_it_wrote(tmp_path):
    e, out, seen = engine(), tmp_path / "r.jsonl", []

    class Sink:
        def take(self, result):
            seen.append(result.id)

        def bytes_needed(self, tokens, supervised):
            return 0

        def bytes_unpacked(self, tokens):
            return 0

    done = respond(e, PROMPTS, out, params=PARAMS, features=Sink())
    assert (done.written, done.kept, done.finish) == (12, 0, {"eos": 12})
    header = json.loads(out.read_text().splitlines()[0])
    assert (header["eyas"], header["target"], header["target_name"]) == ("responses", "f" * 16, "fake")
    assert header["sampling"]["max_new_tokens"] == 24
    asked = {ask.id: ask for ask in e.asked}
    assert len({ask.params.seed for ask in e.asked}) == 12  # one of its own for each
    for name, row in rows(out).items():
        assert row["ids"][: row["prompt_len"]] == asked[name].ids
        assert row["ids"][row["prompt_len"] :] == e._answer(asked[name]).ids
        assert row["finish"] == "eos"
    assert rows(out)["p0"]["category"] == "even"
    assert seen == list(rows(out))
    samples = read_responses(out, fingerprint="f" * 16, vocab_size=e.target.vocab_size)
    assert sorted(s.id for s in samples) == sorted(p.id for p in PROMPTS)
    assert all(s.ids[s.spans[0][1] - 1] == e.target.tokenizer.eos_token_id for s in samples)


def test_answers_depend_on_neither_batch_nor_order(tmp_path):
    told = []
    for k, max_rows in enumerate((1, 3, 8)):
        shuffled = random.Random(k).sample(PROMPTS, len(PROMPTS))
        mix = Temperatures.parse("0:60,0.8:40")
        respond(engine(max_rows=max_rows), shuffled, tmp_path / f"{k}.jsonl", params=PARAMS, temperatures=mix)
        told.append(rows(tmp_path / f"{k}.jsonl"))
    assert told[0] == told[1] == told[2]
    assert {row["temperature"] for row in told[0].values()} == {0.0, 0.8}
    respond(engine(), PROMPTS, tmp_path / "other.jsonl", params=replace(PARAMS, seed=4))
    assert rows(tmp_path / "other.jsonl") != told[0]


def test_interrupted_run_goes_on_and_ends_like_one_that_was_not(tmp_path):
    out, whole = tmp_path / "r.jsonl", tmp_path / "whole.jsonl"
    respond(engine(), PROMPTS, whole, params=PARAMS)
    with pytest.raises(KeyboardInterrupt):
        respond(engine(interrupt_after=5), PROMPTS, out, params=PARAMS)
    assert len(rows(out)) == 5
    with out.open("a") as file:
        file.write('{"id":"p3","temperature":0.0,"prompt_len":6,"fin')  # the crash came in the middle of a line
    e = engine()
    done = respond(e, PROMPTS, out, params=PARAMS)
    assert (done.written, done.kept, len(e.asked)) == (7, 5, 7)
    assert rows(out) == rows(whole)
    done = respond(engine(), PROMPTS, out, params=PARAMS)
    assert (done.written, done.kept) == (0, 12)
    assert rows(out) == rows(whole)


def test_other_settings_are_refused_by_name(tmp_path):
    out = tmp_path / "r.jsonl"
    respond(engine(), PROMPTS[:2], out, params=PARAMS)
    before = out.read_bytes()
    for change, why in [
        ({"params": replace(PARAMS, max_new_tokens=25)}, r"sampling\.max_new_tokens = 24, not 25"),
        ({"params": replace(PARAMS, stop=("x",))}, r"sampling\.stop = \[\], not \['x'\]"),
        ({"temperatures": Temperatures.parse("0.5")}, r"sampling\.temperature = 0:1, not 0\.5:1"),
        ({"flags": {"enable_thinking": False}}, r"render\.enable_thinking = None, not False"),
        ({"rewrite": False}, "rewrite = True, not False"),
        ({"engine": engine(fingerprint="e" * 16)}, "target = ffff"),
        ({"engine": engine(template=QWEN3)}, "template = "),
    ]:
        settings = {"engine": engine(), "prompts": PROMPTS, "out": out, "params": PARAMS, **change}
        with pytest.raises(EyasError, match=why):
            respond(**settings)
        assert out.read_bytes() == before


def test_conversation_is_answered_turn_by_turn_with_the_targets_own_answers(tmp_path):
    chat = [user("hello"), assistant("given"), user("and?"), assistant("given too"), user("end"), assistant("last")]
    e, out = engine(), tmp_path / "r.jsonl"
    done = respond(e, [Prompt("c", chat), Prompt("t", [user("one"), user("two")])], out, params=PARAMS)
    assert done.written == 5
    told = rows(out)
    assert set(told) == {"c#1", "c#2", "c#3", "t#1", "t#2"}
    third = e.target.tokenizer.decode(told["c#3"]["ids"][: told["c#3"]["prompt_len"]], skip_special_tokens=False)
    own = [e.target.tokenizer.decode(told[k]["ids"][told[k]["prompt_len"] : -1]) for k in ("c#1", "c#2")]
    assert "given" not in third
    assert all(f"<|im_start|>assistant\n{answer}<|im_end|>" in third for answer in own)
    samples = {s.id: s for s in read_responses(out)}
    assert set(samples) == {"c#3", "t#2"}  # the template only appends, so the turns make one sample
    assert len(samples["c#3"].spans) == 3
    assert samples["c#3"].ids == told["c#3"]["ids"]
    # interrupted between the turns: the same answers
    part = tmp_path / "part.jsonl"
    part.write_text("".join(line + "\n" for line in out.read_text().splitlines() if '"turn":1' in line or '"eyas"' in line))
    respond(engine(), [Prompt("t", [user("one"), user("two")]), Prompt("c", chat)], part, params=PARAMS)
    assert rows(part) == told


def test_turns_of_a_template_that_rewrites_history_stay_apart(tmp_path):
    out = tmp_path / "r.jsonl"
    e = engine(lambda ask: "<think>\nhm\n</think>\n\nyou", template=QWEN3)
    respond(e, [Prompt("t", [user("one"), user("two")])], out, params=PARAMS)
    assert [s.id for s in read_responses(out)] == ["t#1", "t#2"]


def test_given_answers_are_kept_where_asked_or_where_tools_were_called(tmp_path):
    call = {"function": {"name": "f", "arguments": {}}}
    tools = [user("hello"), assistant("", tool_calls=[call]), {"role": "tool", "content": "2"}, assistant("two")]
    chat = [user("hello"), assistant("given"), user("and?")]
    e, out = engine(template=QWEN3), tmp_path / "r.jsonl"
    respond(e, [Prompt("tools", tools, tools=[{"name": "f"}]), Prompt("c", chat)], out, params=PARAMS, rewrite=False)
    told = rows(out)
    tokenizer = e.target.tokenizer
    assert told["tools"]["ids"][: told["tools"]["prompt_len"]] == render(tokenizer, tools[:3], tools=[{"name": "f"}])
    assert told["c"]["ids"][: told["c"]["prompt_len"]] == render(tokenizer, chat)
    respond(e, [Prompt("tools", tools)], tmp_path / "again.jsonl", params=PARAMS)
    assert list(rows(tmp_path / "again.jsonl")) == ["tools"]


def test_render_flags_shape_the_prompt_and_are_stored(tmp_path):
    e, out = engine(template=QWEN3), tmp_path / "r.jsonl"
    respond(e, PROMPTS[:1], out, params=PARAMS, flags={"enable_thinking": False})
    (row,) = rows(out).values()
    prompt = render(e.target.tokenizer, PROMPTS[0].messages, enable_thinking=False)
    assert row["ids"][: row["prompt_len"]] == prompt
    assert json.loads(out.read_text().splitlines()[0])["render"] == {"enable_thinking": False}


def test_what_cannot_be_answered_is_counted_and_said(tmp_path):
    picky = "{% if messages[0].role == 'system' %}{{ raise_exception('no system role') }}{% endif %}" + CHATML
    prompts = [
        *PROMPTS[:2], Prompt("same", PROMPTS[0].messages), Prompt("long", [user("x" * 600)]),
        Prompt("sys", [{"role": "system", "content": "be"}, user("hello")]),
    ]  # fmt: skip
    done = respond(engine(template=picky), prompts, tmp_path / "r.jsonl", params=PARAMS)
    assert (done.written, done.duplicates, done.too_long) == (2, 1, 1)
    assert done.refused == [("sys", "the target's chat template refuses the conversation: no system role")]
    for part in ("2 answers", "1 prompts too long", "1 repeated", "1 refused"):
        assert part in done.line()
    with pytest.raises(EyasError, match="no prompts"):
        respond(engine(), [], tmp_path / "a.jsonl", params=PARAMS)
    with pytest.raises(EyasError, match=r"no prompt could be answered .*1 prompts too long"):
        respond(engine(), prompts[3:4], tmp_path / "b.jsonl", params=PARAMS)
    with pytest.raises(EyasError, match="no system role"):
        respond(engine(template=picky), prompts[4:], tmp_path / "c.jsonl", params=PARAMS)
    with pytest.raises(EyasError, match="the id 'p0' stands for two different prompts"):
        respond(engine(), [PROMPTS[0], Prompt("p0", [user("other")])], tmp_path / "d.jsonl", params=PARAMS)


def test_prompt_and_answer_fit_exactly(tmp_path):
    tokenizer = toy_tokenizer(CHATML)
    need = len(render(tokenizer, PROMPTS[0].messages)) + PARAMS.max_new_tokens
    assert respond(engine(max_length=need), PROMPTS[:1], tmp_path / "a.jsonl", params=PARAMS).written == 1
    with pytest.raises(EyasError, match="1 prompts too long"):
        respond(engine(max_length=need - 1), PROMPTS[:1], tmp_path / "b.jsonl", params=PARAMS)


def test_answers_cut_at_the_limit_are_marked(tmp_path):
    out = tmp_path / "r.jsonl"
    done = respond(engine(lambda ask: "x y " * 40), PROMPTS[:3], out, params=PARAMS)
    assert done.finish == {"length": 3}
    assert "3 cut at the limit" in done.line()
    assert all(row["finish"] == "length" and len(row["ids"]) - row["prompt_len"] == 24 for row in rows(out).values())
    assert statistics(read_responses(out)).finish["length"] == 3


def test_time_limit_stops_asking_but_finishes_what_is_in_flight(tmp_path, monkeypatch):
    now = [0.0]
    monkeypatch.setattr("eyas.data.responses.time.monotonic", lambda: now[0])

    def say(ask):
        now[0] += 30
        return "you"

    out = tmp_path / "r.jsonl"
    done = respond(engine(say, max_rows=2), PROMPTS, out, params=PARAMS, minutes=1)
    assert done.out_of_time
    assert done.written == len(rows(out)) == 3  # two while there was time, one in flight when it ended
    done = respond(engine(say, max_rows=2), PROMPTS, out, params=PARAMS)
    assert (done.kept, done.written, done.out_of_time) == (3, 9, False)
    assert respond(engine(), PROMPTS, tmp_path / "none.jsonl", params=PARAMS, minutes=0).written == 0


def test_full_disk_keeps_what_was_written(tmp_path, monkeypatch):
    out, real, left = tmp_path / "r.jsonl", os.write, [700]

    def write(fd, data):
        if left[0] <= 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        part = bytes(data)[: left[0]]
        left[0] -= len(part)
        return real(fd, part)

    monkeypatch.setattr("eyas.data.jsonl.os.write", write)
    with pytest.raises(EyasError, match="the disk is full") as caught:
        respond(engine(), PROMPTS, out, params=PARAMS)
    assert "\n" not in str(caught.value)
    monkeypatch.undo()
    kept = len(rows(out))  # every line is whole
    assert 0 < kept < 12
    assert respond(engine(), PROMPTS, out, params=PARAMS).kept == kept
    assert len(rows(out)) == 12


def test_file_of_somebody_else_is_left_alone(tmp_path):
    out = tmp_path / "notes.txt"
    for content in (b"my notes\nand more", b'{"prompt": "hello"}\n', b'{"eyas":"prompts"}\n'):
        out.write_bytes(content)
        with pytest.raises(EyasError, match="exists already and holds no responses by eyas"):
            respond(engine(), PROMPTS, out, params=PARAMS)
        assert out.read_bytes() == content
    with pytest.raises(EyasError, match="cannot be gzipped"):
        respond(engine(), PROMPTS, tmp_path / "r.jsonl.gz", params=PARAMS)
    with pytest.raises(EyasError, match="cannot be written"):
        respond(engine(), PROMPTS, out / "r.jsonl", params=PARAMS)


def test_growing_file(tmp_path):
    path, header = tmp_path / "deep" / "g.jsonl", {"eyas": "things", "n": 1}
    with GrowingFile(path, header) as file:
        file.append({"id": "é"})
        with pytest.raises(EyasError, match="another process"):
            GrowingFile(path, header)
    whole = path.read_bytes()
    for tail, kept in [(b"", 1), (b'{"id":', 1), (b'{"id":"b"}', 2), (b"\0\0\0\0\n", 1), (b"[1]\n", 1)]:
        path.write_bytes(whole + tail)
        with GrowingFile(path, header) as file:
            assert len(list(file.rows())) == kept
            file.append({"id": "c"})
            assert [row["id"] for row in file.rows()][-1] == "c"
            assert len(list(file.rows())) == kept + 1
    line = json.dumps(header, separators=(",", ":")).encode()
    for begun in (b"", line[:9], line):
        path.write_bytes(begun)
        with GrowingFile(path, header) as file:
            file.append({"id": "a"})
            assert list(file.rows()) == [{"id": "a"}]
    path.write_bytes(whole + b"{\n" + b'{"id":"b"}\n')
    with GrowingFile(path, header) as file, pytest.raises(EyasError, match=r"g\.jsonl:3: not a JSON object"):
        list(file.rows())


def test_broken_row_in_the_middle_is_named(tmp_path):
    out = tmp_path / "r.jsonl"
    respond(engine(), PROMPTS[:2], out, params=PARAMS)
    lines = out.read_text().splitlines()
    out.write_text("\n".join([lines[0], '{"id": "p9", "ids": 3}', *lines[1:]]) + "\n")
    with pytest.raises(EyasError, match="the row 'p9' has no ids"):
        respond(engine(), PROMPTS, out, params=PARAMS)


# -- reading back ------------------------------------------------------------------------------------------------------


def write(path, items):
    text = "".join((item if isinstance(item, str) else json.dumps(item)) + "\n" for item in items)
    path.write_bytes(gzip.compress(text.encode()) if path.suffix == ".gz" else text.encode())
    return path


ROW = {"id": "a", "temperature": 0.8, "prompt_len": 2, "finish": "length", "ids": [5, 6, 7, 8]}


def test_rows_without_a_header_and_with_spans(tmp_path):
    path = write(tmp_path / "r.jsonl.gz", [ROW, {"id": 2, "ids": [1, 2, 3, 4, 5], "spans": [[1, 2], [3, 5]], "category": "c"}])
    assert read_responses(path, fingerprint="x", vocab_size=9) == [
        Sample("a", [5, 6, 7, 8], [(2, 4)], "", "length", 0.8),
        Sample("2", [1, 2, 3, 4, 5], [(1, 2), (3, 5)], "c"),
    ]


@pytest.mark.parametrize(
    ("row", "why"),
    [
        ("{", "not JSON"),
        ({"ids": [1, 2], "prompt_len": 1}, "no id"),
        ({"id": "b", "prompt_len": 1}, "no token ids"),
        ({"id": "b", "ids": [1, -2], "prompt_len": 1}, "no natural numbers"),
        ({"id": "b", "ids": [1, True], "prompt_len": 1}, "no natural numbers"),
        ({"id": "b", "ids": [1, 2]}, "neither prompt_len nor spans"),
        ({"id": "b", "ids": [1, 2], "prompt_len": 2}, "leaves no answer among 2"),
        ({"id": "b", "ids": [1, 2], "prompt_len": 0}, "leaves no answer"),
        ({"id": "b", "ids": [1, 2], "spans": []}, "no supervised span"),
        ({"id": "b", "ids": [1, 2], "spans": [[1, 3]]}, "outside 0..2"),
        ({"id": "b", "ids": [1, 2], "spans": [[1, 2], [0, 1]]}, "out of order"),
        ({"id": "b", "ids": [1, 2], "spans": [1, 2]}, "no pairs"),
        ({**ROW, "turn": "x"}, "turn is no number"),
        (ROW, "says again what an earlier row with the id 'a' says"),
    ],
)
def test_bad_rows_are_skipped_with_line_and_reason(tmp_path, row, why, capsys):
    path = write(tmp_path / "r.jsonl", [ROW, row])
    read = open_responses(path)
    assert [s.id for s in read.samples] == ["a"]
    ((file, line, told),) = read.bad
    assert (file, line) == (str(path), 2)
    assert why in told
    read_responses(path)
    assert "r.jsonl:2" in capsys.readouterr().err.replace("\n", "")


def test_several_answers_to_one_prompt_are_all_kept(tmp_path):
    path = write(tmp_path / "r.jsonl", [ROW, {**ROW, "ids": [5, 6, 9]}, {**ROW, "ids": [5, 6, 7, 8, 9]}])
    samples = read_responses(path)
    assert [s.id for s in samples] == ["a", "a#2", "a#3"]
    assert [s.conversation for s in samples] == ["", "a", "a"]


def test_ids_of_the_users_own_that_look_like_turns_are_ids(tmp_path):
    texts = [("a", [5, 6, 9]), ("a#2", [4, 7]), ("a", [5, 6, 8]), ("b#1", [3, 9]), ("b#2", [2, 9, 9])]
    path = write(tmp_path / "r.jsonl", [{"id": name, "ids": ids, "prompt_len": 1} for name, ids in texts])
    samples = read_responses(path)
    assert [(s.id, s.conversation) for s in samples] == [("a", ""), ("a#2", ""), ("a#3", "a"), ("b#1", ""), ("b#2", "")]
    sides = [{s.id for s in side} for side in held_out_split(samples, 1)]  # one conversation of four
    assert all({"a", "a#3"} <= side or not {"a", "a#3"} & side for side in sides)
    assert {len(side) for side in sides} in ({1, 4}, {2, 3})
    # and as prompts, beside a conversation whose second turn is called the same
    prompts = [Prompt("c", [user("one"), user("two")]), Prompt("c#1", [user("three")]), Prompt("c#2", [user("four")])]
    out = tmp_path / "own.jsonl"
    assert respond(engine(), prompts, out, params=PARAMS).written == 4
    told = [(row["id"], row.get("turn")) for row in map(json.loads, out.read_text().splitlines()[1:])]
    assert sorted(told, key=str) == [("c#1", 1), ("c#1", None), ("c#2", 2), ("c#2", None)]
    assert respond(engine(), prompts, out, params=PARAMS).kept == 4
    assert len(read_responses(out)) == 3


def test_files_of_answers_that_cannot_be_used(tmp_path):
    with pytest.raises(EyasError, match="no such file"):
        read_responses(tmp_path / "r.jsonl")
    with pytest.raises(EyasError, match=r"no answer to learn from in it \(1 bad rows; the first, line 1: no id"):
        read_responses(write(tmp_path / "a.jsonl", [{"prompt": "hello"}]))
    with pytest.raises(EyasError, match="no answer to learn from"):
        read_responses(write(tmp_path / "b.jsonl", []))
    with pytest.raises(EyasError, match=r"c\.jsonl:1: row 'a' holds the token id 8, but .* only 8"):
        read_responses(write(tmp_path / "c.jsonl", [ROW]), vocab_size=8)
    header = {"eyas": "responses", "target": "1234", "target_name": "llama"}
    path = write(tmp_path / "d.jsonl", [header, ROW])
    with pytest.raises(EyasError, match="was written by the target 'llama'"):
        read_responses(path, fingerprint="4321")
    assert len(read_responses(path, fingerprint="1234")) == len(read_responses(path)) == 1


def test_truncation_drops_and_counts_what_has_nothing_left_to_learn():
    samples = [
        Sample("short", [1, 2, 3], [(1, 3)]), Sample("long", list(range(9)), [(2, 4), (5, 9)]),
        Sample("prompt", list(range(9)), [(6, 9)]), Sample("edge", list(range(9)), [(2, 4), (6, 9)]),
    ]  # fmt: skip
    done = truncate(samples, 6)
    assert (done.cut, done.dropped) == (2, 1)
    assert done.samples[0] is samples[0]
    assert [(s.id, len(s.ids), s.spans) for s in done.samples[1:]] == [
        ("long", 6, [(2, 4), (5, 6)]), ("edge", 6, [(2, 4)]),
    ]  # fmt: skip
    assert all(s.supervised for s in done.samples)
    with pytest.raises(EyasError, match="none of the 1 samples has a supervised token among its first 6"):
        truncate(samples[2:3], 6)


def test_features_are_kept_apart_by_everything_that_shapes_them(tmp_path):
    """Tokens, supervision and length name a text; target, taps, weights, dtype and teacher name a store."""
    text = Sample("a", [1, 2, 3, 4, 5], [(2, 5)])
    others = [truncate([text], 4).samples[0], replace(text, spans=[(3, 5)]), replace(text, ids=[1, 2, 3, 4, 6])]
    assert len({text_key(s) for s in [text, *others]}) == 4
    assert text_key(replace(text, id="b", finish="eos", conversation="c")) == text_key(text)
    target = SimpleNamespace(fingerprint="f", tap_ids=(1, 2, 3), weights="stock", dtype="torch.float32", hidden_size=4)
    (tmp_path / "index.json").write_text(json.dumps({"made_for": FeatureStore(tmp_path / "x", target)._made_for, "shards": []}))
    FeatureStore(tmp_path, target)
    changes = {"fingerprint": "g", "tap_ids": (1, 2, 4), "weights": "fp16", "dtype": "torch.bfloat16"}
    for name, value in changes.items():
        with pytest.raises(EyasError, match="were made with"):
            FeatureStore(tmp_path, SimpleNamespace(**{**vars(target), name: value}))
    with pytest.raises(EyasError, match="were made with top_k 32, this run has 8"):
        FeatureStore(tmp_path, target, top_k=8)


def test_held_out_split_is_drawn_from_the_prompts_alone():
    samples = [Sample(f"s{i}", [i, 2], [(1, 2)]) for i in range(200)]
    train, aside = held_out_split(samples, 0.1)
    assert 8 <= len(aside) <= 34
    assert not {s.id for s in train} & {s.id for s in aside}
    assert len(train) + len(aside) == 200
    shuffled = random.Random(0).sample(samples, 200)
    assert {s.id for s in held_out_split(shuffled, 0.1)[1]} == {s.id for s in aside}
    renamed = [replace(s, id=f"r{i}", ids=[*s.ids, 7]) for i, s in enumerate(samples)]  # other answers to the same prompts
    assert [s.ids[0] for s in held_out_split(renamed, 0.1)[1]] == [s.ids[0] for s in aside]
    more = [*samples, *(Sample(f"t{i}", [i, 3], [(1, 2)]) for i in range(300))]
    assert {s.id for s in aside} <= {s.id for s in held_out_split(more, 0.1)[1]}
    assert {s.id for s in held_out_split(samples, 0.1, seed=1)[1]} != {s.id for s in aside}
    assert len(held_out_split(samples, 20)[1]) == 20
    assert {s.id for s in held_out_split(shuffled, 20)[1]} == {s.id for s in held_out_split(samples, 20)[1]}
    for wrong in (200, 0, -1, 1e-9):
        with pytest.raises(EyasError):
            held_out_split(samples, wrong)


def test_turns_of_one_conversation_are_not_torn_apart():
    samples = [
        Sample(f"c{i}#{t}", [i, *[1] * t, 2], [(t + 1, t + 2)], conversation=f"c{i}") for i in range(40) for t in (3, 1, 2)
    ]
    train, aside = held_out_split(samples, 10)
    assert len(aside) == 30
    assert not {s.conversation for s in train} & {s.conversation for s in aside}


def test_answers_to_one_prompt_are_on_one_side_of_a_split_whatever_their_ids():
    samples = [Sample(f"{answer}-{i}", [i, 5, 6 + answer], [(2, 3)]) for i in range(40) for answer in range(3)]
    samples += [
        Sample(f"chat{i}#{t}", [i, 5, *[9] * t], [(t + 1, t + 2)], conversation=f"chat{i}") for i in range(40) for t in (1, 2)
    ]
    for held_out in (0.3, 10):
        train, aside = held_out_split(samples, held_out)
        assert not {s.ids[0] for s in train} & {s.ids[0] for s in aside}
        assert len(aside) == 5 * len({s.ids[0] for s in aside})


def test_statistics():
    told = statistics([Sample("a", [1, 2, 3], [(1, 3)], finish="eos"), Sample("b", [1, 3], [(1, 2)], finish="length")])
    assert (told.samples, told.tokens, told.supervised, told.distinct, told.longest) == (2, 5, 3, 2, 3)
    assert told.finish == {"eos": 1, "length": 1}
    assert told.line() == "2 samples, 5 tokens (longest 3), 3 supervised (60%), 2 distinct among them; ends: eos 1, length 1"
    assert statistics([]).line().startswith("0 samples")


def test_given_answers_become_samples_and_refused_ones_are_named():
    tokenizer = toy_tokenizer(CHATML)
    prompts = [Prompt("a", [user("hello"), assistant("hi")], category="c"), Prompt("b", [user("hello")])]
    samples, refused = given_samples(prompts, tokenizer)
    assert [(s.id, s.category, s.supervised) for s in samples] == [("a", "c", 3)]
    assert [name for name, _ in refused] == ["b"]


# -- looking -----------------------------------------------------------------------------------------------------------


def test_look_at_answers_and_at_conversations(tmp_path):
    e = engine(template=LLAMA3, max_rows=2)
    e.target.tokenizer = toy_tokenizer(LLAMA3, bos="<s>", eos="<|eot|>")
    e.target.eos_ids = frozenset({e.target.tokenizer.eos_token_id})
    respond(e, PROMPTS, tmp_path / "r.jsonl", params=PARAMS)
    found = load_texts(tmp_path / "r.jsonl", e.target)
    assert (len(found.samples), warnings_of(found, e.target), found.roles) == (12, {}, {})
    chats = write(tmp_path / "c.jsonl", [{"messages": [user("hello"), assistant("hi")]}, {"prompt": "unanswered"}, "{"])
    found = load_texts(chats, e.target)
    assert found.roles == {"user": 2, "assistant": 1}
    assert (found.given, len(found.samples), len(found.unanswered), len(found.bad)) == (True, 1, 1, 1)
    assert warnings_of(found, e.target) == {}
    found = load_texts(write(tmp_path / "q.jsonl", [{"prompt": "hello"}]), e.target)
    assert warnings_of(found, e.target) == {"nothing is supervised": (1, found.unanswered[0].id)}
    e.target.fingerprint = "another"
    with pytest.raises(EyasError, match="written by the target"):
        load_texts(tmp_path / "r.jsonl", e.target)


def test_what_looks_wrong_is_said(tmp_path):
    e = engine(lambda ask: "x y " * 40)
    respond(e, PROMPTS[:3], tmp_path / "cut.jsonl", params=PARAMS)
    cut = load_texts(tmp_path / "cut.jsonl", e.target)
    assert warnings_of(cut, e.target) == {"an answer was cut at the limit": (3, cut.samples[0].id)}
    foreign = engine(template=LLAMA3).target
    assert warnings_of(cut, foreign)["rendered with another chat template than the target's"][0] == 3
    tokenizer = e.target.tokenizer
    end, ask = tokenizer.eos_token_id, render(tokenizer, [user("hello")])
    texts = [("a", [*ask, 90, end]), ("b", [*ask, end]), ("c", [*ask[:-2], 90, end]), ("d", [*ask, 90, end])]
    lines = [{"id": name, "ids": ids, "prompt_len": len(ids) - (1 if name == "b" else 2)} for name, ids in texts]
    found = load_texts(write(tmp_path / "w.jsonl", lines), e.target)
    assert [s.id for s in found.samples] == ["a", "b", "c"] and found.duplicates == 1
    assert warnings_of(found, e.target) == {
        "an answer is nothing but its end": (1, "b"),
        "the template's generation prompt does not stand before an answer (another template, or other flags?)": (1, "c"),
    }


def test_given_answers_are_trained_on_with_advice(tmp_path, capsys):
    target = engine().target
    rows_ = [{"messages": [user(f"hello {i}"), assistant("hi")]} for i in range(6)]
    path = write(tmp_path / "c.jsonl", [*rows_, rows_[0], {"prompt": "unanswered"}, "{"])
    samples = training_texts(path, target)
    assert [s.supervised for s in samples] == [3] * 6
    told = " ".join(capsys.readouterr().err.split())
    for part in ("a head drafts better after answers that the target itself wrote", "1 conversations have no answer",
                 "1 texts say again", "c.jsonl:9: not JSON"):  # fmt: skip
        assert part in told
    split = split_for_training(samples, held_out=1, max_length=512, seed=0)
    assert (len(split.learn), len(split.choose), len(split.aside)) == (4, 1, 1)
    assert split.line().startswith("training: 4 to learn from, 1 to choose by, 1 kept for races; 0 cut")
    with pytest.raises(EyasError, match="no conversation has an answer; `eyas respond"):
        training_texts(write(tmp_path / "q.jsonl", [{"prompt": "hello"}]), target)


# -- with the real engine ----------------------------------------------------------------------------------------------


def tiny_engine(**more):
    from eyas.decoding.engine import Engine
    from tests.tiny import tiny_target

    return Engine(tiny_target(), max_length=128, **more)


def test_real_engine_gives_the_same_answers_in_any_batch(tmp_path):
    params, mix = SamplingParams(max_new_tokens=12, seed=1), Temperatures.parse("0,0.8")
    prompts = [*PROMPTS[:5], Prompt("two", [user("one"), user("two")])]
    told = []
    for max_rows in (1, 4):
        out = tmp_path / f"{max_rows}.jsonl"
        done = respond(tiny_engine(max_rows=max_rows), prompts, out, params=params, temperatures=mix)
        assert done.written == 7
        told.append(rows(out))
    assert told[0] == told[1]
    target = tiny_engine().target
    for row in told[0].values():
        answer = row["ids"][row["prompt_len"] :]
        assert (answer[-1] in target.eos_ids) == (row["finish"] == "eos")
        assert row["finish"] == "eos" or len(answer) == 12
    greedy = next(p for p in PROMPTS[:5] if told[0][p.id]["temperature"] == 0)
    ids = told[0][greedy.id]["ids"]
    assert ids[: told[0][greedy.id]["prompt_len"]] == render(target.tokenizer, greedy.messages)


def test_real_engine_writes_its_own_prompts(monkeypatch):
    # random weights write no words, so anything that comes to an end will do here
    monkeypatch.setattr("eyas.data.self_prompts._Writer._flaw", lambda self, text: "" if text else "too short")
    params = SamplingParams()
    written = [write_own_prompts(tiny_engine(max_rows=n), 2, params=params, seed=2, max_tokens=16) for n in (1, 3)]
    assert written[0] == written[1]
    assert len(written[0]) == 2


def test_commands_on_a_small_target(tmp_path, monkeypatch, capsys):
    from typer.testing import CliRunner

    from eyas.cli.app import app
    from eyas.cli.main import main
    from eyas.target import Target
    from tests.tiny import tiny_target

    monkeypatch.setattr(Target, "load", lambda spec, **more: tiny_target())
    prompts = write(tmp_path / "p.jsonl", [{"id": "a", "prompt": "hello"}, {"id": "b", "turns": ["one", "two"]}, "{"])
    out = tmp_path / "r.jsonl"
    run = CliRunner().invoke
    command = [
        "respond",
        str(prompts),
        "--out",
        str(out),
        "--max-new-tokens",
        "4",
        "--batch",
        "2",
        "--max-length",
        "64",
    ]
    assert run(app, command).exit_code == 0
    assert set(rows(out)) == {"a", "b#1", "b#2"}
    shown = run(app, ["data", "show", str(out), "--sample", "2"])
    assert shown.exit_code == 0
    assert "sample 2 of" in shown.output
    assert "tokens supervised" in shown.output
    shown = run(app, ["data", "show", str(prompts)])
    assert "messages: user 3" in shown.output
    assert "warning: 2 samples: nothing is supervised" in shown.output
    capsys.readouterr()
    for wrong, why in [
        ([*command, "--self-prompts", "3"], "give either a file of prompts or --self-prompts N"),
        ([*command, "--max-new-tokens", "5"], "sampling.max_new_tokens = 4, not 5"),
        ([*command, "--temperature", "hot"], "neither a number nor a mixture"),
        (["data", "show", str(out), "--sample", "9"], "there is no sample 9"),
        (["data", "show", str(tmp_path / "none.jsonl")], "no such file"),
    ]:
        monkeypatch.setattr("sys.argv", ["eyas", *wrong])
        with pytest.raises(SystemExit) as stop:
            main()
        assert stop.value.code == 2
        (line,) = (text for text in capsys.readouterr().err.splitlines() if text.startswith("error: "))
        assert why in line


@pytest.mark.real
def test_embedded_target_answers_and_writes_prompts(tmp_path):
    from eyas.decoding.engine import Engine
    from eyas.target import Target

    target = Target.load("smollm2")
    engine = Engine(target, max_rows=4, max_length=256)
    out = tmp_path / "r.jsonl"
    own = write_own_prompts(engine, 2, params=SamplingParams(), seed=1, max_tokens=64)
    assert len({p.id for p in own}) == 2
    prompts = [*own, Prompt("two", [user("Name a colour."), user("And another one.")])]
    respond(engine, prompts, out, params=SamplingParams(max_new_tokens=12))
    told = rows(out)
    assert len(told) == 4
    begin = "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
    for row in told.values():
        text = target.tokenizer.decode(row["ids"][: row["prompt_len"]], skip_special_tokens=False)
        assert text.startswith(begin + "<|im_start|>user\n")
        assert text.endswith("<|im_end|>\n<|im_start|>assistant\n")
        assert text.count(begin) == 1
    assert set(warnings_of(load_texts(out, target), target)) <= {"an answer was cut at the limit"}
    given, _ = given_samples([Prompt("g", [user("Hi"), assistant("Hello!"), user("Bye"), assistant("Bye!")])], target.tokenizer)
    assert [target.tokenizer.decode(given[0].ids[a:b]) for a, b in given[0].spans] == [
        "Hello!<|im_end|>",
        "Bye!<|im_end|>",
    ]
