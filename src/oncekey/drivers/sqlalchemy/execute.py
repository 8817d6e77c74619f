"""Statements and commits of oncekey's own on a connection of SQLAlchemy, blocking or not."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Final, cast

from sqlalchemy import column, text

from oncekey.core.errors import CommitAmbiguousError
from oncekey.drivers.placeholders import escaped
from oncekey.drivers.postgres.errors import SYNC_WAIT_CANCELLED, unsure_commit
from oncekey.drivers.sqlalchemy.errors import FAILURES, commit_failed
from oncekey.drivers.sqlalchemy.raw import package_of, raw_of

if TYPE_CHECKING:
    from sqlalchemy import CursorResult, Executable
    from sqlalchemy.engine import Connection

    from oncekey.drivers.postgres.doubt import Doubt
    from oncekey.flow import Rows, Statement


OWN: Final = "oncekey_own"
"""The option of statements that are oncekey's own, and not the handler's."""


def rows_of(own: OwnStatement, result: CursorResult[Any]) -> Rows:
    """The rows of its result, by the names of their columns."""
    if not result.returns_rows:
        return ()
    cursor: Any = result.cursor
    names = [one[0] for one in cursor.description]
    if names != own.names:
        if len(set(names)) != len(names):
            return cast("Rows", result.mappings().all())
        own.learn(names)
    return [dict(zip(names, row, strict=True)) for row in result.all()]


class OwnStatement:
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


_own = lru_cache(maxsize=512)(OwnStatement)


def prepared(statement: Statement) -> OwnStatement:
    """The statement as SQLAlchemy executes it."""
    assert isinstance(statement.command, str)
    return _own(statement.command)


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
def committing(connection: Connection | None, doubt: Doubt, what: str) -> Iterator[None]:
    """Inside of it a commit is made, by the connection or by a session on it; raises what happened to it."""
    with sure(connection, doubt, what):
        try:
            yield
        except FAILURES as error:
            raise commit_failed(error, what) from error


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
