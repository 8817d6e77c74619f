"""Markdown: tables, paragraphs, and the first lines of a generated page."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Sequence
from typing import Final

WIDTH: Final = 120
_NOT_PROSE: Final = ("#", "|", "`" * 3, "<", "> ")


def title(text: str) -> str:
    """A page's first lines."""
    return (
        f"# {text}\n\n<!-- Written by `python -m docs.generator`: change the code or the generator, not this page. -->"
    )


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table; bars inside cells are escaped, because they end a cell even between backticks."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in line)} |" for line in lines)


def code(*texts: str) -> str:
    """Texts as code, separated by commas."""
    return ", ".join(f"`{text}`" for text in texts)


def page(*parts: str) -> str:
    """Parts with an empty line between them, and one line end at the end."""
    return "\n\n".join(_filled(part.strip("\n")) for part in parts) + "\n"


def _filled(part: str) -> str:
    if "\n" in part or part.startswith(_NOT_PROSE):
        return part
    return textwrap.fill(part, WIDTH, break_long_words=False, break_on_hyphens=False)
