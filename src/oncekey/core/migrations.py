"""Migrations as values: which exist, which are missing in a store, and with which of them this code may run.

A `pre` migration is safe while older code still runs; it only adds. A `post` migration may remove what older code
needs, so it runs after the last older process has ended. Code starts if the store has every `pre` of its version, and
refuses a store that has a `post` of a later version.

A `pre` after a `post` waits for it, because it may depend on it. One that does not depend on it declares that in its
first line (ALONE); otherwise code that has both could never start next to code that has neither.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from hashlib import sha256
from typing import Final

_FILE: Final = re.compile(r"(?P<number>\d{4})_(?P<phase>pre|post)_(?P<name>[a-z][a-z0-9_]*)\.sql")
_COMMENT: Final = re.compile(r"('[^']*')|--[^\n]*")

ALONE: Final = "-- Stands alone: it builds on no post before it."
"""The first line of a `pre` that may run before a `post` of a lower number."""


_REMEDY: Final = (
    "run `oncekey migrate up --store URL` (Django: `manage.py migrate`, with 'oncekey.django' in INSTALLED_APPS)"
)


class MigrationPhase(StrEnum):
    """When a migration may run."""

    PRE = "pre"
    POST = "post"


class MigrationState(StrEnum):
    """The state of a migration in a store."""

    APPLIED = "applied"
    PENDING = "pending"
    CHANGED = "changed"
    """Applied, but with other content than in this version."""
    UNKNOWN = "unknown"
    """Applied, but this version does not have it."""


@dataclass(frozen=True, slots=True)
class Applied:
    """A migration as recorded in a store."""

    number: int
    phase: MigrationPhase
    name: str
    checksum: str
    applied_at: int = field(default=0, compare=False, kw_only=True)
    """When it was applied, by the store's clock."""

    @property
    def label(self) -> str:
        """The name of its file without the extension."""
        return f"{self.number:04}_{self.phase}_{self.name}"


@dataclass(frozen=True, slots=True)
class Migration(Applied):
    """A migration with its statements."""

    text: str = field(repr=False)
    former: str | None = field(default=None, repr=False, compare=False)
    """What a store recorded as the checksum until version 0.1.0, which included the comments."""

    @property
    def stands_alone(self) -> bool:
        """Whether it may run before a `post` of a lower number."""
        return self.phase is MigrationPhase.PRE and self.text.startswith(ALONE)

    @classmethod
    def read(cls, file: str, text: str, former: str | None = None) -> Migration:
        """A migration from its file; a wrong name is a bug in oncekey, which any test finds."""
        match = _FILE.fullmatch(file)
        if match is None:
            raise ValueError(f"{file} is not a migration: name it NNNN_pre_name.sql or NNNN_post_name.sql")
        phase = MigrationPhase(match["phase"])
        return cls(int(match["number"]), phase, match["name"], _checksum(text), text, former)


@dataclass(frozen=True, slots=True)
class MigrationStatus:
    """One line of a store's status."""

    migration: Applied
    state: MigrationState


def ordered(migrations: Iterable[Migration]) -> tuple[Migration, ...]:
    """The migrations by number; raises if a number is missing or used twice."""
    found = tuple(sorted(migrations, key=lambda migration: migration.number))
    numbers = [migration.number for migration in found]
    if numbers != list(range(1, len(found) + 1)):
        raise ValueError(f"migrations are numbered 1, 2, 3 and so on; these are {numbers}")
    return found


def status(known: Sequence[Migration], applied: Sequence[Applied]) -> tuple[MigrationStatus, ...]:
    """Every migration that the code or the store has, in order."""
    known_of = {one.number: one for one in applied}
    entries = [MigrationStatus(one, _state_of(one, known_of.get(one.number))) for one in known]
    numbers = {one.number for one in known}
    entries += [MigrationStatus(one, MigrationState.UNKNOWN) for one in applied if one.number not in numbers]
    return tuple(sorted(entries, key=lambda entry: entry.migration.number))


def plan(
    known: Sequence[Migration], applied: Sequence[Applied], *, only: MigrationPhase | None = None
) -> tuple[Migration, ...]:
    """The migrations to run, in order. `only=PRE` stops before the first `post`, except for those that stand alone."""
    numbers = {one.number for one in applied}
    pending = [one for one in known if one.number not in numbers]
    if only is not MigrationPhase.PRE:
        return tuple(pending)
    posts = [one.number for one in pending if one.phase is MigrationPhase.POST]
    return tuple(one for one in pending if not posts or one.number < posts[0] or one.stands_alone)


def changed(known: Sequence[Migration], applied: Sequence[Applied]) -> str | None:
    """Why nothing may be run on this store; None if it may."""
    for entry in status(known, applied):
        if entry.state is MigrationState.CHANGED:
            return (
                f"the store's migration {entry.migration.label} is not the one that this version of oncekey has: "
                "use the version that created the store, or restore the store"
            )
    return None


def objection(known: Sequence[Migration], applied: Sequence[Applied]) -> str | None:
    """Why code with these migrations may not start on this store, and how to fix that; None if it may."""
    if known and not applied:
        return f"the store has no oncekey tables: {_REMEDY}"
    for entry in status(known, applied):
        match entry.state, entry.migration.phase:
            case MigrationState.PENDING, MigrationPhase.PRE:
                return f"the store lacks the migration {entry.migration.label}: {_REMEDY}"
            case MigrationState.UNKNOWN, MigrationPhase.POST:
                return (
                    f"the store has the migration {entry.migration.label}, which may have removed something that this "
                    "version of oncekey needs: update oncekey"
                )
            case _:
                continue
    return changed(known, applied)


def _state_of(known: Migration, known_of: Applied | None) -> MigrationState:
    if known_of is None:
        return MigrationState.PENDING
    same = (known_of.phase, known_of.name) == (known.phase, known.name)
    same = same and known_of.checksum in {known.checksum, known.former}
    return MigrationState.APPLIED if same else MigrationState.CHANGED


def _checksum(text: str) -> str:
    """SHA-256 of the statements: a comment may be corrected, and line ends depend on how the file was checked out."""
    lines = (line.rstrip() for line in _COMMENT.sub(r"\1", text).splitlines())
    return sha256("\n".join(filter(None, lines)).encode()).hexdigest()
