"""What a checkpoint tells without being run: its config and tensors against each other, the target and the engines."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from pydantic import ValidationError
from torch import Tensor

from eyas.doctor.findings import Finding, Severity
from eyas.doctor.readings import (
    ENGINES,
    MAPS,
    Reading,
    believed_residual,
    believed_rope,
    believed_taps,
    flattened,
    read_as,
    stated_taps,
    usual_taps,
)
from eyas.doctor.signatures import HALF_MAX
from eyas.errors import EyasError
from eyas.heads.checkpoint import Checkpoint
from eyas.heads.config import HeadConfig
from eyas.heads.eagle3 import Eagle3Head
from eyas.heads.layouts.names import spelling, to_ours
from eyas.heads.layouts.record import read_record
from eyas.heads.layouts.rope import DEFAULT_THETA
from eyas.heads.layouts.taps import KEY
from eyas.target import Target

UNRUNNABLE = {"wrong-target", "missing-tensor", "leftover-tensor", "wrong-shape", "taps-out-of-range"}
RETRAIN = "give the target it was trained for, or train a head for this one"


@dataclass(frozen=True)
class Desk:
    """One checkpoint on the desk: for which target, and for which engines (keys of ENGINES)."""

    checkpoint: Checkpoint
    target: Target
    engines: tuple[str, ...]

    def concerned(self, *engines: str) -> tuple[str, ...]:
        """Those of `engines` that were asked about, by their names."""
        return tuple(ENGINES[e] for e in engines if e in self.engines)


def examine(desk: Desk) -> tuple[list[Finding], dict[str, Reading]]:
    """What can be found without running the head, and how each engine reads it; no readings where it cannot be run."""
    found = [*_target(desk), *_taps(desk), *_rope(desk), *_residual(desk), *_keys(desk)]
    readings: dict[str, Reading] = {}
    try:
        readings = {engine: read_as(engine, desk.checkpoint, desk.target) for engine in desk.engines}
    except (EyasError, ValidationError) as error:
        told = error.errors()[0]["msg"] if isinstance(error, ValidationError) else str(error)
        found.append(Finding("unreadable", "ill", f"eyas cannot tell what network this is: {told}", "correct its config.json"))
    for reading in list(readings.values())[:1]:
        found += [*_tensors(desk, reading.config), *_maps(desk, reading.config)]
    finite = all(bool(t.isfinite().all()) for t in desk.checkpoint.tensors.values())
    return found, readings if finite and not UNRUNNABLE & {f.name for f in found} else {}


def _target(desk: Desk) -> Iterator[Finding]:
    config, target = flattened(desk.checkpoint.config), desk.target
    record, fc = read_record(desk.checkpoint.config), desk.checkpoint.tensors.get("fc.weight")
    sizes = {
        "vocabulary": (config.get("vocab_size"), target.vocab_size),
        "number of layers": (record.get("target_layers"), target.num_layers),
        "hidden width": (None if fc is None else fc.shape[-1] // 3, target.hidden_size),
    }
    for what, (head, model) in sizes.items():
        if head not in (None, model):
            told = f"it was made for a target whose {what} is {head}; that of '{target.name}' is {model}"
            yield Finding("wrong-target", "ill", told, RETRAIN)
            return
    if record.get("target_fingerprint") not in (None, "", target.fingerprint):
        yield Finding(
            "other-target", "warning",
            f"it was trained for {record.get('target_name') or 'a target'} of fingerprint {record['target_fingerprint']}; "
            f"'{target.name}' has {target.fingerprint}", RETRAIN,
        )  # fmt: skip


def _tensors(desk: Desk, config: HeadConfig) -> Iterator[Finding]:
    tensors, spelt = to_ours(desk.checkpoint.tensors), spelling(desk.checkpoint.tensors)
    with torch.device("meta"):
        network = Eagle3Head(config, torch.empty(0, 0), torch.zeros(config.draft_vocab_size, dtype=torch.long))
    wanted = {name: tensor.shape for name, tensor in network.state_dict().items()}
    for name in sorted(wanted.keys() - tensors.keys() - set(MAPS)):
        yield Finding("missing-tensor", "ill", f"there is no tensor '{spelt(name)}'", "copy it from the trained checkpoint")
    for name in sorted(tensors.keys() - wanted.keys()):
        yield Finding(
            "leftover-tensor", "ill", f"no loader reads the tensor '{spelt(name)}'; vLLM refuses it, SGLang is silent",
            "leave it out, or give it the name it was meant to have",
        )  # fmt: skip
    for name in sorted(wanted.keys() & tensors.keys()):
        tensor = tensors[name]
        if name not in MAPS and tensor.shape != wanted[name]:
            told = f"'{spelt(name)}' has shape {list(tensor.shape)}, the config says {list(wanted[name])}"
            yield Finding("wrong-shape", "ill", told, "correct the sizes in config.json, or copy the tensor again")
        elif tensor.is_floating_point():
            yield from _range(spelt(name), tensor)
    final = tensors.get("norm.weight")
    if final is not None and final.numel() > 1 and bool((final == final.flatten()[0]).all()):
        told = f"norm.weight is {float(final.flatten()[0]):g} everywhere, which training seldom leaves"
        yield Finding("norm-lost", "warning", told, "compare it with the trained checkpoint")


def _range(name: str, tensor: Tensor) -> Iterator[Finding]:
    broken, largest = int((~tensor.isfinite()).sum()), float(tensor.abs().max())
    if broken:
        told = f"'{name}' ({_dtype(tensor)}) holds {broken} values that are no numbers"
        fault = "fp16-overflow" if tensor.dtype == torch.float16 else "not-finite"
        yield Finding(fault, "ill", told, "cast the trained checkpoint again, to bfloat16 or float32")
    elif largest > HALF_MAX:
        told = f"'{name}' reaches {largest:.3g}, and float16 ends at {HALF_MAX:.0f}: cast to it, the head drafts nothing"
        yield Finding("fp16-overflow", "ill", told, "serve it in bfloat16 or float32")


def _dtype(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _maps(desk: Desk, config: HeadConfig) -> Iterator[Finding]:
    d2t, t2d = (desk.checkpoint.tensors.get(name) for name in MAPS)
    size, vocab = config.draft_vocab_size, config.vocab_size
    rebuild = f"write d2t = t2d.nonzero()[:, 0] - arange({size})"
    again = rebuild if t2d is not None else "take d2t and t2d from the run that trained the head"
    if t2d is not None and (t2d.shape != (vocab,) or int(t2d.bool().sum()) != size):
        told = f"t2d has shape {list(t2d.shape)} and marks {int(t2d.bool().sum())} tokens, not {size} of {vocab}"
        yield Finding("t2d-broken", "ill", told, "write t2d[arange(D) + d2t] = True over zeros of the target's vocabulary")
        t2d = None
    if d2t is None:
        if size != vocab:
            told = f"its vocabulary is {size} of {vocab} tokens, but no d2t says which; vLLM takes the first {size}"
            yield Finding("d2t-lost", "ill", told, again)
        return
    if d2t.shape != (size,) or d2t.is_floating_point():
        told = f"d2t is {_dtype(d2t)} of shape {list(d2t.shape)}, not int64 of [{size}]"
        yield Finding("d2t-broken", "ill", told, again)
        return
    stored, ids = d2t.long(), torch.arange(size, device=d2t.device) + d2t.long()
    if _names_tokens(ids, vocab, t2d):
        if not bool((ids.diff() > 0).all()):
            yield Finding("d2t-order", "warning", "the tokens that d2t names do not ascend", "none, if it drafts well")
        elif size != vocab and not bool(stored.any()) and t2d is None:
            told = f"d2t is zero: the head drafts the first {size} tokens of {vocab}, which few vocabularies are"
            yield Finding("d2t-zero", "warning", told, again)
    elif _names_tokens(stored, vocab, t2d):
        told = "d2t holds target ids where offsets belong (target id = draft id + d2t)"
        yield Finding("d2t-absolute", "ill", told, f"store d2t - arange({size})")
    elif not bool(stored.any()):
        yield Finding("d2t-lost", "ill", "d2t is zero, and t2d marks other tokens than the first ones", again)
    else:
        told = f"d2t does not map {size} draft ids one to one to the tokens of t2d, or leaves the target's {vocab} tokens"
        yield Finding("d2t-broken", "ill", told, again)


def _names_tokens(ids: Tensor, vocab: int, t2d: Tensor | None) -> bool:
    """Whether `ids` are distinct tokens of the target, those that `t2d` marks if it is there."""
    inside = int(ids.min()) >= 0 and int(ids.max()) < vocab and len(ids.unique()) == len(ids)
    return inside and (t2d is None or bool(t2d.bool()[ids].all()))


def _taps(desk: Desk) -> Iterator[Finding]:
    config, layers = flattened(desk.checkpoint.config), desk.target.num_layers
    top, eagle = stated_taps(config)
    stated = {"": config.get(KEY), "eagle_config.": (config.get("eagle_config") or {}).get(KEY)}
    for (where, given), ids in zip(stated.items(), (top, eagle), strict=True):
        if given and ids is None:
            yield Finding("taps-malformed", "ill", f"{where}{KEY} is {given}, not three layer numbers", "write the trained ids")
    believed = {e: believed_taps(e, config) or usual_taps(desk.target) for e in ENGINES}
    for taps in {believed[e] for e in desk.engines}:
        if len(set(taps)) != 3 or min(taps) < 0 or max(taps) > layers:
            told = f"taps {list(taps)} are no three distinct states of a target with {layers} layers"
            yield Finding("taps-out-of-range", "ill", told, "write the ids that the head was trained with")
    if len(set(believed.values())) == 1 or () in believed.values():
        return
    told = "; ".join(f"{', '.join(ENGINES[e] for e in who)} {list(taps)}" for taps, who in _grouped(believed).items())
    offsets = {tuple(b - a for a, b in zip(believed["vllm"], taps, strict=True)) for taps in believed.values()}
    shifted = offsets <= {(0, 0, 0), (1, 1, 1), (-1, -1, -1)}
    yield Finding(
        "taps-off-by-one" if shifted else "taps-contradict",
        "ill" if len({believed[e] for e in desk.engines}) > 1 or (top and eagle) else "warning",
        f"engines read other taps from this config: {told} (top level {_shown(top)}, eagle_config {_shown(eagle)})",
        f"for taps [a, b, c] write {KEY} [a, b, c] at the top level and [a-1, b-1, c-1] in eagle_config",
        desk.concerned(*ENGINES),
    )  # fmt: skip


def _shown(ids: tuple[int, ...] | None) -> str:
    return "absent" if ids is None else str(list(ids))


def _grouped(believed: dict[str, tuple[int, ...]]) -> dict[tuple[int, ...], list[str]]:
    """The engines behind each value."""
    groups: dict[tuple[int, ...], list[str]] = {}
    for engine, value in believed.items():
        groups.setdefault(value, []).append(engine)
    return groups


def _rope(desk: Desk) -> Iterator[Finding]:
    config, record = flattened(desk.checkpoint.config), read_record(desk.checkpoint.config)
    own = HeadConfig.for_target(desk.target).rope
    places = {"rope_theta": config.get("rope_theta")}
    for key in ("rope_parameters", "rope_scaling"):
        inside = config.get(key)
        places[key] = inside.get("rope_theta") if isinstance(inside, dict) else None
    given = {place: float(theta) for place, theta in places.items() if isinstance(theta, int | float)}
    cure = f"write the base that the head was trained with (the target's is {own['rope_theta']:g})"
    if len(set(given.values())) > 1:
        told = "it gives two rotary bases: " + ", ".join(f"{theta:g} in {place}" for place, theta in given.items())
        yield Finding("rope-base", "ill", told, cure)
        return
    try:
        base = float(believed_rope(config)["rope_theta"])
    except EyasError as error:
        yield Finding("rope-base", "ill", str(error), cure)
        return
    if base == own["rope_theta"]:
        return
    where = f"its rotary base is {base:g}" if given else f"it gives no rotary base, so loaders take {DEFAULT_THETA:g}"
    ours = record.get("target_fingerprint") == desk.target.fingerprint
    told = f"{where}; the target's is {own['rope_theta']:g}" + (", and eyas trains heads with that" if ours else "")
    yield Finding("rope-base", "ill" if ours else "warning", told, cure)


def _residual(desk: Desk) -> Iterator[Finding]:
    config = desk.checkpoint.config
    believed = {engine: believed_residual(engine, config) for engine in desk.engines}
    given = config.get("norm_before_residual")
    if given is None and "speculators_model_type" in config:
        told = "norm_before_residual is not given: vLLM then takes true, others false"
        yield Finding(
            "norm-before-residual", "ill", told, "write norm_before_residual: false (true for heads trained by speculators)"
        )
    elif given and not believed.get("sglang", True):
        told = "norm_before_residual is true, which SGLang does not know: it adds attention to the plain state"
        yield Finding("norm-before-residual", "ill", told, "serve it with another engine, or train it with false", ("SGLang",))


def _keys(desk: Desk) -> Iterator[Finding]:
    config, target = flattened(desk.checkpoint.config), desk.target
    if config.get("tie_word_embeddings"):
        told = "tie_word_embeddings is true: SGLang then drafts with the embedding in the place of lm_head"
        yield Finding("tied-embeddings", "ill", told, "set tie_word_embeddings to false", desk.concerned("sglang"))
    lm_head = desk.checkpoint.tensors.get("lm_head.weight")
    if config.get("draft_vocab_size") is None and lm_head is not None:
        told = "draft_vocab_size is not given: llama.cpp does not see an EAGLE-3 head, others take the whole vocabulary"
        yield Finding("draft-vocab-size", "ill", told, f"write draft_vocab_size: {lm_head.shape[0]}")
    limit = config.get("max_position_embeddings")
    if (limit or 2048) < target.max_length:
        told = (
            f"max_position_embeddings is {limit or 'not given (2048 is then taken)'}, the target's {target.max_length}: behind "
            "it prompts fail or drafts decay; vLLM from 0.32 raises it itself"
        )
        severity: Severity = "warning" if desk.engines == ("vllm",) else "ill"
        yield Finding("position-limit", severity, told, f"set max_position_embeddings to {target.max_length}")
