"""Business transactions on psycopg: a handler writes through them, and oncekey ends them (L4, L5)."""

from __future__ import annotations

import logging
from functools import partial
from typing import TYPE_CHECKING, TypeVar

from psycopg.pq import TransactionStatus

from oncekey.core.errors import TransactionControlError
from oncekey.drivers.guard import ENDED_EARLY, NOTHING_LEFT, OVER, Lending
from oncekey.drivers.postgres.psycopg_connections import lent
from oncekey.drivers.postgres.psycopg_execute import (
    abegin,
    acommit,
    acommit_with,
    aexecute,
    aundo,
    begin,
    commit,
    commit_with,
    execute,
    undo,
)
from oncekey.drivers.postgres.psycopg_guard import AsyncGuardedConnection, GuardedConnection
from oncekey.drivers.postgres.transactions import BEGIN, WHAT
from oncekey.flow import Mode, astep, step

if TYPE_CHECKING:
    from oncekey.drivers.postgres.psycopg_connections import AsyncStoreConnection, StoreConnection
    from oncekey.drivers.postgres.psycopg_pools import AsyncPool, Pool
    from oncekey.flow import Rows, Statement, Steps

T = TypeVar("T")

_log = logging.getLogger("oncekey")


class PsycopgTransaction:
    """A business transaction that a blocking handler writes through."""

    def __init__(self, pool: Pool, connection: StoreConnection, limit: float, *, cleans: bool) -> None:
        self._pool = pool
        self._cleans = cleans
        self._raw: StoreConnection | None = connection
        self._limit = limit
        self._lending = Lending()
        self._guarded = GuardedConnection(lent(connection, self._lending), self._lending)

    @property
    def connection(self) -> GuardedConnection:
        """The connection for the handler."""
        return self._guarded

    def say(self, statement: Statement) -> Rows:
        """Execute a statement of oncekey's own, before the handler has the connection."""
        return self.step(_only(statement))

    def step(self, steps: Steps[T]) -> T:
        """Run statements inside it."""
        connection = self._raw
        if connection is None:
            raise TransactionControlError(OVER)
        connection.limit = self._limit
        try:
            if was_ended(connection):
                # The handler has committed its rows already, so the record has to follow them.
                _log.error(ENDED_EARLY)
                begin(connection, BEGIN, WHAT)
            return step(steps, partial(execute, connection, Mode.ATOMIC))
        finally:
            connection.limit = None

    def commit(self) -> None:
        """Commit, and return the connection."""
        if self._raw is None:
            return
        try:
            if was_ended(self._raw):
                _log.error(NOTHING_LEFT)
            else:
                # A statement of the handler that waits for its turn behind this commit is refused when the turn comes.
                self._lending.over = True
                self._raw.limit = self._limit
                commit(self._raw, WHAT)
        finally:
            self.rollback()

    def commit_with(self, last: Statement) -> Rows | None:
        """Commit with a last statement in the same message, and return the connection. None: its place was taken."""
        connection = self._raw
        if connection is None:
            raise TransactionControlError(OVER)
        try:
            connection.limit = self._limit
            if was_ended(connection):
                _log.error(ENDED_EARLY)
                begin(connection, BEGIN, WHAT)
            self._lending.over = True
            cleans = self._lending.used and self._cleans
            rows = commit_with(connection, last, WHAT, cleans=cleans)
            self._cleans = self._cleans and rows is None  # otherwise the commit's message cleaned up
        finally:
            self.rollback()
        return rows

    def rollback(self) -> None:
        """Roll back and return the connection; has no effect on a transaction that has ended."""
        connection, self._raw = self._raw, None
        if connection is None:
            return
        self._lending.over = True
        try:
            if connection.lock.locked():
                connection.sever()
            elif may_be_undone(connection):
                connection.limit = self._limit
                undo(connection)
        finally:
            self._pool.give(connection, used=self._lending.used and self._cleans)


class AsyncPsycopgTransaction:
    """A business transaction that an `async def` handler writes through."""

    def __init__(self, pool: AsyncPool, connection: AsyncStoreConnection, limit: float, *, cleans: bool) -> None:
        self._pool = pool
        self._cleans = cleans
        self._raw: AsyncStoreConnection | None = connection
        self._limit = limit
        self._lending = Lending()
        self._guarded = AsyncGuardedConnection(lent(connection, self._lending), self._lending)

    @property
    def connection(self) -> AsyncGuardedConnection:
        """The connection for the handler."""
        return self._guarded

    async def say(self, statement: Statement) -> Rows:
        """Execute a statement of oncekey's own, before the handler has the connection."""
        return await self.step(_only(statement))

    async def step(self, steps: Steps[T]) -> T:
        """Run statements inside it."""
        connection = self._raw
        if connection is None:
            raise TransactionControlError(OVER)
        connection.limit = self._limit
        try:
            if was_ended(connection):
                # The handler has committed its rows already, so the record has to follow them.
                _log.error(ENDED_EARLY)
                await abegin(connection, BEGIN, WHAT)
            return await astep(steps, partial(aexecute, connection, Mode.ATOMIC))
        finally:
            connection.limit = None

    async def commit(self) -> None:
        """Commit, and return the connection."""
        if self._raw is None:
            return
        try:
            if was_ended(self._raw):
                _log.error(NOTHING_LEFT)
            else:
                # A statement of the handler that waits for its turn behind this commit is refused when the turn comes.
                self._lending.over = True
                self._raw.limit = self._limit
                await acommit(self._raw, WHAT)
        finally:
            await self.rollback()

    async def commit_with(self, last: Statement) -> Rows | None:
        """Commit with a last statement in the same message, and return the connection. None: its place was taken."""
        connection = self._raw
        if connection is None:
            raise TransactionControlError(OVER)
        try:
            connection.limit = self._limit
            if was_ended(connection):
                _log.error(ENDED_EARLY)
                await abegin(connection, BEGIN, WHAT)
            self._lending.over = True
            cleans = self._lending.used and self._cleans
            rows = await acommit_with(connection, last, WHAT, cleans=cleans)
            self._cleans = self._cleans and rows is None  # otherwise the commit's message cleaned up
        finally:
            await self.rollback()
        return rows

    async def rollback(self) -> None:
        """Roll back and return the connection; has no effect on a transaction that has ended."""
        connection, self._raw = self._raw, None
        if connection is None:
            return
        self._lending.over = True
        try:
            if connection.lock.locked():
                await connection.sever()
            elif may_be_undone(connection):
                connection.limit = self._limit
                await aundo(connection)
        finally:
            # If this is cancelled half-way the connection is still in the transaction, and is closed, not lent again.
            self._pool.give(connection, used=self._lending.used and self._cleans)


def _only(statement: Statement) -> Steps[Rows]:
    return (yield statement)


def was_ended(connection: StoreConnection | AsyncStoreConnection) -> bool:
    """Whether the handler ended the transaction (F16)."""
    return not connection.closed and connection.pgconn.transaction_status == TransactionStatus.IDLE


def may_be_undone(connection: StoreConnection | AsyncStoreConnection) -> bool:
    """Whether a transaction is there to be rolled back."""
    return not connection.closed and connection.pgconn.transaction_status in {
        TransactionStatus.INTRANS,
        TransactionStatus.INERROR,
    }
