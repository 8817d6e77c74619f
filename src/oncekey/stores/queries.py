"""Reads `queries.sql` and its like: titled blocks of SQL."""

from __future__ import annotations

import re
from importlib.resources import files

_TITLE = re.compile(r"^-- (name|part): (\w+)\n", re.MULTILINE)
_PLACE = re.compile(r"\{(\w+)\}")


def load(package: str, *names: str) -> dict[str, str]:
    """The statements of a store's package, by their names; `queries.sql` if no file is named.

    A block titled `part` is no statement: its text takes the place of its name in braces, in all of these files.
    """
    blocks: dict[str, dict[str, str]] = {"name": {}, "part": {}}
    for name in names or ("queries.sql",):
        text = files(package).joinpath(name).read_text("utf-8")
        _, *found = _TITLE.split(text)
        for kind, title, body in zip(found[::3], found[1::3], found[2::3], strict=True):
            blocks[kind][title] = body.strip().rstrip(";")
    parts = blocks["part"]
    return {name: _whole(text, parts) for name, text in blocks["name"].items()}


def _whole(text: str, parts: dict[str, str]) -> str:
    """The statement with its parts in place; a part may have parts of its own."""
    while _PLACE.search(text):
        text = _PLACE.sub(lambda match: parts[match[1]], text)
    return text
