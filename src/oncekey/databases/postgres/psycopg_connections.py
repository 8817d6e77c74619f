"""psycopg's connections, with the time limits that the store needs and a listener for a commit's warnings.

Before an idle connection is lent, its socket is checked, which costs no round trip: a connection that a restart or
`pg_terminate_backend` has ended is discarded before a statement is lost on it.
"""

from __future__ import annotations

import asyncio
import math
import os
import re
import select
import socket
import time
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager, suppress
from copy import copy
from functools import partial
from typing import TYPE_CHECKING, Any, Final, NoReturn, TypeVar

import psycopg
from psycopg import generators, sql
from psycopg.conninfo import conninfo_to_dict, make_conninfo
from psycopg.pq import ExecStatus, PipelineStatus, TransactionStatus

from oncekey.core.errors import ConfigurationError
from oncekey.databases.handler_sql import RESET, ConnectionUse, HandlerProxy, refusal, refuse_transaction_control
from oncekey.databases.postgres.address import GREETED, PostgresAddress
from oncekey.databases.postgres.server import NOTICE, stopped_waiting
from oncekey.databases.postgres.unconfirmed import UnconfirmedCommits
from oncekey.databases.slots import IdleStack

if TYPE_CHECKING:
    from psycopg.abc import PQGen
    from psycopg.errors import Diagnostic
    from psycopg.pq.abc import PGconn, PGresult


T = TypeVar("T")
C = TypeVar("C", "StoreConnection", "AsyncStoreConnection")

GRACE: Final = 1.0
"""Seconds in which the server must end a cancelled statement before the connection counts as dead."""

MAX_AGE: Final = 1800.0
"""Seconds after which a connection is replaced, so that load reaches a server that was added or moved."""

PREPARE_AFTER: Final = 2
"""How often a statement is executed before it is prepared, if the address promises that there is no pooler."""

NOT_RESET: Final = "the session could not be reset"

_SETTINGS: Final = frozenset({"autocommit", "isolation_level", "read_only", "deferrable"})
_REFUSED: Final = frozenset(
    {"commit", "rollback", "close", "tpc_begin", "tpc_prepare", "tpc_commit", "tpc_rollback"}
    | {f"set_{setting}" for setting in _SETTINGS}
)
_FOREIGN_OPTION: Final = re.compile(r'invalid (?:URI query parameter:|connection option) "(\w+)"')
_KEEPALIVE: Final = {"keepalives_idle": 30, "keepalives_interval": 10, "keepalives_count": 3}


class _State:
    """The driver's state of a connection. `limit`: the seconds that a reply may take."""

    limit: float | None = None
    use: ConnectionUse | None = None
    unsure = False
    notice: str | None = None
    suspect = False
    handled = False
    """Whether a handler used the open transaction."""
    born = 0.0
    threshold: int | None = None
    cleaning = False
    unconfirmed = UnconfirmedCommits()


class StoreConnection(_State, psycopg.Connection[Any]):
    """A connection for blocking code."""

    def wait(self, gen: PQGen[T], *args: Any, **kwargs: Any) -> T:  # noqa: ANN401  (psycopg's, version by version)
        """Wait for the reply, up to the limit."""
        if self.use is not None:
            self.use.check()
        if self.limit is not None:
            gen = _patiently(gen, self.limit, self._ask_to_stop, self._hang_up)
        return super().wait(gen, *args, **kwargs)

    def is_clean(self) -> bool:
        """Whether the session was reset after a handler used it; the reset was sent before."""
        try:
            return _all_well(self.wait(generators.execute(self.pgconn)))
        except psycopg.Error:
            return False
        finally:
            self.cleaning = False

    def is_free(self, seconds: float) -> bool:
        """Whether no other thread and no open stream uses it; waits a moment if necessary."""
        if not self.lock.acquire(timeout=seconds):
            return False
        self.lock.release()
        return True

    def sever(self) -> bool:
        """Close it even while a statement is running; False: another thread still waits for the reply."""
        self._ask_to_stop()
        cut(self.pgconn)
        return self.is_free(GRACE)

    def _hang_up(self) -> None:
        self.suspect = True
        self.pgconn.finish()

    def _ask_to_stop(self) -> None:
        with suppress(psycopg.Error):
            self.cancel_safe(timeout=GRACE)


class AsyncStoreConnection(_State, psycopg.AsyncConnection[Any]):
    """A connection for asyncio."""

    _stopping: asyncio.Task[None] | None = None

    async def wait(self, gen: PQGen[T], *args: Any, **kwargs: Any) -> T:  # noqa: ANN401  (as above)
        """Wait for the reply, up to the limit."""
        if self.use is not None:
            self.use.check()
        if self.limit is not None:
            gen = _patiently(gen, self.limit, self._ask_to_stop, self._hang_up)
        return await super().wait(gen, *args, **kwargs)

    async def is_clean(self) -> bool:
        """Whether the session was reset after a handler used it; the reset was sent before."""
        try:
            return _all_well(await self.wait(generators.execute(self.pgconn)))
        except psycopg.Error:
            return False
        finally:
            self.cleaning = False

    async def is_free(self, seconds: float) -> bool:
        """Whether no other task and no open stream uses it; waits a moment if necessary."""
        try:
            async with asyncio.timeout(seconds), self.lock:
                return True
        except TimeoutError:
            return False

    async def sever(self) -> bool:
        """Close it even while a statement is running; False: another task still waits for the reply."""
        return await cancel_and_close(self)

    def _hang_up(self) -> None:
        self.suspect = True
        self.pgconn.finish()

    def _ask_to_stop(self) -> None:
        # Kept, because the event loop holds tasks only weakly.
        self._stopping = asyncio.get_running_loop().create_task(self._asked_to_stop())

    async def _asked_to_stop(self) -> None:
        with suppress(psycopg.Error):
            await self.cancel_safe(timeout=GRACE)


def lent(connection: C, use: ConnectionUse) -> C:
    """A handler's view of the connection: the same server and lock, but a separate object.

    A handler can keep cursors, transactions and bound methods of it. After the operation all of them are refused,
    including calls that are queued at that moment, while the connection itself goes to the next borrower.
    """
    view = copy(connection)
    view.use = use
    view.limit = None
    view._adapters = None  # a handler's registrations end with its object  # noqa: SLF001
    view._pool = None  # psycopg does not warn if such a connection is dropped before it is closed  # noqa: SLF001
    return view


def taken_back(connection: C) -> None:
    """Undo a handler's changes to the state that its object shares with ours."""
    connection.limit, connection.prepare_threshold = None, connection.threshold
    connection.handled = False
    del connection._notice_handlers[1:]  # the first one is our own  # noqa: SLF001
    connection._notify_handlers.clear()  # noqa: SLF001
    if connection._notifies_backlog:  # noqa: SLF001
        connection._notifies_backlog.clear()  # noqa: SLF001


def clean_up(connection: C, text: str = RESET) -> bool:
    """Send the reset of the state that a handler may have left in the session; `is_clean` reads the reply."""
    try:
        connection.pgconn.send_query(text.encode())
    except psycopg.Error:
        connection.pgconn.finish()
        return False
    connection.cleaning = True
    return True


async def is_pooled(connection: psycopg.AsyncConnection[Any]) -> bool:
    """Whether there is a pooler in front of the server: it greets a client with its own process number."""
    async with asyncio.timeout(GRACE), connection.lock:
        return _has_no_row(await connection.wait(answers(connection.pgconn, _greeted(connection.pgconn))))


def is_pooled_blocking(connection: psycopg.Connection[Any]) -> bool:
    """Blocking version of `is_pooled`."""
    with connection.lock:
        return _has_no_row(connection.wait(answers(connection.pgconn, _greeted(connection.pgconn))))


def _greeted(pgconn: PGconn) -> str:
    return GREETED.format(pid=pgconn.backend_pid)


def _has_no_row(results: list[PGresult]) -> bool:
    if not _all_well(results):
        raise psycopg.OperationalError("the server did not report its process")
    return not results[0].ntuples


async def cleaned(connection: psycopg.AsyncConnection[Any]) -> None:
    """Reset the session of the application's own connection, and wait for the reply."""
    async with asyncio.timeout(GRACE), connection.lock:
        if not _all_well(await connection.wait(answers(connection.pgconn, RESET))):
            raise psycopg.OperationalError(NOT_RESET)


def cleaned_blocking(connection: psycopg.Connection[Any]) -> None:
    """Blocking version of `cleaned`, which waits as long as for other statements."""
    with connection.lock:
        if not _all_well(connection.wait(answers(connection.pgconn, RESET))):
            raise psycopg.OperationalError(NOT_RESET)


@contextmanager
def limited_blocking(connection: psycopg.Connection[Any], seconds: float) -> Iterator[None]:
    """Limit the time in seconds for each reply on the application's own connection inside the block."""

    def ask_to_stop() -> None:
        with suppress(psycopg.Error):
            connection.cancel_safe(timeout=GRACE)

    def wait(gen: PQGen[T], *args: Any, **kwargs: Any) -> T:  # noqa: ANN401  (psycopg's, version by version)
        limited = _patiently(gen, seconds, ask_to_stop, connection.pgconn.finish)
        return type(connection).wait(connection, limited, *args, **kwargs)

    vars(connection)["wait"] = wait
    try:
        yield
    finally:
        del vars(connection)["wait"]


def answers(pgconn: PGconn, text: str) -> Generator[Any, Any, list[PGresult]]:
    """Send several statements in one message; returns the reply to each, up to the first that failed."""
    pgconn.send_query(text.encode("ascii"))
    results: list[PGresult] = yield from generators.execute(pgconn)
    return results


def cut(pgconn: PGconn) -> None:
    """Shut the socket down without closing it: its poller notices, and an event loop must not poll a closed file."""
    with suppress(OSError, psycopg.Error), socket.socket(fileno=os.dup(pgconn.socket)) as line:
        line.shutdown(socket.SHUT_RDWR)


def cancel_and_close_blocking(connection: psycopg.Connection[Any]) -> None:
    """Close a connection on which another thread's statement is running."""
    try:
        with suppress(psycopg.Error):
            connection.cancel_safe(timeout=GRACE)
    finally:
        cut(connection.pgconn)


async def cancel_and_close(connection: psycopg.AsyncConnection[Any]) -> bool:
    """Close a connection with a running statement; False: a task still waits for its reply."""
    try:
        with suppress(psycopg.Error):
            await connection.cancel_safe(timeout=GRACE)
    finally:
        cut(connection.pgconn)
    try:
        async with asyncio.timeout(GRACE), connection.lock:
            return True
    except TimeoutError:
        return False


def connect(address: str, threshold: int | None, unconfirmed: UnconfirmedCommits) -> StoreConnection:
    """Open a connection for blocking code."""
    connection = StoreConnection.connect(address, autocommit=True, prepare_threshold=threshold)
    return _ready(connection, threshold, unconfirmed)


async def aconnect(address: str, threshold: int | None, unconfirmed: UnconfirmedCommits) -> AsyncStoreConnection:
    """Open a connection for asyncio."""
    connection = await AsyncStoreConnection.connect(address, autocommit=True, prepare_threshold=threshold)
    return _ready(connection, threshold, unconfirmed)


def threshold(address: PostgresAddress, asked_for: int | None) -> int | None:
    """The number of executions after which a statement is prepared; None (never) if that may be unsafe."""
    match address.pooler:
        case True if not address.prepares:
            return None
        case True | False:
            return PREPARE_AFTER if asked_for is None else asked_for
        case None:
            return asked_for


def bounded(dsn: str, timeout: float) -> str:
    """The address with time limits for the network, unless it has its own."""
    try:
        given = conninfo_to_dict(dsn)
    except psycopg.ProgrammingError as error:
        # libpq's error repeats the text that it could not parse, which may be a part of the password. The name of an
        # option is not, unless an @ follows it: then the password itself contains a question mark.
        found = None if "@" in dsn.partition("?")[2] else _FOREIGN_OPTION.match(str(error))
        what = f"has the option {found[1]}, which libpq does not support" if found else "cannot be read by libpq"
        raise ConfigurationError(f"the address of PostgreSQL {what}") from None
    ours = {"connect_timeout": max(2, math.ceil(timeout)), **_KEEPALIVE}
    return make_conninfo(dsn, **{name: value for name, value in ours.items() if name not in given})


def _ready(connection: C, threshold: int | None, unconfirmed: UnconfirmedCommits) -> C:
    def take_notice(notice: Diagnostic) -> None:
        if stopped_waiting(notice):
            connection.unsure = True
            unconfirmed.add()  # the standby may not have this commit (unconfirmed.py)
        elif notice.sqlstate == NOTICE and connection.notice is None:
            connection.notice = notice.message_primary

    connection.add_notice_handler(take_notice)
    connection.unconfirmed = unconfirmed
    connection.born = time.monotonic()
    connection.threshold = threshold
    return connection


def _all_well(results: list[PGresult]) -> bool:
    return all(result.status in {ExecStatus.COMMAND_OK, ExecStatus.TUPLES_OK} for result in results)


def _patiently(
    gen: PQGen[T], limit: float, ask_to_stop: Callable[[], None], hang_up: Callable[[], None]
) -> Generator[Any, Any, T]:
    """Run psycopg's wait until the time is up; then ask the server to cancel, and then close the connection.

    psycopg resumes its wait several times a second even when nothing happens, so the time is checked then.
    If the server replies that it cancelled, nothing happened; after closing the connection the outcome is unknown.
    """
    deadline, asked = time.monotonic() + limit, False
    try:
        wanted = next(gen)
        while True:
            wanted = gen.send((yield wanted))
            if time.monotonic() < deadline:
                continue
            if asked:
                hang_up()
                raise psycopg.OperationalError("the server did not reply in time")
            ask_to_stop()
            deadline, asked = time.monotonic() + GRACE, True
    except StopIteration as stop:
        answer: T = stop.value
        return answer


class IdleConnections(IdleStack[C]):
    """The idle connections of a pool, for threads and for asyncio."""

    def pop(self) -> C | None:
        """An idle connection that the server has not closed, if there is one."""
        with self._lock:
            self._forget_parents()
            while self._idle:
                connection = self._idle.pop(self._nearest())
                if not connection.closed and (connection.cleaning or is_quiet(connection)):
                    return connection
                connection.pgconn.finish()
        return None

    def put(self, connection: C, *, used: bool = False, undo: bool = False) -> None:
        """Return a connection to the pool; one with unfinished work is closed, one that a handler used is reset.

        `undo`: its transaction is rolled back, and no handler has used it.
        """
        with self._lock:
            if connection.suspect:
                # If one server does not respond or rejects writes, the other idle connections are probably no better.
                self._empty()
            if connection.lock.locked():
                # Another thread or task still waits on it. If it were closed now, the event loop might poll another
                # file with the same number. Its socket was shut down, so it ends with its last user.
                connection._pool = None  # as in `lent`  # noqa: SLF001
                return
            if self._closed or not _is_clean(connection, TransactionStatus.INTRANS if undo else TransactionStatus.IDLE):
                connection.pgconn.finish()
            else:
                taken_back(connection)
                if clean_up(connection, "ROLLBACK") if undo else not used or clean_up(connection):
                    self._idle.append(connection)

    def close(self) -> None:
        """Close the idle connections now, and the others when they are returned."""
        with self._lock:
            self._closed = True
            self._forget_parents()
            self._empty()

    def _nearest(self) -> int:
        """The position of the last returned connection that is ready, if there is one."""
        last = len(self._idle) - 1
        ready = (at for at in range(last, -1, -1) if not (one := self._idle[at]).cleaning or not is_quiet(one))
        return next(ready, last)

    def _empty(self) -> None:
        while self._idle:
            connection = self._idle.pop()  # in a variable: psycopg warns about one that is dropped before it is closed
            connection.pgconn.finish()


def is_quiet(connection: StoreConnection | AsyncStoreConnection) -> bool:
    """Whether no data has arrived: an idle server sends data only to close the connection."""
    if connection.closed:
        return False
    fileno = connection.fileno()
    if hasattr(select, "poll"):
        poll = select.poll()
        poll.register(fileno, select.POLLIN)
        return not poll.poll(0)
    return not select.select([fileno], [], [], 0)[0]


def _is_clean(connection: StoreConnection | AsyncStoreConnection, status: TransactionStatus) -> bool:
    return (
        not connection.closed
        and not connection.suspect
        and connection.pgconn.transaction_status == status
        and connection.pgconn.pipeline_status == PipelineStatus.OFF
        and time.monotonic() - connection.born < MAX_AGE
    )


class PsycopgProxy(HandlerProxy):
    """A handler's view of psycopg's objects, which refuses to end the transaction (L5)."""

    __slots__ = ()

    def __setattr__(self, name: str, value: object) -> None:
        if name in _SETTINGS:
            raise refusal(f"setting {name}")
        super().__setattr__(name, value)

    def _check(self, query: Any) -> None:  # noqa: ANN401  (text, bytes, or whatever composes a statement)
        self._use.check()
        if refuse_transaction_control(_text(query, self._raw)):
            self._use.sets = True


class PsycopgConnectionProxy(PsycopgProxy):
    """The refusals of a connection; they are raised when it is called, before anything is awaited."""

    __slots__ = ()

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401  (whatever psycopg has there)
        return partial(self._refuse, f"{name}()") if name in _REFUSED else super().__getattr__(name)

    def _refuse(self, what: str, *_: object) -> NoReturn:
        raise refusal(what)


def _text(query: Any, context: Any) -> str:  # noqa: ANN401  (text, bytes, or whatever composes a statement)
    if isinstance(query, str):
        return query
    if isinstance(query, bytes):
        return query.decode("utf-8", "replace")
    if isinstance(query, sql.Composable):
        return query.as_string(context)
    return sql.as_string(query, context)  # a template string
