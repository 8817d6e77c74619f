"""The pools of psycopg connections.

A connection is made in the caller's own thread or task if there is none to lend. So a server that is down is
reported at once with its own error, and one that is back is used at once: no background worker has to find out
first. Before a connection is lent its socket is checked, which costs no round trip: a connection that a restart or a
`pg_terminate_backend` has ended is thrown away before a statement is lost on it.
"""

from __future__ import annotations

import select
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Final, TypeVar

import psycopg
from psycopg.pq import PipelineStatus, TransactionStatus

from oncekey.drivers.postgres.doubt import CONFIRM, WHAT, Asking, AsyncAsking, Doubt
from oncekey.drivers.postgres.errors import unreachable
from oncekey.drivers.postgres.psycopg_connections import (
    AsyncStoreConnection,
    StoreConnection,
    aconnect,
    bounded,
    clean_up,
    connect,
    taken_back,
)
from oncekey.drivers.postgres.psycopg_errors import statement_error
from oncekey.drivers.slots import AsyncSlots, Shelf, Slots, business_share
from oncekey.flow import Mode

C = TypeVar("C", StoreConnection, AsyncStoreConnection)

MAX_AGE: Final = 1800.0
"""Seconds after which a connection is replaced, so that load reaches a server that was added or moved."""


class IdleConnections(Shelf[C]):
    """The idle connections."""

    def pop(self) -> C | None:
        """A connection that the server has not closed, if there is one."""
        with self._lock:
            self._forget_parents()
            while self._idle:
                connection = self._idle.pop(self._nearest())
                if not connection.closed and (connection.cleaning or is_quiet(connection)):
                    return connection
                connection.pgconn.finish()
        return None

    def put(self, connection: C, *, used: bool = False) -> None:
        """Take a connection back; one in the middle of something is closed, one that a handler used is reset."""
        with self._lock:
            if connection.suspect:
                # If one server does not answer or takes no writes, the other idle connections are probably no better.
                self._empty()
            if connection.lock.locked():
                # Another thread or task still waits on it. If it were closed now, the event loop might poll another
                # file with the same number; its socket was shut down, and it ends with its last user.
                return
            if self._closed or not _is_clean(connection):
                connection.pgconn.finish()
            else:
                taken_back(connection)
                if not used or clean_up(connection):
                    self._idle.append(connection)

    def close(self) -> None:
        """Close the idle connections now, and the others when they come back."""
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
            connection = self._idle.pop()  # with a name: psycopg warns of one that is dropped before it is closed
            connection.pgconn.finish()


class Pool:
    """Connections for blocking code."""

    def __init__(self, dsn: str, size: int, timeout: float, threshold: int | None) -> None:
        self._address = bounded(dsn, timeout)
        self._timeout, self._threshold = timeout, threshold
        self._slots = Slots(size, timeout)
        self._business = Slots(business_share(size), timeout)
        self._shelf: IdleConnections[StoreConnection] = IdleConnections()
        self.doubt = Doubt.of(dsn)
        self._asking = Asking(self.doubt, self._confirmed)

    @contextmanager
    def lent(self, limit: float) -> Iterator[StoreConnection]:
        """A connection for one statement or transaction of oncekey's own."""
        if self.doubt:
            self._asking.settle()
        connection = self._take(time.monotonic() + self._timeout)
        connection.limit = limit
        try:
            yield connection
        finally:
            self._give(connection)

    @property
    def crowded(self) -> bool:
        """Whether business transactions hold all connections that they may."""
        return self._business.full

    def take(self) -> StoreConnection:
        """A connection for a business transaction."""
        if self.doubt:
            self._asking.settle()
        deadline = time.monotonic() + self._timeout
        self._business.acquire(deadline)
        try:
            return self._take(deadline)
        except BaseException:
            self._business.release()
            raise

    def give(self, connection: StoreConnection, *, used: bool = False) -> None:
        """Return a business transaction's connection."""
        self._give(connection, used=used)
        self._business.release()

    def close(self) -> None:
        """Close all connections; those in use when they come back."""
        self._shelf.close()

    def _take(self, deadline: float) -> StoreConnection:
        self._slots.acquire(deadline)
        try:
            return self._idle() or connect(self._address, self._threshold, self.doubt)
        except psycopg.Error as error:
            self._slots.release()
            raise unreachable(_first_line(error)) from error
        except BaseException:
            self._slots.release()
            raise

    def _idle(self) -> StoreConnection | None:
        while (connection := self._shelf.pop()) is not None:
            if not connection.cleaning:
                return connection
            connection.limit = self._timeout
            clean = False
            try:
                clean = connection.is_clean() and is_quiet(connection)
            finally:
                if not clean:
                    connection.pgconn.finish()
            if clean:
                connection.limit = None
                return connection
        return None

    def _confirmed(self) -> bool:
        """Whether the standby has everything that was committed so far."""
        connection = self._take(time.monotonic() + self._timeout)
        connection.limit, connection.unsure = self._timeout, False
        try:
            connection.execute(CONFIRM)
        except psycopg.Error as error:
            raise statement_error(error, connection, Mode.READ, WHAT) from error
        finally:
            self._give(connection)
        return not connection.unsure

    def _give(self, connection: StoreConnection, *, used: bool = False) -> None:
        self._shelf.put(connection, used=used)
        self._slots.release()


class AsyncPool:
    """Connections for asyncio."""

    def __init__(self, dsn: str, size: int, timeout: float, threshold: int | None) -> None:
        self._address = bounded(dsn, timeout)
        self._timeout, self._threshold = timeout, threshold
        self._slots = AsyncSlots(size, timeout)
        self._business = AsyncSlots(business_share(size), timeout)
        self._shelf: IdleConnections[AsyncStoreConnection] = IdleConnections()
        self.doubt = Doubt.of(dsn)
        self._asking = AsyncAsking(self.doubt, self._confirmed)

    @asynccontextmanager
    async def lent(self, limit: float) -> AsyncIterator[AsyncStoreConnection]:
        """A connection for one statement or transaction of oncekey's own."""
        if self.doubt:
            await self._asking.settle()
        connection = await self._take(time.monotonic() + self._timeout)
        connection.limit = limit
        try:
            yield connection
        finally:
            self._give(connection)

    @property
    def crowded(self) -> bool:
        """Whether business transactions hold all connections that they may."""
        return self._business.full

    async def room(self, seconds: float) -> bool:
        """Wait a moment for a free connection; whether there is one."""
        return await self._business.room(seconds)

    async def take(self) -> AsyncStoreConnection:
        """A connection for a business transaction."""
        if self.doubt:
            await self._asking.settle()
        deadline = time.monotonic() + self._timeout
        if not self._business.taken():
            await self._business.acquire(deadline)
        try:
            return await self._take(deadline)
        except BaseException:
            self._business.release()
            raise

    def give(self, connection: AsyncStoreConnection, *, used: bool = False) -> None:
        """Return a business transaction's connection."""
        self._give(connection, used=used)
        self._business.release()

    def close(self) -> None:
        """Close all connections; those in use when they come back."""
        self._shelf.close()

    async def _take(self, deadline: float) -> AsyncStoreConnection:
        if not self._slots.taken():
            await self._slots.acquire(deadline)
        try:
            return await self._idle() or await aconnect(self._address, self._threshold, self.doubt)
        except psycopg.Error as error:
            self._slots.release()
            raise unreachable(_first_line(error)) from error
        except BaseException:
            self._slots.release()
            raise

    async def _idle(self) -> AsyncStoreConnection | None:
        while (connection := self._shelf.pop()) is not None:
            if not connection.cleaning:
                return connection
            connection.limit = self._timeout
            clean = False
            try:
                clean = await connection.is_clean() and is_quiet(connection)
            finally:
                if not clean:
                    connection.pgconn.finish()
            if clean:
                connection.limit = None
                return connection
        return None

    async def _confirmed(self) -> bool:
        """Whether the standby has everything that was committed so far."""
        connection = await self._take(time.monotonic() + self._timeout)
        connection.limit, connection.unsure = self._timeout, False
        try:
            await connection.execute(CONFIRM)
        except psycopg.Error as error:
            raise statement_error(error, connection, Mode.READ, WHAT) from error
        finally:
            self._give(connection)
        return not connection.unsure

    def _give(self, connection: AsyncStoreConnection, *, used: bool = False) -> None:
        self._shelf.put(connection, used=used)
        self._slots.release()


def is_quiet(connection: StoreConnection | AsyncStoreConnection) -> bool:
    """Whether nothing came in: an idle server sends something only to close the connection."""
    if connection.closed:
        return False
    fileno = connection.fileno()
    if hasattr(select, "poll"):
        poll = select.poll()
        poll.register(fileno, select.POLLIN)
        return not poll.poll(0)
    return not select.select([fileno], [], [], 0)[0]


def _is_clean(connection: StoreConnection | AsyncStoreConnection) -> bool:
    return (
        not connection.closed
        and not connection.suspect
        and connection.pgconn.transaction_status == TransactionStatus.IDLE
        and connection.pgconn.pipeline_status == PipelineStatus.OFF
        and time.monotonic() - connection.born < MAX_AGE
    )


def _first_line(error: psycopg.Error) -> str:
    return str(error).partition("\n")[0]
