"""Which hidden states of the target a head reads, as configurations tell it. Here tap i is `hidden_states[i]`.

The same three states have two names: the top-level key of a config.json counts states ENTERING a layer, as vLLM and llama.cpp
read it; `eagle_config` counts layers whose OUTPUT is taken, as SpecForge and ModelOpt write it and SGLang reads it (one less).
"""

from __future__ import annotations

from typing import Any

from eyas.errors import EyasError

KEY = "eagle_aux_hidden_state_layer_ids"


def read_taps(config: dict[str, Any]) -> tuple[int, ...] | None:
    """The taps that a config.json names, None where it leaves them to the default (2, L//2, L-3).

    Raises EyasError when they are no three distinct ids or the two places contradict each other.
    """
    eagle = config.get("eagle_config")
    entering, leaving = config.get(KEY), eagle.get(KEY) if isinstance(eagle, dict) else None
    for ids in (entering, leaving):
        if ids and (not isinstance(ids, list) or len(set(map(str, ids))) != 3 or not all(type(i) is int for i in ids)):
            raise EyasError(f"{KEY} must be three distinct layer numbers, not {ids}")
    if entering and leaving and [i + 1 for i in leaving] != entering:
        raise EyasError(f"{KEY} is {entering} and in eagle_config {leaving}, where it must be one less; correct the wrong one")
    if entering:
        return tuple(entering)
    return tuple(i + 1 for i in leaving) if leaving else None


def write_taps(taps: tuple[int, ...]) -> dict[str, Any]:
    """Both keys of a config.json for `taps`."""
    return {KEY: list(taps), "eagle_config": {KEY: [t - 1 for t in taps]}}
