"""Phases on the application's own SQLAlchemy engine: its connection, its transaction, its recovery point."""

from __future__ import annotations

from typing import Any

import pytest
from fastapi import FastAPI
from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncEngine, create_async_engine

from frameworks.realshop import MariadbDatabase
from frameworks.shop import tenant_of
from harness.asgi import Caller
from oncekey.core.model import PHASED
from oncekey.core.policy import Policy
from oncekey.engine.operation import Operation
from oncekey.once import Once
from oncekey.workers.completer import Completer
from phased.bank import KEY, Provider
from phased.conftest import EFFECT


@pytest.fixture(params=["postgresql+asyncpg", "postgresql+psycopg", "mariadb+aiomysql", "mysql+aiomysql"])
def engine(request: pytest.FixtureRequest) -> AsyncEngine:
    """An engine for a database with the table of effects."""
    database, _, _ = request.param.partition("+")
    if database == "postgresql":
        request.getfixturevalue("empty")
        return create_async_engine(request.getfixturevalue("phased_dsn").replace(database, request.param))
    url = request.getfixturevalue(f"{database}_url")
    MariadbDatabase(url, "aiomysql").execute(EFFECT)
    return create_async_engine(url.replace(database, request.param, 1))


async def test_phases_commit_with_their_rows(engine: AsyncEngine) -> None:
    # R115, R116, H7
    once, app, provider = Once(engine, policy=Policy(lease=1, deadline=600), migrate=True), FastAPI(), Provider()
    once.install(app, tenant=tenant_of)
    runs: list[int] = []

    @app.post("/payments", status_code=201)
    @once.protect(effects=PHASED, operation="pay", send_window=1, call_timeout=1)
    async def pay(op: Operation) -> Any:
        async def write(connection: Any) -> str:
            await connection.execute(text("INSERT INTO effect VALUES ('order')"))
            return "order"

        runs.append(1)
        order = await op.phase("order", write)
        charge = await op.call("charge", provider.charge, repeatable=True)
        return {"order": order, "charge": charge["id"]}

    async with once.lifespan(app):
        provider.faults.append(ConnectionResetError())
        replies = [await Caller(app, "POST", "/payments", headers=[("Idempotency-Key", KEY)]).run() for _ in range(3)]
        assert [reply.status for reply in replies] == [500, 201, 201]
        assert await Completer(once).run_once() == 0
    async with engine.begin() as connection:
        rows = (await connection.execute(text("SELECT item FROM effect"))).all()
    await engine.dispose()
    assert ([item for (item,) in rows], provider.charges, len(runs)) == (["order"], 1, 2)
