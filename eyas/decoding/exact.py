"""Two grades of exactness.

By default a text depends on drafter, tree and batch only where the two best scores of a choice lie within rounding of each
other, since products and sums may change their last bits with the number of rows. Such near-ties are counted. With
row-invariant kernels in every part of the target there is nothing to count: decoding is bit-equal by construction.
"""

from __future__ import annotations

import torch
from torch import Tensor

from eyas.decoding.sampling import BatchSampler
from eyas.errors import EyasError
from eyas.target import Target

# Logits of two forwards over the same text are taken to differ by at most this share of the largest logit. For float32 that is
# well above the 6e-5 seen in logits of a small real target; for the others it is an estimate, some steps of the format.
ROUNDING = {torch.float32: 2.0**-16, torch.float16: 2.0**-8, torch.bfloat16: 2.0**-5}


def require_exact(target: Target, sampling: str = "coupled") -> None:
    """Raises EyasError, saying what is in the way, unless decoding with `target` is bit-equal by construction."""
    obstacle = target.inexact if sampling == "coupled" else f"under {sampling} sampling a text depends on what was drafted"
    if obstacle is not None:
        raise EyasError(f"exact decoding is not possible with the target '{target.name}': {obstacle}")


def near_ties(sampler: BatchSampler, logits: Tensor, dtype: torch.dtype) -> list[bool]:
    """Which of the sampler's last choices, from float32 `logits` [B, V] of a target of `dtype`, had a second score near."""
    rounding = ROUNDING[dtype] * logits.abs().amax(-1) / sampler.divisor  # [B]
    near = sampler.scores >= (sampler.scores.amax(-1) - 2 * rounding)[:, None]  # [B, V]; both may be off
    return (near.sum(-1) > 1).tolist()
