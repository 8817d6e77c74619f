"""The guards of SQL statements, and statements with one of them dropped.

A guard is a condition that must hold for a row to be read or written: each operand of an AND in a WHERE, an ON of a
JOIN, an IF of a function, and inside of those, in each operand of an OR and in each branch of a CASE. A mutant is the
statement with one guard replaced by `true`. They are found in the text, so a new statement has its mutants without
being listed anywhere.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

_TOKEN: Final = re.compile(
    r"""
    (?P<skip>\s+ | --[^\n]*)
  | (?P<end>; | \$\w*?\$)
  | (?P<word>[^\W\d][\w$.]* | \$\d+ | `[^`]*` | "[^"]*")
  | (?P<quoted>'(?:[^']|'')*')
  | (?P<number>\d+)
  | (?P<open>\() | (?P<close>\))
  | (?P<other>::|.)
    """,
    re.VERBOSE | re.DOTALL,
)
_ENDS: Final = frozenset(
    {
        *("group", "order", "limit", "returning", "union", "window", "having", "for", "on", "where", "then", "loop"),
        *("from", "using", "set", "left", "right", "join", "cross", "do", "select", "fetch", "offset", "into"),
        *("except", "intersect"),
    }
)
"""Words that end a condition; those of a `SELECT` in parentheses are inside of them, and end nothing."""


@dataclass(frozen=True, slots=True)
class _Token:
    kind: str
    text: str
    start: int
    end: int

    @property
    def word(self) -> str:
        return self.text.lower() if self.kind == "word" else ""


@dataclass(frozen=True, slots=True)
class Guard:
    """A condition of a statement, by its place in the text."""

    start: int
    end: int
    text: str

    def dropped(self, statement: str) -> str:
        """The statement without it."""
        return f"{statement[: self.start]}true{statement[self.end :]}"


def guards(statement: str) -> tuple[Guard, ...]:
    """All guards of a statement, outer ones before what is inside of them."""
    tokens = [
        _Token(str(match.lastgroup), match[0], match.start(), match.end())
        for match in _TOKEN.finditer(statement)
        if match.lastgroup != "skip"
    ]
    found: dict[tuple[int, int], Guard] = {}
    for at, token in enumerate(tokens):
        if token.word in {"where", "having"} or (token.word == "on" and _joins(tokens, at)) or _tests(tokens, at):
            condition = tokens[at + 1 : _end(tokens, at + 1)]
            for part in _conjuncts(condition, whole=True):
                start, end = part[0].start, part[-1].end
                text = " ".join(one.text for one in part)
                if text.lower() != "true":
                    found.setdefault((start, end), Guard(start, end, _tidy(text)))
    return tuple(guard for _, guard in sorted(found.items(), key=lambda item: (item[0][0], -item[0][1])))


def _joins(tokens: list[_Token], at: int) -> bool:
    """Whether this ON belongs to a JOIN, and neither to a conflict nor to a DISTINCT, a trigger or an index."""
    following = tokens[at + 1].word if at + 1 < len(tokens) else ""
    return following != "conflict" and tokens[at - 1].word != "distinct"


def _tests(tokens: list[_Token], at: int) -> bool:
    """Whether this is the IF of a function."""
    return tokens[at].word in {"if", "elsif"} and tokens[at - 1].word != "end"


def _end(tokens: list[_Token], at: int) -> int:
    """Where the condition that begins here ends."""
    depth = cases = 0
    for place in range(at, len(tokens)):
        token = tokens[place]
        if token.kind == "open":
            depth += 1
        elif token.kind == "close":
            depth -= 1
            if depth < 0:
                return place
        elif token.kind == "end":
            return place
        elif depth == 0:
            cases += (token.word == "case") - (token.word == "end")
            distinct = token.word == "from" and tokens[place - 1].word == "distinct"
            if cases == 0 and token.word in _ENDS and not distinct:
                return place
    return len(tokens)


def _conjuncts(tokens: list[_Token], *, whole: bool = False) -> Iterator[list[_Token]]:
    """The operands of AND, also inside of parentheses, ORs and branches; with `whole` an OR itself, too."""
    alternatives = _split(tokens, "or")
    if len(alternatives) > 1:
        if whole:
            yield tokens
        for one in alternatives:
            parts = _split(one, "and")
            if len(parts) > 1 or _inner(one) is not None or one[0].word == "case":
                yield from _conjuncts(one)
        return
    for part in _split(tokens, "and"):
        inner = _inner(part)
        if inner is not None and not any(token.word == "select" for token in inner[:1]):
            several = len(_split(inner, "or")) > 1 or len(_split(inner, "and")) == 1
            if several:
                yield part
            yield from _conjuncts(inner) if len(_split(inner, "or")) > 1 or len(_split(inner, "and")) > 1 else ()
        elif part[0].word == "case" and part[-1].word == "end":
            yield part
            for branch in _branches(part):
                if len(_split(branch, "and")) > 1:
                    yield from _conjuncts(branch)
        else:
            yield part


def _inner(tokens: list[_Token]) -> list[_Token] | None:
    """What is inside of the parentheses that are the whole of this."""
    if not tokens or tokens[0].kind != "open":
        return None
    depth = 0
    for place, token in enumerate(tokens):
        depth += (token.kind == "open") - (token.kind == "close")
        if depth == 0:
            return tokens[1:-1] if place == len(tokens) - 1 else None
    return None


def _split(tokens: list[_Token], by: str) -> list[list[_Token]]:
    """The operands of a connective that is not inside of anything; the AND of a BETWEEN is none."""
    parts: list[list[_Token]] = [[]]
    depth = cases = between = 0
    for token in tokens:
        depth += (token.kind == "open") - (token.kind == "close")
        cases += (token.word == "case") - (token.word == "end")
        between += token.word == "between"
        if token.word == by and depth == 0 and cases == 0:
            if by == "and" and between:
                between -= 1
            else:
                parts.append([])
                continue
        parts[-1].append(token)
    return parts


def _branches(case: list[_Token]) -> Iterator[list[_Token]]:
    """What a CASE results in: the conditions after its THENs and its ELSE."""
    branch: list[_Token] | None = None
    depth = cases = 0
    for token in case:
        depth += (token.kind == "open") - (token.kind == "close")
        cases += (token.word == "case") - (token.word == "end")
        edge = depth == 0 and ((cases == 1 and token.word in {"when", "then", "else"}) or cases == 0)
        if edge:
            if branch:
                yield branch
            branch = [] if token.word in {"then", "else"} else None
        elif branch is not None:
            branch.append(token)


def _tidy(text: str) -> str:
    """The condition on one line, as it is named in a report."""
    text = re.sub(r" :: ", "::", text)
    text = re.sub(r"(?<![:\w]): (?=\w)", ":", text)
    text = re.sub(r"([(\[]) ", r"\1", text)
    text = re.sub(r" ([)\],])", r"\1", text)
    return re.sub(r"(<|>|!|-) (=|>)", r"\1\2", text)
