"""Is something on the model hub, and can the hub be reached at all: asked once and briefly, where the libraries would go on
trying for a minute. And what is there brought here."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import httpx2
from huggingface_hub import HfApi, snapshot_download
from huggingface_hub.errors import HFValidationError, RepositoryNotFoundError

from eyas.errors import EyasError

HEAD_FILES = ["*.json", "*.safetensors", "*.bin"]
REACH_S = 5.0  # how long to wait for the hub


class Unreachable(EyasError):
    """The hub does not answer."""


def on_hub(name: str, kind: Literal["model", "dataset"]) -> bool:
    """Whether the hub shows a `kind` of that name. Raises Unreachable when it does not answer or is switched off."""
    try:
        HfApi().repo_info(name, repo_type=kind, timeout=REACH_S)
    except (RepositoryNotFoundError, HFValidationError):
        return False
    except (httpx2.HTTPError, OSError) as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise Unreachable(f"the hub cannot be reached ({reason})") from error
    return True


def hub_model(name: str) -> str:
    """`name` where the hub has that model, or the folder of its copy in the hub's own cache while the hub cannot be reached.

    Raises EyasError, within seconds, when it has none, or there is neither.
    """
    try:
        if on_hub(name, "model"):
            return name
    except Unreachable as gone:
        try:
            return snapshot_download(name, local_files_only=True)
        except (OSError, ValueError):
            raise EyasError(f"'{name}' is no folder here, {gone}, and its cache holds no copy of such a model") from gone
    raise EyasError(
        f"'{name}' is no folder here, and the hub shows no such model (a private one needs `hf auth login` or HF_TOKEN)"
    )


def hub_folder(name: str) -> Path:
    """The folder of a copy of the hub's head `name`, which is brought here where the cache lacks it.

    Raises EyasError as `hub_model` does, or when it cannot be fetched.
    """
    found = hub_model(name)
    if found != name:
        return Path(found)
    try:
        return Path(snapshot_download(name, allow_patterns=HEAD_FILES))
    except (httpx2.HTTPError, OSError, ValueError) as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise EyasError(f"cannot fetch '{name}' from the hub: {reason}") from error
