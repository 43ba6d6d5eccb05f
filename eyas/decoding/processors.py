"""What a request does to the target's logits before a token is chosen: penalties, bias, a least length.

A processor follows one text: it sees every token as it is chosen, so that inside a draft tree it counts along the path that
the walk takes, exactly as plain decoding counts. For the drafter's candidates it is asked about the state before the round.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Protocol

import torch
from torch import Tensor


class Processor(Protocol):
    """Changes the logits of one text."""

    def apply(self, logits: Tensor, ids: Tensor, ahead: int) -> Tensor:
        """Logits float32 [..., n] of the tokens `ids` int64 [n], `ahead` tokens after those seen, as they shall be."""

    def see(self, token: int) -> None:
        """The text goes on with `token`."""


class LogitBias:
    """Adds a number to the logits of some tokens (OpenAI's `logit_bias`)."""

    def __init__(self, bias: Mapping[int, float], vocab_size: int) -> None:
        self._bias = torch.zeros(vocab_size)  # [V]
        self._bias[list(bias)] = torch.tensor(list(bias.values()))

    def apply(self, logits: Tensor, ids: Tensor, ahead: int) -> Tensor:
        return logits + self._bias.to(logits.device)[ids]

    def see(self, token: int) -> None:
        pass


class Penalties:
    """Makes tokens that occurred less likely.

    Repetition (Keskar et al. 2019, as in transformers): logits of tokens of the prompt or the answer are divided by
    `repetition` if positive, else multiplied. Presence and frequency (as in OpenAI's API): tokens of the answer lose
    `presence` once and `frequency` per occurrence.
    """

    def __init__(
        self, prompt: Iterable[int], vocab_size: int, *, repetition: float, presence: float, frequency: float
    ) -> None:  # fmt: skip
        self._repetition, self._presence, self._frequency = repetition, presence, frequency
        self._counts = torch.zeros(vocab_size)  # [V], in the answer
        self._seen = torch.zeros(vocab_size, dtype=torch.bool)  # [V], in prompt or answer
        self._seen[list(prompt)] = True

    def apply(self, logits: Tensor, ids: Tensor, ahead: int) -> Tensor:
        counts, seen = self._counts.to(logits.device)[ids], self._seen.to(logits.device)[ids]  # [n]
        repeated = torch.where(logits > 0, logits / self._repetition, logits * self._repetition)
        logits = torch.where(seen, repeated, logits)
        return logits - self._presence * (counts > 0) - self._frequency * counts

    def see(self, token: int) -> None:
        self._counts[token] += 1
        self._seen[token] = True


class LeastLength:
    """Forbids the ids that end a text until it has `least` tokens."""

    def __init__(self, least: int, eos_ids: Iterable[int], vocab_size: int) -> None:
        self._left = least
        self._ends = torch.zeros(vocab_size, dtype=torch.bool)  # [V]
        self._ends[list(eos_ids)] = True

    def apply(self, logits: Tensor, ids: Tensor, ahead: int) -> Tensor:
        if self._left <= ahead:
            return logits
        return logits.masked_fill(self._ends.to(logits.device)[ids], float("-inf"))

    def see(self, token: int) -> None:
        self._left -= 1
