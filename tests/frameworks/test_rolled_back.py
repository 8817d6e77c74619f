"""Successes whose rows are gone are never said: of failed transactions (X1), and of what was raised (X13)."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from fastapi import HTTPException, Request
from fastapi.responses import JSONResponse
from sqlalchemy import text

from frameworks.realshop import PostgresDatabase, RealShop, SqliteFile
from frameworks.sqlshop import opened
from oncekey.core.model import INLINE, LOCAL, OUTBOX, PHASED
from oncekey.engine.operation import Operation, SyncOperation

POSTGRES = ("asyncpg", "psycopg", "def")
SQLITE = ("sqlite", "sqlite def")
FAILED = (500, "idempotency_execution_failed")

SLOW = {
    "postgres": "SELECT pg_sleep(20)",
    "sqlite": "WITH RECURSIVE c(n) AS (SELECT 1 UNION ALL SELECT n + 1 FROM c WHERE n < 3000000) SELECT max(n) FROM c",
}
DEFERRED = (
    "CREATE TABLE parent (id int PRIMARY KEY)",
    "CREATE TABLE child (p int REFERENCES parent (id) DEFERRABLE INITIALLY DEFERRED)",
)
ORPHAN = "INSERT INTO child VALUES (5)"
TEA = "INSERT INTO orders VALUES ('tea')"
BREAKING = {"violation": TEA, "rolled back by sqlite": "INSERT OR ROLLBACK INTO orders VALUES ('tea')"}


class Shop(RealShop):
    """Its handler does something that fails, swallows that, and answers with the status that it is asked for."""

    def __init__(self, kind: str, request: pytest.FixtureRequest, folder: Path, **options: Any) -> None:
        self.family = "sqlite" if kind in SQLITE else "postgres"
        database: Any
        if self.family == "sqlite":
            database = SqliteFile(folder / "shop.db")
        else:
            package = "psycopg" if kind == "def" else kind
            database = PostgresDatabase(request.getfixturevalue("tables_dsn"), package, pool_size=4)
        super().__init__(database)
        handler = self._blocking() if kind.endswith("def") else self._async()
        self.app.post("/orders")(self.once.protect(**{"effects": LOCAL, **options})(handler))

    def _async(self) -> Any:
        async def create(op: Operation, way: str, status: int) -> Any:
            self.runs.append(way)
            await self.database.insert(op.connection, "coffee")
            if way == "deferred":
                await op.connection.execute(ORPHAN)
            elif way == "cancelled":
                with suppress(TimeoutError):
                    await asyncio.wait_for(op.connection.execute(SLOW[self.family]), 0.05)
            elif way == "statement timeout":
                await op.connection.execute("SET LOCAL statement_timeout = 20")
                with suppress(Exception):
                    await op.connection.execute(SLOW[self.family])
            else:
                with suppress(Exception):
                    await op.connection.execute(BREAKING[way])
            return JSONResponse({"said": status}, status)

        return create

    def _blocking(self) -> Any:
        def create(op: SyncOperation, way: str, status: int) -> Any:
            self.runs.append(way)
            self.database.insert_blocking(op.connection, "coffee")
            if way == "deferred":
                op.connection.execute(ORPHAN)
            elif way == "statement timeout":
                op.connection.execute("SET LOCAL statement_timeout = 20")
                with suppress(Exception):
                    op.connection.execute(SLOW[self.family])
            else:
                with suppress(Exception):
                    op.connection.execute(BREAKING[way])
            return JSONResponse({"said": status}, status)

        return create


@pytest.fixture
def make(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[..., Shop]:
    def made(kind: str, **options: Any) -> Shop:
        shop = Shop(kind, request, tmp_path, **options)
        shop.database.execute(TEA)
        for statement in DEFERRED:
            shop.database.execute(statement)
        return shop

    return made


CASES = [
    *[(kind, way) for kind in POSTGRES for way in ("violation", "deferred", "statement timeout")],
    *[(kind, "cancelled") for kind in ("asyncpg", "psycopg", "sqlite")],
    *[(kind, "rolled back by sqlite") for kind in SQLITE],
]


@pytest.mark.parametrize(("kind", "way"), CASES)
async def test_a_409_after_a_failed_transaction_is_stored_without_rows(
    make: Callable[..., Shop], kind: str, way: str
) -> None:
    # X1, L6: as if the handler had raised
    async with make(kind).open() as shop:
        replies = [await shop.send(f"/orders?way={way}&status=409") for _ in range(3)]
        assert [(reply.status, reply.json()) for reply in replies] == [(409, {"said": 409})] * 3
        assert [reply.replayed for reply in replies] == [False, True, True]
        assert (shop.rows, shop.states, shop.runs) == (["tea"], ["completed"], [way])


@pytest.mark.parametrize(("kind", "way"), CASES)
async def test_a_200_after_a_failed_transaction_becomes_a_500(
    make: Callable[..., Shop], kind: str, way: str, caplog: pytest.LogCaptureFixture
) -> None:
    # X1, F20: its rows are gone, and the store is there; so neither 200 nor 503
    async with make(kind).open() as shop:
        for count in (1, 2):
            with caplog.at_level(logging.ERROR, "oncekey"):
                reply = await shop.send(f"/orders?way={way}&status=200")
            assert (reply.status, reply.code, reply.header("retry-after")) == (*FAILED, None)
            assert (shop.rows, len(shop.runs)) == (["tea"], count)
        assert shop.states == list(shop.database.left_by_a_rollback)
        assert "rolled back" in caplog.text
        shop.database.execute("DELETE FROM orders")
        shop.database.execute("INSERT INTO parent VALUES (5)")
        if way in ("violation", "deferred"):
            assert (await shop.send(f"/orders?way={way}&status=200")).status == 200
            assert "coffee" in shop.rows


@pytest.mark.parametrize("kind", SQLITE)
async def test_sqlite_undoes_the_statement_alone(make: Callable[..., Shop], kind: str) -> None:
    # X1: the rest of the transaction is as good as any
    async with make(kind).open() as shop:
        replies = [await shop.send("/orders?way=violation&status=409") for _ in range(2)]
        assert [(reply.status, reply.replayed) for reply in replies] == [(409, False), (409, True)]
        assert shop.rows == ["coffee", "tea"]


@pytest.mark.parametrize("kind", POSTGRES)
async def test_an_outbox_409_after_a_failed_statement_is_replayed(make: Callable[..., Shop], kind: str) -> None:
    # X1, O1
    async with make(kind, effects=OUTBOX).open() as shop:
        replies = [await shop.send("/orders?way=violation&status=409") for _ in range(2)]
        assert [(reply.status, reply.replayed) for reply in replies] == [(409, False), (409, True)]


@pytest.mark.parametrize("dialect", ["asyncpg", "psycopg"])
@pytest.mark.parametrize("status", [409, 200])
@pytest.mark.parametrize("way", ["violation", "deferred", "cancelled"])
async def test_sqlalchemy_failed_transactions_store_no_success(
    tables_dsn: str, dialect: str, status: int, way: str, caplog: pytest.LogCaptureFixture
) -> None:
    # X1
    async def create(op: Operation) -> Any:
        await op.connection.execute(text("INSERT INTO seats VALUES ('B1')"))
        if way == "deferred":
            await op.connection.execute(text(ORPHAN))
        elif way == "cancelled":
            with suppress(TimeoutError):
                await asyncio.wait_for(op.connection.execute(text(SLOW["postgres"])), 0.05)
        else:
            with suppress(Exception):
                await op.connection.execute(text("INSERT INTO seats VALUES ('A1')"))
        return JSONResponse({"said": status}, status)

    async with opened(tables_dsn, dialect, lambda shop: shop.post(effects=LOCAL)(create)) as shop:
        async with shop.engine.begin() as connection:
            for statement in (*DEFERRED, "CREATE TABLE seats (x text PRIMARY KEY)", "INSERT INTO seats VALUES ('A1')"):
                await connection.execute(text(statement))
        replies = [await shop.send() for _ in range(2)]
        assert await shop.look("SELECT x FROM seats") == ["A1"]
        if status == 409:
            assert [(reply.status, reply.replayed) for reply in replies] == [(409, False), (409, True)]
            return
        assert [(reply.status, reply.code) for reply in replies] == [FAILED] * 2
        assert "rolled back" in caplog.text


class Accepted(Exception):  # noqa: N818  (what the application takes for a success)
    """The application's own exception handler answers with 202."""


def raising(shop: RealShop, **options: Any) -> RealShop:
    """A handler that writes a row and raises what becomes a success."""

    @shop.app.exception_handler(Accepted)
    async def accepted(_: Request, __: Accepted) -> JSONResponse:
        return JSONResponse({"status": "accepted"}, 202)

    def ended(op: Any, how: str, says: str) -> None:
        shop.runs.append(how)
        if says == "keep":
            op.keep()
        if says == "rollback":
            op.rollback()
        raise HTTPException(303, headers={"Location": "/orders/1"}) if how == "redirect" else Accepted

    async def create(op: Operation, how: str, says: str = "") -> Any:
        await shop.database.insert(op.connection, "coffee")
        if options.get("effects") is OUTBOX:
            op.defer("transfer", {"cents": 7})
        ended(op, how, says)

    def create_blocking(op: SyncOperation, how: str, says: str = "") -> Any:
        shop.database.insert_blocking(op.connection, "coffee")
        ended(op, how, says)

    blocking = options.pop("blocking", False)
    protected = shop.once.protect(**{"effects": LOCAL, **options})(create_blocking if blocking else create)
    shop.app.post("/orders")(protected)
    return shop


@pytest.fixture(params=["asyncpg", "psycopg", "def", "sqlite", "sqlite def"])
def stored_in(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Any, bool]:
    kind = str(request.param)
    if kind in SQLITE:
        return SqliteFile(tmp_path / "shop.db"), kind.endswith("def")
    dsn = request.getfixturevalue("tables_dsn")
    return PostgresDatabase(dsn, "psycopg" if kind == "def" else kind), kind == "def"


@pytest.mark.parametrize("how", ["redirect", "handler"])
async def test_a_raised_redirect_rolls_back_and_returns_500(
    stored_in: tuple[Any, bool], how: str, caplog: pytest.LogCaptureFixture
) -> None:
    # X13: the same rule as for a roll-back by hand
    database, blocking = stored_in
    async with raising(RealShop(database), blocking=blocking).open() as shop:
        for runs in (1, 2):
            reply = await shop.send(f"/orders?how={how}")
            assert (reply.status, reply.code, reply.header("location")) == (*FAILED, None)
            assert (shop.rows, len(shop.runs)) == ([], runs)
        assert shop.states == list(database.left_by_a_rollback)
        assert "op.keep()" in caplog.text


@pytest.mark.parametrize(("says", "rows"), [("keep", ["coffee"]), ("rollback", [])])
async def test_keep_and_rollback_apply_to_a_raised_redirect(stored_in: tuple[Any, bool], says: str, rows: Any) -> None:
    # X13: kept with its rows, or given up in so many words
    database, blocking = stored_in
    async with raising(RealShop(database), blocking=blocking).open() as shop:
        replies = [await shop.send(f"/orders?how=redirect&says={says}") for _ in range(2)]
        assert [(reply.status, reply.replayed) for reply in replies] == [(303, False), (303, True)]
        assert (shop.rows, shop.states) == (rows, ["completed"])


@pytest.mark.parametrize("stored_in", ["asyncpg", "psycopg", "sqlite"], indirect=True)
async def test_a_raised_success_makes_no_deferred_call(stored_in: tuple[Any, bool]) -> None:
    # X13, O1
    database, _ = stored_in
    async with raising(RealShop(database), effects=OUTBOX).open() as shop:
        assert (await shop.send("/orders?how=handler")).code == FAILED[1]
        assert (shop.rows, shop.states) == ([], list(database.left_by_a_rollback))
        database.execute(f"DELETE FROM {database.records}")
        reply = await shop.send("/orders?how=handler&says=keep")
        assert (reply.status, shop.rows, shop.states) == (202, ["coffee"], ["pending"])


@pytest.mark.parametrize("inside", [True, False])
async def test_a_phase_that_raises_a_redirect_is_rolled_back(
    tables_dsn: str, inside: bool, caplog: pytest.LogCaptureFixture
) -> None:
    # X13: raised after its phases it is an answer like any other
    database = PostgresDatabase(tables_dsn, "asyncpg")
    shop = RealShop(database)

    @shop.app.post("/orders")
    @shop.once.protect(effects=PHASED)
    async def create(op: Operation) -> None:
        async def order(connection: Any) -> None:
            await database.insert(connection, "coffee")
            if inside:
                raise HTTPException(303)

        shop.runs.append(1)
        await op.phase("order", order)
        raise HTTPException(303)

    async with shop.open():
        replies = [await shop.send() for _ in range(2)]
        if inside:
            assert [(reply.status, reply.code) for reply in replies] == [FAILED] * 2
            assert (shop.rows, shop.states, len(shop.runs)) == ([], ["failed_retryable"], 2)
            assert "rolled back" in caplog.text
        else:
            assert [(reply.status, reply.replayed) for reply in replies] == [(303, False), (303, True)]
            assert (shop.rows, shop.states, len(shop.runs)) == (["coffee"], ["completed"], 1)


async def test_a_redirect_raised_by_an_inline_handler_is_stored(tables_dsn: str) -> None:
    # X13: nothing of it is rolled back
    shop = RealShop(PostgresDatabase(tables_dsn, "asyncpg"))

    @shop.app.post("/orders")
    @shop.once.protect(effects=INLINE)
    async def create() -> None:
        raise HTTPException(303)

    async with shop.open():
        replies = [await shop.send() for _ in range(2)]
        assert [(reply.status, reply.replayed) for reply in replies] == [(303, False), (303, True)]
