"""Training batches: texts laid end to end without padding, and which slot learns which token at which step.

A text of S tokens has S - 1 slots; slot t pairs the tap at position t with token t + 1. Step i of the unroll predicts token
t + 2 + i from it. Because nothing is padded, a text's loss cannot depend on the texts beside it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from eyas.data.features import Features


@dataclass(frozen=True)
class Batch:
    """Texts end to end: N tokens, T slots (T = N - number of texts), P teacher rows.

    `tokens` int64 [N]; `supervised` bool [N]; `place` int64 [T] is the index in `tokens` of a slot's own token x[t];
    `positions` int64 [T] is t inside the text; `taps` float32 [T, nH]; `text_slots` are the half-open slot ranges of the
    texts; `text_end` int64 [T] is where in `tokens` the slot's text ends; `teacher_ids` int64 and `teacher_probs` float32
    [P, K]; `teacher_row` int64 [N] is the teacher's row for a token, -1 where it has none; `noise` float32 [T, nH], where
    there is any, is added to the taps that the head reads.
    """

    tokens: Tensor
    supervised: Tensor
    place: Tensor
    positions: Tensor
    taps: Tensor
    text_slots: list[tuple[int, int]]
    text_end: Tensor
    teacher_ids: Tensor
    teacher_probs: Tensor
    teacher_row: Tensor
    noise: Tensor | None = None

    @property
    def inputs(self) -> Tensor:
        """What the head reads, float32 [T, nH]: the taps, with the noise."""
        return self.taps if self.noise is None else self.taps + self.noise

    def noised(self, amount: float, generator: torch.Generator) -> Batch:
        """With uniform noise on the taps, as EAGLE-1 trains (reference code): up to `amount` / 2 either way in a text of 512
        tokens, less in a longer one."""
        lengths = torch.cat([torch.full((end - start,), end - start + 1) for start, end in self.text_slots])  # [T]
        noise = torch.rand(self.taps.shape, generator=generator) - 0.5  # [T, nH]
        return replace(self, noise=(noise * amount * (512 / lengths)[:, None]).to(self.taps.device))

    @classmethod
    def of(cls, texts: Sequence[Features], device: torch.device | str = "cpu") -> Batch:
        place, positions, ends, slots, rows = [], [], [], [], []
        tokens_before = slots_before = rows_before = 0
        for text in texts:
            length = len(text.ids)
            place.append(torch.arange(length - 1) + tokens_before)
            positions.append(torch.arange(length - 1))
            ends.append(torch.full((length - 1,), tokens_before + length))
            slots.append((slots_before, slots_before + length - 1))
            taught = text.supervised.clone()
            taught[0] = False  # nothing stands before a first token
            rows.append(torch.where(taught, taught.cumsum(0) - 1 + rows_before, -1))
            tokens_before += length
            slots_before += length - 1
            rows_before += len(text.teacher_ids)
        return cls(
            torch.cat([t.ids for t in texts]).to(device),
            torch.cat([t.supervised for t in texts]).to(device),
            torch.cat(place).to(device),
            torch.cat(positions).to(device),
            torch.cat([t.float_taps for t in texts]).to(device),
            slots,
            torch.cat(ends).to(device),
            torch.cat([t.teacher_ids for t in texts]).long().to(device),
            torch.cat([t.teacher_probs for t in texts]).float().to(device),
            torch.cat(rows).to(device),
        )

    def carries_loss(self, step: int, t2d: Tensor) -> Tensor:
        """bool [T]: the slots that learn a token at `step` of the unroll (0-based).

        The predicted token x[t+2+step] must exist in the same text and be supervised, and so must x[t+1], since no draft
        starts earlier at inference. As in the reference the teacher's best token must lie in the draft vocabulary `t2d`
        bool [V].
        """
        predicted = self.place + 2 + step  # [T]
        inside = predicted < self.text_end
        predicted = predicted.clamp(max=len(self.tokens) - 1)
        draftable = t2d[self.teacher_ids[:, 0]] if len(self.teacher_ids) else t2d[:0]  # [P]
        row = self.teacher_row[predicted]  # [T]
        taught = inside & self.supervised[self.place + 1] & self.supervised[predicted] & (row >= 0)
        if not len(draftable):
            return torch.zeros_like(taught)
        return taught & draftable[row.clamp(min=0)]


def shuffled_batches(lengths: Sequence[int], slots_per_batch: int, seed: int, epoch: int) -> Iterator[list[int]]:
    """The numbers of the texts of each batch of one epoch, in an order that `seed` and `epoch` alone decide.

    A batch holds as many texts as fit `slots_per_batch` slots, at least one.
    """
    generator = torch.Generator().manual_seed(seed * 1_000_003 + epoch)
    batch: list[int] = []
    room = slots_per_batch
    for number in torch.randperm(len(lengths), generator=generator).tolist():
        if batch and lengths[number] > room:
            yield batch
            batch, room = [], slots_per_batch
        batch.append(number)
        room -= lengths[number]
    if batch:
        yield batch
