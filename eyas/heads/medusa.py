"""Medusa heads (arXiv 2401.10774, Medusa-1): each predicts one later token from the target's final state alone.

Head i (from 1) reads the final, normed state f[t] and predicts token t+1+i: a residual block, then a projection of its own.
No head sees what another one drafts.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from eyas.heads.config import MedusaConfig
from eyas.heads.head import DraftHead


class MedusaHead(DraftHead):
    """The `num_heads` heads of one target, over the draft vocabulary."""

    config: MedusaConfig

    def __init__(self, config: MedusaConfig, d2t: Tensor) -> None:
        super().__init__(config, d2t)
        h, count = config.hidden_size, config.num_heads
        self.blocks = nn.ModuleList(nn.Linear(h, h) for _ in range(count))
        self.lm_heads = nn.ModuleList(nn.Linear(h, config.draft_vocab_size, bias=False) for _ in range(count))

    def logits(self, number: int, features: Tensor) -> Tensor:
        """Draft logits [T, D] of head `number`, counted from 0, for `features` [T, h]."""
        return self.lm_heads[number](features + F.silu(self.blocks[number](features)))
