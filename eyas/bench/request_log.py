"""A log of requests as a suite: OpenAI request bodies, one a row, each with the sampling fields that it asked for."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

from pydantic import BaseModel, Field, ValidationError

from eyas.bench.items import Item
from eyas.data.conversations import conversation, tools_of
from eyas.data.rows import BadRow, is_header, read_rows, report_bad
from eyas.decoding.sampling import SamplingParams
from eyas.errors import EyasError, first_fault
from eyas.progress import console

# Fields that change no answer, or are read elsewhere.
SILENT = {
    "messages", "tools", "model", "stream", "stream_options", "user", "metadata", "store", "service_tier", "id", "custom_id",
    "request_id", "category", "source",
}  # fmt: skip
WHY = {"temperature": "a race has its own", "seed": "a race has its own"}


class Honoured(BaseModel):
    """The fields of a request that its answers are measured with (OpenAI's, and those that vLLM and SGLang add)."""

    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    min_tokens: int | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: dict[int, float] | None = None
    stop: list[str] | str | None = None
    stop_token_ids: list[int] | None = Field(default=None)

    def sampling(self) -> dict[str, Any]:
        """The fields as those of `SamplingParams`. Raises EyasError for a value out of range."""
        told = self.model_dump(exclude_none=True)
        limits = [told.pop(key) for key in ("max_tokens", "max_completion_tokens") if key in told]
        renamed = {"min_tokens": "min_new_tokens", "stop_token_ids": "stop_ids"}
        found = {renamed.get(key, key): value for key, value in told.items()}
        if limits:
            found["max_new_tokens"] = min(limits)
        if "stop" in found:
            found["stop"] = (found["stop"],) if isinstance(found["stop"], str) else tuple(found["stop"])
        if "stop_ids" in found:
            found["stop_ids"] = tuple(found["stop_ids"])
        found["top_k"] = max(found.get("top_k", 0), 0)  # some servers write "all" as -1
        usual = SamplingParams()
        replace(usual, **found)
        return {key: value for key, value in found.items() if value != getattr(usual, key)}


def is_request(row: dict[str, Any]) -> bool:
    """Whether the row is a request body, bare or as OpenAI's batch files hold it (`body`)."""
    body = _body(row)
    return bool(body.get("messages")) and (
        body is not row or bool(body.keys() & (Honoured.model_fields.keys() | {"model", *WHY}))
    )


def read_log(path: Path, suite: str) -> list[Item]:
    """The requests in `path`, in order; the same request twice is measured twice.

    Says which fields are not honoured, and skips rows that are no request. Raises EyasError when there is none.
    """
    items: list[Item] = []
    bad: list[BadRow] = []
    ignored: Counter[str] = Counter()
    for record in read_rows(path):
        if record.value is None:
            bad.append(record.bad(record.why))
        elif not is_header(record.value):
            try:
                items.append(_item(record.value, suite, record.line))
            except EyasError as error:
                bad.append(record.bad(str(error)))
                continue
            ignored.update(_ignored(_body(record.value)))
    report_bad(bad)
    if not items:
        raise EyasError(f"{path}: no request in it ({len(bad)} bad rows)")
    if ignored:
        told = ", ".join(f"{key} of {n}{f' ({WHY[key]})' if key in WHY else ''}" for key, n in ignored.items())
        console.print(f"{path}: not honoured of {len(items)} requests: {told}", style="yellow", markup=False)
    return items


def _body(row: dict[str, Any]) -> dict[str, Any]:
    return row["body"] if isinstance(row.get("body"), dict) else row


def _ignored(body: dict[str, Any]) -> list[str]:
    return [key for key in body if body[key] is not None and key not in SILENT and key not in Honoured.model_fields]


def _item(row: dict[str, Any], suite: str, line: int) -> Item:
    body = _body(row)
    try:
        sampling = Honoured.model_validate(body).sampling()
    except ValidationError as error:
        raise EyasError(first_fault(error)) from error
    messages = conversation({"messages": body.get("messages")})
    name = next((row[key] for key in ("custom_id", "request_id", "id") if row.get(key)), f"request-{line}")
    category = str(row.get("category") or suite)
    return Item(str(name), suite, category, tuple(messages), tools=tuple(tools_of(body) or ()), sampling=sampling)
