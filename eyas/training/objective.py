"""What training minimises, as a module of its own: distribution is applied from outside, by wrapping it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from eyas.data.batches import Batch
from eyas.errors import EyasError
from eyas.heads.config import HeadConfig
from eyas.heads.head import DraftHead, StateHead
from eyas.training.config import TrainConfig
from eyas.training.losses import DraftTeacher, loss_function
from eyas.training.unroll import Step, loss_masks, predictions


class Part(NamedTuple):
    """One micro-batch's part in an optimiser step: its `loss` [], and per step of the unroll its part in the mean loss,
    `losses` [K], and in the share of best tokens that are the teacher's best, `right` [K] (both detached)."""

    loss: Tensor
    losses: Tensor
    right: Tensor


class Objective(nn.Module):
    """The loss of a head's unroll under `config`.

    Loss = sum over steps i of weight_i * mean over the step's loss-bearing slots of ALL micro-batches of an optimiser step,
    so it depends on neither padding nor how the texts are split into batches. With `feature_weight` the state of step i at
    slot t is also drawn to the last tap of slot t+1+i, in whose place it is read next (EAGLE-1, smooth L1).

    Raises EyasError when the feature loss is asked of a head of another width than its target's.
    """

    def __init__(self, head: DraftHead, config: TrainConfig) -> None:
        super().__init__()
        self.head, self.config = head, config
        self.loss = loss_function(config.loss, lk_decay=config.lk_decay)
        if config.compile:  # what is elementwise over many values; attention's shapes change with every text
            self.loss = torch.compile(self.loss, dynamic=True)
            for layer in head.decoder_layers if isinstance(head, StateHead) else ():
                layer.mlp.compile(dynamic=True)
        narrow = isinstance(head.config, HeadConfig) and head.config.hidden_size != head.config.target_hidden_size
        if config.feature_weight and narrow:
            raise EyasError("the feature loss compares states with taps: leave feature_weight at 0 for a head of another width")

    def masks(self, batches: Sequence[Batch], steps: int) -> list[Tensor]:
        """bool [steps, T] of every batch: which slot carries loss at which step."""
        return [loss_masks(self.head, batch, steps) for batch in batches]

    def forward(self, batch: Batch, masks: Tensor, counts: Tensor) -> Part:
        """The part of `batch`, whose slots `masks` bool [steps, T] carry loss; `counts` float [steps] are the loss-bearing
        slots of the whole optimiser step."""
        losses, right = torch.zeros_like(counts), torch.zeros_like(counts)
        teacher = DraftTeacher(self.head, batch.teacher_ids, batch.teacher_probs)
        parts = []
        for i, step in enumerate(predictions(self.head, batch, masks)):
            if not len(step.slots):
                continue
            rows = teacher.rows(step.teacher_row)
            loss = self.loss(step.logits, rows).sum() / counts[i]
            right[i] = (step.logits.detach().argmax(-1) == rows.ids[:, 0]).sum() / counts[i]
            losses[i] = loss.detach()
            if self.config.feature_weight:
                loss = loss + self.config.feature_weight * self._feature_loss(batch, step, i) / counts[i]
            parts.append(self.config.step_weights[i] * loss)
        if not parts:  # other processes wait for every parameter's gradient, be it zero
            parts = [p.sum() * 0 for p in self.head.parameters()]
        return Part(torch.stack(parts).sum(), losses, right)

    def _feature_loss(self, batch: Batch, step: Step, i: int) -> Tensor:
        width = step.states.shape[-1]
        feature = batch.taps[step.slots + 1 + i, -width:]  # [n, H]: a token to predict at t+2+i means a slot at t+1+i
        return F.smooth_l1_loss(step.states.float(), feature, reduction="none").mean(-1).sum()
