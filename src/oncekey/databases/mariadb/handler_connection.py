"""`op.connection` for MariaDB and MySQL, which refuses to end the transaction (L5)."""

from __future__ import annotations

from collections.abc import AsyncIterator, Generator, Iterator
from typing import Any, Final, Self

from oncekey.core.sqltext import Dialect
from oncekey.databases.handler_sql import ConnectionUse, HandlerProxy, refusal, refuse_transaction_control

_REFUSED: Final = frozenset(
    {"commit", "rollback", "begin", "close", "autocommit", "query", "select_db", "kill", "ensure_closed", "connect"}
)


class _MariadbProxy(HandlerProxy):
    __slots__ = ()

    def _check(self, query: Any) -> None:  # noqa: ANN401  (text or bytes)
        self._use.check()
        text = query.decode("utf-8", "replace") if isinstance(query, bytes) else str(query)
        refuse_transaction_control(text, Dialect.MARIADB)


class _MariadbHandlerConnection(_MariadbProxy):
    __slots__ = ()

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401
        if name in _REFUSED:
            raise refusal(f"{name}()")
        return super().__getattr__(name)


class MariadbHandlerConnection(_MariadbHandlerConnection):
    """`op.connection` in a blocking handler: a PyMySQL connection."""

    __slots__ = ()

    def cursor(self, *args: Any, **kwargs: Any) -> MariadbHandlerCursor:  # noqa: ANN401  (as PyMySQL takes them)
        """A cursor."""
        self._use.check()
        return MariadbHandlerCursor(self._raw.cursor(*args, **kwargs), self._use)


class MariadbHandlerCursor(_MariadbProxy):
    """A cursor whose statements cannot end the transaction."""

    __slots__ = ()

    def execute(self, query: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401  (as PyMySQL takes them)
        self._check(query)
        return self._raw.execute(query, *args, **kwargs)

    def executemany(self, query: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401  (as PyMySQL takes them)
        """Execute a statement once for each set of parameters."""
        self._check(query)
        return self._raw.executemany(query, *args, **kwargs)

    def __iter__(self) -> Iterator[Any]:
        self._use.check()
        return iter(self._raw)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._raw.close()


class AsyncMariadbHandlerConnection(_MariadbHandlerConnection):
    """`op.connection` in an `async def` handler: an aiomysql connection."""

    __slots__ = ()

    def cursor(self, *args: Any, **kwargs: Any) -> _Opening:  # noqa: ANN401  (as aiomysql takes them)
        """A cursor, to be awaited or entered."""
        self._use.check()
        return _Opening(self._raw.cursor(*args, **kwargs), self._use)


class _Opening:
    """A cursor to be awaited or entered, as in aiomysql."""

    __slots__ = ("_cursor", "_opening", "_use")

    def __init__(self, opening: Any, use: ConnectionUse) -> None:  # noqa: ANN401  (aiomysql's)
        self._opening = opening
        self._use = use
        self._cursor: AsyncMariadbHandlerCursor | None = None

    def __await__(self) -> Generator[Any, Any, AsyncMariadbHandlerCursor]:
        return self._open().__await__()

    async def _open(self) -> AsyncMariadbHandlerCursor:
        self._cursor = AsyncMariadbHandlerCursor(await self._opening, self._use)
        return self._cursor

    async def __aenter__(self) -> AsyncMariadbHandlerCursor:
        return await self._open()

    async def __aexit__(self, *_: object) -> None:
        if self._cursor is not None:
            await self._cursor.__aexit__()


class AsyncMariadbHandlerCursor(_MariadbProxy):
    """A cursor whose statements cannot end the transaction."""

    __slots__ = ()

    async def execute(self, query: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401  (as aiomysql takes them)
        self._check(query)
        return await self._raw.execute(query, *args, **kwargs)

    async def executemany(self, query: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401  (as aiomysql takes them)
        """Execute a statement once for each set of parameters."""
        self._check(query)
        return await self._raw.executemany(query, *args, **kwargs)

    def __aiter__(self) -> AsyncIterator[Any]:
        self._use.check()
        return aiter(self._raw)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._raw.close()
