"""What a long job will take is told before it begins, and what cannot fit is refused."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from eyas import estimate
from eyas.chat import Sample
from eyas.data.features import read_features, text_key
from eyas.data.forecast import PROBE_STEPS, forecast
from eyas.data.prompts import Prompt
from eyas.data.responses import respond
from eyas.data.store import FeatureStore
from eyas.decoding.sampling import SamplingParams
from eyas.errors import EyasError
from eyas.estimate import Consent, Estimate, admit, disk_free, memory_free, size
from eyas.heads.start import new_head
from eyas.training.config import TrainConfig
from eyas.training.forecast import reading_forecast, training_forecast
from eyas.training.loop import Trainer
from eyas.training.recipe import train
from tests.fake_engine import FakeEngine
from tests.tiny import tiny_target
from tests.toy_tokenizers import CHATML, toy_tokenizer, user


@pytest.fixture
def small_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine with 1 MB of disk and 1 GB of memory to spare."""
    monkeypatch.setattr(estimate, "disk_free", lambda folder: 10**6)
    monkeypatch.setattr(estimate, "memory_free", lambda: 10**9)


def test_what_cannot_fit_is_refused_unless_forced(small_machine: None, capsys: pytest.CaptureFixture[str]) -> None:
    fits = Estimate("job", Path("out"), 10**6, 10**9)
    admit(fits, Consent())
    with pytest.raises(EyasError, match=r"job needs about 1\.0 MB of disk in out, and 1\.0 MB are free; .*--force"):
        admit(replace(fits, disk=10**6 + 1), Consent())
    with pytest.raises(EyasError, match=r"job needs about 2\.0 GB of memory, and 1\.0 GB are free"):
        admit(replace(fits, memory=2 * 10**9), Consent())
    capsys.readouterr()
    admit(replace(fits, memory=2 * 10**9), Consent(force=True))
    assert "begun all the same" in capsys.readouterr().err


def test_long_jobs_ask_where_there_is_somebody_to_ask(capsys: pytest.CaptureFixture[str]) -> None:
    asked: list[str] = []
    hours = Estimate("job", Path(), 1000, seconds=2 * 3600)
    admit(hours, Consent())
    assert "job: about 2:00:00, 1 kB of disk" in capsys.readouterr().err
    admit(hours, Consent(ask=lambda question: not asked.append(question)))
    with pytest.raises(EyasError, match="not begun"):
        admit(hours, Consent(ask=lambda question: False))
    admit(replace(hours, seconds=30.0), Consent(ask=lambda question: False))
    assert len(asked) == 1 and not capsys.readouterr().err.count("0:30")


def test_what_is_free(tmp_path: Path) -> None:
    assert disk_free(tmp_path / "not" / "yet") == pytest.approx(disk_free(tmp_path), rel=0.01)
    assert memory_free(tmp_path) > 10**6  # no control group
    (tmp_path / "memory.max").write_text("5000\n")
    (tmp_path / "memory.current").write_text("2000\n")
    assert memory_free(tmp_path) == 3000
    (tmp_path / "memory.max").write_text("max\n")
    assert memory_free(tmp_path) > 10**6
    assert [size(n) for n in (999, 10**6, 2.5e9, 4e12)] == ["999 B", "1.0 MB", "2.5 GB", "4.0 TB"]


def test_time_of_answers_is_extrapolated_from_a_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr("eyas.data.forecast.time", SimpleNamespace(monotonic=lambda: now[0]))

    class Engine:
        target, max_rows, max_length, cache_bytes = SimpleNamespace(device="cpu"), 4, 512, 77

        def generate(self, requests: list, on_finish: object) -> None:
            requests = list(requests)
            assert len(requests) == 4
            now[0] += 3.0 + 0.5 * (requests[0].params.max_new_tokens - 1)  # prefill, then half a second a round

    params = SamplingParams(max_new_tokens=256)
    told = forecast(Engine(), [[1] * 10, [1] * 30], 400, params, answer_tokens=101, folder=Path())  # type: ignore[arg-type]
    assert told.seconds == pytest.approx(100 * (3.0 + 0.5 * 100))
    assert now[0] == 3.0 + 3.0 + 0.5 * PROBE_STEPS
    assert told.disk == 400 * (20 + 101) * 6 + 400 * 160 and told.memory == 77
    assert forecast(Engine(), [[1]], 10, params, answer_tokens=101, folder=Path()).seconds is None  # type: ignore[arg-type]


def test_answers_that_do_not_fit_the_disk_are_not_begun(tmp_path: Path, small_machine: None) -> None:
    prompts = [Prompt(f"p{i}", [user(f"hello {i}")]) for i in range(600)]
    engine = FakeEngine(toy_tokenizer(CHATML), lambda ask: "you", max_rows=600)
    with pytest.raises(EyasError, match=r"answering 600 prompts needs about 1\.\d MB of disk"):
        respond(engine, prompts, tmp_path / "r.jsonl", params=SamplingParams(max_new_tokens=256), minutes=1)
    assert engine.asked == []
    done = respond(
        engine, prompts, tmp_path / "r.jsonl", params=SamplingParams(max_new_tokens=256), consent=Consent(force=True), minutes=1
    )
    assert done.written == 600


def a_text(number: int) -> Sample:
    return Sample(f"t{number}", [1, *[(7 * number + k) % 150 + 3 for k in range(30)], 2], [(4, 32)])


def test_disk_of_features_is_what_they_take(tmp_path: Path) -> None:
    target = tiny_target()
    texts = [a_text(n) for n in range(40)]
    with FeatureStore(tmp_path / "f", target) as store:
        told = reading_forecast(store, target, texts)
        assert len(store) == 2  # the probe's work is kept
        for text in texts:
            if text_key(text) not in store:
                store.add(read_features(target, text))
    written = sum(f.stat().st_size for f in (tmp_path / "f").glob("*.safetensors"))
    assert told.disk == pytest.approx(written, rel=0.05)
    assert told.seconds is not None and told.seconds > 0


def test_training_probe_leaves_the_run_as_it_was(tmp_path: Path) -> None:
    target = tiny_target()
    texts = [read_features(target, a_text(n)) for n in range(6)]
    config = TrainConfig(steps=3, unroll=2)
    weights = []
    for probed in (False, True):
        head = new_head(target, torch.zeros(target.vocab_size, dtype=torch.long))
        trainer = Trainer(head, texts[:5], texts[5:], config, tmp_path / str(probed))
        (tmp_path / str(probed)).mkdir()
        if probed:
            told = training_forecast(trainer, tmp_path)
            assert told.seconds is not None and told.seconds > 0
            assert told.memory >= 2 * sum(p.numel() * 4 for p in head.parameters())
        trainer.run()
        weights.append(torch.cat([p.detach().flatten() for p in head.parameters()]))
    assert torch.equal(*weights)


def test_training_that_does_not_fit_is_refused_before_it_begins(tmp_path: Path, small_machine: None) -> None:
    target = tiny_target()
    config = TrainConfig(steps=3, unroll=2, draft_vocab_size=100)
    with pytest.raises(EyasError, match=r"training needs about .* MB of disk in .*head, and 1\.0 MB are free"):
        train(target, [a_text(n) for n in range(8)], tmp_path / "head", config, features=tmp_path / "f", held_out=2)
    assert not (tmp_path / "head" / "log.jsonl").exists()
