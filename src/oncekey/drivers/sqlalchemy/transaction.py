"""A business transaction on a SQLAlchemy engine: a handler writes through it, and oncekey ends it."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Final, TypeAlias, TypeVar

from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncSession

from oncekey.core.errors import ConfigurationError, OncekeyError, TransactionControlError
from oncekey.drivers.guard import ENDED_EARLY, LEFT_BEHIND, OVER
from oncekey.drivers.sqlalchemy.connections import committed, execute, forsaken
from oncekey.drivers.sqlalchemy.errors import FAILURES, failed, is_aborted
from oncekey.drivers.sqlalchemy.execute import OWN
from oncekey.drivers.sqlalchemy.guard import GuardedConnection, Watch, commits_by_itself, was_ended_below
from oncekey.flow import Mode, astep

if TYPE_CHECKING:
    from sqlalchemy.engine import RootTransaction

    from oncekey.drivers.postgres.doubt import Doubt
    from oncekey.flow import Steps

T = TypeVar("T")

End: TypeAlias = Callable[[GuardedConnection, AsyncSession | None], "asyncio.Task[None]"]
"""Rolls back what is not committed and returns the connection, in a task that is never cancelled."""

BUSINESS: Final = "the business transaction"

ENDED: Final = (
    "the handler's transaction was rolled back before its end, by session.rollback() or by a flush that failed: its "
    "rows are gone, so a success cannot be stored. Raise instead, or put what may fail into "
    "`session.begin_nested()`"
)
BROKEN: Final = (
    "a statement of the handler failed and the handler went on, but the database refuses the rest of the transaction: "
    "its rows are gone, so a success cannot be stored. Raise instead, or put what may fail into "
    "`session.begin_nested()`"
)
AUTOCOMMITS: Final = (
    "the engine commits every statement by itself, so a handler's rows could not be undone: create it without "
    'isolation_level="AUTOCOMMIT"'
)

PROBE: Final = text("SELECT 1").execution_options(**{OWN: True})
PATIENCE: Final = 5.0
"""Seconds that a statement which a handler left running may take, before the transaction is rolled back."""

_log = logging.getLogger("oncekey")


class SqlalchemyTransaction:
    """A business transaction that a handler writes through, as a connection or as a session, and that oncekey ends."""

    __slots__ = ("_connection", "_doubt", "_end", "_ending", "_root", "_session", "_watch")

    def __init__(self, connection: GuardedConnection, watch: Watch, end: End, doubt: Doubt) -> None:
        self._connection = connection
        self._doubt = doubt
        self._watch = watch
        self._end = end
        self._root: RootTransaction | None = None
        self._session: AsyncSession | None = None
        self._ending: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Begin. Listeners of the application may execute statements at once, to set a tenant for example."""
        if commits_by_itself(self._connection.sync_connection):
            raise ConfigurationError(AUTOCOMMITS)
        try:
            await AsyncConnection.begin(self._connection)
        except FAILURES as error:
            raise failed(error, Mode.ATOMIC, BUSINESS) from error
        self._root = self._current()
        self._watch.guards = True

    @property
    def connection(self) -> GuardedConnection:
        """The connection for the handler."""
        return self._connection

    @property
    def session(self) -> AsyncSession:
        """The session that writes through it: its `commit()` only flushes."""
        if self._session is None:
            self._session = AsyncSession(
                bind=self._connection, join_transaction_mode="rollback_only", expire_on_commit=False
            )
        return self._session

    def adopt(self, session: AsyncSession) -> None:
        """Write through a session that existed before the transaction; it is closed with it."""
        self._session = session

    async def flush(self) -> None:
        """Write the session's pending changes; the handler gets the database's errors."""
        if self._session is not None and self._goes_on():
            await self._session.flush()

    async def step(self, steps: Steps[T]) -> T:
        """Run statements inside it."""
        self._refuse_if_ended()
        if self._watch.said and was_ended_below(self._connection.sync_connection):
            # The handler has committed its rows already, so the record has to follow them (L5).
            _log.error(ENDED_EARLY)
        try:
            result = await astep(steps, partial(execute, self._connection))
        except FAILURES as error:
            await forsaken(self._connection, error)
            raise meaning(error) from error
        self._watch.forget()
        return result

    async def commit(self) -> None:
        """Commit, and return the connection; a transaction that can only be rolled back is refused (F20)."""
        self._refuse_if_ended()
        try:
            await self._refuse_late_users()
            if self._watch.doubtful:
                await self._probe()
            self._watch.guards = False
            await committed(self._connection, self._doubt, BUSINESS)
        except BaseException:
            await self.rollback()
            raise
        session, self._session = self._session, None
        if session is not None:
            # Now, and not with the connection: a phased handler goes on with it, and what it adds must not be lost.
            with suppress(*FAILURES):
                await session.close()
        self._ended()  # the caller need not wait until the connection is reset and returned

    async def rollback(self) -> None:
        """Roll back and return the connection; has no effect on a transaction that has ended."""
        await asyncio.shield(self._ended())

    def _ended(self) -> asyncio.Task[None]:
        if self._ending is None:
            self._watch.over = True
            self._watch.guards = False
            self._ending = self._end(self._connection, self._session)
        return self._ending

    async def _refuse_late_users(self) -> None:
        """Refuse further statements, and wait for those that a handler left running: they belong to the transaction."""
        self._watch.over = True
        if not await self._watch.quiet(PATIENCE):
            raise TransactionControlError(LEFT_BEHIND)

    async def _probe(self) -> None:
        try:
            await self._connection.execute(PROBE)
        except FAILURES as error:
            raise meaning(error) from error

    def _refuse_if_ended(self) -> None:
        if self._ending is not None:
            raise TransactionControlError(OVER)
        if not self._goes_on():
            raise TransactionControlError(ENDED)

    def _goes_on(self) -> bool:
        """Whether it is still the transaction that we began, and not one that came after it."""
        root = self._root
        return root is not None and root.is_active and self._current() is root

    def _current(self) -> RootTransaction | None:
        sync = self._connection.sync_connection
        return None if sync is None else sync.get_transaction()


def meaning(error: BaseException) -> OncekeyError:
    """The meaning of an error under a statement in a business transaction."""
    return TransactionControlError(BROKEN) if is_aborted(error) else failed(error, Mode.ATOMIC, BUSINESS)
