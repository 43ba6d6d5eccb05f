"""Rows of published benchmarks, as their authors lay them out, turned into rows that hold a question."""

from __future__ import annotations

from typing import Any

COMPLETE = "Complete this Python function.\n\n```python\n{code}\n```"
EXPLAIN = "Explain what this function does, step by step.\n\n```{language}\n{code}\n```"
SUMMARIZE = "Summarize: {text}"


def question_row(row: dict[str, Any]) -> dict[str, Any]:
    """`row` as `data.conversations` reads it: HumanEval (`task_id`, `prompt`), CodeSearchNet (a function's code and
    documentation), MT-Bench (a list of questions as `prompt`) and CNN/DailyMail (`article`) are put as a chat user would put
    them; any other row is left as it is."""
    if "task_id" in row and isinstance(row.get("prompt"), str):
        return {"id": row["task_id"], "category": "code", "prompt": COMPLETE.format(code=row["prompt"].rstrip())}
    if any(key in row for key in ("docstring", "func_documentation_string")) and (code := _function(row)):
        language = str(row.get("language") or "")
        name = row.get("func_code_url") or row.get("url")
        asked = EXPLAIN.format(language=language, code=code.strip())
        return {"category": language or "code", "prompt": asked, **({"id": name} if name else {})}
    if isinstance(row.get("article"), str):
        return {"id": row.get("id"), "prompt": SUMMARIZE.format(text=row["article"])}
    questions = row.get("turns") or row.get("prompt")
    name = row.get("id", row.get("question_id", row.get("prompt_id")))
    if isinstance(questions, list) and questions and all(isinstance(question, str) for question in questions):
        return {"id": name, "category": row.get("category"), "turns": questions}
    return row


def _function(row: dict[str, Any]) -> str:
    keys = ("whole_func_string", "original_string", "func_code_string", "code")
    return next((row[key] for key in keys if isinstance(row.get(key), str)), "")
