"""What every draft head shares: its vocabulary, and, where it runs on its own states, how training and decoding drive it.

Training and decoding share these functions; they differ only in what the queries attend over, so neither has a second
implementation. T below is any run of leading dimensions: [B, Q] in decoding, [slots] in training.
"""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from typing import NamedTuple, Self

import torch
from torch import Tensor, nn

from eyas.heads.config import LayerConfig, TargetedConfig
from eyas.heads.layer import DraftLayer
from eyas.heads.rope import inverse_frequencies
from eyas.kernels.packed import Weights, pack_linears


class DraftHead(nn.Module):
    """A network that drafts for one target, in a vocabulary of its own.

    `d2t` int64 [D] holds OFFSETS: draft id i means target id i + d2t[i]; `t2d` bool [V] marks the target ids the head can
    draft. `tap_ids` are the target's states that it reads.
    """

    config: TargetedConfig
    d2t: Tensor
    t2d: Tensor

    def __init__(self, config: TargetedConfig, d2t: Tensor, *, stored_maps: bool = True) -> None:
        super().__init__()
        self.config = config
        self.register_buffer("d2t", d2t, persistent=stored_maps)
        t2d = torch.zeros(config.vocab_size, dtype=torch.bool, device=d2t.device)
        t2d[self.draft_ids(d2t)] = True
        self.register_buffer("t2d", t2d, persistent=stored_maps)

    @staticmethod
    def draft_ids(d2t: Tensor) -> Tensor:
        """The target ids int64 [D] behind the offsets `d2t`."""
        return torch.arange(len(d2t), device=d2t.device) + d2t

    def packed(self, weights: Weights) -> Self:
        """The head with its products packed: a copy, so that this one can still be trained and saved, which shares what it has
        from the target; itself for "stock"."""
        if weights == "stock":
            return self
        shared = {id(tensor): tensor for name, tensor in self.named_buffers() if name.startswith("target_")}
        head = copy.deepcopy(self, shared)
        pack_linears(head, weights)
        return head


class Reading(NamedTuple):
    """What a layer works on: `x` [T, width], which q, k and v read, and the `residual` [T, h] that attention is added to."""

    x: Tensor
    residual: Tensor


class StateHead(DraftHead, ABC):
    """A head that runs on its own states: `fuse`, then per step and layer `read`, `queries`, `keys_values`, attention,
    `finish`; at the end of a step `hand_on` and `logits`.

    `embedding` [V, h] is the target's own, frozen and not a parameter; a head of another width than its target has one of
    its own.
    """

    config: LayerConfig
    inverse_frequencies: Tensor
    target_embedding: Tensor

    def __init__(self, config: LayerConfig, embedding: Tensor, d2t: Tensor, *, stored_maps: bool = True) -> None:
        """`embedding` [V, H] is the target's, shared unless the head has its own."""
        super().__init__(config, d2t, stored_maps=stored_maps)
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size) if config.own_embedding else None
        if self.embed_tokens is None:
            self.register_buffer("target_embedding", embedding.detach(), persistent=False)
        frequencies = inverse_frequencies(config.rope, config.head_dim).to(embedding.device)
        self.register_buffer("inverse_frequencies", frequencies, persistent=False)

    @property
    def embedding(self) -> Tensor:
        """The token embedding [V, h] that the head reads."""
        return self.target_embedding if self.embed_tokens is None else self.embed_tokens.weight

    @property
    @abstractmethod
    def decoder_layers(self) -> list[DraftLayer]:
        """The layers in their order."""

    @abstractmethod
    def fuse(self, taps: Tensor) -> Tensor:
        """The taps side by side [T, nH] -> step-0 states [T, h]."""

    @abstractmethod
    def read(self, layer: int, states: Tensor, tokens: Tensor) -> Reading:
        """What a layer makes of `states` [T, h] and, the first one, of `tokens` int64 [T]."""

    def queries(self, layer: int, x: Tensor, positions: Tensor) -> Tensor:
        """Rotated queries [T, heads, head_dim] of `x` (from `read`) at `positions` int64 [T]."""
        return self.decoder_layers[layer].queries(x, positions, self.inverse_frequencies)

    def keys_values(self, layer: int, x: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Rotated keys and values [T, kv_heads, head_dim] of `x` (from `read`) at `positions` int64 [T]."""
        return self.decoder_layers[layer].keys_values(x, positions, self.inverse_frequencies)

    def finish(self, layer: int, residual: Tensor, attended: Tensor) -> Tensor:
        """The rest of a layer: `attended` [T, heads, head_dim] joins the `residual` [T, h] (from `read`) -> states [T, h]."""
        return self.decoder_layers[layer].finish(residual, attended)

    def hand_on(self, states: Tensor) -> Tensor:
        """The state [T, h] that the next step reads, from the last layer's `states`."""
        return states

    @abstractmethod
    def logits(self, handed_on: Tensor) -> Tensor:
        """Draft logits [T, D] of what `hand_on` gave [T, h]."""
