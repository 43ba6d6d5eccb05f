"""Where training begins: random weights, or weights borrowed from the target (the warm start)."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from eyas.heads.config import HeadConfig
from eyas.heads.eagle3 import Eagle3Head
from eyas.target import Target

Start = Literal["warm", "random"]


def new_head(target: Target, d2t: Tensor, *, start: Start = "warm", seed: int = 0) -> Eagle3Head:
    """A head for `target` with draft vocabulary offsets `d2t` int64 [D], float32, on the target's device.

    "warm" takes `lm_head` rows, the final norm and the last decoder layer from the target, where its shapes are a Llama
    layer's; parameters the target has no counterpart for stay random.
    """
    config = HeadConfig.for_target(target, draft_vocab_size=len(d2t))
    generator = torch.Generator().manual_seed(seed)
    head = Eagle3Head(config, target.embedding.float(), d2t.to(target.device))
    with torch.no_grad():
        for name, parameter in head.named_parameters():
            if parameter.ndim == 2:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.02)
            elif "norm" in name:
                parameter.fill_(1.0)
        if start == "warm":
            _warm(head, target)
    return head.to(target.device)


def _warm(head: Eagle3Head, target: Target) -> None:
    """Copy what the target has a counterpart for.

    The layer is the target's last; the query, key and value projections read [embedding, state], so its weights go to the
    state half and the embedding half starts at zero. The fusion passes the high tap through.
    """
    h = head.config.hidden_size
    head.lm_head.weight.copy_(target.lm_head_weight[head.draft_ids(head.d2t)])
    if target.final_norm_weight is not None:
        _copy(head.norm.weight, target.final_norm_weight)
    layer = target.last_layer
    for name in ("q_proj", "k_proj", "v_proj"):
        projection = getattr(head.midlayer.self_attn, name).weight  # [out, 2h]
        source = layer.get(f"self_attn.{name}.weight")
        if source is not None and source.shape == projection[:, h:].shape:
            projection[:, :h].zero_()
            projection[:, h:].copy_(source)
    for name in ("self_attn.o_proj", "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"):
        _copy(head.midlayer.get_parameter(f"{name}.weight"), layer.get(f"{name}.weight"))
    _copy(head.midlayer.hidden_norm.weight, layer.get("input_layernorm.weight"))
    _copy(head.midlayer.post_attention_layernorm.weight, layer.get("post_attention_layernorm.weight"))
    high = head.fc.weight[:, -head.config.target_hidden_size :]  # [h, H], the high tap's part
    if high.shape[0] == high.shape[1]:
        head.fc.weight[:, : -head.config.target_hidden_size].zero_()
        high.copy_(torch.eye(h))


def _copy(parameter: Tensor, source: Tensor | None) -> None:
    if source is not None and source.shape == parameter.shape:
        parameter.copy_(source)
