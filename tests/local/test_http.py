"""LOCAL in one commit as a client sees it: `async def` and `def`, through both packages (F12, F15-F21, P7)."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from http import HTTPStatus
from typing import Any

import psycopg
import pytest
from fastapi import FastAPI, HTTPException
from fastapi.responses import JSONResponse

from frameworks.realshop import PostgresDatabase, RealShop
from frameworks.shop import new_key, tenant_of
from harness.asgi import Caller, until
from harness.dsn import through
from harness.patience import PATIENCE
from harness.proxy import Proxy
from local.databases import locks_held, rows
from oncekey.core.model import LOCAL, OUTBOX
from oncekey.core.policy import Policy
from oncekey.engine.operation import Operation, SyncOperation
from oncekey.once import Once

WAYS = ("asyncpg", "psycopg", "def")
IN_PROGRESS = (409, "idempotency_key_in_progress")
REUSED = (422, "idempotency_key_reused_with_different_payload")


class Shop(RealShop):
    """A shop whose handler can be `async def` or `def`; it stands still where a test wants it to."""

    def __init__(self, way: str, dsn: str, *, url: str | None = None, **options: Any) -> None:
        database = PostgresDatabase(dsn, "psycopg" if way == "def" else way, pool_size=options.pop("pool_size", 6))
        if url is not None:
            database.url = url.replace("postgresql://", f"postgresql+{database.package}://")
        super().__init__(database, policy=options.pop("policy", None))
        self.inside: Callable[[Any], Any] = lambda _: None
        self.blocking = way == "def"
        handler = self._blocking() if self.blocking else self._async()
        self.app.post("/orders", status_code=201)(self.once.protect(effects=LOCAL, **options)(handler))

    def _async(self) -> Any:
        async def create(op: Operation, item: str = "tea", way: str = "", status: int = 201) -> Any:
            self.runs.append(op.attempt)
            await self.database.insert(op.connection, item)
            held_up = self.inside(op)
            if asyncio.iscoroutine(held_up):
                await held_up
            return ended(item, way, status)

        return create

    def _blocking(self) -> Any:
        def create(op: SyncOperation, item: str = "tea", way: str = "", status: int = 201) -> Any:
            self.runs.append(op.attempt)
            self.database.insert_blocking(op.connection, item)
            self.inside(op)
            return ended(item, way, status)

        return create

    @contextlib.asynccontextmanager
    async def busy(self, **request: Any) -> AsyncIterator[asyncio.Task[Any]]:
        """While a request is in its handler; it ends with the block."""
        free, go_on = threading.Event(), asyncio.Event()
        there: list[bool] = []

        def stand_still(_: Any) -> Any:
            there.append(True)
            return free.wait(PATIENCE) if self.blocking else go_on.wait()

        self.inside = stand_still
        task = asyncio.create_task(self.send(**request))
        await until(lambda: there)
        self.inside = lambda _: None
        try:
            yield task
        finally:
            free.set()
            go_on.set()
            await task


def ended(item: str, way: str, status: int) -> Any:
    if way == "raise":
        raise HTTPException(status)
    if way == "crash":
        raise RuntimeError
    return JSONResponse({"item": item}, status_code=status)


@pytest.fixture(params=WAYS)
def way(request: pytest.FixtureRequest) -> str:
    return str(request.param)


async def test_running_request_holds_a_lock_and_no_row(way: str, tables_dsn: str) -> None:
    # F12, F21, L8, R84
    async with Shop(way, tables_dsn).open() as shop:
        async with shop.busy() as first:
            assert (locks_held(tables_dsn), shop.states) == (1, [])
            again = await shop.send()
            assert (again.status, again.code, again.header("retry-after")) == (*IN_PROGRESS, "1")
            others = await asyncio.gather(*(shop.send("/orders?item=coffee") for _ in range(3)))
            assert [(other.status, other.code) for other in others] == [REUSED] * 3  # R38
        assert (await first).status == 201
        assert (locks_held(tables_dsn), shop.states, shop.rows) == (0, ["completed"], ["tea"])
        assert (await shop.send()).replayed
        assert (await shop.send("/orders?item=coffee")).status == 422


async def test_a_status_may_be_a_member_of_an_enumeration(way: str, tables_dsn: str) -> None:
    # What is written into a message is told apart by its type, and this one is an int only by its class's ancestors.
    async with Shop(way, tables_dsn).open() as shop:

        async def created(op: Operation) -> JSONResponse:
            await shop.database.insert(op.connection, "coffee")
            return JSONResponse({"made": True}, HTTPStatus.CREATED)

        def made(op: SyncOperation) -> JSONResponse:
            shop.database.insert_blocking(op.connection, "coffee")
            return JSONResponse({"made": True}, HTTPStatus.CREATED)

        shop.app.post("/made")(shop.once.protect(effects=LOCAL)(made if way == "def" else created))
        first, again = await shop.send("/made"), await shop.send("/made")
        assert (first.status, again.status, again.replayed, again.body) == (201, 201, True, first.body)
        assert shop.rows == ["coffee"]


async def test_request_writes_one_insert_without_updates(way: str, tables_dsn: str) -> None:
    # design 3: the row is written once, in the transaction of the business
    async with Shop(way, tables_dsn).open() as shop:
        await shop.send()
        same = "SELECT o.xmin = r.xmin, r.version, r.fence FROM orders o, oncekey.record r"
        assert rows(tables_dsn, same) == [(True, 1, 1)]


ENDINGS = [
    ("", 201, True, True),
    ("", 404, True, True),
    ("", 409, True, True),
    ("raise", 409, False, True),
    ("raise", 422, False, True),
    ("", 429, False, False),
    ("raise", 401, False, False),
    ("", 500, False, False),
    ("raise", 503, False, False),
    ("crash", 500, False, False),
]


async def test_each_handler_ending_keeps_or_drops_rows_and_response(way: str, tables_dsn: str) -> None:
    # F17, L6: returned commits, raised rolls back, and what is not stored leaves nothing
    async with Shop(way, tables_dsn).open() as shop:
        for number, (how, status, kept, stored) in enumerate(ENDINGS):
            key, target = new_key(), f"/orders?item=i{number}&way={how}&status={status}"
            replies = [await shop.send(target, key=key) for _ in range(2)]
            assert [(reply.status, reply.replayed) for reply in replies] == [(status, False), (status, stored)], how
            assert (f"i{number}" in shop.rows) is kept
        assert shop.states == ["completed"] * sum(stored for *_, stored in ENDINGS)
        assert set(shop.runs) == {1}  # a run that was rolled back was none
        assert locks_held(tables_dsn) == 0


async def test_a_failed_run_is_simply_run_again(way: str, tables_dsn: str) -> None:
    # R104: a 500 in LOCAL is rolled back
    async with Shop(way, tables_dsn).open() as shop:
        fails = [True]

        def inside(_: Any) -> None:
            if fails.pop() if fails else False:
                raise RuntimeError

        shop.inside = inside
        assert [(await shop.send()).status for _ in range(3)] == [500, 201, 201]
        assert (shop.rows, len(shop.runs)) == (["tea"], 2)


async def test_a_retryable_record_of_another_version_is_completed(way: str, tables_dsn: str) -> None:
    # L3, F14: rolling deploy, the version before claimed first
    async with Shop(way, tables_dsn).open() as shop:
        await shop.send()
        change = (
            "UPDATE oncekey.record SET state = 'failed_retryable', outcome = NULL, response_status = NULL, "
            "response_headers = NULL, response_body = NULL, response_schema = NULL, finished_at = NULL, "
            "last_error = 'x'"
        )
        rows(tables_dsn, f"{change}; DELETE FROM orders")
        assert ((await shop.send()).status, shop.runs, shop.rows) == (201, [1, 2], ["tea"])
        assert rows(tables_dsn, "SELECT state, fence, attempts FROM oncekey.record") == [("completed", 2, 2)]
        assert (await shop.send()).replayed


async def test_a_stale_claim_of_another_version_is_taken_over(way: str, tables_dsn: str) -> None:
    # L3: it follows its own way, claim first
    async with Shop(way, tables_dsn).open() as shop:
        await shop.send()
        change = (
            "UPDATE oncekey.record SET state = 'in_progress', outcome = NULL, response_status = NULL, owner = 'gone', "
            "response_headers = NULL, response_body = NULL, response_schema = NULL, finished_at = NULL, "
            "lease_until = {}"
        )
        rows(tables_dsn, f"{change.format('9' * 16)}; DELETE FROM orders")
        assert ((await shop.send()).status, shop.rows) == (409, [])
        rows(tables_dsn, change.format(1))
        assert ((await shop.send()).status, shop.runs, shop.rows) == (201, [1, 2], ["tea"])
        assert (await shop.send()).replayed


async def test_a_waiter_holds_no_connection(way: str, tables_dsn: str) -> None:
    # L8, R82: more waiters than connections
    async with Shop(way, tables_dsn, on_in_progress="wait").open() as shop:
        async with shop.busy() as first:
            waiters = [asyncio.create_task(shop.send()) for _ in range(20)]
            other = await shop.send("/orders?item=coffee", key=new_key())
            assert other.status == 201
            assert not any(waiter.done() for waiter in waiters)
        replies = await asyncio.gather(first, *waiters)
        assert {(reply.status, reply.body) for reply in replies} == {(201, b'{"item":"tea"}')}
        assert len(shop.runs) == 2


async def test_mismatch_with_a_running_key_returns_422_at_once(way: str, tables_dsn: str) -> None:
    # R38, C8, L8: also where the same request would wait, and where no connection is left
    async with Shop(way, tables_dsn, on_in_progress="wait", wait_max=60, pool_size=2).open() as shop:
        async with shop.busy() as first:
            async with asyncio.timeout(PATIENCE):
                replies = [await shop.send("/orders?item=coffee") for _ in range(2)]
            assert [(reply.status, reply.code) for reply in replies] == [REUSED] * 2
        assert ((await first).status, shop.rows) == (201, ["tea"])


async def test_replay_succeeds_while_handlers_hold_all_connections(way: str, tables_dsn: str) -> None:
    # R69: a replay and a duplicate need no place among the handlers
    async with Shop(way, tables_dsn, pool_size=2).open() as shop:
        known = new_key()
        assert (await shop.send("/orders?item=coffee", key=known)).status == 201
        async with shop.busy():
            replies = await asyncio.gather(
                shop.send("/orders?item=coffee", key=known), shop.send(), shop.send(key=new_key())
            )
            assert [reply.status for reply in replies] == [201, 409, 503]
            assert replies[0].replayed
        assert shop.rows == ["coffee", "tea"]


async def test_foreign_advisory_lock_on_the_key_returns_409(way: str, tables_dsn: str) -> None:
    # F19: a collision, or the application's own lock
    async with Shop(way, tables_dsn).open() as shop:
        seen: list[int] = []

        def look(_: Any) -> None:
            pair = "SELECT (classid::bigint << 32 | objid::bigint)::bigint FROM pg_locks WHERE locktype = 'advisory'"
            seen.extend(number for (number,) in rows(tables_dsn, f"{pair} AND objsubid = 1"))

        shop.inside = look
        await shop.send("/orders?way=crash")
        with psycopg.connect(tables_dsn) as other:
            other.execute("SELECT pg_advisory_xact_lock(%s)", seen)
            reply = await shop.send()
            assert ((reply.status, reply.code), shop.rows) == (IN_PROGRESS, [])
        assert ((await shop.send()).status, shop.rows) == (201, ["tea"])


async def test_nested_request_with_the_same_key_returns_409(tables_dsn: str) -> None:
    # F18, L7: the lock is not re-entrant for us, because each operation has a connection of its own
    shop = Shop("asyncpg", tables_dsn)
    inner: list[Any] = []

    async def nested(_: Any) -> None:
        shop.inside = lambda _: None
        inner.append(await shop.send())
        inner.append(await shop.send("/orders?item=coffee", key=new_key()))

    async with shop.open():
        shop.inside = nested
        assert (await shop.send()).status == 201
        assert [(reply.status, reply.code) for reply in inner] == [IN_PROGRESS, (201, None)]
        assert shop.rows == ["coffee", "tea"]


async def test_nested_request_with_another_key_is_independent(tables_dsn: str) -> None:
    # L7: an outer failure does not undo what the inner one has acknowledged
    shop = Shop("asyncpg", tables_dsn)

    async def nested(_: Any) -> None:
        shop.inside = lambda _: None
        assert (await shop.send("/orders?item=coffee", key=new_key())).status == 201
        raise HTTPException(500)

    async with shop.open():
        shop.inside = nested
        assert (await shop.send()).status == 500
        assert shop.rows == ["coffee"]


async def test_a_savepoint_of_the_handler_does_not_free_the_key(tables_dsn: str) -> None:
    # F18: the lock was taken before it
    shop = Shop("asyncpg", tables_dsn)

    async def inside(op: Any) -> None:
        savepoint = op.connection.transaction()
        await savepoint.start()
        await savepoint.rollback()
        assert locks_held(tables_dsn) == 1

    async with shop.open():
        shop.inside = inside
        assert ((await shop.send()).status, shop.rows) == (201, ["tea"])


@pytest.fixture
def proxy(tables_dsn: str) -> Iterator[Proxy]:
    with Proxy.before(tables_dsn) as proxy:
        yield proxy


def far(way: str, dsn: str, proxy: Proxy) -> Shop:
    return Shop(way, dsn, url=through(dsn, proxy.port))


async def test_lost_commit_reply_is_resolved_from_the_record(way: str, tables_dsn: str, proxy: Proxy) -> None:
    # F8, P7
    async with far(way, tables_dsn, proxy).open() as shop:
        lost: list[Any] = []
        shop.inside = lambda _: lost.append(proxy.lose_reply(b"COMMIT", b"COMMIT"))
        reply = await shop.send()
        assert lost[0].is_set()
        assert (reply.status, reply.body, shop.rows) == (201, b'{"item":"tea"}', ["tea"])
        assert len(shop.runs) == 1


async def test_a_commit_that_never_arrived_is_proven_rolled_back(way: str, tables_dsn: str, proxy: Proxy) -> None:
    # F8, P7: the lock is free and there is no row
    async with far(way, tables_dsn, proxy).open() as shop:
        shop.inside = lambda _: proxy.lose_request(b"COMMIT")
        reply = await shop.send()
        assert (reply.status, reply.code) in [(503, "idempotency_store_unavailable"), IN_PROGRESS]
        assert reply.header("retry-after") == "1"
        shop.inside = lambda _: None
        await until(lambda: locks_held(tables_dsn) == 0)
        assert ((await shop.send()).status, shop.rows) == (201, ["tea"])


async def test_pending_commit_is_not_treated_as_rollback(way: str, tables_dsn: str, proxy: Proxy) -> None:
    # F8, P7: an absent row says nothing while the lock is not free
    async with far(way, tables_dsn, proxy).open() as shop:
        late: list[Any] = []
        shop.inside = lambda _: late.append(proxy.postpone(b"COMMIT", b"COMMIT"))
        replies = [await shop.send(), await shop.send()]
        assert [(reply.status, reply.code) for reply in replies] == [IN_PROGRESS] * 2
        await asyncio.to_thread(late[0].deliver)
        again = await shop.send()
        assert (again.status, again.replayed, shop.rows, len(shop.runs)) == (201, True, ["tea"], 1)


async def test_transaction_terminated_by_the_server_returns_503(way: str, tables_dsn: str) -> None:
    # F15, L4: the lease is the server's time-out
    async with Shop(way, tables_dsn).open() as shop:
        killing = (
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity "
            "WHERE datname = current_database() AND state = 'idle in transaction' AND pid <> pg_backend_pid()"
        )
        shop.inside = lambda _: rows(tables_dsn, killing) and None
        reply = await shop.send()
        assert (reply.status, shop.rows, shop.states) == (503, [], [])
        shop.inside = lambda _: None
        assert ((await shop.send()).status, shop.rows) == (201, ["tea"])


async def test_deferred_call_commits_with_the_rows(tables_dsn: str) -> None:
    # row 3, R123: record, parcel and business rows are one transaction
    database = PostgresDatabase(tables_dsn, "asyncpg")
    shop = RealShop(database)

    @shop.app.post("/orders")
    @shop.once.protect(effects=OUTBOX)
    async def create(op: Operation, fails: bool = False, status: int = 200) -> Any:
        await database.insert(op.connection, "tea")
        if status == 200:
            op.defer("transfer", {"cents": 7})
        op.emit("told", {})
        if fails:
            raise RuntimeError
        return JSONResponse({}, status_code=status)

    async with shop.open():
        assert (await shop.send("/orders?fails=1", key=new_key())).status == 500
        assert (shop.rows, shop.states, rows(tables_dsn, "SELECT 1 FROM oncekey.outbox")) == ([], [], [])
        assert [(await shop.send()).status for _ in range(2)] == [202, 202]
        together = (
            "SELECT DISTINCT o.xmin = r.xmin AND p.xmin = r.xmin FROM orders o, oncekey.record r, oncekey.outbox p"
        )
        assert rows(tables_dsn, together) == [(True,)]
        kinds = "SELECT kind, p.incarnation = r.incarnation FROM oncekey.outbox p, oncekey.record r ORDER BY 1"
        assert rows(tables_dsn, kinds) == [("defer", True), ("emit", True)]
        assert (shop.states, shop.rows) == (["pending"], ["tea"])
        database.execute("DELETE FROM orders")
        declined = [await shop.send("/orders?status=402", key=new_key()) for _ in range(1)]
        assert ([reply.status for reply in declined], shop.states) == ([402], ["completed", "pending"])


async def test_status_resource_shows_a_running_request_without_row(way: str, tables_dsn: str) -> None:
    # F21, L8
    shop = Shop(way, tables_dsn)
    app = FastAPI()
    once = Once(shop.database.url, policy=Policy())
    once.install(app, tenant=tenant_of, status="/keys")
    key = new_key()
    path = f"/keys/{key}"
    async with shop.open(), once.lifespan(app):
        assert (await Caller(app, "GET", path).run()).status == 404
        async with shop.busy(key=key):
            seen = await Caller(app, "GET", path).run()
            assert (seen.status, seen.json(), seen.header("retry-after")) == (
                200,
                {"key": key, "state": "in_progress"},
                "1",
            )
        seen = await Caller(app, "GET", path).run()
        assert (seen.status, seen.json()["state"]) == (200, "completed")
