"""What each of two processes does in `test_distributed`: `torchrun tests/two_processes.py FOLDER`."""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from torch.distributed.tensor import DTensor

from eyas.data.batches import Batch
from eyas.data.features import read_features
from eyas.training.config import TrainConfig
from eyas.training.loop import Trainer
from eyas.training.recipe import train
from eyas.training.workers import Workers
from tests.test_training import CONFIG, corpus
from tests.test_unroll import random_head, some_sample, some_texts
from tests.tiny import VOCAB, tiny_target

MICRO_BATCHES = [[[0], [1]], [[2], [3]], [[1], [0]]]  # of three steps; text 3 has nothing to learn
STEPS = TrainConfig(steps=3, unroll=3, grow_until=0.0, slots_per_batch=30, learning_rate=1e-3, warmup=0.0)


def some_steps(out: Path, config: TrainConfig, micro_batches: list[list[list[int]]]) -> dict[str, torch.Tensor]:
    """Take one step for each of `micro_batches`, saving and resuming in a new trainer before the last; the gradient of the
    first step (`grad.*`) and the weights after the last, whole."""
    target = tiny_target("llama")
    texts = [*some_texts(target), read_features(target, some_sample("nothing to learn", 12, []), VOCAB)]

    def trainer_of() -> Trainer:
        return Trainer(random_head(target), texts, texts, config, out, workers=Workers(shard=config.shard))

    trainer = trainer_of()
    assert not trainer.resume()
    found = gradient(trainer, micro_batches[0])
    for numbers in micro_batches[:-1]:
        trainer._optimise(numbers)
    trainer.save()
    trainer.workers.agree(None)  # the others wait until the state is written
    trainer = trainer_of()
    assert trainer.resume()
    trainer._optimise(micro_batches[-1])
    weights = trainer.workers.head().state_dict()
    return {**found, **{name: tensor.clone() for name, tensor in weights.items()}}


def gradient(trainer: Trainer, numbers: list[list[int]]) -> dict[str, torch.Tensor]:
    mine = numbers[trainer.workers.number :: trainer.workers.count]
    trainer.backward([Batch.of([trainer.texts[n] for n in part]) for part in mine], trainer.config.unroll)
    found = {f"grad.{name}": whole(p.grad) for name, p in trainer.objective.head.named_parameters()}
    trainer.optimizer.zero_grad()
    return found


def whole(tensor: torch.Tensor | None) -> torch.Tensor:
    assert tensor is not None
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).clone()


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    for shard in (False, True):
        config = STEPS.model_copy(update={"shard": shard})
        result = some_steps(folder / f"state-{shard}", config, MICRO_BATCHES)
        if Workers().first:
            torch.save(result, folder / f"result-{shard}.pt")
    short = CONFIG.model_copy(update={"steps": 3, "evaluations": 1, "eval_tokens": 4})
    for out, features in (("head", folder / "features"), ("on the fly", None)):
        train(tiny_target("llama"), corpus(8), folder / out, short, features=features, held_out=2)
