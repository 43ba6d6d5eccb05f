"""Files are whole or not there, and a full disk is one line that loses nothing."""

from __future__ import annotations

import errno
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from eyas.data.store import FeatureStore
from eyas.errors import EyasError
from eyas.files import alone_in, replacing, write_text
from eyas.heads.files import head_hash, load_head, save_head
from eyas.training.checkpoint import load_state, save_state
from tests.test_unroll import random_head, some_texts
from tests.tiny import VOCAB, tiny_target


def full(*_: Any, **__: Any) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


def torch_full(*_: Any, **__: Any) -> None:
    raise RuntimeError("[enforce fail at inline_container.cc:664] . unexpected pos 704 vs 598")


def test_a_block_that_fails_leaves_the_old_file_and_no_other(tmp_path: Path) -> None:
    path = tmp_path / "sub" / "a.json"
    write_text(path, "old")
    for error in (KeyboardInterrupt, OSError(errno.ENOSPC, "full"), ValueError):
        with pytest.raises((KeyboardInterrupt, EyasError, ValueError)), replacing(path) as part:
            part.write_text("half")
            raise error
        assert path.read_text() == "old" and [f.name for f in path.parent.iterdir()] == ["a.json"]


def test_a_full_disk_keeps_head_state_and_features(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = tiny_target("llama")
    head, texts = random_head(target), some_texts(target)
    save_head(head, tmp_path / "h")
    before = head_hash(tmp_path / "h")
    state = {"head": head.state_dict(), "optimizer": {}, "place": {"step": 1}}
    save_state(tmp_path, state)
    store = FeatureStore(tmp_path / "f", target, top_k=VOCAB)
    store.add(texts[0])
    store.flush()
    store.add(texts[1])

    with monkeypatch.context() as patch:
        patch.setattr("eyas.heads.files.save_file", full)
        patch.setattr("eyas.data.store.save_file", full)
        patch.setattr(torch, "save", torch_full)
        for write in (lambda: save_head(head, tmp_path / "h"), lambda: save_state(tmp_path, state), store.flush):
            with pytest.raises(EyasError, match="the disk is full") as caught:
                write()
            assert "\n" not in str(caught.value)

    assert head_hash(tmp_path / "h") == before and load_head(tmp_path / "h", target)
    assert (load_state(tmp_path) or {})["place"] == {"step": 1}
    again = FeatureStore(tmp_path / "f", target, top_k=VOCAB)
    assert texts[0].key in again and texts[1].key not in again
    assert not list(tmp_path.rglob("*.part"))
    store.flush()  # there is room again
    assert texts[1].key in FeatureStore(tmp_path / "f", target, top_k=VOCAB)


def test_two_processes_that_add_to_one_store_lose_nothing(tmp_path: Path) -> None:
    target = tiny_target("llama")
    first, second, third = some_texts(target)
    one, other = (FeatureStore(tmp_path / "f", target, top_k=VOCAB) for _ in range(2))  # both see an empty folder
    one.add(first)
    other.add(first)
    other.add(second)
    one.flush()
    other.flush()
    one.add(third)
    one.flush()
    again = FeatureStore(tmp_path / "f", target, top_k=VOCAB)
    assert len(again) == 3
    for store in (again, one):
        for text in (first, second, third):
            assert torch.equal(store[text.key].taps, text.taps) and torch.equal(store[text.key].ids, text.ids)


def test_who_adds_to_a_store_waits_for_who_does_so_already(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = tiny_target("llama")
    one, other = (FeatureStore(tmp_path / "f", target, top_k=VOCAB) for _ in range(2))
    first, second, _ = some_texts(target)
    other.add(second)
    with one.adding():
        thread = threading.Thread(target=other.flush, daemon=True)
        thread.start()
        one.add(first)
        one.flush()
        thread.join(0.2)
        assert thread.is_alive() and "another process adds features to" in capsys.readouterr().err
    thread.join(20)
    assert first.key in other and len(FeatureStore(tmp_path / "f", target, top_k=VOCAB)) == 2


def test_a_folder_holds_one_run_at_a_time(tmp_path: Path) -> None:
    with alone_in(tmp_path / "run"):
        with pytest.raises(EyasError, match="another run is going on in"), alone_in(tmp_path / "run"):
            pass
        with alone_in(tmp_path / "run" / "arm"):
            pass
    with alone_in(tmp_path / "run"):
        pass
    (tmp_path / "file").write_text("")
    with pytest.raises(EyasError, match="cannot write"), alone_in(tmp_path / "file" / "run"):
        pass
