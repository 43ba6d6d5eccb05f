"""Attention of a few queries over a cache, exact for trees: only a query's sequence of allowed keys matters.

In a fused softmax the order of the sums follows the layout of the keys, so a node of a draft tree, with siblings
between its ancestors, gets other bits than plain decoding of the same path. Here each query gathers its allowed keys in
ascending order and reduces them alone (see `attention.cpp`): gaps, other queries, batch rows and threads do not matter.
"""

from __future__ import annotations

import torch
from torch import Tensor

from eyas.kernels.build import kernels_ready


def attend(query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scale: float) -> Tensor:
    """softmax(scale * query key^T where mask) value, with grouped heads and without copying the cache.

    `query` [B, Hq, Q, D], `key` [B, Hkv, K, D] and `value` [B, Hkv, K, Dv] may be strided views; head h reads key head
    h // (Hq / Hkv). `mask` bool [B or 1, 1, Q or 1, K] is True where a query may look; a query that may look nowhere
    gets zeros. Returns [B, Q, Hq, Dv].

    float32 on the CPU runs the exact operator. Everything else, and a machine without a compiler, runs torch's fused
    attention, whose bits may depend on the shapes (on CUDA this path is unmeasured).
    """
    if query.device.type == "cpu" and query.dtype == torch.float32 and kernels_ready():
        return torch.ops.eyas.attend.default(query, key, value, mask, scale)
    out = torch.nn.functional.scaled_dot_product_attention(
        query, key, value, attn_mask=mask, scale=scale, enable_gqa=query.shape[1] != key.shape[1]
    )  # [B, Hq, Q, Dv]
    return out.masked_fill(~mask.any(dim=-1, keepdim=True), 0.0).transpose(1, 2)
