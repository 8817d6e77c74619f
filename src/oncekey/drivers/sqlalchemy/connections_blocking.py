# Generated from connections.py by `python -m tools.twins`: edit that one.
"""What oncekey does on a connection of a blocking `Engine`: executes, commits, and returns it to the pool."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING

from sqlalchemy.engine import Connection

from oncekey.drivers.postgres.errors import READS_ONLY
from oncekey.drivers.sqlalchemy.errors import FAILURES, sqlstate
from oncekey.drivers.sqlalchemy.execute import committing, prepared, rows_of

if TYPE_CHECKING:
    from oncekey.drivers.postgres.doubt import Doubt
    from oncekey.flow import Rows, Statement


def execute(connection: Connection, statement: Statement) -> Rows:
    """Execute one statement."""
    own = prepared(statement)
    return rows_of(own, connection.execute(own.said, statement.params))


def committed(connection: Connection, doubt: Doubt, what: str) -> None:
    """Commit. SQLAlchemy does not show the reply, so the caller has to know that there is something to commit."""
    with committing(connection, doubt, what):
        Connection.commit(connection)


def forsaken(connection: Connection, error: BaseException) -> None:
    """Drop the connections to a server that takes no writes: another server may take them by now."""
    if sqlstate(error) == READS_ONLY:
        with suppress(*FAILURES):
            Connection.invalidate(connection)


def closed(connection: Connection, *, clean: Callable[[], bool] | None = None) -> None:
    """Roll back what is open, reset the session if asked, and return the connection to its pool."""
    try:
        if connection.get_transaction() is not None:
            # Closing alone skips the roll-back if SQLAlchemy believes that a failed commit ended the transaction.
            Connection.rollback(connection)
        if clean is not None and not clean():
            discarded(connection)
            return
        Connection.close(connection)
    except FAILURES:
        # The connection is dead, so there is nothing left to roll back.
        discarded(connection)


def discarded(connection: Connection) -> None:
    """Close the connection instead of returning it."""
    with suppress(*FAILURES):
        Connection.invalidate(connection)
    Connection.close(connection)
