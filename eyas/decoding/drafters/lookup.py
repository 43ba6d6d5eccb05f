"""Prompt look-up: what followed the text's last tokens where they stood before (Saxena's prompt look-up decoding).

The text's own n-grams are a language model: after the longest run of last tokens that occurred before, each token that
followed it then is proposed, as often as it followed. Where nothing matches nothing is proposed.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass

import torch
from torch import Tensor

from eyas.target import Target

SHORTEST, LONGEST = 2, 5  # tokens of the runs that are looked for


@dataclass(frozen=True)
class Found:
    """What followed the longest run that matched: `counts` by token, and the `length` of that run."""

    counts: Counter[int]
    length: int


class NGrams:
    """The n-grams of a growing text."""

    def __init__(self) -> None:
        self.text: list[int] = []
        self._next: dict[tuple[int, ...], Counter[int]] = defaultdict(Counter)
        self._tried, self._right = Counter[int](), Counter[int]()  # by length of run

    def add(self, token: int) -> None:
        """The text goes on with `token`; how well it would have been foretold is remembered."""
        found = self.after(())
        if found is not None:
            self._tried[found.length] += 1
            self._right[found.length] += found.counts.most_common(1)[0][0] == token
        for length in range(SHORTEST, min(LONGEST, len(self.text)) + 1):
            self._next[tuple(self.text[-length:])][token] += 1
        self.text.append(token)

    def after(self, path: tuple[int, ...]) -> Found | None:
        """What followed before where the text, then `path`, leave off."""
        last = (*self.text[-LONGEST:], *path)[-LONGEST:]
        for length in range(len(last), SHORTEST - 1, -1):
            counts = self._next.get(last[-length:])
            if counts:
                return Found(counts, length)
        return None

    def confidence(self, length: int) -> float:
        """How often the likeliest token after a run of `length` was right in this text (one half before there is any)."""
        return (self._right[length] + 1) / (self._tried[length] + 2)


class LookupDrafter:
    """Prompt look-up for a batch of rows, over the target's whole vocabulary."""

    depth: int | None = None

    def __init__(self, target: Target) -> None:
        self.target_ids = torch.arange(target.vocab_size, device=target.device)

    def __repr__(self) -> str:
        return f"LookupDrafter({SHORTEST}, {LONGEST}, {len(self.target_ids)})"

    def allocate(self, rows: int, length: int, scratch: int) -> int:
        self._rows = [NGrams() for _ in range(rows)]
        return 0

    def begin(self, row: int, first: int, source: int, count: int) -> None:
        text = self._rows[source].text[: count + 1] if count else [first]
        self._rows[row] = NGrams()
        for token in text:
            self._rows[row].add(token)

    def prefill(self, row: int, tokens: Tensor, taps: Tensor) -> None:
        for token in tokens.tolist():
            self._rows[row].add(token)

    def extend(self, tokens: Tensor, taps: Tensor, counts: Tensor) -> Tensor:
        return self.shares(self.found(tokens, counts))[:, 0].log()

    def expand(self, tokens: Tensor, parents: Tensor) -> Tensor:
        return self.shares(self.found_below(tokens, parents)).log()

    def move(self, source: int, to: int) -> None:
        self._rows[to] = self._rows[source]  # the source's row is free now, and begins anew

    def found(self, tokens: Tensor, counts: Tensor) -> list[list[Found | None]]:
        """Read what was committed, as `extend` does, and say what followed before: of every row, one place."""
        for row, (fresh, count) in enumerate(zip(tokens.tolist(), counts.tolist(), strict=True)):
            for token in fresh[:count]:
                self._rows[row].add(token)
        self._paths: list[list[tuple[int, ...]]] = [[()] for _ in tokens]  # by row, of the places of the last level
        return self._after()

    def found_below(self, tokens: Tensor, parents: Tensor) -> list[list[Found | None]]:
        """Read one level of the tree, as `expand` does, and say what followed before: of every row, k places."""
        self._paths = [
            [(*paths[parent], token) for token, parent in zip(level, above, strict=True)]
            for paths, level, above in zip(self._paths, tokens.tolist(), parents.tolist(), strict=True)
        ]
        return self._after()

    def confidence(self, row: int, found: Found) -> float:
        """How often such a match was right in the text of `row`."""
        return self._rows[row].confidence(found.length)

    def shares(self, found: list[list[Found | None]]) -> Tensor:
        """Probabilities [B, k, V] of the places `found`: how often a token followed, nothing but zeros where none did."""
        size = (len(found), len(found[0]), len(self.target_ids))
        shares = torch.zeros(size, device=self.target_ids.device)
        places = [
            (row, place, token, count / match.counts.total())
            for row, line in enumerate(found)
            for place, match in enumerate(line)
            if match
            for token, count in match.counts.items()
        ]
        if places:
            rows, columns, tokens, values = (torch.tensor(part, device=shares.device) for part in zip(*places, strict=True))
            shares[rows, columns, tokens] = values
        return shares

    def _after(self) -> list[list[Found | None]]:
        return [[self._rows[row].after(path) for path in paths] for row, paths in enumerate(self._paths)]
