"""How a token is chosen from the target's logits: one rule for plain and speculative decoding, any batch, any tree.

Order: divide by temperature, keep top-k, keep top-p, keep min-p, then token = argmax(logits + gumbel(seed, index)).
Temperature 0 is the plain argmax.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from eyas.decoding.noise import gumbel, noise_key
from eyas.errors import EyasError


@dataclass(frozen=True)
class SamplingParams:
    """What a request asks of its answer. `max_new_tokens` counts the EOS; `sample` numbers several answers of one seed.

    `top_k` 0, `top_p` 1 and `min_p` 0 keep everything. A `stop` string ends the text before it, a token of `stop_ids` after
    it.
    """

    max_new_tokens: int = 256
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int = 0
    sample: int = 0
    stop: tuple[str, ...] = ()
    stop_ids: tuple[int, ...] = ()
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        bounds = {
            "max_new_tokens": (self.max_new_tokens >= 1, "at least 1"),
            "temperature": (self.temperature >= 0, "0 or more"),
            "top_p": (0 < self.top_p <= 1, "in (0, 1]"),
            "top_k": (self.top_k >= 0, "0 or more"),
            "min_p": (0 <= self.min_p < 1, "in [0, 1)"),
            "stop": (all(self.stop), "non-empty strings"),
        }
        for name, (good, wanted) in bounds.items():
            if not good:
                raise EyasError(f"{name} must be {wanted}, not {getattr(self, name)!r}")


class BatchSampler:
    """The choices of a batch of rows; rows keep their own parameters, and none sees another."""

    def __init__(self, params: Sequence[SamplingParams], device: torch.device | str = "cpu") -> None:
        self.params = params
        self.device = torch.device(device)
        self.greedy = all(p.temperature == 0 for p in params)
        column = [[max(p.temperature, 1e-6), p.top_p, p.min_p] for p in params]
        table = torch.tensor(column, dtype=torch.float32, device=device)  # [B, 3]
        self._temperature, self._top_p, self._min_p = table[:, :1], table[:, 1:2], table[:, 2:]  # each [B, 1]
        self._top_k = torch.tensor([[p.top_k] for p in params], device=device)  # [B, 1]
        self._sampled = torch.tensor([p.temperature > 0 for p in params], device=device)  # [B]
        self._filters = any(p.temperature > 0 and (p.top_k or p.top_p < 1 or p.min_p) for p in params)

    def keys(self, indices: Sequence[int]) -> Tensor:
        """The noise keys int32 [B, 2] of output index `indices[b]` in every row."""
        pairs = [noise_key(p.seed, p.sample, i) for p, i in zip(self.params, indices, strict=True)]
        return torch.tensor(pairs, dtype=torch.int32, device=self.device)

    def choose(self, logits: Tensor, indices: Sequence[int]) -> Tensor:
        """The token int64 [B] that each row takes at output index `indices[b]` given float32 `logits` [B, V]."""
        best = logits.argmax(-1)  # [B]
        if self.greedy:
            return best
        scores = self.filtered(logits)
        ids = torch.arange(logits.shape[-1], device=logits.device)
        drawn = (scores + gumbel(self.keys(indices), ids)).argmax(-1)  # [B]
        return torch.where(self._sampled, drawn, best)

    def filtered(self, logits: Tensor) -> Tensor:
        """Logits [B, V] over temperature, with what top-k, top-p and min-p cut away at minus infinity."""
        scores = logits / self._temperature
        if not self._filters:
            return scores
        ordered, order = scores.sort(dim=-1, descending=True, stable=True)  # [B, V]
        rank = torch.arange(scores.shape[-1], device=scores.device)[None]  # [1, V]
        cut = (self._top_k > 0) & (rank >= self._top_k)
        probability = ordered.masked_fill(cut, float("-inf")).softmax(-1)
        cut = cut | (probability.cumsum(-1) - probability >= self._top_p)
        cut = cut | (probability < self._min_p * probability[:, :1])
        return scores.masked_fill(torch.zeros_like(cut).scatter(1, order, cut), float("-inf"))

    def rank_drafts(self, logits: Tensor, indices: Sequence[int], target_ids: Tensor) -> Tensor:
        """Log-scores float32 [B, n, D] by which draft candidates are ranked, never above 0.

        `logits` [B, n, D] are the head's for n nodes of one depth, `target_ids` int64 [D] the ids it drafts and `indices`
        the output index that the depth stands for. Sampled rows are ranked with the very noise their choice will use.
        """
        scores = logits.float().log_softmax(-1)
        if self.greedy:
            return scores
        warm = (logits.float() / self._temperature[:, None]).log_softmax(-1)
        noisy = (warm + gumbel(self.keys(indices), target_ids)[:, None]).log_softmax(-1)
        return torch.where(self._sampled[:, None, None], noisy, scores)
