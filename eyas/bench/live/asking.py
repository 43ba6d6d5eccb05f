"""One request to a live server, timed: streamed, so that the first token's time is seen, and counted by the server itself."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

from eyas.bench.items import Item
from eyas.bench.live.figures import Answer
from eyas.decoding.sampling import SamplingParams
from eyas.errors import EyasError

EXTRA = ("top_k", "min_p", "repetition_penalty", "ignore_eos")


@dataclass(frozen=True)
class Elsewhere:
    """The target of prompts that are only passed on: nothing is known of it here, so they are not checked against it."""

    fingerprint: str | None = None
    vocab_size: int | None = None


def key_of(item: Item) -> str:
    """The name of a prompt, unique among those of a benchmark."""
    return "/".join(map(str, item.key))


async def ask(client: Any, model: str, item: Item, params: SamplingParams) -> Answer:
    """The answer to the first question of `item`, as `client` (openai's, asynchronous) gets it.

    A conversation is asked for as messages, ready-made prompt tokens as they are, sampled by `params` but for what the prompt
    asks for itself. Raises openai's errors, and EyasError when the server does not count tokens.
    """
    wanted = body(model, item.params(params))
    begun = time.perf_counter()
    if item.ids:
        stream = await client.completions.create(prompt=list(item.ids), **wanted)
    else:
        messages = list(item.messages[: item.asked[0] + 1])
        tools = {"tools": list(item.tools)} if item.tools else {}
        stream = await client.chat.completions.create(messages=messages, **tools, **wanted)
    first, end, usage = None, None, None
    async with stream:
        async for chunk in stream:
            usage = chunk.usage or usage
            if chunk.choices:
                end = time.perf_counter()
                if first is None and _says(chunk.choices[0]):
                    first = end
    if usage is None or end is None:
        raise EyasError("the server does not count tokens (no usage in its stream), so there is no speed to measure")
    return Answer(
        prompt=key_of(item),
        prompt_tokens=usage.prompt_tokens,
        tokens=usage.completion_tokens,
        first_s=(first or end) - begun,
        seconds=end - begun,
    )


def body(model: str, params: SamplingParams) -> dict[str, Any]:
    """What a request says beside its prompt; what is as usual is left out, since not every server knows it."""
    told: dict[str, Any] = {
        "model": model, "max_tokens": params.max_new_tokens, "temperature": params.temperature, "top_p": params.top_p,
        "stream": True, "stream_options": {"include_usage": True},
    }  # fmt: skip
    if params.temperature > 0:
        told["seed"] = params.seed
    if params.stop:
        told["stop"] = list(params.stop)
    if params.logit_bias:
        told["logit_bias"] = {str(token): bias for token, bias in params.logit_bias.items()}
    told |= {name: value for name in ("presence_penalty", "frequency_penalty") if (value := getattr(params, name))}
    extra = beyond_openai(params)
    return {**told, "extra_body": extra} if extra else told


def beyond_openai(params: SamplingParams) -> dict[str, Any]:
    """What `params` ask for by fields that OpenAI's API does not have, but vLLM and SGLang do; what is as usual is left out."""
    usual, fewest = SamplingParams(), min(params.min_new_tokens, params.max_new_tokens)
    extra = {name: getattr(params, name) for name in EXTRA if getattr(params, name) != getattr(usual, name)}
    extra |= {"min_tokens": fewest} if fewest else {}
    return extra | ({"stop_token_ids": list(params.stop_ids)} if params.stop_ids else {})


def _says(choice: Any) -> bool:
    """Whether a chunk brings text of any kind; the first of a chat may bring the role alone."""
    delta = getattr(choice, "delta", choice)
    return any(getattr(delta, name, None) for name in ("text", "content", "reasoning_content", "reasoning", "tool_calls"))
