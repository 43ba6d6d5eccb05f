"""Writing a forward's keys and values into a cache."""

from __future__ import annotations

import torch
from torch import Tensor

from eyas.kernels.build import kernels_ready


def write_slots(keys_to: Tensor, values_to: Tensor, keys: Tensor, values: Tensor, slots: Tensor) -> None:
    """keys_to[b, :, slots[b, q]] = keys[b, :, q], and the values likewise.

    `keys_to` and `values_to` [B, heads, length, dim] may be views of a larger store; `keys` and `values`
    [B, heads, Q, dim]; `slots` int64 [B, Q]. float32 on the CPU runs one operator, everything else torch's indexing.
    """
    if keys.device.type == "cpu" and keys.dtype == torch.float32 and kernels_ready():
        torch.ops.eyas.write_slots.default(keys_to, values_to, keys, values, slots)
        return
    rows = torch.arange(len(slots), device=slots.device)[:, None]  # [B, 1]
    for to, new in ((keys_to, keys), (values_to, values)):
        to[rows, :, slots] = new.transpose(1, 2)  # [B, Q, heads, dim]
