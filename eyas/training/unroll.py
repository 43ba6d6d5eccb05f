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
from eyas.heads.head import DraftHead, StateHead
from eyas.heads.medusa import MedusaHead
from eyas.training.attention import unroll_attention


class Step(NamedTuple):
    """One step's predictions: `slots` int64 [n] that carry loss, the `states` [n, h] they hand on, draft `logits` [n, D], the
    tokens they stand for `token_index` int64 [n] (places in `batch.tokens`) and their `teacher_row` int64 [n]."""

    slots: Tensor
    states: Tensor
    logits: Tensor
    token_index: Tensor
    teacher_row: Tensor


class LayerMemory:
    """What one layer's queries attend over: step 0's keys and values of all slots, and of each later step those that it made
    at the slots still in the unroll."""

    def __init__(self, head: StateHead, batch: Batch, keys: Tensor, values: Tensor) -> None:
        self.text_slots, self.scale = batch.text_slots, head.config.head_dim**-0.5
        self.keys, self.values = keys, values  # [T, kv, d]
        self.own: list[tuple[Tensor, Tensor]] = []  # a step's [n, kv, d]

    def keep(self, staying: Tensor) -> None:
        """Forget the slots that leave the unroll; `staying` bool [n]."""
        self.own = [(k[staying], v[staying]) for k, v in self.own]

    def attend(self, queries: Tensor, slots: Tensor) -> Tensor:
        """Attend from `slots` int64 [n] with `queries` [n, heads, d] -> [n, heads, d]."""
        if not len(slots):
            return queries
        return unroll_attention(queries, self.keys, self.values, self.own, slots, self.text_slots, self.scale)


def loss_masks(head: DraftHead, batch: Batch, steps: int) -> Tensor:
    """bool [steps, T]: which slot carries loss at which step."""
    return torch.stack([batch.carries_loss(i, head.t2d) for i in range(steps)])


def predictions(head: DraftHead, batch: Batch, masks: Tensor) -> Iterator[Step]:
    """What `head` predicts at every step of drafting; `masks` bool [steps, T] from `loss_masks` says which are asked for.

    A step that nothing is asked of yields empty logits. Medusa's head i stands for step i: it has no steps of its own.
    """
    if isinstance(head, StateHead):
        yield from unroll(head, batch, masks)
        return
    assert isinstance(head, MedusaHead)
    for i, asked in enumerate(masks):
        slots = asked.nonzero()[:, 0]  # [n]
        states = batch.inputs[slots]  # [n, H]
        yield _step(batch, slots, states, head.logits(i, states), i)


def unroll(head: StateHead, batch: Batch, masks: Tensor) -> Iterator[Step]:
    """The predictions of a head that runs on its own states."""
    needed = masks.flip(0).cumsum(0).flip(0) > 0  # [steps, T]: asked for at this step or later
    slots = needed[0].nonzero()[:, 0]  # [n]
    states, memories = _first_step(head, batch, slots)
    for i in range(len(masks)):
        if i:
            staying = needed[i, slots]  # [n]
            slots, states = slots[staying], states[staying]
            positions, tokens = batch.positions[slots] + i, batch.tokens[batch.place[slots] + 1 + i]
            for layer, memory in enumerate(memories):
                memory.keep(staying)
                x, residual = head.read(layer, states, tokens)
                memory.own.append(head.keys_values(layer, x, positions))
                states = head.finish(layer, residual, memory.attend(head.queries(layer, x, positions), slots))
            states = head.hand_on(states)
        asked = masks[i, slots]  # [n]
        yield _step(batch, slots[asked], states[asked], head.logits(states[asked]), i)


def _step(batch: Batch, slots: Tensor, states: Tensor, logits: Tensor, number: int) -> Step:
    token_index = batch.place[slots] + 2 + number
    return Step(slots, states, logits, token_index, batch.teacher_row[token_index])


def _first_step(head: StateHead, batch: Batch, slots: Tensor) -> tuple[Tensor, list[LayerMemory]]:
    """Step 0: the states [n, h] handed on at `slots`, and what each layer's later queries attend over.

    Every slot is a key of every layer, so all but the last layer run over all slots; the last one's queries do not.
    """
    everywhere = torch.arange(len(batch.place), device=slots.device)  # [T]
    states, tokens = head.fuse(batch.inputs), batch.tokens[batch.place + 1]  # [T, h], [T]
    memories = []
    for layer in range(len(head.decoder_layers)):
        x, residual = head.read(layer, states, tokens)
        memory = LayerMemory(head, batch, *head.keys_values(layer, x, batch.positions))
        asking = slots if layer == len(head.decoder_layers) - 1 else everywhere
        queries = head.queries(layer, x[asking], batch.positions[asking])
        states = head.finish(layer, residual[asking], memory.attend(queries, asking))
        memories.append(memory)
    return head.hand_on(states), memories
