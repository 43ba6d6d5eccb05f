"""Rows of published benchmarks, as their authors lay them out, turned into rows that hold a question."""

from __future__ import annotations

from typing import Any

COMPLETE = "Complete this Python function.\n\n```python\n{code}\n```"
EXPLAIN = "Explain what this function does, step by step.\n\n```{language}\n{code}\n```"
SUMMARIZE = "Summarize: {text}"
ABOUT = "{context}\n\n{question}"
ASKING = ("messages", "conversations", "conversation", "turns", "instruction", "prompt")  # fields that are read before others


def question_row(row: dict[str, Any]) -> dict[str, Any]:
    """`row` as `data.conversations` reads it, its other fields kept: HumanEval (`task_id`, `entry_point`, `prompt`), MT-Bench
    (a list of questions as `turns` or `prompt`), CodeSearchNet (a function's code and documentation), CNN/DailyMail
    (`article`), Natural Questions (`question` with its `text`) and SQuAD (`context`, `question`) are put as a chat user would
    put them. Any other row, and one that asks something itself, is left as it is."""
    if {"task_id", "entry_point"} <= row.keys() and isinstance(row.get("prompt"), str):
        return {"category": "code", **row, "id": row["task_id"], "prompt": COMPLETE.format(code=row["prompt"].rstrip())}
    questions = row.get("turns") or row.get("prompt")
    if isinstance(questions, list) and questions and all(isinstance(question, str) for question in questions):
        return {**row, "id": row.get("id", row.get("question_id", row.get("prompt_id"))), "turns": questions}
    if any(row.get(key) for key in ASKING):
        return row
    if any(key in row for key in ("docstring", "func_documentation_string")) and (code := _function(row)):
        language = str(row.get("language") or "")
        name = row.get("id") or row.get("func_code_url") or row.get("url")
        asked = EXPLAIN.format(language=language, code=code.strip())
        return {"category": language or "code", **row, "id": name, "prompt": asked}
    question = row.get("question")
    if isinstance(question, dict):
        question = question.get("text")
    if isinstance(question, str):
        context = row.get("context")
        told = isinstance(context, str) and context.strip()
        return {**row, "question": ABOUT.format(context=context, question=question) if told else question}
    if isinstance(row.get("article"), str):
        return {**row, "prompt": SUMMARIZE.format(text=row["article"])}
    return row


def _function(row: dict[str, Any]) -> str:
    keys = ("whole_func_string", "original_string", "func_code_string", "code")
    return next((row[key] for key in keys if isinstance(row.get(key), str)), "")
