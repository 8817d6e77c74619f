"""A shop by way of SQLAlchemy on a real server, with eyes on its statements, its commits and its pool."""

from __future__ import annotations

import gc
import json
import warnings
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Annotated, Any

from fastapi import Depends, FastAPI
from pydantic import BaseModel
from sqlalchemy import String, UniqueConstraint, event, text
from sqlalchemy.ext.asyncio import AsyncEngine, AsyncSession, create_async_engine
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

from frameworks.shop import KEY, tenant_of
from harness.asgi import Caller, Reply
from harness.patience import PATIENCE
from oncekey.core.policy import Policy
from oncekey.once import Once

SAME_TRANSACTION = "SELECT (SELECT xmin FROM orders)::text = (SELECT xmin FROM oncekey.record)::text"
EMPTYING = {
    "postgresql": ("TRUNCATE orders, oncekey.record RESTART IDENTITY",),
    "mysql": ("TRUNCATE orders", "DELETE FROM oncekey_record", "DELETE FROM oncekey_lock"),
}


class Tables(DeclarativeBase):
    pass


class Order(Tables):
    __tablename__ = "orders"
    __table_args__ = (
        UniqueConstraint("item", deferrable=True, initially="IMMEDIATE").ddl_if(dialect="postgresql"),
        UniqueConstraint("item").ddl_if(dialect="mysql"),
    )
    id: Mapped[int] = mapped_column(primary_key=True)
    item: Mapped[str] = mapped_column(String(255))


class OrderIn(BaseModel):
    item: str


class Refusal(Exception):  # noqa: N818
    """What the application's own exception handler answers with 409."""


def engine_for(dsn: str, dialect: str, **options: Any) -> AsyncEngine:
    database = "mysql" if dialect == "aiomysql" else "postgresql"
    return create_async_engine(f"{database}+{dialect}://{dsn.partition('://')[2]}", **options)


class SqlShop:
    """An application, its engine, and what was said to the database."""

    def __init__(self, engine: AsyncEngine, *, policy: Policy | None = None, **installing: Any) -> None:
        self.engine = engine
        self.once = Once(engine, policy=policy, migrate=True)
        self.app = FastAPI()
        self.runs: list[Any] = []
        self.said: list[str] = []
        self.commits = 0
        self.taken = 0
        self.once.install(self.app, **{"tenant": tenant_of, **installing})
        event.listen(engine.sync_engine, "before_cursor_execute", self._hear)
        event.listen(engine.sync_engine, "commit", self._count)
        event.listen(engine.sync_engine, "checkout", self._take)

    def _hear(self, _connection: Any, _cursor: Any, statement: str, *_: Any) -> None:
        self.said.append(statement.split(maxsplit=1)[0])

    def _count(self, _connection: Any) -> None:
        self.commits += 1

    def _take(self, *_: Any) -> None:
        self.taken += 1

    def forget(self) -> None:
        self.said.clear()
        self.commits = 0

    @property
    def session(self) -> Any:
        """The annotation of a handler's session."""
        return Annotated[AsyncSession, Depends(self.once.session)]

    def post(self, path: str = "/orders", **options: Any) -> Callable[[Any], Any]:
        """`@shop.post(effects=LOCAL)`: a protected route."""
        status = options.pop("status_code", 201)

        def decorate(handler: Any) -> Any:
            return self.app.post(path, status_code=status, response_model=None)(self.once.protect(**options)(handler))

        return decorate

    def caller(self, body: Any = None, *, target: str = "/orders", key: str | None = KEY, **request: Any) -> Caller:
        """A request that can be watched while it runs."""
        lines = [("Content-Type", "application/json")]
        if key is not None:
            lines.append(("Idempotency-Key", key))
        content = json.dumps({"item": "tea"} if body is None else body).encode()
        return Caller(self.app, request.pop("method", "POST"), target, headers=lines, body=content, **request)

    async def send(self, body: Any = None, **request: Any) -> Reply:
        """A request and its answer, when its connection is back: nobody else has to wait for that."""
        reply = await self.caller(body, **request).run()
        await self.once.asynchronous().close()
        return reply

    async def look(self, query: str) -> list[Any]:
        """What the database says, by a connection that is not counted."""
        async with self.engine.connect() as connection:
            return list((await connection.execute(text(query))).scalars())

    async def items(self) -> list[str]:
        return await self.look("SELECT item FROM orders ORDER BY id")

    async def states(self) -> list[str]:
        if self.engine.dialect.name == "postgresql":
            return await self.look("SELECT state FROM oncekey.record")
        return await self.look("SELECT CAST(state AS CHAR) FROM oncekey_record")

    async def in_one_commit(self) -> bool:
        """Whether the only order and the only record came with one commit."""
        if self.engine.dialect.name == "postgresql":
            return await self.look(SAME_TRANSACTION) == [True]
        # MariaDB does not tell which transaction wrote a row. That a lost commit leaves both or none is another test.
        return (self.commits, len(await self.items()), len(await self.states())) == (1, 1, 1)

    async def drained(self) -> None:
        for installation in self.once._installed.values():
            assert await installation.running_work.wait(PATIENCE)

    @property
    def lent(self) -> int:
        """How many connections are out of the pool."""
        return self.engine.pool.checkedout()  # type: ignore[attr-defined]


@asynccontextmanager
async def opened(
    dsn: str,
    dialect: str,
    routes: Callable[[SqlShop], object],
    *,
    engine: dict[str, Any] | None = None,
    **options: Any,
) -> AsyncIterator[SqlShop]:
    """A shop with empty tables that has started; at the end nothing may be left of it."""
    made = engine_for(dsn, dialect, **(engine or {}))
    try:
        async with made.begin() as connection:
            await connection.run_sync(Tables.metadata.create_all)
        shop = SqlShop(made, **options)
        routes(shop)
        await shop.once.start(shop.app)
        async with made.begin() as connection:
            for sql in EMPTYING[made.dialect.name]:
                await connection.execute(text(sql))
        shop.forget()
        yield shop
        await shop.once.stop()
        assert shop.lent == 0
    finally:
        await made.dispose()
        if dialect == "aiomysql":
            # It leaves a connection open which it could not say goodbye to; that is told by whoever collects it.
            with warnings.catch_warnings(action="ignore", category=ResourceWarning):
                gc.collect()
