"""The meaning of SQLAlchemy's errors: it wraps those of the driver, and passes network errors through."""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, Final, cast

from sqlalchemy import event
from sqlalchemy.exc import DBAPIError, OperationalError, PendingRollbackError, SQLAlchemyError
from sqlalchemy.exc import TimeoutError as PoolTimeoutError

from oncekey.core.errors import OncekeyError, StoreBusyError, StoreError, TransactionControlError, mark_lost
from oncekey.core.flow import Mode
from oncekey.databases import handler_sql
from oncekey.databases.postgres import server as postgres_errors
from oncekey.databases.retries import lost, lost_commit
from oncekey.databases.sqlite.execute import commit_error, store_error

if TYPE_CHECKING:
    from sqlalchemy.engine import Engine, ExceptionContext


def _goodbyes() -> tuple[type[Exception], ...]:
    """The error of asyncpg when the server closes the connection; SQLAlchemy 2.0 does not wrap it."""
    if find_spec("asyncpg") is None:
        return ()
    from asyncpg.exceptions import InternalClientError  # noqa: PLC0415  (an optional package)

    return (InternalClientError,)


_GOODBYES: Final = _goodbyes()
FAILURES: Final[tuple[type[Exception], ...]] = (SQLAlchemyError, OSError, EOFError, TimeoutError, *_GOODBYES)
"""Every error that a statement can end with, except a cancellation."""

BUSINESS: Final = "the business transaction"

ENDED: Final = (
    "the handler's transaction was rolled back before its end, by session.rollback() or a failed flush: its rows are "
    "gone, so a success cannot be stored. Raise instead, or wrap statements that may fail in `session.begin_nested()`"
)
BROKEN: Final = (
    "a statement of the handler failed and the handler continued, but the database rejects the rest of the "
    "transaction: its rows are gone, so a success cannot be stored. Raise instead, or wrap statements that may fail "
    "in `session.begin_nested()`"
)
AUTOCOMMITS: Final = (
    "the engine commits every statement by itself, so a handler's rows could not be rolled back: create it without "
    'isolation_level="AUTOCOMMIT"'
)

_ABORTED: Final = "25P02"
_NO_SAVEPOINT: Final = "no such savepoint"


def is_aborted(error: BaseException) -> bool:
    """Whether the transaction failed earlier and rejects further statements."""
    return sqlstate(error) == _ABORTED or isinstance(error, PendingRollbackError)


def not_connected(error: BaseException, dialect: str) -> StoreError:
    """The meaning of an error of an engine with this dialect, before anything was sent."""
    if isinstance(error, PoolTimeoutError):
        return StoreBusyError("no connection of the engine's pool became free in time")
    match dialect:
        case "sqlite":
            return store_error(_origin(error), "connecting")
        case "mysql" | "mariadb":
            return cast("StoreError", _mariadb().unreachable(_origin(error)))
        case _:
            return postgres_errors.unreachable(_kind(error))


def failed(error: BaseException, mode: Mode, what: str) -> StoreError:
    """The meaning of an error of a statement."""
    if _is_sqlite(error):
        return store_error(_origin(error), what)
    if _is_mysql(error):
        return cast("StoreError", _mariadb().statement_error(_origin(error), mode, what))
    if _was_lost(error):
        return lost(mode, what)
    return postgres_errors.refused(sqlstate(error), what, _kind(error))


def commit_failed(error: BaseException, what: str) -> StoreError:
    """The meaning of an error of a COMMIT: one from the server is a rollback, a lost connection is ambiguous (L5)."""
    if _is_sqlite(error):
        return commit_error(_origin(error), what)
    if _is_mysql(error):
        return cast("StoreError", _mariadb().commit_error(_origin(error), what))
    if _was_lost(error):
        return lost_commit(what)
    return postgres_errors.refused_commit(sqlstate(error), what, _kind(error))


def meaning(error: BaseException) -> OncekeyError:
    """The meaning of an error of one of oncekey's statements in a business transaction that a handler used."""
    if is_aborted(error):
        return TransactionControlError(BROKEN)
    return postgres_errors.handlers_doing(sqlstate(error), BUSINESS) or failed(error, Mode.ATOMIC, BUSINESS)


def unproven(error: BaseException) -> OncekeyError:
    """The meaning of a SQLite error on release of the savepoint that marks a business transaction."""
    if _NO_SAVEPOINT in str(_origin(error)):
        return TransactionControlError(handler_sql.ENDED)
    return meaning(error)


def mark_lost_connections(engine: Engine) -> None:
    """Mark the errors of lost connections, also in sessions: outside of a handler they mean that nothing ran."""
    if not event.contains(engine, "handle_error", _mark):
        event.listen(engine, "handle_error", _mark)


def _mark(context: ExceptionContext) -> None:
    error = context.sqlalchemy_exception or context.original_exception
    if not isinstance(error, FAILURES):
        return  # a cancellation
    invalidated = isinstance(error, DBAPIError) and error.connection_invalidated
    if invalidated or (not _is_sqlite(error) and not _is_mysql(error) and _was_lost(error)):
        mark_lost(error)


def _was_lost(error: BaseException) -> bool:
    if not isinstance(error, DBAPIError):
        return isinstance(error, (OSError, EOFError, TimeoutError, *_GOODBYES))
    state = sqlstate(error)
    if postgres_errors.was_too_slow(state):
        return False
    silent = state is None and isinstance(error, OperationalError)
    return error.connection_invalidated or silent or postgres_errors.is_the_end(state, None)


def sqlstate(error: BaseException) -> str | None:
    """The server's SQLSTATE, if there is one."""
    state = getattr(_origin(error), "sqlstate", None)
    return None if state is None else str(state)


def _is_sqlite(error: BaseException) -> bool:
    return hasattr(_origin(error), "sqlite_errorname")


def _is_mysql(error: BaseException) -> bool:
    return any(kind.__module__.startswith("pymysql") for kind in type(_origin(error)).__mro__)


def _mariadb() -> Any:  # noqa: ANN401  (a module)
    """The meaning of PyMySQL's errors; imported only if PyMySQL is installed."""
    return import_module("oncekey.databases.mariadb.messages")


def _kind(error: BaseException) -> str:
    return type(_origin(error)).__name__


def _origin(error: BaseException) -> Exception:
    origin = getattr(error, "orig", None) or error
    assert isinstance(origin, Exception)
    return origin
