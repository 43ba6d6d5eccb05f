"""Compiles the C++ operators once and loads them as `torch.ops.eyas.*`.

The compiler is called directly, for one small library without Python bindings: no build tool is needed, and a lock that
the operating system drops with its holder cannot be left behind by a killed process.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.cpp_extension import TORCH_LIB_PATH, include_paths

from eyas.files import cache_dir
from eyas.progress import console

HERE = Path(__file__).parent
SOURCES = [HERE / f"{name}.cpp" for name in ("linear", "norm", "heads", "attention", "blocks", "cache")]
HEADERS = [HERE / f"{name}.h" for name in ("team", "vec", "rows", "linear", "heads", "attention")]
Maybe = Tensor | None
AVX2 = ["-mavx2", "-mfma", "-mf16c"]


_state: dict[str, bool] = {}  # "ready" once known


@torch.compiler.assume_constant_result
def kernels_ready() -> bool:
    """Whether `torch.ops.eyas` is usable; the first call compiles (a minute, once per machine and torch) and loads.

    Without a C++ compiler, or when EYAS_KERNELS=0, it prints one line and returns False: torch's operators stand in.
    """
    if "ready" not in _state:
        _state["ready"] = _load()
    return _state["ready"]


def _load() -> bool:
    fault = "switched off by EYAS_KERNELS=0" if os.environ.get("EYAS_KERNELS") == "0" else None
    if fault is None:
        try:
            torch.ops.load_library(str(_library()))
        except (OSError, subprocess.SubprocessError) as error:
            fault = str(error).strip().splitlines()[0]
    if fault is not None:
        console.print(f"eyas' kernels are unavailable ({fault}): torch's stand in, slower and not exact across batches")
        return False
    _register_fakes()
    return True


def _library() -> Path:
    """The compiled library, built under a lock if this version of it is not yet in the cache."""
    flags = ["-O3", "-std=c++20", "-fPIC", "-fopenmp", "-ffp-contract=off", "-fno-math-errno"]
    flags += AVX2 if torch.backends.cpu.get_cpu_capability() in ("AVX2", "AVX512") else []
    flags += [f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}"]
    digest = hashlib.sha256("\0".join([torch.__version__, platform.machine(), *flags]).encode())
    for source in SOURCES + HEADERS:
        digest.update(source.read_bytes())
    home = cache_dir() / "kernels"
    home.mkdir(parents=True, exist_ok=True)
    library = home / f"eyas-{digest.hexdigest()[:16]}.so"
    with (home / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not library.exists():
            _compile(flags, library)
    return library


def _compile(flags: list[str], library: Path) -> None:
    compiler = os.environ.get("CXX") or shutil.which("g++") or shutil.which("clang++") or shutil.which("c++")
    if compiler is None:
        raise OSError("no C++ compiler found; install g++ or set CXX")
    console.print(f"compiling eyas' kernels once (kept in {library.parent})")
    includes = [part for path in include_paths() for part in ("-isystem", path)]
    with tempfile.TemporaryDirectory(dir=library.parent) as work:
        objects = [str(Path(work) / f"{source.stem}.o") for source in SOURCES]
        made = Path(work) / "made.so"
        with ThreadPoolExecutor() as pool:
            compile_one = [compiler, *flags, *includes, "-c"]
            list(pool.map(_run, [[*compile_one, str(s), "-o", o] for s, o in zip(SOURCES, objects, strict=True)]))
        _run([compiler, *flags, "-shared", *objects, f"-L{TORCH_LIB_PATH}", "-ltorch_cpu", "-lc10", "-o", str(made)])
        made.rename(library)


def _run(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        first = next((line for line in done.stderr.splitlines() if "error" in line), "no message")
        raise OSError(f"{command[0]} failed: {first}")


def _register_fakes() -> None:
    """Shapes of the operators' results, so that torch.compile can trace them."""

    @torch.library.register_fake("eyas::packed_linear")
    def _(x: Tensor, packed: Tensor, scale: Maybe, bias: Maybe, add: Maybe, out_features: int) -> Tensor:
        return x.new_empty(*x.shape[:-1], out_features)

    @torch.library.register_fake("eyas::attend")
    def _(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scale: float) -> Tensor:
        return q.new_empty(q.shape[0], q.shape[2], q.shape[1], v.shape[3])

    @torch.library.register_fake("eyas::rms_norm")
    def _(x: Tensor, weight: Tensor, eps: float) -> Tensor:
        return x.new_empty(x.shape)

    @torch.library.register_fake("eyas::project_heads")
    def _(x: Tensor, *parts: Any) -> tuple[Tensor, Tensor, Tensor]:
        heads, kv_heads, dim = parts[-3:]
        shape = x.shape[1], dim
        return tuple(x.new_empty(x.shape[0], count, *shape) for count in (heads, kv_heads, kv_heads))  # type: ignore[return-value]

    @torch.library.register_fake("eyas::write_slots")
    def _(keys_to: Tensor, values_to: Tensor, keys: Tensor, values: Tensor, slots: Tensor) -> None:
        return None

    for name in ("gated_mlp", "decoder_layer"):

        @torch.library.register_fake(f"eyas::{name}")
        def _(x: Tensor, *parts: Any) -> Tensor:
            return x.new_empty(x.shape)
