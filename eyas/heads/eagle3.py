"""The EAGLE-3 head (arXiv 2503.01840): three fused taps, decoder layers, its own vocabulary."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from eyas.heads.config import HeadConfig
from eyas.heads.head import Reading, StateHead
from eyas.heads.layer import DraftLayer


class FirstLayer(DraftLayer):
    """The layer that reads a token beside a state: q, k and v see 2h, the embedding half first."""

    def __init__(self, config: HeadConfig) -> None:
        super().__init__(config, 2 * config.hidden_size)
        self.norm_before_residual = config.norm_before_residual
        self.hidden_norm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)

    def read(self, states: Tensor, embedded: Tensor) -> Reading:
        """Of `states` [T, h] beside the embedded tokens [T, h]."""
        normed = self.hidden_norm(states)
        x = torch.cat([self.input_layernorm(embedded), normed], dim=-1)  # [T, 2h]
        return Reading(x, normed if self.norm_before_residual else states)


class Eagle3Head(StateHead):
    """The head of one target; `tap_ids` of its config are the three states that it reads."""

    config: HeadConfig

    def __init__(self, config: HeadConfig, embedding: Tensor, d2t: Tensor) -> None:
        """`embedding` [V, H] is the target's, shared unless the head has its own."""
        super().__init__(config, embedding, d2t)
        h, eps = config.hidden_size, config.rms_norm_eps
        normed_taps = len(config.tap_ids) if config.fc_norm else 0
        self.fc_norm = nn.ModuleList(nn.RMSNorm(config.target_hidden_size, eps=eps) for _ in range(normed_taps))
        self.fc = nn.Linear(len(config.tap_ids) * config.target_hidden_size, h, bias=config.fc_bias)
        self.midlayer = FirstLayer(config)
        # serving engines call the first layer layers.0 or midlayer, the others layers.1 and so on
        self.layers = nn.ModuleDict({str(n): DraftLayer(config, h) for n in range(1, config.num_layers)})
        self.norm = nn.RMSNorm(h, eps=eps)
        self.lm_head = nn.Linear(h, config.draft_vocab_size, bias=False)

    @property
    def decoder_layers(self) -> list[DraftLayer]:
        return [self.midlayer, *self.layers.values()]  # type: ignore[list-item]

    def fuse(self, taps: Tensor) -> Tensor:
        """The taps side by side [T, 3H] -> step-0 states g [T, h] (section 3.1); EAGLE-3.1 norms each tap first."""
        if self.fc_norm:
            parts = taps.chunk(len(self.fc_norm), dim=-1)  # each [T, H]
            taps = torch.cat([norm(part) for norm, part in zip(self.fc_norm, parts, strict=True)], dim=-1)
        return self.fc(taps)

    def read(self, layer: int, states: Tensor, tokens: Tensor) -> Reading:
        if layer:
            return Reading(self.decoder_layers[layer].input_layernorm(states), states)
        return self.midlayer.read(states, F.embedding(tokens, self.embedding).to(states.dtype))

    def hand_on(self, states: Tensor) -> Tensor:
        """The states as they are, or normed (EAGLE-3.1)."""
        return self.norm(states) if self.config.norm_output else states

    def logits(self, handed_on: Tensor) -> Tensor:
        """The final norm is applied once, whether handed on or not."""
        return self.lm_head(handed_on if self.config.norm_output else self.norm(handed_on))
