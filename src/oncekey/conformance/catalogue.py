"""The table of all clauses."""

from __future__ import annotations

from collections.abc import Sequence
from fnmatch import fnmatchcase
from typing import Final

from oncekey.conformance import (
    comparisons,
    crashes,
    failures,
    finals,
    hangups,
    instances,
    keys,
    leaks,
    mismatches,
    others,
    outages,
    races,
    replays,
    spellings,
    tenants,
)
from oncekey.conformance.clauses import Clause
from oncekey.core.errors import OncekeyError


class NoSuchClauseError(OncekeyError):
    """A pattern for clauses matches none of them."""


CLAUSES: Final[tuple[Clause, ...]] = (
    *keys.CLAUSES,
    *spellings.CLAUSES,
    *replays.CLAUSES,
    *mismatches.CLAUSES,
    *comparisons.CLAUSES,
    *races.CLAUSES,
    *tenants.CLAUSES,
    *failures.CLAUSES,
    *hangups.CLAUSES,
    *finals.CLAUSES,
    *leaks.CLAUSES,
    *others.CLAUSES,
    *instances.CLAUSES,
    *crashes.CLAUSES,
    *outages.CLAUSES,
)
"""Every clause, in the order in which they are tried."""

ABOUT_HEADERS: Final = frozenset(
    f"keys.{name}" for name in ("malformed", "doubled", "quoted", "bare", "two-spellings", "parameters", "field-name")
) | {"keys.echoed", "keys.status"}
"""Clauses that have no meaning where the key is a member of the body."""

SIGHTING_SHOTS: Final = 20
"""The most requests that are sent before the first clause."""


def chosen(only: Sequence[str] = (), skip: Sequence[str] = ()) -> tuple[Clause, ...]:
    """The clauses whose ids match one of the patterns, less those that are to be left out.

    A pattern is an id, an area's first word (`races`), or has wildcards (`*.one-effect`).

    Raises:
        NoSuchClauseError: A pattern matches nothing, which is a slip of the pen.
    """
    for pattern in (*only, *skip):
        if not any(_matches(clause, pattern) for clause in CLAUSES):
            raise NoSuchClauseError(f"no clause is called {pattern!r}: --list shows all of them")
    return tuple(
        clause
        for clause in CLAUSES
        if (not only or any(_matches(clause, pattern) for pattern in only))
        and not any(_matches(clause, pattern) for pattern in skip)
    )


def _matches(clause: Clause, pattern: str) -> bool:
    return fnmatchcase(clause.id, pattern) or clause.id.startswith(f"{pattern}.")


def planned(clauses: tuple[Clause, ...] = CLAUSES) -> int:
    """The most requests that a run of these clauses sends, waiting for slow ones not counted."""
    return SIGHTING_SHOTS + sum(clause.shots for clause in clauses)
