"""The EAGLE-1 head (arXiv 2401.15077), with which EAGLE-2 (arXiv 2406.16858) drafts trees: it predicts features.

A feature f[t] is the target's final, normed state. The head reads it beside token t+1 and gives f[t+1]; the target's own
vocabulary projection makes logits of it, over the whole vocabulary. T below is any run of leading dimensions.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from eyas.heads.config import Eagle1Config
from eyas.heads.eagle3 import DraftLayer
from eyas.heads.rope import inverse_frequencies


class Eagle1Layer(DraftLayer):
    """A decoder layer without its first norm: q, k and v read the fused input as it is."""

    def __init__(self, config: Eagle1Config) -> None:
        super().__init__(config, config.hidden_size)
        del self.input_layernorm


class Eagle1Head(nn.Module):
    """A draft head for one target: per step `fuse`, `queries`, `keys_values`, attention, `finish`; then `Target.logits`.

    `embedding` [V, h] is the target's own, frozen and not a parameter, unless the checkpoint holds another one.
    """

    inverse_frequencies: Tensor
    target_embedding: Tensor

    def __init__(self, config: Eagle1Config, embedding: Tensor) -> None:
        """`embedding` [V, h] is the target's, shared unless the head has its own."""
        super().__init__()
        h = config.hidden_size
        self.config = config
        self.fc = nn.Linear(2 * h, h, bias=config.fc_bias)
        self.layers = nn.ModuleList([Eagle1Layer(config)])
        self.embed_tokens = nn.Embedding(config.vocab_size, h) if config.own_embedding else None
        if self.embed_tokens is None:
            self.register_buffer("target_embedding", embedding.detach(), persistent=False)
        frequencies = inverse_frequencies(config.rope, config.head_dim).to(embedding.device)
        self.register_buffer("inverse_frequencies", frequencies, persistent=False)

    @property
    def embedding(self) -> Tensor:
        """The token embedding [V, h] that the head reads."""
        return self.target_embedding if self.embed_tokens is None else self.embed_tokens.weight

    @property
    def layer(self) -> DraftLayer:
        return self.layers[0]  # type: ignore[return-value]

    def fuse(self, features: Tensor, tokens: Tensor) -> Tensor:
        """The layer's input [T, h]: the embedding of `tokens` int64 [T] (t+1) beside `features` [T, h] (t), through `fc`."""
        embedded = F.embedding(tokens, self.embedding).to(features.dtype)  # [T, h]
        return self.fc(torch.cat([embedded, features], dim=-1))

    def queries(self, x: Tensor, positions: Tensor) -> Tensor:
        """Rotated queries [T, heads, head_dim] of `x` [T, h] at `positions` int64 [T]."""
        return self.layer.queries(x, positions, self.inverse_frequencies)

    def keys_values(self, x: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Rotated keys and values [T, kv_heads, head_dim] of `x` [T, h] at `positions` int64 [T]."""
        return self.layer.keys_values(x, positions, self.inverse_frequencies)

    def finish(self, x: Tensor, attended: Tensor) -> Tensor:
        """The rest of the layer: `attended` [T, heads, head_dim] joins `x` [T, h] -> the predicted features [T, h]."""
        return self.layer.finish(x, attended)
