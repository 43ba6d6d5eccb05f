"""An engine without a model: it answers with what a function says, in batches, out of order, and can be interrupted."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from types import SimpleNamespace
from typing import Any

from eyas.chat import encode


class FakeEngine:
    """`say(request)` is the answer's text; an EOS follows unless it is in `cut` or does not fit `max_new_tokens`.

    Rows finish out of order (the oldest and the newest by turns). After `interrupt_after` answers it is as if Ctrl-C
    was pressed.
    """

    def __init__(
        self, tokenizer: Any, say: Callable[[Any], str], *, max_rows: int = 4, max_length: int = 512,
        cut: Iterable[str] = (), interrupt_after: int | None = None, fingerprint: str = "f" * 16,
    ) -> None:  # fmt: skip
        self.target = SimpleNamespace(
            tokenizer=tokenizer, name="fake", fingerprint=fingerprint, dtype="torch.float32", weights="stock",
            eos_ids=frozenset({tokenizer.eos_token_id}), vocab_size=len(tokenizer),
        )  # fmt: skip
        self.say, self.max_rows, self.max_length = say, max_rows, max_length
        self.cut, self.left = set(cut), interrupt_after
        self.asked: list[Any] = []
        self.batches: list[int] = []

    def generate(self, requests: Iterable[Any], on_finish: Callable[[Any], None] | None = None) -> list[Any]:
        source, rows, results = iter(requests), [], {}
        while True:
            while len(rows) < self.max_rows and (request := next(source, None)) is not None:
                self.asked.append(request)
                rows.append(request)
            if not rows:
                return [results[r.id] for r in self.asked if r.id in results]
            self.batches.append(len(rows))
            if self.left == 0:
                raise KeyboardInterrupt
            self.left = None if self.left is None else self.left - 1
            request = rows.pop(0 if len(results) % 2 else -1)
            results[request.id] = result = self._answer(request)
            if on_finish:
                on_finish(result)

    def _answer(self, request: Any) -> Any:
        text = self.say(request)
        ids = encode(self.target.tokenizer, text)
        limit = request.params.max_new_tokens
        finish = "length" if text in self.cut or len(ids) >= limit else "eos"
        ids = ids[:limit] if finish == "length" else [*ids, self.target.tokenizer.eos_token_id]
        return SimpleNamespace(id=request.id, prompt_len=len(request.ids), ids=ids, text=text, finish=finish)
