"""The meaning of psycopg's replies and errors, for threads and for asyncio."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, TypeAlias

import psycopg
from psycopg.pq import ExecStatus, PipelineStatus, TransactionStatus

from oncekey.core.errors import StoreError
from oncekey.core.flow import Mode, Row, Rows
from oncekey.databases.postgres import server
from oncekey.databases.postgres.psycopg_connections import AsyncStoreConnection, StoreConnection
from oncekey.databases.retries import lost, lost_commit

if TYPE_CHECKING:
    from psycopg.pq.abc import PGresult


AnyConnection: TypeAlias = psycopg.Connection[Any] | psycopg.AsyncConnection[Any]

FAILURES: Final = (psycopg.Error, ValueError, OverflowError)
"""The errors of executing: the server's, psycopg's, and those of values that cannot be bound."""

_SHOWS_VALUES: Final = (psycopg.DataError, psycopg.IntegrityError, ValueError, OverflowError)
_FINE: Final = frozenset({ExecStatus.COMMAND_OK, ExecStatus.TUPLES_OK})
_BUSY: Final = frozenset({TransactionStatus.ACTIVE, TransactionStatus.UNKNOWN})


def statement_error(error: Exception, connection: AnyConnection, mode: Mode, what: str) -> StoreError:
    """The store's error for a statement."""
    if was_lost(error, connection):
        if mode is Mode.SINGLE:
            _note_unconfirmed(connection)
        return lost(mode, what)
    if isinstance(connection, StoreConnection | AsyncStoreConnection):
        state = getattr(error, "sqlstate", None)
        doing = server.handlers_doing(state, what) if connection.handled else None
        if doing is not None:
            return doing
        connection.suspect = connection.suspect or state == server.READS_ONLY
    return _refused(error, what)


def commit_error(error: Exception, connection: AnyConnection, what: str) -> StoreError:
    """The store's error for a COMMIT: an error from the server is definite, a missing reply is not (F20)."""
    if was_lost(error, connection):
        _note_unconfirmed(connection)
        return lost_commit(what)
    return server.refused_commit(getattr(error, "sqlstate", None), what, type(error).__name__)


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
    """Whether the record already exists, or the step's record has another owner."""
    place = (error.diag.schema_name, error.diag.table_name)
    return error.sqlstate == server.NOT_OURS or (error.sqlstate == server.TAKEN and place == server.RECORD)


def check_commit(connection: StoreConnection | AsyncStoreConnection, tag: str | None, what: str) -> None:
    """Raise unless the reply to a COMMIT is COMMIT, without a warning that it is not on the standby yet."""
    if tag != "COMMIT":
        raise server.not_committed(tag or "", what)
    if connection.unsure:
        raise server.unsure_commit(what)


def cause(error: Exception) -> Exception | None:
    """The original error if it is safe to chain: not one that repeats a value or a whole row."""
    return None if isinstance(error, _SHOWS_VALUES) else error


def was_lost(error: Exception, connection: AnyConnection) -> bool:
    """Whether the connection is lost, so that the outcome of the statement is unknown."""
    if not isinstance(error, psycopg.Error) or server.was_too_slow(error.sqlstate):
        return False
    ended = server.is_the_end(error.sqlstate, error.diag.severity_nonlocalized)
    return ended or connection.closed or connection.pgconn.transaction_status in _BUSY


def _note_unconfirmed(connection: AnyConnection) -> None:
    """Note an unconfirmed commit: a backend that ends while it waits for its standby leaves its commit visible."""
    if isinstance(connection, StoreConnection | AsyncStoreConnection):
        connection.unconfirmed.add()


def _refused(error: Exception, what: str) -> StoreError:
    return server.refused(getattr(error, "sqlstate", None), what, type(error).__name__)


def ended(
    connection: StoreConnection | AsyncStoreConnection, results: list[PGresult], name: str, what: str
) -> Rows | None:
    """The meaning of the replies to a last statement, COMMIT and the reset of the session.

    The server executes a message up to the first statement that fails: if that was before the COMMIT, the transaction
    is still open; if the reset failed, an earlier reply confirms the commit.
    """
    error = failure(results)
    if error is not None and connection.pgconn.transaction_status == TransactionStatus.INERROR:
        if is_taken(error):
            return None
        raise statement_error(error, connection, Mode.ATOMIC, name) from cause(error)
    tags = [result.command_status for result in results]
    if b"COMMIT" not in tags:
        if error is not None:
            raise commit_error(error, connection, what) from cause(error)
        raise server.not_committed("ROLLBACK" if b"ROLLBACK" in tags else "", what)
    if error is not None:
        connection.pgconn.finish()  # the session was not reset
    if connection.unsure:
        raise server.unsure_commit(what)
    row = _notice(connection)
    return () if row is None else [row]


def found(connection: StoreConnection | AsyncStoreConnection, last: PGresult) -> Rows | None:
    """The row of a first statement, from its notice; empty if there is nothing to report. None: execute it."""
    row = _notice(connection)
    if row is None:
        return () if last.ntuples else None
    return [row]


def _notice(connection: StoreConnection | AsyncStoreConnection) -> Row | None:
    return None if connection.notice is None else server.row_from_notice(connection.notice)


def has_rows(cursor: psycopg.Cursor[Any] | psycopg.AsyncCursor[Any]) -> bool:
    """Whether a statement returns rows."""
    # `description` shows that too, but it describes every column in full each time.
    return cursor.pgresult is not None and cursor.pgresult.nfields > 0


def was_ended(connection: StoreConnection | AsyncStoreConnection) -> bool:
    """Whether the handler ended the transaction (F16)."""
    return not connection.closed and connection.pgconn.transaction_status == TransactionStatus.IDLE


def is_left_open(connection: StoreConnection | AsyncStoreConnection) -> bool:
    """Whether a handler left a COPY or a pipeline open, in which nothing else can be executed."""
    pgconn = connection.pgconn
    return pgconn.transaction_status == TransactionStatus.ACTIVE or pgconn.pipeline_status != PipelineStatus.OFF


def may_be_undone(connection: StoreConnection | AsyncStoreConnection) -> bool:
    """Whether there is a transaction that can be rolled back."""
    return not connection.closed and connection.pgconn.transaction_status in {
        TransactionStatus.INTRANS,
        TransactionStatus.INERROR,
    }


def first_line(error: psycopg.Error) -> str:
    """The library's error about a failed connection attempt, without its hints."""
    return str(error).partition("\n")[0]
