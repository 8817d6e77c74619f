"""`Once(engine)` and `once.session`: business rows, session and key in one transaction, on real servers."""

import asyncio
import logging
import uuid
from collections.abc import Iterator
from contextlib import suppress
from datetime import timedelta
from typing import Annotated, Any

import pytest
from fastapi import Depends, HTTPException, Request
from fastapi.responses import JSONResponse
from sqlalchemy import insert, text
from sqlalchemy.exc import IntegrityError, OperationalError
from sqlalchemy.ext.asyncio import AsyncSession, async_sessionmaker

from frameworks.shop import KEY, new_key
from frameworks.sqlshop import Order, OrderIn, SqlShop, engine_for, opened
from harness.asgi import cancelled_at, until
from harness.dsn import through
from harness.patience import PATIENCE
from harness.proxy import Proxy
from oncekey.core.errors import ConfigurationError
from oncekey.core.model import INLINE, LOCAL
from oncekey.core.policy import Policy
from oncekey.engine.operation import Operation

COMMIT = {"asyncpg": b"COMMIT;", "psycopg": b"COMMIT\0", "aiomysql": b"\x03COMMIT"}

POSTGRES = [("postgres", "asyncpg"), ("postgres", "psycopg")]
PLACES = [*POSTGRES, ("mariadb", "aiomysql")]

on_postgres = pytest.mark.parametrize("place", POSTGRES, indirect=True, ids="-".join)
on_mysql_too = pytest.mark.parametrize("place", [*PLACES, ("mysql", "aiomysql")], indirect=True, ids="-".join)
"""For what depends on the lock of a key: MySQL takes it by other statements than MariaDB, and all else by the same."""


@pytest.fixture(scope="module", params=PLACES, ids="-".join)
def place(request: pytest.FixtureRequest) -> Iterator[tuple[str, str]]:
    """One database for all tests of a dialect, which each find its tables empty."""
    kind, dialect = request.param
    server = request.getfixturevalue(f"{kind}_server")
    name = f"sqlshop_{uuid.uuid4().hex}"
    yield server.create_database(name), dialect
    server.drop_database(name)


@pytest.fixture
def dsn(place: tuple[str, str]) -> str:
    return place[0]


@pytest.fixture
def dialect(place: tuple[str, str]) -> str:
    return place[1]


def heard(dialect: str, *words: str) -> list[str]:
    """What a listener of the application's hears; what is ours does not go through its cursors on MariaDB."""
    return [*words] if dialect != "aiomysql" else [word for word in words[1:] if word != "WITH"]


def ordering(shop: SqlShop) -> None:
    """The plain case: a handler that adds an order through the session."""

    @shop.post(effects=LOCAL)
    async def create(order: OrderIn, session: shop.session) -> dict[str, Any]:
        shop.runs.append(order.item)
        row = Order(item=order.item)
        session.add(row)
        await session.flush()
        return {"id": row.id}


@on_mysql_too
async def test_rows_and_record_are_one_commit(dsn: str, dialect: str) -> None:
    # L6, C10: a protected write costs no more commits than an unprotected one
    async with opened(dsn, dialect, ordering) as shop:
        first = await shop.send()
        assert (first.status, first.json()) == (201, {"id": 1})
        assert shop.commits == 1
        assert shop.said == heard(dialect, "SELECT", "INSERT", "WITH")  # the lock, the order, its record
        assert await shop.in_one_commit()

        again = await shop.send()
        assert (again.status, again.body, again.replayed) == (201, first.body, True)
        assert shop.runs == ["tea"]


async def test_pending_objects_are_flushed_before_the_settlement(dsn: str, dialect: str) -> None:
    def routes(shop: SqlShop) -> None:
        @shop.post(effects=LOCAL)
        async def create(order: OrderIn, session: shop.session) -> None:
            session.add(Order(item=order.item))

    async with opened(dsn, dialect, routes) as shop:
        assert (await shop.send()).status == 201
        assert await shop.in_one_commit()


async def test_session_commit_only_flushes_in_a_local_handler(dsn: str, dialect: str) -> None:
    # apishape 3, L5: zero extra statements, one COMMIT for everything
    def routes(shop: SqlShop) -> None:
        @shop.post(effects=LOCAL)
        async def create(order: OrderIn, session: shop.session) -> dict[str, Any]:
            row = Order(item=order.item)
            session.add(row)
            await session.commit()
            await session.commit()
            return {"id": row.id}

    async with opened(dsn, dialect, routes) as shop:
        assert (await shop.send()).json() == {"id": 1}
        assert shop.commits == 1
        assert shop.said == heard(dialect, "SELECT", "INSERT", "WITH")
        assert await shop.in_one_commit()


async def test_a_success_after_session_rollback_returns_500(
    dsn: str, dialect: str, caplog: pytest.LogCaptureFixture
) -> None:
    # apishape 3, 9, L5: the rows are gone, so there is nothing to tell success of
    def routes(shop: SqlShop) -> None:
        @shop.post(effects=LOCAL)
        async def create(order: OrderIn, session: shop.session) -> None:
            shop.runs.append(order.item)
            session.add(Order(item=order.item))
            await session.flush()
            if len(shop.runs) == 1:
                await session.rollback()
                session.add(Order(item="after"))
                await session.flush()

    async with opened(dsn, dialect, routes) as shop:
        refused = await shop.send()
        assert (refused.status, refused.code) == (500, "idempotency_execution_failed")
        assert "session.rollback()" in caplog.text
        assert await shop.items() == []
        assert await shop.states() == []  # nothing of it ever happened

        assert (await shop.send()).status == 201  # provably nothing happened, so the key may run
        assert await shop.items() == ["tea"]


async def test_a_second_transaction_of_the_session_cannot_commit(
    dsn: str, dialect: str, caplog: pytest.LogCaptureFixture
) -> None:
    # F16: rows in, no record, and the retry runs again
    def routes(shop: SqlShop) -> None:
        @shop.post(effects=LOCAL)
        async def create(order: OrderIn, session: shop.session) -> None:
            await session.scalar(text("SELECT 1"))
            await session.rollback()
            session.add(Order(item=order.item))
            await session.commit()

    async with opened(dsn, dialect, routes) as shop:
        assert (await shop.send()).code == "idempotency_execution_failed"
        assert "begin_nested" in caplog.text
        assert await shop.items() == []
        assert await shop.states() == []  # nothing of it ever happened


async def test_rolling_back_an_unused_session_has_no_effect(dsn: str, dialect: str) -> None:
    def routes(shop: SqlShop) -> None:
        @shop.post(effects=LOCAL)
        async def create(order: OrderIn, session: shop.session) -> None:
            await session.rollback()
            session.add(Order(item=order.item))

    async with opened(dsn, dialect, routes) as shop:
        assert (await shop.send()).status == 201
        assert await shop.in_one_commit()


@pytest.mark.parametrize("how", ["session.rollback", "failed flush", "failed statement"])
async def test_a_409_after_session_rollback_is_stored_without_rows(dsn: str, dialect: str, how: str) -> None:
    # L6: a handler that looks after its own failure and returns a 4xx has its answer stored alone
    def routes(shop: SqlShop) -> None:
        @shop.post(effects=LOCAL)
        async def create(order: OrderIn, session: shop.session) -> Any:
            shop.runs.append(order.item)
            session.add(Order(item=order.item))
            try:
                await session.flush()
                if how == "failed flush":
                    session.add(Order(item=order.item))
                    await session.flush()
                if how == "failed statement":
                    await session.execute(insert(Order).values(item=order.item))
            except IntegrityError:
                pass
            else:
                await session.rollback()
            return JSONResponse({"sold": "out"}, 409)

    async with opened(dsn, dialect, routes) as shop:
        first = await shop.send()
        assert (first.status, first.json()) == (409, {"sold": "out"})
        again = await shop.send()
        assert (again.status, again.body, again.replayed) == (409, first.body, True)
        assert shop.runs == ["tea"]
        # MariaDB undoes a statement that failed, and no other: the rest was returned, so it is committed.
        kept = ["tea"] if (how, dialect) == ("failed statement", "aiomysql") else []
        assert await shop.items() == kept
        assert await shop.states() == ["completed"]


@on_postgres
async def test_a_success_after_a_failed_statement_is_refused(
    dsn: str, dialect: str, caplog: pytest.LogCaptureFixture
) -> None:
    # F20: PostgreSQL would answer the COMMIT with ROLLBACK, and say nothing
    def routes(shop: SqlShop) -> None:
        @shop.post(effects=LOCAL)
        async def create(order: OrderIn, session: shop.session) -> None:
            await session.execute(insert(Order).values(item=order.item))
            with suppress(IntegrityError):
                await session.execute(insert(Order).values(item=order.item))

    async with opened(dsn, dialect, routes) as shop:
        assert (await shop.send()).code == "idempotency_execution_failed"
        assert "begin_nested" in caplog.text
        assert await shop.states() == []  # nothing of it ever happened


on_mariadb = pytest.mark.parametrize("place", [("mariadb", "aiomysql"), ("mysql", "aiomysql")], indirect=True)


@on_mariadb
@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"connect_args": {"init_command": "SET sql_mode = ''"}}, "STRICT_TRANS_TABLES"),
        ({"connect_args": {"charset": "latin1"}}, "charset=utf8mb4"),
    ],
)
async def test_engines_with_lossy_settings_are_rejected_at_startup(
    dsn: str, dialect: str, options: dict[str, Any], sentence: str
) -> None:
    engine = engine_for(dsn, dialect, **options)
    shop = SqlShop(engine)
    with pytest.raises(ConfigurationError, match=sentence):
        await shop.once.start(shop.app)
    await engine.dispose()


@on_mariadb
async def test_session_state_is_reset_between_requests(dsn: str, dialect: str) -> None:
    clean = "SELECT @@time_zone = 'SYSTEM' AND @mine IS NULL AND @@autocommit = 0 AND @@sql_mode LIKE '%ANSI%'"

    def routes(shop: SqlShop) -> None:
        @shop.post(effects=LOCAL)
        async def create(order: OrderIn, session: shop.session) -> int:
            found = int(await session.scalar(text(clean)))
            await session.execute(text("SET time_zone = '+05:00', @mine = 'a secret'"))
            await session.execute(text("CREATE TEMPORARY TABLE mine (x INT)"))
            return found

    options = {"pool_size": 2, "max_overflow": 0, "connect_args": {"init_command": "SET sql_mode = 'ANSI,TRADITIONAL'"}}
    async with opened(dsn, dialect, routes, engine=options) as shop:
        replies = [await shop.send(key=new_key()) for _ in range(4)]
        assert [reply.json() for reply in replies] == [1] * 4


@on_mariadb
@pytest.mark.parametrize(
    ("chosen", "expected"), [({}, "READ-COMMITTED"), ({"isolation_level": "SERIALIZABLE"}, "SERIALIZABLE")]
)
async def test_handlers_use_read_committed_unless_the_engine_overrides(
    dsn: str, dialect: str, chosen: dict[str, Any], expected: str
) -> None:
    """A phantom tells the isolation: what another one commits in between is seen, or it has to wait."""
    seen: list[Any] = []

    def routes(shop: SqlShop) -> None:
        @shop.post(effects=LOCAL)
        async def create(order: OrderIn, session: shop.session) -> None:
            seen.append(await session.scalar(text("SELECT count(*) FROM orders")))
            async with shop.engine.connect() as other:
                await other.execute(text("SET innodb_lock_wait_timeout = 1"))
                with suppress(OperationalError):
                    await other.execute(insert(Order).values(item=order.item))
                    await other.commit()
            seen.append(await session.scalar(text("SELECT count(*) FROM orders")))

    async with opened(dsn, dialect, routes, engine=chosen) as shop:
        assert (await shop.send()).status == 201
    assert seen == ([0, 1] if expected == "READ-COMMITTED" else [0, 0])


async def test_a_failed_savepoint_does_not_fail_the_request(dsn: str, dialect: str) -> None:
    def routes(shop: SqlShop) -> None:
        @shop.post(effects=LOCAL)
        async def create(order: OrderIn, session: shop.session) -> None:
            session.add(Order(item=order.item))
            await session.flush()
            try:
                async with session.begin_nested():
                    session.add(Order(item=order.item))
            except IntegrityError:
                pass
            session.add(Order(item="milk"))

    async with opened(dsn, dialect, routes) as shop:
        assert (await shop.send()).status == 201
        assert shop.commits == 1
        assert await shop.items() == ["tea", "milk"]


async def test_an_integrity_error_reaches_the_application(dsn: str, dialect: str) -> None:
    # apishape 3: flushed in the wrapper and not in the settlement; raised rolls back, the final 4xx is stored alone
    def routes(shop: SqlShop) -> None:
        @shop.post(effects=LOCAL)
        async def create(order: OrderIn, session: shop.session) -> None:
            shop.runs.append(order.item)
            session.add(Order(item="log"))
            await session.flush()
            session.add(Order(item=order.item))

        @shop.app.exception_handler(IntegrityError)
        async def conflict(_: Request, __: IntegrityError) -> JSONResponse:
            return JSONResponse({"already": "there"}, 409)

    async with opened(dsn, dialect, routes) as shop:
        async with shop.engine.begin() as connection:
            await connection.execute(insert(Order).values(item="tea"))
        first = await shop.send()
        assert (first.status, first.json()) == (409, {"already": "there"})
        again = await shop.send()
        assert (again.body, again.replayed) == (first.body, True)
        assert shop.runs == ["tea"]
        assert await shop.items() == ["tea"]  # the log was rolled back


@on_postgres
async def test_a_deferred_constraint_failure_at_commit_rolls_back(dsn: str, dialect: str) -> None:
    # F20, L5: a server error at COMMIT is definite
    def routes(shop: SqlShop) -> None:
        @shop.post(effects=LOCAL)
        async def create(order: OrderIn, session: shop.session) -> None:
            shop.runs.append(order.item)
            await session.execute(text("SET CONSTRAINTS ALL DEFERRED"))
            session.add(Order(item=order.item))
            if len(shop.runs) == 1:
                session.add(Order(item=order.item))

    async with opened(dsn, dialect, routes) as shop:
        assert (await shop.send()).code == "idempotency_execution_failed"
        assert await shop.states() == []  # nothing of it ever happened
        assert (await shop.send()).status == 201
        assert await shop.items() == ["tea"]


async def test_a_plain_session_dependency_logs_a_warning(
    dsn: str, dialect: str, caplog: pytest.LogCaptureFixture
) -> None:
    # apishape 3: its commit comes after the answer was stored and sent; this is the trap that once.session closes
    def routes(shop: SqlShop) -> None:
        sessions = async_sessionmaker(shop.engine)

        async def get_session() -> Any:
            async with sessions() as session:
                yield session
                await session.commit()

        @shop.post(effects=LOCAL)
        async def create(order: OrderIn, session: Annotated[AsyncSession, Depends(get_session)]) -> None:
            session.add(Order(item=order.item))

    with caplog.at_level(logging.WARNING, "oncekey"):
        async with opened(dsn, dialect, routes) as shop:
            assert "get_session" in caplog.text
            assert "once.session" in caplog.text
            async with shop.engine.begin() as connection:
                await connection.execute(insert(Order).values(item="tea"))
            lie = await shop.send()
            assert lie.status == 201  # although the commit failed a moment later
            assert await shop.items() == ["tea"]
            assert (await shop.send()).replayed


async def test_a_validation_error_closes_the_open_session(dsn: str, dialect: str) -> None:
    # apishape 9: dependency opened a transaction, validation fails, no leak
    def routes(shop: SqlShop) -> None:
        async def user(session: shop.session) -> str:
            shop.runs.append(shop.lent)
            return str(await session.scalar(text("SELECT 'ann'")))

        @shop.post(effects=LOCAL)
        async def create(order: OrderIn, name: Annotated[str, Depends(user)], session: shop.session) -> None:
            raise AssertionError("never entered")

    async with opened(dsn, dialect, routes) as shop:
        assert (await shop.send({"wrong": 1})).status == 422
        assert shop.runs == [1]
        assert shop.lent == 0
        assert await shop.states() == []


async def test_authentication_and_handler_share_one_session(dsn: str, dialect: str) -> None:
    # R186, R198: it comes before the claim, and a refusal of it stores nothing and keeps nothing
    def routes(shop: SqlShop) -> None:
        async def user(request: Request, session: shop.session) -> str:
            name = request.query_params["user"]
            if await session.scalar(text("SELECT :name = 'ann'"), {"name": name}) != 1:
                raise HTTPException(401)
            return name

        @shop.post(effects=LOCAL)
        async def create(order: OrderIn, name: Annotated[str, Depends(user)], session: shop.session) -> None:
            session.add(Order(item=f"{name}'s {order.item}"))

    async with opened(dsn, dialect, routes) as shop:
        assert (await shop.send(target="/orders?user=bob")).status == 401
        assert shop.lent == 0
        assert await shop.states() == []
        shop.forget()
        assert (await shop.send(target="/orders?user=ann")).status == 201
        assert shop.commits == 1
        assert shop.said == heard(dialect, "SELECT", "SELECT", "INSERT", "WITH")
        assert await shop.items() == ["ann's tea"]


async def test_replays_and_refusals_hold_no_connection_when_they_are_sent(dsn: str, dialect: str) -> None:
    async with opened(dsn, dialect, ordering) as shop:
        held: list[int] = []
        assert (await shop.send()).status == 201
        for expected, body in ((201, None), (422, {"item": "milk"})):
            reply = await shop.caller(body, on_send=lambda _: held.append(shop.lent)).run()
            assert reply.status == expected
        assert (await shop.caller(key="no", on_send=lambda _: held.append(shop.lent)).run()).status == 400
        assert set(held) == {0}


async def test_a_replay_releases_its_connection_before_dependencies_end(dsn: str, dialect: str) -> None:
    """The dependency's end runs after a replay was decided: nothing is held for it."""
    held: list[int] = []

    def routes(shop: SqlShop) -> None:
        async def around(session: shop.session) -> Any:
            yield
            held.append(shop.lent)

        @shop.post(effects=LOCAL)
        async def create(
            order: OrderIn,
            around: Annotated[None, Depends(around, scope="function")],
            session: shop.session,
        ) -> None:
            session.add(Order(item=order.item))

    async with opened(dsn, dialect, routes) as shop:
        await shop.send()
        assert (await shop.send()).replayed
        assert held == [1, 0]


@on_mysql_too
async def test_two_concurrent_duplicates_receive_409(dsn: str, dialect: str) -> None:
    # R69, E4: a duplicate in flight is told so at once
    entered, go = asyncio.Event(), asyncio.Event()

    def routes(shop: SqlShop) -> None:
        @shop.post(effects=LOCAL)
        async def create(order: OrderIn, session: shop.session) -> None:
            session.add(Order(item=order.item))
            await session.flush()
            entered.set()
            await go.wait()

    async with opened(dsn, dialect, routes) as shop:
        first = asyncio.create_task(shop.send())
        await entered.wait()
        others = await asyncio.gather(shop.send(), shop.send())
        assert shop.lent == 1
        go.set()
        assert [(await first).status, *(reply.status for reply in others)] == [201, 409, 409]
        assert await shop.items() == ["tea"]


async def test_a_small_pool_serves_many_requests(dsn: str, dialect: str) -> None:
    """Every handler holds a connection before its claim needs another: one is kept free for claims."""

    def routes(shop: SqlShop) -> None:
        async def user(session: shop.session) -> None:
            await session.scalar(text("SELECT 1"))

        @shop.post(effects=LOCAL)
        async def create(order: OrderIn, user: Annotated[None, Depends(user)], session: shop.session) -> None:
            session.add(Order(item=order.item))

    async with opened(dsn, dialect, routes, engine={"pool_size": 3, "max_overflow": 0}) as shop:
        wanted = [(new_key(), f"item {number}") for number in range(20)]
        replies = await asyncio.gather(*(shop.send({"item": item}, key=key) for key, item in wanted))
        assert {reply.status for reply in replies} == {201}
        assert sorted(await shop.items()) == sorted(item for _, item in wanted)


async def test_an_exhausted_pool_returns_503(dsn: str, dialect: str) -> None:
    # R110: 503 before anything ran
    entered, go = asyncio.Event(), asyncio.Event()

    def routes(shop: SqlShop) -> None:
        @shop.post(effects=LOCAL)
        async def create(order: OrderIn, session: shop.session) -> None:
            shop.runs.append(order.item)
            entered.set()
            await go.wait()

    pool = {"pool_size": 2, "max_overflow": 0, "pool_timeout": 0.05}
    async with opened(dsn, dialect, routes, engine=pool) as shop:
        first = asyncio.create_task(shop.send())
        await entered.wait()
        second = await shop.send(key=new_key())
        assert (second.status, second.code) == (503, "idempotency_store_unavailable")
        assert second.header("retry-after") == "1"
        go.set()
        assert (await first).status == 201
        assert len(shop.runs) == 1


async def test_a_request_may_be_cancelled_at_every_await(dsn: str, dialect: str) -> None:
    # apishape 9, R71, R72: in mid-statement too; no connection is lost, and the key runs once
    async with opened(dsn, dialect, ordering) as shop:
        finished, number = False, 0
        while not finished:
            number += 1
            key, item = new_key(), {"item": f"item {number}"}
            finished = await cancelled_at(number, shop.caller(item, key=key).run()) is not None
            await shop.drained()
            await shop.once.asynchronous().close()
            assert shop.lent == 0
            reply = await shop.send(item, key=key)
            async with asyncio.timeout(PATIENCE):
                while reply.code == "idempotency_key_in_progress":  # the server may notice late that its client is gone
                    reply = await shop.send(item, key=key)
            assert reply.status == 201
            assert await shop.look(f"SELECT count(*) FROM orders WHERE item = 'item {number}'") == [1]
        assert number > 5


@on_mysql_too
@pytest.mark.parametrize("arrives", [True, False])
async def test_a_lost_commit_is_verified_on_sqlalchemy(dsn: str, dialect: str, arrives: bool) -> None:
    # P7, F8: the answer comes from the record, never from memory
    with Proxy.before(dsn) as proxy:
        async with opened(through(dsn, proxy.port), dialect, ordering) as shop:
            lost = proxy.lose_reply(COMMIT[dialect]) if arrives else proxy.lose_request(COMMIT[dialect])
            reply = await shop.send()
            assert lost.is_set()
            if arrives:
                assert (reply.status, reply.json(), reply.replayed) == (201, {"id": 1}, True)
            else:
                assert (reply.status, reply.code) == (503, "idempotency_store_unavailable")
                assert await shop.items() == []
            assert (await shop.send()).status == 201
            assert await shop.items() == ["tea"]
            assert len(shop.runs) == (1 if arrives else 2)


async def test_a_database_outage_returns_503_before_the_handler_runs(dsn: str, dialect: str) -> None:
    # R110, also where a dependency finds it out before the claim
    with Proxy.before(dsn) as proxy:
        async with opened(through(dsn, proxy.port), dialect, ordering) as shop:
            proxy.shut()
            proxy.cut()
            await shop.engine.dispose()
            reply = await shop.send()
            assert (reply.status, reply.code) == (503, "idempotency_store_unavailable")
            assert shop.runs == []
            proxy.reopen()
            assert (await shop.send()).status == 201


async def test_other_routes_get_an_ordinary_session(dsn: str, dialect: str) -> None:
    """GET, unprotected POST (with a key or without) and INLINE: the application commits, and nothing leaks."""

    def routes(shop: SqlShop) -> None:
        @shop.app.get("/orders")
        async def listing(session: shop.session) -> list[str]:
            shop.runs.append(session)
            return list(await session.scalars(text("SELECT item FROM orders")))

        @shop.app.post("/plain")
        async def plain(order: OrderIn, session: shop.session) -> None:
            session.add(Order(item=order.item))
            await session.commit()

        @shop.post("/inline", effects=INLINE)
        async def inline(order: OrderIn, session: shop.session) -> None:
            session.add(Order(item=order.item))
            await session.commit()

    async with opened(dsn, dialect, routes) as shop:
        for number, target in enumerate(("/plain", "/plain", "/inline")):
            reply = await shop.send({"item": str(number)}, target=target, key=KEY if number else None)
            assert reply.status in (200, 201)
            assert shop.lent == 0
        assert (await shop.send(method="GET")).json() == ["0", "1", "2"]
        assert not shop.runs[0].in_transaction()
        assert shop.lent == 0


async def test_keyless_requests_commit_rows_with_the_handler(dsn: str, dialect: str) -> None:
    # L6: what is returned commits, what is raised does not
    def routes(shop: SqlShop) -> None:
        @shop.post(effects=LOCAL, require_key=False)
        async def create(order: OrderIn, op: Operation, session: shop.session) -> None:
            session.add(Order(item=order.item))
            assert (await op.connection.execute(text("SELECT 1"))).scalar() == 1
            if order.item == "bad":
                await session.flush()
                raise HTTPException(409)

    async with opened(dsn, dialect, routes) as shop:
        assert (await shop.send(key=None)).status == 201
        assert shop.commits == 1
        assert (await shop.send({"item": "bad"}, key=None)).status == 409
        with pytest.raises(IntegrityError):
            await shop.caller(key=None).run(raising=True)
        assert await shop.items() == ["tea"]
        assert await shop.states() == []
        assert shop.lent == 0


async def test_the_tenant_function_may_use_the_session(dsn: str, dialect: str) -> None:
    shops: list[SqlShop] = []

    async def tenant(request: Request) -> str:
        session = await shops[0].once.session()
        return str(await session.scalar(text("SELECT upper(:name)"), {"name": request.query_params["shop"]}))

    def routes(shop: SqlShop) -> None:
        shops.append(shop)
        ordering(shop)

    async with opened(dsn, dialect, routes, tenant=tenant) as shop:
        assert (await shop.send(target="/orders?shop=north")).status == 201
        assert shop.commits == 1
        assert (await shop.send(target="/orders?shop=north")).replayed
        assert shop.lent == 0
        status = await shop.send(target=f"/idempotency-keys/{KEY}?shop=north", method="GET", key=None)
        assert status.json()["state"] == "completed"
        assert shop.lent == 0
        assert (await shop.send(target=f"/idempotency-keys/{KEY}?shop=south", method="GET", key=None)).status == 404


@pytest.mark.parametrize(
    ("item", "longest", "looks", "status"),
    [("tea", 60, 3, 201), ("bad", 1, 0, 409)],  # who waits is given the answer, and does not run in its place
    ids=["answered", "failed"],
)
async def test_a_waiting_duplicate_holds_no_connection(  # noqa: PLR0917
    dsn: str, dialect: str, item: str, longest: int, looks: int, status: int
) -> None:
    # L8
    entered, go = asyncio.Event(), asyncio.Event()

    def routes(shop: SqlShop) -> None:
        @shop.post(effects=LOCAL, on_in_progress="wait")
        async def create(order: OrderIn, session: shop.session) -> None:
            shop.runs.append(order.item)
            session.add(Order(item=order.item))
            entered.set()
            await go.wait()
            if order.item == "bad":
                raise HTTPException(503)

    async with opened(dsn, dialect, routes, policy=Policy(wait_max=timedelta(seconds=longest))) as shop:
        first = asyncio.create_task(shop.send({"item": item}))
        await entered.wait()
        asked = shop.taken
        second = asyncio.create_task(shop.send({"item": item}))
        await until(lambda: shop.taken > asked + looks and shop.lent == 1)
        go.set()
        await first
        assert (await second).status == status
        assert shop.runs == [item]
        assert await shop.items() == (["tea"] if item == "tea" else [])


async def test_stopping_once_does_not_dispose_the_engine(dsn: str, dialect: str) -> None:
    async with opened(dsn, dialect, ordering, policy=Policy(namespace="shop")) as shop:
        assert (await shop.send()).status == 201
        await shop.once.stop()
        assert await shop.items() == ["tea"]  # the engine was not disposed
