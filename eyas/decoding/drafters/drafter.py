"""What the engine asks of a drafter."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor


class Drafter(Protocol):
    """Proposes tokens for a batch of texts. Rows 0..B-1 are active; the engine moves rows when one leaves.

    Position t of a text pairs the target's taps there with token t + 1; a drafter that reads none of the taps sees every
    token but the first this way, and the first when the text begins. `target_ids` int64 [D] are the target's ids of the draft
    ids, `depth` how many levels it can draft (None: any number). A logit of -inf is no proposal.
    """

    target_ids: Tensor
    depth: int | None

    def allocate(self, rows: int, length: int, scratch: int) -> int:
        """Make room for `rows` texts of `length` positions and `scratch` tree nodes per row; return the bytes it takes."""

    def begin(self, row: int, first: int, source: int, count: int) -> None:
        """A text begins in `row` with the token `first`; its first `count` positions are those of row `source`."""

    def prefill(self, row: int, tokens: Tensor, taps: Tensor) -> None:
        """Go on with the text in `row`: `tokens` int64 [M] follow the positions whose `taps` [M, nH] are given."""

    def extend(self, tokens: Tensor, taps: Tensor, counts: Tensor) -> Tensor:
        """Read what was committed: of `tokens` [B, M] and true `taps` [B, M, nH] the first `counts[b]` >= 1 are valid.

        Returns logits [B, D] for the token after the last committed one. Forgets everything speculative.
        """

    def expand(self, tokens: Tensor, parents: Tensor) -> Tensor:
        """Read one level of the tree: `tokens` [B, k] under the places `parents` [B, k] of the level before it.

        The first level's parent is the state that `extend` left. Returns logits [B, k, D].
        """

    def move(self, source: int, to: int) -> None:
        """Row `to` becomes a copy of row `source`."""
