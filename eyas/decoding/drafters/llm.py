"""A small independent LLM as the drafter: speculative decoding as first published (Leviathan et al., arXiv 2211.17192)."""

from __future__ import annotations

import torch
from torch import Tensor

from eyas.decoding.cache import SlotView
from eyas.decoding.drafters.cached import CachedDrafter
from eyas.errors import EyasError
from eyas.target import Target


class LLMDrafter(CachedDrafter):
    """`model` drafts for `target`. It reads tokens alone, so its cache holds one entry more than there are positions.

    Raises EyasError when the two have not the same vocabulary.
    """

    def __init__(self, target: Target, model: Target) -> None:
        check_vocabulary(target, model)
        super().__init__(model.layer_shapes, model.dtype, model.device)
        self.model = model
        self.target_ids = torch.arange(min(model.vocab_size, target.vocab_size), device=target.device)

    def __repr__(self) -> str:
        return f"LLMDrafter({self.model.fingerprint}, {self.model.weights}, {self.model.dtype})"

    def allocate(self, rows: int, length: int, scratch: int) -> int:
        if length - 1 > self.model.max_length:  # the last position is never read
            raise EyasError(
                f"the small LLM '{self.model.name}' holds texts of {self.model.max_length} tokens, the engine's have up to "
                f"{length - 1}; lower the maximum length"
            )
        return super().allocate(rows, length + 1, scratch)

    def begin(self, row: int, first: int, source: int, count: int) -> None:
        self.cache.share(source, row, count + 1 if count else 0)
        if not count:
            self.prefill(row, torch.tensor([first], device=self.model.device), torch.empty(1, 0))

    def _fuse(self, taps: Tensor) -> Tensor:
        return taps  # not read

    def _step(self, states: Tensor, tokens: Tensor, positions: Tensor, view: SlotView, mask: Tensor) -> Tensor:
        keys = self._key_positions(len(tokens), view.end)
        return self.model.forward(tokens, positions, view, mask[:, None], keys).hidden

    def _logits(self, states: Tensor) -> Tensor:
        return self.model.logits(states)[..., : len(self.target_ids)]


def check_vocabulary(target: Target, model: Target) -> None:
    """Raise EyasError when a token of `model` is not the same token of `target`."""
    ours, theirs = target.tokenizer.get_vocab(), model.tokenizer.get_vocab()
    if ours == theirs:
        return
    differing = sum(ours.get(token) != number for token, number in theirs.items())
    raise EyasError(
        f"the small LLM '{model.name}' cannot draft for '{target.name}': their vocabularies differ "
        f"({len(theirs)} and {len(ours)} tokens, {differing} of them not the target's); choose one of the same family"
    )
