"""Converts `:name` in statements to the placeholders of each client library, once per statement.

Quoted texts, quoted names, dollar-quoted bodies, comments and casts (`::type`) stay as they are.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from operator import itemgetter
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from oncekey.core.flow import Value

_CACHED: Final = 512

_TOKEN: Final = re.compile(
    r"""
    (?P<left>[eE]'(?:[^'\\]|\\.|'')*(?:'|\Z)         # a text with escapes; '' is one of its characters
      | '[^']*(?:'|\Z)                               # a text; two in a row read like one with '' inside
      | "[^"]*(?:"|\Z)                               # a quoted name
      | (?<![\w$])\$(?P<tag>(?:[^\W\d]\w*)?)\$.*?(?:\$(?P=tag)\$|\Z)
      | --[^\r\n]*
      | ::
      | [^\W\d][\w$]*                                # a word, so that the e of `table'x'` is no escape
    )
  | (?P<block>/\*)
  | :(?P<name>[^\W\d]\w*)
    """,
    re.VERBOSE | re.DOTALL,
)
_EDGE: Final = re.compile(r"/\*|\*/")


@dataclass(frozen=True, slots=True)
class Numbered:
    """A statement with `$1`, `$2`, ... and the name for each number."""

    text: str
    names: tuple[str, ...]

    def arguments(self, params: Mapping[str, Value]) -> list[Value]:
        """The values in the order of their numbers."""
        return [params[name] for name in self.names]


@lru_cache(maxsize=_CACHED)
def pyformat(text: str) -> str:
    """The statement in psycopg's form: `%(name)s`, and every other % doubled."""
    return _rewritten(text, lambda name: f"%({name})s", lambda rest: rest.replace("%", "%%"))


@lru_cache(maxsize=_CACHED)
def numbered(text: str) -> Numbered:
    """The statement in PostgreSQL's own form: a name that occurs twice has one number."""
    numbers: dict[str, int] = {}

    def number(name: str) -> str:
        return f"${numbers.setdefault(name, len(numbers) + 1)}"

    return Numbered(_rewritten(text, number, lambda rest: rest), tuple(numbers))


@lru_cache(maxsize=_CACHED)
def marked(text: str) -> tuple[str, Callable[[Mapping[str, Value]], tuple[Value, ...]]]:
    """The statement with `?` for each placeholder, and a function that returns the values in order, one per `?`."""
    names: list[str] = []

    def mark(name: str) -> str:
        names.append(name)
        return "?"

    question = _rewritten(text, mark, lambda rest: rest)
    if len(names) > 1:
        return question, itemgetter(*names)
    return question, lambda params: tuple(params[name] for name in names)


@lru_cache(maxsize=_CACHED)
def parted(text: str) -> tuple[str, tuple[tuple[str, str], ...]]:
    """The statement split at its placeholders: the text before the first one, then each name with the text after it."""
    names: list[str] = []

    def cut(name: str) -> str:
        names.append(name)
        return "\0"

    first, *rest = _rewritten(text, cut, lambda rest: rest).split("\0")
    return first, tuple(zip(names, rest, strict=True))


@lru_cache(maxsize=_CACHED)
def escaped(text: str) -> str:
    """The statement in the form of SQLAlchemy's `text()`: `:name`, and every other colon escaped."""
    return _rewritten(text, lambda name: f":{name}", lambda rest: rest.replace(":", r"\:"))


def _rewritten(text: str, placeholder: Callable[[str], str], rest: Callable[[str], str]) -> str:
    parts: list[str] = []
    done = at = 0
    while (found := _TOKEN.search(text, at)) is not None:
        at = found.end()
        if found["block"] is not None:
            at = _after_comment(text, at)
        elif found["name"] is not None:
            parts += (rest(text[done : found.start()]), placeholder(found["name"]))
            done = at
    parts.append(rest(text[done:]))
    return "".join(parts)


def _after_comment(text: str, at: int) -> int:
    """Where a block comment ends; PostgreSQL's nest."""
    depth = 1
    while depth:
        edge = _EDGE.search(text, at)
        if edge is None:
            return len(text)
        depth += 1 if edge.group() == "/*" else -1
        at = edge.end()
    return at
