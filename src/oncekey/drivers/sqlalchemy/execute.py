"""Statements and commits on a connection of SQLAlchemy, and its return to the pool."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager, suppress
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Final, cast

from sqlalchemy import column, text
from sqlalchemy.ext.asyncio import AsyncConnection

from oncekey.core.errors import CommitAmbiguousError
from oncekey.drivers.placeholders import escaped
from oncekey.drivers.postgres.errors import READS_ONLY, SYNC_WAIT_CANCELLED, unsure_commit
from oncekey.drivers.sqlalchemy.errors import FAILURES, commit_failed, sqlstate
from oncekey.drivers.sqlalchemy.raw import package_of, raw_of

if TYPE_CHECKING:
    from sqlalchemy import CursorResult, Executable
    from sqlalchemy.engine import Connection

    from oncekey.drivers.postgres.doubt import Doubt
    from oncekey.flow import Rows, Statement


OWN: Final = "oncekey_own"
"""The option of statements that are oncekey's own, and not the handler's."""


async def execute(connection: AsyncConnection, statement: Statement) -> Rows:
    """Execute one statement."""
    assert isinstance(statement.command, str)
    spoken = _spoken(statement.command)
    return _rows(spoken, await connection.execute(spoken.said, statement.params))


def say(connection: Connection, statement: Statement) -> Rows:
    """Execute one statement, blocking."""
    assert isinstance(statement.command, str)
    spoken = _spoken(statement.command)
    return _rows(spoken, connection.execute(spoken.said, statement.params))


def _rows(spoken: _Spoken, result: CursorResult[Any]) -> Rows:
    if not result.returns_rows:
        return ()
    cursor: Any = result.cursor
    names = [one[0] for one in cursor.description]
    if names != spoken.names:
        if len(set(names)) != len(names):
            return cast("Rows", result.mappings().all())
        spoken.learn(names)
    return [dict(zip(names, row, strict=True)) for row in result.all()]


class _Spoken:
    """A statement of oncekey's own, and the names of its columns, once they are known.

    SQLAlchemy reads the description of all columns anew each time that a text is executed, unless it was given them.
    A migration may have run since. So rows are read by the names that the database sent with them, not by those.
    """

    __slots__ = ("_text", "names", "said")

    def __init__(self, command: str) -> None:
        self._text = text(escaped(command))
        self.names: list[str] | None = None
        self.said: Executable = self._text.execution_options(**{OWN: True})

    def learn(self, names: list[str]) -> None:
        """Execute it with these columns from now on."""
        self.names = names
        self.said = self._text.columns(*map(column, names)).execution_options(**{OWN: True})


_spoken = lru_cache(maxsize=512)(_Spoken)


@contextmanager
def sure(connection: Connection | None, doubt: Doubt, what: str) -> Iterator[None]:
    """Raise if a commit here stopped waiting for its standby: only the driver's own connection gets that warning.

    Every other end that leaves the commit open raises the same doubt, because then the server was asked to stop.
    """
    raw, heard = raw_of(connection), []

    def hear(*said: Any) -> None:  # noqa: ANN401  (asyncpg's message, or psycopg's)
        if said[-1].sqlstate == SYNC_WAIT_CANCELLED:
            heard.append(said)
            doubt.arise()

    with _listening(raw, hear):
        try:
            yield
        except BaseException as error:
            if isinstance(error, CommitAmbiguousError) or not isinstance(error, Exception):
                doubt.arise()
            raise
    if heard:
        raise unsure_commit(what)


@contextmanager
def _listening(raw: Any, hear: Callable[..., None]) -> Iterator[None]:  # noqa: ANN401  (asyncpg's or psycopg's)
    match package_of(raw):
        case "asyncpg" if not raw.is_closed():  # a closed one would refuse a listener
            raw.add_log_listener(hear)
            try:
                yield
            finally:
                raw.remove_log_listener(hear)
        case "psycopg":
            raw.add_notice_handler(hear)
            try:
                yield
            finally:
                raw.remove_notice_handler(hear)
        case _:
            yield


async def committed(connection: AsyncConnection, doubt: Doubt, what: str) -> None:
    """Commit. SQLAlchemy does not show the reply, so the caller has to know that there is something to commit."""
    with sure(connection.sync_connection, doubt, what):
        try:
            await AsyncConnection.commit(connection)
        except FAILURES as error:
            raise commit_failed(error, what) from error


async def forsaken(connection: AsyncConnection, error: BaseException) -> None:
    """Drop the connections to a server that takes no writes: another server may take them by now."""
    if sqlstate(error) == READS_ONLY:
        with suppress(*FAILURES):
            await AsyncConnection.invalidate(connection)


async def closed(connection: AsyncConnection, *, clean: Callable[[], Awaitable[bool]] | None = None) -> None:
    """Roll back what is open, reset the session if asked, and return the connection to its pool."""
    try:
        if connection.get_transaction() is not None:
            # Closing alone skips the roll-back if SQLAlchemy believes that a failed commit ended the transaction.
            await AsyncConnection.rollback(connection)
        if clean is not None and not await clean():
            await discarded(connection)
            return
        await AsyncConnection.close(connection)
    except FAILURES:
        # The connection is dead, so there is nothing left to roll back.
        await discarded(connection)


async def discarded(connection: AsyncConnection) -> None:
    """Close the connection instead of returning it."""
    with suppress(*FAILURES):
        await AsyncConnection.invalidate(connection)
    await AsyncConnection.close(connection)
