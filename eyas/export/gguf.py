"""llama.cpp: one GGUF file, made by its own converter from our own layout."""

from __future__ import annotations

import os
import shlex
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from eyas.errors import EyasError
from eyas.export import vllm
from eyas.export.engine import Engine, Order
from eyas.export.tools import run_tool, target_folder
from eyas.heads.config import HeadConfig
from eyas.target import Target

FILE = "head.gguf"
CONVERTER = "convert_hf_to_gguf.py"
SOURCE = "EYAS_LLAMA_CPP"  # names the folder of llama.cpp's source
OUTTYPES = {"float32": "f32", "bfloat16": "bf16", "float16": "f16"}
ROPES = ("default", "linear", "yarn", "llama3")


def refusals(config: HeadConfig, target: Target) -> Iterator[str]:
    """What `conversion/llama.py` and `models/eagle3.cpp` have no place for."""
    if config.num_layers > 1:
        yield "it has one layer"
    if config.qkv_bias or config.o_bias or config.mlp_bias or config.fc_bias:
        yield "it has no biases"
    if config.fc_norm or config.norm_output or config.qk_norm:
        yield "it has none of fc_norm, norm_output and qk_norm"
    if config.rope["rope_type"] not in ROPES:
        yield f"it has no rotary scaling of the type '{config.rope['rope_type']}'"


def write(order: Order, folder: Path) -> None:
    """Raises EyasError when the converter is not here or fails."""
    converter, target = find_converter(), target_folder(order)
    with tempfile.TemporaryDirectory() as work:
        vllm.write(order, Path(work))
        run_tool(
            [sys.executable, converter, work, "--target-model-dir", target, "--outtype", OUTTYPES[order.dtype],
             "--outfile", folder / FILE],
            "it needs the packages of eyas' extra 'gguf'",
        )  # fmt: skip


def find_converter() -> Path:
    """llama.cpp's converter, in $EYAS_LLAMA_CPP or on the PATH. Raises EyasError, saying how to get it, when it is not."""
    source = os.environ.get(SOURCE)
    found = Path(source) / CONVERTER if source else Path(shutil.which(CONVERTER) or CONVERTER)
    if not found.is_file():
        raise EyasError(
            f"llama.cpp's {CONVERTER} is not {f'in {source}' if source else 'on the PATH'}; clone ggml-org/llama.cpp and name "
            f"its folder in {SOURCE}"
        )
    return found


def serving(order: Order, place: Path) -> str:
    """llama.cpp serves a GGUF target: the user's own where one was given, else one that its converter makes."""
    given = Path(order.target.name).expanduser()
    model = given.resolve() if given.suffix == ".gguf" else Path("target.gguf")
    command = (
        f"llama-server --model {shlex.quote(str(model))} --spec-type draft-eagle3 \\\n"
        f"  --model-draft {shlex.quote(str(place / FILE))} --spec-draft-n-max {order.draft_tokens}"
    )
    if given.suffix == ".gguf":
        return command
    convert = shlex.join(["python", str(find_converter()), order.served_target, "--outtype", OUTTYPES[order.dtype]])
    return f"{convert} --outfile {model}\n{command}"


ENGINE = Engine("llama.cpp 0.5", refusals, write, serving)
