"""What a race measures, as one model. Every figure's definition stands in `DEFINITIONS`."""

from __future__ import annotations

from pydantic import BaseModel

from eyas.decoding import stats

PLAIN = "plain"  # the contestant that every other one is measured against
PEER = "peer:"  # begins what the command line calls another project's decoder

DEFINITIONS = {
    "tokens/s": "tokens after an answer's first / seconds after prefill, counted alike for all",
    "speed-up": "tokens/s over plain's, runs interleaved; 95 % interval: bootstrap over prompts",
    "tokens identical": "every answer equals plain decoding's, token for token",
    **stats.DEFINITIONS,  # tau, n-alpha, joint
    "tau by position": "tau of the rounds that began at these tokens of the answer (prefill's is token 0)",
    "tau by turn": "tau of the answers to the conversation's first, second, ... question",
    "tau by category": "tau of the prompts of one category of a suite",
    "tau by suite": "tau of the prompts of one suite",
    "k": "tokens drafted and verified per round, on average",
    "target forwards": "passes through the target, summed over answers, each answer's prefill included",
    "drafted": "tokens proposed and verified; a tree proposes several per depth",
    "accepted": "proposed tokens that became part of an answer",
    "time": "draft / verification by the target / rest, of the seconds after prefill",
    "prefill": "seconds spent reading prompts; not in tokens/s and speed-up",
    "peak memory": "largest resident memory of the whole process while it ran (on an accelerator: allocated there); "
    "of a program of its own it is not known",
    "noise": "plain decoding against itself, interleaved like a drafter: such differences mean nothing",
}


class Interval(BaseModel):
    """A figure and its 95 % bootstrap interval over prompts (equal to the figure when there is one prompt)."""

    value: float
    low: float
    high: float


class Entry(BaseModel):
    """A contestant as it was entered: `source` is what the command line called it, `hash` that of its weights ("" where it
    has none), `tree` as `parse_tree` reads it ("" for plain decoding), `engine` what decodes for a peer, with its version."""

    name: str
    source: str
    hash: str = ""
    tree: str = ""
    engine: str = ""

    def __str__(self) -> str:
        return f"'{self.name}' ({', '.join(part for part in (self.source, self.hash, self.tree, self.engine) if part)})"


class Conditions(BaseModel):
    """What every number of a race depends on."""

    target: str
    fingerprint: str
    dtype: str
    weights: str
    device: str
    template: str  # hash of the chat template
    prompts_id: str = ""  # hash of the prompts themselves
    temperature: float
    top_p: float
    top_k: int
    min_p: float
    seed: int
    rule: str = "coupled"  # by which drafts are accepted: coupled gives plain decoding's text, rejection its distribution
    max_new_tokens: int
    ignore_eos: bool = False
    batch: int
    suites: list[str]
    prompts: int
    repeated: int = 0  # of them asked again, so that every batch is full
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
    offered_by_depth: list[int] = []  # rounds in which a draft was on offer at depth 1, 2, ...
    accepted_by_depth: list[int] = []
    identical: bool
    first_difference: int | None  # position in the answer
    digest: str  # of the token ids: tells two answers apart without storing them


class Turn(BaseModel):
    """One turn of one prompt, as every drafter answered it."""

    id: str
    copy_number: int = 1  # above 1 where a prompt is asked again to fill a batch
    suite: str
    category: str
    turn: int  # from 1
    prompt_tokens: int
    runs: dict[str, Run]

    @property
    def key(self) -> tuple[str, str, int]:
        """Names the prompt, a repetition of it as well."""
        return self.suite, self.id, self.copy_number


class Sample(BaseModel):
    """An answer as stretches of text from one hand: (text, drafted and accepted)."""

    id: str
    drafter: str
    prompt: str
    stretches: list[tuple[str, bool]]


class Part(BaseModel):
    """A part of a race's answers or rounds; no speed-up where the part is one of rounds. Suites of several prompts have
    intervals."""

    rounds: int
    emitted: int  # tokens, by these rounds
    tau: float
    tau_interval: Interval | None = None
    speedup: float | None = None
    speedup_interval: Interval | None = None


class Figures(BaseModel):
    """One drafter's totals over a race."""

    source: str = ""  # what the command line called it
    head: str  # hash of the drafter's weights, "" where it has none
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
    k: float
    accepted: int
    near_ties: int = 0
    share_draft: float
    share_verify: float
    share_other: float
    peak_mib: float
    differing: int  # answers that are not plain decoding's
    own_noise: bool = False  # sampled otherwise than plain decoding, so that other answers are no fault
    parts: dict[str, dict[str, Part]]  # by "suite", "category", "turn" and "position"

    @property
    def identical(self) -> bool:
        return self.differing == 0

    @property
    def same(self) -> str:
        """Whether its answers are plain decoding's, in words."""
        if self.own_noise:
            return "own draws"
        return "yes" if self.identical else f"no: {self.differing} of {self.answers} differ"

    @property
    def is_peer(self) -> bool:
        return self.source.startswith(PEER)


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
    """A turn that was left out, and with it those after it."""

    suite: str
    id: str
    copy_number: int = 1
    turn: int
    why: str

    @property
    def key(self) -> tuple[str, str, int]:
        return self.suite, self.id, self.copy_number


class RaceReport(BaseModel):
    """A race: its conditions, every drafter's figures, and the rows they come from."""

    conditions: Conditions
    drafters: dict[str, Figures]  # plain first
    noise: Noise | None
    rows: list[Turn]
    again: list[Turn] = []  # runs: plain decoding's first and second
    skipped: list[Skipped]
    samples: list[Sample]
    interrupted: bool = False

    @property
    def speculative(self) -> dict[str, Figures]:
        """Every drafter but plain decoding."""
        return {name: f for name, f in self.drafters.items() if name != PLAIN}

    @property
    def cell(self) -> tuple[float, int]:
        """The race's place in a grid: its temperature and batch size."""
        return self.conditions.temperature, self.conditions.batch

    @property
    def best(self) -> tuple[str, Figures] | None:
        """The fastest drafter beside plain decoding; peers are there to compare with."""
        own = {name: figures for name, figures in self.speculative.items() if not figures.is_peer}
        return max(own.items(), key=lambda pair: pair[1].speedup.value, default=None)
