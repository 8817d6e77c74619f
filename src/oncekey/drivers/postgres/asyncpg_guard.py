"""The asyncpg connection that a handler gets: everything but the end of the transaction (L5)."""

from __future__ import annotations

from typing import Any, NoReturn

from oncekey.drivers.guard import Lending, refusal, refuse_transaction_control


class GuardedConnection:
    """`op.connection` for asyncpg. After the end of the operation it refuses every call."""

    __slots__ = ("_lending", "_raw")

    def __init__(self, raw: Any, lending: Lending) -> None:  # noqa: ANN401  (a connection of asyncpg's pool)
        self._raw = raw
        self._lending = lending

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401  (whatever asyncpg has there)
        return getattr(self._open(), name)

    def __repr__(self) -> str:
        return f"<guarded {self._raw!r}>"

    async def execute(self, query: str, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401  (as asyncpg)
        """Execute statements."""
        return await self._checked(query).execute(query, *args, **kwargs)

    async def executemany(self, command: str, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401  (as asyncpg)
        """Execute a statement for each of many arguments."""
        return await self._checked(command).executemany(command, *args, **kwargs)

    async def fetch(self, query: str, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401  (as asyncpg)
        """The rows of a statement."""
        return await self._checked(query).fetch(query, *args, **kwargs)

    async def fetchmany(self, query: str, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401  (as asyncpg)
        """The rows of a statement for each of many arguments."""
        return await self._checked(query).fetchmany(query, *args, **kwargs)

    async def fetchrow(self, query: str, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401  (as asyncpg)
        """The first row."""
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
        """Refused."""
        raise refusal("close()")

    def terminate(self) -> NoReturn:
        """Refused."""
        raise refusal("terminate()")

    def reset(self, *_: object, **__: object) -> NoReturn:
        """Refused: it rolls back."""
        raise refusal("reset()")

    def _checked(self, query: str) -> Any:  # noqa: ANN401  (a connection of asyncpg's pool)
        refuse_transaction_control(query)
        self._lending.check()
        return self._raw

    def _open(self) -> Any:  # noqa: ANN401  (a connection of asyncpg's pool)
        self._lending.check()
        return self._raw
