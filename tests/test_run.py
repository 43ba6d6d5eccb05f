"""A run beyond its steps: what is kept as best, when it ends early, what is skipped, logged, tracked and read from settings."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from eyas.cli.app import app
from eyas.cli.options import TargetChoice
from eyas.data.batches import Batch
from eyas.decoding.stats import Stats
from eyas.decoding.tree import TreeShape
from eyas.errors import EyasError
from eyas.heads.eagle3 import Eagle3Head
from eyas.heads.files import load_head
from eyas.progress import console
from eyas.training import workers as workers_module
from eyas.training.config import TrainConfig
from eyas.training.judge import EngineJudge
from eyas.training.loop import Trainer
from eyas.training.recipe import train
from eyas.training.settings import describe_settings, read_train_config
from eyas.training.workers import Workers, first_process, own_device
from tests.test_training import CONFIG, corpus
from tests.test_unroll import random_head, some_texts
from tests.tiny import tiny_target


def taus(*values: float) -> Any:
    """A judge that finds these, one after the other."""
    left = list(values)

    def judge(head: Eagle3Head) -> Stats:
        return Stats(rounds=1000, emitted=round(1000 * left.pop(0)))

    return judge


def rows(out: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (out / "log.jsonl").read_text().splitlines()]


def test_the_head_that_decodes_best_is_kept_and_patience_ends_a_run(tmp_path: Path) -> None:
    target = tiny_target("llama")
    texts = some_texts(target)
    config = TrainConfig(steps=40, unroll=2, evaluations=10, patience=3, learning_rate=1e-2)
    trainer = Trainer(random_head(target), texts, texts, config, tmp_path, judge=taus(1.2, 1.5, 1.4, 1.5, 1.3, 9.9))
    found: list[torch.Tensor] = []
    measure = trainer._measure

    def remember(head: Eagle3Head) -> Any:
        found.append(head.fc.weight.detach().clone())
        return measure(head)

    trainer._measure = remember  # type: ignore[method-assign]
    reached = trainer.run()
    assert reached.tau == 1.5 and trainer.step == 20 and len(found) == 5  # three after the second without a better one
    assert torch.equal(load_head(tmp_path, target).fc.weight, found[1])
    again = Trainer(random_head(target), texts, texts, config, tmp_path, judge=taus(7.7))
    assert again.resume() and again.run() == reached  # it has ended
    assert [row["best"] for row in rows(tmp_path) if "eval" in row] == [True, True, False, False, False]


def test_the_judge_decodes_with_the_real_engine() -> None:
    target = tiny_target("llama")
    samples = corpus(4)
    judge = EngineJudge.of(target, samples, 3, 8, TreeShape(2, 2, 4))
    head = random_head(target).train()
    stats = judge(head)
    assert len(judge.prompts) == 3 and list(judge.prompts[0]) == samples[0].ids[: samples[0].spans[0][0]]
    assert stats.requests == 3 and stats.rounds > 0 and 1 <= stats.tau <= 3 and head.training


def test_a_step_that_is_not_finite_is_skipped_and_counted(tmp_path: Path) -> None:
    target = tiny_target("llama")
    texts = some_texts(target)
    head = random_head(target)
    trainer = Trainer(head, texts, texts, TrainConfig(steps=9, unroll=2), tmp_path)
    trainer._optimise([[0]])
    before = {name: tensor.clone() for name, tensor in head.state_dict().items()}
    handle = head.lm_head.weight.register_hook(lambda grad: grad * float("nan"))
    assert trainer._optimise([[1]]).skipped and trainer.skipped == 1 and trainer.step == 2
    assert all(torch.equal(tensor, before[name]) for name, tensor in head.state_dict().items())
    handle.remove()
    assert not trainer._optimise([[1]]).skipped and not torch.equal(head.fc.weight, before["fc.weight"])


def test_the_scaler_of_gradients_goes_on_where_it_stood(tmp_path: Path) -> None:
    target = tiny_target("llama")
    texts = some_texts(target)

    def trainer_of(scale: float) -> Trainer:
        trainer = Trainer(random_head(target), texts, texts, TrainConfig(steps=3, unroll=2), tmp_path)
        trainer.workers._accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=scale)  # as fp16 has one on a GPU
        return trainer

    trainer_of(32.0).save()
    again = trainer_of(1024.0)
    assert again.resume() and again.workers._accelerator.scaler.get_scale() == 32.0
    plain = Trainer(random_head(target), texts, texts, TrainConfig(steps=3, unroll=2), tmp_path)
    assert plain.resume()


def test_a_run_begun_on_a_gpu_goes_on_without_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = tiny_target("llama")
    texts = some_texts(target)
    before = Trainer(random_head(target), texts, texts, TrainConfig(steps=3, unroll=2), tmp_path)
    before._optimise([[0]])
    with monkeypatch.context() as patch:
        patch.setattr(torch.serialization, "location_tag", lambda storage: "cuda:0")
        before.save()
    again = Trainer(random_head(target), texts, texts, TrainConfig(steps=3, unroll=2), tmp_path)
    assert again.resume() and again.step == 1


def test_bf16_is_close_to_float32_and_weights_stay_float32(tmp_path: Path) -> None:
    target = tiny_target("llama")
    texts = some_texts(target)
    losses = {}
    for precision in ("fp32", "bf16"):
        head = random_head(target)
        config = TrainConfig(steps=3, unroll=3, precision=precision)  # type: ignore[arg-type]
        trainer = Trainer(head, texts, texts, config, tmp_path)
        losses[precision] = trainer._optimise([[0, 1]]).losses
        assert all(p.dtype == torch.float32 for p in head.parameters())
    assert losses["bf16"] == pytest.approx(losses["fp32"], rel=0.03) and losses["bf16"] != losses["fp32"]
    with pytest.raises(EyasError, match="needs a GPU"):
        Workers(precision="fp16")


def test_accumulation_is_one_large_batch(tmp_path: Path) -> None:
    target = tiny_target("llama")
    texts = some_texts(target)
    heads = []
    for numbers in ([[0, 1, 2]], [[0], [1], [2]]):
        head = random_head(target)
        config = TrainConfig(steps=3, unroll=3, accumulate=len(numbers))
        Trainer(head, texts, texts, config, tmp_path)._optimise(numbers)
        heads.append(head)
    assert all(torch.allclose(a, b, atol=1e-5) for a, b in zip(heads[0].parameters(), heads[1].parameters(), strict=True))


def test_step_weights_and_the_feature_loss_are_what_they_say(tmp_path: Path) -> None:
    target = tiny_target("llama")
    texts = some_texts(target)

    def loss(**settings: Any) -> float:
        trainer = Trainer(random_head(target), texts, texts, TrainConfig(steps=1, unroll=3, **settings), tmp_path)
        batch = Batch.of(texts)
        masks = trainer.objective.masks([batch], 3)[0]
        return float(trainer.objective(batch, masks, masks.sum(1).float()).loss.detach())

    alone = [loss(step_weight=tuple(float(i == j) for i in range(3))) for j in range(3)]
    assert loss(step_weight=0.5) == pytest.approx(alone[0] + 0.5 * alone[1] + 0.25 * alone[2], rel=1e-5)
    assert loss(step_weight=(3.0, 0.0, 2.0)) == pytest.approx(3 * alone[0] + 2 * alone[2], rel=1e-5)
    assert loss(feature_weight=2.0) - loss() == pytest.approx(2 * (loss(feature_weight=1.0) - loss()), rel=1e-3)
    with pytest.raises(EyasError, match="feature_weight"):
        narrow = random_head(target, hidden_size=48)
        Trainer(narrow, texts, texts, TrainConfig(steps=1, feature_weight=1.0), tmp_path)


def test_settings_come_from_a_file_then_assignments_then_flags(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text("steps: 5\nunroll: 3\nloss: tv\nhead:\n  num_layers: 2\n  fc_norm: true\n")
    config = read_train_config(path, ["unroll=4", "head.num_layers=3", "betas=[0.8, 0.9]"], {"unroll": 2, "seed": None})
    assert (config.steps, config.unroll, config.loss, config.betas) == (5, 2, "tv", (0.8, 0.9))
    assert config.head.num_layers == 3 and config.head.fc_norm
    path.write_text(describe_settings())
    assert read_train_config(path, ["steps=5"], {}) == TrainConfig(steps=5)
    faults = {"heat=1": "there is no setting 'heat'", "unroll=x": "unroll", "head=2": "head", "unroll": "key=value"}
    for wrong, told in faults.items():
        with pytest.raises(EyasError, match=told) as caught:
            read_train_config(path, ["steps=5", wrong], {})
        assert "\n" not in str(caught.value)


def test_an_unknown_or_missing_tracker_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(EyasError, match="no tracker 'paper'"):
        Workers(track=["paper"])
    monkeypatch.setattr(workers_module, "get_available_trackers", list)
    with pytest.raises(EyasError, match="not installed"):
        Workers(track=["tensorboard"])


def test_each_process_has_its_own_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    assert own_device("cuda") == "cuda" and own_device("cuda:1", "auto") == "cuda:1" and first_process()
    for name, value in {"WORLD_SIZE": "4", "RANK": "3", "LOCAL_RANK": "1"}.items():
        monkeypatch.setenv(name, value)
    assert own_device("cuda") == "cuda:1" and own_device("cpu") == "cpu" and not first_process()
    with pytest.raises(EyasError, match="leave out --device-map"):
        own_device("cuda", "auto")
    with pytest.raises(EyasError, match="cannot share cuda:0"):
        own_device("cuda:0")


def test_the_command_gives_each_process_its_gpu_and_only_the_first_speaks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before the target is loaded and before the data are read."""
    asked: list[str] = []

    def load(choice: TargetChoice, taps: object) -> None:
        asked.append(choice.device)
        assert console.quiet
        raise EyasError("far enough")

    monkeypatch.setattr(console, "quiet", False)
    monkeypatch.setattr(TargetChoice, "load", load)
    for name, value in {"WORLD_SIZE": "2", "RANK": "1", "LOCAL_RANK": "1"}.items():
        monkeypatch.setenv(name, value)
    told = CliRunner().invoke(app, ["train", str(tmp_path / "a.jsonl"), "--steps", "1", "--device", "cuda"])
    assert str(told.exception) == "far enough" and asked == ["cuda:1"]


def test_a_gpu_that_is_named_is_the_one_that_trains(monkeypatch: pytest.MonkeyPatch) -> None:
    chosen: list[torch.device] = []
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    for device in ("cuda:1", "cuda", "cpu"):
        Workers(device)
    assert chosen == [torch.device("cuda:1")]


def test_frozen_buffers_are_not_sent_around() -> None:
    assert Workers()._accelerator.ddp_handler.broadcast_buffers is False


def test_tensorboard_gets_the_figures(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    target = tiny_target("llama")
    config = CONFIG.model_copy(update={"steps": 4, "evaluations": 2, "eval_tokens": 4})
    train(target, corpus(8), tmp_path / "head", config, features=tmp_path / "f", held_out=2, track=["tensorboard"])
    events = EventAccumulator(str(tmp_path / "head/eyas")).Reload()
    assert [e.step for e in events.Scalars("loss/1")] == [1, 2, 3, 4]
    assert [e.step for e in events.Scalars("tau")] == [2, 4]
    logged = [row["loss"][0] for row in rows(tmp_path / "head") if "loss" in row]
    assert [e.value for e in events.Scalars("loss/1")] == pytest.approx(logged, rel=1e-5)


def test_the_command_and_the_settings_lie_beside_the_head(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target, samples = tiny_target("llama"), corpus(8)
    config = CONFIG.model_copy(update={"steps": 1, "eval_prompts": 0})
    for command in ("eyas train a.jsonl --steps 1", "eyas train a.jsonl --steps 1 --track x"):
        monkeypatch.setattr("sys.argv", command.split())
        train(target, samples, tmp_path / "head", config, features=tmp_path / "f", held_out=2)
    record = json.loads((tmp_path / "head/train.json").read_text())
    assert record["commands"] == ["eyas train a.jsonl --steps 1", "eyas train a.jsonl --steps 1 --track x"]
    assert TrainConfig(**record["config"]) == config
