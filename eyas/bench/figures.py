"""What a race measures, as one model that is written to JSON. Every figure's definition stands in `DEFINITIONS`."""

from __future__ import annotations

from pathlib import Path

from pydantic import BaseModel, ValidationError

from eyas.decoding import stats
from eyas.errors import EyasError, first_fault
from eyas.files import write_text

PLAIN = "plain"  # the contestant that every other one is measured against

DEFINITIONS = {
    "tokens/s": "tokens after an answer's first / seconds after prefill, counted alike for all",
    "speed-up": "tokens/s over plain's, runs interleaved; 95 % interval: bootstrap over prompts",
    "tokens identical": "every answer equals plain decoding's, token for token",
    **stats.DEFINITIONS,  # tau, n-alpha, joint
    "target forwards": "passes through the target, summed over answers, each answer's prefill included",
    "drafted": "tokens proposed and verified; a tree proposes several per depth",
    "accepted": "proposed tokens that became part of an answer",
    "time": "draft / verification by the target / rest, of the seconds after prefill",
    "prefill": "seconds spent reading prompts; not in tokens/s and speed-up",
    "peak memory": "largest resident memory of the whole process while it ran",
    "noise": "plain decoding against itself, interleaved like a drafter: such differences mean nothing",
}


class Interval(BaseModel):
    """A figure and its 95 % bootstrap interval over prompts (equal to the figure when there is one prompt)."""

    value: float
    low: float
    high: float


class Conditions(BaseModel):
    """What every number of a race depends on."""

    target: str
    fingerprint: str
    dtype: str
    weights: str
    device: str
    template: str  # hash of the chat template
    temperature: float
    top_p: float
    top_k: int
    min_p: float
    seed: int
    max_new_tokens: int
    batch: int
    suites: list[str]
    prompts: int
    machine: str
    threads: int
    torch: str
    transformers: str
    eyas: str
    date: str
    bit_exact: bool = False  # by construction: no choice of the target can depend on drafter, tree or batch


class Run(BaseModel):
    """One drafter's answer to one turn of one prompt. Seconds of a batch are shared out by tokens."""

    tokens: int  # after the first, which prefill yields
    decode_s: float
    prefill_s: float
    target_forwards: int
    rounds: list[int]  # tokens emitted by each round
    drafted: int
    accepted: int
    draft_s: float
    verify_s: float
    near_ties: int = 0
    identical: bool
    first_difference: int | None  # position in the answer
    digest: str  # of the token ids: tells two answers apart without storing them


class Turn(BaseModel):
    """One turn of one prompt, as every drafter answered it."""

    id: str
    suite: str
    category: str
    turn: int  # from 1
    prompt_tokens: int
    runs: dict[str, Run]


class Sample(BaseModel):
    """An answer as stretches of text from one hand: (text, drafted and accepted)."""

    id: str
    drafter: str
    prompt: str
    stretches: list[tuple[str, bool]]


class Depths(BaseModel):
    """Acceptance by depth, depth 1 first."""

    n_alpha: list[float] = []
    joint: list[float] = []


class Figures(BaseModel):
    """One drafter's totals over a race."""

    head: str  # hash of the head's files, "" without a head
    tree: str
    answers: int
    tokens: int
    decode_s: float
    prefill_s: float
    tokens_per_s: Interval
    speedup: Interval
    speedup_with_prefill: float
    tau: Interval
    n_alpha: list[float]
    joint: list[float]
    target_forwards: int
    rounds: int
    drafted: int
    accepted: int
    near_ties: int = 0
    share_draft: float
    share_verify: float
    share_other: float
    peak_mib: float
    differing: int  # answers that are not plain decoding's
    tau_by_category: dict[str, float]
    tau_by_turn: dict[str, float]
    tau_by_position: dict[str, float]
    speedup_by_category: dict[str, float]

    @property
    def identical(self) -> bool:
        return self.differing == 0


class Noise(BaseModel):
    """Plain decoding against itself: second run's tokens/s over the first's, on the first few prompts."""

    answers: int
    ratio: Interval
    differing: int = 0  # answers whose tokens were not the same the second time

    @property
    def floor(self) -> float:
        """A relative difference in speed up to this is not told from noise."""
        return max(abs(self.ratio.low - 1), abs(self.ratio.high - 1))


class Skipped(BaseModel):
    id: str
    turn: int
    why: str


class RaceReport(BaseModel):
    """A race: its conditions, every drafter's figures, and the rows they come from."""

    version: int = 1
    conditions: Conditions
    drafters: dict[str, Figures]  # plain first
    noise: Noise | None
    rows: list[Turn]
    skipped: list[Skipped]
    samples: list[Sample]
    interrupted: bool = False

    @property
    def speculative(self) -> dict[str, Figures]:
        """Every drafter but plain decoding."""
        return {name: f for name, f in self.drafters.items() if name != PLAIN}

    @classmethod
    def read(cls, path: Path) -> RaceReport:
        """The report in a JSON file. Raises EyasError when it is missing or is no such report."""
        try:
            return cls.model_validate_json(path.read_text(encoding="utf-8"))
        except OSError as error:
            raise EyasError(f"cannot read the report {path}: {error.strerror}") from error
        except ValidationError as error:
            raise EyasError(f"{path} is not a report written by `eyas bench --json` ({first_fault(error)})") from error

    def write(self, path: Path) -> None:
        write_text(path, self.model_dump_json(indent=1))
