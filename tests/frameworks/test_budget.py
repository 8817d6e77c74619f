"""What one request may cost: calls into oncekey, and messages to PostgreSQL.

Both are counted and not timed, so they stay the same on every machine. A change that needs more says so here.
"""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest

from frameworks.realshop import PostgresDatabase, RealShop, SqliteFile
from frameworks.shop import new_key
from harness.calls import counted
from harness.cutting import CuttingProxy
from harness.dsn import through
from harness.patience import PATIENCE
from oncekey.core.model import LOCAL
from oncekey.engine.operation import Operation

BUDGETS = {"asyncpg": (148, 82), "psycopg": (176, 90), "sqlite": (155, 66)}
"""Calls for a new key and for a replay: a few more than were counted, because a cache may have forgotten something."""


@pytest.fixture(params=sorted(BUDGETS))
def kind(request: pytest.FixtureRequest) -> str:
    kind: str = request.param
    return kind


@pytest.fixture
def database(kind: str, request: pytest.FixtureRequest, tmp_path: Path) -> Any:
    if kind == "sqlite":
        return SqliteFile(tmp_path / "shop.db")
    return PostgresDatabase(request.getfixturevalue("postgres_dsn"), kind)


def ordering(database: Any, **options: Any) -> RealShop:
    shop = RealShop(database)

    @shop.app.post("/orders", status_code=201)
    @shop.once.protect(effects=LOCAL, **options)
    async def create(op: Operation, item: str) -> dict[str, str]:
        await database.insert(op.connection, item)
        return {"item": item}

    return shop


async def test_calls_into_oncekey_stay_within_the_budget(kind: str, database: Any) -> None:
    async with ordering(database).open() as shop:
        for number in range(2):  # caches are filled, statements prepared
            for _ in range(2):
                assert (await shop.send(f"/orders?item={number}", key=f"warming-up-{number:016}")).status == 201
        key = str(uuid4())  # as clients send it: a counter is also reported
        with counted() as first:
            assert (await shop.send("/orders?item=tea", key=key)).status == 201
        with counted() as again:
            assert (await shop.send("/orders?item=tea", key=key)).replayed
    new, replay = BUDGETS[kind]
    assert first.entries <= new, first.report()
    assert again.entries <= replay, again.report()


async def requested(app: Any, item: str, key: str | None) -> int:
    """The status of a request that leaves nothing of its own behind; the harness keeps what it sent."""
    statuses: list[int] = []

    async def receive() -> Any:
        return {"type": "http.request", "body": b"", "more_body": False}

    async def send(message: Any) -> None:
        statuses.append(message.get("status"))

    scope = {
        "type": "http",
        "method": "POST",
        "path": "/orders",
        "query_string": b"item=" + item.encode(),
        "headers": [] if key is None else [(b"idempotency-key", key.encode())],
    }
    await app(scope, receive, send)
    return statuses[0]


@pytest.mark.parametrize("kind", ["asyncpg", "psycopg"])
@pytest.mark.parametrize("sent", ["new", "again", "unkeyed"])
async def test_requests_leave_no_reference_cycles(sent: str, database: Any) -> None:
    """A circle of objects per request is found only by looking through all of them, again and again."""
    async with ordering(database, require_key=False).open() as shop:
        for number in range(4):
            item = "tea" if sent == "again" else str(number)
            key = None if sent == "unkeyed" else f"{sent}-{item:>020}"
            if number == 3:  # what the first ones leave is for all of them
                gc.collect()
                gc.disable()
                gc.set_debug(gc.DEBUG_SAVEALL)
            try:
                assert await requested(shop.app, item, key) == 201
            finally:
                if number == 3:
                    gc.collect()
                    left = [one for one in gc.garbage if type(one).__module__.startswith("oncekey")]
                    gc.set_debug(0)
                    gc.garbage.clear()
                    gc.enable()
    assert left == []


@pytest.mark.parametrize("kind", ["asyncpg", "psycopg"])
async def test_postgres_messages_per_request_stay_within_the_budget(kind: str, postgres_dsn: str) -> None:
    with CuttingProxy.before(postgres_dsn) as proxy:
        direct = PostgresDatabase(postgres_dsn, kind)
        database = PostgresDatabase.__new__(PostgresDatabase)
        database.dsn, database.package = direct.dsn, kind
        database.url = direct.url.replace(
            postgres_dsn.split("://")[1], through(postgres_dsn, proxy.port).split("://")[1]
        )
        async with ordering(database).open() as shop:
            for number in range(3):
                for _ in range(2):  # asyncpg asks the server to prepare what it has not said before
                    await shop.send(f"/orders?item={number}", key=f"warming-up-{number:016}")
            key = new_key()
            proxy.count()
            assert (await shop.send("/orders?item=tea", key=key)).status == 201
            said = [message for message, _ in proxy.messages]
            assert len(said) == 3, said
            proxy.count()
            assert (await shop.send("/orders?item=tea", key=key)).replayed
            assert len(proxy.messages) == 1
            # Another process has not settled the key: it meets the record under the lock.
            (installation,) = shop.once._installed.values()
            runtime, site = installation.runtime_and_site()
            for _ in range(2):  # the first one prepares
                site.settled_keys.known.clear()
                proxy.count()
                assert (await shop.send("/orders?item=tea", key=key)).replayed
                assert await runtime.running_work.wait(PATIENCE)  # for the ROLLBACK, which no client waits for
            # The response came with the first one. A ROLLBACK of the turn before may be seen here: psycopg reads the
            # reply to it when it uses the connection again.
            said = [message for message, _ in proxy.messages if b"BEGIN" in message or b"ROLLBACK" not in message]
            assert len(said) == 1, proxy.messages
