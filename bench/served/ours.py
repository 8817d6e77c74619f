"""Routes that oncekey protects, through its public interface only: the same file serves an older commit as well."""

# ruff: noqa: PLC0415  (each application imports what only its own environment has)

from __future__ import annotations

import dataclasses
import inspect
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from fastapi import Depends, FastAPI
from orders import BEGIN, INSERT, POOL, SETTLE, OrderIn, charge, made

import oncekey
from oncekey import INLINE, LOCAL, OUTBOX, PHASED, SINGLE_TENANT, Message, Once, Operation, Policy, Reply

CACHED_ANSWERS = 10_000

if not str(oncekey.__file__).startswith(os.environ.get("BENCH_SOURCES", "")):
    raise ImportError("these are not the sources of the baseline")


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


def asyncpg_cached(dsn: str) -> FastAPI:
    """LOCAL with the cache of finished answers."""
    settings = cached_settings()
    if not settings:
        raise NotImplementedError("this version of oncekey has no setting named cache")
    app, once = _installed(Once(_through("asyncpg", dsn), migrate=True, **settings))
    _add_orders(app, once)
    return app


def cached_settings() -> dict[str, Any]:
    """How this version switches its cache of finished answers on: as a setting of `Once` or of a policy, if at all."""
    fields = {field.name: field.default for field in dataclasses.fields(Policy)}
    if "cache" in fields:
        return {"policy": Policy(cache=_on(fields["cache"]))}
    parameter = inspect.signature(Once).parameters.get("cache")
    return {} if parameter is None else {"cache": _on(parameter.default)}


def _on(default: object) -> object:
    return CACHED_ANSWERS if isinstance(default, int) and not isinstance(default, bool) else True


def psycopg(dsn: str) -> FastAPI:
    """LOCAL through psycopg."""
    app, once = _installed(Once(_through("psycopg", dsn), migrate=True))
    said = INSERT.replace("$1", "%s").replace("$2", "%s")

    @app.post("/orders", status_code=201)
    @once.protect(effects=LOCAL, key="optional")
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
    @once.protect(effects=LOCAL, key="optional")
    async def create(order: OrderIn, op: Operation) -> dict[str, Any]:
        cursor = await op.connection.execute(said, (order.product, order.quantity))
        return made((await cursor.fetchone())["id"], order)

    return app


def _add_orders(app: FastAPI, once: Once) -> None:
    @app.post("/orders", status_code=201)
    @once.protect(effects=LOCAL, key="optional")
    async def create(order: OrderIn, op: Operation) -> dict[str, Any]:
        return made(await op.connection.fetchval(INSERT, order.product, order.quantity), order)


def _installed(once: Once, lifespan: Any = None) -> tuple[FastAPI, Once]:
    app = FastAPI(lifespan=lifespan or once.lifespan, docs_url=None, redoc_url=None)
    once.install(app, tenant=SINGLE_TENANT)
    return app, once


def _through(driver: str, dsn: str) -> str:
    return dsn.replace("postgresql:", f"postgresql+{driver}:", 1)
