"""One LOCAL shop by every way to a connection: each driver, `async def` and `def`, and SQLAlchemy's."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

from fastapi import FastAPI, Request
from sqlalchemy import create_engine, text
from sqlalchemy.ext.asyncio import AsyncEngine, create_async_engine

from frameworks.shop import new_key
from harness.asgi import Caller, Reply
from oncekey.core.model import LOCAL
from oncekey.engine.operation import Operation, SyncOperation
from oncekey.once import Once

OWN = ("asyncpg", "psycopg", "def")
SQLALCHEMY = ("sa-asyncpg", "sa-psycopg")
WAYS = OWN + SQLALCHEMY
ON_SQLITE = ("sqlite", "sqlite-def", "pysqlite3", "sa-sqlite", "sa-def")
"""The same on a file: oncekey's own connections with either module, and engines of SQLAlchemy's."""

Said = Callable[[Any], Awaitable[Any]]


class Shop:
    """`POST /run` does what the test put into `inside`, with the tenant of the header `X-Tenant`."""

    def __init__(self, way: str, dsn: str, *, pool_size: int = 2, **engine: Any) -> None:
        self.way = way
        self.runs = 0
        self.inside: Callable[[Any], Any] = lambda _: None
        self.engine: AsyncEngine | None = None
        self.once = Once(self._store(dsn, pool_size, engine), migrate=True)
        self.app = FastAPI(lifespan=self.once.lifespan)
        self.once.install(self.app, tenant=lambda request: request.headers["x-tenant"])
        handler = self._blocking() if way.endswith("def") else self._async()
        self.app.post("/run")(self.once.protect(effects=LOCAL)(handler))

    def _store(self, dsn: str, pool_size: int, options: dict[str, Any]) -> Any:
        package = {"def": "psycopg"}.get(self.way, self.way.removeprefix("sa-"))
        address = dsn.replace("postgresql:", f"postgresql+{package}:", 1)
        if self.way in ("sqlite", "sqlite-def", "pysqlite3"):
            return dsn.replace("sqlite:", f"sqlite+{self.way}:", 1) if self.way == "pysqlite3" else dsn
        if self.way == "sa-def":
            return create_engine(dsn, pool_size=pool_size, **options)
        if not self.way.startswith("sa-"):
            return f"{address}{'&' if '?' in dsn else '?'}pool_size={pool_size}"
        if self.way != "sa-sqlite":
            options = {"pool_size": pool_size, "max_overflow": 0, **options}
        self.engine = create_async_engine(address, **options)
        return self.engine

    def _async(self) -> Any:
        async def run(request: Request, op: Operation) -> Any:
            self.runs += 1
            result = self.inside(op)
            return await result if inspect.isawaitable(result) else result

        return run

    def _blocking(self) -> Any:
        def run(request: Request, op: SyncOperation) -> Any:
            self.runs += 1
            result = self.inside(op)
            return asyncio.run(result) if inspect.iscoroutine(result) else result

        return run

    @asynccontextmanager
    async def open(self) -> AsyncIterator[Shop]:
        """Serve, and stop."""
        try:
            async with self.once.lifespan(self.app):
                yield self
        finally:
            if self.engine is not None:
                await self.engine.dispose()

    async def send(
        self, inside: Callable[[Any], Any] | None = None, *, tenant: str = "acme", key: str | None = None
    ) -> Reply:
        """One request."""
        if inside is not None:
            self.inside = inside
        lines = [("Idempotency-Key", key or new_key()), ("X-Tenant", tenant)]
        return await Caller(self.app, "POST", "/run", headers=lines).run()

    async def say(self, connection: Any, sql: str) -> list[tuple[Any, ...]]:
        """Execute on whatever `op.connection` is; the rows, if there are any."""
        if self.way == "asyncpg":
            return [tuple(row) for row in await connection.fetch(sql)]
        if self.way == "sa-def":
            result = connection.execute(text(sql))
            return [tuple(row) for row in result] if result.returns_rows else []
        if self.way in ("def", "sqlite-def"):
            cursor = connection.execute(sql)
            return [tuple(row) for row in cursor.fetchall()] if cursor.description else []
        if self.way in ("psycopg", "sqlite", "pysqlite3"):
            cursor = await connection.execute(sql)
            return [tuple(row) for row in await cursor.fetchall()] if cursor.description else []
        result = await connection.execute(text(sql))
        return [tuple(row) for row in result] if result.returns_rows else []

    def saying(self, *statements: str) -> Callable[[Any], Any]:
        """A handler that says this and answers what the last statement answered."""

        async def inside(op: Any) -> Any:
            rows: list[tuple[Any, ...]] = []
            for statement in statements:
                rows = await self.say(op.connection, statement)
            return rows

        return inside
