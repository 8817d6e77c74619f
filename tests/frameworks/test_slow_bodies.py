"""A body that trickles holds no connection and no transaction, and it does not trickle for ever."""

import asyncio
from typing import Annotated, Any

import pytest
from fastapi import Depends, HTTPException, Request
from starlette.applications import Starlette
from starlette.responses import JSONResponse
from starlette.routing import Route

from frameworks.realshop import PostgresDatabase, RealShop
from frameworks.shop import KEY, LedgerOnce, Shop, new_key, tenant_of
from frameworks.sqlshop import OrderIn, SqlShop, opened
from harness.asgi import Caller, until
from harness.ledger import Ledger
from oncekey.core.model import INLINE, LOCAL, PHASED
from oncekey.core.policy import Policy
from oncekey.engine.operation import Operation, SyncOperation

SLOW = (408, "idempotency_body_too_slow")


class Trickle(Caller):
    """A client that sends a first piece, and the rest when it is told to."""

    def __init__(self, *args: Any, rest: bytes = b"", **options: Any) -> None:
        super().__init__(*args, **options)
        self.go_on = asyncio.Event()
        self.waiting = asyncio.Event()
        self._rest: bytes | None = rest

    async def receive(self) -> Any:
        if self._chunks:
            return {"type": "http.request", "body": self._chunks.pop(0), "more_body": True}
        if self._rest is None:
            return await super().receive()
        self.waiting.set()
        await self.go_on.wait()
        rest, self._rest = self._rest, None
        return {"type": "http.request", "body": rest, "more_body": False}


def trickling(shop: Any, target: str, *, key: str | None = KEY, **options: Any) -> Trickle:
    headers = [("Content-Type", "application/json")] + ([("Idempotency-Key", key)] if key else [])
    return Trickle(shop.app, "POST", target, headers=headers, body=b'{"item":', rest=b'"tea"}', **options)


def lending(shop: Shop) -> None:
    """Routes whose dependency is lent a connection before the body was asked for."""

    async def user(connection: Annotated[Any, Depends(shop.once.connection)]) -> None:
        shop.runs.append("user")

    @shop.post("/lent", effects=LOCAL, require_key=False)
    async def lent(request: Request, user: Annotated[None, Depends(user)]) -> Any:
        return await request.json()

    @shop.post("/own", effects=LOCAL, require_key=False, operation="own")
    async def own(request: Request, op: Operation) -> Any:
        return await request.json()


@pytest.mark.parametrize("key", [KEY, None])
@pytest.mark.parametrize("target", ["/lent", "/own"])
async def test_no_connection_is_taken_before_the_body_arrives(target: str, key: str | None) -> None:
    # R110: a client that sends a byte now and then must not hold what others need
    shop = Shop()
    lending(shop)
    caller = trickling(shop, target, key=key)
    request = asyncio.create_task(caller.run())
    await until(caller.waiting.is_set)
    await asyncio.sleep(0)
    assert shop.ledger.open == 0
    assert shop.runs == []
    caller.go_on.set()
    reply = await request
    assert (reply.status, reply.json()) == (200, {"item": "tea"})
    assert shop.ledger.open == 0


async def test_a_keyless_blocking_handler_starts_after_the_body() -> None:
    shop = Shop()

    @shop.post(effects=LOCAL, require_key=False)
    def create(op: SyncOperation) -> None:
        op.connection.add("row")

    caller = trickling(shop, "/orders", key=None)
    request = asyncio.create_task(caller.run())
    await until(caller.waiting.is_set)
    await asyncio.sleep(0.01)
    assert (shop.ledger.open, shop.ledger.rows) == (0, [])
    caller.go_on.set()
    assert (await request).status == 200
    assert shop.ledger.rows == ["row"]


@pytest.mark.parametrize("key", [KEY, None])
@pytest.mark.parametrize("target", ["/lent", "/own"])
async def test_a_body_that_exceeds_its_timeout_is_rejected(target: str, key: str | None) -> None:
    shop = Shop(policy=Policy(body_timeout=0.01))
    lending(shop)
    reply = await trickling(shop, target, key=key).run()
    assert (reply.status, reply.code) == SLOW
    assert reply.header("content-type") == "application/problem+json"
    assert (shop.ledger.open, shop.ledger.rows, shop.ledger.records) == (0, [], [])
    assert (await shop.send(target, {"item": "tea"})).status == 200  # the key was not used


async def test_the_timeout_applies_when_the_framework_reads_the_body() -> None:
    shop = Shop(policy=Policy(body_timeout=0.01))

    @shop.post(effects=LOCAL)
    async def create(order: OrderIn) -> None:
        raise AssertionError("never entered")

    reply = await trickling(shop, "/orders").run()
    assert (reply.status, reply.code) == SLOW
    assert shop.ledger.records == []


@pytest.mark.parametrize("effects", [INLINE, LOCAL])
async def test_the_timeout_applies_when_the_claim_reads_the_body(effects: Any) -> None:
    shop = Shop()

    @shop.post(effects=effects, body_timeout=0.01)
    async def create(op: Operation) -> None:
        raise AssertionError("never entered")

    reply = await trickling(shop, "/orders").run()
    assert (reply.status, reply.code) == SLOW
    assert shop.ledger.log == []


async def test_the_timeout_applies_to_routes_enrolled_by_path() -> None:
    once = LedgerOnce(Ledger())

    async def legacy(request: Request) -> JSONResponse:
        raise AssertionError("never entered")

    app = Starlette(routes=[Route("/orders", legacy, methods=["POST"])])
    pattern = once.by_path(effects=INLINE, operation="legacy", body_timeout=0.01)
    once.install(app, tenant=tenant_of, enrol={"POST /orders": pattern})
    reply = await Trickle(app, "POST", "/orders", headers=[("Idempotency-Key", KEY)], body=b"x").run()
    assert (reply.status, reply.code) == SLOW


async def test_authentication_errors_precede_the_body_timeout() -> None:
    """Whose body it was that took too long need not be known."""
    shop = Shop(policy=Policy(body_timeout=0.01))

    async def user(connection: Annotated[Any, Depends(shop.once.connection)]) -> None:
        raise HTTPException(401)

    @shop.post(effects=LOCAL)
    async def create(request: Request, user: Annotated[None, Depends(user)]) -> None: ...

    assert (await trickling(shop, "/orders").run()).status == 401


async def test_unprotected_routes_have_no_body_timeout() -> None:
    """A stream that nobody protects is none of our business, with a key or without."""
    shop = Shop(policy=Policy(body_timeout=0.01))

    @shop.app.post("/upload")
    async def upload(request: Request) -> int:
        return len(await request.body())

    for key in (KEY, None):
        caller = trickling(shop, "/upload", key=key)
        request = asyncio.create_task(caller.run())
        await until(caller.waiting.is_set)
        await asyncio.sleep(0.02)
        caller.go_on.set()
        assert (await request).json() == 14


async def test_handler_time_does_not_count_toward_the_body_timeout() -> None:
    """What the application does between two pieces is not the client's delay."""
    shop = Shop(policy=Policy(body_timeout=0.05))

    async def slow(request: Request) -> None:
        await asyncio.sleep(0.06)

    @shop.post(effects=LOCAL)
    async def create(request: Request, slow: Annotated[None, Depends(slow)]) -> int:
        return len(await request.body())

    assert (await shop.caller("/orders", [b"a", b"b", b"c"]).run()).json() == 3


@pytest.mark.parametrize("key", [KEY, None])
async def test_a_disconnect_within_the_body_is_not_an_error(key: str | None) -> None:
    shop = Shop()
    lending(shop)
    caller = trickling(shop, "/lent", key=key)
    caller._rest = None
    caller.leave()
    await shop.app(caller.scope, caller.receive, caller.send)
    assert caller.sent == []
    assert shop.ledger.open == 0


async def test_slow_clients_do_not_stop_the_others(tables_dsn: str) -> None:
    # R110: as many slow clients as handlers may hold connections
    shop = RealShop(PostgresDatabase(tables_dsn, "asyncpg", pool_size=4))

    async def user(connection: Annotated[Any, Depends(shop.once.connection)]) -> None:
        await connection.fetchval("SELECT 1")

    @shop.app.post("/import", status_code=201)
    @shop.once.protect(effects=LOCAL)
    async def imports(request: Request, op: Operation, user: Annotated[None, Depends(user)]) -> int:
        await shop.database.insert(op.connection, "imported")
        return len(await request.body())

    @shop.app.post("/orders", status_code=201)
    @shop.once.protect(effects=LOCAL)
    async def orders(op: Operation) -> None:
        await shop.database.insert(op.connection, "order")

    async with shop.open():
        slow = [trickling(shop, "/import", key=new_key()) for _ in range(8)]
        requests = [asyncio.create_task(caller.run()) for caller in slow]
        await until(lambda: all(caller.waiting.is_set() for caller in slow))
        held = "SELECT count(*) FROM pg_stat_activity WHERE state = 'idle in transaction'"
        assert shop.database.execute(held) == [(0,)]
        assert (await shop.send(key=new_key())).status == 201
        slow[0].go_on.set()
        assert (await requests[0]).status == 201
        for caller in slow[1:]:
            caller.leave()
        for request in requests[1:]:
            request.cancel()
        await asyncio.gather(*requests[1:], return_exceptions=True)
        assert shop.rows == ["imported", "order"]


@pytest.mark.parametrize("effects", [INLINE, PHASED])
async def test_no_session_is_opened_before_the_body_arrives(tables_dsn: str, effects: Any) -> None:
    def routes(shop: SqlShop) -> None:
        async def user(session: shop.session) -> None:
            await session.connection()

        @shop.post(effects=effects)
        async def create(request: Request, user: Annotated[None, Depends(user)]) -> None: ...

    async with opened(tables_dsn, "asyncpg", routes) as shop:
        caller = trickling(shop, "/orders")
        request = asyncio.create_task(caller.run())
        await until(caller.waiting.is_set)
        await asyncio.sleep(0)
        assert shop.lent == 0
        caller.go_on.set()
        assert (await request).status == 201
