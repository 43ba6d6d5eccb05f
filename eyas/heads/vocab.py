"""The draft vocabulary: the target tokens that a head can propose, chosen from supervised text alone."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from eyas.errors import EyasError


def count_tokens(texts: Iterable[tuple[list[int], list[tuple[int, int]]]], vocab_size: int) -> Tensor:
    """Occurrences int64 [V] of every id at supervised positions. A text is (ids, spans), spans half-open ranges of ids."""
    counts = torch.zeros(vocab_size, dtype=torch.long)
    for ids, spans in texts:
        for start, end in spans:
            counts += torch.bincount(torch.tensor(ids[start:end], dtype=torch.long), minlength=vocab_size)
    return counts


def choose_vocabulary(counts: Tensor, size: int) -> Tensor:
    """Offsets `d2t` int64 [D] of the `size` most frequent ids, ascending.

    Where the text has fewer distinct tokens the rest is filled in the tokenizer's own order (low ids first: a BPE
    tokenizer numbers its merges by frequency). Raises EyasError when `size` exceeds the vocabulary.
    """
    vocab_size = len(counts)
    if not 0 < size <= vocab_size:
        raise EyasError(f"a draft vocabulary of {size} tokens cannot be chosen from the target's {vocab_size}")
    by_frequency = torch.sort(counts, descending=True, stable=True).indices  # ties and zeros: low ids first
    ids = by_frequency[:size].sort().values  # [D]
    return ids - torch.arange(size)


def coverage(counts: Tensor, d2t: Tensor) -> float:
    """Share of the counted tokens that the draft vocabulary holds."""
    ids = torch.arange(len(d2t)) + d2t
    return float(counts[ids].sum() / counts.sum().clamp(min=1))
