"""The table of all clauses."""

from __future__ import annotations

from typing import Final

from oncekey.conformance import (
    comparisons,
    failures,
    hangups,
    keys,
    leaks,
    mismatches,
    others,
    races,
    replays,
    spellings,
    tenants,
)
from oncekey.conformance.clauses import Clause

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
    *leaks.CLAUSES,
    *others.CLAUSES,
)
"""Every clause, in the order in which they are tried."""

SIGHTING_SHOTS: Final = 20
"""The most requests that are sent before the first clause."""


def planned(clauses: tuple[Clause, ...] = CLAUSES) -> int:
    """The most requests that a run of these clauses sends, waiting for slow ones not counted."""
    return SIGHTING_SHOTS + sum(clause.shots for clause in clauses)
