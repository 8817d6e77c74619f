"""A connection of the engine's pool that the server closed: authentication notices it, before anything runs (R110)."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import psycopg
import pytest
from fastapi import Depends, FastAPI
from litestar import Litestar, post
from litestar.di import Provide
from sqlalchemy import text
from sqlalchemy.ext.asyncio import create_async_engine

from harness.asgi import until
from oncekey import INLINE, LOCAL, OUTBOX, PHASED, SINGLE_TENANT, Once, Operation
from oncekey.litestar import OncePlugin

KILL = "SELECT pg_terminate_backend(pid, 10000) FROM pg_stat_activity WHERE datname = current_database() AND pid <> pg_backend_pid()"  # noqa: E501


def _fastapi(once: Once, effects: Any, ran: list[str]) -> Any:
    async def authenticate() -> None:
        session = await once.session()
        await session.execute(text("SELECT 1"))

    app = FastAPI()
    once.install(app, tenant=SINGLE_TENANT)

    @app.post("/orders", status_code=201, dependencies=[Depends(authenticate)])
    @once.protect(effects=effects)
    async def create(op: Operation) -> dict[str, str]:
        if effects is OUTBOX:
            op.defer("created", {})
        ran.append(op.key)
        return {"key": op.key}

    return app, app.router.lifespan_context(app)


def _litestar(once: Once, effects: Any, ran: list[str]) -> Any:
    async def authenticate() -> int:
        session = await once.session()
        await session.execute(text("SELECT 1"))
        return 1

    @post("/orders", dependencies={"who": Provide(authenticate)}, status_code=201)
    @once.protect(effects=effects)
    async def create(op: Operation, who: int) -> dict[str, str]:
        if effects is OUTBOX:
            op.defer("created", {})
        ran.append(op.key)
        return {"key": op.key}

    app = Litestar([create], plugins=[OncePlugin(once, tenant=SINGLE_TENANT)])

    @asynccontextmanager
    async def lifespan() -> AsyncIterator[None]:
        async with app.lifespan():
            yield

    return app, lifespan()


@pytest.mark.parametrize("library", ["asyncpg", "psycopg"])
@pytest.mark.parametrize("framework", [_fastapi, _litestar], ids=["fastapi", "litestar"])
@pytest.mark.parametrize("effects", [LOCAL, OUTBOX, PHASED, INLINE])
async def test_connection_lost_in_a_dependency_returns_503(
    postgres_dsn: str, effects: Any, framework: Any, library: str
) -> None:
    engine = create_async_engine(postgres_dsn.replace("postgresql:", f"postgresql+{library}:"))
    once, ran = Once(engine, migrate=True), list[str]()

    @once.topic("created", repeatable=True)
    async def created(_: object) -> None: ...

    try:
        app, lifespan = framework(once, effects, ran)
        async with lifespan:
            transport = httpx.ASGITransport(app, raise_app_exceptions=False)
            async with httpx.AsyncClient(transport=transport, base_url="http://shop.example") as client:

                async def order(key: str) -> httpx.Response:
                    return await client.post("/orders", headers={"Idempotency-Key": f"{key}-0123456789"})

                assert (await order("first")).is_success
                await until(lambda: engine.pool.checkedout() == 0)  # type: ignore[attr-defined]  # of a QueuePool
                with psycopg.connect(postgres_dsn, autocommit=True) as other:
                    other.execute(KILL)
                lost = await order("second")
                assert (lost.status_code, lost.headers["Retry-After"]) == (503, "1"), lost.text
                assert lost.json()["code"] == "idempotency_store_unavailable"
                assert len(ran) == 1
                assert (await order("second")).is_success
    finally:
        await engine.dispose()
    assert len(ran) == 2


async def test_connection_of_another_engine_is_not_the_stores(postgres_dsn: str, tmp_path: Path) -> None:
    other = create_async_engine(postgres_dsn.replace("postgresql:", "postgresql+asyncpg:"))
    engine = create_async_engine(f"sqlite+aiosqlite:///{tmp_path}/shop.db")
    once = Once(engine, migrate=True)

    async def authenticate() -> None:
        await (await once.session()).execute(text("SELECT 1"))
        async with other.connect() as connection:
            await connection.execute(text("SELECT 1"))

    app = FastAPI()
    once.install(app, tenant=SINGLE_TENANT)

    @app.post("/orders", status_code=201, dependencies=[Depends(authenticate)])
    @once.protect(effects=LOCAL)
    async def create(op: Operation) -> str:
        return "done"

    async with app.router.lifespan_context(app):
        transport = httpx.ASGITransport(app, raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://shop.example") as client:
            statuses = []
            for key in ("first", "second", "third"):
                statuses.append(
                    (await client.post("/orders", headers={"Idempotency-Key": f"{key}-0123456789"})).status_code
                )
                if key == "first":
                    with psycopg.connect(postgres_dsn, autocommit=True) as killing:
                        killing.execute(KILL)
    await other.dispose()
    await engine.dispose()
    assert statuses == [201, 500, 201]
