"""A request on its way through the engine: its tokens, its text, and when it ends."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from eyas.chat import Sample
from eyas.data.features import Features
from eyas.decoding.processors import Processor
from eyas.decoding.sampling import SamplingParams
from eyas.decoding.stats import Stats

Finish = Literal["eos", "stop", "length"]


@dataclass(frozen=True)
class Request:
    """A prompt as token ids, with how to answer it. `id` is the caller's own name for it."""

    ids: list[int]
    params: SamplingParams = field(default_factory=SamplingParams)
    id: str = ""


@dataclass(frozen=True)
class Piece:
    """What a round added to an answer: token ids, whether each was drafted and accepted, and the text now certain."""

    ids: list[int]
    accepted: list[bool]
    text: str


@dataclass(frozen=True)
class TokenLogprob:
    """Natural log-probability of a token under the target's own distribution (temperature 1, nothing cut, no penalty), and
    the likeliest tokens with theirs."""

    id: int
    logprob: float
    top: list[tuple[int, float]]


@dataclass
class Result:
    """An answer. `ids` are the generated tokens (an EOS that ended the text included), `accepted` says of each whether it
    was drafted (True) or written by the target itself; `text` has neither special tokens nor the stop string. `logprobs`
    are there when asked for, one a token."""

    id: str
    prompt_len: int
    ids: list[int]
    accepted: list[bool]
    text: str
    finish: Finish
    stats: Stats
    features: Features | None = None
    logprobs: list[TokenLogprob] | None = None


@dataclass
class Unread:
    """What a text has that its drafter has not read yet: tokens int64 and the taps [n, tH] of the positions before them."""

    tokens: list[Tensor] = field(default_factory=list)
    taps: list[Tensor] = field(default_factory=list)
    count: int = 0  # of tokens: asked several times a round, while the lists grow by one a round

    def add(self, tokens: Tensor, taps: Tensor) -> None:
        self.tokens.append(tokens)
        self.taps.append(taps)
        self.count += len(tokens)

    def __len__(self) -> int:
        return self.count

    def first(self, count: int) -> tuple[Tensor, Tensor]:
        """The first `count` tokens and taps."""
        return torch.cat(self.tokens)[:count], torch.cat(self.taps)[:count]

    def take(self, keep: int = 0) -> tuple[Tensor, Tensor]:
        """All but the last `keep`, which stay unread."""
        tokens, taps = torch.cat(self.tokens), torch.cat(self.taps)
        count = len(tokens) - keep
        self.tokens, self.taps = ([tokens[count:]], [taps[count:]]) if keep else ([], [])
        self.count = keep
        return tokens[:count], taps[:count]


@dataclass
class Row:
    """The state of one request while it is decoded."""

    ticket: int
    request: Request
    tokenizer: PreTrainedTokenizerBase
    eos_ids: frozenset[int]
    limit: int  # tokens to generate at most
    processors: list[Processor]
    watched: bool = False  # somebody reads along, so pieces carry text
    ids: list[int] = field(default_factory=list)
    accepted: list[bool] = field(default_factory=list)
    finish: Finish | None = None
    stats: Stats = field(default_factory=lambda: Stats(requests=1))
    unread: Unread = field(default_factory=Unread)
    read: bool = False  # whether the drafter has read any of it
    logprobs: list[TokenLogprob] = field(default_factory=list)
    taps: list[Tensor] = field(default_factory=list)  # kept only when features are wanted
    teacher: list[tuple[Tensor, Tensor]] = field(default_factory=list)
    shown: int = 0  # characters of the text already given out
    kept: float = 0.0  # drafts accepted of late
    hoped: float = 0.0  # how many the planner had expected to be

    def take(self, tokens: list[int], drafted: int) -> int:
        """Append `tokens`, the first `drafted` of them accepted drafts, up to where the text ends; return how many."""
        params = self.request.params
        for number, token in enumerate(tokens, 1):
            self.ids.append(token)
            self.accepted.append(number <= drafted)
            if token in self.eos_ids and not params.ignore_eos:
                self.finish = "eos"
            elif token in params.stop_ids or (params.stop and self._stop_at() is not None):
                self.finish = "stop"
            elif len(self.ids) >= self.limit:
                self.finish = "length"
            if self.finish:
                return number
        return len(tokens)

    @property
    def trust(self) -> float:
        """What share of the acceptance that its drafts promised this text has lately shown."""
        return min(max((self.kept + 1) / (self.hoped + 1), 0.05), 1.5)

    def believe(self, kept: float, hoped: float) -> None:
        """`kept` drafts of a round were accepted where `hoped` were expected; a round counts for about twenty after it."""
        self.kept, self.hoped = 0.95 * self.kept + kept, 0.95 * self.hoped + hoped

    def decoded(self) -> str:
        return str(self.tokenizer.decode(self.ids, skip_special_tokens=True, clean_up_tokenization_spaces=False))

    def _stop_at(self) -> int | None:
        """Where in the text the first stop string begins."""
        text = self.decoded()
        found = [at for at in (text.find(s) for s in self.request.params.stop) if at >= 0]
        return min(found) if found else None

    def text(self) -> str:
        """The whole answer, cut before the stop string that ended it."""
        text = self.decoded()
        return text[: self._stop_at()] if self.finish == "stop" else text

    def fresh_text(self) -> str:
        """What can be shown now and was not before: whole characters, and nothing that may yet become a stop string."""
        text = self.text()
        end = len(text)
        if self.finish is None:
            end = len(text.rstrip("�"))
            for stop in self.request.params.stop:
                overlap = (n for n in range(min(len(stop) - 1, end), 0, -1) if text[:end].endswith(stop[:n]))
                end -= next(overlap, 0)
        fresh = text[self.shown : end]
        self.shown = max(self.shown, end)
        return fresh

    def result(self) -> Result:
        assert self.finish is not None
        prompt = self.request.ids
        features = None
        if self.taps:
            whole = Sample(self.request.id, [*prompt, *self.ids], [(len(prompt), len(prompt) + len(self.ids))])
            ids, probs = zip(*self.teacher, strict=True)
            features = Features.pack(whole, torch.cat(self.taps), (torch.cat(ids), torch.cat(probs)))
        logprobs = None if self.request.params.logprobs is None else self.logprobs
        return Result(
            self.request.id, len(prompt), self.ids, self.accepted, self.text(), self.finish, self.stats, features, logprobs
        )
