"""Drafters by what a command line calls them: the door for `generate`, `bench` and whoever else is told a drafter's name."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from eyas.decoding.drafters import (
    Drafter,
    Eagle1Drafter,
    Eagle3Drafter,
    JoinedDrafter,
    LLMDrafter,
    LookupDrafter,
    MedusaDrafter,
)
from eyas.errors import EyasError
from eyas.heads.eagle1 import Eagle1Head
from eyas.heads.eagle3 import Eagle3Head
from eyas.heads.files import head_hash, load_any_head, tap_ids
from eyas.heads.head import DraftHead
from eyas.heads.medusa import MedusaHead
from eyas.kernels.packed import Weights
from eyas.target import Target

LOOKUP, SMALL_LLM, JOIN = "lookup", "llm:", "+lookup"


@dataclass(frozen=True)
class Opened:
    """A `drafter` (None: plain decoding), the `target` as it must be run for it (its taps are those that the drafter reads),
    and the `hash` of the drafter's weights ("" where it has none)."""

    target: Target
    drafter: Drafter | None
    hash: str


def split_tree(told: str) -> tuple[str, str | None]:
    """What to open and the tree, of SOURCE[@TREE]; None: no tree is named. A path with an @ in it is itself."""
    source, mark, tree = told.rpartition("@")
    return (source, tree) if mark and not Path(told).exists() else (told, None)


def open_drafter(source: str, target: Target) -> Opened:
    """The drafter called `source`, for `target`: the folder of a head (EAGLE-3, EAGLE-1 or Medusa), "lookup", "llm:MODEL" for
    a small LLM (whatever a target can be), or any of them with "+lookup" behind it.

    Raises EyasError, in one line, when there is no such drafter or it does not fit the target.
    """
    if source == LOOKUP:
        return Opened(target, LookupDrafter(target), "")
    if source.endswith(JOIN):
        opened = open_drafter(source.removesuffix(JOIN), target)
        assert opened.drafter is not None
        return Opened(opened.target, JoinedDrafter(target, opened.drafter), opened.hash)
    if source.startswith(SMALL_LLM):
        dtype = str(target.dtype).removeprefix("torch.")
        name = source.removeprefix(SMALL_LLM)
        if not name:
            raise EyasError("llm: needs the name of a model behind it, e.g. llm:FOLDER")
        taps = (0,)  # none is read, and small models may have no default ones
        model = Target.load(name, dtype=dtype, device=str(target.device), weights=target.weights, taps=taps)
        return Opened(target, LLMDrafter(target, model), model.fingerprint)
    head = load_any_head(_folder(source), target)
    tapped = target.tapped(head.config.taps(target))
    return Opened(tapped, drafter_of(tapped, head, weights=target.weights), head_hash(source))


def taps_named(source: str) -> tuple[int, ...] | None:
    """The taps to load a target with for the drafter called `source`; None: any will do."""
    source = source.removesuffix(JOIN)
    return None if source == LOOKUP or source.startswith(SMALL_LLM) else tap_ids(_folder(source))


def _folder(source: str) -> Path:
    folder = Path(source)
    if not source or not folder.is_dir():
        raise EyasError(
            f"no drafter '{source}': give the folder of a head, {LOOKUP}, {SMALL_LLM}MODEL or any of them with {JOIN}"
        )
    return folder


def drafter_of(target: Target, head: DraftHead, *, weights: Weights = "stock") -> Drafter:
    """The drafter that runs `head`, whose taps `target` must have."""
    if isinstance(head, Eagle3Head):
        return Eagle3Drafter(target, head, weights=weights)
    if isinstance(head, Eagle1Head):
        return Eagle1Drafter(target, head, weights=weights)
    assert isinstance(head, MedusaHead)
    return MedusaDrafter(target, head, weights=weights)
