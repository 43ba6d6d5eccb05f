"""The trainer with EAGLE-1's and Medusa's objectives: each against an eager reading of its paper, and resumed bit for bit."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from eyas.data.batches import Batch
from eyas.data.features import read_features
from eyas.errors import EyasError
from eyas.heads.files import load_any_head
from eyas.training.acceptance import measure
from eyas.training.config import TrainConfig
from eyas.training.loop import Trainer
from eyas.training.objective import Objective
from eyas.training.recipe import train
from eyas.training.settings import read_train_config
from tests.kinds import eagle1_head, final, medusa_head
from tests.test_training import corpus, weights_of
from tests.test_unroll import some_texts
from tests.tiny import VOCAB, tiny_target

SETTINGS = {
    "steps": 30,
    "slots_per_batch": 120,
    "learning_rate": 3e-3,
    "evaluations": 2,
    "eval_tree": "2x2x3",
    "eval_tokens": 8,
}


def config_of(drafter: str, **more: object) -> TrainConfig:
    return TrainConfig.model_validate({**SETTINGS, "drafter": drafter, **more})


def test_eagle1_learns_its_features_and_a_tenth_of_the_tokens() -> None:
    target = final(tiny_target("llama"))
    head, config = eagle1_head(target, spread=0.05), config_of("eagle1")
    batch = Batch.of([some_texts(target)[0]])
    objective = Objective(head, config)
    masks = objective.masks([batch], 1)[0]
    part = objective(batch, masks, masks.sum(1).float())

    slots = masks[0].nonzero()[:, 0]
    x = head.fc(torch.cat([head.embedding[batch.tokens[1:]], batch.taps], -1))  # [T, h]: f[t] beside x[t+1]
    layer, positions = head.decoder_layers[0], torch.arange(len(x))
    q, (k, v) = head.queries(0, x, positions), head.keys_values(0, x, positions)
    attended = F.scaled_dot_product_attention(
        q.transpose(0, 1), k.transpose(0, 1), v.transpose(0, 1), is_causal=True, enable_gqa=True
    ).transpose(0, 1)
    s = x + layer.self_attn.o_proj(attended.flatten(1))
    predicted = s + layer.mlp(layer.post_attention_layernorm(s))  # [T, h]: of f[t+1]
    feature = F.smooth_l1_loss(predicted[slots], batch.taps[slots + 1])
    p = target.logits(batch.taps[slots + 1]).softmax(-1)
    tokens = -(p * (predicted[slots] @ target.lm_head_weight.T).log_softmax(-1)).sum(-1).mean()
    assert torch.allclose(part.loss, feature + 0.1 * tokens, rtol=2e-3)  # the store has its features in 8 bits


def test_medusas_heads_learn_the_token_that_each_stands_for() -> None:
    target = final(tiny_target("llama"))
    head, config = medusa_head(target, heads=3, vocabulary=VOCAB), config_of("medusa", unroll=3, step_weight=0.8)
    texts = some_texts(target)
    objective = Objective(head, config)
    masks = objective.masks([Batch.of(texts)], 3)[0]
    part = objective(Batch.of(texts), masks, masks.sum(1).float())
    wanted = 0.0
    for number in range(3):
        losses = []
        for text in texts:
            best = target.logits(target.read(text.ids[None]).hidden)[0].argmax(-1)  # [S]: the teacher of token t + 1
            for t in range(len(text.ids) - 2 - number):
                told = t + 2 + number
                if text.supervised[told] and text.supervised[t + 1]:
                    losses.append(F.cross_entropy(head.logits(number, text.float_taps[t]), best[told - 1]))
        wanted += 0.8**number * float(torch.stack(losses).detach().mean())
    assert float(part.loss.detach()) == pytest.approx(wanted, rel=1e-4)


def test_noise_is_uniform_and_only_in_what_the_head_reads() -> None:
    batch = Batch.of(some_texts(tiny_target("llama")))
    noised = batch.noised(0.2, torch.Generator().manual_seed(0))
    assert torch.equal(noised.taps, batch.taps) and batch.inputs is batch.taps
    noise = noised.inputs - batch.taps
    for start, end in batch.text_slots:
        widest = 0.1 * 512 / (end - start + 1)
        assert 0.97 * widest < float(noise[start:end].abs().max()) <= widest * 1.0001


@pytest.mark.parametrize("drafter", ["eagle1", "medusa"])
def test_training_raises_acceptance_and_a_resumed_run_is_bit_equal(
    drafter: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target, samples, config = tiny_target("llama"), corpus(16), config_of(drafter)
    reached = train(target, samples, tmp_path / "a", config, features=tmp_path / "f", held_out=3)
    head = load_any_head(tmp_path / "a", target)
    texts = [read_features(final(target), s) for s in samples]
    untrained = train(
        target, samples, tmp_path / "b", config_of(drafter, steps=1, learning_rate=1e-9), features=tmp_path / "f", held_out=3
    )
    assert reached.tau is not None and len(reached.acceptance.n_alpha) == (config.eval_depth or config.unroll)
    trained = measure(head, [Batch.of(texts)], 3)
    fresh = measure(load_any_head(tmp_path / "b", target), [Batch.of(texts)], 3)
    assert trained.n_alpha[0] > fresh.n_alpha[0] + 0.02 and untrained.acceptance != reached.acceptance

    optimise, calls = Trainer._optimise, []

    def interrupted(self: Trainer, numbers: list[list[int]]) -> object:
        calls.append(1)
        if len(calls) == 9:
            signal.raise_signal(signal.SIGINT)
        return optimise(self, numbers)

    monkeypatch.setattr(Trainer, "_optimise", interrupted)
    with pytest.raises(KeyboardInterrupt):
        train(target, samples, tmp_path / "c", config, features=tmp_path / "f", held_out=3)
    train(target, samples, tmp_path / "c", config, features=tmp_path / "f", held_out=3)
    straight, resumed = weights_of(tmp_path / "a"), weights_of(tmp_path / "c")
    assert all(torch.equal(tensor, resumed[name]) for name, tensor in straight.items())


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"drafter": "eagle1", "draft_vocab_size": 50}, "drafts the whole vocabulary"),
        ({"drafter": "eagle1", "init_from": "runs/head"}, "starts from target or random only"),
        ({"drafter": "medusa", "init_from": "random"}, "start from the target's projection"),
        ({"drafter": "medusa", "feature_weight": 1.0}, "predict no features"),
        ({"drafter": "medusa", "unroll": 2}, "no deeper than 2"),
        ({"drafter": "eagle4"}, "drafter"),
    ],
)
def test_settings_that_a_kind_of_drafter_has_not_are_refused(given: dict[str, object], told: str) -> None:
    with pytest.raises(EyasError, match=told):
        read_train_config(None, [], {"steps": 3, **given})
