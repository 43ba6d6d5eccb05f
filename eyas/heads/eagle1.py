"""The EAGLE-1 head (arXiv 2401.15077), with which EAGLE-2 (arXiv 2406.16858) drafts trees: it predicts features.

A feature f[t] is the target's final, normed state. The head reads it beside token t+1 and gives f[t+1]; the target's own
vocabulary projection makes logits of it, over the whole vocabulary.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from eyas.heads.config import Eagle1Config
from eyas.heads.head import Reading, StateHead
from eyas.heads.layer import DraftLayer


class Eagle1Layer(DraftLayer):
    """A decoder layer without its first norm: q, k and v read the fused input as it is."""

    def __init__(self, config: Eagle1Config) -> None:
        super().__init__(config, config.hidden_size)
        del self.input_layernorm


class Eagle1Head(StateHead):
    """The head of one target, whose only tap is the final, normed state. Its states are predicted features."""

    config: Eagle1Config
    target_lm_head: Tensor

    def __init__(self, config: Eagle1Config, embedding: Tensor, lm_head: Tensor) -> None:
        """`embedding` and `lm_head` [V, h] are the target's; the first is shared unless the head has its own."""
        identity = torch.zeros(config.vocab_size, dtype=torch.long, device=embedding.device)
        super().__init__(config, embedding, identity, stored_maps=False)
        self.fc = nn.Linear(2 * config.hidden_size, config.hidden_size, bias=config.fc_bias)
        self.layers = nn.ModuleList([Eagle1Layer(config)])
        self.register_buffer("target_lm_head", lm_head.detach(), persistent=False)

    @property
    def decoder_layers(self) -> list[DraftLayer]:
        return list(self.layers)  # type: ignore[arg-type]

    def fuse(self, taps: Tensor) -> Tensor:
        return taps

    def read(self, layer: int, states: Tensor, tokens: Tensor) -> Reading:
        """The embedding of `tokens` (t+1) beside the features `states` (t), through `fc`; attention is added to the same."""
        embedded = F.embedding(tokens, self.embedding).to(states.dtype)  # [T, h]
        fused = self.fc(torch.cat([embedded, states], dim=-1))  # [T, h]
        return Reading(fused, fused)

    def logits(self, handed_on: Tensor) -> Tensor:
        return F.linear(handed_on, self.target_lm_head)
