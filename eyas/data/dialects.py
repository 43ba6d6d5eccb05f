"""Ways to ask a server for an answer and to read its reply, best first: the exact generated ids, or else the text.

vLLM and SGLang take the prompt as token ids at `/v1/completions` and give back ids with `return_token_ids`; older vLLM spells
them in its logprobs (`return_tokens_as_token_ids`), older SGLang gives them at its own `/generate`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedTokenizerBase

from eyas.data.asking import Ask

TOKEN_ID = "token_id:"  # how vLLM spells an id in its logprobs


@dataclass(frozen=True)
class Reply:
    """What a server said. `ids` are the generated tokens or None where it gave text only, `prompt_ids` the prompt as it saw
    it where it tells; `finish` is its own word; `stopped_by` the id or string that ended the answer where it tells; the
    counts are those of its usage report, None where there is none."""

    text: str
    ids: list[int] | None
    finish: str
    stopped_by: int | str | None = None
    prompt_ids: list[int] | None = None
    prompt_tokens: int | None = None
    completion_tokens: int | None = None


@dataclass(frozen=True)
class Dialect:
    """`name` says what comes back; `exact` whether it is the ids. `body` is what is posted to `path` (one that begins with a
    slash counts from the server's root, others from its /v1/), `read` raises KeyError, TypeError, IndexError or ValueError
    for a reply of another shape."""

    name: str
    exact: bool
    path: str
    body: Callable[[Ask, str, PreTrainedTokenizerBase], dict[str, Any]]
    read: Callable[[dict[str, Any]], Reply]


def _completion(ask: Ask, model: str, **more: Any) -> dict[str, Any]:
    """The fields of the public API; what a value of its own does not ask for is left out."""
    p = ask.params
    body: dict[str, Any] = {
        "model": model, "prompt": ask.ids, "max_tokens": p.max_new_tokens, "temperature": p.temperature,
        "seed": _seed(p), "top_p": p.top_p,
    }  # fmt: skip
    asked = {"stop": list(p.stop), "stop_token_ids": list(p.stop_ids), "top_k": p.top_k, "min_p": p.min_p}
    return body | {name: value for name, value in asked.items() if value} | more


def _seed(params: Any) -> int:
    """31 bits of the answer's seed, which every server takes."""
    return int(params.seed) & 0x7FFFFFFF


def _read_completion(reply: dict[str, Any], ids: list[int] | None) -> Reply:
    choice, usage = reply["choices"][0], reply.get("usage") or {}
    return Reply(
        choice["text"], ids, choice.get("finish_reason") or "", choice.get("stop_reason", choice.get("matched_stop")),
        choice.get("prompt_token_ids"), usage.get("prompt_tokens"), usage.get("completion_tokens"),
    )  # fmt: skip


def _read_token_ids(reply: dict[str, Any]) -> Reply:
    return _read_completion(reply, [int(i) for i in reply["choices"][0]["token_ids"]])


def _read_logprobs(reply: dict[str, Any]) -> Reply:
    tokens = reply["choices"][0]["logprobs"]["tokens"]
    if not all(token.startswith(TOKEN_ID) for token in tokens):
        raise ValueError("the tokens are spelled as text")
    return _read_completion(reply, [int(token.removeprefix(TOKEN_ID)) for token in tokens])


def _generate(ask: Ask, model: str, tokenizer: PreTrainedTokenizerBase) -> dict[str, Any]:
    p = ask.params
    params = {
        "max_new_tokens": p.max_new_tokens, "temperature": p.temperature, "top_p": p.top_p, "top_k": p.top_k or -1,
        "min_p": p.min_p, "stop": list(p.stop), "stop_token_ids": list(p.stop_ids), "sampling_seed": _seed(p),
    }  # fmt: skip
    return {"input_ids": ask.ids, "sampling_params": params}


def _read_generate(reply: dict[str, Any]) -> Reply:
    told = reply["meta_info"]
    finish = told["finish_reason"]
    return Reply(
        reply["text"], [int(i) for i in reply["output_ids"]], finish["type"], finish.get("matched"), None,
        told.get("prompt_tokens"), told.get("completion_tokens"),
    )  # fmt: skip


def _as_text(ask: Ask, model: str, tokenizer: PreTrainedTokenizerBase) -> dict[str, Any]:
    spelled = tokenizer.decode(ask.ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
    return _completion(ask, model, prompt=spelled)


DIALECTS = (
    Dialect(
        "token ids", True, "completions", lambda ask, model, _: _completion(ask, model, return_token_ids=True), _read_token_ids
    ),
    Dialect(
        "token ids in logprobs", True, "completions",
        lambda ask, model, _: _completion(ask, model, logprobs=1, return_tokens_as_token_ids=True), _read_logprobs,
    ),
    Dialect("token ids of SGLang's /generate", True, "/generate", _generate, _read_generate),
    Dialect(
        "text", False, "completions", lambda ask, model, _: _completion(ask, model, skip_special_tokens=False),
        lambda reply: _read_completion(reply, None),
    ),
    Dialect("text, the prompt too", False, "completions", _as_text, lambda reply: _read_completion(reply, None)),
)  # fmt: skip
