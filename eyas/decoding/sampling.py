"""Coupled sampling: how a token is chosen from the target's logits, alike for plain and speculative decoding, in any batch.

Order: penalties, bias and grammar (`processors`), divide by temperature, keep top-k, keep top-p, keep min-p, then
token = argmax(logits + gumbel(seed, index)). Temperature 0 is the plain argmax.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from eyas.decoding.grammar import Constraint, Grammar
from eyas.decoding.noise import gumbel, noise_keys, text_keys
from eyas.decoding.processors import LeastLength, LogitBias, Penalties, Processor
from eyas.errors import EyasError


@dataclass(frozen=True)
class SamplingParams:
    """What a request asks of its answer. `max_new_tokens` counts the EOS; `sample` numbers several answers of one seed.

    `top_k` 0, `top_p` 1 and `min_p` 0 keep everything. `logit_bias` maps token ids to what is added to their logits;
    penalties are those of `processors.Penalties`; `min_new_tokens` forbids an earlier end; `grammar` says what the answer may
    look like. A `stop` string ends the text before it, a token of `stop_ids` after it. `logprobs` asks for the
    log-probability of every token, and of so many likeliest ones beside it.
    """

    max_new_tokens: int = 256
    min_new_tokens: int = 0
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int = 0
    sample: int = 0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    grammar: Grammar | None = None
    stop: tuple[str, ...] = ()
    stop_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logprobs: int | None = None

    def __post_init__(self) -> None:
        bounds = {
            "max_new_tokens": (self.max_new_tokens >= 1, "at least 1"),
            "min_new_tokens": (self.min_new_tokens >= 0, "0 or more"),
            "temperature": (0 <= self.temperature < math.inf, "0 or more"),
            "top_p": (0 < self.top_p <= 1, "in (0, 1]"),
            "top_k": (self.top_k >= 0, "0 or more"),
            "min_p": (0 <= self.min_p < 1, "in [0, 1)"),
            "logit_bias": (all(map(math.isfinite, self.logit_bias.values())), "finite numbers by token id"),
            "repetition_penalty": (0 < self.repetition_penalty < math.inf, "above 0"),
            "presence_penalty": (math.isfinite(self.presence_penalty), "a finite number"),
            "frequency_penalty": (math.isfinite(self.frequency_penalty), "a finite number"),
            "stop": (all(self.stop), "non-empty strings"),
            "logprobs": (self.logprobs is None or self.logprobs >= 0, "0 or more"),
        }
        for name, (good, wanted) in bounds.items():
            if not good:
                raise EyasError(f"{name} must be {wanted}, not {getattr(self, name)!r}")
        if self.grammar is not None and (self.min_new_tokens or self.ignore_eos):
            raise EyasError("a grammar says itself when an answer may end; leave out min_new_tokens and ignore_eos")

    def processors(
        self, prompt: Sequence[int], tokenizer: PreTrainedTokenizerBase, eos_ids: Iterable[int], vocab_size: int
    ) -> list[Processor]:
        """What changes the logits of an answer to `prompt`, in order. Raises EyasError for a bias on an unknown token."""
        made: list[Processor] = []
        repetition, presence, frequency = self.repetition_penalty, self.presence_penalty, self.frequency_penalty
        if (repetition, presence, frequency) != (1, 0, 0):
            made.append(Penalties(prompt, vocab_size, repetition=repetition, presence=presence, frequency=frequency))
        if self.logit_bias:
            unknown = [i for i in self.logit_bias if not 0 <= i < vocab_size]
            if unknown:
                raise EyasError(f"logit_bias names token {unknown[0]}, but the target has tokens 0 to {vocab_size - 1}")
            made.append(LogitBias(self.logit_bias, vocab_size))
        if self.min_new_tokens:
            made.append(LeastLength(self.min_new_tokens, eos_ids, vocab_size))
        if self.grammar is not None:
            made.append(Constraint(self.grammar, tokenizer, eos_ids, vocab_size))
        return made


class BatchSampler:
    """The choices of a batch of rows; rows keep their own parameters and `processors`, and none sees another."""

    def __init__(
        self, params: Sequence[SamplingParams], device: torch.device | str = "cpu",
        processors: Sequence[Sequence[Processor]] = (),
    ) -> None:  # fmt: skip
        self.params = params
        self.device = torch.device(device)
        self.processed = {row: list(chain) for row, chain in enumerate(processors) if chain}
        self.scores: Tensor  # [B, V], the best of which was chosen last
        self.greedy = all(p.temperature == 0 for p in params)
        column = [[max(p.temperature, 1e-6), p.top_p, p.min_p] for p in params]
        table = torch.tensor(column, dtype=torch.float32, device=device)  # [B, 3]
        self._temperature, self._top_p, self._min_p = table[:, :1], table[:, 1:2], table[:, 2:]  # each [B, 1]
        self._top_k = torch.tensor([[p.top_k] for p in params], device=device)  # [B, 1]
        self._sampled = torch.tensor([p.temperature > 0 for p in params], device=device)  # [B]
        self._texts = text_keys([(p.seed, p.sample) for p in params])  # uint64 [B]
        self._filters = any(p.temperature > 0 and (p.top_k or p.top_p < 1 or p.min_p) for p in params)

    def keys(self, indices: Sequence[int], stream: int = 0) -> Tensor:
        """The noise keys int32 [B, 2] of output index `indices[b]` in every row."""
        return noise_keys(self._texts, indices, stream).to(self.device)

    def choose(self, logits: Tensor, indices: Sequence[int], drafted: Tensor | None = None) -> Tensor:
        """The token int64 [B] that each row takes at output index `indices[b]` given float32 `logits` [B, V].

        `drafted` int64 [B], the token that a chain drafted there (-1: none), plays no part in coupled sampling.
        """
        logits = self._process(logits)
        best = self._best(logits)  # [B]
        if self.greedy:
            return best
        drawn = self._draw(self.filtered(logits), indices, drafted)  # [B]
        self.scores = torch.where(self._sampled[:, None], self.scores, logits)
        return torch.where(self._sampled, drawn, best)

    def see(self, row: int, token: int) -> None:
        """Tell the processors of `row` that its text goes on with `token`."""
        for processor in self.processed[row]:
            processor.see(token)

    def _draw(self, scores: Tensor, indices: Sequence[int], drafted: Tensor | None) -> Tensor:
        """A token int64 [B] drawn from softmax(`scores` [B, V])."""
        ids = torch.arange(scores.shape[-1], device=scores.device)
        return self._best(scores + gumbel(self.keys(indices), ids))

    def _best(self, scores: Tensor) -> Tensor:
        self.scores = scores
        return scores.argmax(-1)

    @property
    def divisor(self) -> Tensor:
        """float32 [B]: what a row's logits are divided by before the choice."""
        return torch.where(self._sampled, self._temperature[:, 0], 1.0)

    def _process(self, logits: Tensor) -> Tensor:
        if not self.processed:
            return logits
        logits = logits.clone()
        ids = torch.arange(logits.shape[-1], device=logits.device)
        for row, chain in self.processed.items():
            for processor in chain:
                logits[row] = processor.apply(logits[row], ids, 0)
        return logits

    def filtered(self, logits: Tensor) -> Tensor:
        """Logits [B, V] over temperature, with what top-k, top-p and min-p cut away at minus infinity."""
        scores = logits / self._temperature
        if not self._filters:
            return scores
        ordered, order = scores.sort(dim=-1, descending=True, stable=True)  # [B, V]
        rank = torch.arange(scores.shape[-1], device=scores.device)[None]  # [1, V]
        cut = (self._top_k > 0) & (rank >= self._top_k)
        probability = ordered.masked_fill(cut, float("-inf")).softmax(-1)
        cut = cut | (probability.cumsum(-1) - probability >= self._top_p)
        cut = cut | (probability < self._min_p * probability[:, :1])
        return scores.masked_fill(torch.zeros_like(cut).scatter(1, order, cut), float("-inf"))

    def rank_drafts(self, logits: Tensor, indices: Sequence[int], target_ids: Tensor, depth: int) -> Tensor:
        """Log-scores float32 [B, n, D] by which draft candidates are ranked, never above 0.

        `logits` [B, n, D] are the head's for n nodes of one `depth`, `target_ids` int64 [D] the ids it drafts and `indices`
        the output index that the depth stands for. Sampled rows are ranked with the very noise their choice will use.
        """
        logits = self._process_drafts(logits.float(), target_ids, depth)
        if self.greedy:
            return log_probabilities(logits)
        return self._perturbed(logits, self._warm(logits), self.keys(indices), target_ids)

    def _warm(self, logits: Tensor) -> Tensor:
        """Log-probabilities [B, n, D] of the draft logits [B, n, D] at each row's temperature."""
        return log_probabilities(logits / self._temperature[:, None])

    def _perturbed(self, logits: Tensor, warm: Tensor, keys: Tensor, target_ids: Tensor) -> Tensor:
        """Log-scores [B, n, D]: of sampled rows `warm` and the noise of `keys`, of greedy ones plain `logits`."""
        noisy = log_probabilities(warm + gumbel(keys, target_ids)[:, None])
        return torch.where(self._sampled[:, None, None], noisy, log_probabilities(logits))

    def _process_drafts(self, logits: Tensor, target_ids: Tensor, depth: int) -> Tensor:
        """As `_process`, as far as the state before the round tells; a row that nothing would be left of stays as it is."""
        if not self.processed:
            return logits
        logits = logits.clone()
        for row, chain in self.processed.items():
            changed = logits[row]
            for processor in chain:
                changed = processor.apply(changed, target_ids, depth - 1)
            logits[row] = torch.where(changed.isfinite().any(-1, keepdim=True), changed, logits[row])
        return logits


def log_probabilities(logits: Tensor) -> Tensor:
    """log softmax of `logits` [..., D]; what is nothing but -inf, no proposal at all, stays so."""
    found = logits.log_softmax(-1)
    nothing = found[..., :1].isnan()  # then all of it is
    return found.masked_fill(nothing, float("-inf")) if bool(nothing.any()) else found
