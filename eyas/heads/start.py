"""Where training begins: random weights, weights borrowed from the target (the warm start), or another head's."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from eyas.heads.config import Eagle1Config, HeadConfig, HeadOptions, MedusaConfig
from eyas.heads.eagle1 import Eagle1Head
from eyas.heads.eagle3 import Eagle3Head
from eyas.heads.files import load_head, projection_of
from eyas.heads.head import DraftHead
from eyas.heads.medusa import MedusaHead
from eyas.heads.vocab import choose_vocabulary
from eyas.progress import console
from eyas.target import Target

Start = Literal["warm", "random"]
STATE_NORM = "input_layernorm.weight"  # of the target's layer
READS_STATE = {f"self_attn.{name}_proj.weight" for name in "qkv"}


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


def head_from(
    folder: Path | str, target: Target, counts: Tensor | None = None, size: int | None = None, *, seed: int = 0
) -> Eagle3Head:
    """The head in `folder` as the start for `target`, float32; with `counts` int64 [V] of supervised tokens its vocabulary is
    chosen anew: `size` tokens, or as many as it has.

    A token that the old vocabulary holds keeps its row of `lm_head`; a new one takes the target's where the widths agree,
    else a random one. Raises EyasError when the head does not fit the target; one with a new vocabulary may be of a target
    that lacked the last tokens.
    """
    head = load_head(folder, target, widen=counts is not None).float()
    head.config = head.config.model_copy(update={"target_name": target.name, "target_fingerprint": target.fingerprint})
    if counts is None:
        return head.train()
    d2t = choose_vocabulary(counts, size or len(head.d2t))
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
    """Copy what the target has a counterpart for, and say what it lacks. The fusion passes the high tap through."""
    config = head.config
    h = config.hidden_size
    left = []
    for name, parameter, part, source in _counterparts(head, target):
        if not _copied(parameter, part, source) and part.ndim == 2:
            left.append(name)
    if left:
        console.print(
            f"the warm start leaves {len(left)} of the head's matrices random, the first {left[0]}: the target's are quantised "
            "or of another shape", style="yellow", markup=False,
        )  # fmt: skip
    high = head.fc.weight[:, -config.target_hidden_size :]  # [h, H], the high tap's part
    if config.own_embedding and head.embed_tokens is not None:
        components = _principal(target.embedding.float(), h)  # [H, h]
        head.embed_tokens.weight.copy_(target.embedding.float() @ components)
    elif h == config.target_hidden_size:
        head.fc.weight[:, : -config.target_hidden_size].zero_()
        high.copy_(torch.eye(h))


def _counterparts(head: Eagle3Head, target: Target) -> Iterator[tuple[str, Tensor, Tensor, Tensor | None]]:
    """What of `head` can begin as a part of the target does: a parameter's name, itself, where in it the target's goes, and the
    target's, None where it has none.

    The head's last layer is the target's last, the one before it the target's last but one, and so on. The first one's query,
    key and value projections read [embedding, state]; the target's go to the state half.
    """
    h = head.config.hidden_size
    yield "norm", head.norm.weight, head.norm.weight, target.final_norm_weight
    rows = target.lm_head_weight
    if rows.is_floating_point() and rows.shape[-1] == h:
        rows = rows[head.draft_ids(head.d2t)]  # [D, h]
    yield "lm_head", head.lm_head.weight, head.lm_head.weight, rows
    for number, (layer, source) in enumerate(zip(head.decoder_layers, target.last_layers(head.config.num_layers), strict=True)):
        norm = getattr(layer, "hidden_norm", layer.input_layernorm)  # of what the target's layer reads: the state
        yield f"layers.{number}.{STATE_NORM}", norm.weight, norm.weight, source.get(STATE_NORM)
        for name, parameter in layer.named_parameters():
            if name.startswith(("self_attn", "mlp", "post_attention_layernorm")):
                state = parameter[:, -h:] if name in READS_STATE else parameter
                yield f"layers.{number}.{name}", parameter, state, source.get(name)


def _copied(parameter: Tensor, part: Tensor, source: Tensor | None) -> bool:
    """Copy `source` to the `part` of `parameter`, which is zero elsewhere; whether that could be done."""
    if source is None or not source.is_floating_point() or source.shape != part.shape:
        return False
    parameter.zero_()
    part.copy_(source)
    return True


def _principal(embedding: Tensor, width: int) -> Tensor:
    """The `width` directions [H, width] that keep most of an embedding [V, H] (at most H of them; the rest are zero)."""
    directions = torch.linalg.eigh(embedding.T @ embedding).eigenvectors.flip(-1)[:, :width]  # [H, min(width, H)]
    return torch.nn.functional.pad(directions, (0, width - directions.shape[1]))
