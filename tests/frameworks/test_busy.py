"""A pool or a writer that is busy is not an outage: no breaker opens, and what is stored is served all the same."""

from __future__ import annotations

import asyncio
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from frameworks.realshop import PostgresDatabase, RealShop, SqliteFile
from frameworks.shop import Shop, new_key
from frameworks.sqlshop import Order, OrderIn, SqlShop, opened
from harness.asgi import until
from oncekey.core.errors import StoreBusyError
from oncekey.core.model import INLINE, LOCAL
from oncekey.databases.slots import AsyncSlots, Slots
from oncekey.databases.sqlite.files import Writer
from oncekey.databases.sqlite.lane import Lane
from oncekey.engine import local, shell
from oncekey.engine.local import peek
from oncekey.engine.operation import Operation, SyncOperation
from oncekey.engine.run import FAILURES


async def busy(_: Any) -> Any:
    """All connections are lent out."""
    raise StoreBusyError("all connections are in use")


@pytest.fixture
def waits(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Who had to wait for a place in a pool or for the turn to write."""
    waited: list[str] = []

    def watched(kind: Any, name: str, full: Any) -> None:
        original = getattr(kind, name)

        def watching(self: Any, *args: Any) -> Any:
            if full(self):
                waited.append(kind.__name__)
            return original(self, *args)

        monkeypatch.setattr(kind, name, watching)

    watched(Slots, "acquire", lambda slots: slots.full)
    watched(AsyncSlots, "acquire", lambda slots: slots.full)
    watched(Lane, "wait", lambda lane: lane.taken)
    watched(Writer, "take", lambda writer: writer.busy)
    return waited


@pytest.mark.parametrize(("effects", "fault"), [(LOCAL, "begin"), (LOCAL, "claim"), (INLINE, "claim")])
async def test_a_busy_pool_opens_no_breaker(effects: Any, fault: str, caplog: pytest.LogCaptureFixture) -> None:
    # R110, R111: the breaker is for a store that is not there
    shop = Shop()

    @shop.post(effects=effects)
    async def create() -> None:
        shop.runs.append(1)

    shop.ledger.faults[fault].extend([busy] * (FAILURES + 1))
    for _ in range(FAILURES + 1):
        reply = await shop.send("/orders", key=new_key())
        assert (reply.status, reply.code) == (503, "idempotency_store_unavailable")
        assert reply.header("retry-after") == "1"
    (installation,) = shop.once._installed.values()
    assert installation.breaker.closed
    assert shop.runs == []
    assert (await shop.send("/orders", key=new_key())).status == 200


async def test_a_busy_pool_does_not_close_an_open_breaker() -> None:
    # R111
    shop = Shop()

    @shop.post(effects=INLINE)
    async def create() -> None: ...

    (installation,) = shop.once._installed.values()
    for _ in range(FAILURES):
        installation.breaker.failed()
    shop.ledger.faults["claim"].append(busy)
    assert (await shop.send("/orders")).status == 503
    assert not installation.breaker.closed


@pytest.mark.parametrize("kind", ["asyncpg", "psycopg", "psycopg-def", "sqlite", "sqlite-def"])
async def test_replays_are_served_while_every_connection_is_busy(
    kind: str, request: pytest.FixtureRequest, tmp_path: Path, waits: list[str]
) -> None:
    # R96, R110: replays, mismatches and duplicates in flight look on the claims' share of the pool
    package, _, blocking = kind.partition("-")
    if package == "sqlite":
        shop = RealShop(SqliteFile(tmp_path / "shop.db"))
    else:
        shop = RealShop(PostgresDatabase(request.getfixturevalue("tables_dsn"), package, pool_size=2))
    entered, go = asyncio.Event(), asyncio.Event()
    loop = asyncio.get_running_loop()

    if blocking:

        @shop.app.post("/orders", status_code=201)
        @shop.once.protect(effects=LOCAL, operation="create")
        def create(op: SyncOperation, item: str = "tea") -> str:
            shop.database.insert_blocking(op.connection, item)
            if item == "slow":
                loop.call_soon_threadsafe(entered.set)
                asyncio.run_coroutine_threadsafe(go.wait(), loop).result(10)
            return item
    else:

        @shop.app.post("/orders", status_code=201)
        @shop.once.protect(effects=LOCAL, operation="create")
        async def create(op: Operation, item: str = "tea") -> str:
            await shop.database.insert(op.connection, item)
            if item == "slow":
                entered.set()
                await go.wait()
            return item

    async with shop.open():
        done, running = new_key(), new_key()
        first = await shop.send(key=done)
        assert first.status == 201
        slow = asyncio.create_task(shop.send("/orders?item=slow", key=running))
        await entered.wait()
        waits.clear()

        again = await shop.send(key=done)
        assert (again.status, again.body, again.replayed) == (201, first.body, True)
        assert (await shop.send("/orders?item=other", key=done)).status == 422
        assert (await shop.send("/orders?item=slow", key=running)).status == 409
        assert (await shop.send("/orders?item=other", key=running)).status == 422  # R38
        assert waits == []
        go.set()
        assert (await slow).status == 201
        assert shop.rows == ["slow", "tea"]


@pytest.mark.parametrize("package", ["asyncpg", "psycopg"])
async def test_queued_requests_send_no_peek_while_the_pool_moves(
    package: str, tables_dsn: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # R110: a place comes free sooner than a look would be answered, so nobody pays for one
    glances: list[Any] = []
    monkeypatch.setattr(local, "peek", lambda *asked: glances.append(asked) or peek(*asked))
    monkeypatch.setattr(shell, "SOON", 30.0)
    shop = RealShop(PostgresDatabase(tables_dsn, package, pool_size=2))
    entered, go = asyncio.Event(), asyncio.Event()

    @shop.app.post("/orders", status_code=201)
    @shop.once.protect(effects=LOCAL)
    async def create(op: Operation, item: str = "tea") -> str:
        await shop.database.insert(op.connection, item)
        entered.set()
        await go.wait()
        return item

    async with shop.open():
        first = asyncio.create_task(shop.send(key=new_key()))
        await entered.wait()
        others = [asyncio.create_task(shop.send(f"/orders?item={number}", key=new_key())) for number in range(3)]
        engine = shop.once.asynchronous()
        (installation,) = shop.once._installed.values()
        runtime, said = installation.runtime_and_site()[0], list[Any]()
        run = runtime._transact
        monkeypatch.setattr(runtime, "_transact", lambda asked: said.append(asked) or run(asked))
        await until(lambda: len(glances) == len(others))  # a look is made ready, and said only if nothing moves
        assert engine.is_full
        go.set()
        assert [reply.status for reply in await asyncio.gather(first, *others)] == [201] * 4
        assert said == []


@pytest.mark.parametrize("blocking", [False, True], ids=["async", "def"])
async def test_locked_sqlite_file_delays_new_keys_but_not_replays(tmp_path: Path, blocking: bool) -> None:
    # R96, R110: nobody here knows which key it writes for
    shop = RealShop(SqliteFile(tmp_path / "shop.db"))

    if blocking:

        @shop.app.post("/orders", status_code=201)
        @shop.once.protect(effects=LOCAL, operation="create")
        def create(op: SyncOperation) -> None:
            shop.database.insert_blocking(op.connection, str(op.key))
    else:

        @shop.app.post("/orders", status_code=201)
        @shop.once.protect(effects=LOCAL, operation="create")
        async def create(op: Operation) -> None:
            await shop.database.insert(op.connection, str(op.key))

    async with shop.open():
        known, unknown = new_key(), new_key()
        assert (await shop.send(key=known)).status == 201
        engine = shop.once.blocking() if blocking else shop.once.asynchronous()
        file = engine.driver.file if blocking else engine.driver._driver.file  # type: ignore[union-attr]
        file.busy_timeout = 0.05
        file.close()
        file._closed = False
        with closing(sqlite3.connect(shop.database.path, isolation_level=None)) as stranger:
            stranger.execute("BEGIN IMMEDIATE")
            assert (await shop.send(key=known)).replayed
            refused = await shop.send(key=unknown)
            assert (refused.status, refused.code) == (503, "idempotency_store_unavailable")
        assert (await shop.send(key=unknown)).status == 201
        assert len(shop.rows) == 2


async def test_replays_are_served_while_every_session_is_busy(tables_dsn: str, waits: list[str]) -> None:
    # R96
    entered, go = asyncio.Event(), asyncio.Event()

    def routes(shop: SqlShop) -> None:
        @shop.post(effects=LOCAL)
        async def create(order: OrderIn, op: Operation) -> None:
            session = await shop.once.session()
            session.add(Order(item=order.item))
            if order.item == "slow":
                entered.set()
                await go.wait()

    async with opened(tables_dsn, "asyncpg", routes, engine={"pool_size": 2, "max_overflow": 0}) as shop:
        done, running = new_key(), new_key()
        assert (await shop.send(key=done)).status == 201
        slow = asyncio.create_task(shop.send({"item": "slow"}, key=running))
        await entered.wait()
        assert (await shop.send(key=done)).replayed
        assert waits == []
        go.set()
        assert (await slow).status == 201
