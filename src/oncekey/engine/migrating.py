"""Migrations as flows: runs those that a store lacks, and checks that this version can work with its tables."""

from __future__ import annotations

from hashlib import sha256
from typing import TYPE_CHECKING, Final

from oncekey.canonical.digests import frame
from oncekey.core import migrations
from oncekey.core.errors import SchemaError
from oncekey.core.migrations import Applied, Migration, MigrationPhase, MigrationStatus

if TYPE_CHECKING:
    from collections.abc import Iterable

    from oncekey.core.flow import Flow
    from oncekey.ports.store import Schema

EARLIEST: Final = 3
"""The number of first migrations whose timestamps identify an installation."""


def check(schema: Schema) -> Flow[tuple[Applied, ...]]:
    """Refuse a store that this version cannot work with; otherwise return its migrations."""
    applied = yield from schema.applied()
    wrong = migrations.objection(schema.migrations, applied)
    if wrong is not None:
        raise SchemaError(wrong)
    return applied


def status(schema: Schema) -> Flow[tuple[MigrationStatus, ...]]:
    """Every migration of the store or of this version."""
    return migrations.status(schema.migrations, (yield from schema.applied()))


def plan(schema: Schema, *, only: MigrationPhase | None = None) -> Flow[tuple[tuple[Migration, ...], ...]]:
    """The transactions of `up`, in order, each with its migrations.

    A new store is created in one. A process that starts meanwhile would take a part for an older version's store.
    """
    applied = yield from schema.applied()
    wrong = migrations.changed(schema.migrations, applied)
    if wrong is not None:
        raise SchemaError(wrong)
    pending = migrations.plan(schema.migrations, applied, only=only)
    return tuple((one,) for one in pending) if applied or not pending else (pending,)


def up(schema: Schema, *, only: MigrationPhase | None = None) -> Flow[tuple[Migration, ...]]:
    """Run the missing migrations; the result omits those that another process ran meanwhile."""
    done: tuple[Migration, ...] = ()
    for together in (yield from plan(schema, only=only)):
        done += yield from schema.migrate(*together)
    return done


def at_start(schema: Schema) -> Flow[tuple[Migration, ...]]:
    """Create the tables, or run the migrations that processes of an older version can work with."""
    older_may_run = bool((yield from schema.applied()))
    return (yield from up(schema, only=MigrationPhase.PRE if older_may_run else None))


def identity_of(applied: Iterable[Applied]) -> bytes | None:
    """The identity of this installation's tables; None if there are none."""
    lines = [b"%d:%d" % (one.number, one.applied_at) for one in applied if one.number <= EARLIEST]
    return sha256(frame(*lines)).digest() if lines else None
