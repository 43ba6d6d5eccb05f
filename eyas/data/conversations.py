"""One conversation out of one row, whichever of the common layouts the row has."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from eyas.chat import Message, plain_messages
from eyas.errors import EyasError

ROLES = {"system", "developer", "user", "assistant", "tool", "function", "ipython"}
SHAREGPT_ROLES = {
    "system": "system", "human": "user", "user": "user", "gpt": "assistant", "assistant": "assistant",
    "chatgpt": "assistant", "model": "assistant", "bot": "assistant", "tool": "tool", "observation": "tool",
    "function_response": "tool", "tool_response": "tool", "function_call": "function_call",
    "tool_call": "function_call",
}  # fmt: skip
SETTING_ROLES = {"system", "developer"}  # may be empty, which is as good as absent
SILENT_KEYS = {"role", "content", "name"}  # keys that say nothing where the content is empty
QUESTION_KEYS = ("prompt", "question", "query", "text")
ANSWER_KEYS = ("response", "completion", "answer", "output")


def conversation(row: dict[str, Any]) -> list[Message]:
    """The messages of `row`, which is one of: OpenAI `messages`; ShareGPT `conversations` (from, value); `turns`, the
    user's turns alone; Alpaca `instruction` with `input` and `output`; `prompt`, `question`, `query` or `text`, each
    with an answer where there is one (`response`, `completion`, `answer`, `output`; a text or messages, for a list of texts
    names answers that would be right and is none).

    Raises EyasError that says why the row is no conversation.
    """
    layouts: list[tuple[str, Callable[[dict[str, Any]], list[Message]]]] = [
        ("messages", _openai), ("conversations", _sharegpt), ("conversation", _sharegpt), ("turns", _turns),
        ("instruction", _alpaca), *((key, _question) for key in QUESTION_KEYS),
    ]  # fmt: skip
    read = next((read for key, read in layouts if row.get(key)), None)
    if read is None:
        known = ", ".join(key for key, _ in layouts)
        raise EyasError(f"holds none of the fields {known} (it has: {', '.join(map(str, row)) or 'nothing'})")
    messages = read(row)
    if isinstance(row.get("system"), str) and row["system"].strip() and messages and messages[0]["role"] != "system":
        messages = [{"role": "system", "content": row["system"]}, *messages]
    return _checked(messages)


def tools_of(row: dict[str, Any]) -> list[dict[str, Any]] | None:
    """The tool descriptions of `row` (a list, or the JSON text of one). Raises EyasError when they are neither."""
    tools = _parsed(row.get("tools"), "tools")
    if not tools:
        return None
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise EyasError("tools are no list of objects")
    return tools


def _openai(row: dict[str, Any]) -> list[Message]:
    messages = _as_rows(_parsed(row["messages"], "messages"))
    if not isinstance(messages, list) or not all(isinstance(m, dict) for m in messages):
        raise EyasError("messages are no list of objects")
    return messages


def _sharegpt(row: dict[str, Any]) -> list[Message]:
    turns = _as_rows(_parsed(row.get("conversations") or row.get("conversation"), "conversations"))
    if not isinstance(turns, list) or not all(isinstance(t, dict) for t in turns):
        raise EyasError("conversations are no list of objects")
    return [_sharegpt_turn(number, turn) for number, turn in enumerate(turns, 1)]


def _sharegpt_turn(number: int, turn: dict[str, Any]) -> Message:
    if "role" in turn:
        return turn
    said, value = turn.get("from"), turn.get("value")
    role = SHAREGPT_ROLES.get(str(said))
    if role is None:
        raise EyasError(f"turn {number} is from {said!r}, which is none of {', '.join(SHAREGPT_ROLES)}")
    if role != "function_call":
        return {"role": role, "content": value}
    call = _parsed(value, f"the function call of turn {number}")
    if not isinstance(call, dict) or "name" not in call:
        raise EyasError(f"turn {number} is a function call without a name")
    function = {"name": call["name"], "arguments": call.get("arguments", call.get("parameters", {}))}
    return {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": function}]}


def _turns(row: dict[str, Any]) -> list[Message]:
    turns = _parsed(row["turns"], "turns")
    if not isinstance(turns, list) or not all(isinstance(turn, str) for turn in turns):
        raise EyasError("turns are no list of texts")
    return [{"role": "user", "content": turn} for turn in turns]


def _alpaca(row: dict[str, Any]) -> list[Message]:
    asked = row["instruction"]
    if isinstance(row.get("input"), str) and row["input"].strip():
        asked = f"{asked}\n\n{row['input']}"
    return _with_answer(asked, row)


def _question(row: dict[str, Any]) -> list[Message]:
    asked = next(row[key] for key in QUESTION_KEYS if row.get(key))
    return _with_answer(asked, row)


def _with_answer(asked: Any, row: dict[str, Any]) -> list[Message]:
    messages = list(asked) if isinstance(asked, list) else [{"role": "user", "content": asked}]
    answer = next((row[key] for key in ANSWER_KEYS if row.get(key)), None)
    if isinstance(answer, str):
        messages.append({"role": "assistant", "content": answer})
    elif isinstance(answer, list) and all(isinstance(m, dict) for m in answer):
        messages.extend(answer)
    if not all(isinstance(m, dict) for m in messages):
        raise EyasError("the prompt is a list of something other than messages")
    return messages


def _as_rows(value: Any) -> Any:
    """A list of objects that is stored as an object of lists, as `datasets` does with some, turned back."""
    if isinstance(value, dict) and value and all(isinstance(column, list) for column in value.values()):
        return [dict(zip(value, turn, strict=True)) for turn in zip(*value.values(), strict=False)]
    return value


def _parsed(value: Any, what: str) -> Any:
    """`value`, or what it spells where it is JSON text, as structured fields of CSV and Parquet files often are."""
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value) if value.strip() else None
    except ValueError as error:
        raise EyasError(f"{what}: text that is no JSON: {error}") from error


def _checked(messages: list[Message]) -> list[Message]:
    """`messages` as templates take them, empty system messages left out. Raises EyasError for what cannot be meant."""
    for number, message in enumerate(messages, 1):
        if message.get("role") not in ROLES:
            raise EyasError(f"message {number} has the role {message.get('role')!r}")
    plain = [m for m in plain_messages(messages) if m["role"] not in SETTING_ROLES or m.get("content", "").strip()]
    for number, message in enumerate(plain, 1):
        said = message.get("content", "")
        if "\0" in said or any("\ud800" <= c <= "\udfff" for c in said):
            raise EyasError(f"message {number} holds characters that are no text")
        if not said.strip() and (message["role"] == "user" or not message.keys() - SILENT_KEYS):
            raise EyasError(f"message {number} ({message['role']}) is empty")
    if not any(message["role"] == "user" for message in plain):
        raise EyasError("there is no user turn")
    return plain
