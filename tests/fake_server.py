"""An OpenAI-compatible server without a model, in this process: it says what a function says, and misbehaves as told."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from eyas.chat import encode


@dataclass
class FakeServer:
    """`say(prompt ids)` is the answer's text. `speaks` are the kinds of reply it knows: "ids", "logprobs", "generate",
    "text" (ids as prompt), "text only"; or "chat" alone. `trouble(number)` may return a status, "drop" or "garbage" for the
    number-th completion request; `slow` seconds pass before every answer, `pace` between the tokens of a streamed one.
    `pages` are what it shows beside its API, like /metrics."""

    tokenizer: Any
    say: Callable[[list[int]], str]
    speaks: set[str] = field(default_factory=lambda: {"ids", "text"})
    models: tuple[str, ...] = ("toy",)
    trouble: Callable[[int], Any] = lambda number: None
    slow: float = 0.0
    pace: float = 0.0
    pages: dict[str, Callable[[], str]] = field(default_factory=dict)
    headers: dict[str, str] = field(default_factory=dict)  # of every failure
    hides_end: bool = False
    usage: Callable[[list[int]], int] | None = None  # completion tokens as reported
    counts_tokens: bool = True  # of a streamed answer
    changes_prompt: bool = False
    key: str = ""
    asked: list[dict[str, Any]] = field(default_factory=list)
    in_flight: int = 0
    most_in_flight: int = 0
    lock: Any = field(default_factory=threading.Lock)

    @contextmanager
    def running(self) -> Iterator[str]:
        """The server's address while the block runs."""
        server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (_Handler,), {"fake": self}))
        server.daemon_threads = True
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            server.server_close()

    def reply(self, path: str, body: dict[str, Any]) -> tuple[int, Any]:
        """Status and content for a request."""
        if self.speaks == {"chat"} and not path.endswith("/chat/completions"):
            return 404, {"detail": "Not Found"}
        if path == "/generate":
            if "generate" not in self.speaks:
                return 404, {"detail": "Not Found"}
            ids, finish = self._answer(body["input_ids"], body["sampling_params"]["max_new_tokens"])
            meta = {"finish_reason": {"type": finish}, "prompt_tokens": len(body["input_ids"])}
            return 200, {"text": self._text(ids), "output_ids": self._shown(ids, finish), "meta_info": meta}
        if body["model"] not in self.models:
            return 404, {"error": {"message": f"The model `{body['model']}` does not exist."}}
        chat = path.endswith("/chat/completions")
        prompt, choice = body["messages"][-1]["content"] if chat else body["prompt"], {}
        if isinstance(prompt, str):
            prompt = encode(self.tokenizer, prompt)
        elif self.speaks == {"text only"}:
            return 422, {"error": {"message": "prompt must be a string"}}
        ids, finish = self._answer(prompt, body["max_tokens"])
        if body.get("stream"):
            return 200, self._stream(chat, prompt, ids, finish, body.get("stream_options", {}).get("include_usage"))
        choice = {"index": 0, "text": self._text(ids), "finish_reason": finish, "logprobs": None}
        if body.get("return_token_ids") and "ids" in self.speaks:
            seen = prompt[1:] if self.changes_prompt else prompt
            choice |= {"token_ids": self._shown(ids, finish), "prompt_token_ids": seen}
        if body.get("logprobs") and "logprobs" in self.speaks:
            choice["logprobs"] = {"tokens": [f"token_id:{i}" for i in self._shown(ids, finish)]}
        return 200, {"object": "text_completion", "choices": [choice], "usage": self._usage(prompt, ids)}

    def _stream(self, chat: bool, prompt: list[int], ids: list[int], finish: str, counted: bool) -> Iterator[dict[str, Any]]:
        """The events of a streamed answer, one a token; a chat begins with the role alone."""

        def event(text: str, reason: str | None = None) -> dict[str, Any]:
            told = {"delta": {"content": text}} if chat else {"text": text}
            return {"choices": [{"index": 0, **told, "finish_reason": reason}]}

        if chat:
            yield {"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}, "finish_reason": None}]}
        for place, token in enumerate(ids):
            time.sleep(self.pace * (place > 0))
            yield event(self._text([token]), finish if place == len(ids) - 1 else None)
        if counted and self.counts_tokens:
            yield {"choices": [], "usage": self._usage(prompt, ids)}

    def _usage(self, prompt: list[int], ids: list[int]) -> dict[str, int]:
        return {"prompt_tokens": len(prompt), "completion_tokens": self.usage(ids) if self.usage else len(ids)}

    def _answer(self, prompt: list[int], limit: int) -> tuple[list[int], str]:
        ids = [*encode(self.tokenizer, self.say(prompt)), self.tokenizer.eos_token_id]
        return (ids, "stop") if len(ids) <= limit else (ids[:limit], "length")

    def _shown(self, ids: list[int], finish: str) -> list[int]:
        return ids[:-1] if self.hides_end and finish == "stop" else ids

    def _text(self, ids: list[int]) -> str:
        return str(self.tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False))


class _Handler(BaseHTTPRequestHandler):
    fake: FakeServer
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True  # a streamed token goes out at once

    def log_message(self, *_: Any) -> None:
        pass

    def do_GET(self) -> None:
        fake = self.fake
        if fake.key and self.headers.get("Authorization") != f"Bearer {fake.key}":
            self._send(401, {"error": {"message": "Unauthorized"}})
        elif self.path in fake.pages:
            self._send(200, fake.pages[self.path]())
        elif self.path != "/v1/models":
            self._send(404, {"detail": "Not Found"})
        else:
            data = [{"id": m, "object": "model", "created": 0, "owned_by": "x", "max_model_len": 500} for m in fake.models]
            self._send(200, {"object": "list", "data": data})

    def do_POST(self) -> None:
        fake = self.fake
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        events = None
        with fake.lock:
            number = len(fake.asked)
            fake.asked.append(body)
            fake.in_flight += 1
            fake.most_in_flight = max(fake.most_in_flight, fake.in_flight)
        try:
            time.sleep(fake.slow)
            wrong = fake.trouble(number)
            if wrong == "drop":
                self.close_connection = True
                self.connection.close()
            elif wrong == "garbage":
                self._send(200, "<html>busy</html>")
            elif wrong:
                self._send(wrong, {"error": {"message": "told to fail"}}, fake.headers)
            else:
                status, content = fake.reply(self.path, body)
                if isinstance(content, Iterator):
                    events = content
                    self._send_events(events)
                else:
                    self._send(status, content)
        finally:
            with fake.lock:
                fake.in_flight -= 1
        if events is not None:  # a client may ask anew as soon as it reads this
            self._send_line("[DONE]")
            self._chunk(b"")

    def _send(self, status: int, content: Any, headers: dict[str, str] | None = None) -> None:
        raw = content.encode() if isinstance(content, str) else json.dumps(content).encode()
        self.send_response(status)
        for name, value in {"Content-Length": str(len(raw)), "Content-Type": "application/json", **(headers or {})}.items():
            self.send_header(name, value)
        with suppress(OSError):  # the other side has gone
            self.end_headers()
            self.wfile.write(raw)

    def _send_events(self, events: Iterator[dict[str, Any]]) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        for event in events:
            self._send_line(json.dumps(event))

    def _send_line(self, line: str) -> None:
        self._chunk(f"data: {line}\n\n".encode())

    def _chunk(self, raw: bytes) -> None:
        with suppress(OSError):  # the other side has gone
            self.wfile.write(b"%x\r\n%s\r\n" % (len(raw), raw))
