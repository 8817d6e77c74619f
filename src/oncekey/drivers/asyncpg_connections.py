"""asyncpg's connections as the store wants them, and what their errors mean."""

from __future__ import annotations

import asyncio
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

if TYPE_CHECKING:
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
    """A connection that remembers how its last command was answered, and what a commit was warned of."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:  # noqa: ANN401  (asyncpg's, version by version)
        super().__init__(*args, **kwargs)
        self.tag = ""
        self.unsure = False
        self.suspect = False
        self.stand_in: Any = None
        self._settings = ""

    def get_reset_query(self) -> str:
        """Nothing to reset: nothing of ours outlives its transaction, and handlers' connections come back clean."""
        return ""

    async def execute(self, query: str, *args: Any, timeout: float | None = None) -> str:  # noqa: ANN401, ASYNC109  (asyncpg's)
        """Execute, and remember the answer: a COMMIT may be answered with ROLLBACK (F20)."""
        query, self._settings = query + self._settings, ""
        tag: str = await super().execute(query, *args, timeout=timeout)
        self.tag = tag
        return tag

    async def open(self, settings: str) -> asyncpg.transaction.Transaction:
        """Begin a transaction that asyncpg knows of; its settings go along in the same message."""
        transaction = self.transaction(isolation="read_committed")
        self._settings = settings
        await transaction.start()
        return transaction

    def forsake(self, ours: asyncpg.transaction.Transaction) -> None:
        """Refuse the statements, cursors and transactions that were made so far, but our own, as a release does."""
        self._pool_release_ctr += 1
        ours._con_release_ctr = self._pool_release_ctr  # noqa: SLF001  (asyncpg has no other way to tell them apart)

    def itself(self) -> StoreConnection:
        """This very connection: what a pool lends is a stand-in that forgets everything when it is lost."""
        return self

    def attend(self) -> None:
        """Listen for the warning of a commit that is not safe yet."""
        self.unsure = False
        self.add_log_listener(self._hear)

    def disregard(self) -> None:
        """Listen no more: asyncpg takes a listener that is left behind for a mistake."""
        self.remove_log_listener(self._hear)

    def _hear(self, _: object, said: asyncpg.PostgresLogMessage) -> None:
        if said.sqlstate == SYNC_WAIT_CANCELLED:
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
    if _was_never_sent(error, connection):
        connection.suspect = True
        connection.terminate()
        return LostError(f"{what}: the connection was lost before")
    return lost(mode, what) if _was_lost(error, connection) else _refused(error, what)


def commit_error(error: Exception, connection: asyncpg.Connection, what: str) -> OncekeyError:
    """The store's error for a COMMIT: what the server itself says is definite, silence is not (F20)."""
    if is_busy(error):
        return TransactionControlError(LEFT_BEHIND)
    if _was_lost(error, connection):
        return lost_commit(what)
    return refused_commit(_sqlstate(error) or None, what, type(error).__name__)


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


def _was_never_sent(error: Exception, connection: asyncpg.Connection) -> bool:
    """Whether asyncpg refused to speak, because the server had said goodbye before we said anything."""
    if isinstance(error, asyncpg.InterfaceError):
        return bool(connection.is_closed()) and not isinstance(error, asyncpg.DataError)
    return isinstance(error, asyncpg.InternalClientError) and str(error).startswith(_MID_GOODBYE)


def _was_lost(error: Exception, connection: asyncpg.Connection) -> bool:
    if isinstance(error, OSError):
        return True
    ended = is_the_end(_sqlstate(error) or None, getattr(error, "severity_en", None))
    return ended or bool(connection.is_closed())


def _refused(error: Exception, what: str) -> StoreError:
    return refused(_sqlstate(error) or None, what, type(error).__name__)


def _sqlstate(error: Exception) -> str:
    return str(getattr(error, "sqlstate", None) or "")
