"""Attention of the unroll: causal over step 0, plus one diagonal term per later step, under a single softmax.

At step i the query of slot t sees step 0's keys at u <= t of its own text and, for j = 1..i, the one key that step j made
at slot t itself: exactly what a chain of drafts sees. Nothing S x S is rebuilt between steps.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def unroll_attention(
    queries: Tensor, keys: Tensor, values: Tensor, own: Sequence[tuple[Tensor, Tensor]], slots: Tensor,
    text_slots: Sequence[tuple[int, int]], scale: float,
) -> Tensor:  # fmt: skip
    """Attend from the `slots` int64 [n] (ascending) of a batch.

    `queries` [n, heads, d]; step 0's `keys` and `values` [T, kv_heads, d] over all slots; `own` holds for every later step
    the keys and values [n, kv_heads, d] made at these same slots. Returns [n, heads, d].
    """
    kv_heads = keys.shape[1]
    grouped = queries.unflatten(1, (kv_heads, -1)) * scale  # [n, kv, g, d]
    diagonal = [(grouped * k[:, :, None]).sum(-1) for k, _ in own]  # each [n, kv, g]
    out = []
    bounds = torch.searchsorted(slots, torch.tensor([end for _, end in text_slots], device=slots.device)).tolist()
    first = 0
    for (start, end), last in zip(text_slots, bounds, strict=True):
        if last == first:
            continue
        rows = slice(first, last)
        q = grouped[rows].permute(1, 2, 0, 3)  # [kv, g, m, d]
        k, v = keys[start:end].permute(1, 2, 0), values[start:end].permute(1, 0, 2)  # [kv, d, s], [kv, s, d]
        scores = q @ k[:, None]  # [kv, g, m, s]
        future = torch.arange(start, end, device=slots.device) > slots[rows, None]  # [m, s]
        scores = scores.masked_fill(future, float("-inf"))
        extra = [d[rows].permute(1, 2, 0)[..., None] for d in diagonal]  # each [kv, g, m, 1]
        weights = torch.cat([scores, *extra], -1).softmax(-1)  # [kv, g, m, s + i]
        attended = weights[..., : end - start] @ v[:, None]  # [kv, g, m, d]
        for j, (_, own_values) in enumerate(own):
            share = weights[..., end - start + j, None]  # [kv, g, m, 1]
            attended = attended + share * own_values[rows].permute(1, 0, 2)[:, None]
        out.append(attended.permute(2, 0, 1, 3).flatten(1, 2))  # [m, heads, d]
        first = last
    return torch.cat(out)
