"""A head judged as it will be used: the engine answers held-out prompts with it, and its tau is what counts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from eyas.chat import Sample
from eyas.decoding.drafters.opening import drafter_of
from eyas.decoding.engine import Engine, Request
from eyas.decoding.sampling import SamplingParams
from eyas.decoding.stats import Stats
from eyas.decoding.tree import TreeShape
from eyas.heads.head import DraftHead
from eyas.target import Target


@dataclass(frozen=True)
class EngineJudge:
    """Answers `prompts` greedily, all together, `max_new_tokens` each, drafting with `tree`."""

    target: Target
    prompts: tuple[tuple[int, ...], ...]
    max_new_tokens: int
    tree: TreeShape

    @classmethod
    def of(cls, target: Target, samples: Sequence[Sample], count: int, max_new_tokens: int, tree: TreeShape) -> EngineJudge:
        """A judge on the prompts of the first `count` of `samples` that leave the target room to answer."""
        prompts = [s.prompt for s in samples]
        fitting = [p for p in prompts if 0 < len(p) <= target.max_length - max_new_tokens]
        return cls(target, tuple(fitting[:count]), max_new_tokens, tree)

    def __call__(self, head: DraftHead) -> Stats:
        """What came of decoding with `head`; its tau is tokens emitted by rounds / rounds."""
        training = head.training
        try:
            longest = max(len(p) for p in self.prompts)
            engine = Engine(
                self.target, drafter_of(self.target, head), tree=self.tree, max_rows=len(self.prompts),
                max_length=longest + self.max_new_tokens,
            )  # fmt: skip
            params = SamplingParams(max_new_tokens=self.max_new_tokens)
            engine.generate(Request(list(prompt), params) for prompt in self.prompts)
            return engine.stats
        finally:
            head.train(training)
