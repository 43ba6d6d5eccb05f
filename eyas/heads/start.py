"""Where training begins: random weights, weights borrowed from the target (the warm start), or another head's."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from eyas.heads.config import Eagle1Config, HeadConfig, HeadOptions, MedusaConfig
from eyas.heads.eagle1 import Eagle1Head
from eyas.heads.eagle3 import Eagle3Head
from eyas.heads.files import load_head, projection_of
from eyas.heads.head import DraftHead
from eyas.heads.layer import DraftLayer
from eyas.heads.medusa import MedusaHead
from eyas.target import Target

Start = Literal["warm", "random"]


def new_head(
    target: Target, d2t: Tensor, *, start: Start = "warm", seed: int = 0, options: HeadOptions | None = None
) -> Eagle3Head:
    """A head for `target` with draft vocabulary offsets `d2t` int64 [D], float32, on the target's device.

    "warm" takes `lm_head` rows, the final norm and the last decoder layers from the target, where its shapes are a Llama
    layer's, and for an embedding of the head's own the principal components of the target's; parameters the target has no
    counterpart for stay random.
    """
    config = HeadConfig.for_target(target, draft_vocab_size=len(d2t), options=options)
    head = Eagle3Head(config, target.embedding.float(), d2t.to(target.device))
    _randomise(head, seed)
    if start == "warm":
        _warm(head, target)
    return head.to(target.device)


def new_eagle1_head(target: Target, *, start: Start = "warm", seed: int = 0) -> Eagle1Head:
    """An EAGLE-1 head for `target`, float32. "warm" begins with a fusion that passes the feature through, so that it is the
    first guess at the next one; the target's last layer is no start here, since it writes to the stream before the norm."""
    head = Eagle1Head(Eagle1Config.for_target(target), target.embedding.float(), projection_of(target))
    _randomise(head, seed)
    if start == "warm":
        h = head.config.hidden_size
        with torch.no_grad():
            head.fc.weight.zero_()
            head.fc.weight[:, h:].copy_(torch.eye(h))
    return head.to(target.device)


def new_medusa_head(target: Target, d2t: Tensor, num_heads: int) -> MedusaHead:
    """Medusa heads for `target` with draft vocabulary offsets `d2t` int64 [D], float32, begun as the paper has it: residual
    blocks of zero before the target's own projection."""
    config = MedusaConfig(
        hidden_size=target.hidden_size, vocab_size=target.vocab_size, draft_vocab_size=len(d2t), num_heads=num_heads,
        target_name=target.name, target_fingerprint=target.fingerprint,
    )  # fmt: skip
    head = MedusaHead(config, d2t.to(target.device))
    rows = projection_of(target)[head.draft_ids(head.d2t)]  # [D, H]
    with torch.no_grad():
        for parameter in head.blocks.parameters():
            parameter.zero_()
        for parameter in head.lm_heads.parameters():
            parameter.copy_(rows)
    return head.to(target.device)


@torch.no_grad()
def _randomise(head: DraftHead, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in head.named_parameters():
        if parameter.ndim == 2:
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.02)
        else:
            parameter.fill_(1.0 if "norm" in name else 0.0)


def head_from(folder: Path | str, target: Target, d2t: Tensor | None = None, *, seed: int = 0) -> Eagle3Head:
    """The head in `folder` as the start for `target`, float32; with `d2t` int64 [D] its vocabulary becomes that one.

    A token that the old vocabulary holds keeps its row of `lm_head`; a new one takes the target's where the widths agree,
    else a random one. Raises EyasError when the head does not fit the target.
    """
    head = load_head(folder, target).float()
    head.config = head.config.model_copy(update={"target_name": target.name, "target_fingerprint": target.fingerprint})
    if d2t is None:
        return head.train()
    wanted, had = head.draft_ids(d2t.to(target.device)), head.draft_ids(head.d2t)  # [D], [D before]
    config = HeadConfig(**{**head.config.model_dump(), "draft_vocab_size": len(d2t)})
    remapped = Eagle3Head(config, target.embedding.float(), d2t.to(target.device)).to(target.device)
    weights = head.state_dict()
    rows = torch.randn(len(wanted), config.hidden_size, generator=torch.Generator().manual_seed(seed)) * 0.02
    rows = rows.to(target.device)
    source = target.lm_head_weight
    if source.shape[-1] == config.hidden_size and source.is_floating_point():
        rows = source[wanted].float()
    place = torch.full((config.vocab_size,), -1, device=wanted.device)  # [V]: a token's row in the old vocabulary
    place[had] = torch.arange(len(had), device=had.device)
    known = place[wanted] >= 0  # [D]
    rows[known] = weights["lm_head.weight"][place[wanted[known]]]
    remapped.load_state_dict({**weights, "lm_head.weight": rows, "d2t": remapped.d2t, "t2d": remapped.t2d})
    return remapped.train()


@torch.no_grad()
def _warm(head: Eagle3Head, target: Target) -> None:
    """Copy what the target has a counterpart for.

    The head's last layer is the target's last, the one before it the target's last but one, and so on. The first one's query,
    key and value projections read [embedding, state], so the weights go to the state half and the embedding half starts at
    zero. The fusion passes the high tap through.
    """
    config = head.config
    h = config.hidden_size
    if target.lm_head_weight.shape[-1] == h and target.lm_head_weight.is_floating_point():
        head.lm_head.weight.copy_(target.lm_head_weight[head.draft_ids(head.d2t)])
    _copy(head.norm.weight, target.final_norm_weight)
    for layer, source in zip(head.decoder_layers, target.last_layers(config.num_layers), strict=True):
        _warm_layer(layer, source, h)
    high = head.fc.weight[:, -config.target_hidden_size :]  # [h, H], the high tap's part
    if config.own_embedding and head.embed_tokens is not None:
        components = _principal(target.embedding.float(), h)  # [H, h]
        head.embed_tokens.weight.copy_(target.embedding.float() @ components)
    elif h == config.target_hidden_size:
        head.fc.weight[:, : -config.target_hidden_size].zero_()
        high.copy_(torch.eye(h))


def _warm_layer(layer: DraftLayer, source: dict[str, Tensor], h: int) -> None:
    """Copy a layer of the target into a layer of the head, where the shapes agree."""
    for name in ("q_proj", "k_proj", "v_proj"):
        projection = getattr(layer.self_attn, name).weight  # [out, 2h], later [out, h]
        given = source.get(f"self_attn.{name}.weight")
        if given is not None and given.is_floating_point() and given.shape == projection[:, -h:].shape:
            projection.zero_()
            projection[:, -h:].copy_(given)
    for name, parameter in layer.named_parameters():
        if name.startswith(("self_attn.o_proj", "self_attn.q_norm", "self_attn.k_norm", "mlp", "post_attention")):
            _copy(parameter, source.get(name))
    norm = getattr(layer, "hidden_norm", layer.input_layernorm)  # of what the target's layer reads: the state
    _copy(norm.weight, source.get("input_layernorm.weight"))


def _copy(parameter: Tensor, source: Tensor | None) -> None:
    if source is not None and source.is_floating_point() and source.shape == parameter.shape:
        parameter.copy_(source)


def _principal(embedding: Tensor, width: int) -> Tensor:
    """The `width` directions [H, width] that keep most of an embedding [V, H] (at most H of them; the rest are zero)."""
    directions = torch.linalg.eigh(embedding.T @ embedding).eigenvectors.flip(-1)[:, :width]  # [H, min(width, H)]
    return torch.nn.functional.pad(directions, (0, width - directions.shape[1]))
