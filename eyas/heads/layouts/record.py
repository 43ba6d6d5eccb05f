"""Our own key of config.json, which engines pass over: the target that a head was trained for."""

from __future__ import annotations

from typing import Any

from eyas.heads.config import TargetedConfig

OWN = "eyas_head"
_FIELDS = ("target_name", "target_fingerprint", "target_layers")


def read_record(config: dict[str, Any]) -> dict[str, Any]:
    """Those of the record's fields that a config.json holds."""
    record = config.get(OWN)
    return {key: record[key] for key in _FIELDS if key in record} if isinstance(record, dict) else {}


def write_record(config: TargetedConfig) -> dict[str, Any]:
    """The key and the fields that this kind of head has."""
    return {OWN: {key: getattr(config, key) for key in _FIELDS if hasattr(config, key)}}
