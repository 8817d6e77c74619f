"""A lexer for SQL: where a statement ends, the words it begins with, and whether it only reads.

It is not a parser. It recognises what may hide a semicolon or a word: comments, strings, quoted names,
dollar-quoted bodies, and the bodies of triggers and functions.

Before a claim, and between the steps of a handler, the application uses a read-only transaction. It is always
rolled back, so nothing written in it could commit. A write is refused at once, with a message for the developer who
writes there by mistake.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from functools import lru_cache
from typing import Final

from oncekey.core.errors import TransactionControlError

LEADING: Final = 8
"""How many tokens of a statement are kept: enough to classify it."""

_BOM: Final = "\N{ZERO WIDTH NO-BREAK SPACE}"  # SQLite skips it like a blank, so a guard must too
_STRING: Final = r"'[^']*(?:''[^']*)*(?:'|\Z)"
_NAME: Final = r'"[^"]*(?:""[^"]*)*(?:"|\Z)'
_COMMON: Final = rf"""
    (?P<end>;)
  | (?P<space>[\s{_BOM}]+)
  | (?P<block>/\*)
  | (?P<word>[^\W\d][\w$]*)
  | (?P<number>\d+)
"""
_SQLITE: Final = re.compile(
    rf"""
    (?P<quoted>{_STRING} | {_NAME} | `[^`]*(?:``[^`]*)*(?:`|\Z) | \[[^\]]*(?:\]|\Z))
  | (?P<line>--[^\n]*)
  | {_COMMON}
  | (?P<other>.)
    """,
    re.VERBOSE | re.DOTALL,
)
# Repetitions in a string are possessive: otherwise a string that ends in a backslash would backtrack in every possible
# way.
_POSTGRES: Final = re.compile(
    rf"""
    (?P<quoted>[eE]'(?:[^'\\]++|\\(?:.|\Z)|'')*+(?:'|\Z) | {_STRING} | {_NAME}
      | \$(?P<tag>(?:[^\W\d]\w*)?)\$.*?(?:\$(?P=tag)\$|\Z))
  | (?P<line>--[^\r\n]*)
  | {_COMMON}
  | (?P<other>.)
    """,
    re.VERBOSE | re.DOTALL,
)
_MARIADB: Final = re.compile(
    rf"""
    (?P<quoted>'(?:[^'\\]++|\\(?:.|\Z)|'')*+(?:'|\Z) | "(?:[^"\\]++|\\(?:.|\Z)|"")*+(?:"|\Z)
      | `[^`]*(?:``[^`]*)*(?:`|\Z))
  | (?P<line>--(?=\s|\Z)[^\n]* | \#[^\n]*)
  | (?P<execute>/\*M?!\d* | \*/)
  | {_COMMON}
  | (?P<other>.)
    """,
    re.VERBOSE | re.DOTALL,
)
_LEXERS: Final = {"sqlite": _SQLITE, "postgres": _POSTGRES, "mariadb": _MARIADB}
_SQLITE_COMMENT_EDGE: Final = re.compile(r"\*/")
_POSTGRES_COMMENT_EDGE: Final = re.compile(r"/\*|\*/")


class Dialect(StrEnum):
    """Whose lexical rules apply."""

    SQLITE = "sqlite"
    POSTGRES = "postgres"
    MARIADB = "mariadb"


@dataclass(frozen=True, slots=True)
class Sentence:
    """One statement: its text, and its first tokens (words in capitals, quoted ones as they were written)."""

    text: str
    tokens: tuple[str, ...]


def sentences(text: str, dialect: Dialect) -> Iterator[Sentence]:
    """The statements of `text` in order; text with only comments has none."""
    start, body = 0, _Body(dialect)
    for kind, begin, end in _tokens(text, dialect):
        if kind == "end" and not body.open:
            if body.leading:
                yield Sentence(text[start:begin].strip(), tuple(body.leading))
            start, body = end, _Body(dialect)
        else:
            body.take(kind, text[begin:end])
    if body.leading:
        yield Sentence(text[start:].strip(), tuple(body.leading))


@lru_cache(maxsize=512)
def split(text: str, dialect: Dialect) -> tuple[str, ...]:
    """The texts of the statements in `text`, cached: only for our own texts, which are few and repeat."""
    return tuple(sentence.text for sentence in sentences(text, dialect))


def _tokens(text: str, dialect: Dialect) -> Iterator[tuple[str, int, int]]:
    """Everything but blanks and comments, as (kind, begin, end)."""
    lexer = _LEXERS[dialect.value]
    at = 0
    while at < len(text):
        match = lexer.match(text, at)
        assert match is not None  # the last alternative takes any character
        kind, at = str(match.lastgroup), match.end()
        if kind == "block":
            at = _after_comment(text, at, dialect)
        elif kind not in {"space", "line", "execute"}:  # what MariaDB executes inside a comment is read like the rest
            yield kind, match.start(), at


def _after_comment(text: str, at: int, dialect: Dialect) -> int:
    """Where a block comment ends; PostgreSQL's nest, the others' do not."""
    edge = _POSTGRES_COMMENT_EDGE if dialect is Dialect.POSTGRES else _SQLITE_COMMENT_EDGE
    depth = 1
    while depth:
        match = edge.search(text, at)
        if match is None:
            return len(text)
        depth += 1 if match.group() == "/*" else -1
        at = match.end()
    return at


class _Body:
    """The statement read so far, and whether a semicolon here is inside the body that it defines."""

    def __init__(self, dialect: Dialect) -> None:
        self.leading: list[str] = []
        self._dialect = dialect
        self._parentheses = 0
        self._blocks = 0
        self._last = ("", "")

    def take(self, kind: str, text: str) -> None:
        """Look at one more token of the statement."""
        read = text.upper() if kind == "word" else text
        self._last = (self._last[1], read if kind in {"word", "end"} else "")
        if kind == "other":
            self._parentheses = max(0, self._parentheses + (read == "(") - (read == ")"))
        elif kind == "word" and self._defines("FUNCTION", "PROCEDURE"):
            if self._last == ("BEGIN", "ATOMIC") or (read == "CASE" and self._blocks):
                self._blocks += 1
            elif read == "END" and self._blocks:
                self._blocks -= 1
        if len(self.leading) < LEADING:
            self.leading.append(read)

    @property
    def open(self) -> bool:
        """Whether the statement continues after a semicolon here."""
        if self._dialect is Dialect.POSTGRES:
            return self._parentheses > 0 or self._blocks > 0
        if self._dialect is Dialect.MARIADB:
            return False  # a body of several statements cannot be split without its client's DELIMITER
        # The rule of SQLite's own shell: a trigger ends with the END that follows a semicolon.
        return self._defines("TRIGGER") and self._last != (";", "END")

    def _defines(self, *kinds: str) -> bool:
        words = [word for word in self.leading[:4] if word not in {"OR", "REPLACE", "TEMP", "TEMPORARY"}]
        return words[:1] == ["CREATE"] and any(words[1:2] == [kind] for kind in kinds)


ONLY_READS: Final = (
    "this transaction is read-only: a write here would not commit with the key. A PHASED handler writes inside "
    "op.phase(name, fn), where once.session and once.connection use the phase's own transaction, and changes only "
    "objects that the same phase has read or added; a LOCAL handler writes after it was entered"
)

_READ_ONLY_TRANSACTION: Final = "25006"
_READ_ONLY_FILE: Final = "SQLITE_READONLY"
_READ_ONLY_MARIADB: Final = 1792
_READS: Final = re.compile(
    r"\s*(?:SELECT|VALUES|SHOW)\b(?!.*\b(?:FOR\s+(?:UPDATE|NO|KEY|SHARE)|INTO|set_config|pg_\w*advisory\w*)\b)",
    re.IGNORECASE | re.DOTALL,
)
_CHANGES: Final = re.compile(
    r"\s*(?:(?:INSERT|UPDATE|DELETE|MERGE|REPLACE|TRUNCATE|CREATE|ALTER|DROP|COPY)\b"
    r"|WITH\b.*\)\s*(?:INSERT|UPDATE|DELETE|REPLACE|MERGE)\b)",
    re.IGNORECASE | re.DOTALL,
)


def plainly_reads(sql: str) -> bool:
    """Whether a statement leaves nothing behind, not even a lock or a setting: its transaction may end at any time.

    A function that takes a lock or changes a setting is recognised only by its name.
    """
    return _READS.match(sql) is not None


def refuse_changes(sql: str) -> None:
    """Raise `TransactionControlError` for a statement that certainly writes."""
    if _CHANGES.match(sql) is not None:
        raise TransactionControlError(ONLY_READS)


def refused_to_write(error: BaseException) -> bool:
    """Whether the database refused a write because its transaction is read-only."""
    origin = getattr(error, "orig", None) or error
    name = str(getattr(origin, "sqlite_errorname", None) or "")
    if name.startswith(_READ_ONLY_FILE) or origin.args[:1] == (_READ_ONLY_MARIADB,):
        return True
    return getattr(origin, "sqlstate", None) == _READ_ONLY_TRANSACTION
