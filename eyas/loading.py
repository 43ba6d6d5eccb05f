"""From a directory or hub id to a transformers model: plain, quantised (whatever transformers loads), or a base with an
adapter (LoRA and its kin, as peft writes them), whose weights are merged into the base's so that the target is a plain model.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerBase

from eyas.errors import EyasError
from eyas.locate import ADAPTER, locate


def load_model(
    path: str, *, dtype: torch.dtype, device_map: str | dict[str, Any], name: str
) -> tuple[Any, PreTrainedTokenizerBase]:
    """The model in `path` with its tokenizer; `device_map` as transformers takes it; `name` is what the user called it.

    Raises EyasError when it is missing or broken, or when peft is needed and not installed.
    """
    folder = Path(path)
    adapted = (folder / ADAPTER).is_file()
    try:
        base = locate(_base_of(folder)) if adapted else path
        model = AutoModelForCausalLM.from_pretrained(base, dtype=dtype, device_map=device_map)
        if adapted:
            model = _with_adapter(model, path)
        own = adapted and (folder / "tokenizer_config.json").is_file()
        tokenizer = AutoTokenizer.from_pretrained(path if own else base)
    except EyasError as error:
        raise EyasError(f"cannot load the target '{name}': {error}") from error
    except (OSError, ValueError, KeyError, TypeError, RuntimeError, ImportError, SafetensorError) as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        where = "" if folder.is_dir() else "it is no folder here, and as a hub id: "
        raise EyasError(f"cannot load the target '{name}': {where}{reason}") from error
    return model, tokenizer


def _base_of(folder: Path) -> str:
    """The model that the adapter in `folder` was trained on; a relative directory is looked for beside the adapter too."""
    told = json.loads((folder / ADAPTER).read_text(encoding="utf-8")).get("base_model_name_or_path")
    if not isinstance(told, str) or not told:
        raise EyasError(f"{folder / ADAPTER} does not name the model it adapts (base_model_name_or_path)")
    beside = folder / told
    return str(beside) if beside.is_dir() else told


def _with_adapter(model: Any, path: str) -> Any:
    """`model` with the adapter in `path` merged in; on a quantised model, whose weights would be rounded anew, beside it."""
    try:
        from peft import PeftModel
    except ImportError:
        raise EyasError("it is an adapter, which needs peft; run: pip install 'eyas[lora]'") from None
    adapted = PeftModel.from_pretrained(model, path)
    if getattr(model, "is_quantized", False):
        return adapted.get_base_model()
    return adapted.merge_and_unload()
