"""The trainer: losses that depend on the text alone, resumed runs that end where straight ones do, bad data refused."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import pytest
import torch

from eyas import estimate
from eyas.chat import Sample
from eyas.data import fetching
from eyas.data.batches import Batch, shuffled_batches
from eyas.data.features import Features, quantise, read_features
from eyas.data.fetching import OnTheFly
from eyas.data.store import FeatureStore
from eyas.decoding.drafters import Eagle3Drafter
from eyas.decoding.engine import Engine, Request
from eyas.decoding.sampling import SamplingParams
from eyas.decoding.tree import TreeShape
from eyas.errors import EyasError
from eyas.heads.files import load_head
from eyas.heads.start import new_head
from eyas.heads.vocab import choose_vocabulary
from eyas.training.acceptance import measure
from eyas.training.config import TrainConfig
from eyas.training.loop import Trainer
from eyas.training.recipe import train
from eyas.training.unroll import loss_masks
from tests.test_unroll import random_head, some_sample, some_texts
from tests.tiny import VOCAB, tiny_target


def gradients(texts: list[list[Features]]) -> tuple[list[float], dict[str, torch.Tensor]]:
    head = random_head(tiny_target("llama"))
    trainer = Trainer(head, some_texts(tiny_target("llama")), [], TrainConfig(steps=1, unroll=4), Path())
    losses, _, _ = trainer.backward([Batch.of(part) for part in texts], 4)
    return losses, {n: p.grad for n, p in head.named_parameters() if p.grad is not None}


def test_batching_does_not_change_loss_or_gradient() -> None:
    a, b, c = some_texts(tiny_target("llama"))
    together, grads = gradients([[a, b, c]])
    for other in ([[c, a, b]], [[a], [b], [c]], [[b, c], [a]]):
        losses, again = gradients(other)
        assert losses == pytest.approx(together, abs=1e-5)
        for name, grad in grads.items():
            assert torch.allclose(again[name], grad, atol=1e-5), name


def test_what_follows_the_last_supervised_token_does_not_change_the_loss() -> None:
    """The counterpart of padding in a layout that has none: a tail that nobody supervises."""
    target = tiny_target("llama")
    sample = some_sample("a", 24, [(9, 20)])
    short = Sample("a", sample.ids[:20], sample.spans)
    tail = Sample("a", [*sample.ids[:20], *([7] * 9)], sample.spans)
    losses = [gradients([[read_features(target, s, VOCAB)]])[0] for s in (short, sample, tail)]
    assert losses[0] == pytest.approx(losses[1], abs=1e-5) and losses[0] == pytest.approx(losses[2], abs=1e-5)


def test_a_fully_masked_sample_gives_zero_loss_and_no_step(tmp_path: Path) -> None:
    target = tiny_target("llama")
    masked = read_features(target, some_sample("m", 12, []), VOCAB)
    losses, grads = gradients([[masked]])
    assert losses == [0.0] * 4 and not grads
    learn = some_texts(target)
    head = random_head(target)
    trainer = Trainer(head, [masked, *learn], learn, TrainConfig(steps=3), tmp_path)
    before = {n: p.clone() for n, p in head.named_parameters()}
    trainer._optimise([[0]])
    assert all(torch.equal(p, before[n]) for n, p in head.named_parameters())
    with pytest.raises(EyasError, match="nothing to learn"):
        Trainer(head, [masked], learn, TrainConfig(steps=3), tmp_path)
    one_token_answers = [read_features(target, some_sample("o", 9, [(8, 9)]), VOCAB)]
    with pytest.raises(EyasError, match="nothing to learn"):  # a draft starts after the first token of an answer
        Trainer(head, one_token_answers, learn, TrainConfig(steps=3), tmp_path)


def test_quantised_taps_are_within_half_a_step() -> None:
    taps = torch.randn(50, 3, 64) * torch.tensor([0.1, 1.0, 300.0])[:, None]
    quantised, scales = quantise(taps)
    assert ((quantised * scales[..., None] - taps).abs() <= scales[..., None] * 0.5001).all()


def corpus(count: int = 24) -> list[Sample]:
    """Answers that the tiny target really wrote."""
    target = tiny_target("llama")
    generator = torch.Generator().manual_seed(3)
    asked = [
        Request(torch.randint(3, VOCAB, (6,), generator=generator).tolist(), SamplingParams(max_new_tokens=24), str(i))
        for i in range(count)
    ]
    results = Engine(target, max_rows=8, max_length=64).generate(asked)
    return [
        Sample(r.id, [*q.ids, *r.ids], [(len(q.ids), len(q.ids) + len(r.ids))]) for q, r in zip(asked, results, strict=True)
    ]


CONFIG = TrainConfig(steps=48, unroll=3, slots_per_batch=120, learning_rate=3e-3, draft_vocab_size=120, evaluations=3)


@pytest.mark.parametrize("kept", [0, 1 << 28])
def test_features_read_on_the_fly_train_the_same_head_without_a_store(
    kept: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target, samples = tiny_target("llama"), corpus(8)
    config = CONFIG.model_copy(update={"steps": 6, "evaluations": 2, "eval_prompts": 0})
    stored = train(target, samples, tmp_path / "a", config, features=tmp_path / "f", held_out=2)
    sizes = [f.stat().st_size for f in (tmp_path / "f").glob("*.safetensors")]
    read = []
    monkeypatch.setattr(OnTheFly.__init__, "__defaults__", (kept,))
    monkeypatch.setattr(fetching, "read_features", lambda *given: read.append(given) or read_features(*given))
    monkeypatch.setattr(estimate, "disk_free", lambda folder: 0 if folder.name == "f" else 10**9)
    assert train(target, samples, tmp_path / "b", config, features=None, held_out=2) == stored
    one, other = weights_of(tmp_path / "a"), weights_of(tmp_path / "b")
    assert sum(sizes) > 0 and all(torch.equal(other[name], tensor) for name, tensor in one.items())
    assert len(read) == 6 if kept else len(read) > 6
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "b", "f"]


def weights_of(folder: Path) -> dict[str, torch.Tensor]:
    return torch.load(folder / "state.pt", weights_only=True)["head"]


def test_training_raises_acceptance_and_a_resumed_run_is_bit_equal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target, samples = tiny_target("llama"), corpus()
    straight = train(target, samples, tmp_path / "a", CONFIG, features=tmp_path / "f", held_out=3)
    rows = [json.loads(line) for line in (tmp_path / "a/log.jsonl").read_text().splitlines()]
    losses = [row["loss"][0] for row in rows if "loss" in row]
    assert len(losses) == CONFIG.steps and sum(losses[-4:]) < 0.9 * sum(losses[:4])
    assert [row["unroll"] for row in rows if "loss" in row][:1] == [1] and len(rows[-2]["loss"]) == 3

    optimise = Trainer._optimise
    calls = []

    def interrupted(self: Trainer, numbers: list[list[int]]) -> object:
        calls.append(1)
        if len(calls) == 9:
            signal.raise_signal(signal.SIGINT)  # Ctrl-C in the middle of a step
        return optimise(self, numbers)

    monkeypatch.setattr(Trainer, "_optimise", interrupted)
    with pytest.raises(KeyboardInterrupt):
        train(target, samples, tmp_path / "b", CONFIG, features=tmp_path / "f", held_out=3)
    monkeypatch.setattr(Trainer, "_optimise", optimise)
    resumed = train(target, samples, tmp_path / "b", CONFIG, features=tmp_path / "f", held_out=3)
    assert resumed == straight
    for name, tensor in weights_of(tmp_path / "a").items():
        assert torch.equal(weights_of(tmp_path / "b")[name], tensor), name
    assert len((tmp_path / "b/log.jsonl").read_text().splitlines()) == len(rows)

    # the trained head serves what it was trained to serve
    head = load_head(tmp_path / "a", target)
    engine = Engine(target, Eagle3Drafter(target, head), tree=TreeShape(3, 4, 10), max_length=64)
    asked = Request(samples[0].ids[:6], SamplingParams(max_new_tokens=24))
    plain = Engine(target, max_length=64).generate([asked])[0]
    assert engine.generate([asked])[0].ids == plain.ids == samples[0].ids[6:]


def test_a_run_with_other_settings_is_not_mixed_in(tmp_path: Path) -> None:
    target, samples = tiny_target("llama"), corpus(10)
    short = CONFIG.model_copy(update={"steps": 2})
    train(target, samples, tmp_path / "a", short, features=tmp_path / "f", held_out=2)
    for changed in (short.model_copy(update={"learning_rate": 1e-4}), short.model_copy(update={"seed": 5})):
        with pytest.raises(EyasError, match="holds a run with"):
            train(target, samples, tmp_path / "a", changed, features=tmp_path / "f", held_out=2)
    more = [*samples, *(Sample(f"new{s.id}", s.ids, s.spans) for s in corpus(14)[10:])]
    log = (tmp_path / "a/log.jsonl").read_text()
    train(target, more, tmp_path / "a", short, features=tmp_path / "f", held_out=2)  # goes on with its own texts
    assert (tmp_path / "a/log.jsonl").read_text() == log
    with pytest.raises(EyasError, match="not in the data any more"):
        train(target, corpus(14)[6:], tmp_path / "a", short, features=tmp_path / "f", held_out=2)
    (tmp_path / "a/state.pt").write_bytes(b"broken")
    with pytest.raises(EyasError, match="damaged"):
        train(target, samples, tmp_path / "a", short, features=tmp_path / "f", held_out=2)


def test_a_run_killed_before_its_first_checkpoint_leaves_no_log_behind(tmp_path: Path) -> None:
    target, samples = tiny_target("llama"), corpus(10)
    (tmp_path / "a").mkdir()
    (tmp_path / "a/log.jsonl").write_text('{"step": 1, "loss": [9.0]}\n' * 7)
    train(target, samples, tmp_path / "a", CONFIG.model_copy(update={"steps": 2}), features=tmp_path / "f", held_out=2)
    rows = [json.loads(line) for line in (tmp_path / "a/log.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows if "loss" in row] == [1, 2]


def test_measured_acceptance_is_that_of_a_greedy_chain() -> None:
    """n-alpha from the unroll equals what the engine accepts when it drafts chains from every position."""
    target = tiny_target("llama")
    head = new_head(target, choose_vocabulary(torch.zeros(VOCAB, dtype=torch.long), VOCAB))
    sample = corpus(1)[0]
    features = read_features(target, sample, 8)
    acceptance = measure(head, [Batch.of([features])], 3)
    drafter = Eagle3Drafter(target, head)
    offered, accepted = [0] * 3, [0] * 3
    start = sample.spans[0][0]
    for t in range(start - 1, len(sample.ids) - 2):  # the draft that follows token t + 1
        drafter.allocate(1, 64, 8)
        ids = torch.tensor([sample.ids])
        logits = drafter.extend(ids[:, 1 : t + 2], features.float_taps[None, : t + 1], torch.tensor([t + 1]))
        for depth in range(min(3, len(sample.ids) - 2 - t)):
            offered[depth] += 1
            token = int(drafter.target_ids[int(logits.argmax())])
            if token != sample.ids[t + 2 + depth]:
                break
            accepted[depth] += 1
            logits = drafter.expand(torch.tensor([[token]]), torch.zeros(1, 1, dtype=torch.long))[0]
    assert acceptance.offered == tuple(offered) and acceptance.accepted == tuple(accepted)


def test_the_feature_store_keeps_resumes_and_notices_damage(tmp_path: Path) -> None:
    target = tiny_target("llama")
    texts = some_texts(target)
    with FeatureStore(tmp_path / "f", target, top_k=VOCAB) as store:
        for text in texts[:2]:
            store.add(text)
    with FeatureStore(tmp_path / "f", target, top_k=VOCAB) as store:
        assert len(store) == 2 and texts[0].key in store and texts[2].key not in store
        store.add(texts[2])
        store.add(texts[0])  # there already
    store = FeatureStore(tmp_path / "f", target, top_k=VOCAB)
    for text in texts:
        back = store[text.key]
        for name in ("ids", "supervised", "taps", "scales", "teacher_ids", "teacher_probs"):
            assert torch.equal(getattr(back, name), getattr(text, name)), name
    with pytest.raises(EyasError, match="made with target"):
        FeatureStore(tmp_path / "f", tiny_target("qwen3"), top_k=VOCAB)
    shard = next((tmp_path / "f").glob("*.safetensors"))
    shard.write_bytes(shard.read_bytes()[:-9] + b"scribbled")
    with pytest.raises(EyasError, match="damaged"):
        FeatureStore(tmp_path / "f", target, top_k=VOCAB)[texts[0].key]


def test_batches_are_a_function_of_seed_and_epoch() -> None:
    lengths = [30, 50, 20, 90, 10, 40]
    first = list(shuffled_batches(lengths, 100, 1, 0))
    assert first == list(shuffled_batches(lengths, 100, 1, 0))
    assert first != list(shuffled_batches(lengths, 100, 1, 1))
    assert sorted(n for batch in first for n in batch) == list(range(6))
    assert all(sum(lengths[n] for n in batch) <= 100 for batch in first)


def test_masks_of_a_text_without_room_are_empty() -> None:
    target = tiny_target("llama")
    tiny = read_features(target, some_sample("t", 2, [(1, 2)]), 4)
    assert int(loss_masks(random_head(target), Batch.of([tiny]), 3).sum()) == 0
