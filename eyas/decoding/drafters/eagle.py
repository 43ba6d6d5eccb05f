"""The heads that run on their own states, with a KV cache: EAGLE-3, and EAGLE-1, which drafts EAGLE-2's trees as well."""

from __future__ import annotations

from torch import Tensor

from eyas.decoding.cache import SlotView
from eyas.decoding.drafters.cached import CachedDrafter
from eyas.heads.eagle1 import Eagle1Head
from eyas.heads.eagle3 import Eagle3Head
from eyas.heads.head import StateHead
from eyas.kernels.attention import attend
from eyas.kernels.packed import Weights
from eyas.target import LayerShape, Target


class StateDrafter(CachedDrafter):
    """A head for a batch of rows. Slot t of it pairs the target's taps at position t with token t + 1."""

    def __init__(self, target: Target, head: StateHead, *, weights: Weights = "stock") -> None:
        head.config.check_target(target)
        self._weights = weights
        parameter = next(head.parameters())
        self.head = head.packed(weights).eval()
        self.target_ids = head.draft_ids(head.d2t)
        config = head.config
        shape = LayerShape(config.num_key_value_heads, config.head_dim, config.head_dim)
        super().__init__([shape] * len(head.decoder_layers), parameter.dtype, parameter.device)
        self._scale = config.head_dim**-0.5

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.head.config!r}, {self._weights}, {self._dtype})"

    def _fuse(self, taps: Tensor) -> Tensor:
        return self.head.fuse(taps.to(self._dtype))

    def _step(self, states: Tensor, tokens: Tensor, positions: Tensor, view: SlotView, mask: Tensor) -> Tensor:
        head = self.head
        for layer in range(len(head.decoder_layers)):
            x, residual = head.read(layer, states, tokens)
            keys, values = head.keys_values(layer, x, positions)
            keys, values = view.append(layer, keys.transpose(1, 2), values.transpose(1, 2))
            queries = head.queries(layer, x, positions).transpose(1, 2)  # [B, heads, Q, head_dim]
            states = head.finish(layer, residual, attend(queries, keys, values, mask[:, None], self._scale))
        return head.hand_on(states)

    def _logits(self, states: Tensor) -> Tensor:
        return self.head.logits(states)


class Eagle3Drafter(StateDrafter):
    """An EAGLE-3 head."""

    def __init__(self, target: Target, head: Eagle3Head, *, weights: Weights = "stock") -> None:
        super().__init__(target, head, weights=weights)


class Eagle1Drafter(StateDrafter):
    """An EAGLE-1 head: its logits are the target's own projection of predicted features, as the target packs it."""

    def __init__(self, target: Target, head: Eagle1Head, *, weights: Weights = "stock") -> None:
        super().__init__(target, head, weights=weights)
        self._target = target

    def _logits(self, states: Tensor) -> Tensor:
        return self._target.logits(states.to(self._target.dtype))
