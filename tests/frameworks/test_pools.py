"""Many requests, few connections: what a dependency was lent keeps no claim waiting, nor the other way round."""

import asyncio
import uuid
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Annotated, Any

import pytest
from fastapi import Depends, HTTPException
from sqlalchemy import event, insert, select, text

from frameworks.realshop import PostgresDatabase, RealShop, SqliteFile
from frameworks.shop import KEY, new_key
from frameworks.sqlshop import Order, OrderIn, SqlShop, opened
from harness.asgi import cancelled_at, until
from harness.databases import DatabaseServer
from oncekey.core.errors import TransactionControlError
from oncekey.core.model import INLINE, LOCAL, PHASED
from oncekey.engine.operation import Operation

DEFAULT: dict[str, Any] = {"pool_timeout": 10}  # 5 and 10 more, as SQLAlchemy has it
SMALL: dict[str, Any] = {"pool_size": 2, "max_overflow": 0, "pool_timeout": 10}


@pytest.fixture(scope="module")
def dsn(postgres_server: DatabaseServer) -> Iterator[str]:
    """One database for all tests of this module, which each find its tables empty."""
    name = f"pools_{uuid.uuid4().hex}"
    yield postgres_server.create_database(name)
    postgres_server.drop_database(name)


def authenticated(shop: SqlShop, effects: Any, **options: Any) -> None:
    """The pattern of the guide: a dependency that reads through the session, then a protected handler."""

    async def user(session: shop.session) -> str:
        return str(await session.scalar(text("SELECT 'ann'")))

    @shop.post(effects=effects, **options)
    async def create(user: Annotated[str, Depends(user)], session: shop.session, op: Operation) -> None:
        async def write(_: Any = None) -> None:
            session.add(Order(item=f"{user} {op.key}"))
            await session.commit()

        await (op.phase("write", write) if effects is PHASED else write())


@pytest.mark.parametrize("pool", [DEFAULT, SMALL], ids=["default", "small"])
@pytest.mark.parametrize("effects", [INLINE, PHASED, LOCAL])
async def test_forty_concurrent_requests_share_a_small_pool(dsn: str, effects: Any, pool: Any) -> None:
    # R110: all held a connection and waited for another one, for 30 s
    async with opened(dsn, "asyncpg", lambda shop: authenticated(shop, effects), engine=pool) as shop:
        keys = [new_key() for _ in range(40)]
        replies = await asyncio.gather(*(shop.send(key=key) for key in keys))
        assert {reply.status for reply in replies} == {201}
        assert len(await shop.items()) == 40
        again = await asyncio.gather(*(shop.send(key=key) for key in keys))
        assert {(reply.status, reply.replayed) for reply in again} == {(201, True)}


@pytest.mark.parametrize("package", ["asyncpg", "psycopg"])
async def test_a_replay_reuses_the_connection_of_its_dependency(tables_dsn: str, package: str) -> None:
    # This process has settled the key, so its answer is looked for first: not beside a transaction that is open.
    shop = RealShop(PostgresDatabase(tables_dsn, package, pool_size=1))

    async def read(connection: Annotated[Any, Depends(shop.once.connection)]) -> None:
        await connection.execute("SELECT 1")

    @shop.app.post("/orders", status_code=201, dependencies=[Depends(read)])
    @shop.once.protect(effects=LOCAL)
    async def create(op: Operation, item: str) -> dict[str, str]:
        await shop.database.insert(op.connection, item)
        return {"item": item}

    async with shop.open():
        for replayed in (False, True, True):
            reply = await shop.send("/orders?item=tea")
            assert (reply.status, reply.replayed) == (201, replayed)


@pytest.mark.parametrize("effects", [INLINE, PHASED])
async def test_dependency_connections_are_released_before_the_handler(dsn: str, effects: Any) -> None:
    entered, go = asyncio.Event(), asyncio.Event()

    def routes(shop: SqlShop) -> None:
        async def user(session: shop.session) -> Order:
            return (await session.scalars(select(Order))).one()

        @shop.post(effects=effects)
        async def create(user: Annotated[Order, Depends(user)]) -> str:
            entered.set()
            await go.wait()
            return user.item  # what was read is still there

    async with opened(dsn, "asyncpg", routes) as shop:
        async with shop.engine.begin() as connection:
            await connection.execute(insert(Order).values(item="ann"))
        request = asyncio.create_task(shop.send())
        await entered.wait()
        assert shop.lent == 0
        go.set()
        assert (await request).json() == "ann"


async def test_open_handler_sessions_do_not_block_settlements(dsn: str) -> None:
    """INLINE: each handler ends with a connection in its session's hands, and its answer needs another one."""

    def routes(shop: SqlShop) -> None:
        @shop.post(effects=INLINE)
        async def create(session: shop.session) -> None:
            await session.scalar(text("SELECT pg_sleep(0.01)"))

    async with opened(dsn, "asyncpg", routes, engine={**SMALL, "pool_size": 3}) as shop:
        replies = await asyncio.gather(*(shop.send(key=new_key()) for _ in range(20)))
        assert {reply.status for reply in replies} == {201}


async def test_an_inline_session_with_writes_is_kept_open(dsn: str) -> None:
    """It is the application's to commit: only what has read and nothing else is given back before the claim."""

    def routes(shop: SqlShop) -> None:
        async def audit(session: shop.session) -> None:
            session.add(Order(item="audit"))
            await session.flush()

        async def lock(session: shop.session) -> None:
            await session.execute(select(Order).with_for_update())

        @shop.post(effects=INLINE)
        async def create(order: OrderIn, audit: Annotated[None, Depends(audit)], session: shop.session) -> None:
            assert shop.lent == 1
            if order.item == "bad":
                raise HTTPException(409)
            session.add(Order(item=order.item))
            await session.commit()

        @shop.post("/locks", effects=INLINE, operation="locks")
        async def locks(lock: Annotated[None, Depends(lock)]) -> int:
            return shop.lent

    async with opened(dsn, "asyncpg", routes) as shop:
        assert (await shop.send({"item": "bad"}, key=new_key())).status == 409
        assert await shop.items() == []
        assert (await shop.send(key=new_key())).status == 201
        assert await shop.items() == ["audit", "tea"]
        assert (await shop.send(target="/locks", key=new_key())).json() == 1


@pytest.mark.parametrize("effects", [INLINE, PHASED])
async def test_a_request_may_be_cancelled_at_every_await(dsn: str, effects: Any) -> None:
    # R71, R72: no connection is lost, and no place in the pool
    async with opened(dsn, "asyncpg", lambda shop: authenticated(shop, effects), engine=SMALL) as shop:
        finished, number = False, 0
        while not finished:
            number += 1
            finished = await cancelled_at(number, shop.caller(key=new_key()).run()) is not None
            await shop.drained()
            await shop.once.asynchronous().close()
            await until(lambda: shop.lent == 0)
            assert not shop.once.asynchronous().is_full
        assert number > 5


@pytest.mark.parametrize("package", ["asyncpg", "psycopg"])
async def test_dependency_connections_are_released_before_a_claim(tables_dsn: str, package: str) -> None:
    shop = RealShop(PostgresDatabase(tables_dsn, package, pool_size=2))

    async def user(connection: Annotated[Any, Depends(shop.once.connection)]) -> None:
        await connection.execute("SELECT 1")

    for effects, path in ((LOCAL, "/local"), (PHASED, "/phased")):

        @shop.app.post(path, status_code=201)
        @shop.once.protect(effects=effects, operation=path)
        async def create(user: Annotated[None, Depends(user)]) -> None: ...

    async with shop.open():
        for path in ("/local", "/phased"):
            replies = await asyncio.gather(*(shop.send(path, key=new_key()) for _ in range(15)))
            assert {reply.status for reply in replies} == {201}


# ----------------------------------------------------------------------------------------------------------- SQLite


@asynccontextmanager
async def sqlite_shop(path: Path) -> AsyncIterator[tuple[RealShop, Any]]:
    shop = RealShop(SqliteFile(path / "shop.db"))
    yield shop, Annotated[Any, Depends(shop.once.connection)]


async def test_a_dependency_may_read_on_sqlite_before_the_claim(tmp_path: Path) -> None:
    # R110: the dependency took the writer's turn, and the claim of the same request waited for it
    async with sqlite_shop(tmp_path) as (shop, lent):

        async def user(connection: lent) -> str:
            rows = await (await connection.execute("SELECT count(*) AS many FROM orders")).fetchall()
            return str(rows[0]["many"])

        @shop.app.post("/orders", status_code=201)
        @shop.once.protect(effects=LOCAL, require_key=False)
        async def create(user: Annotated[str, Depends(user)], connection: lent, op: Operation) -> None:
            await connection.execute("INSERT INTO orders VALUES (?)", (f"{user} {op.key}",))
            seen = await (await op.connection.execute("SELECT count(*) AS many FROM orders")).fetchall()
            assert str(seen[0]["many"]) != user
            shop.runs.append(user)
            if len(shop.runs) == 1:
                raise HTTPException(503)

        async with shop.open():
            assert (await shop.send()).status == 503
            assert shop.rows == []
            assert (await shop.send()).status == 201
            assert (await shop.send()).replayed
            assert shop.rows == [f"0 {KEY}"]
            replies = await asyncio.gather(*(shop.send(key=new_key()) for _ in range(20)))
            assert {reply.status for reply in replies} == {201}
            assert (await shop.send(key=None)).status == 201


async def test_a_dependency_that_writes_before_the_claim_raises(tmp_path: Path) -> None:
    async with sqlite_shop(tmp_path) as (shop, lent):

        async def audit(connection: lent) -> None:
            await connection.execute("INSERT INTO orders VALUES ('audit')")

        @shop.app.post("/orders", status_code=201)
        @shop.once.protect(effects=LOCAL)
        async def create(audit: Annotated[None, Depends(audit)]) -> None:
            raise AssertionError("never entered")

        async with shop.open():
            with pytest.raises(TransactionControlError, match="after it was entered"):
                await shop.caller().run(raising=True)
            assert (shop.rows, shop.states) == ([], [])


async def test_an_open_read_does_not_block_a_sqlite_writer(tmp_path: Path) -> None:
    reading, go = asyncio.Event(), asyncio.Event()
    async with sqlite_shop(tmp_path) as (shop, lent):

        @shop.app.get("/orders")
        async def listing(connection: lent) -> int:
            await connection.execute("SELECT * FROM orders")
            reading.set()
            await go.wait()
            return len(await (await connection.execute("SELECT * FROM orders")).fetchall())

        @shop.app.post("/orders", status_code=201)
        @shop.once.protect(effects=LOCAL)
        async def create(op: Operation) -> None:
            await op.connection.execute("INSERT INTO orders VALUES ('tea')")

        async with shop.open():
            caller = shop.caller(key=None)
            caller.scope["method"] = "GET"
            reader = asyncio.create_task(caller.run())
            await reading.wait()
            assert (await shop.send()).status == 201
            go.set()
            assert (await reader).json() == 1


@pytest.mark.parametrize("kind", ["sqlite", "asyncpg", "psycopg"])
async def test_writing_on_a_get_connection_raises(kind: str, request: pytest.FixtureRequest, tmp_path: Path) -> None:
    """Its rows would be rolled back, so the database refuses them."""
    if kind == "sqlite":
        shop = RealShop(SqliteFile(tmp_path / "shop.db"))
    else:
        shop = RealShop(PostgresDatabase(request.getfixturevalue("tables_dsn"), kind, pool_size=2))

    @shop.app.get("/orders")
    async def listing(connection: Annotated[Any, Depends(shop.once.connection)]) -> str:
        with pytest.raises(Exception, match=r"read-?only"):
            await shop.database.insert(connection, "lost")
        return "refused"

    async with shop.open():
        caller = shop.caller(key=None)
        caller.scope["method"] = "GET"
        assert (await caller.run()).json() == "refused"
        assert shop.rows == []


@pytest.mark.parametrize("what", ["INSERT INTO oncekey.record", "oncekey.lock_request"])
async def test_a_listener_error_releases_connection_and_lock(dsn: str, what: str) -> None:
    # What listens to an engine hears our statements, too, and raises whatever it likes.
    async with opened(dsn, "asyncpg", lambda shop: authenticated(shop, LOCAL)) as shop:
        troubles = [LookupError("no tenant is set")]

        def listen(_connection: Any, _cursor: Any, statement: str, *_: Any) -> None:
            if what in statement and troubles:
                raise troubles.pop()

        event.listen(shop.engine.sync_engine, "before_cursor_execute", listen)
        key = new_key()
        assert (await shop.send(key=key)).status == 500
        assert not troubles
        await until(lambda: shop.lent == 0)
        assert (await shop.send(key=key)).status == 201
        assert len(await shop.items()) == 1
