"""asyncpg's connections with the time limits that the store needs, and the meaning of their errors.

Only this module uses private parts of asyncpg. `tests/drivers/postgres/test_asyncpg_private.py` lists them, and runs
with the lowest and the newest version.
"""

from __future__ import annotations

import asyncio
import time
from math import inf
from typing import TYPE_CHECKING, Any, Final

import asyncpg
from asyncpg.transaction import Transaction, TransactionState

from oncekey.core.errors import OncekeyError, StoreError, TransactionControlError
from oncekey.core.flow import Mode
from oncekey.databases.handler_sql import LEFT_BEHIND, RESET
from oncekey.databases.postgres import server
from oncekey.databases.postgres.address import GREETED
from oncekey.databases.postgres.unconfirmed import UnconfirmedCommits
from oncekey.databases.retries import LostError, lost, lost_commit

if TYPE_CHECKING:
    from collections.abc import Mapping

FAILURES: Final = (
    asyncpg.PostgresError,
    asyncpg.InterfaceError,
    asyncpg.InternalClientError,
    OSError,
    ValueError,
    OverflowError,
)
"""The errors of executing a statement. A timeout is an `OSError`, and so are network errors."""

GRACE: Final = 1.0
"""Seconds in which the server must end a cancelled statement before the connection counts as dead."""

_VALUES: Final = ("22", "23")
_BUSY: Final = "another operation is in progress"
_MID_GOODBYE: Final = "cannot switch to state"


class Watch:
    """Cancels tasks that wait too long for a server, as `asyncio.timeout` does, with one timer for all of them.

    asyncpg creates and closes a timer for each message, which takes longer than writing the message.
    """

    __slots__ = ("_timer", "looks_at", "waits")

    def __init__(self) -> None:
        self.waits: set[Wait] = set()
        self.looks_at = inf
        """The time of the next check."""
        self._timer: asyncio.TimerHandle | None = None

    def look_at(self, loop: asyncio.AbstractEventLoop, when: float) -> None:
        """Check at that time at the latest."""
        if self._timer is not None:
            self._timer.cancel()
        self._timer, self.looks_at = loop.call_at(when, self._look, loop), when

    def _look(self, loop: asyncio.AbstractEventLoop) -> None:
        self._timer, self.looks_at, now = None, inf, loop.time()
        for wait in self.waits:
            if wait.deadline <= now and not wait.expired:
                wait.expired = True
                wait.task.cancel()
        coming = [wait.deadline for wait in self.waits if not wait.expired]
        if coming:
            self.look_at(loop, min(coming))


class Wait:
    """The running task's wait for a reply, until a deadline. The waiting code removes it from the watch."""

    __slots__ = ("_cancelling", "deadline", "expired", "task")

    def __init__(self, watch: Watch, seconds: float) -> None:
        loop = asyncio.get_running_loop()
        task = asyncio.current_task(loop)
        assert task is not None
        self.task = task
        self.deadline = loop.time() + seconds
        self.expired = False
        self._cancelling = task.cancelling()
        watch.waits.add(self)
        if self.deadline < watch.looks_at:
            watch.look_at(loop, self.deadline)

    def explains(self) -> bool:
        """Whether the task was cancelled because of this deadline, and not by other code."""
        return self.expired and self.task.uncancel() <= self._cancelling


class StoreConnection(asyncpg.Connection):  # type: ignore[misc]  # asyncpg brings no types
    """A connection that keeps the command tag of its last reply, and the server's notices.

    Both are available before the task that awaits the reply continues. Notices of oncekey's own procedures are taken
    when they are parsed; for all others there is a listener, which asyncpg schedules before it schedules the task.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:  # noqa: ANN401  (asyncpg's, version by version)
        super().__init__(*args, **kwargs)
        self.tag = ""
        self.unsure = False
        self.notice: str | None = None
        self.watch = Watch()
        """The watch over its messages; all connections of a pool share one."""
        self.suspect = False
        self.handled = False
        """Whether a handler used the open transaction."""
        self.unconfirmed = UnconfirmedCommits()
        self.generation: int | None = 0
        self.born = self.rested = time.monotonic()
        self.add_log_listener(self._take_notice)

    async def execute(self, query: str, *args: Any, timeout: float | None = None) -> str:  # noqa: ANN401, ASYNC109  (asyncpg's)
        """Execute, and keep the command tag: the reply to a COMMIT may be ROLLBACK (F20)."""
        tag: str = await super().execute(query, *args, timeout=timeout)
        self.tag = tag
        return tag

    async def open(self, then: str, limit: float) -> Transaction:
        """Begin a transaction and register it with asyncpg; the text `then` is sent in the same message.

        `Transaction.start` does the same, but sends its BEGIN alone.
        """
        transaction = Transaction(self, "read_committed", False, False)  # noqa: FBT003  (neither read-only nor deferrable)
        self.unsure, self.notice, self._top_xact = False, None, transaction
        wait = Wait(self.watch, limit)
        try:
            self.tag = await super().execute(f"{server.BEGIN};{then}")
        except asyncio.CancelledError:
            if wait.explains():
                raise TimeoutError from None
            raise
        finally:
            self.watch.waits.discard(wait)
        transaction._state = TransactionState.STARTED  # noqa: SLF001
        return transaction

    async def finish(self, text: str, limit: float) -> None:
        """Send the last statements of a transaction in one message, including its COMMIT."""
        self.unsure, self.notice = False, None
        wait = Wait(self.watch, limit)
        try:
            self.tag = await super().execute(text)
        except asyncio.CancelledError:
            self.unconfirmed.add()  # the server is asked to cancel, and then it stops waiting for its standby
            if wait.explains():
                raise TimeoutError from None
            raise
        finally:
            self.watch.waits.discard(wait)
        self._top_xact = None

    def forget_notices(self) -> None:
        """Forget the notices of earlier replies."""
        self.unsure, self.notice = False, None

    def invalidate_handles(self, ours: Transaction) -> None:
        """Invalidate all existing statements, cursors and transactions except our own, as a pool does."""
        self._pool_release_ctr += 1
        ours._con_release_ctr = self._pool_release_ctr  # noqa: SLF001  (asyncpg has no other way to tell them apart)

    @property
    def is_at_rest(self) -> bool:
        """Whether the next borrower may use it as it is."""
        protocol = self._protocol
        return not (protocol.is_in_transaction() or protocol._is_cancelling() or self._top_xact)  # noqa: SLF001

    async def settled(self) -> None:
        """Wait for a statement that is being cancelled, and roll back an open transaction; if that fails, close."""
        try:
            async with asyncio.timeout(GRACE):
                if self._protocol._is_cancelling():  # noqa: SLF001
                    await self.execute("SELECT")
                self._top_xact = None
                if self.is_in_transaction():
                    await self.execute("ROLLBACK")
        except BaseException:
            self.terminate()
            raise

    def rest(self, now: float) -> None:
        """Return to the pool. Listeners that a handler left are removed, with the warning that asyncpg's pool gives."""
        self.rested, self.handled = now, False
        if self._listeners or len(self._log_listeners) > 1:
            self.remove_log_listener(self._take_notice)
            self._on_release()
            self._listeners.clear()
            self._log_listeners.clear()
            self.add_log_listener(self._take_notice)

    def _process_log_message(self, fields: Mapping[str, str], last_query: object) -> None:
        """Take our own notices here, where asyncpg would create an object and schedule its listeners.

        If a later version of asyncpg calls another method, our listener still receives them.
        """
        if fields.get("C") == server.NOTICE and len(self._log_listeners) == 1:
            if self.notice is None:
                self.notice = fields["M"]
        else:
            super()._process_log_message(fields, last_query)

    def _take_notice(self, _: object, notice: asyncpg.PostgresLogMessage) -> None:
        if notice.sqlstate == server.NOTICE:
            if self.notice is None:
                self.notice = notice.message
        elif server.stopped_waiting(notice):
            self.unsure = True
            self.unconfirmed.add()  # the standby may not have this commit (unconfirmed.py)


async def is_pooled(connection: asyncpg.Connection) -> bool:
    """Whether there is a pooler in front of the server: it greets a client with its own process number."""
    tag: str = await connection.execute(GREETED.format(pid=connection.get_server_pid()))
    return tag != server.FOUND


async def cleaned(connection: asyncpg.Connection) -> None:
    """Reset the state that a handler may have left in a session; if that fails, close the connection."""
    try:
        async with asyncio.timeout(GRACE):
            await connection.execute(RESET)
    except BaseException:
        connection.terminate()
        raise


async def cancel_and_close(connection: asyncpg.Connection) -> None:
    """Close a connection with a running statement, and ask the server to cancel it.

    Otherwise the statement would hold its locks, including the key's, for as long as it runs.
    """
    try:
        async with asyncio.timeout(GRACE):
            # asyncpg does this when the task of a statement is cancelled, but that task is not ours to cancel.
            await connection._cancel(asyncio.get_running_loop().create_future())  # noqa: SLF001
    except FAILURES:
        pass  # then the server has to notice it
    finally:
        connection.terminate()


def statement_error(error: Exception, connection: Any, mode: Mode, what: str) -> OncekeyError:  # noqa: ANN401
    """The store's error for a statement."""
    if is_busy(error):
        return TransactionControlError(LEFT_BEHIND)
    if was_never_sent(error, connection):
        _suspect(connection)
        connection.terminate()
        return LostError(f"{what}: the connection was lost before")
    if was_lost(error, connection):
        if mode is Mode.SINGLE:
            connection.unconfirmed.add()  # the standby may not have this commit (unconfirmed.py)
        return lost(mode, what)
    doing = server.handlers_doing(_sqlstate(error), what) if getattr(connection, "handled", False) else None
    if doing is not None:
        return doing
    if _sqlstate(error) == server.READS_ONLY:
        _suspect(connection)
    return _refused(error, what)


def commit_error(error: Exception, connection: StoreConnection, what: str) -> OncekeyError:
    """The store's error for a COMMIT: an error from the server is definite, a missing reply is not (F20)."""
    if is_busy(error):
        return TransactionControlError(LEFT_BEHIND)
    if was_lost(error, connection):
        connection.unconfirmed.add()  # the standby may not have this commit (unconfirmed.py)
        return lost_commit(what)
    return server.refused_commit(_sqlstate(error) or None, what, type(error).__name__)


def is_taken(error: Exception) -> bool:
    """Whether the record already exists, or the step's record has another owner."""
    place = (getattr(error, "schema_name", None), getattr(error, "table_name", None))
    return _sqlstate(error) == server.NOT_OURS or (_sqlstate(error) == server.TAKEN and place == server.RECORD)


def check_commit(connection: StoreConnection, what: str) -> None:
    """Raise unless the reply to a COMMIT is COMMIT, without a warning that it is not on the standby yet."""
    if connection.tag != "COMMIT":
        raise server.not_committed(connection.tag, what)
    if connection.unsure:
        raise server.unsure_commit(what)


def cause(error: Exception) -> Exception | None:
    """The original error if it is safe to chain: not one that repeats a value or a whole row."""
    declared = isinstance(error, ValueError | OverflowError) or _sqlstate(error).startswith(_VALUES)
    return None if declared else error


def is_busy(error: Exception) -> bool:
    """Whether asyncpg refused to send, because another statement is running on the same connection."""
    return isinstance(error, asyncpg.InterfaceError) and _BUSY in str(error)


def was_never_sent(error: Exception, connection: asyncpg.Connection) -> bool:
    """Whether asyncpg refused to send, because the server had closed the connection before."""
    if isinstance(error, asyncpg.InterfaceError):
        return bool(connection.is_closed()) and not isinstance(error, asyncpg.DataError)
    return isinstance(error, asyncpg.InternalClientError) and str(error).startswith(_MID_GOODBYE)


def was_lost(error: Exception, connection: asyncpg.Connection) -> bool:
    """Whether the connection is lost, so that the outcome of the last message is unknown."""
    if isinstance(error, OSError):
        return True
    ended = server.is_the_end(_sqlstate(error) or None, getattr(error, "severity_en", None))
    return ended or bool(connection.is_closed())


def _suspect(connection: Any) -> None:  # noqa: ANN401  (ours, or the caller's, which is in no pool of ours)
    if hasattr(connection, "suspect"):  # asyncpg calls every connection an instance of every kind
        connection.suspect = True


def _refused(error: Exception, what: str) -> StoreError:
    return server.refused(_sqlstate(error) or None, what, type(error).__name__)


def _sqlstate(error: Exception) -> str:
    return str(getattr(error, "sqlstate", None) or "")
