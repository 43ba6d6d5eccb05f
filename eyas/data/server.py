"""The target behind an OpenAI-compatible server (vLLM, SGLang, a cluster behind a load balancer), as an engine that answers.

Prompts are rendered here with the target's own template and go out as token ids; what comes back are the ids that the server
generated. Where it gives text only, the text is tokenised again and doubted where that cannot have been what it wrote.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from transformers import AutoConfig, AutoTokenizer, GenerationConfig, PreTrainedTokenizerBase

from eyas.chat import encode, end_of_turn_ids, special_ids
from eyas.data.asking import Ask, Failed, ServedAnswer
from eyas.data.connection import Connection, reason_of
from eyas.data.dialects import DIALECTS, Dialect, Reply
from eyas.errors import EyasError
from eyas.locate import locate

ANSWER_S = 600.0  # how long to wait for an answer
RETRIES = 7  # per answer, with a back-off that doubles from half a second to eight, or as Retry-After says
IN_A_ROW = 3  # answers lost one after the other, at least, before the server is given up
ANOTHER_WAY = {400, 404, 405, 422, 501}  # what a server says to a request of a shape it does not know
NO_SUCH_ADDRESS = {404, 405}
OTHER_SHAPE = (KeyError, TypeError, IndexError, ValueError, AttributeError)  # what reading a reply of another shape raises


@dataclass(frozen=True)
class ServedTarget:
    """What is known here of a target whose weights are elsewhere: its tokenizer, its template and how its answers end.

    `served_as` is the server's name for it; there is no `fingerprint`, since that is drawn from weights.
    """

    name: str
    tokenizer: PreTrainedTokenizerBase
    eos_ids: frozenset[int]
    vocab_size: int
    max_length: int
    served_as: str = ""
    fingerprint: str | None = None

    @classmethod
    def load(cls, spec: str) -> ServedTarget:
        """Read tokenizer and configuration of `spec` (as `Target.load`), not its weights. Raises EyasError when they are
        missing or broken."""
        path = locate(spec)
        try:
            tokenizer = AutoTokenizer.from_pretrained(path)
            config = AutoConfig.from_pretrained(path).get_text_config()
            try:
                ends = GenerationConfig.from_pretrained(path).eos_token_id
            except OSError:
                ends = None
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise EyasError(f"cannot read the tokenizer of '{spec}': {str(error).strip().splitlines()[0]}") from error
        ids: set[int] = set()
        for given in (ends, config.eos_token_id, tokenizer.eos_token_id):
            ids.update(given if isinstance(given, list) else [] if given is None else [given])
        return cls(str(spec), tokenizer, frozenset(ids), config.vocab_size, config.max_position_embeddings)


class ServerEngine:
    """An `AnsweringEngine` that has `max_rows` requests in flight at the server `url` (with or without its /v1).

    `model` is the server's name for the target; where it serves one model only, that one is taken. The key, where it wants
    one, is OPENAI_API_KEY. Making the engine asks the server for its models, so that a wrong address or name shows at
    once, and the first answer shows a wrong tokenizer: EyasError. `retries` and `seconds` bound the patience with an answer.
    """

    def __init__(
        self, url: str, target: ServedTarget, *, model: str | None = None, max_rows: int = 16, max_length: int = 2048,
        retries: int = RETRIES, seconds: float = ANSWER_S,
    ) -> None:  # fmt: skip
        if max_rows < 1:
            raise EyasError(f"at least one request must be in flight, not {max_rows}")
        self._connection = Connection(url)
        self._openai, self._root = self._connection.openai, self._connection.root
        self.max_rows, self._retries, self._seconds = max_rows, retries, seconds
        self._in_a_row, self._last_loss = 0, ""  # answers lost since the last that came, and why
        model, limit = asyncio.run(self._connection.find_model(model))
        self.target = replace(target, served_as=model)
        self.max_length = min(max_length, target.max_length, limit or max_length)
        self._dialect: Dialect | None = None  # settled by the first answer

    def generate(
        self, requests: Iterable[Ask], on_finish: Callable[[ServedAnswer | Failed], None] | None = None
    ) -> list[ServedAnswer]:
        """Answer `requests`, read one by one as others end; `on_finish` sees each answer, or failure, as it comes.

        A request that fails for good is reported as `Failed`. Raises EyasError when the server is gone: nothing came back
        for as many requests as are in flight, whatever the retries.
        """
        answers: list[ServedAnswer] = []

        def deliver(result: ServedAnswer | Failed) -> None:
            if isinstance(result, ServedAnswer):
                answers.append(result)
            if on_finish is not None:
                on_finish(result)

        asyncio.run(self._answer_all(iter(requests), deliver))
        return answers

    # -- getting to know the server -----------------------------------------------------------------------------------

    async def _settle(self, client: Any, ask: Ask) -> ServedAnswer | Failed:
        """Find the best way to ask that the server understands, by asking `ask` in one after the other; the answer to it.

        Raises EyasError when the server speaks of other tokens than the target's tokenizer, or has no such address as
        /v1/completions.
        """
        why = "its replies have no shape that eyas knows"
        absent = True
        for dialect in DIALECTS:
            try:
                reply = await self._ask(client, dialect, ask)
            except self._openai.APIStatusError as error:
                self._connection.refuse_key(error)
                why = reason_of(error)
                unknown = self.target.served_as in why  # the model, not the address
                absent = absent and error.status_code in NO_SUCH_ADDRESS and not unknown
                if error.status_code not in ANOTHER_WAY:
                    break
            except self._openai.OpenAIError as error:
                why, absent = reason_of(error), False
                break
            except OTHER_SHAPE:
                absent = False
            else:
                self._check_tokens(ask, reply)
                self._dialect = dialect
                return self._answer_of(ask, reply)
        if absent:
            raise EyasError(
                f"{self._root} has no /v1/completions ({why}): by its chat API alone the tokens that it sees and writes cannot "
                "be known, and training needs them; give a server that has it, as those of vLLM and SGLang"
            )
        return self._lost(ask, why)

    def _check_tokens(self, ask: Ask, reply: Reply) -> None:
        if reply.prompt_ids is not None and list(reply.prompt_ids) != ask.ids:
            raise EyasError(f"{self._root} changes the prompt's tokens, so what it saw is not what would be stored")
        if reply.ids is None:
            return
        tokenizer = self.target.tokenizer
        known = [i for i in reply.ids if i < len(tokenizer)]
        spelled = str(tokenizer.decode(known, skip_special_tokens=True, clean_up_tokenization_spaces=False))
        if len(known) < len(reply.ids) or not _bare(spelled, tokenizer).startswith(_bare(reply.text, tokenizer)):
            raise EyasError(
                f"{self._root} wrote {reply.text[:40]!r} with tokens that the tokenizer of '{self.target.name}' spells "
                f"{spelled[:40]!r}: --target names another model than the server runs"
            )

    # -- asking -------------------------------------------------------------------------------------------------------

    async def _answer_all(self, source: Iterator[Ask], deliver: Callable[[ServedAnswer | Failed], None]) -> None:
        async with self._connection.client(retries=self._retries, seconds=self._seconds) as client:
            running: set[asyncio.Task[ServedAnswer | Failed]] = set()
            done: set[asyncio.Task[ServedAnswer | Failed]] = set()
            try:
                while self._dialect is None and (ask := next(source, None)) is not None:
                    deliver(await self._settle(client, ask))
                    self._give_up_if_gone()
                while True:
                    while len(running) < self.max_rows and (ask := next(source, None)) is not None:
                        running.add(asyncio.create_task(self._answer(client, ask)))
                    if not running:
                        return
                    done, running = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
                    for task in done:
                        deliver(task.result())
                    self._give_up_if_gone()
            finally:
                for task in running:
                    task.cancel()
                await asyncio.gather(*running, *done, return_exceptions=True)

    async def _answer(self, client: Any, ask: Ask) -> ServedAnswer | Failed:
        assert self._dialect is not None  # settled by the first answer
        try:
            reply = await self._ask(client, self._dialect, ask)
        except self._openai.APIStatusError as error:
            self._connection.refuse_key(error)
            if error.status_code < 500 and error.status_code != 429:  # this request's own fault
                return Failed(ask.id, reason_of(error))
            return self._lost(ask, reason_of(error))
        except self._openai.OpenAIError as error:
            return self._lost(ask, reason_of(error))
        except OTHER_SHAPE:
            return self._lost(ask, "the reply has another shape than those before")
        self._in_a_row = 0
        return self._answer_of(ask, reply)

    async def _ask(self, client: Any, dialect: Dialect, ask: Ask) -> Reply:
        body = dialect.body(ask, self.target.served_as, self.target.tokenizer)
        path = f"{self._root}{dialect.path}" if dialect.path.startswith("/") else dialect.path
        reply = await client.post(path, cast_to=object, body=body)
        return dialect.read(reply)

    def _lost(self, ask: Ask, why: str) -> Failed:
        self._in_a_row, self._last_loss = self._in_a_row + 1, why
        return Failed(ask.id, why)

    def _give_up_if_gone(self) -> None:
        if self._in_a_row >= max(IN_A_ROW, self.max_rows):
            raise EyasError(
                f"{self._root} stopped answering ({self._last_loss}); what was finished is kept, run the same command again "
                "to go on"
            )

    # -- reading ------------------------------------------------------------------------------------------------------

    def _answer_of(self, ask: Ask, reply: Reply) -> ServedAnswer | Failed:
        if reply.finish not in ("stop", "length"):
            return Failed(ask.id, f"the server ended it as '{reply.finish}'")
        if reply.prompt_ids is not None and list(reply.prompt_ids) != ask.ids:
            return Failed(ask.id, "the server changed the prompt's tokens")
        if reply.ids is None:
            ids, doubt = self._retokenised(ask, reply)
        else:
            ids, doubt = self._with_end(reply.ids, reply), ""
        if not ids:
            return Failed(ask.id, "the answer is empty")
        if max(ids) >= self.target.vocab_size:
            return Failed(ask.id, f"the answer holds the id {max(ids)}, which the target does not have")
        ended = ids[-1] in self.target.eos_ids and reply.finish == "stop"
        return ServedAnswer(ask.id, ids, "eos" if ended else reply.finish, reply.ids is not None, doubt)

    def _with_end(self, ids: list[int], reply: Reply) -> list[int]:
        """`ids` with the end token that some servers keep to themselves, where it is certain which one it was."""
        ends = self.target.eos_ids
        if reply.finish != "stop" or isinstance(reply.stopped_by, str) or (ids and ids[-1] in ends):
            return ids
        if isinstance(reply.stopped_by, int):
            return ids if ids and ids[-1] == reply.stopped_by else [*ids, reply.stopped_by]
        candidates = ends & end_of_turn_ids(self.target.tokenizer) or ends
        return [*ids, *candidates] if len(candidates) == 1 else ids

    def _retokenised(self, ask: Ask, reply: Reply) -> tuple[list[int], str]:
        """The ids that the text of `reply` most likely had, and why they may be wrong ("" where nothing speaks against)."""
        tokenizer = self.target.tokenizer
        said = encode(tokenizer, reply.text)
        ids = self._with_end(said, reply)
        if ask.params.stop and reply.finish == "stop":
            return ids, "a stop string may have ended it, whose tokens are unknown"
        if tokenizer.decode(said, skip_special_tokens=False, clean_up_tokenization_spaces=False) != reply.text:
            return ids, "its tokens do not spell its text"
        if reply.finish == "stop" and (not ids or ids[-1] not in self.target.eos_ids):
            return ids, "its end token is unknown"
        if reply.completion_tokens not in (None, len(said), len(ids)):
            return ids, f"the server counted {reply.completion_tokens} tokens, its text has {len(ids)}"
        if reply.prompt_tokens not in (None, len(ask.ids)):
            return ids, f"the server counted {reply.prompt_tokens} tokens of prompt, not {len(ask.ids)}"
        return ids, ""


def _bare(text: str, tokenizer: PreTrainedTokenizerBase) -> str:
    """`text` without white space, special tokens and unfinished characters, about which servers differ."""
    for token in tokenizer.convert_ids_to_tokens(sorted(special_ids(tokenizer))):
        text = text.replace(token, "")
    return "".join(text.replace("\ufffd", "").split())
