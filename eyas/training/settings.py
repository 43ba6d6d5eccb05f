"""The settings of a run as a user gives them: a YAML file, assignments, flags. `TrainConfig` is their only schema."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, ValidationError

from eyas.errors import EyasError
from eyas.training.config import TrainConfig


def read_train_config(path: Path | None, assignments: list[str], given: dict[str, Any]) -> TrainConfig:
    """The settings in the YAML file `path`, then `assignments` "key=value" (dotted keys, YAML values), then those `given`
    that are not None; later ones win.

    Raises EyasError, in one line, for what cannot be read or makes no sense.
    """
    settings = _yaml_file(path) if path else {}
    assign(settings, assignments)
    settings.update({key: value for key, value in given.items() if value is not None})
    try:
        return TrainConfig(**settings)
    except ValidationError as error:
        raise EyasError(_told(error.errors()[0])) from error
    except TypeError as error:
        raise EyasError(f"the settings cannot be read: {error}") from error


def assign(settings: dict[str, Any], assignments: Sequence[str]) -> None:
    """Put `key=value` and `group.key=value` into `settings`. Raises EyasError for what is neither, or no YAML."""
    for assignment in assignments:
        key, mark, value = assignment.partition("=")
        if not mark:
            raise EyasError(f"--set {assignment!r} is not of the form key=value")
        place = settings
        *parents, last = key.strip().split(".")
        for parent in parents:
            place = place.setdefault(parent, {})
            if not isinstance(place, dict):
                raise EyasError(f"--set {assignment!r}: {parent} is no group of settings")
        try:
            place[last] = yaml.safe_load(value)
        except yaml.YAMLError as error:
            raise EyasError(f"--set {assignment!r}: the value cannot be read as YAML") from error


def _told(fault: Any) -> str:
    where = ".".join(str(part) for part in fault["loc"])
    if fault["type"] == "extra_forbidden":
        return f"there is no setting '{where}'; `eyas train --show-settings` lists them"
    return f"{where + ': ' if where else ''}{fault['msg'].removeprefix('Value error, ')}"


def _yaml_file(path: Path) -> dict[str, Any]:
    try:
        read = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise EyasError(f"cannot read the settings in {path}: {error.strerror}") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise EyasError(f"{path} is no YAML: {str(error).splitlines()[0]}") from error
    if not isinstance(read, dict):
        raise EyasError(f"{path} holds no settings (key: value lines)")
    return read


def describe_settings() -> str:
    """Every setting with its default and meaning, as a YAML file that can be edited."""
    return "\n".join(_described(TrainConfig, ""))


def _described(model: type[BaseModel], indent: str) -> list[str]:
    lines = []
    for name, field in model.model_fields.items():
        note = f"  # {field.description}" if field.description else ""
        if isinstance(field.default, BaseModel):
            lines += [f"{indent}{name}:{note}", *_described(type(field.default), indent + "  ")]
            continue
        default = list(field.default) if isinstance(field.default, tuple) else field.default
        value = yaml.safe_dump(default, default_flow_style=True, width=200).removesuffix("...\n").strip()
        lines.append(f"{indent}{name}: {value}{note}")
    return lines
