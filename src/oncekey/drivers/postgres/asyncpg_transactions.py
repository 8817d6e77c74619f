"""Business transactions on asyncpg: a handler writes through them, and oncekey ends them (L4, L5)."""

from __future__ import annotations

import logging
from functools import partial
from typing import TYPE_CHECKING, Any, Final, TypeVar

from oncekey.core.errors import TransactionControlError
from oncekey.drivers.guard import OVER, Lending
from oncekey.drivers.postgres.asyncpg_connections import BEGIN, FAILURES, cause, statement_error
from oncekey.drivers.postgres.asyncpg_execute import commit, commit_with, execute, undo
from oncekey.drivers.postgres.asyncpg_guard import GuardedConnection
from oncekey.drivers.postgres.folding import FOUND, row_told
from oncekey.flow import Mode, astep

if TYPE_CHECKING:
    from oncekey.drivers.postgres.asyncpg_connections import StoreConnection
    from oncekey.drivers.postgres.asyncpg_pool import AsyncpgPool
    from oncekey.flow import Rows, Statement, Steps

T = TypeVar("T")

WHAT: Final = "the business transaction"
ENDED_EARLY: Final = "a handler ended its own transaction; the key's record is stored in another one"
NOTHING_LEFT: Final = "a handler ended its own transaction; there was nothing left to commit"

_log = logging.getLogger("oncekey")


class AsyncpgTransaction:
    """A business transaction that a handler writes through."""

    __slots__ = (
        "_cleans",
        "_committed",
        "_guarded",
        "_lending",
        "_limit",
        "_over",
        "_pool",
        "_raw",
        "_transaction",
    )

    def __init__(
        self,
        pool: AsyncpgPool,
        connection: StoreConnection,
        transaction: Any,  # noqa: ANN401  (asyncpg's)
        limit: float,
        *,
        cleans: bool,
    ) -> None:
        self._pool = pool
        self._raw = connection
        self._transaction = transaction
        self._limit = limit
        self._cleans = cleans
        self._over = self._committed = False
        self._lending = Lending()
        self._guarded = GuardedConnection(connection, self._lending)

    @property
    def connection(self) -> GuardedConnection:
        """The connection for the handler."""
        return self._guarded

    @property
    def told(self) -> Rows | None:
        """The row of a first statement that was sent with BEGIN. None: it has to be executed by itself."""
        raw = self._raw
        if raw.told is None:
            return () if raw.tag == FOUND else None
        return [row_told(raw.told)]

    async def say(self, statement: Statement) -> Rows:
        """Execute a statement of oncekey's own, before the handler has the connection."""
        return await execute(self._raw, self._limit, Mode.ATOMIC, statement)

    async def step(self, steps: Steps[T]) -> T:
        """Run statements inside it."""
        if self._over:
            raise TransactionControlError(OVER)
        if self._was_ended:
            # The handler has committed its rows already, so the record has to follow them.
            _log.error(ENDED_EARLY)
            await self._begin_again()
        return await astep(steps, partial(execute, self._raw, self._limit, Mode.ATOMIC))

    async def commit(self) -> None:
        """Commit, and return the connection."""
        if self._over:
            return
        try:
            if self._was_ended:
                _log.error(NOTHING_LEFT)
            else:
                self._committed = True
                self._take_back()
                await commit(self._raw, self._transaction, self._limit, WHAT)
        except TransactionControlError:
            self._committed = False  # nothing was sent
            raise
        finally:
            await self.rollback()

    async def commit_with(self, last: Statement) -> Rows | None:
        """Commit with a last statement in the same message, and return the connection. None: its place was taken."""
        if self._over:
            raise TransactionControlError(OVER)
        try:
            if self._was_ended:
                _log.error(ENDED_EARLY)
                await self._begin_again()
            self._committed = True
            self._take_back()
            cleans = self._lending.used and self._cleans
            rows = await commit_with(self._raw, last, self._limit, WHAT, cleans=cleans)
            self._cleans = self._cleans and rows is None  # otherwise the commit's message cleaned up
            self._over = rows is not None and self._pool.given_at_once(self._raw)
        except TransactionControlError:
            self._committed = False  # nothing was sent
            raise
        finally:
            if not self._over:
                await self.rollback()
        return rows

    async def rollback(self) -> None:
        """Roll back and return the connection; has no effect on a transaction that has ended."""
        if self._over:
            return
        self._over = True
        if not self._lending.over:
            self._take_back()
        try:
            if not self._committed:
                await undo(self._raw, self._transaction, self._limit)
        finally:
            await self._pool.give(self._raw, used=self._lending.used and self._cleans)

    def _take_back(self) -> None:
        """Refuse every further use by the handler, also of what it prepared."""
        self._lending.over = True
        self._raw.forsake(self._transaction)

    @property
    def _was_ended(self) -> bool:
        """Whether the handler ended the transaction (F16)."""
        return not self._raw.is_closed() and not self._raw.is_in_transaction()

    async def _begin_again(self) -> None:
        try:
            # asyncpg still believes in its own transaction, and will commit this one instead.
            await self._raw.execute(BEGIN, timeout=self._limit)
        except FAILURES as error:
            raise statement_error(error, self._raw, Mode.ATOMIC, WHAT) from cause(error)
