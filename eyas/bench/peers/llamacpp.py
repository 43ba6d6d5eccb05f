"""`peer:llamacpp:FOLDER`: llama.cpp's own speculative decoding with a head that `eyas export --to gguf` wrote to FOLDER."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from eyas.bench.peers.peer import UNDERSTOOD, Kind, Peer, counted, files_hash, require_understood, result_of
from eyas.bench.peers.worker import Worker
from eyas.decoding.engine import Request, Result
from eyas.decoding.stats import Stats
from eyas.errors import EyasError
from eyas.export import gguf
from eyas.export.tools import run_tool
from eyas.files import cache_dir, replacing
from eyas.locate import locate
from eyas.target import Target

HOME = "EYAS_LLAMACPP_HOME"  # names the folder of llama.cpp's source and of the program that runs it
PROGRAM = Path("lib", "chain")
DRAFTS = 3  # a round
CACHES = ("-ctk", "-ctv", "-ctkd", "-ctvd")
GREEDY = UNDERSTOOD - {"temperature", "ignore_eos"}  # it takes the likeliest token, up to the end of the text
LIBRARY = "libllama.v*.so"  # its name tells the version


@dataclass
class LlamaCppPeer:
    """llama.cpp in a program of its own: greedy, one request at a time. It tells the tokens of every round, not
    where its time goes."""

    target: Target
    max_length: int
    worker: Worker
    head: bool = True
    engine: str = "llama.cpp"
    apart: bool = True

    @property
    def policy(self) -> str:
        return f"{self.engine}, chain:{DRAFTS if self.head else 0}, float32; one request at a time"

    def generate(self, requests: Iterable[Request]) -> list[Result]:
        return [self._answer(request) for request in requests]

    def _answer(self, request: Request) -> Result:
        params = request.params
        require_understood("peer:llamacpp", params, GREEDY)
        begun = time.perf_counter()
        self.worker.say(" ".join(map(str, [params.max_new_tokens, *request.ids])))
        first = self.worker.hear(b" ")
        prefill = time.perf_counter() - begun
        told = [[int(word) for word in part.split()] for part in (first + self.worker.hear(b"\n")).split("|")]
        rounds = [len(part) for part in told]
        drafted = [0, *(DRAFTS if self.head else 0 for _ in rounds[1:])]
        stats = counted(Stats(prefill_s=prefill), rounds, drafted)
        ids = [token for part in told for token in part]
        return result_of(request, self.target, ids, rounds, stats, self.target.eos_ids)


def open_llamacpp(argument: str, target: Target, rows: int, length: int) -> Peer:
    """Raises EyasError when the head is missing or llama.cpp is not installed, and says how to get it."""
    head, program = _head(argument), _program()
    worker = Worker("llama.cpp", command(program, _target_model(target), length, head))
    return LlamaCppPeer(target, length, worker, engine=version())


def _head(argument: str) -> Path:
    head = Path(argument) / gguf.FILE
    if not argument or not head.is_file():
        raise EyasError(f"peer:llamacpp:{argument}: no {gguf.FILE} there; write one by eyas export HEAD --to gguf --out FOLDER")
    return head


def _program() -> Path:
    home = Path(os.environ.get(HOME, ".llamacpp"))
    program = home / PROGRAM
    if not program.is_file():
        raise EyasError(f"llama.cpp is not in {home}; run: make .llamacpp/lib/chain, and name the folder in {HOME}")
    return program


def version() -> str:
    """llama.cpp's version, as the library beside the program is called. Raises EyasError when it is not installed."""
    library = next(_program().parent.glob(LIBRARY), None)
    return "llama.cpp" if library is None else f"llama.cpp {library.stem.partition('.v')[2]}"


def command(program: Path, model: Path, length: int, head: Path | None) -> list[str | Path]:
    """How the program is run: everything in float32, texts of up to `length` tokens."""
    threads = os.environ.get("OMP_NUM_THREADS", str(os.cpu_count()))
    room = str(length + DRAFTS + 1)
    words: list[str | Path] = [program, "--model", model, "--ctx-size", room, "--batch-size", room, "--flash-attn", "off"]
    words += [word for cache in CACHES for word in (cache, "f32")]
    words += ["--threads", threads]
    if head is not None:
        words += ["--model-draft", head, "--spec-type", "draft-eagle3", "--spec-draft-n-max", str(DRAFTS)]
    return words


def _target_model(target: Target) -> Path:
    """The target as a GGUF file in float32, converted once and kept."""
    path = cache_dir() / "peers" / f"{target.fingerprint}-f32.gguf"
    if not path.is_file():
        with replacing(path) as part:
            run_tool(
                [sys.executable, gguf.find_converter(), locate(target.name), "--outtype", "f32", "--outfile", part],
                "it needs the packages of eyas' extra 'gguf'",
            )
    return path


LLAMACPP = Kind(open_llamacpp, version, GREEDY, weights=lambda argument: files_hash([_head(argument)]))
