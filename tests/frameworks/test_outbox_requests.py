"""OUTBOX and `op.emit` on the request's side: what is written with the rows, and what is answered before the call."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import psycopg
import pytest
from fastapi import FastAPI, HTTPException
from fastapi.responses import JSONResponse

from frameworks.realshop import PostgresDatabase, SqliteFile
from frameworks.shop import KEY, new_key, tenant_of
from harness.asgi import Caller, Reply, until
from harness.databases import DatabaseServer
from harness.patience import PATIENCE
from harness.tables import database_with_tables, empty_tables
from oncekey.core.errors import ConfigurationError
from oncekey.core.model import HOUR, INLINE, LOCAL, OUTBOX
from oncekey.core.policy import Policy
from oncekey.core.topics import Message
from oncekey.core.topics import Reply as Delivered
from oncekey.engine.operation import Operation, SyncOperation
from oncekey.once import Once
from oncekey.testing.claims import ManualClock
from oncekey.workers.service import ClockWatch, Service
from oncekey.workers.tasks import tasks_for
from oncekey.workers.upkeep import Reaper
from phased.bank import ClockedOnce

WORLDS = [("sqlite", False), ("sqlite", True), ("asyncpg", False), ("psycopg", True)]
ACCEPTED = 202


class Shop:
    """A shop whose handler does what the request says, and whose worker ships."""

    def __init__(
        self, database: Any, effects: Any, *, blocking: bool, once: Once | None = None, **options: Any
    ) -> None:
        self.database = database
        self.blocking = blocking
        self.clock = ManualClock()
        self.once = once or ClockedOnce(database.url, self.clock, Policy())
        self.app = FastAPI()
        self.once.install(self.app, tenant=tenant_of)
        self.runs = 0
        self.shipped: list[Message] = []
        self.may_ship = threading.Event()
        self.may_ship.set()
        self.once.topic("ship")(self._ship)
        self.once.topic("tell")(self.shipped.append)
        route = self.app.post("/orders", status_code=201)
        protect = self.once.protect(effects=effects, operation="order", **options)
        route(protect(self._sync() if blocking else self._async()))

    def _ship(self, message: Message) -> Any:
        self.shipped.append(message)
        assert self.may_ship.wait(PATIENCE)
        return Delivered(201, {"shipped": message.payload["item"]}, (("Location", "/parcels/1"),), provider_id="p1")

    def _async(self) -> Any:
        async def order(op: Operation, item: str = "tea", way: str = "defer", status: int = 201) -> Any:
            self.runs += 1
            await self.database.insert(op.connection, item)
            return self._end(op, item, way, status)

        return order

    def _sync(self) -> Any:
        def order(op: SyncOperation, item: str = "tea", way: str = "defer", status: int = 201) -> Any:
            self.runs += 1
            self.database.insert_blocking(op.connection, item)
            return self._end(op, item, way, status)

        return order

    @staticmethod
    def _end(op: Any, item: str, way: str, status: int) -> Any:
        for what in way.split(","):
            if what == "defer":
                op.defer("ship", {"item": item})
            if what == "emit":
                op.emit("tell", {"item": item}, order_by="orders")
            if what == "swallow":
                with pytest.raises(ConfigurationError):
                    op.defer("ship", {})
            if what == "raise":
                raise HTTPException(status)
        return JSONResponse({"item": item}, status_code=status)

    @asynccontextmanager
    async def open(self) -> AsyncIterator[Shop]:
        async with self.once.lifespan(self.app):
            yield self

    async def send(self, query: str = "", *, key: str = KEY, method: str = "POST", path: str = "/orders") -> Reply:
        return await Caller(self.app, method, f"{path}?{query}", headers=[("Idempotency-Key", key)]).run()

    async def work(self) -> int:
        """Let a worker do what is due."""
        return (await Service(tasks_for(self.once)).once()).done

    async def status(self) -> Any:
        """What the status resource has about the key."""
        reply = await self.send(method="GET", path=f"/idempotency-keys/{KEY}")
        assert reply.status == 200
        return reply.json()

    @property
    def rows(self) -> list[str]:
        return sorted(item for (item,) in self.database.execute("SELECT item FROM orders"))

    @property
    def states(self) -> list[str]:
        return sorted(state for (state,) in self.database.execute(f"SELECT state FROM {self.database.records}"))

    @property
    def parcels(self) -> list[tuple[str, Any]]:
        table = self.database.records.replace("record", "outbox")
        found = self.database.execute(f"SELECT aggregatetype, payload FROM {table}")
        parcels = [(topic, payload if isinstance(payload, dict) else json.loads(payload)) for topic, payload in found]
        return sorted(parcels, key=str)


@pytest.fixture(scope="module")
def shared_dsn(postgres_server: DatabaseServer) -> Iterator[str]:
    """One database for all, emptied by each."""
    with database_with_tables(postgres_server, "requests") as dsn:
        yield dsn


@pytest.fixture(params=WORLDS, ids=lambda world: f"{world[0]}-{'def' if world[1] else 'async'}")
def world(request: pytest.FixtureRequest, tmp_path: Path) -> Any:
    package, blocking = request.param
    if package == "sqlite":
        return SqliteFile(tmp_path / "shop.db"), blocking
    dsn = empty_tables(request.getfixturevalue("shared_dsn"))
    with psycopg.connect(dsn, autocommit=True) as connection:
        connection.execute("DROP TABLE IF EXISTS orders")
    return PostgresDatabase(dsn, package, pool_size=3), blocking


def shop_of(world: Any, effects: Any) -> Shop:
    database, blocking = world
    return Shop(database, effects, blocking=blocking)


async def test_duplicates_receive_the_same_202_response(world: Any) -> None:
    # R44, R83, R122, R123, R124, O1: the rows and the parcel are committed, and no provider was called
    async with shop_of(world, OUTBOX).open() as shop:
        replies = [await shop.send() for _ in range(3)]
        assert {(reply.status, reply.body) for reply in replies} == {(ACCEPTED, replies[0].body)}
        for reply in replies:
            assert reply.header("location") == f"/idempotency-keys/{KEY}"
            assert reply.header("retry-after") == "1"
        assert {reply.body for reply in replies} == {b'{"item":"tea"}'}  # what the handler returned
        assert (shop.rows, shop.parcels, shop.runs) == (["tea"], [("ship", {"item": "tea"})], 1)
        assert (shop.states, shop.shipped) == (["pending"], [])
        assert (await shop.send("item=coffee")).status == 422
        assert (await shop.status())["state"] == "pending"


async def test_a_running_deferred_call_is_reported_as_in_progress(world: Any) -> None:
    # R83, R134
    async with shop_of(world, OUTBOX).open() as shop:
        await shop.send()
        shop.may_ship.clear()
        working = asyncio.create_task(shop.work())
        try:
            await until(lambda: shop.shipped)
            assert (await shop.status())["state"] == "in_progress"
            assert (await shop.send()).status == ACCEPTED
        finally:
            shop.may_ship.set()
        assert await working == 1
        status = await shop.status()
        assert (status["state"], status["response"]["status"]) == ("completed", 201)


async def test_an_abandoned_deferred_call_is_reported_as_failed(world: Any) -> None:
    # R84, R112: not 404
    async with shop_of(world, OUTBOX).open() as shop:
        await shop.send()
        shop.clock.advance(25 * HOUR)
        engine, watch = shop.once.asynchronous(), ClockWatch(wall=shop.clock, boot=shop.clock)
        reaper = Reaper(engine.store.upkeep, engine.store.audit, engine.driver.run, Policy(), watch=watch)
        assert await reaper.run_once() == 1
        status = await shop.status()
        assert (status["state"], status["outcome"], status["response"]["status"]) == ("completed", "failure", 408)
        assert (shop.parcels, shop.shipped) == ([], [])


async def test_a_retry_never_runs_a_pending_handler_again(world: Any) -> None:
    # F29, O2, P6: neither after its lease nor after its expiry
    async with shop_of(world, OUTBOX).open() as shop:
        await shop.send()
        for hours in (1, 30, 300):
            shop.clock.advance(hours * HOUR)
            assert (await shop.send()).status == ACCEPTED
        assert (shop.rows, len(shop.parcels), shop.runs) == (["tea"], 1, 1)


async def test_the_deferred_calls_response_is_replayed(world: Any) -> None:
    # R132, R87: the first caller's next request is a replay of the call's own answer
    async with shop_of(world, OUTBOX).open() as shop:
        await shop.send()
        assert await shop.work() == 1
        reply = await shop.send()
        assert (reply.status, reply.json(), reply.header("location"), reply.replayed) == (
            201,
            {"shipped": "tea"},
            "/parcels/1",
            True,
        )
        assert (shop.states, shop.parcels, shop.runs, len(shop.shipped)) == (["completed"], [], 1, 1)
        assert await shop.work() == 0


async def test_a_retry_after_record_loss_keeps_the_downstream_key(world: Any) -> None:
    # D1, F38, R126
    async with shop_of(world, OUTBOX).open() as shop:
        await shop.send()
        await shop.work()
        shop.database.execute(f"DELETE FROM {shop.database.records}")
        shop.database.execute("DELETE FROM orders")
        await shop.send()
        await shop.work()
        first, second = shop.shipped
        assert first.downstream_key == second.downstream_key
        assert first.incarnation != second.incarnation


@pytest.mark.parametrize(("way", "runs"), [("", 1), ("emit", 1), ("defer,defer", 1)])
async def test_an_outbox_success_must_defer_exactly_once(
    world: Any, way: str, runs: int, caplog: pytest.LogCaptureFixture
) -> None:
    # O1: with none or two nobody could say what the answer is
    async with shop_of(world, OUTBOX).open() as shop:
        reply = await shop.send(f"way={way}")
        assert (reply.status, shop.rows, shop.parcels, shop.runs) == (500, [], [], runs)
        assert (await shop.send(f"way={way}")).status == 500
        assert shop.runs == 2
        if way != "defer,defer":
            assert (reply.code, "op.defer exactly once" in caplog.text) == ("idempotency_execution_failed", True)


async def test_a_second_defer_raises_and_the_first_is_kept(world: Any) -> None:
    async with shop_of(world, OUTBOX).open() as shop:
        assert (await shop.send("way=defer,swallow")).status == ACCEPTED
        assert shop.parcels == [("ship", {"item": "tea"})]


ENDINGS = [
    # how it ends, its status, whether its rows are there, whether a retry runs again
    ("", 402, True, False),
    ("raise", 402, False, False),
    ("defer,raise", 402, False, False),
    ("defer,raise", 429, False, True),
    ("defer,raise", 503, False, True),
]


async def test_an_unsuccessful_handler_defers_nothing(world: Any) -> None:
    # L6, R123: roll-back leaves no parcel, and a final no is stored
    async with shop_of(world, OUTBOX).open() as shop:
        for number, (way, status, kept, again) in enumerate(ENDINGS):
            key, item, before = new_key(), f"item {number}", shop.runs
            replies = [await shop.send(f"item={item}&way={way}&status={status}", key=key) for _ in range(2)]
            assert [reply.status for reply in replies] == [status, status], (way, status)
            assert replies[1].replayed is not again
            assert shop.runs - before == (2 if again else 1)
            assert (item in shop.rows) is kept
        assert shop.parcels == []


async def test_a_message_commits_with_its_rows(world: Any) -> None:
    # R123: LOCAL
    async with shop_of(world, LOCAL).open() as shop:
        assert (await shop.send("way=emit,emit")).status == 201
        assert (await shop.send("way=emit,emit")).replayed
        assert (shop.rows, shop.parcels) == (["tea"], [("tell", {"item": "tea"})] * 2)
        assert (await shop.send("item=milk&way=emit,raise&status=402", key=new_key())).status == 402
        assert (await shop.send("item=salt&way=emit,raise&status=503", key=new_key())).status == 503
        assert (shop.rows, len(shop.parcels)) == (["tea"], 2)
        while await shop.work():
            pass
        assert [message.payload for message in shop.shipped] == [{"item": "tea"}] * 2
        assert len({message.downstream_key for message in shop.shipped}) == 2


async def test_a_keyless_message_commits_with_its_rows(world: Any) -> None:
    # R123: on a route where a key may be missing
    database, blocking = world
    shop = Shop(database, LOCAL, blocking=blocking, require_key=False)
    async with shop.open():
        for _ in range(2):
            assert (await Caller(shop.app, "POST", f"/orders?way=emit&item={shop.runs}").run()).status == 201
        await Caller(shop.app, "POST", "/orders?way=emit,raise&item=salt&status=503").run()
        assert (shop.rows, shop.states, len(shop.parcels)) == (["0", "1"], [], 2)
        while await shop.work():
            pass
        assert len({message.downstream_key for message in shop.shipped}) == 2


async def test_an_outbox_handler_may_emit_and_defer(world: Any) -> None:
    async with shop_of(world, OUTBOX).open() as shop:
        assert (await shop.send("way=emit,defer")).status == ACCEPTED
        assert [topic for topic, _ in shop.parcels] == ["ship", "tell"]
        while await shop.work():
            pass
        assert (await shop.send("way=emit,defer")).status == 201
        assert sorted(message.topic for message in shop.shipped) == ["ship", "tell"]


async def test_defer_in_a_local_handler_rolls_back(world: Any) -> None:
    async with shop_of(world, LOCAL).open() as shop:
        assert (await shop.send("way=defer")).status == 500
        assert (shop.rows, shop.parcels) == ([], [])


async def test_emit_and_defer_raise_in_an_inline_handler(tmp_path: Path) -> None:
    once = Once(f"sqlite:///{tmp_path / 'shop.db'}", migrate=True)
    app = FastAPI()
    once.install(app, tenant=tenant_of)
    said: list[str] = []

    @app.post("/orders")
    @once.protect(effects=INLINE)
    async def order(op: Operation) -> None:
        for wrong in (lambda: op.emit("tell", {}), lambda: op.defer("ship", {})):
            try:
                wrong()
            except ConfigurationError as error:
                said.append(str(error))

    async with once.lifespan(app):
        await Caller(app, "POST", "/orders", headers=[("Idempotency-Key", KEY)]).run()
    assert ["op.emit writes" in said[0], "op.defer is for" in said[1]] == [True, True]


async def test_in_process_workers_make_deferred_calls(world: Any) -> None:
    # one process is enough: a request wakes them, and they end with it
    database, blocking = world
    once = Once(database.url, migrate=True, workers=True)
    async with Shop(database, OUTBOX, blocking=blocking, once=once).open() as shop:
        assert (await shop.send()).status == ACCEPTED
        await until(lambda: shop.states == ["completed"])
        assert (await shop.send()).json() == {"shipped": "tea"}
    assert not [task for task in asyncio.all_tasks() if task.get_name().startswith("oncekey")]
    assert len(shop.shipped) == 1
