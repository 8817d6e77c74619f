"""Business transactions on asyncpg, in which a handler writes and which oncekey ends (L4, L5)."""

from __future__ import annotations

import asyncio
from functools import partial
from typing import TYPE_CHECKING, Any, Final, NoReturn, TypeVar

from oncekey.core.errors import StoreError, TransactionControlError
from oncekey.core.flow import Body, Mode, Rows, Statement, arun_body
from oncekey.databases.handler_sql import (
    AS_HANDLER,
    AS_OPENED,
    ENDED,
    OVER,
    RESET,
    ConnectionUse,
    refusal,
    refuse_transaction_control,
)
from oncekey.databases.placeholders import numbered
from oncekey.databases.postgres import asyncpg_connections as connections
from oncekey.databases.postgres import server
from oncekey.databases.retries import lost_commit

if TYPE_CHECKING:
    from oncekey.databases.postgres.asyncpg import AsyncpgPool

T = TypeVar("T")

_LASTING: Final = frozenset(
    {"add_query_logger", "add_termination_listener", "reset_type_codec", "set_builtin_type_codec", "set_type_codec"}
)
"""Methods that change asyncpg's state of a connection, not the session."""


class AsyncpgTransaction:
    """A business transaction in which a handler writes."""

    __slots__ = (
        "_committed",
        "_for_handler",
        "_limit",
        "_over",
        "_pool",
        "_raw",
        "_resets_session",
        "_transaction",
        "_use",
    )

    def __init__(
        self,
        pool: AsyncpgPool,
        connection: connections.StoreConnection,
        transaction: Any,  # noqa: ANN401  (asyncpg's)
        limit: float,
        *,
        resets_session: bool,
    ) -> None:
        self._pool = pool
        self._raw = connection
        self._transaction = transaction
        self._limit = limit
        self._resets_session = resets_session
        self._over = self._committed = False
        self._use = ConnectionUse(lambda: _was_ended(connection))
        self._for_handler = AsyncpgHandlerConnection(connection, self._use)

    @property
    def connection(self) -> AsyncpgHandlerConnection:
        return self._for_handler

    @property
    def first_row(self) -> Rows | None:
        """The row of a first statement that was sent with BEGIN. None: it has to be executed separately."""
        raw = self._raw
        if raw.notice is None:
            return () if raw.tag == server.FOUND else None
        return [server.row_from_notice(raw.notice)]

    async def execute_own(self, statement: Statement) -> Rows:
        """Execute a statement of oncekey's own, before the handler has the connection."""
        return await execute(self._raw, self._limit, Mode.ATOMIC, statement)

    async def run(self, body: Body[T]) -> T:
        if self._over:
            raise TransactionControlError(OVER)
        self._refuse_if_ended()
        self._raw.handled = self._use.used
        if not self._use.sets:
            return await arun_body(body, partial(execute, self._raw, self._limit, Mode.ATOMIC))
        await self._say(";".join(AS_OPENED))
        result = await arun_body(body, partial(execute, self._raw, self._limit, Mode.ATOMIC))
        await self._say(AS_HANDLER)
        return result

    async def commit(self) -> None:
        if self._over:
            return
        try:
            self._refuse_if_ended()
            self._committed = True
            self._take_back()
            await commit_with(self._raw, server.BEGUN, self._limit, server.WHAT, resets_session=False, sets=False)
        except TransactionControlError:
            self._committed = False  # nothing was sent
            raise
        finally:
            await self.rollback()

    async def commit_with(self, last: Statement) -> Rows | None:
        if self._over:
            raise TransactionControlError(OVER)
        try:
            self._refuse_if_ended()
            self._committed = True
            self._take_back()
            self._raw.handled = self._use.used
            resets_session = self._use.used and self._resets_session
            rows = await commit_with(
                self._raw, last, self._limit, server.WHAT, resets_session=resets_session, sets=self._use.sets
            )
            self._resets_session = self._resets_session and rows is None  # otherwise the commit's message has reset it
            self._over = rows is not None and self._pool.returned_at_once(self._raw)
        except TransactionControlError:
            self._committed = False  # nothing was sent
            raise
        finally:
            if not self._over:
                await self.rollback()
        return rows

    async def rollback(self) -> None:
        if self._over:
            return
        self._over = True
        if not self._use.over:
            self._take_back()
        try:
            if not self._committed:
                await undo(self._raw, self._transaction, self._limit)
        finally:
            await self._pool.give(self._raw, used=self._use.used and self._resets_session)

    def _take_back(self) -> None:
        """Refuse all further use by the handler, including of prepared statements."""
        self._use.over = True
        self._raw.invalidate_handles(self._transaction)

    def _refuse_if_ended(self) -> None:
        if _was_ended(self._raw):
            raise TransactionControlError(ENDED)

    async def _say(self, text: str) -> None:
        try:
            await self._raw.execute(text, timeout=self._limit)
        except connections.FAILURES as error:
            raise connections.statement_error(error, self._raw, Mode.ATOMIC, server.WHAT) from connections.cause(error)


def _was_ended(connection: connections.StoreConnection) -> bool:
    """Whether the handler ended the transaction (F16)."""
    return not connection.is_in_transaction() and not connection.is_closed()


class AsyncpgHandlerConnection:
    """`op.connection` for asyncpg. After the end of the operation it refuses every call."""

    __slots__ = ("_raw", "_use")

    def __init__(self, raw: Any, use: ConnectionUse) -> None:  # noqa: ANN401  (a connection of asyncpg's pool)
        self._raw = raw
        self._use = use

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401  (whatever asyncpg has there)
        raw = self._open()
        if name in _LASTING:
            raw.generation = None  # the pool will not keep it, because asyncpg cannot undo this change
        return getattr(raw, name)

    def __repr__(self) -> str:
        return f"<guarded {self._raw!r}>"

    async def execute(self, query: str, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401  (as asyncpg)
        """Execute statements."""
        return await self._checked(query).execute(query, *args, **kwargs)

    async def executemany(self, command: str, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401  (as asyncpg)
        """Execute a statement once for each set of arguments."""
        return await self._checked(command).executemany(command, *args, **kwargs)

    async def fetch(self, query: str, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401  (as asyncpg)
        """The rows of a statement."""
        return await self._checked(query).fetch(query, *args, **kwargs)

    async def fetchmany(self, query: str, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401  (as asyncpg)
        """The rows of a statement, for each set of arguments."""
        return await self._checked(query).fetchmany(query, *args, **kwargs)

    async def fetchrow(self, query: str, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401  (as asyncpg)
        """The first row of a statement."""
        return await self._checked(query).fetchrow(query, *args, **kwargs)

    async def fetchval(self, query: str, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401  (as asyncpg)
        """A value of the first row."""
        return await self._checked(query).fetchval(query, *args, **kwargs)

    async def prepare(self, query: str, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401  (as asyncpg)
        """A prepared statement."""
        return await self._checked(query).prepare(query, *args, **kwargs)

    async def copy_from_query(self, query: str, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401  (as asyncpg)
        """Copy the rows of a statement out."""
        return await self._checked(query).copy_from_query(query, *args, **kwargs)

    def cursor(self, query: str, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401  (as asyncpg)
        """A cursor."""
        return self._checked(query).cursor(query, *args, **kwargs)

    def close(self, *_: object, **__: object) -> NoReturn:
        raise refusal("close()")

    def terminate(self) -> NoReturn:
        """Refused."""
        raise refusal("terminate()")

    def reset(self, *_: object, **__: object) -> NoReturn:
        """Refused: it rolls back."""
        raise refusal("reset()")

    def _checked(self, query: str) -> Any:  # noqa: ANN401  (a connection of asyncpg's pool)
        if refuse_transaction_control(query):
            self._use.sets = True
        self._use.check()
        return self._raw

    def _open(self) -> Any:  # noqa: ANN401  (a connection of asyncpg's pool)
        self._use.check()
        return self._raw


async def execute(connection: Any, limit: float | None, mode: Mode, statement: Statement) -> Rows:  # noqa: ANN401
    """Execute one statement of a transaction of this mode; asyncpg cancels one that takes too long."""
    assert isinstance(statement.command, str)
    numbered_sql = numbered(statement.command)
    try:
        rows: Rows = await connection.fetch(numbered_sql.text, *numbered_sql.arguments(statement.params), timeout=limit)
    except connections.FAILURES as error:
        raise connections.statement_error(error, connection, mode, statement.name) from connections.cause(error)
    return rows


async def execute_alone(connection: Any, limit: float | None, mode: Mode, statement: Statement) -> Rows:  # noqa: ANN401
    """Execute a statement that commits by itself: the server may warn that its standby lacks the commit."""
    try:
        rows = await execute(connection, limit, mode, statement)
    except asyncio.CancelledError:
        if mode is Mode.SINGLE:
            connection.unconfirmed.add()  # the standby may not have this commit (unconfirmed.py)
        raise
    if connection.unsure and mode is Mode.SINGLE:
        raise server.unsure_commit(statement.name)
    return rows


async def begin(connection: connections.StoreConnection, then: str, limit: float, what: str) -> Any:  # noqa: ANN401
    """Begin a transaction at READ COMMITTED; the text `then` is sent in the same message."""
    try:
        return await connection.open(then, limit)
    except connections.FAILURES as error:
        raise connections.statement_error(error, connection, Mode.ATOMIC, what) from connections.cause(error)


async def commit(connection: Any, transaction: Any, limit: float | None, what: str) -> None:  # noqa: ANN401
    """Commit; raises the store's error if that failed."""
    try:
        connection.forget_notices()
        async with asyncio.timeout(limit):
            await transaction.commit()
    except asyncio.CancelledError:
        connection.unconfirmed.add()  # the standby may not have this commit (unconfirmed.py)
        raise
    except connections.FAILURES as error:
        raise connections.commit_error(error, connection, what) from connections.cause(error)
    connections.check_commit(connection, what)


async def commit_with(
    connection: connections.StoreConnection,
    last: Statement,
    limit: float,
    what: str,
    *,
    resets_session: bool,
    sets: bool,
) -> Rows | None:
    """Send a last statement, COMMIT, and the reset of the session in one message.

    None: another request has stored this record first; nothing was committed.

    The server executes a message up to the first statement that fails:

    - an error, and the transaction is still open: the last statement failed, so nothing is committed;
    - an error, and it is over: the COMMIT was refused, or the reset after it failed. `Statement.proof`, a query
      whether it was committed, decides which; if that query fails, the outcome is ambiguous;
    - no error: committed. The reply to a COMMIT is ROLLBACK only if a statement had failed before (F20), and then
      the last statement would have failed too.
    """
    try:
        await connection.finish(server.sealing(last, sets=sets) + (RESET if resets_session else ""), limit)
    except connections.FAILURES as error:
        if connections.was_lost(error, connection) and not connections.was_never_sent(error, connection):
            raise connections.commit_error(error, connection, what) from connections.cause(error)
        if connection.is_closed() or connection.is_in_transaction():
            if connections.is_taken(error):
                return None
            raise connections.statement_error(error, connection, Mode.ATOMIC, last.name) from connections.cause(error)
        if not resets_session or not await _was_committed(connection, last, limit, what):
            raise connections.commit_error(error, connection, what) from connections.cause(error)
        connection.terminate()  # the session was not reset
    if connection.unsure:
        raise server.unsure_commit(what)
    return () if connection.notice is None else [server.row_from_notice(connection.notice)]


async def _was_committed(
    connection: connections.StoreConnection, last: Statement, limit: float | None, what: str
) -> bool:
    assert last.proof is not None
    try:
        rows = await execute(connection, limit, Mode.READ, Statement("proof", last.proof, last.params))
    except StoreError as error:
        connection.unconfirmed.add()  # the standby may not have this commit (unconfirmed.py)
        raise lost_commit(what) from error
    return bool(rows[0]["committed"])


async def undo(connection: Any, transaction: Any, limit: float | None) -> None:  # noqa: ANN401
    """Roll back if still possible, else close the connection."""
    if connection.is_closed():
        return
    try:
        async with asyncio.timeout(limit):
            await transaction.rollback()
    except connections.FAILURES as error:
        if connections.is_busy(error):
            await connections.cancel_and_close(connection)
        connection.terminate()
