"""OpenVINO GenAI: the head as an OpenVINO model (IR), made by optimum-intel's own exporter from our own layout."""

from __future__ import annotations

import os
import shlex
import shutil
import tempfile
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import torch

from eyas.errors import EyasError
from eyas.export import vllm
from eyas.export.engine import Engine, Order
from eyas.export.tools import run_tool
from eyas.heads.config import HeadConfig
from eyas.target import Target

MODEL = "openvino_model.xml"
PROGRAM = "optimum-cli"
NAMED = "EYAS_OPTIMUM_CLI"  # names the program where it is not on the PATH
VERSIONS = "optimum 2.3.0 and optimum-intel 2.2.0 (both without dependencies) with transformers 5.5 and openvino-genai 2026.4.1"


def refusals(config: HeadConfig, target: Target) -> Iterator[str]:
    """What optimum-intel's `LlamaEagle3Model` and OpenVINO GenAI have no place for, or compute in another way."""
    if config.num_layers > 1:
        yield "it has one layer"
    if config.qkv_bias or config.o_bias or config.mlp_bias or config.fc_bias:
        yield "it has no biases"
    if config.norm_before_residual or config.fc_norm or config.norm_output or config.qk_norm:
        yield "it has none of norm_before_residual, fc_norm, norm_output and qk_norm"
    if config.own_embedding:
        yield "it replaces the head's own embedding by the target's"
    if 0 in config.tap_ids:
        yield "it taps what layers give, so not the embedding (tap 0)"
    if list(config.tap_ids) != sorted(config.tap_ids):
        yield "it joins the taps in ascending order"


def write(order: Order, folder: Path) -> None:
    """Half precision is kept where OpenVINO has it; bfloat16 is written as the float32 of the same value.

    Raises EyasError when the exporter is not here or fails.
    """
    program = find_exporter()
    wide = {name: t.to(torch.float32) if t.is_floating_point() else t for name, t in order.tensors.items()}
    with tempfile.TemporaryDirectory() as work:
        vllm.write(replace(order, tensors=wide, dtype="float32"), Path(work))
        run_tool(
            [program, "export", "openvino", "--model", work, "--task", "text-generation-with-past", "--weight-format",
             weight_format(order), "--trust-remote-code", folder],
            f"it was tried with {VERSIONS}",
        )  # fmt: skip
    write_taps(folder / MODEL, order.config.tap_ids)


def weight_format(order: Order) -> str:
    """The precision by optimum's name for it."""
    return "fp16" if order.dtype == "float16" else "fp32"


def write_taps(path: Path, tap_ids: tuple[int, ...]) -> None:
    """Note in the model at `path` which layers GenAI taps: it reads no config, and counts by the layer that gives the state.

    Raises EyasError when the model is not marked as an EAGLE-3 head.
    """
    tree = ElementTree.parse(path)
    notes = tree.find("rt_info")
    if notes is None or notes.find("eagle3_mode") is None:
        raise EyasError(f"{PROGRAM} did not take the head for an EAGLE-3 head; it was tried with {VERSIONS}")
    ElementTree.SubElement(notes, "hidden_layers_list", value=" ".join(str(tap - 1) for tap in tap_ids))
    tree.write(path, encoding="utf-8", xml_declaration=True)


def find_exporter() -> str:
    """optimum-cli, as $EYAS_OPTIMUM_CLI names it or on the PATH. Raises EyasError, saying how to get it, when it is not."""
    program = os.environ.get(NAMED) or shutil.which(PROGRAM)
    if program is None or not Path(program).is_file():
        raise EyasError(
            f"{program or PROGRAM} is not here; install {VERSIONS} in an environment of its own, and name its {PROGRAM} "
            f"in {NAMED}"
        )
    return program


def serving(order: Order, place: Path) -> str:
    convert = shlex.join([find_exporter(), "export", "openvino", "--model", order.served_target])
    return (
        f"# once: {convert} \\\n"
        f"#       --task text-generation-with-past --weight-format {weight_format(order)} target\n"
        "import openvino_genai as genai\n\n"
        f'pipe = genai.LLMPipeline("target", "CPU", draft_model=genai.draft_model({str(place)!r}, "CPU"))\n'
        'print(pipe.generate("Why is the sky blue?", max_new_tokens=256, '
        f"num_assistant_tokens={order.draft_tokens}))"
    )


ENGINE = Engine("OpenVINO GenAI 2026.4", refusals, write, serving, language="python")
