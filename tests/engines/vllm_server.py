"""A vLLM server of a test: started from its own environment, asked over HTTP, its counters read from /metrics."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import time
import urllib.request
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from tests.engines.counts import Counts

START_WITHIN = ANSWER_WITHIN = 600  # seconds, on a busy machine
ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # cores are not vLLM's alone
    "VLLM_NO_USAGE_STATS": "1",
}


class VllmServer:
    """A running server."""

    def __init__(self, address: str) -> None:
        self._address = address

    def complete(self, prompts: Sequence[Sequence[int]], max_tokens: int) -> list[list[int]]:
        """The token ids of the greedy answers to `prompts`, all asked at once."""

        def one(prompt: Sequence[int]) -> list[int]:
            body = {
                "model": "target", "prompt": list(prompt), "max_tokens": max_tokens, "temperature": 0,
                "return_token_ids": True,
            }  # fmt: skip
            (choice,) = json.loads(self._http("/v1/completions", body))["choices"]
            return list(choice["token_ids"])

        with ThreadPoolExecutor(len(prompts)) as pool:
            return list(pool.map(one, prompts))

    def counts(self, depth: int) -> Counts:
        """What the server, which drafts `depth` tokens a round, counted since its start."""
        told = self._http("/metrics")

        def read(name: str, labels: str = "") -> int:
            found = re.search(rf"^vllm:spec_decode_{name}_total{{[^}}]*{labels}[^}}]*}} (\S+)$", told, re.MULTILINE)
            assert found, f"the server has no counter {name}{labels}"
            return int(float(found[1]))

        accepted = [read("num_accepted_tokens_per_pos", f'position="{place}"') for place in range(depth)]
        assert read("num_draft_tokens") == depth * read("num_drafts")
        assert sum(accepted) == read("num_accepted_tokens")
        return Counts(read("num_drafts"), tuple(accepted))

    def _http(self, path: str, body: dict[str, Any] | None = None) -> str:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self._address + path, data, {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=ANSWER_WITHIN) as answer:
            return str(answer.read().decode())


@contextmanager
def vllm_server(python: Path, serve: Sequence[str], log: Path) -> Iterator[VllmServer]:
    """Run the command `serve`, "python -m ...", with the vLLM of `python`; what it prints goes to `log`."""
    assert serve[0] == "python"
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [
        str(python), *serve[1:], "--served-model-name", "target", "--enforce-eager", "--max-model-len", "1024",
        "--max-num-seqs", "10", "--host", "127.0.0.1", "--port", str(port),
    ]  # fmt: skip
    environment = {"OMP_NUM_THREADS": "1", **os.environ, **ENVIRONMENT}
    with log.open("w") as out:
        process = subprocess.Popen(command, env=environment, stdout=out, stderr=out, start_new_session=True)
        try:
            address = f"http://127.0.0.1:{port}"
            _wait(process, address, log)
            yield VllmServer(address)
        finally:
            _stop(process)


def _wait(process: subprocess.Popen[bytes], address: str, log: Path) -> None:
    """Return when the server answers; fail with the end of its log when it does not."""
    limit = time.monotonic() + START_WITHIN
    while time.monotonic() < limit and process.poll() is None:
        try:
            urllib.request.urlopen(address + "/health", timeout=5).close()
            return
        except OSError:  # not listening yet
            time.sleep(0.5)
    tail = "\n".join(log.read_text(errors="replace").splitlines()[-40:])
    raise AssertionError(f"vLLM did not come up; the end of {log}:\n{tail}")


def _stop(process: subprocess.Popen[bytes]) -> None:
    """End the server and the engine, which is a child of it."""
    with suppress(ProcessLookupError):  # it may have ended by itself
        os.killpg(process.pid, signal.SIGTERM)
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
    process.wait()
