"""The sessions for the application: ordinary ones, and the session of a phased handler.

Each of their connections takes one of the handlers' slots in the pool, so that part of it stays free for claims,
settlements and heartbeats however many sessions are open.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from typing import TYPE_CHECKING, Any, Final, cast
from weakref import ref

from sqlalchemy import event
from sqlalchemy.engine import Connection, Engine
from sqlalchemy.engine.base import OptionEngine
from sqlalchemy.ext.asyncio import AsyncEngine, AsyncSession
from sqlalchemy.orm import Session, SessionTransaction
from sqlalchemy.util import await_only

from oncekey.core.errors import TransactionControlError, mark_lost
from oncekey.core.sqltext import ONLY_READS, plainly_reads, refuse_changes
from oncekey.databases.sqlalchemy.connections import as_opened
from oncekey.databases.sqlalchemy.errors import FAILURES
from oncekey.databases.sqlalchemy.execute import alters

if TYPE_CHECKING:
    from oncekey.databases.sqlalchemy.asynchronous import SqlalchemyTransaction

CONNECTION: Final = "oncekey_connection"
JOINED: Final = "oncekey_joined"


class PlacedConnection(Connection):
    """A connection that releases its slot when it is closed, and tracks whether it only read."""

    reserved = False
    used = False
    only_read = True

    def close(self) -> None:
        """Reset the state left in its session, and return it."""
        try:
            if self.used and cast("PlacedEngine", self.engine).cleans and not self.closed:
                self._clean()
            super().close()
        finally:
            self.leave()

    def _clean(self) -> None:
        self.used = False
        clean = False
        try:
            clean = await_only(as_opened(self))
        finally:
            if not clean and not self.invalidated:
                self.invalidate()

    def leave(self) -> None:
        """Release the slot, at most once."""
        if self.reserved:
            self.reserved = False
            cast("PlacedEngine", self.engine).leave()


class PlacedEngine(OptionEngine):
    """An engine on the application's pool whose connections each take one of the handlers' slots."""

    _connection_cls = PlacedConnection

    def __init__(
        self, engine: Engine, enter: Callable[[], Awaitable[None]], leave: Callable[[], None], *, cleans: bool
    ) -> None:
        super().__init__(engine, {})
        self._enter = enter
        self.leave = leave
        self.cleans = cleans

    def connect(self) -> Connection:
        """Wait for a slot, then for a connection, at a point where the session can wait."""
        await_only(self._enter())
        try:
            connection = super().connect()
        except BaseException as error:
            self.leave()
            if isinstance(error, FAILURES):
                mark_lost(error)
            raise
        assert isinstance(connection, PlacedConnection)
        connection.reserved = True
        return connection


def reserved(
    engine: AsyncEngine, enter: Callable[[], Awaitable[None]], leave: Callable[[], None], *, cleans: bool
) -> AsyncEngine:
    """The engine of the sessions; `cleans` if its pool would pass their session state to others."""
    sync = PlacedEngine(engine.sync_engine, enter, leave, cleans=cleans)

    def before(connection: Connection, _cursor: object, statement: str, *_: object) -> None:
        if not isinstance(connection, PlacedConnection):
            return
        connection.used = True
        alters(connection, statement)
        if not plainly_reads(statement):
            connection.only_read = False

    event.listen(sync, "before_cursor_execute", before)
    return AsyncEngine(sync)


def only_reading(engine: AsyncEngine) -> AsyncEngine:
    """A read-only engine on the same pool; PostgreSQL enforces it too."""
    options = {"postgresql_readonly": True} if engine.dialect.name == "postgresql" else {}
    ours = engine.execution_options(oncekey_reads=True, **options)

    def before(_connection: Connection, _cursor: object, statement: str, *_: object) -> None:
        refuse_changes(statement)

    event.listen(ours.sync_engine, "before_cursor_execute", before)
    return ours


class _Session(Session):
    """Remembers the connection that it began on."""


class _SteppingSession(_Session):
    """Rejects writes while it has joined no transaction."""


@event.listens_for(_Session, "after_begin", propagate=True)
def _begun(session: Session, _transaction: SessionTransaction, connection: Connection) -> None:
    session.info[CONNECTION] = connection


@event.listens_for(_SteppingSession, "before_flush")
def _refuse_to_flush(session: Session, *_: object) -> None:
    if not session.info.get(JOINED):
        raise TransactionControlError(ONLY_READS)


class _RequestSession(AsyncSession):
    """A session that returns its connection to the pool even if the caller is cancelled."""

    _ending: asyncio.Task[None] | None = None

    async def close(self) -> None:
        """Return the connection, and expunge all objects."""
        await self._to_its_end(super().close)

    async def _give_back(self) -> None:
        await self._to_its_end(lambda: self.run_sync(_end))

    async def _to_its_end(self, work: Callable[[], Coroutine[Any, Any, None]]) -> None:
        while self._ending is not None and not self._ending.done():
            await asyncio.wait([self._ending])
        self._ending = asyncio.create_task(work())
        await asyncio.shield(self._ending)


class OrdinarySession(_RequestSession):
    """A session that the application commits."""

    sync_session_class = _Session

    async def rest(self) -> None:
        """Return the connection of a session that only read, before the request waits for another one."""
        connection = self.sync_session.info.get(CONNECTION)
        if self.in_transaction() and getattr(connection, "only_read", False):
            await self._give_back()


class SteppingSession(_RequestSession):
    """A session that reads on its own connection, and writes only in transactions that it has joined.

    A phase begins and ends without objects: a resumed handler has none of an earlier phase either. The session keeps
    track of objects that were read outside a phase, so that a change to one raises instead of being lost.
    """

    sync_session_class = _SteppingSession

    def __init__(self, engine: AsyncEngine) -> None:
        super().__init__(engine, join_transaction_mode="rollback_only", expire_on_commit=False)
        self._reader = self.sync_session.bind
        self._read_before: list[ref[Any]] = []

    async def rest(self) -> None:
        """Return the connection; objects keep their state."""
        if self.in_transaction() and not self.sync_session.info.get(JOINED):
            await self._give_back()

    async def commit(self) -> None:
        """Inside a phase, flush pending changes; outside, there is nothing to commit, and changes are rejected."""
        if self.sync_session.info.get(JOINED):
            await super().commit()
        else:
            self.check()
            await self.rest()

    def join(self, tx: SqlalchemyTransaction, *, afresh: bool) -> None:
        if afresh:
            self.check()
            self._remember()
            self.sync_session.expunge_all()
        self.sync_session.bind = tx.connection.sync_connection
        self.sync_session.info[JOINED] = True
        tx.adopt(self)

    def done(self) -> None:
        self.check()
        self._remember()

    def part(self) -> None:
        """Leave the transaction, which has ended and closed the session; it reads on its own connection again."""
        self.sync_session.info[JOINED] = False
        self.sync_session.bind = self._reader

    def check(self) -> None:
        """Raise if there are changes that belong to no transaction and would be lost."""
        session = self.sync_session
        pending = bool(session.new or session.deleted) or any(map(session.is_modified, session.dirty))
        if pending or any(session.is_modified(was) for was in self._known()):
            raise TransactionControlError(ONLY_READS)

    def _remember(self) -> None:
        self._read_before = [ref(known) for known in (*self._known(), *self.sync_session)]

    def _known(self) -> list[Any]:
        known = [known() for known in self._read_before]
        return [was for was in known if was is not None and was not in self.sync_session]


def _end(session: Session) -> None:
    """Roll back a read-only transaction. Unlike `rollback()`, it keeps the state of objects."""
    transaction = session.get_transaction()
    if transaction is not None:
        transaction.close()
