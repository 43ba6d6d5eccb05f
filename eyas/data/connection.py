"""The way to an OpenAI-compatible server: its address, the key, the models it serves, and its refusals in one line."""

from __future__ import annotations

import os
from types import ModuleType
from typing import Any

from eyas.errors import EyasError

CONNECT_S = 5.0  # how long to wait for a connection


class Connection:
    """The server at `url`, with or without its /v1. The key, where it wants one, is `key` or else OPENAI_API_KEY.

    Nothing is asked yet. Raises EyasError when the client library is missing.
    """

    def __init__(self, url: str, key: str | None = None) -> None:
        self.openai = _client_library()
        self.root = url.rstrip("/").removesuffix("/v1")
        self.key = key or os.environ.get("OPENAI_API_KEY", "none")

    def client(self, *, retries: int, seconds: float) -> Any:
        """A client for one event loop: `retries` per request, `seconds` of patience with the server's silence."""
        return self.openai.AsyncOpenAI(
            base_url=f"{self.root}/v1", api_key=self.key, max_retries=retries,
            timeout=self.openai.Timeout(seconds, connect=CONNECT_S),
        )  # fmt: skip

    async def find_model(self, wanted: str | None) -> tuple[str, int | None]:
        """The server's name for the model `wanted` (None: its only one), and the longest text it takes, where it tells.

        Raises EyasError when no such server answers, when it wants a key, and when it has no such model.
        """
        async with self.client(retries=0, seconds=2 * CONNECT_S) as client:
            try:
                served = {m.id: getattr(m, "max_model_len", None) async for m in client.models.list()}
            except self.openai.APIStatusError as error:
                self.refuse_key(error)
                if wanted is None:
                    raise EyasError(f"{self.root} does not say which models it serves; name one by --model") from error
                return wanted, None
            except self.openai.OpenAIError as error:
                raise EyasError(f"no server answers at {self.root} ({reason_of(error)}); is it running?") from error
            except (TypeError, ValueError, AttributeError) as error:
                raise EyasError(f"{self.root} answers, but not as an OpenAI-compatible server does") from error
        if wanted is None and len(served) == 1:
            return next(iter(served.items()))
        if wanted is None or wanted not in served:
            asked = f"there is no model '{wanted}'" if wanted else "there are several models; name one by --model"
            raise EyasError(f"{self.root}: {asked} (it serves: {', '.join(served) or 'none'})")
        return wanted, served[wanted]

    def refuse_key(self, error: Any) -> None:
        """Raises EyasError when the server's status says that it wants another key."""
        if error.status_code in (401, 403):
            raise EyasError(f"{self.root} wants a key: set OPENAI_API_KEY ({reason_of(error)})") from error


def reason_of(error: Exception) -> str:
    """What went wrong with a request, in one short line."""
    status = getattr(error, "status_code", None)
    body = getattr(error, "body", None)
    told = body.get("message") if isinstance(body, dict) else None
    cause = error.__cause__ if status is None and error.__cause__ is not None else error
    line = str(told or cause).strip().splitlines()[0] if str(told or cause).strip() else type(cause).__name__
    return f"HTTP {status}: {line[:160]}" if status else line[:160]


def _client_library() -> ModuleType:
    try:
        import openai
    except ImportError as error:
        raise EyasError("asking a server needs the package openai; run: pip install 'eyas[data]'") from error
    return openai
