"""The trainer: batches in, a head out, with its log, its checkpoints and its live figures.

Everything that decides the next step is saved with it (weights, optimiser, order of the data, progress), so an interrupted
run resumed by the same command ends, on the CPU in float32 and counted in steps, with the very weights of the run that
never stopped.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from eyas.data.batches import Batch, shuffled_batches
from eyas.data.features import Features
from eyas.data.fetching import Fetched
from eyas.decoding.stats import Stats
from eyas.errors import EyasError, why_not_written
from eyas.files import write_text
from eyas.heads.files import save_head
from eyas.heads.head import DraftHead
from eyas.progress import Interrupt, Meter, progress
from eyas.training.acceptance import Acceptance, measure
from eyas.training.checkpoint import load_state, save_state
from eyas.training.config import TrainConfig
from eyas.training.objective import Objective
from eyas.training.workers import Workers

CHECKPOINT_EVERY_S = 60.0
EVALUATIONS_SHARE = 0.1  # of the time, at most, in a run that is bounded by time (its last evaluation aside)
_PLACE = ("step", "elapsed", "evaluating", "tokens", "skipped", "epoch", "batch_in_epoch", "evaluated", "without_better")

Judge = Callable[[DraftHead], Stats]


@dataclass(frozen=True)
class StepFigures:
    """What one optimiser step did: mean loss per unroll step, share of steps' best tokens that are the teacher's best, how
    many predictions carried loss, the gradient's norm, and whether the weights were left as they were."""

    losses: list[float]
    accuracy: list[float]
    predictions: int
    grad_norm: float
    skipped: bool


@dataclass(frozen=True)
class Evaluation:
    """A head on held-out texts: `acceptance` of a greedy chain, estimated without decoding; and `tau` as the engine measured
    it when it answered held-out prompts (None where there were none)."""

    acceptance: Acceptance
    tau: float | None

    @property
    def score(self) -> float:
        """What heads are chosen by: the measured tau, else the estimated one."""
        return self.acceptance.tau if self.tau is None else self.tau


class Trainer:
    """Trains `head` on `texts` (a sequence of features) under `config`; `held_out` texts and, where given, the `judge`
    measure its acceptance.

    `out` receives the best head so far, `log.jsonl` and the state to resume from. Raises EyasError when no text has a
    supervised token to learn.
    """

    def __init__(
        self, head: DraftHead, texts: Sequence[Features], held_out: Sequence[Features], config: TrainConfig, out: Path, *,
        judge: Judge | None = None, workers: Workers | None = None,
    ) -> None:  # fmt: skip
        self.texts, self.held_out, self.config, self.out, self.judge = texts, held_out, config, out, judge
        if not any(bool(Batch.of([t]).carries_loss(0, head.t2d.cpu()).any()) for t in texts):
            raise EyasError("nothing to learn: no text has a supervised token (is the loss mask empty?)")
        tokens = texts.lengths if isinstance(texts, Fetched) else [len(t.ids) for t in texts]
        self.lengths = [count - 1 for count in tokens]  # slots
        self.workers = workers or Workers(head.d2t.device, precision=config.precision, shard=config.shard)
        self.objective = Objective(head.train(), config)
        self.optimizer = self.workers.prepare(
            self.objective,
            lambda parameters: torch.optim.AdamW(
                parameters, lr=config.learning_rate, betas=config.betas, weight_decay=config.weight_decay
            ),
        )[1]
        self.device = head.d2t.device  # where the workers have put it
        self.step, self.tokens, self.skipped = 0, 0, 0
        self.elapsed, self.evaluating = 0.0, 0.0  # seconds
        self.epoch, self.batch_in_epoch = 0, 0
        self.best: Evaluation | None = None
        self.evaluated, self.without_better = 0, 0

    # -- the run ----------------------------------------------------------------------------------------------------

    def run(self) -> Evaluation:
        """Train to the end of the budget (or of the patience) and return the evaluation of the best head, which is in `out`.

        An interrupt saves the state after the step in hand and raises KeyboardInterrupt.
        """
        total = self.config.steps or 60 * (self.config.minutes or 0)
        saved = time.monotonic()
        with progress("train", total, "steps" if self.config.steps else "s") as meter, Interrupt() as interrupt:
            meter.resume_at(self._done())
            batches = self._batches()
            last = self.best
            while not self.finished:
                if self.workers.agree(interrupt.asked):
                    self.save()
                    raise KeyboardInterrupt
                start = time.monotonic()
                figures = self._optimise([next(batches) for _ in range(self.config.accumulate * self.workers.count)])
                self._spend(start)
                self._show(meter, figures, last)
                if self._evaluation_is_due():
                    start = time.monotonic()
                    last = self._evaluate()
                    self.evaluating += self._spend(start)
                    saved = time.monotonic()
                elif self.workers.agree(time.monotonic() - saved > CHECKPOINT_EVERY_S):
                    self.save()
                    saved = time.monotonic()
        return self.best or self._evaluate()

    @property
    def progress(self) -> float:
        """How much of the budget is used, in [0, 1]."""
        if self.config.steps:
            return min(self.step / self.config.steps, 1.0)
        return min(self.elapsed / (60 * (self.config.minutes or 1)), 1.0)

    @property
    def finished(self) -> bool:
        """Whether the budget is used up, or too many evaluations have brought no better head."""
        return self.progress >= 1 or (self.config.patience is not None and self.without_better >= self.config.patience)

    def _spend(self, start: float) -> float:
        """Count and return the seconds since `start`, by the first process's clock: progress decides what a step does."""
        seconds: float = self.workers.agree(time.monotonic() - start)
        self.elapsed += seconds
        return seconds

    def _evaluation_is_due(self) -> bool:
        if self.progress >= 1:
            return True
        if self.config.minutes and self.evaluating > EVALUATIONS_SHARE * self.elapsed:
            return False
        return self.progress * self.config.evaluations >= self.evaluated + 1

    def _done(self) -> float:
        return self.step if self.config.steps else self.elapsed

    def _batches(self) -> Iterator[list[int]]:
        """The batches from where the run stands, epoch after epoch."""
        while True:
            order = list(shuffled_batches(self.lengths, self.config.slots_per_batch, self.config.seed, self.epoch))
            while self.batch_in_epoch < len(order):
                self.batch_in_epoch += 1
                yield order[self.batch_in_epoch - 1]
            self.epoch, self.batch_in_epoch = self.epoch + 1, 0

    # -- one step ---------------------------------------------------------------------------------------------------

    def _optimise(self, numbers: list[list[int]]) -> StepFigures:
        """One optimiser step over the micro-batches of texts `numbers`, of which every process takes its share.

        A step without anything to learn, or with a gradient that is not finite, leaves the weights as they are.
        """
        for group in self.optimizer.param_groups:
            group["lr"] = self.config.rate_at(self.progress)
        mine = numbers[self.workers.number :: self.workers.count]
        batches = [self._noised(Batch.of([self.texts[n] for n in part], self.device), at) for at, part in enumerate(mine)]
        losses, right, predictions = self.backward(batches, self.config.unroll_at(self.progress))
        norm = self.workers.clip(self.config.clip) if predictions else 0.0
        finite = math.isfinite(norm)
        if predictions and (finite or self.workers.scales_gradients):
            self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.step += 1
        self.tokens += predictions
        self.skipped += not finite
        return StepFigures(losses, right, predictions, norm, not finite or not predictions)

    def _noised(self, batch: Batch, number: int) -> Batch:
        """Micro-batch `number` of this process with the noise that its place in the run alone decides."""
        if not self.config.feature_noise:
            return batch
        place = (self.config.seed, self.step, self.workers.number, number)
        generator = torch.Generator().manual_seed(hash(place))
        return batch.noised(self.config.feature_noise, generator)

    def backward(self, batches: Sequence[Batch], steps: int) -> tuple[list[float], list[float], int]:
        """Add the gradients of one optimiser step over this process's micro-batches, `steps` of the unroll deep.

        Returns the mean loss and the share of right best tokens per step, and how many predictions carried loss, of all
        processes.
        """
        masks = self.objective.masks(batches, steps)
        counts = self.workers.sum(torch.stack([m.sum(1) for m in masks]).sum(0).float())  # [steps]
        predictions = int(counts.sum())
        figures = counts.new_zeros(2, steps)
        for number, (batch, mask) in enumerate(zip(batches, masks, strict=True)):
            if not predictions:
                break
            with self.workers.computing(last=number == len(batches) - 1):
                part = self.workers.forward(batch, mask, counts)
                self.workers.backward(part.loss)
            figures += torch.stack([part.losses, part.right])
        losses, right = self.workers.sum(figures).tolist()
        return losses, right, predictions

    def time_step(self) -> float:
        """Seconds of one optimiser step of full depth, on the first texts; the weights stay as they are."""
        numbers = next(shuffled_batches(self.lengths, self.config.slots_per_batch, self.config.seed, 0))
        start = time.monotonic()
        self.backward([Batch.of([self.texts[n] for n in numbers], self.device)], self.config.unroll)
        self.optimizer.zero_grad(set_to_none=True)
        return (time.monotonic() - start) * self.config.accumulate

    # -- what is seen and kept --------------------------------------------------------------------------------------

    def _show(self, meter: Meter, figures: StepFigures, last: Evaluation | None) -> None:
        rate = self.tokens / max(self.elapsed, 1e-9)
        shown = {"loss": f"{figures.losses[0]:.2f}"}
        if last is not None:
            shown["n-alpha"] = " ".join(f"{a:.2f}" for a in last.acceptance.n_alpha)
            shown["tau~"] = f"{last.acceptance.tau:.2f}"
            if last.tau is not None:
                shown["tau"] = f"{last.tau:.2f}"
        else:
            shown["right"] = " ".join(f"{a:.2f}" for a in figures.accuracy)
        if self.skipped:
            shown["skipped"] = f"{self.skipped}"
        meter.at(self._done(), **shown, **{"tokens/s": f"{rate:,.0f}"})
        lr = self.config.rate_at(self.progress)
        self._log(
            loss=figures.losses, accuracy=figures.accuracy, lr=lr, grad_norm=figures.grad_norm, unroll=len(figures.losses),
            tokens_per_s=rate, skipped=self.skipped,
        )  # fmt: skip
        by_depth = {f"loss/{i + 1}": loss for i, loss in enumerate(figures.losses)}
        self.workers.track({**by_depth, "lr": lr, "grad_norm": figures.grad_norm, "tokens_per_s": rate}, self.step)

    def _evaluate(self) -> Evaluation:
        """Measure the held-out texts and prompts; the best head so far is the one that is kept."""
        self.evaluated = int(self.progress * self.config.evaluations)
        head = self.workers.head()
        evaluation: Evaluation = self.workers.agree(self._measure(head) if self.workers.first else None)
        better = self.best is None or evaluation.score > self.best.score
        self.without_better = 0 if better else self.without_better + 1
        if better:
            self.best = evaluation
            if self.workers.first:
                save_head(head, self.out)
        acceptance = evaluation.acceptance
        self._log(eval=True, n_alpha=acceptance.n_alpha, tau_estimate=acceptance.tau, tau=evaluation.tau, best=better)
        by_depth = {f"n_alpha/{i + 1}": alpha for i, alpha in enumerate(acceptance.n_alpha)}
        self.workers.track({**by_depth, "tau_estimate": acceptance.tau, "tau": evaluation.score}, self.step)
        self.save()  # so that a kill cannot leave a head in `out` that the state knows nothing of
        return evaluation

    def _measure(self, head: DraftHead) -> Evaluation:
        head.eval()
        batches = (Batch.of(self.held_out[i : i + 8], self.device) for i in range(0, len(self.held_out), 8))
        acceptance = measure(head, batches, self.config.eval_depth or self.config.unroll)
        tau = None if self.judge is None else self.judge(head).tau
        head.train()
        return Evaluation(acceptance, tau)

    def _log(self, **figures: Any) -> None:
        if not self.workers.first:
            return
        row = {"step": self.step, "minutes": self.elapsed / 60, "tokens": self.tokens, **figures}
        try:
            with (self.out / "log.jsonl").open("a", encoding="utf-8") as file:
                file.write(json.dumps(row) + "\n")
        except OSError as error:
            raise EyasError(
                f"cannot write the log in {self.out}: {why_not_written(error)}; run the same command to go on"
            ) from error

    def save(self) -> None:
        """Write everything that decides the next step."""
        place = {name: getattr(self, name) for name in _PLACE}
        best = self.best
        place["best"] = None if best is None else (best.acceptance.offered, best.acceptance.accepted, best.tau)
        head, optimizer = self.workers.head().state_dict(), self.workers.optimizer_state()
        if self.workers.first:
            scaler = self.workers.scaler_state()
            save_state(self.out, {"head": head, "optimizer": optimizer, "place": place, "scaler": scaler})

    def resume(self) -> bool:
        """Take up the state in `out`, if there is one; its log loses what came after it."""
        state, log = load_state(self.out), self.out / "log.jsonl"
        if state is None:
            if self.workers.first:
                log.unlink(missing_ok=True)  # of a run that ended before its first checkpoint
            return False
        self.workers.load_head(state["head"])
        self.workers.load_optimizer(state["optimizer"])
        self.workers.load_scaler(state.get("scaler"))
        best = state["place"].pop("best")
        if best is not None:
            offered, accepted, tau = best
            self.best = Evaluation(Acceptance(tuple(offered), tuple(accepted)), tau)
        for name, value in state["place"].items():
            setattr(self, name, value)
        if log.is_file() and self.workers.first:
            rows = [line for line in log.read_text(encoding="utf-8").splitlines() if line.endswith("}")]
            kept = [line for line in rows if json.loads(line).get("step", self.step + 1) <= self.step]
            write_text(log, "".join(line + "\n" for line in kept))
        return True
