"""Which family of writers a head's config.json comes from."""

from __future__ import annotations

from typing import Any

from eyas.heads.layouts.record import OWN


def recognise(config: dict[str, Any]) -> str:
    """The layout's name, by the marks each writer leaves; plain Llama keys are the authors' (SafeAILab)."""
    if "speculators_model_type" in config:
        return "speculators"
    if OWN in config:
        return "eyas"
    eagle = config.get("eagle_config")
    if isinstance(eagle, dict) and "use_aux_hidden_state" in eagle:
        return "modelopt"
    if "LlamaForCausalLMEagle3" in (config.get("architectures") or []):
        return "specforge"
    return "safeailab"
