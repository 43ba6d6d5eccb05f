"""NVIDIA ModelOpt's layout: SpecForge's keys, and flags for variants of the network in `eagle_config`.

Source: modelopt/torch/export/plugins/hf_spec_export.py and hf_spec_configs.py (0.47).
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from eyas.errors import EyasError
from eyas.heads.config import HeadConfig
from eyas.heads.layouts import flat
from eyas.target import Target

_EAGLE3 = {
    "use_aux_hidden_state": True,
    "use_input_layernorm_in_first_layer": True,
    "use_last_layernorm": True,
    "use_mtp_layernorm": False,
}


def read(config: dict[str, Any], tensors: dict[str, Tensor], target: Target) -> HeadConfig:
    """The configuration of the head whose config.json is `config`; raises as `flat.read` does."""
    flags = config["eagle_config"]
    for flag, meant in _EAGLE3.items():
        if flags.get(flag) not in (None, meant):
            raise EyasError(f"eagle_config.{flag} is {flags[flag]}: such a head is no EAGLE-3 head")
    if (flags.get("parallel_draft_step") or 1) > 1:
        raise EyasError("eagle_config.parallel_draft_step is above 1: parallel draft heads are not supported")
    return flat.read(config, tensors, target)
