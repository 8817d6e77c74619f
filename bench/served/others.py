"""The same routes behind other packages, each as its own guide shows it."""

# ruff: noqa: PLC0415  (each application imports what only its own environment has)

from __future__ import annotations

import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Annotated, Any

from fastapi import FastAPI, Header
from orders import BEGIN, POOL, SETTLE, OrderIn, charge, made
from plain import stock


def idemkit(dsn: str) -> FastAPI:
    """idemkit keeps its keys in PostgreSQL, in transactions of its own."""
    from idemkit import HttpConfig, IdempotencyMiddleware, PostgresBackend

    subprocess.run([sys.executable, "-m", "idemkit.cli", "init-pg", dsn], check=True, stdout=subprocess.DEVNULL)
    app = stock(dsn)
    app.add_middleware(
        IdempotencyMiddleware,
        backend=PostgresBackend.from_url(dsn, min_size=POOL, max_size=POOL),
        config=HttpConfig(scope=lambda _: "bench"),
    )
    return app


def header_memory(dsn: str) -> FastAPI:
    """asgi-idempotency-header keeps its keys in the memory of the process: nothing survives it."""
    from idempotency_header_middleware import IdempotencyHeaderMiddleware
    from idempotency_header_middleware.backends import MemoryBackend

    app = stock(dsn)
    app.add_middleware(IdempotencyHeaderMiddleware, backend=MemoryBackend())
    return app


def header_redis(dsn: str, redis_url: str) -> FastAPI:
    """asgi-idempotency-header keeps its keys in Redis."""
    from idempotency_header_middleware import IdempotencyHeaderMiddleware
    from idempotency_header_middleware.backends import RedisBackend
    from redis.asyncio import Redis

    app = stock(dsn)
    app.add_middleware(IdempotencyHeaderMiddleware, backend=RedisBackend(Redis.from_url(redis_url)))
    return app


def dbos(dsn: str) -> FastAPI:
    """DBOS runs a workflow under the key: a transaction, a step and a transaction, each recorded with what it wrote."""
    from dbos import DBOS, AsyncSQLAlchemyDatasource, SetWorkflowID
    from sqlalchemy import text

    address = dsn.replace("postgresql:", "postgresql+psycopg:", 1)
    begin_said = text(BEGIN.replace("$1", ":product").replace("$2", ":quantity"))
    settle_said = text(SETTLE.replace("$1", ":charge").replace("$2", ":number"))
    # As ours: what PostgreSQL does when nobody asks for more.
    options: Any = {"isolation_level": "READ COMMITTED"}
    source: list[AsyncSQLAlchemyDatasource] = []
    DBOS(
        config={
            "name": "bench",
            "system_database_url": address,
            "sys_db_pool_size": POOL,
            "run_admin_server": False,
            "log_level": "ERROR",
        }
    )

    async def begin(product: str, quantity: int) -> int:
        rows = await source[0].sql_session().execute(begin_said, {"product": product, "quantity": quantity})
        return int(rows.scalar_one())

    async def settle(number: int, charged: str) -> None:
        await source[0].sql_session().execute(settle_said, {"charge": charged, "number": number})

    @DBOS.step()
    async def charging(key: str) -> dict[str, Any]:
        return await charge(key)

    @DBOS.workflow()
    async def paying(product: str, quantity: int, key: str) -> int:
        number = await source[0].run_tx_step_async(options, begin, product, quantity)
        charged = await charging(key)
        await source[0].run_tx_step_async(options, settle, number, charged["id"])
        return number

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        source.append(await AsyncSQLAlchemyDatasource.create(address, {"pool_size": POOL, "max_overflow": 0}))
        DBOS.launch()
        yield
        DBOS.destroy()

    app = FastAPI(lifespan=lifespan, docs_url=None, redoc_url=None)

    @app.post("/phased", status_code=201)
    async def create(order: OrderIn, idempotency_key: Annotated[str, Header()]) -> dict[str, Any]:
        with SetWorkflowID(idempotency_key):
            number = await paying(order.product, order.quantity, idempotency_key)
        return made(number, order)

    return app
