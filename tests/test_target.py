"""A target's fingerprint names all that decides its forwards, and a target that is not all there is refused."""

from __future__ import annotations

from typing import Any

import pytest
from accelerate import cpu_offload
from transformers import AutoConfig, AutoModelForCausalLM

from eyas.errors import EyasError
from eyas.target import Target
from tests.tiny import FAMILIES, SHAPE, tiny_target, tiny_tokenizer


def configured(family: str, changes: dict[str, Any]) -> Target:
    """`tiny_target(family)` with the same weights under another configuration."""
    config = AutoConfig.for_model(family, **{**SHAPE, **FAMILIES[family], **changes})
    model = AutoModelForCausalLM.from_config(config)
    model.load_state_dict(tiny_target(family).model.state_dict())
    return Target(model, tiny_tokenizer(), name="configured")


CHANGES = [
    ("llama", {"rope_parameters": {"rope_type": "default", "rope_theta": 20000.0}}),
    ("llama", {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 10000.0}}),
    ("llama", {"rms_norm_eps": 1e-5}),
    ("llama", {"hidden_act": "gelu"}),
    ("mistral", {"sliding_window": 12}),
    ("gemma3_text", {"layer_types": ["sliding_attention"] * 4 + ["full_attention"] * 4}),
    ("gemma3_text", {"query_pre_attn_scalar": 64}),
    ("deepseek_v3", {"routed_scaling_factor": 1.0}),
]


@pytest.mark.parametrize(("family", "changes"), CHANGES)
def test_another_configuration_of_the_same_weights_has_another_fingerprint(family: str, changes: dict[str, Any]) -> None:
    target = tiny_target(family)
    assert configured(family, {}).fingerprint == target.fingerprint
    assert configured(family, changes).fingerprint != target.fingerprint


def test_how_a_configuration_is_spelt_does_not_matter() -> None:
    spelt = {"rope_parameters": {"rope_theta": 10000, "rope_type": "default", "factor": None}, "head_dim": 16}
    assert configured("llama", spelt).fingerprint == tiny_target("llama").fingerprint
    half = AutoModelForCausalLM.from_config(tiny_target("llama").model.config)
    half.load_state_dict(tiny_target("llama").model.state_dict())
    assert Target(half.bfloat16(), tiny_tokenizer(), name="half").fingerprint == tiny_target("llama").fingerprint


def test_a_target_with_parameters_left_out_of_its_devices_is_refused() -> None:
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model("llama", **SHAPE))
    with pytest.raises(EyasError, match=r"does not fit its devices: \d+ of its parameters were left out of them") as caught:
        Target(cpu_offload(model), tiny_tokenizer(), name="offloaded")
    assert "\n" not in str(caught.value)
