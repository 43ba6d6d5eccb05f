"""The hypotheses: for each known fault of loading, the head with the fault undone. The best of them is the diagnosis."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import permutations
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from eyas.doctor.evidence import Evidence
from eyas.doctor.readings import Reading, usual_taps
from eyas.doctor.trials import Trial
from eyas.heads.config import HeadConfig
from eyas.heads.layouts.rope import DEFAULT_THETA
from eyas.target import Target

BASES = (DEFAULT_THETA, 100_000.0, 500_000.0, 1_000_000.0, 5_000_000.0, 10_000_000.0)  # of the rotations in public models
READS_BOTH = ("q_proj", "k_proj", "v_proj")  # of [embedding, state]


@dataclass(frozen=True)
class Cure:
    """A fault undone: the diagnosis `name`, what was wrong, what to do, and the head as it then reads."""

    name: str
    told: str
    cure: str
    reading: Reading


@dataclass(frozen=True)
class Case:
    """What the hypotheses look at: a reading, the vocabulary maps as stored, the target, the evidence, the reading's trial."""

    reading: Reading
    maps: dict[str, Tensor]
    target: Target
    evidence: Evidence
    trial: Trial

    def with_config(self, **changes: Any) -> Reading:
        """The reading, its configuration changed."""
        return replace(self.reading, config=self.reading.config.model_copy(update=changes))

    def with_tensors(self, changes: dict[str, Tensor]) -> Reading:
        """The reading, some tensors changed."""
        return replace(self.reading, tensors={**self.reading.tensors, **changes})


def tap_sets(tap_ids: tuple[int, ...], target: Target) -> list[tuple[int, ...]]:
    """Every set of taps that a hypothesis may want beside `tap_ids`; some can be out of the target's range."""
    shifted = [tuple(t + by for t in tap_ids) for by in (-1, 1)]
    orders = [order for order in permutations(tap_ids) if order != tap_ids]
    default = usual_taps(target)
    return list(dict.fromkeys([*shifted, *orders, *([default] if default else [])]))


def cures(case: Case) -> Iterator[Cure]:
    """Every cure that changes something, the likelier ones first."""
    yield from _vocabulary(case)
    yield from _taps(case)
    yield from _residual(case)
    yield from _norm(case)
    yield from _halves(case)
    yield from _rope(case)


def _taps(case: Case) -> Iterator[Cure]:
    now = case.reading.config.tap_ids
    for taps in tap_sets(now, case.target):
        if taps == now or not case.evidence.offers(taps):
            continue
        if taps in (tuple(t - 1 for t in now), tuple(t + 1 for t in now)):
            side = "high" if taps < now else "low"
            name, told = "taps-off-by-one", f"the head reads taps {list(now)}, each one too {side}"
        elif sorted(taps) == sorted(now):
            name, told = "taps-permuted", f"the taps {list(now)} reach the head's fusion in the wrong order"
        else:
            name, told = "taps-wrong", f"the head reads taps {list(now)}"
        todo = (
            f"set eagle_aux_hidden_state_layer_ids to {list(taps)} at the top level and {[t - 1 for t in taps]} in eagle_config"
        )
        if name == "taps-permuted" and list(now) == sorted(now):
            todo = f"put the three column blocks of fc.weight in the order {[taps.index(t) for t in now]}"
        yield Cure(name, told, todo, case.with_config(tap_ids=taps))


def _vocabulary(case: Case) -> Iterator[Cure]:
    now, d2t, t2d = case.reading.target_ids, case.maps.get("d2t"), case.maps.get("t2d")
    size, vocab = len(now), case.target.vocab_size
    if d2t is not None and d2t.shape == now.shape and not torch.equal(d2t.long(), now):
        yield Cure(
            "d2t-absolute", "d2t holds target ids where offsets belong (target id = draft id + d2t)",
            f"store d2t - arange({size})", replace(case.reading, target_ids=d2t.long()),
        )  # fmt: skip
    if t2d is not None and t2d.shape == (vocab,) and int(t2d.bool().sum()) == size:
        ids = t2d.bool().nonzero()[:, 0]
        if not torch.equal(ids, now):
            yield Cure(
                "d2t-lost", "d2t does not name the tokens that the head drafts; t2d does",
                f"write d2t = t2d.nonzero()[:, 0] - arange({size})", replace(case.reading, target_ids=ids),
            )  # fmt: skip
    elif size < vocab and (named := _ids_by_rows(case)) is not None:
        yield Cure(
            "d2t-lost", "d2t does not name the tokens that the head drafts; the rows of its lm_head do",
            "take d2t and t2d from the run that trained the head (its checkpoint, or its vocabulary file)",
            replace(case.reading, target_ids=named),
        )  # fmt: skip


def _ids_by_rows(case: Case) -> Tensor | None:
    """Target ids int64 [D] of the draft ids that the trial drafted, by the likest row of the target's vocabulary projection;
    -1 for the others. Heads that began from the target's rows keep them recognisable; None where the widths differ."""
    rows, ours = case.target.lm_head_weight, case.reading.tensors["lm_head.weight"]
    if rows.shape[-1] != ours.shape[-1]:
        return None
    drafted = case.trial.drafted.unique()
    ids = torch.full_like(case.reading.target_ids, -1)
    ids[drafted] = (F.normalize(ours[drafted].float()) @ F.normalize(rows.float()).T).argmax(-1)
    return ids


def _residual(case: Case) -> Iterator[Cure]:
    now = case.reading.config.norm_before_residual
    is_, was = ("normed", "plain") if now else ("plain", "normed")
    yield Cure(
        "norm-before-residual", f"attention is added to the {is_} state; the head was trained with the {was} one",
        f"set norm_before_residual to {str(not now).lower()}", case.with_config(norm_before_residual=not now),
    )  # fmt: skip


def _norm(case: Case) -> Iterator[Cure]:
    weight, own = case.reading.tensors["norm.weight"], case.target.final_norm_weight
    if own is None or own.shape != weight.shape or not bool((weight == weight[0]).all()):
        return
    yield Cure(
        "norm-lost", f"norm.weight is {float(weight[0]):g} everywhere: the trained final norm was lost",
        "copy norm.weight from the trained checkpoint (the target's own final norm is a fair stand-in)",
        case.with_tensors({"norm.weight": own.float()}),
    )  # fmt: skip


def _halves(case: Case) -> Iterator[Cure]:
    h = case.reading.config.hidden_size
    swapped = {}
    for projection in READS_BOTH:
        name = f"midlayer.self_attn.{projection}.weight"
        weight = case.reading.tensors[name]  # [out, 2h]
        swapped[name] = torch.cat([weight[:, h:], weight[:, :h]], dim=1)
    yield Cure(
        "embedding-half-swapped", "q, k and v read the state before the embedding; the embedding half comes first",
        f"swap columns 0..{h} and {h}..{2 * h} of q_proj, k_proj and v_proj", case.with_tensors(swapped),
    )  # fmt: skip


def _rope(case: Case) -> Iterator[Cure]:
    now = case.reading.config.rope
    plain = [{"rope_type": "default", "rope_theta": base} for base in BASES]
    tried = [now]
    for rope in [HeadConfig.for_target(case.target).rope, *plain]:
        if any(_same(rope, other) for other in tried):
            continue
        tried.append(rope)
        yield Cure(
            "rope-base", f"positions are turned with {_spelt(now)}; the head was trained with {_spelt(rope)}",
            f"set rope_parameters (and rope_theta, for older readers) to {rope}", case.with_config(rope=rope),
        )  # fmt: skip


def _same(a: dict[str, Any], b: dict[str, Any]) -> bool:
    defaults = {"rope_type": "default", "rope_theta": DEFAULT_THETA}
    return {**defaults, **a} == {**defaults, **b}


def _spelt(rope: dict[str, Any]) -> str:
    kind = rope.get("rope_type", "default")
    return f"base {rope.get('rope_theta', DEFAULT_THETA):g}" + ("" if kind == "default" else f" and scaling '{kind}'")
