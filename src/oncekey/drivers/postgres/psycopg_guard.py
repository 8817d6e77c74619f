"""The psycopg connection that a handler gets: everything but the end of the transaction (L5).

When the operation is over, another request gets the connection, so from then on the guard refuses every call.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from typing import Any, Final, NoReturn, Self

import psycopg
from psycopg import sql

from oncekey.drivers.guard import Lending, refusal, refuse_transaction_control

_SETTINGS: Final = frozenset({"autocommit", "isolation_level", "read_only", "deferrable"})


class _Guarded:
    """What blocking and asyncio have in common: pass every call on, unless the operation is over."""

    __slots__ = ("_lending", "_raw")

    def __init__(self, raw: Any, lending: Lending) -> None:  # noqa: ANN401  (any connection or cursor of psycopg)
        object.__setattr__(self, "_raw", raw)
        object.__setattr__(self, "_lending", lending)

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401  (whatever psycopg has there)
        self._lending.check()
        return getattr(self._raw, name)

    def __setattr__(self, name: str, value: object) -> None:
        if name in _SETTINGS:
            raise refusal(f"setting {name}")
        self._lending.check()
        setattr(self._raw, name, value)

    def __repr__(self) -> str:
        return f"<guarded {self._raw!r}>"

    def _check(self, query: Any) -> None:  # noqa: ANN401  (text, bytes, or whatever composes a statement)
        self._lending.check()
        refuse_transaction_control(_text(query, self._raw))


class _GuardedConnection(_Guarded):
    """The refusals of a connection; they are raised before anything is awaited."""

    __slots__ = ()

    def _refuse(self, what: str) -> NoReturn:
        raise refusal(what)

    def commit(self) -> NoReturn:
        """Refused."""
        self._refuse("commit()")

    def rollback(self) -> NoReturn:
        """Refused."""
        self._refuse("rollback()")

    def close(self) -> NoReturn:
        """Refused."""
        self._refuse("close()")

    def set_autocommit(self, _: object) -> NoReturn:
        """Refused."""
        self._refuse("set_autocommit()")

    def set_isolation_level(self, _: object) -> NoReturn:
        """Refused."""
        self._refuse("set_isolation_level()")

    def set_read_only(self, _: object) -> NoReturn:
        """Refused."""
        self._refuse("set_read_only()")

    def set_deferrable(self, _: object) -> NoReturn:
        """Refused."""
        self._refuse("set_deferrable()")

    def tpc_begin(self, *_: object) -> NoReturn:
        """Refused."""
        self._refuse("tpc_begin()")

    def tpc_prepare(self) -> NoReturn:
        """Refused."""
        self._refuse("tpc_prepare()")

    def tpc_commit(self, *_: object) -> NoReturn:
        """Refused."""
        self._refuse("tpc_commit()")

    def tpc_rollback(self, *_: object) -> NoReturn:
        """Refused."""
        self._refuse("tpc_rollback()")


class GuardedConnection(_GuardedConnection):
    """`op.connection` for psycopg in a blocking handler."""

    __slots__ = ()

    @property  # type: ignore[misc]  # isinstance() reads it, and it is never written
    def __class__(self) -> Any:  # noqa: ANN401  (so that isinstance() takes it for what it stands for)
        return psycopg.Connection

    def execute(self, query: Any, *args: Any, **kwargs: Any) -> GuardedCursor:  # noqa: ANN401  (as psycopg takes them)
        """Execute a statement."""
        self._check(query)
        return GuardedCursor(self._raw.execute(query, *args, **kwargs), self)

    def cursor(self, *args: Any, **kwargs: Any) -> GuardedCursor:  # noqa: ANN401  (as psycopg takes them)
        """A cursor."""
        self._lending.check()
        return GuardedCursor(self._raw.cursor(*args, **kwargs), self)

    def __enter__(self) -> NoReturn:
        self._refuse("`with connection:`")

    def __exit__(self, *_: object) -> None: ...


class GuardedCursor(_Guarded):
    """A cursor whose statements cannot end the transaction."""

    __slots__ = ("connection",)

    def __init__(self, raw: Any, connection: GuardedConnection) -> None:  # noqa: ANN401  (any cursor of psycopg)
        super().__init__(raw, connection._lending)  # noqa: SLF001  (one module, one secret)
        object.__setattr__(self, "connection", connection)

    @property  # type: ignore[misc]  # isinstance() reads it, and it is never written
    def __class__(self) -> Any:  # noqa: ANN401  (so that isinstance() takes it for what it stands for)
        return psycopg.Cursor

    def execute(self, query: Any, *args: Any, **kwargs: Any) -> GuardedCursor:  # noqa: ANN401  (as psycopg takes them)
        """Execute a statement."""
        self._check(query)
        self._raw.execute(query, *args, **kwargs)
        return self

    def executemany(self, query: Any, *args: Any, **kwargs: Any) -> None:  # noqa: ANN401  (as psycopg takes them)
        """Execute a statement for each of many parameters."""
        self._check(query)
        self._raw.executemany(query, *args, **kwargs)

    def stream(self, query: Any, *args: Any, **kwargs: Any) -> Iterator[Any]:  # noqa: ANN401  (as psycopg takes them)
        """The rows of a statement as they arrive."""
        self._check(query)
        rows: Iterator[Any] = self._raw.stream(query, *args, **kwargs)
        return rows

    def copy(self, statement: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401  (as psycopg takes them)
        """Copy rows in or out."""
        self._check(statement)
        return self._raw.copy(statement, *args, **kwargs)

    def __iter__(self) -> Iterator[Any]:
        self._lending.check()
        return iter(self._raw)

    def __next__(self) -> Any:  # noqa: ANN401  (a row)
        self._lending.check()
        return next(self._raw)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._raw.close()


class AsyncGuardedConnection(_GuardedConnection):
    """`op.connection` for psycopg in an `async def` handler."""

    __slots__ = ()

    @property  # type: ignore[misc]  # isinstance() reads it, and it is never written
    def __class__(self) -> Any:  # noqa: ANN401  (so that isinstance() takes it for what it stands for)
        return psycopg.AsyncConnection

    async def execute(self, query: Any, *args: Any, **kwargs: Any) -> AsyncGuardedCursor:  # noqa: ANN401  (as psycopg)
        """Execute a statement."""
        self._check(query)
        return AsyncGuardedCursor(await self._raw.execute(query, *args, **kwargs), self)

    def cursor(self, *args: Any, **kwargs: Any) -> AsyncGuardedCursor:  # noqa: ANN401  (as psycopg takes them)
        """A cursor."""
        self._lending.check()
        return AsyncGuardedCursor(self._raw.cursor(*args, **kwargs), self)

    async def __aenter__(self) -> NoReturn:
        self._refuse("`async with connection:`")

    async def __aexit__(self, *_: object) -> None: ...


class AsyncGuardedCursor(_Guarded):
    """A cursor whose statements cannot end the transaction."""

    __slots__ = ("connection",)

    def __init__(self, raw: Any, connection: AsyncGuardedConnection) -> None:  # noqa: ANN401  (any cursor of psycopg)
        super().__init__(raw, connection._lending)  # noqa: SLF001  (one module, one secret)
        object.__setattr__(self, "connection", connection)

    @property  # type: ignore[misc]  # isinstance() reads it, and it is never written
    def __class__(self) -> Any:  # noqa: ANN401  (so that isinstance() takes it for what it stands for)
        return psycopg.AsyncCursor

    async def execute(self, query: Any, *args: Any, **kwargs: Any) -> AsyncGuardedCursor:  # noqa: ANN401  (as psycopg)
        """Execute a statement."""
        self._check(query)
        await self._raw.execute(query, *args, **kwargs)
        return self

    async def executemany(self, query: Any, *args: Any, **kwargs: Any) -> None:  # noqa: ANN401  (as psycopg takes them)
        """Execute a statement for each of many parameters."""
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
        self._lending.check()
        rows: AsyncIterator[Any] = aiter(self._raw)
        return rows

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._raw.close()


def _text(query: Any, context: Any) -> str:  # noqa: ANN401  (text, bytes, or whatever composes a statement)
    if isinstance(query, str):
        return query
    if isinstance(query, bytes):
        return query.decode("utf-8", "replace")
    if isinstance(query, sql.Composable):
        return query.as_string(context)
    return sql.as_string(query, context)  # a template string
