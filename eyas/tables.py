"""Tables as commands print them: no lines, the first columns to the left, numbers to the right."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rich.table import Table
from rich.text import Text


def bare_table(headings: Sequence[str], rows: Iterable[Sequence[str | Text]] = (), *, left: int = 1) -> Table:
    """A table for a terminal, of text without markup, the first `left` columns aligned to the left."""
    shown = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 2, 0, 0))
    for number, heading in enumerate(headings):
        shown.add_column(Text(heading), justify="left" if number < left else "right", no_wrap=True)
    for row in rows:
        shown.add_row(*[Text(cell) if isinstance(cell, str) else cell for cell in row])
    return shown


def markdown_table(headings: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """The same as Markdown."""
    lines = [headings, ["---"] * len(headings), *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)
