"""What a server itself counts of its drafts: vLLM in its Prometheus counters, SGLang in a gauge and its server info."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

import httpx2

from eyas.bench.live.figures import Acceptance
from eyas.data.connection import Connection
from eyas.errors import EyasError

READ_S = 10.0
VLLM = "vllm:spec_decode_num_"
SGLANG = "sglang:spec_accept_length"
INFO = ("/server_info", "/get_server_info")  # SGLang's, by its new name and its old one


@dataclass(frozen=True)
class Reading:
    """The counters of one moment. `per_position` are the rounds that accepted the first 1, 2, ... drafts; `length` is a mean
    acceptance length that the server told as such, `steps` how many drafts it makes a round, where it tells; `remark` says in
    one line what is not there, "" where all is."""

    drafts: float = 0
    drafted: float = 0
    accepted: float = 0
    per_position: tuple[float, ...] = ()
    length: float | None = None
    steps: int = 0
    remark: str = ""


def read(http: httpx2.Client, server: Connection, model: str) -> Reading:
    """What the server has counted so far for `model`; one without counters is no fault."""
    told = _get(http, server, "/metrics")
    reading = parse(told, model) if isinstance(told, str) else Reading(remark=f"it has no /metrics ({told.why})")
    if reading.drafts or (reading.length is None and not reading.remark):
        return reading
    info = _server_info(_get(http, server, path) for path in INFO)
    if reading.length is None and info.length is not None:
        return info
    return replace(reading, steps=info.steps)


def parse(text: str, model: str) -> Reading:
    """The draft counters in Prometheus `text`: summed over a server's engines, those of `model` where any names it."""
    found: defaultdict[str, list[tuple[dict[str, str], float]]] = defaultdict(list)
    try:
        for family in _families(text):
            for sample in family.samples:
                found[sample.name.removesuffix("_total")].append((sample.labels, sample.value))
    except ValueError as error:
        return Reading(remark=f"its /metrics cannot be read ({str(error).splitlines()[0][:80]})")

    def of_model(name: str) -> list[tuple[dict[str, str], float]]:
        samples = found.get(name, [])
        return [s for s in samples if s[0].get("model_name") == model] or samples

    def total(name: str) -> float:
        return sum(value for _, value in of_model(VLLM + name))

    if VLLM + "drafts" in found:
        positions: defaultdict[int, float] = defaultdict(float)
        for labels, value in of_model(VLLM + "accepted_tokens_per_pos"):
            positions[int(labels["position"])] += value
        per_position = tuple(positions[place] for place in range(len(positions)))
        return Reading(total("drafts"), total("draft_tokens"), total("accepted_tokens"), per_position)
    lengths = [value for _, value in of_model(SGLANG) if value > 0]
    if lengths:
        return Reading(length=sum(lengths) / len(lengths))
    if SGLANG in found:
        return Reading(remark=f"{SGLANG} is zero: nothing has been drafted")
    return Reading(remark=f"its /metrics has neither {VLLM}drafts nor {SGLANG}: it does not draft, or does not say")


def between(before: Reading, after: Reading) -> Acceptance | None:
    """What was counted from `before` to `after`; None where nothing was, or where the server began to count anew."""
    if after.length is not None:
        return Acceptance(length=after.length, steps=after.steps)
    rounds = after.drafts - before.drafts
    if rounds <= 0:
        return None
    counted = len(before.per_position) == len(after.per_position)  # else it had not begun to count by position
    earlier = before.per_position if counted else (0.0,) * len(after.per_position)
    return Acceptance(
        length=1 + (after.accepted - before.accepted) / rounds,
        rounds=round(rounds),
        drafted=round(after.drafted - before.drafted),
        accepted=round(after.accepted - before.accepted),
        per_position=[round(b - a) for a, b in zip(earlier, after.per_position, strict=True)],
    )


def _families(text: str) -> Iterable[Any]:
    """The metrics in `text`. Raises ValueError where it is no such text, EyasError when the library for it is missing."""
    try:
        from prometheus_client.parser import text_string_to_metric_families
    except ImportError as error:
        raise EyasError("reading /metrics needs the package prometheus-client; run: pip install 'eyas[live]'") from error
    return text_string_to_metric_families(text)


@dataclass(frozen=True)
class _Absent:
    why: str


def _get(http: httpx2.Client, server: Connection, path: str) -> str | _Absent:
    """What the server says at `path`, beside its API."""
    try:
        reply = http.get(server.root + path, headers={"Authorization": f"Bearer {server.key}"})
    except httpx2.HTTPError as error:
        return _Absent(str(error).strip() or type(error).__name__)
    return reply.text if reply.status_code == 200 else _Absent(f"HTTP {reply.status_code}")


def _server_info(told: Iterable[str | _Absent]) -> Reading:
    """SGLang's mean acceptance length and its draft steps, out of the first of its server infos that tells any."""
    for text in told:
        try:
            info = json.loads(text) if isinstance(text, str) else {}
            steps = int(info.get("speculative_num_steps") or 0)
            lengths = [float(length) for state in info["internal_states"] if (length := state.get("avg_spec_accept_length"))]
        except (ValueError, KeyError, TypeError, AttributeError):
            continue
        mean = sum(lengths) / len(lengths) if lengths else None
        return Reading(length=mean, steps=steps, remark="acceptance is SGLang's own mean since its start, not by level")
    return Reading()
