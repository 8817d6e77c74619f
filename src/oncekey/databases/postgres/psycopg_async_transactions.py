"""Business transactions on psycopg for asyncio, in which a handler writes and which oncekey ends (L4, L5)."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any, NoReturn, Self, TypeVar

import psycopg
from psycopg.rows import dict_row

from oncekey.core.errors import TransactionControlError
from oncekey.core.flow import Body, Mode, Rows, Statement, arun_body
from oncekey.databases.handler_sql import (
    AS_HANDLER,
    AS_OPENED,
    ENDED,
    LEFT_BEHIND,
    LEFT_OPEN,
    OVER,
    RESET,
    ConnectionUse,
)
from oncekey.databases.placeholders import pyformat
from oncekey.databases.postgres import psycopg_connections as connections
from oncekey.databases.postgres import psycopg_replies as replies
from oncekey.databases.postgres import server

if TYPE_CHECKING:
    from psycopg.pq.abc import PGresult

    from oncekey.databases.postgres.psycopg_async import AsyncPool

T = TypeVar("T")


class AsyncPsycopgTransaction:
    """A business transaction in which an `async def` handler writes."""

    def __init__(
        self, pool: AsyncPool, connection: connections.AsyncStoreConnection, limit: float, *, resets_session: bool
    ) -> None:
        self._pool = pool
        self._resets_session = resets_session
        self._raw: connections.AsyncStoreConnection | None = connection
        self._limit = limit
        self._use = ConnectionUse(partial(replies.was_ended, connection))
        self._for_handler = AsyncPsycopgHandlerConnection(connections.lent(connection, self._use), self._use)

    @property
    def connection(self) -> AsyncPsycopgHandlerConnection:
        return self._for_handler

    async def execute_own(self, statement: Statement) -> Rows:
        """Execute a statement of oncekey's own, before the handler has the connection."""
        return await self.run(_only(statement))

    async def run(self, body: Body[T]) -> T:
        connection = self._raw
        if connection is None:
            raise TransactionControlError(OVER)
        connection.limit = self._limit
        try:
            await self._refuse_if_used(connection)
            _refuse_if_ended(connection)
            connection.handled = self._use.used
            if not self._use.sets:
                return await arun_body(body, partial(execute, connection, Mode.ATOMIC))
            await begin(connection, ";".join(AS_OPENED), server.WHAT)
            result = await arun_body(body, partial(execute, connection, Mode.ATOMIC))
            await begin(connection, AS_HANDLER, server.WHAT)
            return result
        finally:
            connection.limit = None

    async def commit(self) -> None:
        if self._raw is None:
            return
        try:
            await self._refuse_if_used(self._raw)
            _refuse_if_ended(self._raw)
            # A handler's statement that is queued behind this commit is refused when its turn comes.
            self._use.over = True
            self._raw.limit = self._limit
            await commit_with(self._raw, server.BEGUN, server.WHAT, resets_session=False, sets=False)
        finally:
            await self.rollback()

    async def commit_with(self, last: Statement) -> Rows | None:
        connection = self._raw
        if connection is None:
            raise TransactionControlError(OVER)
        try:
            connection.limit = self._limit
            await self._refuse_if_used(connection)
            _refuse_if_ended(connection)
            self._use.over = True
            connection.handled = self._use.used
            resets_session = self._use.used and self._resets_session
            rows = await commit_with(connection, last, server.WHAT, resets_session=resets_session, sets=self._use.sets)
            self._resets_session = self._resets_session and rows is None  # otherwise the commit's message has reset it
        finally:
            await self.rollback()
        return rows

    async def rollback(self) -> None:
        connection, self._raw = self._raw, None
        if connection is None:
            return
        self._use.over = True
        try:
            if connection.lock.locked():
                await connection.sever()
            elif replies.may_be_undone(connection):
                connection.limit = self._limit
                await undo(connection)
        finally:
            # If this is cancelled halfway, the connection is still in the transaction: it is closed, not lent again.
            self._pool.give(connection, used=self._use.used and self._resets_session)

    def leave(self) -> None:
        """Roll back without waiting for the reply: the next borrower of the connection waits for it."""
        connection, self._raw = self._raw, None
        if connection is not None:
            self._use.over = True
            self._pool.give(connection, undo=True)

    async def _refuse_if_used(self, connection: connections.AsyncStoreConnection) -> None:
        """Refuse to end a transaction in which the handler left a statement, a stream, a COPY or a pipeline open."""
        if connection.lock.locked() and not await connection.is_free(self._limit):
            raise TransactionControlError(LEFT_BEHIND)
        if not connection.closed and replies.is_left_open(connection):
            raise TransactionControlError(LEFT_OPEN)


def _refuse_if_ended(connection: connections.AsyncStoreConnection) -> None:
    if replies.was_ended(connection):
        raise TransactionControlError(ENDED)


def _only(statement: Statement) -> Body[Rows]:
    return (yield statement)


class AsyncPsycopgHandlerConnection(connections.PsycopgConnectionProxy):
    """`op.connection` for psycopg in an `async def` handler."""

    __slots__ = ()

    @property  # type: ignore[misc]  # isinstance() reads it, and it is never written
    def __class__(self) -> Any:  # noqa: ANN401  (so that isinstance() takes it for what it stands for)
        return psycopg.AsyncConnection

    async def execute(self, query: Any, *args: Any, **kwargs: Any) -> AsyncPsycopgHandlerCursor:  # noqa: ANN401  (as psycopg)
        self._check(query)
        return AsyncPsycopgHandlerCursor(await self._raw.execute(query, *args, **kwargs), self)

    def cursor(self, *args: Any, **kwargs: Any) -> AsyncPsycopgHandlerCursor:  # noqa: ANN401  (as psycopg takes them)
        """A cursor."""
        self._use.check()
        return AsyncPsycopgHandlerCursor(self._raw.cursor(*args, **kwargs), self)

    async def __aenter__(self) -> NoReturn:
        self._refuse("`async with connection:`")

    async def __aexit__(self, *_: object) -> None: ...


class AsyncPsycopgHandlerCursor(connections.PsycopgProxy):
    """A cursor whose statements cannot end the transaction."""

    __slots__ = ("connection",)

    def __init__(self, raw: Any, connection: AsyncPsycopgHandlerConnection) -> None:  # noqa: ANN401  (any cursor of psycopg)
        super().__init__(raw, connection._use)  # noqa: SLF001  (one module, one secret)
        object.__setattr__(self, "connection", connection)

    @property  # type: ignore[misc]  # isinstance() reads it, and it is never written
    def __class__(self) -> Any:  # noqa: ANN401  (so that isinstance() takes it for what it stands for)
        return psycopg.AsyncCursor

    async def execute(self, query: Any, *args: Any, **kwargs: Any) -> AsyncPsycopgHandlerCursor:  # noqa: ANN401  (as psycopg)
        self._check(query)
        await self._raw.execute(query, *args, **kwargs)
        return self

    async def executemany(self, query: Any, *args: Any, **kwargs: Any) -> None:  # noqa: ANN401  (as psycopg takes them)
        """Execute a statement once for each set of parameters."""
        self._check(query)
        await self._raw.executemany(query, *args, **kwargs)

    def stream(self, query: Any, *args: Any, **kwargs: Any) -> AsyncIterator[Any]:  # noqa: ANN401  (as psycopg)
        """The rows of a statement as they arrive."""
        self._check(query)
        rows: AsyncIterator[Any] = self._raw.stream(query, *args, **kwargs)
        return rows

    def copy(self, statement: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401  (as psycopg takes them)
        """Copy rows in or out."""
        self._check(statement)
        return self._raw.copy(statement, *args, **kwargs)

    def __aiter__(self) -> AsyncIterator[Any]:
        self._use.check()
        rows: AsyncIterator[Any] = aiter(self._raw)
        return rows

    async def __anext__(self) -> Any:  # noqa: ANN401  (a row)
        self._use.check()
        return await anext(self._raw)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._raw.close()


async def execute(connection: psycopg.AsyncConnection[Any], mode: Mode, statement: Statement) -> Rows:
    """Execute one statement of a transaction of this mode."""
    assert isinstance(statement.command, str)
    cursor = psycopg.AsyncCursor(connection, row_factory=dict_row)
    try:
        await cursor.execute(pyformat(statement.command), statement.params, binary=True)
        return await cursor.fetchall() if replies.has_rows(cursor) else []
    except replies.FAILURES as error:
        raise replies.statement_error(error, connection, mode, statement.name) from replies.cause(error)


async def execute_alone(connection: connections.AsyncStoreConnection, mode: Mode, statement: Statement) -> Rows:
    """Execute a statement that commits by itself: the server may warn that its standby lacks the commit."""
    connection.unsure = False
    rows = await execute(connection, mode, statement)
    if connection.unsure and mode is Mode.SINGLE:
        raise server.unsure_commit(statement.name)
    return rows


async def begin(connection: connections.AsyncStoreConnection, text: str, what: str) -> None:
    """Begin a transaction, with the settings in the text if there are any, or only apply the settings."""
    try:
        await connection.execute(text, prepare=False)  # PostgreSQL prepares only single commands, and these may be two
    except psycopg.Error as error:
        raise replies.statement_error(error, connection, Mode.ATOMIC, what) from error


async def commit(connection: connections.AsyncStoreConnection, what: str) -> None:
    """Commit; raises the store's error if that failed."""
    connection.unsure = False
    try:
        cursor = await psycopg.AsyncCursor(connection).execute("COMMIT")
    except psycopg.Error as error:
        raise replies.commit_error(error, connection, what) from replies.cause(error)
    replies.check_commit(connection, cursor.statusmessage, what)


async def begin_with(connection: connections.AsyncStoreConnection, first: Statement) -> Rows | None:
    """Begin a transaction with its first statement in the same message. None: it has to be executed separately."""
    connection.notice = None
    try:
        results = await execute_text(connection, f"{server.BEGIN};{server.as_text(first)}")
        replies.refuse_failed(results)
    except replies.FAILURES as error:
        raise replies.statement_error(error, connection, Mode.ATOMIC, first.name) from replies.cause(error)
    return replies.found(connection, results[-1])


async def commit_with(
    connection: connections.AsyncStoreConnection, last: Statement, what: str, *, resets_session: bool, sets: bool
) -> Rows | None:
    """Send a last statement, COMMIT, and the reset of the session in one message.

    None: another request has stored this record first; nothing was committed.
    """
    connection.unsure, connection.notice = False, None
    try:
        results = await execute_text(connection, server.sealing(last, sets=sets) + (RESET if resets_session else ""))
    except replies.FAILURES as error:
        raise replies.commit_error(error, connection, what) from replies.cause(error)
    return replies.ended(connection, results, last.name, what)


async def execute_text(connection: connections.AsyncStoreConnection, text: str) -> list[PGresult]:
    """Send several statements in one message; the reply to each, up to the first that failed."""
    async with connection.lock:
        return await connection.wait(connections.answers(connection.pgconn, text))


async def undo(connection: connections.AsyncStoreConnection) -> None:
    """Roll back if still possible; otherwise the pool closes the connection."""
    with suppress(psycopg.Error):
        await psycopg.AsyncCursor(connection).execute("ROLLBACK")
