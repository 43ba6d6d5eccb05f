"""Data sets and models from the hub: read where they are, refused in one line and within seconds where they are not."""

from __future__ import annotations

import json
import time
from pathlib import Path

import datasets
import httpx2
import pyarrow
import pyarrow.parquet
import pytest
from huggingface_hub import HfApi
from huggingface_hub.errors import RepositoryNotFoundError

from eyas.data.prompts import read_prompts
from eyas.data.samples import open_responses
from eyas.data.store import features_beside, features_folder
from eyas.errors import EyasError
from eyas.locate import locate

CHATS = [{"messages": [{"role": "user", "content": f"hello {i}"}, {"role": "assistant", "content": "hi"}]} for i in range(4)]


def said(source: object) -> list[str]:
    return [p.messages[0]["content"] for p in read_prompts(Path(str(source))).prompts]


def response(status: int) -> httpx2.Response:
    return httpx2.Response(status, request=httpx2.Request("GET", "https://hub.test/api"))


def gone(*_: object, **__: object) -> None:
    raise httpx2.ConnectError("Name or service not known")


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> dict[str, dict]:
    """A hub that holds the data sets put into the dict it returns: name -> {(config): {split: rows}}."""
    shelf: dict[str, dict] = {}

    def repo_info(self: object, name: str, *, repo_type: str, timeout: float) -> None:
        if name not in shelf:
            raise RepositoryNotFoundError("no", response=response(404))

    def load(name: str, config: str | None, *, streaming: bool) -> dict:
        assert streaming
        if config not in shelf[name]:
            raise ValueError(f"BuilderConfig '{config}' not found. Available: {list(shelf[name])}\nmore")
        splits = shelf[name][config].items()
        return datasets.IterableDatasetDict({k: datasets.Dataset.from_list(v).to_iterable_dataset() for k, v in splits})

    monkeypatch.setattr(HfApi, "repo_info", repo_info)
    monkeypatch.setattr(datasets, "load_dataset", load)
    return shelf


def test_name_config_and_split(hub: dict) -> None:
    hub["owner/chats"] = {None: {"train": CHATS[:2], "test": CHATS[2:]}, "long": {"test": CHATS[3:]}}
    hub["math"] = {"main": {"train": [{"question": "1+1?", "answer": "2"}]}}
    hub["o/two"] = {None: {"a": CHATS, "b": CHATS}}
    assert said("hub:owner/chats") == ["hello 0", "hello 1"]
    assert said("hub:owner/chats:test") == ["hello 2", "hello 3"]
    assert said("hub:owner/chats/long") == ["hello 3"]
    assert said("hub:math/main:train") == ["1+1?"]
    for source, why in [
        ("hub:owner/chats:dev", r"there is no split 'dev' \(it has: train, test\)"),
        ("hub:o/two", r"several splits; name one"),
        ("hub:owner/chats/short", "BuilderConfig 'short' not found"),
        ("hub:nobody/nothing", "data set 'nobody/nothing': the hub shows none of that name"),
        ("hub:", "a data set is named hub:NAME"),
        ("hub:a/b/c/d", "a data set is named hub:NAME"),
    ]:
        with pytest.raises(EyasError, match=why) as caught:
            read_prompts(Path(source))
        assert "\n" not in str(caught.value)


def test_bad_rows_of_a_data_set_are_numbered(hub: dict) -> None:
    hub["owner/chats"] = {None: {"train": [CHATS[0], {"messages": []}, CHATS[1]]}}
    read = read_prompts(Path("hub:owner/chats"))
    assert [(b.file, b.line) for b in read.bad] == [("hub:owner/chats", 2)]


def test_turns_stored_by_column() -> None:
    turns = {"from": ["human", "gpt"], "value": ["hello", "hi"]}
    from eyas.data.conversations import conversation

    told = [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "hi"}]
    assert conversation({"conversations": turns}) == told
    assert conversation({"messages": {"role": ["user", "assistant"], "content": ["hello", "hi"]}}) == told


def test_folders(tmp_path: Path) -> None:
    saved, shards = tmp_path / "saved", tmp_path / "shards"
    datasets.Dataset.from_list(CHATS).save_to_disk(saved)
    datasets.DatasetDict({"train": datasets.Dataset.from_list(CHATS[:1])}).save_to_disk(tmp_path / "dict")
    (shards / "data").mkdir(parents=True)
    for k in (0, 1):
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(CHATS[2 * k : 2 * k + 2]), shards / "data" / f"train-{k}.parquet")
    (shards / "README.md").write_text("about")
    assert said(saved) == said(shards) == [f"hello {i}" for i in range(4)]
    assert said(tmp_path / "dict") == ["hello 0"]
    assert sorted(said(f"hub:{shards}")) == [f"hello {i}" for i in range(4)]  # by the library itself, without a network
    (tmp_path / "none").mkdir()
    with pytest.raises(EyasError, match="no file in it that eyas reads"):
        read_prompts(tmp_path / "none")
    (saved / "state.json").write_text("{")
    with pytest.raises(EyasError, match="saved: "):
        read_prompts(saved)


def test_answers_of_several_files_are_told_apart(tmp_path: Path) -> None:
    for k in (0, 1):
        rows = [{"id": f"{k}{i}", "ids": [k, i, 5], "prompt_len": 1} for i in range(3)]
        (tmp_path / f"{k}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in [*rows, {"id": "bad"}]))
    read = open_responses(tmp_path)
    assert len(read.samples) == 6
    assert [(Path(b.file).name, b.line) for b in read.bad] == [("0.jsonl", 4), ("1.jsonl", 4)]


def test_no_hub_is_one_line_within_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(HfApi, "repo_info", gone)
    start = time.monotonic()
    with pytest.raises(EyasError, match=r"'nobody/nothing-here' is no folder here, the hub cannot be reached \(Name or"):
        locate("nobody/nothing-here")
    with pytest.raises(EyasError, match=r"data set 'nobody/nothing-here': the hub cannot be reached"):
        read_prompts(Path("hub:nobody/nothing-here"))
    assert time.monotonic() - start < 5


def test_model_on_the_hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    answers: list[object] = [None, RepositoryNotFoundError("no", response=response(401)), httpx2.ConnectError("down")]

    def repo_info(*_: object, **__: object) -> None:
        if (answer := answers.pop(0)) is not None:
            raise answer  # type: ignore[misc]

    monkeypatch.setattr(HfApi, "repo_info", repo_info)
    assert locate("owner/model") == "owner/model"
    with pytest.raises(EyasError, match="the hub shows no such model"):
        locate("owner/model")
    monkeypatch.setattr("eyas.hub.snapshot_download", lambda name, local_files_only: str(tmp_path))
    assert locate("owner/model") == str(tmp_path)  # the copy in the cache, while the hub is away


def test_features_of_a_data_set_on_the_hub_lie_here() -> None:
    assert features_beside(Path("hub:owner/chats-1.5:train")) == Path("owner-chats-1.5-train.features")
    assert features_beside(Path("hub:/abs/chats"), "medusa") == Path("abs-chats.final.features")
    assert features_folder(None, Path("a/b.jsonl"), "eagle3") == Path("a/b.features")
    assert features_folder(Path("none"), Path("a/b.jsonl"), "eagle3") is None
