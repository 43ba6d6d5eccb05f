"""Prompts out of every layout and kind of file, self-written prompts, and what is said about bad rows."""

from __future__ import annotations

import csv
import gzip
import json

import datasets
import pyarrow
import pyarrow.parquet
import pytest

from eyas.data.hashing import content_id, derived_seed, derived_share
from eyas.data.prompts import read_prompts
from eyas.data.self_prompts import user_opening, write_own_prompts
from eyas.data.temperatures import Temperatures
from eyas.decoding.sampling import SamplingParams
from eyas.errors import EyasError
from tests.fake_engine import FakeEngine
from tests.toy_tokenizers import CHATML, LLAMA3, MISTRAL, PLAIN, QWEN3, assistant, toy_tokenizer, user


def write(path, rows):
    text = "".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows)
    if path.suffix == ".gz":
        path.write_bytes(gzip.compress(text.encode()))
    else:
        path.write_text(text)
    return path


LAYOUTS = [
    ({"messages": [user("hello"), assistant("hi")]}, [user("hello"), assistant("hi")]),
    ({"messages": json.dumps([user("hello")])}, [user("hello")]),
    ({"messages": [{"role": "user", "content": [{"type": "text", "text": "hello"}], "name": None}]}, [user("hello")]),
    ({"conversations": [{"from": "human", "value": "hello"}, {"from": "gpt", "value": "hi"}], "system": "brief"},
     [{"role": "system", "content": "brief"}, user("hello"), assistant("hi")]),
    ({"conversation": [user("hello"), assistant("hi")]}, [user("hello"), assistant("hi")]),
    ({"instruction": "Add", "input": "1 2", "output": "3"}, [user("Add\n\n1 2"), assistant("3")]),
    ({"instruction": "Add", "input": "", "output": ""}, [user("Add")]),
    ({"prompt": "hello", "completion": "hi"}, [user("hello"), assistant("hi")]),
    ({"prompt": [user("hello")], "completion": [assistant("hi")]}, [user("hello"), assistant("hi")]),
    ({"text": "hello"}, [user("hello")]),
    ({"question": "hello", "answer": "hi"}, [user("hello"), assistant("hi")]),
    ({"turns": ["hello", "and?"]}, [user("hello"), user("and?")]),
    ({"messages": [{"role": "system", "content": " "}, user("hello")]}, [user("hello")]),
]  # fmt: skip


@pytest.mark.parametrize(("row", "messages"), LAYOUTS)
def test_layouts(tmp_path, row, messages):
    (prompt,) = read_prompts(write(tmp_path / "a.jsonl", [row])).prompts
    assert prompt.messages == messages
    assert prompt.answered == (messages[-1]["role"] == "assistant")
    assert prompt.id == content_id(messages, None)


def test_sharegpt_tool_calls(tmp_path):
    row = {
        "conversations": [
            {"from": "human", "value": "add"},
            {"from": "function_call", "value": '{"name": "add", "arguments": {"a": 1}}'},
            {"from": "observation", "value": "2"},
            {"from": "gpt", "value": "two"},
        ],
        "tools": '[{"name": "add"}]',
    }
    (prompt,) = read_prompts(write(tmp_path / "a.jsonl", [row])).prompts
    assert [m["role"] for m in prompt.messages] == ["user", "assistant", "tool", "assistant"]
    assert prompt.messages[1]["tool_calls"][0]["function"] == {"name": "add", "arguments": {"a": 1}}
    assert prompt.tools == [{"name": "add"}]
    assert prompt.open_messages() == prompt.messages[:3]


def test_reasoning_and_other_keys_are_kept_for_the_template(tmp_path):
    row = {
        "messages": [user("hello"), assistant("hi", reasoning_content="hm")],
        "id": 7,
        "source": "s",
        "category": "c",
    }
    (prompt,) = read_prompts(write(tmp_path / "a.jsonl", [row])).prompts
    assert prompt.messages[1]["reasoning_content"] == "hm"
    assert (prompt.id, prompt.source, prompt.category) == ("7", "s", "c")


def test_every_kind_of_file_gives_the_same_prompts(tmp_path):
    rows = [{"id": f"r{i}", "prompt": f"hello {i}", "response": 'hi,\n"you"'} for i in range(3)]
    files = [
        write(tmp_path / "a.jsonl", rows),
        write(tmp_path / "b.jsonl.gz", rows),
        write(tmp_path / "g.ndjson", rows),
    ]
    files.append(tmp_path / "c.json")
    files[-1].write_text("\ufeff" + json.dumps(rows))
    files.append(tmp_path / "d.json")
    files[-1].write_text(json.dumps({"data": rows}))
    files.append(tmp_path / "e.parquet")
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), files[-1])
    for name, delimiter in (("f.csv", ","), ("f.tsv", "\t")):
        files.append(tmp_path / name)
        with files[-1].open("w", newline="", encoding="utf-8-sig") as file:
            table = csv.DictWriter(file, list(rows[0]), delimiter=delimiter)
            table.writeheader()
            table.writerows(rows)
    read = [read_prompts(file) for file in files]
    assert all(r == read[0] for r in read)
    assert [p.id for p in read[0].prompts] == ["r0", "r1", "r2"]
    lines = tmp_path / "h.txt"
    lines.write_text("hello 0\n\n  hello 1  \n")
    assert [p.messages for p in read_prompts(lines).prompts] == [[user("hello 0")], [user("hello 1")]]


def test_parquet_with_nested_messages(tmp_path):
    rows = [
        {
            "messages": [
                user("hello"),
                {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "f", "arguments": "{}"}}]},
            ]
        }
    ]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "a.parquet")
    (prompt,) = read_prompts(tmp_path / "a.parquet").prompts
    assert prompt.messages[0] == user("hello")
    assert prompt.messages[1]["tool_calls"] == [{"function": {"name": "f", "arguments": {}}}]
    assert "content" not in prompt.messages[1]


BAD = [
    ("{", "not JSON"),
    ("[1]", "not an object but list"),
    ({"foo": 1}, "holds none of the fields messages, .* (it has: foo)"),
    ({"messages": [{"role": "robot", "content": "x"}]}, "message 1 has the role 'robot'"),
    ({"messages": [assistant("hi")]}, "there is no user turn"),
    ({"messages": [user("  ")]}, "message 1 (user) is empty"),
    ({"messages": [user("hello"), assistant("")]}, "message 2 (assistant) is empty"),
    ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "not text"),
    ({"messages": "{"}, "messages: text that is no JSON"),
    ({"messages": ["hello"]}, "no list of objects"),
    ({"conversations": [{"from": "alien", "value": "x"}]}, "turn 1 is from 'alien'"),
    ({"conversations": [{"from": "human", "value": None}]}, "message 1 (user) is empty"),
    ({"turns": [1]}, "turns are no list of texts"),
    ({"prompt": 5}, "content that is no text but int"),
    ({"prompt": ["x"]}, "something other than messages"),
    ({"prompt": "x", "tools": "add"}, "tools: text that is no JSON"),
    ('{"prompt": "\\ud800"}', "characters that are no text"),
]


@pytest.mark.parametrize(("row", "why"), BAD)
def test_bad_row_is_reported_with_line_and_reason_and_skipped(tmp_path, row, why):
    path = write(tmp_path / "a.jsonl", [{"id": "good", "prompt": "hello"}, "", row, {"prompt": "more"}])
    read = read_prompts(path)
    assert [p.messages[0]["content"] for p in read.prompts] == ["hello", "more"]
    ((file, line, told),) = read.bad
    assert (file, line) == (str(path), 3)
    for part in why.split(".*"):
        assert part in told


def test_line_that_is_not_utf8(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"prompt": "hello"}\n{"prompt": "\xff"}\n')
    assert [tuple(b) for b in read_prompts(path).bad] == [(str(path), 2, "not UTF-8 text")]


def test_csv_with_surplus_fields_and_an_index_column(tmp_path):
    path = tmp_path / "a.csv"
    path.write_text(',prompt\n0,hello\n1,"a\nb"\n2,x,y\n')
    read = read_prompts(path)
    assert [p.messages[0]["content"] for p in read.prompts] == ["hello", "a\nb"]
    assert [(b.line, b.why) for b in read.bad] == [(5, "more fields than the head line names")]


def test_repetitions_are_dropped_and_counted(tmp_path):
    rows = [{"id": "a", "prompt": "hello"}, {"id": "b", "prompt": "hello"}, {"prompt": "hello", "answer": "hi"}]
    read = read_prompts(write(tmp_path / "a.jsonl", rows))
    assert read.prompts[0].id == "a"
    assert (len(read.prompts), read.duplicates, read.bad) == (2, 1, [])


def test_ids_that_are_given_twice_are_told_apart(tmp_path):
    for shard in (0, 1, 2):
        rows = [{"id": i, "prompt": f"shard {shard} prompt {i}"} for i in range(3)] + [{"id": "1#2", "prompt": f"own {shard}"}]
        pyarrow.parquet.write_table(
            pyarrow.Table.from_pylist([{**row, "id": str(row["id"])} for row in rows]), tmp_path / f"{shard}.parquet"
        )
    read = read_prompts(tmp_path)
    assert (len(read.prompts), read.bad, read.duplicates) == (12, [], 0)
    ids = [p.id for p in read.prompts]
    assert ids[:8] == ["0", "1", "2", "1#2", "0#2", "1#3", "2#2", "1#2#2"] and len(set(ids)) == 12


def test_columns_give_a_tool_no_keys_of_another(tmp_path):
    tools = [
        {"function": {"name": "a", "parameters": {"type": "object", "properties": {"x": {"type": "string", "enum": ["u"]}}}}},
        {"function": {"name": "b", "parameters": {"type": "object", "properties": {"y": {"type": "number"}}}}},
    ]
    calls = [
        {"role": "assistant", "tool_calls": [{"function": {"name": "a", "arguments": {"x": "u"}}}]},
        {"role": "assistant", "tool_calls": [{"function": {"name": "b", "arguments": {"y": 2.0}}}]},
    ]
    row = {"messages": [user("add"), *calls], "tools": tools}
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist([row]), tmp_path / "a.parquet")
    datasets.Dataset.from_list([row]).save_to_disk(tmp_path / "saved")
    for source in (tmp_path / "a.parquet", tmp_path / "saved", write(tmp_path / "a.jsonl", [row])):
        (prompt,) = read_prompts(source).prompts
        assert prompt.tools == tools and prompt.messages[1:] == calls


def test_csv_with_bytes_that_are_no_text(tmp_path):
    path = tmp_path / "a.csv"
    path.write_bytes(b'id,prompt\na,hello\nb,"two\nlines \xff"\nc,more\n')
    read = read_prompts(path)
    assert [p.id for p in read.prompts] == ["a", "c"]
    assert [(b.line, b.why) for b in read.bad] == [(4, "not UTF-8 text")]


def test_files_that_cannot_be_used(tmp_path):
    for name, content, why in [
        ("empty.jsonl", b"", "no prompt in it"),
        ("bad.jsonl", b"{\n", r"no prompt in it \(1 bad rows; the first, line 1: not JSON"),
        ("a.docx", b"x", "unknown kind of file"),
        ("noname", b"x", "unknown kind of file"),
        ("a.json", b"{", "not JSON"),
        ("b.json", b"3", "neither an array"),
        ("a.parquet", b"nonsense", "not a readable Parquet file"),
        ("a.jsonl.gz", b"nonsense", "cannot be read"),
        ("b.jsonl.gz", gzip.compress(b'{"prompt": "x"}\n' * 9999)[:-20], "cannot be read"),
        ("a.csv", b"prompt\n\xff\n", r"no prompt in it \(1 bad rows; the first, line 2: not UTF-8 text"),
        ("b.csv", b"pr\xffompt\nx\n", "the head line is not UTF-8 text"),
    ]:
        path = tmp_path / name
        path.write_bytes(content)
        with pytest.raises(EyasError, match=why) as caught:
            read_prompts(path)
        assert str(path) in str(caught.value)
        assert "\n" not in str(caught.value)
    with pytest.raises(EyasError, match="no such file"):
        read_prompts(tmp_path / "missing.jsonl")
    with pytest.raises(EyasError, match="no such file"):
        read_prompts(tmp_path / ".jsonl" / "x.jsonl")


def test_draws_are_even_and_depend_on_content_alone():
    assert content_id({"b": 1, "a": 2}) == content_id({"a": 2, "b": 1}) != content_id({"a": 2, "b": 2})
    shares = [derived_share("x", i) for i in range(4000)]
    assert abs(sum(shares) / 4000 - 0.5) < 0.03
    assert len({derived_seed(0, i) for i in range(4000)}) == 4000
    assert all(0 <= derived_seed(0, i) < 2**63 for i in range(100))


def test_temperatures():
    mix = Temperatures.parse("0:60,0.8:40")
    drawn = [mix.draw(1, str(i)) for i in range(4000)]
    assert set(drawn) == {0.0, 0.8}
    assert abs(drawn.count(0.0) / 4000 - 0.6) < 0.04
    assert drawn == [mix.draw(1, str(i)) for i in range(4000)] != [mix.draw(2, str(i)) for i in range(4000)]
    assert Temperatures.parse("0.7") == Temperatures.of(0.7)
    assert str(Temperatures.parse("0,0.8")) == "0:0.5,0.8:0.5"
    for wrong in ("", "warm", "0,,1", "-1", "0:0", "0:1:2", "nan", "inf", "0:inf", "0:-1,1:2"):
        with pytest.raises(EyasError, match="neither a number nor a mixture"):
            Temperatures.parse(wrong)


# -- prompts the target writes itself ----------------------------------------------------------------------------------


def test_opening_is_the_template_up_to_the_users_text():
    for template, before, closing in [
        (CHATML, "<|im_start|>user\n", "<|im_end|>"),
        (QWEN3, "<|im_start|>user\n", "<|im_end|>"),
        (LLAMA3, "<s><|start|>user<|stop|>\n\n", "<|eot|>"),
        (PLAIN, "user:", "\n\n"),
        (MISTRAL, "<s>[INST]", "[/INST]"),
    ]:
        tokenizer = toy_tokenizer(template, bos="<s>")
        opening = user_opening(tokenizer)
        assert tokenizer.decode(opening.ids, skip_special_tokens=False).rstrip(" ") == before
        assert opening.closing == (closing if closing == "\n\n" else tokenizer.convert_tokens_to_ids(closing))
        assert opening.ids.count(tokenizer.bos_token_id) == (template in (LLAMA3, MISTRAL))


def test_opening_keeps_the_models_default_system_prompt():
    template = "{% if messages[0].role != 'system' %}<|im_start|>system\nbe kind<|im_end|>\n{% endif %}" + CHATML
    tokenizer = toy_tokenizer(template)
    opening = user_opening(tokenizer)
    assert tokenizer.decode(opening.ids) == "<|im_start|>system\nbe kind<|im_end|>\n<|im_start|>user\n"


def test_template_that_cannot_be_opened():
    for template in ("no text", "{% for m in messages %}{{ m.content }}{{ m.content }}{% endfor %}"):
        with pytest.raises(EyasError, match="exactly once"):
            user_opening(toy_tokenizer(template))


def own_engine(texts, **more):
    """An engine whose i-th distinct seed writes texts[i]."""
    tokenizer = toy_tokenizer(CHATML)
    order = {derived_seed("own prompt", 5, i): text for i, text in enumerate(texts)}
    return FakeEngine(tokenizer, lambda ask: order.get(ask.params.seed, ""), **more)


PARAMS = SamplingParams()
GOOD = "hello how are you"


def test_own_prompts_are_filtered_and_distinct():
    texts = [
        GOOD, "hello  HOW are you", "hi", "", "one two\x07 three four", "a b c " * 20, "CUT",
        "hello how are you", "what is the sea", "hello how are you too", "日本語のはなし",
        "why do birds fly so high in spring",
    ]  # fmt: skip
    engine = own_engine(texts, cut={"CUT"})
    prompts = write_own_prompts(engine, 4, params=PARAMS, seed=5)
    told = [p.messages for p in prompts]
    assert told == [[user(t)] for t in (GOOD, "what is the sea", "hello how are you too", "日本語のはなし")]
    assert all(p.id == content_id(p.messages, None) and p.source == "self" for p in prompts)
    assert {a.params.temperature for a in engine.asked} == {1.0}
    assert len({a.params.seed for a in engine.asked}) == len(engine.asked)
    assert engine.target.tokenizer.decode(engine.asked[0].ids) == "<|im_start|>user\n"


def test_near_duplicates_are_dropped():
    long = "please tell me in a few words how the birds of the north find their way home"
    engine = own_engine([long, long + " again", "a wholly different question about the sea and its tides"])
    told = [p.messages[0]["content"] for p in write_own_prompts(engine, 2, params=PARAMS, seed=5)]
    assert told[0] == long
    assert told[1].startswith("a wholly")


def test_own_prompts_depend_on_the_seed_alone(tmp_path):
    texts = [f"question {i} about {i * i} things" for i in range(40)]
    lists = [write_own_prompts(own_engine(texts, max_rows=rows), 20, params=PARAMS, seed=5) for rows in (1, 3, 8)]
    assert lists[0] == lists[1] == lists[2]
    other = FakeEngine(toy_tokenizer(CHATML), lambda ask: f"question {ask.params.seed % 1000} about other things")
    assert write_own_prompts(other, 20, params=PARAMS, seed=5) != write_own_prompts(other, 20, params=PARAMS, seed=6)


def test_own_prompts_go_on_after_an_interruption(tmp_path):
    texts = [f"question {i} about {i * i} things" for i in range(40)]
    whole = write_own_prompts(own_engine(texts), 20, params=PARAMS, seed=5)
    out = tmp_path / "own.jsonl"
    with pytest.raises(KeyboardInterrupt):
        write_own_prompts(own_engine(texts, interrupt_after=9), 20, params=PARAMS, seed=5, out=out)
    kept = len(out.read_text().splitlines()) - 1
    assert 0 < kept < 20
    engine = own_engine(texts)
    assert write_own_prompts(engine, 20, params=PARAMS, seed=5, out=out) == whole
    assert len(engine.asked) <= 20 - kept + engine.max_rows
    again = own_engine(texts)
    assert write_own_prompts(again, 20, params=PARAMS, seed=5, out=out) == whole
    assert again.asked == []
    assert [p.messages for p in read_prompts(out).prompts] == [p.messages for p in whole]
    with pytest.raises(EyasError, match=r"sampling\.seed = 5, not 6"):
        write_own_prompts(own_engine(texts), 20, params=PARAMS, seed=6, out=out)


def test_too_few_own_prompts(capsys):
    assert len(write_own_prompts(own_engine([GOOD]), 3, params=PARAMS, seed=5)) == 1
    assert "only 1 of 3 self-written prompts after 64 tries" in capsys.readouterr().err.replace("\n", " ")
    with pytest.raises(EyasError, match=r"no usable prompt of its own in 64 tries \(64 too short\)"):
        write_own_prompts(own_engine([]), 3, params=PARAMS, seed=5)
    with pytest.raises(EyasError, match="in 0 tries"):
        write_own_prompts(own_engine([GOOD]), 3, params=PARAMS, seed=5, minutes=0)
    with pytest.raises(EyasError, match="at least 1"):
        write_own_prompts(own_engine([GOOD]), 0, params=PARAMS)
    with pytest.raises(EyasError, match="do not fit"):
        write_own_prompts(own_engine([GOOD]), 1, params=PARAMS, max_tokens=10**6)


def test_user_turn_that_a_special_token_closes(capsys):
    """Where the template ends the user's turn with a token that is no EOS, the text is cut there."""
    tokenizer = toy_tokenizer(MISTRAL, bos="<s>")
    engine = FakeEngine(tokenizer, lambda ask: f"{GOOD}[/INST] and {ask.params.seed}")
    prompts = write_own_prompts(engine, 1, params=PARAMS)
    assert prompts[0].messages == [user(GOOD)]
    assert engine.asked[0].params.stop_ids == (tokenizer.convert_tokens_to_ids("[/INST]"),)
