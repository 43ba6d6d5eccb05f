"""Constrained output: only texts that a JSON schema, a regular expression or a Lark grammar allows, through llguidance."""

from __future__ import annotations

import json
import weakref
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from llguidance import LLMatcher, LLTokenizer
from llguidance.hf import from_tokenizer
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from eyas.errors import EyasError


@dataclass(frozen=True)
class Grammar:
    """What an answer may look like. Make one with `json`, `regex` or `lark`; raises EyasError if it makes no sense."""

    source: str  # llguidance's own form

    def __post_init__(self) -> None:
        fault = LLMatcher.validate_grammar(self.source)
        if fault:
            raise EyasError(f"the grammar cannot be used: {fault.strip().splitlines()[0]}")

    @classmethod
    def json(cls, schema: Mapping[str, Any] | str) -> Grammar:
        """JSON that `schema` (a mapping or its text) allows; an empty schema allows any JSON."""
        try:
            return cls(LLMatcher.grammar_from_json_schema(schema if isinstance(schema, str) else json.dumps(schema)))
        except ValueError as error:
            raise EyasError(f"the JSON schema cannot be used: {str(error).splitlines()[0]}") from None

    @classmethod
    def regex(cls, pattern: str) -> Grammar:
        """Texts that `pattern` matches from beginning to end (Rust's syntax, without look-around)."""
        return cls(LLMatcher.grammar_from_regex(pattern))

    @classmethod
    def lark(cls, rules: str) -> Grammar:
        """Texts that the Lark grammar `rules` derives."""
        return cls(LLMatcher.grammar_from_lark(rules))


def read_grammar(schema: Path | None, pattern: str | None) -> Grammar | None:
    """The grammar of a JSON schema's file or of a regular expression, if there is one. Raises EyasError for both at once."""
    if schema is not None and pattern is not None:
        raise EyasError("an answer can follow a JSON schema or a pattern, not both")
    if schema is not None:
        try:
            text = schema.read_text(encoding="utf-8")
            json.loads(text)
        except (OSError, ValueError) as error:
            raise EyasError(f"cannot read the JSON schema {schema}: {error}") from error
        return Grammar.json(text)
    return None if pattern is None else Grammar.regex(pattern)


class Constraint:
    """The processor that keeps one answer inside a grammar; raises EyasError for a tokenizer it cannot read."""

    def __init__(
        self, grammar: Grammar, tokenizer: PreTrainedTokenizerBase, eos_ids: Iterable[int], vocab_size: int
    ) -> None:  # fmt: skip
        self._matcher = LLMatcher(_tables(tokenizer, sorted(eos_ids), vocab_size), grammar.source)
        self._vocab_size = vocab_size
        self._ends = torch.zeros(vocab_size, dtype=torch.bool)  # [V]
        self._ends[list(eos_ids)] = True
        self._allowed: Tensor | None = None  # bool [V] at this place of the text

    def apply(self, logits: Tensor, ids: Tensor, ahead: int) -> Tensor:
        if ahead:  # what the grammar allows after a draft that nobody has chosen yet is not known
            return logits
        if self._allowed is None:
            self._allowed = self._next()
        return logits.masked_fill(~self._allowed.to(logits.device)[ids], float("-inf"))

    def see(self, token: int) -> None:
        self._allowed = None
        if not self._matcher.is_stopped() and not bool(self._ends[token]):
            self._matcher.consume_token(token)
            if self._matcher.is_error():
                raise EyasError(f"the grammar failed: {self._matcher.get_error().splitlines()[0]}")

    def _next(self) -> Tensor:
        """The tokens bool [V] with which the text may go on; at its end only those that end it."""
        if self._matcher.is_stopped():
            return self._ends
        bits = np.unpackbits(np.frombuffer(self._matcher.compute_bitmask(), np.uint8), bitorder="little")
        allowed = torch.zeros(self._vocab_size, dtype=torch.bool)
        allowed[: len(bits)] = torch.from_numpy(bits[: self._vocab_size]).bool()
        return allowed


_TABLES: weakref.WeakKeyDictionary[PreTrainedTokenizerBase, LLTokenizer] = weakref.WeakKeyDictionary()


def _tables(tokenizer: PreTrainedTokenizerBase, eos_ids: list[int], vocab_size: int) -> LLTokenizer:
    """llguidance's view of a tokenizer; a second's work, so done once."""
    if tokenizer not in _TABLES:
        try:
            _TABLES[tokenizer] = from_tokenizer(cast(Any, tokenizer), n_vocab=vocab_size, eos_token=eos_ids)
        except ValueError as error:
            raise EyasError(f"constrained output does not work with this tokenizer: {error}") from error
    return _TABLES[tokenizer]
