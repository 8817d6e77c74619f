"""The same promises on real databases: SQLite and PostgreSQL, `async def` and `def`."""

from __future__ import annotations

import asyncio
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from fastapi import HTTPException
from fastapi.responses import JSONResponse

from frameworks.realshop import MariadbDatabase, PostgresDatabase, RealShop, SqliteFile
from frameworks.shop import new_key
from harness.asgi import cancelled_at, until
from harness.patience import PATIENCE
from oncekey.core.errors import TransactionControlError
from oncekey.core.model import INLINE, LOCAL, PHASED
from oncekey.engine.operation import Operation, SyncOperation
from oncekey.engine.shell import Engine
from oncekey.frameworks.asgi import installation as installation_module

KINDS = ["sqlite", "psycopg", "asyncpg", "aiomysql"]


@pytest.fixture(params=KINDS)
def database(request: pytest.FixtureRequest, tmp_path: Path) -> Any:
    return make(request, tmp_path, request.param)


@pytest.fixture(params=["sqlite", "psycopg", "pymysql"])
def blocking_database(request: pytest.FixtureRequest, tmp_path: Path) -> Any:
    return make(request, tmp_path, request.param)


def make(request: pytest.FixtureRequest, tmp_path: Path, kind: str) -> Any:
    if kind == "sqlite":
        return SqliteFile(tmp_path / "shop.db")
    if "mysql" in kind:
        return MariadbDatabase(request.getfixturevalue("mariadb_url"), kind, pool_size=3)
    return PostgresDatabase(request.getfixturevalue("tables_dsn"), kind, pool_size=3)


def ordering(database: Any, **options: Any) -> RealShop:
    """A shop whose handler writes one row and ends as the request says."""
    shop = RealShop(database)

    @shop.app.post("/orders", status_code=201)
    @shop.once.protect(effects=LOCAL, **options)
    async def create(op: Operation, item: str = "tea", way: str = "", status: int = 201) -> Any:
        shop.runs.append(item)
        await database.insert(op.connection, item)
        if way == "raise":
            raise HTTPException(status)
        if way == "crash":
            raise RuntimeError
        return JSONResponse({"item": item}, status_code=status)

    return shop


async def test_retries_replay_and_insert_one_row(database: Any) -> None:
    # R71, R87, R89, R241
    async with ordering(database).open() as shop:
        first = await shop.send()
        again = [await shop.send() for _ in range(3)]
        assert (first.status, {(reply.status, reply.body, reply.replayed) for reply in again}) == (
            201,
            {(201, first.body, True)},
        )
        assert (await shop.send("/orders?item=coffee")).status == 422
        assert (shop.rows, shop.runs, shop.states) == (["tea"], ["tea"], ["completed"])


@pytest.mark.parametrize("blocking", [False, True], ids=["async", "def"])
async def test_a_failed_record_of_other_effects_can_be_retried(blocking_database: Any, blocking: bool) -> None:
    # L3, F14: a deploy changed them; the claim must not wait for the transaction of its own request
    before = RealShop(blocking_database)

    @before.app.post("/orders", status_code=201)
    @before.once.protect(effects=PHASED, operation="create")
    async def phased(op: Operation) -> None:
        raise HTTPException(503)

    async with before.open() as shop:
        assert (await shop.send()).status == 503
        assert shop.states == ["failed_retryable"]
    after = RealShop(blocking_database)
    if blocking:

        @after.app.post("/orders", status_code=201)
        @after.once.protect(effects=LOCAL, operation="create")
        def create(op: SyncOperation) -> None:
            blocking_database.insert_blocking(op.connection, "tea")
    else:

        @after.app.post("/orders", status_code=201)
        @after.once.protect(effects=LOCAL, operation="create")
        async def create(op: Operation) -> None:
            await blocking_database.insert(op.connection, "tea")

    async with after.open() as shop:
        assert (await shop.send()).status == 201
        assert (await shop.send()).replayed
        assert (shop.rows, shop.states) == (["tea"], ["completed"])


async def test_a_replay_survives_a_restart(database: Any) -> None:
    # R74, R75
    async with ordering(database).open() as shop:
        first = await shop.send()
    async with ordering(database).open() as shop:
        again = await shop.send()
        assert (again.status, again.body, again.replayed, shop.runs) == (201, first.body, True, [])


ENDINGS = [
    ("", 201, True, "completed"),
    ("", 402, True, "completed"),
    ("raise", 402, False, "completed"),
    ("raise", 429, False, "failed_retryable"),
    ("", 503, False, "failed_retryable"),
    ("crash", 500, False, "failed_retryable"),
]


async def test_rows_and_record_state_agree_after_every_ending(database: Any) -> None:
    # L6, F17
    async with ordering(database).open() as shop:
        for number, (way, status, kept, state) in enumerate(ENDINGS):
            key, item = new_key(), f"item {number}"
            replies = [await shop.send(f"/orders?item={item}&way={way}&status={status}", key=key) for _ in range(2)]
            assert [reply.status for reply in replies] == [status, status]
            assert [reply.replayed for reply in replies] == [False, state == "completed"]
            assert (item in shop.rows) is kept
        stored = [state for *_, state in ENDINGS if state == "completed"]
        assert shop.states == sorted([*stored, *database.left_by_a_rollback * (len(ENDINGS) - len(stored))])


async def test_a_duplicate_in_flight_receives_409_at_once(database: Any) -> None:
    # R69, R79: not behind the row, and on SQLite not behind the one writer
    shop = RealShop(database)
    go_on = asyncio.Event()

    @shop.app.post("/orders", status_code=201)
    @shop.once.protect(effects=LOCAL)
    async def create(op: Operation) -> str:
        await database.insert(op.connection, "tea")
        shop.runs.append(1)
        await go_on.wait()
        return "done"

    async with shop.open():
        first = asyncio.create_task(shop.send())
        await until(lambda: shop.runs)
        async with asyncio.timeout(PATIENCE):
            replies = await asyncio.gather(*[shop.send() for _ in range(5)])
        assert {(reply.status, reply.code) for reply in replies} == {(409, "idempotency_key_in_progress")}
        go_on.set()
        assert (await first).status == 201
        assert (await shop.send()).replayed
        assert shop.rows == ["tea"]


async def test_twenty_waiting_duplicates_run_one_handler(database: Any) -> None:
    # R62, R63, R241
    async with ordering(database, on_in_progress="wait").open() as shop:
        replies = await asyncio.gather(*[shop.send() for _ in range(20)])
        assert {(reply.status, reply.body) for reply in replies} == {(201, b'{"item":"tea"}')}
        assert sum(not reply.replayed for reply in replies) == 1
        assert (shop.rows, shop.runs) == (["tea"], ["tea"])


async def test_concurrent_writers_in_one_event_loop_all_commit(database: Any) -> None:
    # apishape 3, 9: on SQLite two writers of one loop would wait for each other for ever
    shop = RealShop(database)

    @shop.app.post("/orders", status_code=201)
    @shop.once.protect(effects=LOCAL)
    async def create(op: Operation, item: str) -> str:
        await database.insert(op.connection, item)
        await asyncio.sleep(0.01)
        await database.insert(op.connection, f"{item} again")
        return item

    async with shop.open():
        items = [f"item {number:02}" for number in range(12)]
        replies = await asyncio.gather(*[shop.send(f"/orders?item={item}", key=new_key()) for item in items])
        assert {reply.status for reply in replies} == {201}
        assert shop.rows == sorted([*items, *[f"{item} again" for item in items]])


# ----------------------------------------------------------------------------------------------- op.connection


GUARDED: dict[str, list[tuple[str, tuple[Any, ...]]]] = {
    "sqlite": [
        ("commit", ()),
        ("rollback", ()),
        ("close", ()),
        ("execute", ("COMMIT",)),
        ("execute", ("/* x */ rollback",)),
        ("execute", ("END",)),
        ("executescript", ("INSERT INTO orders VALUES ('x');",)),
    ],
    "psycopg": [
        ("commit", ()),
        ("rollback", ()),
        ("close", ()),
        ("set_autocommit", (True,)),
        ("execute", ("COMMIT",)),
        ("execute", ("SELECT 1; COMMIT",)),
        ("execute", ("/* x */ abort",)),
        ("execute", ("PREPARE TRANSACTION 'x'",)),
    ],
    "asyncpg": [
        ("close", ()),
        ("terminate", ()),
        ("execute", ("COMMIT",)),
        ("execute", ("SELECT 1; COMMIT",)),
        ("fetch", ("ROLLBACK",)),
    ],
    "aiomysql": [
        ("commit", ()),
        ("rollback", ()),
        ("begin", ()),
        ("close", ()),
        ("autocommit", (True,)),
        ("query", ("COMMIT",)),
    ],
}


@pytest.mark.parametrize("kind", KINDS)
async def test_a_handler_cannot_end_its_transaction(kind: str, request: pytest.FixtureRequest, tmp_path: Path) -> None:
    # L5, F16, apishape 9
    database = make(request, tmp_path, kind)
    shop = RealShop(database)

    @shop.app.post("/orders")
    @shop.once.protect(effects=LOCAL)
    async def create(op: Operation, number: int) -> str:
        shop.runs.append(number)
        await database.insert(op.connection, f"item {number}")
        if shop.runs.count(number) == 1:
            method, arguments = GUARDED[kind][number]
            answer = getattr(op.connection, method)(*arguments)
            if asyncio.iscoroutine(answer):
                await answer
        return "done"

    async with shop.open():
        for number, case in enumerate(GUARDED[kind]):
            key = new_key()
            with pytest.raises(TransactionControlError, match="is ended by oncekey, together with the key's record"):
                await shop.caller(f"/orders?number={number}", key=key).run(raising=True)
            assert f"item {number}" not in shop.rows, case
            assert (await shop.send(f"/orders?number={number}", key=key)).status == 200, case
            assert f"item {number}" in shop.rows, case


async def test_a_swallowed_statement_error_fails_on_postgres(database: Any) -> None:
    # F20, L5: PostgreSQL answers ROLLBACK to the COMMIT of an aborted transaction
    shop = RealShop(database)

    @shop.app.post("/orders", status_code=201)
    @shop.once.protect(effects=LOCAL)
    async def create(op: Operation) -> str:
        await database.insert(op.connection, "coffee")
        try:
            await database.insert(op.connection, "tea")
        except Exception:
            return "swallowed"
        return "done"

    database.execute("INSERT INTO orders VALUES ('tea')")
    async with shop.open():
        reply = await shop.send()
        if not isinstance(database, PostgresDatabase):  # others undo the statement alone: the rest is as good as any
            assert (reply.status, shop.rows) == (201, ["coffee", "tea"])
        else:
            assert (reply.status, reply.code) == (500, "idempotency_execution_failed")
            assert (shop.rows, shop.states) == (["tea"], [])
            database.execute("DELETE FROM orders")
            assert (await shop.send()).status == 201


@pytest.mark.parametrize("kind", ["psycopg", "asyncpg"])
async def test_a_deferred_constraint_failure_returns_500_and_rolls_back(
    kind: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    # F20: a server error at COMMIT is a roll-back, only a lost connection is ambiguous
    database = make(request, tmp_path, kind)
    shop = RealShop(database)

    @shop.app.post("/orders", status_code=201)
    @shop.once.protect(effects=LOCAL)
    async def create(op: Operation) -> str:
        await op.connection.execute("SET CONSTRAINTS ALL DEFERRED")
        await database.insert(op.connection, "tea")
        return "done"

    database.execute("INSERT INTO orders VALUES ('tea')")
    async with shop.open():
        reply = await shop.send()
        assert (reply.status, reply.code) == (500, "idempotency_execution_failed")
        assert (shop.rows, shop.states) == (["tea"], [])
        database.execute("DELETE FROM orders")
        assert (await shop.send()).status == 201
        assert shop.rows == ["tea"]


# ---------------------------------------------------------------------------------------------- nothing is leaked


async def test_a_request_may_be_cancelled_at_every_await(database: Any) -> None:
    # apishape 9: no connection, no turn and no key is lost; the pool is smaller than the number of cancellations
    async with ordering(database).open() as shop:
        for number in range(1, 40):
            key = new_key()
            item = f"item {number}"
            finished = await cancelled_at(number, shop.caller(f"/orders?item={item}", key=key).run())
            (installation,) = shop.once._installed.values()
            assert await installation.running_work.wait(PATIENCE)
            ran = item in shop.runs
            stored = item in shop.rows
            reply = await shop.send(f"/orders?item={item}", key=key)
            assert (reply.status, reply.replayed) == (201, stored), f"cancelled at await {number}"
            assert shop.rows.count(item) == 1
            if stored:
                assert shop.runs.count(item) == 1
            if finished is not None:
                break
            assert ran or not stored
        else:
            pytest.fail("the request never came to its end")
        assert number > 3  # BEGIN, the order and COMMIT are awaited, whatever travels with them
        assert "in_progress" not in shop.states


async def test_crashes_do_not_use_up_the_connections(database: Any) -> None:
    async with ordering(database).open() as shop:
        for _ in range(8):
            assert (await shop.send("/orders?way=crash", key=new_key())).status == 500
            assert (await shop.send("/orders?way=raise&status=404", key=new_key())).status == 404
        assert (await shop.send()).status == 201


async def test_a_keyless_request_has_a_transaction_too(database: Any) -> None:
    # R12, L6
    async with ordering(database, require_key=False).open() as shop:
        assert (await shop.send("/orders?item=a", key=None)).status == 201
        assert (await shop.send("/orders?item=b&way=crash", key=None)).status == 500
        assert (await shop.send("/orders?item=c&way=raise&status=404", key=None)).status == 404
        assert (shop.rows, shop.states) == (["a"], [])


# --------------------------------------------------------------------------------------------- blocking handlers


async def test_many_blocking_handlers_share_few_connections(blocking_database: Any) -> None:
    # apishape 3, 9: pool of 3, 180 requests on 60 keys; whoever holds a connection never queues behind who waits
    shop = RealShop(blocking_database)

    @shop.app.post("/orders", status_code=201)
    @shop.once.protect(effects=LOCAL, on_in_progress="wait", wait_max=60)
    def create(op: SyncOperation, item: str) -> str:
        shop.runs.append(threading.get_ident())
        blocking_database.insert_blocking(op.connection, item)
        time.sleep(0.002)
        return item

    async with shop.open():
        items = [f"item {number:02}" for number in range(60)]
        keys = {item: new_key() for item in items}
        replies = await asyncio.gather(
            *[shop.send(f"/orders?item={item}", key=keys[item]) for item in items for _ in range(3)]
        )
        assert [reply.status for reply in replies] == [201] * 180
        assert sum(reply.replayed for reply in replies) == 120
        assert (shop.rows, len(shop.runs)) == (items, 60)
        assert threading.get_ident() not in shop.runs


async def test_running_blocking_handlers_do_not_queue_behind_waiters(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    # apishape 3, 9: one thread that opens, one connection to write through: the second request waits in that thread
    monkeypatch.setattr(installation_module, "OPENING_THREADS", 1)
    monkeypatch.setattr(Engine, "is_full", False)
    database = PostgresDatabase(request.getfixturevalue("tables_dsn"), "psycopg", pool_size=2)
    shop = RealShop(database)

    @shop.app.post("/orders", status_code=201)
    @shop.once.protect(effects=LOCAL)
    def create(op: SyncOperation, item: str) -> str:
        database.insert_blocking(op.connection, item)
        return item

    async with shop.open():
        replies = await asyncio.gather(*[shop.send(f"/orders?item={item}", key=new_key()) for item in ("tea", "milk")])
        assert [reply.status for reply in replies] == [201, 201]
        assert shop.rows == ["milk", "tea"]


async def test_a_blocking_request_may_be_cancelled_at_every_await(blocking_database: Any) -> None:
    # apishape 9, P5
    shop = RealShop(blocking_database)

    @shop.app.post("/orders", status_code=201)
    @shop.once.protect(effects=LOCAL)
    def create(op: SyncOperation, item: str) -> str:
        shop.runs.append(item)
        blocking_database.insert_blocking(op.connection, item)
        return item

    async with shop.open():
        for number in range(1, 40):
            key, item = new_key(), f"item {number}"
            finished = await cancelled_at(number, shop.caller(f"/orders?item={item}", key=key).run())
            (installation,) = shop.once._installed.values()
            assert await installation.running_work.wait(PATIENCE)
            stored = item in shop.rows
            reply = await shop.send(f"/orders?item={item}", key=key)
            async with asyncio.timeout(PATIENCE):
                while reply.status == 409:  # the thread of the cancelled request has not given its lock back yet
                    reply = await shop.send(f"/orders?item={item}", key=key)
            assert (reply.status, reply.replayed) == (201, stored), f"cancelled at await {number}"
            assert shop.rows.count(item) == 1
            if finished is not None:
                break
        assert 4 < number < 39
        assert "in_progress" not in shop.states


async def test_blocking_and_async_handlers_share_a_database(blocking_database: Any) -> None:
    shop = RealShop(blocking_database)

    @shop.app.post("/slow", status_code=201)
    @shop.once.protect(effects=LOCAL)
    def slow(op: SyncOperation, item: str) -> str:
        blocking_database.insert_blocking(op.connection, item)
        time.sleep(0.01)
        return item

    @shop.app.post("/fast", status_code=201)
    @shop.once.protect(effects=LOCAL)
    async def fast(op: Operation, item: str) -> str:
        await blocking_database.insert(op.connection, item)
        await asyncio.sleep(0.01)
        return item

    @shop.app.post("/mail", status_code=201)
    @shop.once.protect(effects=INLINE)
    def mail(item: str) -> str:
        return item

    async with shop.open():
        paths = [f"/{way}?item={way} {number}" for number in range(6) for way in ("slow", "fast", "mail")]
        replies = await asyncio.gather(*[shop.send(path, key=new_key()) for path in paths])
        assert {reply.status for reply in replies} == {201}
        assert len(shop.rows) == 12


@pytest.mark.parametrize("way", ["commit", "raise", "COMMIT"])
async def test_a_blocking_handler_cannot_end_its_transaction(blocking_database: Any, way: str) -> None:
    # L5, L6
    shop = RealShop(blocking_database)

    @shop.app.post("/orders", status_code=201)
    @shop.once.protect(effects=LOCAL)
    def create(op: SyncOperation) -> str:
        blocking_database.insert_blocking(op.connection, "tea")
        if way == "commit":
            op.connection.commit()
        if way == "COMMIT":
            op.connection.execute("COMMIT")
        raise HTTPException(402)

    async with shop.open():
        reply = await shop.send()
        assert (reply.status, shop.rows) == (402 if way == "raise" else 500, [])
        assert shop.states == (["completed"] if way == "raise" else list(blocking_database.left_by_a_rollback))


async def test_asyncpg_has_no_blocking_handlers(tables_dsn: str) -> None:
    # apishape 4: found at start-up, with the sentence that fixes it
    shop = RealShop(PostgresDatabase(tables_dsn, "asyncpg"))

    @shop.app.post("/orders")
    @shop.once.protect(effects=LOCAL)
    def create(op: SyncOperation) -> None: ...

    with pytest.raises(Exception, match="asyncpg is for `async def` only"):
        async with shop.open():
            pass
