"""Rejection sampling (Leviathan et al., arXiv 2211.17192; Chen et al., arXiv 2302.01318): the other lossless rule.

The text is distributed as the target's own, but it depends on what was drafted, while coupled sampling gives the same text
under any drafter. A chain is drawn from the head: its token x is kept with probability min(1, p(x) / q(x)), else another is
drawn from max(p - q, 0). In a tree that the head's scores alone decide every q is a point mass, and the rule comes down to
drawing from p and looking whether the token is among the children.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from eyas.decoding.noise import gumbel
from eyas.decoding.processors import Processor
from eyas.decoding.sampling import BatchSampler, SamplingParams, log_probabilities

DRAFT, KEEP = 1, 2  # streams of noise; the target's own draws use stream 0


class RejectionSampler(BatchSampler):
    """Draws and accepts for a batch of rows; with `chain` the drafts are drawn from the head, else they are its likeliest."""

    def __init__(
        self, params: Sequence[SamplingParams], device: torch.device | str = "cpu",
        processors: Sequence[Sequence[Processor]] = (), *, chain: bool,
    ) -> None:  # fmt: skip
        super().__init__(params, device, processors)
        self._chain = chain
        self._drawn_from: dict[tuple[int, ...], tuple[Tensor, Tensor]] = {}  # by output indices: q [B, D], target ids [D]

    def rank_drafts(self, logits: Tensor, indices: Sequence[int], target_ids: Tensor, depth: int) -> Tensor:
        logits = self._process_drafts(logits.float(), target_ids, depth)
        if self.greedy or not self._chain:
            return log_probabilities(logits)
        warm = self._warm(logits)  # [B, 1, D]
        if depth == 1:
            self._drawn_from.clear()
        self._drawn_from[tuple(indices)] = (warm[:, 0].exp(), target_ids)
        return self._perturbed(logits, warm, self.keys(indices, DRAFT), target_ids)

    def _draw(self, scores: Tensor, indices: Sequence[int], drafted: Tensor | None) -> Tensor:
        known = self._drawn_from.get(tuple(indices))
        if known is None or drafted is None or not bool((drafted >= 0).any()):
            return super()._draw(scores, indices, None)
        p = scores.softmax(-1)  # [B, V]
        q = torch.zeros_like(p)
        q[:, known[1]] = known[0]  # the head's distribution over the target's vocabulary
        token = drafted.clamp_min(0)[:, None]  # [B, 1]
        uniform = (-(-gumbel(self.keys(indices, KEEP), drafted.new_zeros(1))).exp()).exp()  # [B, 1]
        keep = (uniform * q.gather(1, token) < p.gather(1, token))[:, 0]  # [B]
        rest = torch.where(drafted[:, None] >= 0, (p - q).clamp_min(0), p)  # [B, V]
        return torch.where(keep & (drafted >= 0), drafted, super()._draw(rest.log(), indices, None))
