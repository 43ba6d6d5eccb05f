"""From answers to a head: split, vocabulary, features, start, training. What `eyas train` does, as one function."""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from torch import Tensor

from eyas import machine
from eyas.chat import Sample
from eyas.data.features import read_features, text_key
from eyas.data.fetching import Fetched, OnTheFly, Stored
from eyas.data.store import FeatureStore
from eyas.data.texts import split_for_training
from eyas.decoding.tree import TreeShape
from eyas.errors import EyasError
from eyas.estimate import Consent, admit
from eyas.files import alone_in, write_text
from eyas.heads.config import DRAFT_VOCABULARY, HeadOptions
from eyas.heads.files import tap_ids
from eyas.heads.head import DraftHead
from eyas.heads.start import Start, head_from, new_eagle1_head, new_head, new_medusa_head
from eyas.heads.vocab import choose_vocabulary, count_tokens, coverage
from eyas.locate import locate_head
from eyas.progress import Interrupt, console, progress
from eyas.target import Target
from eyas.training.checkpoint import STATE
from eyas.training.config import TrainConfig
from eyas.training.forecast import reading_forecast, training_forecast
from eyas.training.judge import EngineJudge
from eyas.training.loop import Evaluation, Trainer
from eyas.training.workers import Workers


def train(
    target: Target, samples: Sequence[Sample], out: Path, config: TrainConfig, *, features: Path | None,
    held_out: float = 0.05, max_length: int = 1024, track: Sequence[str] = (), consent: Consent | None = None,
) -> Evaluation:  # fmt: skip
    """Train a drafter for `target` on `samples` and leave the best one in `out`; a run in `out` is taken up where it stopped.

    `features` is the folder of the feature store: what it lacks is read from the target first; None: there is no store, and
    the target reads a text whenever the run comes to it, with the same result. `held_out` is the share (or, from 1 on, the
    number) of texts that the run never sees, so that the head can be measured on them; as many again choose the best head.
    `track` names accelerate's trackers. What a long job will take is measured and said first (`consent`). Under `torchrun`
    every process calls this alike. Raises EyasError for data with nothing to learn from, a job that cannot fit, or when `out`
    holds a run with other settings.
    """
    workers = Workers(target.device, precision=config.precision, shard=config.shard, track=track, out=out)
    console.quiet = not workers.first
    texts = split_for_training(samples, held_out=held_out, max_length=max_length, seed=config.seed)
    if texts.dropped:
        console.print(f"{texts.dropped} texts have no supervised token within {max_length} tokens and are left out")
    return train_on(
        target, texts.learn, texts.choose, out, config, features=features, others=texts.aside, workers=workers, consent=consent
    )  # fmt: skip


def train_on(
    target: Target, learn: list[Sample], choose: list[Sample], out: Path, config: TrainConfig, *, features: Path | None,
    others: Sequence[Sample] = (), workers: Workers | None = None, consent: Consent | None = None,
) -> Evaluation:  # fmt: skip
    """As `train`, on the very texts to `learn` from and to `choose` the best head by.

    A run that is taken up may have begun when some of these were among the `others`.
    """
    workers = workers or Workers(target.device, precision=config.precision, shard=config.shard)
    consent = consent or Consent()
    with alone_in(out) if workers.first else nullcontext():
        if config.drafter != "eagle3":
            target = target.tapped((target.num_layers,))
        with workers.first_alone():
            learn, choose = _settle(out, config, target, [*learn, *choose, *others], learn, choose)
            counts = count_tokens(((s.ids, s.spans) for s in learn), target.vocab_size)
            head = starting_head(target, config, counts)  # one that is refused is so before hours of reading
            learned, chosen = _fetched(features, target, (learn, choose), consent)
        supervised, size = sum(s.supervised for s in learn), len(head.d2t)
        console.print(
            f"{len(learn):,} texts to learn from ({supervised:,} supervised tokens), {len(choose)} to choose by; draft "
            f"vocabulary {size:,} of {target.vocab_size:,} covers {100 * coverage(counts, head.d2t.cpu()):.2f} % of them"
        )
        tree = TreeShape.parse(config.eval_tree)
        judge = EngineJudge.of(target, choose, config.eval_prompts, config.eval_tokens, tree)
        trainer = Trainer(
            head, learned, chosen, config, out, judge=judge if judge.prompts else None, workers=workers,
        )  # fmt: skip
        if trainer.resume():
            console.print(f"going on at step {trainer.step:,}, {trainer.elapsed / 60:.1f} minutes in")
        if trainer.progress < 1 and workers.count == 1:
            admit(training_forecast(trainer, out), consent)
        workers.begin_tracking(_flat(config.model_dump(mode="json")))
        try:
            return trainer.run()
        finally:
            workers.end_tracking()


def starting_head(target: Target, config: TrainConfig, counts: Tensor) -> DraftHead:
    """The head that a run begins with; `counts` int64 [V] of the supervised tokens choose its vocabulary where it is new.

    Raises EyasError when the settings contradict the head to start from.
    """
    size = min(config.draft_vocab_size or DRAFT_VOCABULARY, target.vocab_size)
    if config.drafter == "medusa":
        return new_medusa_head(target, choose_vocabulary(counts, size), config.unroll)
    if config.drafter == "eagle1":
        return new_eagle1_head(target, start="random" if config.init_from == "random" else "warm", seed=config.seed)
    if config.init_from in ("target", "random"):
        start: Start = "warm" if config.init_from == "target" else "random"
        return new_head(target, choose_vocabulary(counts, size), start=start, seed=config.seed, options=config.head)
    if config.head != HeadOptions():
        raise EyasError(f"the head that starts from {config.init_from} has its shape; leave out the settings under 'head'")
    folder = locate_head(config.init_from)
    if config.remap_vocabulary:
        return head_from(folder, target, counts, config.draft_vocab_size, seed=config.seed)
    head = head_from(folder, target)
    if config.draft_vocab_size not in (None, len(head.d2t)):
        raise EyasError(
            f"the head {config.init_from} has a draft vocabulary of {len(head.d2t)}, not {config.draft_vocab_size}; "
            "set remap_vocabulary to choose another"
        )
    return head


def taps_wanted(config: TrainConfig) -> tuple[int, ...] | None:
    """The taps with which the target of a run must be loaded; None: its default ones."""
    if config.init_from in ("target", "random"):
        return config.head.taps
    return tap_ids(locate_head(config.init_from))


def _flat(settings: dict[str, object], prefix: str = "") -> dict[str, object]:
    """Nested settings as one level of dotted names and plain values, as trackers take them."""
    flat: dict[str, object] = {}
    for name, value in settings.items():
        if isinstance(value, dict):
            flat.update(_flat(value, f"{prefix}{name}."))
        else:
            flat[prefix + name] = value if isinstance(value, int | float | str) else str(value)
    return flat


def _settle(
    out: Path, config: TrainConfig, target: Target, given: Sequence[Sample], learn: list[Sample], choose: list[Sample]
) -> tuple[list[Sample], list[Sample]]:
    """The texts of the run in `out`: `learn` and `choose`, noted there with all that decides the run; or, where a run is
    under way, those of the `given` ones that it began with.

    Raises EyasError when that run had other settings or its texts are gone.
    """
    path = out / "train.json"
    command = machine.command_line()
    record: dict[str, Any] = {
        "commands": [command],
        "config": config.model_dump(mode="json"),
        "target": {"fingerprint": target.fingerprint, "weights": target.weights},
        "texts": {"learn": [text_key(s) for s in learn], "choose": [text_key(s) for s in choose]},
    }
    if not (out / STATE).is_file():
        write_text(path, json.dumps(record, indent=1))
        return learn, choose
    try:
        before = json.loads(path.read_text(encoding="utf-8"))
        for part in ("config", "target"):
            for key, value in json.loads(json.dumps(record[part])).items():
                if before[part].get(key) != value:
                    raise EyasError(
                        f"{out} holds a run with {key} {before[part].get(key)}, this one has {value}; "
                        "name another folder, or delete it to begin anew"
                    )
        keys = before["texts"]["learn"], before["texts"]["choose"]
        if before["commands"][-1] != command:
            write_text(path, json.dumps({**before, "commands": [*before["commands"], command]}, indent=1))
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise EyasError(f"{path} cannot be read; delete {out} to begin anew") from error
    here = {text_key(s): s for s in given}
    gone = [key for part in keys for key in part if key not in here]
    if gone:
        raise EyasError(f"{len(gone)} of the texts that the run in {out} began with are not in the data any more")
    return [here[key] for key in keys[0]], [here[key] for key in keys[1]]


def _fetched(features: Path | None, target: Target, parts: Sequence[Sequence[Sample]], consent: Consent) -> list[Fetched]:
    """The features of each of `parts`: from the store in the folder `features`, completed first, or else on the fly."""
    if features is None:
        return [OnTheFly(target, part) for part in parts]
    with FeatureStore(features, target) as store:
        complete(store, target, [s for part in parts for s in part], consent)
    return [Stored(store, [text_key(s) for s in part]) for part in parts]


def complete(store: FeatureStore, target: Target, samples: Sequence[Sample], consent: Consent | None = None) -> None:
    """Read from the target the features that the store lacks."""
    if not store.lacking(samples):
        return
    with store.adding():
        missing = store.lacking(samples)
        if not missing:  # another process has read them meanwhile
            return
        target = target.tapped(store.taps)
        admit(reading_forecast(store, target, missing), consent or Consent())
        missing = store.lacking(missing)
        with progress("features", sum(len(s.ids) for s in missing), "tokens") as meter, Interrupt() as interrupt:
            for sample in missing:
                store.add(read_features(target, sample))
                meter.advance(len(sample.ids))
                if interrupt.asked:
                    store.flush()
                    raise KeyboardInterrupt
        store.flush()
