"""What the measurement of a live server yields, as one model that is written to JSON; definitions in `DEFINITIONS`."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from pydantic import BaseModel, ValidationError

from eyas.bench.figures import Interval
from eyas.errors import EyasError, first_fault
from eyas.files import write_text

DEFINITIONS = {
    "at a time": "requests in flight: a new one starts when one ends",
    "tokens/s": "output tokens of all answers, as the server counts them / seconds from first request to last answer",
    "first token": "seconds from sending a request to its first text; the server has read every prompt once before",
    "per token": "seconds from an answer's first text to its end / its tokens after the first",
    "answer": "seconds from sending a request to the end of its answer",
    "accepted": "mean acceptance length by the server's own counters: accepted drafts and the bonus token of a round",
    "speed-up": "tokens / seconds spent on answers, over the baseline's on the same prompts; 95 % bootstrap over prompts",
    "a round costs": "seconds of a round that drafts / seconds of a plain step, from times per token with and without head",
}


class Answer(BaseModel):
    """One request that was answered; seconds since it was sent. `tokens` and `prompt_tokens` are the server's counts."""

    prompt: str
    prompt_tokens: int
    tokens: int
    first_s: float
    seconds: float

    @property
    def per_token_s(self) -> float | None:
        """Seconds per token after the first; None where there was none."""
        return (self.seconds - self.first_s) / (self.tokens - 1) if self.tokens > 1 else None


class Acceptance(BaseModel):
    """What a server counted of its drafts. `per_position[i]` are the rounds that accepted the first i + 1 drafts.

    A server that tells its mean acceptance length alone has no rounds, but may tell its draft steps a round.
    """

    length: float  # accepted drafts and the bonus token of a round
    rounds: int = 0
    drafted: int = 0
    accepted: int = 0
    per_position: list[int] = []
    steps: int = 0  # where it told them

    @property
    def joint(self) -> list[float]:
        return [count / self.rounds for count in self.per_position] if self.rounds else []


class Spread(BaseModel):
    """Seconds, over answers."""

    median: float
    p95: float

    @classmethod
    def of(cls, values: list[float]) -> Spread:
        median, p95 = np.percentile(values, [50, 95]) if values else (float("nan"), float("nan"))
        return cls(median=float(median), p95=float(p95))


class Level(BaseModel):
    """All prompts, asked `concurrency` at a time, some of them again so that as many are in flight to the end."""

    concurrency: int
    most_in_flight: int
    seconds: float
    answers: list[Answer]
    failures: dict[str, int] = {}  # reason -> requests
    acceptance: Acceptance | None = None

    @property
    def tokens(self) -> int:
        return sum(a.tokens for a in self.answers)

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / self.seconds

    @property
    def failed(self) -> int:
        return sum(self.failures.values())

    @property
    def asked(self) -> int:
        return len(self.answers) + self.failed

    @property
    def first(self) -> Spread:
        return Spread.of([a.first_s for a in self.answers])

    @property
    def per_token(self) -> Spread:
        return Spread.of([a.per_token_s for a in self.answers if a.per_token_s is not None])

    @property
    def answer(self) -> Spread:
        return Spread.of([a.seconds for a in self.answers])

    @property
    def token_s(self) -> float | None:
        """Mean seconds per token after the first, over tokens; None where no answer had a second token."""
        tokens = sum(a.tokens - 1 for a in self.answers)
        return sum(a.seconds - a.first_s for a in self.answers) / tokens if tokens else None


class Side(BaseModel):
    """One server, measured. `remark` says what its counters do not tell."""

    url: str
    model: str
    levels: list[Level] = []
    remark: str = ""

    def at(self, concurrency: int) -> Level | None:
        return next((level for level in self.levels if level.concurrency == concurrency), None)

    @property
    def drafts(self) -> bool:
        return any(level.acceptance is not None for level in self.levels)


class LiveConditions(BaseModel):
    """What the numbers depend on, as far as it can be known from outside."""

    prompts: int
    suites: list[str]
    digest: str  # of the prompts, their tools and sampling: only measurements of the same ones are compared
    max_new_tokens: int
    temperature: float
    top_p: float
    top_k: int
    min_p: float
    seed: int
    beyond_openai: list[str] = []  # fields of the requests that not every server knows
    machine: str  # of the asking side
    eyas: str
    date: str


class Advice(BaseModel):
    """What drafting k steps a round would bring at one concurrency. `speedups[k]`, k from 0, is over not drafting."""

    concurrency: int
    round_cost: float  # a round of all the steps measured, in plain steps
    speedups: list[float]

    @property
    def best(self) -> int:
        return int(np.argmax(self.speedups))


class LiveReport(BaseModel):
    """A server, the baseline where there is one, and what follows from both."""

    version: int = 1
    kind: str = "live"
    conditions: LiveConditions
    server: Side
    baseline: Side | None = None
    speedups: dict[int, Interval] = {}  # by concurrency
    tokens_per_round: list[float] = []  # for k = 0, 1, ... draft steps
    estimated: bool = False  # these, from a mean acceptance length alone
    advice: list[Advice] = []
    stopped: str = ""  # why it ended before all was measured

    @classmethod
    def read(cls, path: Path) -> LiveReport:
        """The report in a JSON file. Raises EyasError when it is missing or is no such report."""
        try:
            return cls.model_validate_json(path.read_text(encoding="utf-8"))
        except OSError as error:
            raise EyasError(f"cannot read the report {path}: {error.strerror}") from error
        except ValidationError as error:
            why = first_fault(error)
            raise EyasError(f"{path} is not a report written by `eyas bench --server ... --json` ({why})") from error

    def write(self, path: Path) -> None:
        write_text(path, self.model_dump_json(indent=1))
