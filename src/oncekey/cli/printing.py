"""The output of commands: lists as one JSON envelope, tables that never truncate a key, colours only on a terminal."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final
from urllib.parse import urlsplit

import typer

from oncekey.core.model import SECOND, moment

GAP: Final = "  "
_UNLIMITED: Final = 1_000_000


def colours() -> bool:
    """Whether standard output is a terminal, and NO_COLOR is not set (https://no-color.org)."""
    return sys.stdout.isatty() and not os.environ.get("NO_COLOR")


def as_json(shape: Any) -> None:
    """Print one JSON document."""
    typer.echo(json.dumps(shape, indent=2))


def as_list(items: Sequence[Mapping[str, Any]], *, now: int | None = None, following: str | None = None) -> None:
    """Print a list as JSON: every list has the same three members.

    `now` is the store's clock when it was read, or this host's if no store was read; `next` is where the following page
    begins, or null.
    """
    at = time.time_ns() // (1_000_000_000 // SECOND) if now is None else now
    as_json({"now": moment(at), "items": list(items), "next": following})


def plain(value: Any) -> str:
    """A value as one line of text without terminal control characters: clients choose part of the text."""
    text = "" if value is None else str(value)
    return "".join(letter if letter.isprintable() else letter.encode("unicode_escape").decode() for letter in text)


def address(store: str) -> str:
    """A store's URL without its password; the path of a file has none."""
    parts = urlsplit(store)
    if not parts.netloc:
        return store
    return parts._replace(netloc=parts.netloc.rpartition("@")[2], query="").geturl()


def width() -> int:
    """The columns of the terminal, or the value of COLUMNS; a pipe has no limit."""
    if sys.stdout.isatty() or os.environ.get("COLUMNS", "").isdigit():
        return shutil.get_terminal_size().columns
    return _UNLIMITED


def table(head: Sequence[str], rows: Sequence[Sequence[Any]], *, empty: str, first: Sequence[str] = ()) -> None:
    """Print rows under a heading. Nothing is cut or folded: if they do not fit, whole columns are left out.

    `first` names the important columns, most important first; the first is shown whatever its width. The others follow
    in their order.
    """
    lines = [[plain(cell) for cell in row] for row in rows]
    if not lines:
        typer.echo(empty)
        return
    widths = [max(len(line[column]) for line in [head, *lines]) for column in range(len(head))]
    shown = _that_fit(head, widths, first)
    for number, line in enumerate([head, *lines]):
        text = GAP.join(line[column].ljust(widths[column]) for column in shown).rstrip()
        typer.echo(typer.style(text, bold=True) if number == 0 and colours() else text)
    left_out = [name for column, name in enumerate(head) if column not in shown]
    if left_out:
        typer.echo(f"({', '.join(left_out)} did not fit; use a wider terminal or --json)", err=True)


def _that_fit(head: Sequence[str], widths: Sequence[int], first: Sequence[str]) -> list[int]:
    room = width()
    by_importance = [*(head.index(name) for name in first), *range(len(head))]
    shown: set[int] = set()
    taken = 0
    for column in dict.fromkeys(by_importance):
        needed = widths[column] + (len(GAP) if shown else 0)
        if not shown or taken + needed <= room:
            shown.add(column)
            taken += needed
    return sorted(shown)


def pairs(rows: Sequence[tuple[str, Any]]) -> list[str]:
    """Names and values, one per line. Long lines are not broken, so that they can be copied in one piece."""
    longest = max((len(name) for name, _ in rows), default=0)
    return [f"{name.ljust(longest)}{GAP}{plain(value)}".rstrip() for name, value in rows]


def lines(texts: Iterable[str]) -> None:
    """Print lines."""
    for line in texts:
        typer.echo(line)


def broken(command: str, *, indent: int) -> list[str]:
    """A command in lines that fit, continued with backslashes, so that it can be copied from any terminal."""
    words = shlex.split(command, posix=False)
    room = width() - indent - len(" \\")
    if len(command) <= room or " ".join(words) != command:
        return [command]
    lines, line = [], ""
    for group in _options(words):
        if line and len(line) + 1 + len(group) > room:
            lines.append(f"{line} \\")
            line = f"  {group}"
        else:
            line = f"{line} {group}".strip() if not line.startswith("  ") else f"{line} {group}"
    return [*lines, line]


def _options(words: Sequence[str]) -> list[str]:
    """Words, with each option joined to its value."""
    groups: list[list[str]] = []
    for word in words:
        if groups and groups[-1][0].startswith("--") and len(groups[-1]) == 1 and not word.startswith("--"):
            groups[-1].append(word)
        else:
            groups.append([word])
    return [" ".join(group) for group in groups]
