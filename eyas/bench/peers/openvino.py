"""`peer:openvino:FOLDER`: OpenVINO GenAI with a head that `eyas export --to openvino` wrote to FOLDER, in float32."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from eyas.bench.peers.peer import UNDERSTOOD, Kind, Peer, counted, files_hash, require_understood, result_of
from eyas.bench.peers.worker import Worker
from eyas.decoding.engine import Request, Result
from eyas.decoding.stats import Stats
from eyas.errors import EyasError
from eyas.export import openvino
from eyas.export.tools import run_tool
from eyas.files import cache_dir
from eyas.locate import locate
from eyas.target import Target

DRAFTS = 3  # a round
TAKEN = UNDERSTOOD - {"min_p"}
PACKAGE = "openvino-genai"


@dataclass
class OpenVinoPeer:
    """GenAI in an environment of its own, one request at a time. It tells the tokens of every round, not where time goes,
    nor how many it drafted: taken as DRAFTS a round, also for the last ones, which it cuts at the limit."""

    target: Target
    max_length: int
    worker: Worker
    engine: str = "OpenVINO GenAI"
    apart: bool = True

    @property
    def policy(self) -> str:
        return f"{self.engine}, chain:{DRAFTS}, float32; one request at a time"

    def generate(self, requests: Iterable[Request]) -> list[Result]:
        return [self._answer(request) for request in requests]

    def _answer(self, request: Request) -> Result:
        params = request.params
        require_understood("peer:openvino", params, TAKEN)
        eos = frozenset() if params.ignore_eos else self.target.eos_ids
        job = {
            "ids": request.ids, "new": params.max_new_tokens, "eos": sorted(eos), "draft": DRAFTS,
            "temperature": params.temperature, "top_p": params.top_p, "top_k": params.top_k, "seed": params.seed,
        }  # fmt: skip
        self.worker.say(json.dumps(job))
        told = json.loads(self.worker.hear(b"\n"))
        drafted = [0, *(DRAFTS for _ in told["rounds"][1:])]
        stats = counted(Stats(prefill_s=told["first_s"]), told["rounds"], drafted)
        return result_of(request, self.target, told["ids"], told["rounds"], stats, eos)


def open_openvino(argument: str, target: Target, rows: int, length: int) -> Peer:
    """Raises EyasError when the head is missing or OpenVINO is not installed, and says how to get it."""
    head, exporter = _head(argument), openvino.find_exporter()
    program = Path(__file__).with_name("openvino_worker.py")
    worker = Worker("OpenVINO", [_python(exporter), "-I", program, _target_model(target, exporter), head])
    if worker.hear(b"\n").strip() != "ready":
        raise EyasError("OpenVINO's worker did not say that it is ready")
    return OpenVinoPeer(target, length, worker, version())


def _head(argument: str) -> Path:
    head = Path(argument)
    if not argument or not (head / openvino.MODEL).is_file():
        raise EyasError(f"peer:openvino:{argument}: no {openvino.MODEL} there; write one by eyas export HEAD --to openvino")
    return head


def _weights(argument: str) -> str:
    model = _head(argument) / openvino.MODEL
    return files_hash(path for path in (model, model.with_suffix(".bin")) if path.is_file())


def _python(exporter: str) -> Path:
    return Path(exporter).with_name("python")


def version() -> str:
    """GenAI's version, told by its environment's interpreter. Raises EyasError when OpenVINO is not installed."""
    asked = f"from importlib.metadata import version; print(version({PACKAGE!r}))"
    try:
        told = subprocess.run([_python(openvino.find_exporter()), "-I", "-c", asked], capture_output=True, text=True).stdout
    except OSError:
        told = ""
    return f"OpenVINO GenAI {told.strip()}".strip()


def _target_model(target: Target, exporter: str) -> Path:
    """The target as an OpenVINO model in float32, converted once and kept."""
    home = cache_dir() / "peers" / f"openvino-{target.fingerprint}"
    if not (home / openvino.MODEL).is_file():
        work = home.with_suffix(".part")
        told = ["--model", locate(target.name), "--task", "text-generation-with-past", "--weight-format", "fp32"]
        run_tool([exporter, "export", "openvino", *told, work], f"it was tried with {openvino.VERSIONS}")
        work.rename(home)
    return home


OPENVINO = Kind(open_openvino, version, TAKEN, weights=_weights)
