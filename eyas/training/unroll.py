"""Training-time test (arXiv 2503.01840, section 3.2): training unrolls the head on its own states as drafting will.

Step 0 reads the fused taps; step i reads the states that step i - 1 made at the same slots, never detached, together with
the DATA token x[t+1+i] at position t + i. Slots that carry no loss at any step serve as step-0 keys and values only, and a
slot leaves the unroll when nothing more is asked of it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from eyas.data.batches import Batch
from eyas.heads.eagle3 import Eagle3Head
from eyas.training.attention import unroll_attention


class Step(NamedTuple):
    """One step's predictions: `slots` int64 [n] that carry loss, draft `logits` [n, D], the tokens they stand for
    `token_index` int64 [n] (places in `batch.tokens`) and their `teacher_row` int64 [n]."""

    slots: Tensor
    logits: Tensor
    token_index: Tensor
    teacher_row: Tensor


def loss_masks(head: Eagle3Head, batch: Batch, steps: int) -> Tensor:
    """bool [steps, T]: which slot carries loss at which step."""
    return torch.stack([batch.carries_loss(i, head.t2d) for i in range(steps)])


def unroll(head: Eagle3Head, batch: Batch, masks: Tensor) -> Iterator[Step]:
    """Yield the predictions of every step; `masks` bool [steps, T] from `loss_masks` says which are asked for.

    A step that nothing is asked of yields empty logits.
    """
    scale = head.config.head_dim**-0.5
    needed = masks.flip(0).cumsum(0).flip(0) > 0  # [steps, T]: asked for at this step or later
    slots = needed[0].nonzero()[:, 0]  # [n]
    fused = head.fuse(batch.taps)  # [T, h]
    x = head.mix(fused, batch.tokens[batch.place + 1])  # [T, 2h]
    keys, values = head.keys_values(x, batch.positions)  # [T, kv, d]
    states = fused[slots]  # [n, h]
    own: list[tuple[Tensor, Tensor]] = []
    for i in range(len(masks)):
        if i == 0:
            queries = head.queries(x[slots], batch.positions[slots])
        else:
            staying = needed[i, slots]  # [n]
            slots, states = slots[staying], states[staying]
            own = [(k[staying], v[staying]) for k, v in own]
            positions = batch.positions[slots] + i
            x = head.mix(states, batch.tokens[batch.place[slots] + 1 + i])  # [n, 2h]
            own.append(head.keys_values(x, positions))
            queries = head.queries(x, positions)
        if len(slots):
            attended = unroll_attention(queries, keys, values, own, slots, batch.text_slots, scale)
            states = head.finish(states, attended)  # [n, h]
        asked = masks[i, slots]  # [n]
        token_index = batch.place[slots[asked]] + 2 + i
        yield Step(slots[asked], head.logits(states[asked]), token_index, batch.teacher_row[token_index])
