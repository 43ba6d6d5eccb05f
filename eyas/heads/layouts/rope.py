"""Rotary settings in both forms that configurations use: `rope_parameters`, or `rope_theta` beside `rope_scaling`."""

from __future__ import annotations

from typing import Any

from eyas.errors import EyasError

DEFAULT_THETA = 10000.0  # where a head's config gives no base: what its authors' code, vLLM and SGLang then take


def read_rope(config: dict[str, Any]) -> dict[str, Any]:
    """The rotary settings of a config.json as one record with `rope_type` and `rope_theta`.

    A base that is not given is 10000, never the target's: the public heads without one were trained so. Raises EyasError
    when two places contradict each other.
    """
    new, old = _flat(config.get("rope_parameters")), _flat(config.get("rope_scaling"))
    places = {
        "rope_theta": config.get("rope_theta"),
        "rope_parameters": new.get("rope_theta"),
        "rope_scaling": old.get("rope_theta"),
    }
    given = {place: theta for place, theta in places.items() if theta is not None}
    if len(set(given.values())) > 1:
        told = " and ".join(f"{theta:g} in {place}" for place, theta in given.items())
        raise EyasError(f"it gives two rotary bases, {told}; keep the one the head was trained with")
    if new and old and _scaling(new) != _scaling(old):
        raise EyasError("rope_parameters and rope_scaling contradict each other; keep the one the head was trained with")
    rope = _scaling(new or old)
    partial = rope.pop("partial_rotary_factor", config.get("partial_rotary_factor"))
    if partial not in (None, 1, 1.0):
        raise EyasError(f"partial_rotary_factor is {partial}; eyas heads rotate the whole head_dim")
    return {**rope, "rope_theta": float(next(iter(given.values()), DEFAULT_THETA))}


def write_rope(rope: dict[str, Any]) -> dict[str, Any]:
    """The keys of a config.json for `rope`, in the new form and in the old one for readers that know only that."""
    scaling = _scaling(rope)
    keys = {"rope_theta": rope["rope_theta"], "rope_parameters": rope}
    return keys if scaling["rope_type"] == "default" else {**keys, "rope_scaling": scaling}


def _flat(given: Any) -> dict[str, Any]:
    """A setting that differs by kind of layer gives that of full attention."""
    if not isinstance(given, dict):
        return {}
    return dict(given.get("full_attention") or {}) if any(isinstance(v, dict) for v in given.values()) else dict(given)


def _scaling(rope: dict[str, Any]) -> dict[str, Any]:
    """`rope` without its base, its kind under the new name."""
    kind = rope.get("rope_type") or rope.get("type") or "default"
    return {"rope_type": kind, **{k: v for k, v in rope.items() if k not in ("rope_type", "type", "rope_theta")}}
