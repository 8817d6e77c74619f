"""Reads `queries.sql` and its like: titled blocks of SQL."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.resources import files

_TITLE = re.compile(r"^-- (name|part): (\w+)(?:\((\w+(?:; \w+)*)\))?\n", re.MULTILINE)
_PLACE = re.compile(r"\{(\w+)(?:\(([^{}]*)\))?\}")


@dataclass(frozen=True, slots=True)
class _Part:
    """A piece of SQL for statements; the names in parentheses after its own are replaced by the user's words."""

    text: str
    names: tuple[str, ...]

    def filled(self, given: str | None) -> str:
        words = () if given is None else tuple(word.strip() for word in given.split(";"))
        text = self.text
        for name, word in zip(self.names, words, strict=True):
            text = text.replace(f"{{{name}}}", word)
        return text


def load(package: str, *names: str, shared: str | None = None) -> dict[str, str]:
    """The statements of a store's package, by their names; `queries.sql` if no file is named.

    SQL that several stores share is in the files of the same names in the package `shared`.

    A block titled `part` is no statement: its text takes the place of its name in braces, in all of these files. One
    titled `part: walk(at; fits)` is used as `{walk(created_at; state = 'unknown')}`: each word takes the place of the
    name that it is given for.
    """
    statements: dict[str, str] = {}
    parts: dict[str, _Part] = {}
    for name in names or ("queries.sql",):
        _, *found = _TITLE.split("\n".join(_texts(name, shared, package)))
        for kind, title, asks, body in zip(found[::4], found[1::4], found[2::4], found[3::4], strict=True):
            whole = body.strip().rstrip(";")
            if kind == "part":
                parts[title] = _Part(whole, tuple(asks.split("; ")) if asks else ())
            else:
                statements[title] = whole
    return {name: _whole(text, parts) for name, text in statements.items()}


def _texts(name: str, shared: str | None, package: str) -> Iterator[str]:
    """The file of a name, or both files if the shared package has one, too."""
    places = [files(one).joinpath(name) for one in (shared, package) if one is not None]
    there = [place for place in places if place.is_file()]
    if not there:
        raise FileNotFoundError(f"{package} has no {name}")
    yield from (place.read_text("utf-8") for place in there)


def _whole(text: str, parts: dict[str, _Part]) -> str:
    """The statement with its parts filled in; a part may have parts of its own."""
    while _PLACE.search(text):
        text = _PLACE.sub(lambda match: parts[match[1]].filled(match[2]), text)
    return text
