"""Export: a head on disk, written for one engine, with the command that serves it and a model card."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

from eyas.errors import EyasError, why_not_written
from eyas.export import authors, gguf, openvino, sglang, speculators, vllm
from eyas.export.card import write_card
from eyas.export.casting import cast
from eyas.export.engine import Engine, Order
from eyas.files import write_text
from eyas.heads.files import load_head, stored_tensors
from eyas.locate import locate, stored_dtype
from eyas.target import Target

ENGINES: dict[str, Engine] = {
    "vllm": vllm.ENGINE,
    "speculators": speculators.ENGINE,
    "sglang": sglang.ENGINE,
    "openvino": openvino.ENGINE,
    "gguf": gguf.ENGINE,
    "authors": authors.ENGINE,
}


def engine_named(name: str) -> Engine:
    """The engine `name`. Raises EyasError when there is none."""
    if name not in ENGINES:
        raise EyasError(f"cannot export to '{name}'; choose one of {', '.join(ENGINES)}")
    return ENGINES[name]


def export_head(
    folder: Path, target: Target, to: str, out: Path, *,
    dtype: str | None = None, report: Path | None = None, licence: str | None = None,
) -> Path:  # fmt: skip
    """Write the head in `folder`, trained for `target`, to the new folder `out` for the engine `to`; returns `out`.

    `dtype` is that of the weights, by default the one the target is stored in, which is what the engine will serve. `report`
    is a race (`eyas bench --json`) whose acceptance the model card shows, `licence` an SPDX name for it. Raises EyasError when
    the engine would compute something else than the head does, when a value does not fit `dtype`, when the report is not
    about this head and target, or when `out` holds files already.
    """
    engine = engine_named(to)
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise EyasError(f"{out} exists and is not empty; give a new folder")
    head = load_head(folder, target)
    reasons = list(engine.refusals(head.config, target))
    if reasons:
        raise EyasError(f"{engine.name} cannot run the head {folder} as it was trained: {'; '.join(reasons)}")
    try:
        served = locate(target.name)
    except EyasError:  # it is loaded, so it exists, only not where its name says: serve it by that name
        served = target.name
    dtype = dtype or stored_dtype(served)
    length = max(head.config.max_position_embeddings, target.max_length)  # shorter ones break long prompts
    config = head.config.model_copy(update={"max_position_embeddings": length})
    served = str(Path(served).resolve()) if Path(served).is_dir() else served
    order = Order(config, cast(stored_tensors(head), dtype), target, served, dtype)
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        work = Path(tempfile.mkdtemp(dir=out.parent, prefix=f".{out.name}-"))
    except OSError as error:
        raise EyasError(f"cannot write {out}: {why_not_written(error)}") from error
    try:
        engine.write(order, work)
        write_text(work / "README.md", write_card(engine, order, folder, out.resolve(), report=report, licence=licence))
        work.chmod(0o755)
        work.replace(out)
    except OSError as error:
        raise EyasError(f"cannot write {out}: {why_not_written(error)}") from error
    finally:
        shutil.rmtree(work, ignore_errors=True)
    return out
