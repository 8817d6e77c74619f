"""asyncpg's connections as the store wants them, and what their errors mean."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING, Any, Final

import asyncpg

from oncekey.core.errors import OncekeyError, StoreError, TransactionControlError
from oncekey.drivers.guard import LEFT_BEHIND, RESET
from oncekey.drivers.postgres_errors import (
    SYNC_WAIT_CANCELLED,
    LostError,
    is_the_end,
    lost,
    lost_commit,
    not_committed,
    refused,
    refused_commit,
    unsure_commit,
)
from oncekey.drivers.postgres_folding import NOT_OURS, RECORD, TAKEN, TOLD

if TYPE_CHECKING:
    from collections.abc import Mapping

    from oncekey.flow import Mode

FAILURES: Final = (
    asyncpg.PostgresError,
    asyncpg.InterfaceError,
    asyncpg.InternalClientError,
    OSError,
    ValueError,
    OverflowError,
)
"""What executing can raise. A time-out is an `OSError`, and so is whatever the network does."""

GRACE: Final = 1.0
"""Seconds that the server has to take notice of a cancelled statement before it is given up for dead."""

_VALUES: Final = ("22", "23")
_BUSY: Final = "another operation is in progress"
_MID_GOODBYE: Final = "cannot switch to state"


class StoreConnection(asyncpg.Connection):  # type: ignore[misc]  # asyncpg brings no types
    """A connection that remembers how its last command was answered, and what the server said beside it.

    Both are heard before the task that awaits the answer goes on. What our own procedures tell is taken as soon as it
    is parsed; of all else a listener is told, whom asyncpg schedules before it schedules the task.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:  # noqa: ANN401  (asyncpg's, version by version)
        super().__init__(*args, **kwargs)
        self.tag = ""
        self.unsure = False
        self.told: str | None = None
        self.suspect = False
        self.generation = 0
        self.born = self.rested = time.monotonic()
        self._then: tuple[str, float | None] | None = None
        self.add_log_listener(self._hear)

    async def execute(self, query: str, *args: Any, timeout: float | None = None) -> str:  # noqa: ANN401, ASYNC109  (asyncpg's)
        """Execute, and remember the answer: a COMMIT may be answered with ROLLBACK (F20)."""
        if self._then is not None:
            (then, timeout), self._then = self._then, None
            query += then
        tag: str = await super().execute(query, *args, timeout=timeout)
        self.tag = tag
        return tag

    async def open(self, then: str, limit: float | None) -> asyncpg.transaction.Transaction:
        """Begin a transaction that asyncpg knows of; what is said next goes along in the same message."""
        transaction = self.transaction(isolation="read_committed")
        self.unsure, self.told = False, None
        self._then = (then, limit)
        try:
            await transaction.start()
        finally:
            self._then = None
        return transaction

    async def finish(self, text: str, limit: float | None) -> None:
        """Say the last of a transaction in one message, its COMMIT included."""
        self.unsure, self.told = False, None
        self.tag = await super().execute(text, timeout=limit)
        self._top_xact = None

    def attend(self) -> None:
        """Forget what was heard beside earlier answers."""
        self.unsure, self.told = False, None

    def forsake(self, ours: asyncpg.transaction.Transaction) -> None:
        """Refuse the statements, cursors and transactions that were made so far, but our own, as a pool does."""
        self._pool_release_ctr += 1
        ours._con_release_ctr = self._pool_release_ctr  # noqa: SLF001  (asyncpg has no other way to tell them apart)

    @property
    def is_at_rest(self) -> bool:
        """Whether it can be lent to the next one as it is."""
        protocol = self._protocol
        return not (protocol.is_in_transaction() or protocol._is_cancelling() or self._top_xact)  # noqa: SLF001

    async def settled(self) -> None:
        """Wait for a statement that is being cancelled, and roll back what is open; if that fails, it is closed."""
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
        """Back in the pool. What a handler left listening is taken out; asyncpg warns of it, as its own pool does."""
        self.rested = now
        if self._listeners or len(self._log_listeners) > 1:
            self.remove_log_listener(self._hear)
            self._on_release()
            self._listeners.clear()
            self._log_listeners.clear()
            self.add_log_listener(self._hear)

    def _process_log_message(self, fields: Mapping[str, str], last_query: object) -> None:
        """Where asyncpg makes an object of a notice and schedules its listeners, what is told us is heard at once.

        Should a later version call something else, our listener hears it all the same.
        """
        if fields.get("C") == TOLD and len(self._log_listeners) == 1:
            if self.told is None:
                self.told = fields["M"]
        else:
            super()._process_log_message(fields, last_query)

    def _hear(self, _: object, said: asyncpg.PostgresLogMessage) -> None:
        if said.sqlstate == TOLD:
            if self.told is None:
                self.told = said.message
        elif said.sqlstate == SYNC_WAIT_CANCELLED:
            self.unsure = True


async def cleaned(connection: asyncpg.Connection) -> None:
    """Take out of a session what a handler may have left there; if that fails, the connection is closed."""
    try:
        async with asyncio.timeout(GRACE):
            await connection.execute(RESET)
    except BaseException:
        connection.terminate()
        raise


async def severed(connection: asyncpg.Connection) -> None:
    """End a connection on which somebody's statement is under way, and ask the server to stop executing it.

    Left alone it would hold its locks, the key's among them, for as long as it takes.
    """
    try:
        async with asyncio.timeout(GRACE):
            # What asyncpg itself does when the task of a statement is cancelled. This task is not ours to cancel.
            await connection._cancel(asyncio.get_running_loop().create_future())  # noqa: SLF001
    except FAILURES:
        pass  # then the server will notice by itself
    finally:
        connection.terminate()


def statement_error(error: Exception, connection: Any, mode: Mode, what: str) -> OncekeyError:  # noqa: ANN401
    """The store's error for a statement."""
    if is_busy(error):
        return TransactionControlError(LEFT_BEHIND)
    if was_never_sent(error, connection):
        connection.suspect = True
        connection.terminate()
        return LostError(f"{what}: the connection was lost before")
    return lost(mode, what) if was_lost(error, connection) else _refused(error, what)


def commit_error(error: Exception, connection: asyncpg.Connection, what: str) -> OncekeyError:
    """The store's error for a COMMIT: what the server itself says is definite, silence is not (F20)."""
    if is_busy(error):
        return TransactionControlError(LEFT_BEHIND)
    if was_lost(error, connection):
        return lost_commit(what)
    return refused_commit(_sqlstate(error) or None, what, type(error).__name__)


def is_taken(error: Exception) -> bool:
    """Whether a record found its place taken, or a step its record."""
    place = (getattr(error, "schema_name", None), getattr(error, "table_name", None))
    return _sqlstate(error) == NOT_OURS or (_sqlstate(error) == TAKEN and place == RECORD)


def check_commit(connection: StoreConnection, what: str) -> None:
    """A COMMIT has to be answered with COMMIT, and without a warning that it is not safe yet."""
    if connection.tag != "COMMIT":
        raise not_committed(connection.tag, what)
    if connection.unsure:
        raise unsure_commit(what)


def cause(error: Exception) -> Exception | None:
    """What may be shown below our own error: not what repeats a value or a whole row."""
    told = isinstance(error, ValueError | OverflowError) or _sqlstate(error).startswith(_VALUES)
    return None if told else error


def is_busy(error: Exception) -> bool:
    """Whether asyncpg refused to speak, because somebody else's statement is under way on the same connection."""
    return isinstance(error, asyncpg.InterfaceError) and _BUSY in str(error)


def was_never_sent(error: Exception, connection: asyncpg.Connection) -> bool:
    """Whether asyncpg refused to speak, because the server had said goodbye before we said anything."""
    if isinstance(error, asyncpg.InterfaceError):
        return bool(connection.is_closed()) and not isinstance(error, asyncpg.DataError)
    return isinstance(error, asyncpg.InternalClientError) and str(error).startswith(_MID_GOODBYE)


def was_lost(error: Exception, connection: asyncpg.Connection) -> bool:
    """Whether the connection is of no more use, so that nobody heard what became of what was said."""
    if isinstance(error, OSError):
        return True
    ended = is_the_end(_sqlstate(error) or None, getattr(error, "severity_en", None))
    return ended or bool(connection.is_closed())


def _refused(error: Exception, what: str) -> StoreError:
    return refused(_sqlstate(error) or None, what, type(error).__name__)


def _sqlstate(error: Exception) -> str:
    return str(getattr(error, "sqlstate", None) or "")
