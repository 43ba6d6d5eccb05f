"""Text whose drafted and accepted tokens can be told from those that the target wrote itself."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, NamedTuple

from rich.text import Text

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

ACCEPTED_STYLE = "bold green"
UNFINISHED = "\ufffd"  # what a tokenizer shows for bytes that do not make a character yet


class Stretch(NamedTuple):
    """A stretch of text from one hand: drafted and accepted, or written by the target."""

    text: str
    accepted: bool


class Colourer:
    """Decodes a growing list of tokens and says of every character whether its last token was an accepted draft.

    Tokens may split a UTF-8 character and a tokenizer may decode a token differently after another one, so the text
    of a token is what the decoded text grows by when the token is added; a token that leaves a character unfinished
    shows nothing until that character is whole.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer
        self._ids: list[int] = []
        self._from = 0  # decoding starts here: enough tokens before `_shown` to fix the spacing
        self._shown = 0  # tokens whose text has been handed out

    def feed(self, ids: Iterable[int], accepted: Iterable[bool]) -> list[Stretch]:
        """The text that these further tokens complete."""
        found = []
        for token, good in zip(ids, accepted, strict=True):
            self._ids.append(token)
            grown = self._grown()
            if not grown.endswith(UNFINISHED):
                found.append(Stretch(grown, good))
                self._from, self._shown = self._shown, len(self._ids)
        return merged(found)

    def rest(self) -> list[Stretch]:
        """What stayed unfinished at the end of the text, as the tokenizer shows it."""
        return merged([Stretch(self._grown(), False)])

    def _grown(self) -> str:
        before = self._decode(self._ids[self._from : self._shown])
        return self._decode(self._ids[self._from :])[len(before) :]

    def _decode(self, ids: list[int]) -> str:
        text = self._tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        assert isinstance(text, str)
        return text


def merged(found: Sequence[Stretch]) -> list[Stretch]:
    """`stretches` with neighbours of one hand joined and empty ones dropped."""
    out: list[Stretch] = []
    for piece in found:
        if not piece.text:
            continue
        if out and out[-1].accepted == piece.accepted:
            out[-1] = Stretch(out[-1].text + piece.text, piece.accepted)
        else:
            out.append(piece)
    return out


def stretches(ids: Sequence[int], accepted: Sequence[bool], tokenizer: PreTrainedTokenizerBase) -> list[Stretch]:
    """The whole text of `ids` as stretches of one hand; joined, they are the decoded text."""
    colourer = Colourer(tokenizer)
    found = colourer.feed(ids, accepted)
    return merged(found + colourer.rest())


def styled(found: Iterable[Stretch]) -> Text:
    """`found` for a terminal: accepted drafts in bold green (bold alone where there is no colour)."""
    text = Text()
    for piece in found:
        text.append(piece.text, style=ACCEPTED_STYLE if piece.accepted else "")
    return text
