"""Routes that oncekey protects, through its public interface only: the same file serves an older commit as well."""

# ruff: noqa: PLC0415  (each application imports what only its own environment has)

from __future__ import annotations

import dataclasses
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import timedelta
from typing import Any

from fastapi import Depends, FastAPI
from orders import BEGIN, INSERT, POOL, SETTLE, OrderIn, charge, made

import oncekey
from oncekey import INLINE, LOCAL, OUTBOX, PHASED, SINGLE_TENANT, Message, Once, Operation, Policy, Reply
from oncekey.options import Options

if not str(oncekey.__file__).startswith(os.environ.get("BENCH_SOURCES", "")):
    raise ImportError("these are not the sources of the baseline")

KEY_IS_OPTIONAL: dict[str, Any] = (
    {"require_key": False} if "require_key" in Options.__annotations__ else {"key": "optional"}  # as it was once called
)


def asyncpg(dsn: str) -> FastAPI:
    """All four effects through asyncpg, and a route that is not protected, behind the middleware."""
    app, once = _installed(Once(_through("asyncpg", dsn), migrate=True))
    _add_orders(app, once)

    @app.post("/inline", status_code=201)
    @once.protect(effects=INLINE)
    async def inline(order: OrderIn, op: Operation) -> dict[str, Any]:
        await charge(str(op.key))
        return made(1, order)

    @app.post("/phased", status_code=201)
    @once.protect(effects=PHASED)
    async def phased(order: OrderIn, op: Operation) -> dict[str, Any]:
        async def begin(tx: Any) -> int:
            return await tx.fetchval(BEGIN, order.product, order.quantity)

        async def settle(tx: Any) -> None:
            await tx.execute(SETTLE, charged["id"], number)

        number = await op.phase("payment_created", begin)
        charged = await op.call("charge_created", charge, repeatable=True)
        await op.phase("payment_settled", settle)
        return made(number, order)

    @app.post("/outbox", status_code=202)
    @once.protect(effects=OUTBOX)
    async def outbox(order: OrderIn, op: Operation) -> None:
        number = await op.connection.fetchval(INSERT, order.product, order.quantity)
        op.defer("send_order", {"id": number})

    @once.topic("send_order", repeatable=True)
    async def send_order(message: Message) -> Reply:
        return Reply(201, await charge(message.downstream_key))

    @app.post("/bare", status_code=201)
    async def unprotected(order: OrderIn) -> dict[str, Any]:
        return made(1, order)

    return app


def asyncpg_observed(dsn: str) -> FastAPI:
    """LOCAL with the metrics that most installations have."""
    from oncekey.observe.prometheus import Prometheus

    app, once = _installed(Once(_through("asyncpg", dsn), migrate=True, observers=[Prometheus()]))
    _add_orders(app, once)
    return app


def asyncpg_cached(dsn: str) -> FastAPI:
    """LOCAL with the cache of finished answers."""
    if "replay_cache" not in {field.name for field in dataclasses.fields(Policy)}:
        raise NotImplementedError("this version of oncekey keeps no answers in memory")
    policy = Policy(replay_cache=timedelta(minutes=10))
    app, once = _installed(Once(_through("asyncpg", dsn), migrate=True, policy=policy))
    _add_orders(app, once)
    return app


def asyncpg_shared(dsn: str, redis_url: str) -> FastAPI:
    """LOCAL with a Redis in front: finished answers, and keys that are being worked on."""
    if "lock_hint" not in {field.name for field in dataclasses.fields(Policy)}:
        raise NotImplementedError("this version of oncekey puts no Redis in front of its store")
    policy = Policy().override(secret=b"of the bench's own", replay_cache=redis_url, lock_hint=redis_url)
    app, once = _installed(Once(_through("asyncpg", dsn), migrate=True, policy=policy))
    _add_orders(app, once)
    return app


def psycopg(dsn: str) -> FastAPI:
    """LOCAL through psycopg."""
    app, once = _installed(Once(_through("psycopg", dsn), migrate=True))
    said = INSERT.replace("$1", "%s").replace("$2", "%s")

    @app.post("/orders", status_code=201)
    @once.protect(effects=LOCAL, **KEY_IS_OPTIONAL)
    async def create(order: OrderIn, op: Operation) -> dict[str, Any]:
        cursor = await op.connection.execute(said, (order.product, order.quantity))
        return made((await cursor.fetchone())[0], order)

    return app


def sqlalchemy(dsn: str) -> FastAPI:
    """LOCAL in a session of SQLAlchemy, through asyncpg."""
    from sqlalchemy import text
    from sqlalchemy.ext.asyncio import create_async_engine

    engine = create_async_engine(_through("asyncpg", dsn), pool_size=POOL, max_overflow=0)
    said = text(INSERT.replace("$1", ":product").replace("$2", ":quantity"))
    once = Once(engine, migrate=True)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        async with once.lifespan(app):
            yield
        await engine.dispose()

    app, _ = _installed(once, lifespan)

    @app.post("/orders", status_code=201)
    @once.protect(effects=LOCAL)
    async def create(order: OrderIn, session: Any = Depends(once.session)) -> dict[str, Any]:  # noqa: B008
        number = (await session.execute(said, order.model_dump())).scalar_one()
        return made(number, order)

    return app


def sqlite(url: str) -> FastAPI:
    """LOCAL in a file."""
    app, once = _installed(Once(url, migrate=True))
    said = INSERT.replace("$1", "?").replace("$2", "?")

    @app.post("/orders", status_code=201)
    @once.protect(effects=LOCAL, **KEY_IS_OPTIONAL)
    async def create(order: OrderIn, op: Operation) -> dict[str, Any]:
        cursor = await op.connection.execute(said, (order.product, order.quantity))
        return made((await cursor.fetchone())["id"], order)

    return app


def _add_orders(app: FastAPI, once: Once) -> None:
    @app.post("/orders", status_code=201)
    @once.protect(effects=LOCAL, **KEY_IS_OPTIONAL)
    async def create(order: OrderIn, op: Operation) -> dict[str, Any]:
        return made(await op.connection.fetchval(INSERT, order.product, order.quantity), order)


def _installed(once: Once, lifespan: Any = None) -> tuple[FastAPI, Once]:
    app = FastAPI(lifespan=lifespan or once.lifespan, docs_url=None, redoc_url=None)
    once.install(app, tenant=SINGLE_TENANT)
    return app, once


def _through(driver: str, dsn: str) -> str:
    return dsn.replace("postgresql:", f"postgresql+{driver}:", 1)
