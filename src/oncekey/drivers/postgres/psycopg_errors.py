"""The meaning of psycopg's errors."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, TypeAlias

import psycopg
from psycopg.pq import ExecStatus, TransactionStatus

from oncekey.core.errors import StoreError
from oncekey.drivers.postgres.errors import (
    READS_ONLY,
    is_the_end,
    not_committed,
    refused,
    refused_commit,
    unsure_commit,
)
from oncekey.drivers.postgres.psycopg_connections import AsyncStoreConnection, StoreConnection
from oncekey.drivers.postgres.transactions import NOT_OURS, RECORD, TAKEN
from oncekey.drivers.retries import lost, lost_commit
from oncekey.flow import Mode

if TYPE_CHECKING:
    from psycopg.pq.abc import PGresult

AnyConnection: TypeAlias = psycopg.Connection[Any] | psycopg.AsyncConnection[Any]

FAILURES: Final = (psycopg.Error, ValueError, OverflowError)
"""What executing can raise: the server's and psycopg's own errors, and those of values that cannot be bound."""

_TELLS_VALUES: Final = (psycopg.DataError, psycopg.IntegrityError, ValueError, OverflowError)
_FINE: Final = frozenset({ExecStatus.COMMAND_OK, ExecStatus.TUPLES_OK})
_BUSY: Final = frozenset({TransactionStatus.ACTIVE, TransactionStatus.UNKNOWN})


def statement_error(error: Exception, connection: AnyConnection, mode: Mode, what: str) -> StoreError:
    """The store's error for a statement."""
    if was_lost(error, connection):
        if mode is Mode.SINGLE:
            _doubt(connection)
        return lost(mode, what)
    if isinstance(connection, StoreConnection | AsyncStoreConnection) and getattr(error, "sqlstate", "") == READS_ONLY:
        connection.suspect = True
    return _refused(error, what)


def commit_error(error: Exception, connection: AnyConnection, what: str) -> StoreError:
    """The store's error for a COMMIT: an error from the server is definite, a missing reply is not (F20)."""
    if was_lost(error, connection):
        _doubt(connection)
        return lost_commit(what)
    return refused_commit(getattr(error, "sqlstate", None), what, type(error).__name__)


def failure(results: list[PGresult]) -> psycopg.Error | None:
    """The error of the last of several statements that were sent in one message, if it failed."""
    last = results[-1]
    return None if last.status in _FINE else psycopg.errors.error_from_result(last)


def refuse_failed(results: list[PGresult]) -> None:
    """Raise the error of a statement in a message."""
    error = failure(results)
    if error is not None:
        raise error


def is_taken(error: psycopg.Error) -> bool:
    """Whether a record found its place taken, or a step another owner of its record."""
    place = (error.diag.schema_name, error.diag.table_name)
    return error.sqlstate == NOT_OURS or (error.sqlstate == TAKEN and place == RECORD)


def check_commit(connection: StoreConnection | AsyncStoreConnection, tag: str | None, what: str) -> None:
    """Raise unless a COMMIT was answered with COMMIT, without a warning that it is not on the standby yet."""
    if tag != "COMMIT":
        raise not_committed(tag or "", what)
    if connection.unsure:
        raise unsure_commit(what)


def cause(error: Exception) -> Exception | None:
    """The original error, if it may be shown with ours: not one that repeats a value or a whole row."""
    return None if isinstance(error, _TELLS_VALUES) else error


def was_lost(error: Exception, connection: AnyConnection) -> bool:
    """Whether the connection is lost, so that the result of the statement is not known."""
    if not isinstance(error, psycopg.Error):
        return False
    ended = is_the_end(error.sqlstate, error.diag.severity_nonlocalized)
    return ended or connection.closed or connection.pgconn.transaction_status in _BUSY


def _doubt(connection: AnyConnection) -> None:
    """Note the doubt: a backend that ends while it waits for its standby leaves its commit visible."""
    if isinstance(connection, StoreConnection | AsyncStoreConnection):
        connection.doubt.arise()


def _refused(error: Exception, what: str) -> StoreError:
    return refused(getattr(error, "sqlstate", None), what, type(error).__name__)
