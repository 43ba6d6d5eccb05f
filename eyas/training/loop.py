"""The trainer: batches in, a head out, with its log, its checkpoints and its live figures.

Everything that decides the next step is saved with it (weights, optimiser, order of the data, progress), so an interrupted
run resumed by the same command ends, on the CPU in float32 and counted in steps, with the very weights of the run that
never stopped.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from eyas.data.batches import Batch, shuffled_batches
from eyas.data.features import Features
from eyas.errors import EyasError, why_not_written
from eyas.files import write_text
from eyas.heads.eagle3 import Eagle3Head
from eyas.heads.files import save_head
from eyas.progress import Interrupt, Meter, progress
from eyas.training.acceptance import Acceptance, measure
from eyas.training.checkpoint import load_state, save_state
from eyas.training.config import TrainConfig
from eyas.training.losses import DraftTeacher, soft_cross_entropy
from eyas.training.unroll import loss_masks, unroll

CHECKPOINT_EVERY_S = 60.0


@dataclass
class StepFigures:
    """What one optimiser step did: mean loss per unroll step, share of steps' best tokens that are the teacher's best."""

    losses: list[float]
    accuracy: list[float]
    tokens: int
    grad_norm: float
    skipped: bool


class Trainer:
    """Trains `head` on `texts` (a sequence of features) under `config`; `held_out` texts measure acceptance.

    `out` receives the best head so far (by estimated tau on `held_out`), `log.jsonl` and the state to resume from. Raises
    EyasError when no text has a supervised token to learn.
    """

    def __init__(
        self, head: Eagle3Head, texts: Sequence[Features], held_out: Sequence[Features], config: TrainConfig, out: Path
    ) -> None:
        self.head, self.texts, self.held_out, self.config, self.out = head, texts, held_out, config, out
        self.device = head.d2t.device
        self.lengths = [len(t.ids) - 1 for t in texts]
        self.optimizer = torch.optim.AdamW(
            head.parameters(), lr=config.learning_rate, betas=config.betas, weight_decay=config.weight_decay
        )
        self.step, self.elapsed, self.tokens, self.skipped = 0, 0.0, 0, 0
        self.epoch, self.batch_in_epoch = 0, 0
        self.best: Acceptance | None = None
        self.evaluated = 0
        if not any(bool(Batch.of([t]).carries_loss(0, head.t2d.cpu()).any()) for t in texts):
            raise EyasError("nothing to learn: no text has a supervised token (is the loss mask empty?)")

    # -- the run ----------------------------------------------------------------------------------------------------

    def run(self) -> Acceptance:
        """Train to the end of the budget and return the acceptance of the best head, which lies in `out`.

        An interrupt saves the state after the step in hand and raises KeyboardInterrupt.
        """
        total = self.config.steps or 60 * (self.config.minutes or 0)
        unit = "steps" if self.config.steps else "s"
        saved = time.monotonic()
        with progress("train", total, unit) as meter, Interrupt() as interrupt:
            meter.resume_at(self._done())
            batches = self._batches()
            last = self.best
            while self.progress < 1:
                if interrupt.asked:
                    self.save()
                    raise KeyboardInterrupt
                start = time.monotonic()
                figures = self._optimise([next(batches) for _ in range(self.config.accumulate)])
                self.elapsed += time.monotonic() - start
                self._show(meter, figures, last)
                if self.progress * self.config.evaluations >= self.evaluated + 1 or self.progress >= 1:
                    start = time.monotonic()
                    last = self._evaluate()
                    saved = time.monotonic()
                    self.elapsed += saved - start
                elif time.monotonic() - saved > CHECKPOINT_EVERY_S:
                    self.save()
                    saved = time.monotonic()
        return self.best or self._evaluate()

    @property
    def progress(self) -> float:
        """How much of the budget is used, in [0, 1]."""
        if self.config.steps:
            return min(self.step / self.config.steps, 1.0)
        return min(self.elapsed / (60 * (self.config.minutes or 1)), 1.0)

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
        """One optimiser step over the micro-batches of texts `numbers`."""
        for group in self.optimizer.param_groups:
            group["lr"] = self.config.rate_at(self.progress)
        batches = [Batch.of([self.texts[n] for n in part], self.device) for part in numbers]
        sums, figures = backward(self.head, batches, self.config.unroll_at(self.progress), self.config.step_weight)
        norm = float(torch.nn.utils.clip_grad_norm_(self.head.parameters(), self.config.clip))
        skipped = not norm < float("inf") or sums == 0
        if skipped:
            self.skipped += sums != 0
        else:
            self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.step += 1
        self.tokens += sums
        figures.grad_norm, figures.skipped = norm, skipped
        return figures

    def time_step(self) -> float:
        """Seconds of one optimiser step of full depth, on the first texts; the weights stay as they are."""
        numbers = next(shuffled_batches(self.lengths, self.config.slots_per_batch, self.config.seed, 0))
        start = time.monotonic()
        backward(self.head, [Batch.of([self.texts[n] for n in numbers], self.device)], self.config.unroll, 1.0)
        self.optimizer.zero_grad(set_to_none=True)
        return (time.monotonic() - start) * self.config.accumulate

    # -- what is seen and kept --------------------------------------------------------------------------------------

    def _show(self, meter: Meter, figures: StepFigures, last: Acceptance | None) -> None:
        rate = self.tokens / max(self.elapsed, 1e-9)
        shown = {"loss": f"{figures.losses[0]:.2f}"}
        if last is not None:
            shown["n-alpha"] = " ".join(f"{a:.2f}" for a in last.n_alpha)
            shown["tau~"] = f"{last.tau:.2f}"
        else:
            shown["right"] = " ".join(f"{a:.2f}" for a in figures.accuracy)
        meter.at(self._done(), **shown, **{"tokens/s": f"{rate:,.0f}"})
        self._log(
            loss=figures.losses, accuracy=figures.accuracy, lr=self.config.rate_at(self.progress),
            grad_norm=figures.grad_norm, unroll=len(figures.losses), tokens_per_s=rate, skipped=self.skipped,
        )  # fmt: skip

    def _evaluate(self) -> Acceptance:
        """Measure the held-out texts; the head with the best estimated tau so far is the one that is kept."""
        self.evaluated = int(self.progress * self.config.evaluations)
        self.head.eval()
        batches = (Batch.of(self.held_out[i : i + 8], self.device) for i in range(0, len(self.held_out), 8))
        acceptance = measure(self.head, batches, self.config.unroll)
        self.head.train()
        better = self.best is None or acceptance.tau > self.best.tau
        if better:
            self.best = acceptance
            save_head(self.head, self.out)
        self._log(eval=True, n_alpha=acceptance.n_alpha, tau_estimate=acceptance.tau, best=better)
        self.save()  # so that a kill cannot leave a head in `out` that the state knows nothing of
        return acceptance

    def _log(self, **figures: Any) -> None:
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
        place = {
            name: getattr(self, name)
            for name in (
                "step", "elapsed", "tokens", "skipped", "epoch", "batch_in_epoch", "evaluated"
            )
        }  # fmt: skip
        place["best"] = None if self.best is None else (self.best.offered, self.best.accepted)
        save_state(self.out, {"head": self.head.state_dict(), "optimizer": self.optimizer.state_dict(), "place": place})

    def resume(self) -> bool:
        """Take up the state in `out`, if there is one; its log loses what came after it."""
        state, log = load_state(self.out), self.out / "log.jsonl"
        if state is None:
            log.unlink(missing_ok=True)  # of a run that ended before its first checkpoint
            return False
        self.head.load_state_dict(state["head"])
        self.optimizer.load_state_dict(state["optimizer"])
        best = state["place"].pop("best")
        self.best = None if best is None else Acceptance(*map(tuple, best))
        for name, value in state["place"].items():
            setattr(self, name, value)
        if log.is_file():
            rows = [line for line in log.read_text(encoding="utf-8").splitlines() if line.endswith("}")]
            kept = [line for line in rows if json.loads(line).get("step", self.step + 1) <= self.step]
            write_text(log, "".join(line + "\n" for line in kept))
        return True


def backward(head: Eagle3Head, batches: Sequence[Batch], steps: int, step_weight: float) -> tuple[int, StepFigures]:
    """Add the gradients of one optimiser step over all micro-batches; return how many predictions carried loss.

    Loss = sum over steps i of step_weight^i * mean over the step's loss-bearing slots of ALL `batches` of the soft
    cross-entropy: it depends on neither padding nor how the texts are split into batches.
    """
    masks = [loss_masks(head, batch, steps) for batch in batches]
    counts = torch.stack([m.sum(1) for m in masks]).sum(0).tolist()  # per step, all batches
    losses, right = [0.0] * steps, [0.0] * steps
    for batch, mask in zip(batches, masks, strict=True):
        teacher = DraftTeacher(head, batch.teacher_ids, batch.teacher_probs)
        total: Tensor | None = None
        for i, step in enumerate(unroll(head, batch, mask)):
            if not len(step.slots):
                continue
            ids = teacher.ids[step.teacher_row]  # [n, K]
            loss = soft_cross_entropy(step.logits, ids, teacher.probs[step.teacher_row]).sum() / counts[i]
            weighted = step_weight**i * loss
            total = weighted if total is None else total + weighted
            losses[i] += float(loss.detach())
            right[i] += float((step.logits.detach().argmax(-1) == ids[:, 0]).sum()) / counts[i]
        if total is not None:
            total.backward()
    return sum(counts), StepFigures(losses, right, sum(counts), 0.0, False)
