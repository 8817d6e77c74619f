"""`once.session` and `once.connection` as dependencies: what is lent where, and that all of it comes back."""

import asyncio
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any

import psycopg
import pytest
from fastapi import APIRouter, Depends, FastAPI, HTTPException
from starlette.applications import Starlette
from starlette.endpoints import HTTPEndpoint
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route

from frameworks.realshop import RealShop, SqliteFile
from frameworks.shop import LedgerOnce, Shop, tenant_of
from harness.asgi import Caller, cancelled_at, until
from harness.ledger import Ledger, down
from harness.patience import PATIENCE
from oncekey.core.errors import ConfigurationError
from oncekey.core.model import INLINE, LOCAL, PHASED
from oncekey.engine.operation import Operation, SyncOperation
from oncekey.frameworks.asgi.requests import current
from oncekey.once import Once


class Drawer:
    """An ordinary session."""

    def __init__(self) -> None:
        self.closed = 0

    async def rest(self) -> None: ...

    async def close(self) -> None:
        self.closed += 1


class WithSessions(Ledger):
    """A driver with sessions, as far as lending can tell."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.drawers: list[Drawer] = []

    def session(self) -> Drawer:
        self.drawers.append(Drawer())
        return self.drawers[-1]

    def stepping_session(self) -> Drawer:
        raise AssertionError("nobody here has steps that are seen")


def borrowed(shop: Shop) -> Any:
    """The annotation of a handler's connection."""
    return Annotated[Any, Depends(shop.once.connection)]


async def test_a_dependency_shares_the_handlers_connection() -> None:
    shop = Shop()

    async def audit(connection: borrowed(shop)) -> None:
        connection.add("audit")

    @shop.post(effects=LOCAL)
    async def create(op: Operation, audit: Annotated[None, Depends(audit)], connection: borrowed(shop)) -> None:
        assert connection is op.connection
        connection.add("order")

    assert (await shop.send("/orders")).status == 200
    assert shop.ledger.rows == ["audit", "order"]
    assert shop.ledger.log == ["begin", "claim", "step", "commit"]
    assert (await shop.send("/orders")).replayed
    assert shop.ledger.open == 0
    assert shop.ledger.rows == ["audit", "order"]


@pytest.mark.parametrize("raised", [HTTPException(409), HTTPException(503), RuntimeError("bug")])
async def test_rows_of_a_dependency_roll_back_with_the_handler(raised: Exception) -> None:
    # L6
    shop = Shop()

    async def audit(connection: borrowed(shop)) -> None:
        connection.add("audit")

    @shop.post(effects=LOCAL)
    async def create(audit: Annotated[None, Depends(audit)]) -> None:
        raise raised

    with suppress(RuntimeError):
        await shop.send("/orders")
    assert shop.ledger.rows == []
    assert shop.ledger.open == 0


async def test_a_rejected_claim_releases_the_connection() -> None:
    shop, entered, go = Shop(), asyncio.Event(), asyncio.Event()

    @shop.post(effects=LOCAL)
    async def create(connection: borrowed(shop)) -> None:
        entered.set()
        await go.wait()

    first = asyncio.create_task(shop.send("/orders"))
    await entered.wait()
    second = await shop.send("/orders")
    assert second.status == 409
    assert shop.ledger.open == 1
    go.set()
    assert (await first).status == 200
    assert shop.ledger.open == 0


async def test_a_failed_begin_in_a_dependency_returns_503() -> None:
    # R110
    shop = Shop()

    @shop.post(effects=LOCAL)
    async def create(connection: borrowed(shop)) -> None:
        shop.runs.append(connection)

    shop.ledger.faults["begin"].append(down)
    reply = await shop.send("/orders")
    assert (reply.status, reply.code) == (503, "idempotency_store_unavailable")
    assert shop.runs == []
    assert (await shop.send("/orders")).status == 200


async def test_a_store_error_of_the_application_is_raised_to_it() -> None:
    shop = Shop()

    @shop.app.post("/plain")
    async def plain() -> None:
        await shop.once.asynchronous().open()

    shop.ledger.faults["begin"].append(down)
    with pytest.raises(Exception, match="down"):
        await shop.caller("/plain").run(raising=True)


async def test_only_get_routes_may_use_a_read_connection() -> None:
    shop = Shop()

    @shop.app.get("/orders")
    async def listing(connection: borrowed(shop)) -> int:
        return shop.ledger.open

    @shop.app.post("/plain")
    async def plain(connection: borrowed(shop)) -> None:
        raise AssertionError("it would lose its rows")

    @shop.post("/inline", effects=INLINE)
    async def inline(connection: borrowed(shop)) -> None:
        raise AssertionError("it would lose its rows")

    assert (await shop.send("/orders", method="GET", key=None)).json() == 1
    assert shop.ledger.open == 0
    for target in ("/plain", "/inline"):
        for key in ("key-000000000000007", None):
            with pytest.raises(ConfigurationError, match="effects=LOCAL"):
                await shop.caller(target, key=key).run(raising=True)
    assert shop.ledger.open == 0
    assert shop.ledger.records == []


async def test_a_keyless_request_commits_dependency_rows() -> None:
    shop = Shop()

    async def audit(connection: borrowed(shop)) -> None:
        connection.add("audit")

    @shop.post(effects=LOCAL, require_key=False)
    async def create(audit: Annotated[None, Depends(audit)], op: Operation) -> None:
        op.connection.add("order")

    assert (await shop.send("/orders", key=None)).status == 200
    assert shop.ledger.rows == ["audit", "order"]
    assert shop.ledger.log.count("begin") == 1
    assert shop.ledger.open == 0


async def test_a_request_may_be_cancelled_at_every_await() -> None:
    # apishape 9
    finished, number = False, 0
    while not finished:
        number += 1
        shop = Shop(yields=True)

        async def audit(connection: borrowed(shop)) -> None:
            connection.add("audit")
            await asyncio.sleep(0)

        @shop.post(effects=LOCAL)
        async def create(audit: Annotated[None, Depends(audit)], op: Operation) -> None:
            await asyncio.sleep(0)
            op.connection.add("order")

        finished = await cancelled_at(number, shop.caller("/orders").run()) is not None
        for installation in shop.once._installed.values():
            assert await installation.running_work.wait(PATIENCE)
        assert shop.ledger.open == 0
        assert (await shop.send("/orders")).status == 200
        assert shop.ledger.rows == ["audit", "order"]
        assert shop.ledger.open == 0
    assert number > 5


async def test_a_get_may_be_cancelled_at_every_await() -> None:
    finished, number = False, 0
    while not finished:
        number += 1
        shop = Shop(yields=True)

        @shop.app.get("/orders")
        async def listing(connection: borrowed(shop)) -> None:
            await asyncio.sleep(0)

        finished = await cancelled_at(number, shop.caller("/orders", method="GET", key=None).run()) is not None
        await until(lambda: shop.ledger.open == 0)  # noqa: B023  (awaited here)
    assert number > 3


async def test_requests_without_a_dependency_open_no_transaction() -> None:
    shop = Shop()
    seen: list[Any] = []

    @shop.app.get("/orders")
    async def listing() -> None:
        seen.append(current.get())

    await shop.send("/orders", method="GET", key=None)
    assert seen[0].transaction is None
    assert shop.ledger.log == []


async def test_once_session_requires_a_sqlalchemy_engine() -> None:
    shop = Shop()

    @shop.post(effects=LOCAL)
    async def create(session: Annotated[Any, Depends(shop.once.session)]) -> None: ...

    with pytest.raises(ConfigurationError, match="create_async_engine"):
        await shop.caller("/orders").run(raising=True)


async def test_once_session_outside_a_request_raises() -> None:
    with pytest.raises(RuntimeError, match=r"once\.install"):
        await Shop().once.session()


async def test_a_def_handler_cannot_use_an_async_connection() -> None:
    shop = Shop()

    @shop.post(effects=LOCAL)
    def create(op: SyncOperation, connection: borrowed(shop)) -> None: ...

    with pytest.raises(ConfigurationError, match="async def"):
        await shop.caller("/orders").run(raising=True)
    assert shop.ledger.open == 0


async def test_starlette_handlers_await_once_connection() -> None:
    ledger = Ledger()
    once = LedgerOnce(ledger)
    app = Starlette()
    once.install(app, tenant=tenant_of)

    class Orders(HTTPEndpoint):
        @once.protect(effects=LOCAL, operation="by_class")
        async def post(self, request: Request) -> JSONResponse:
            (await once.connection()).add("by class")
            return JSONResponse({})

    @once.protect(effects=LOCAL)
    async def by_function(request: Request) -> JSONResponse:
        (await once.connection()).add("by function")
        return JSONResponse({})

    app.router.routes.append(Route("/class", Orders))
    app.router.routes.append(Route("/function", by_function, methods=["POST"]))
    for target in ("/class", "/function"):
        reply = await Caller(app, "POST", target, headers=[("Idempotency-Key", f"key-{target}-0000000000")]).run()
        assert reply.status == 200
    assert ledger.rows == ["by class", "by function"]
    assert ledger.open == 0


async def test_an_ordinary_session_is_closed_with_its_request() -> None:
    ledger = WithSessions()
    shop = Shop()
    shop.once.ledger = ledger

    @shop.app.get("/orders")
    async def listing(session: Annotated[Any, Depends(shop.once.session)]) -> int:
        assert await shop.once.session() is session
        return session.closed

    assert (await shop.send("/orders", method="GET", key=None)).json() == 0
    assert [drawer.closed for drawer in ledger.drawers] == [1]


async def test_a_session_without_a_known_endpoint_raises() -> None:
    """An ordinary session in the hands of a LOCAL handler would not commit with the key."""
    ledger = WithSessions()
    shop = Shop()
    shop.once.ledger = ledger

    async def hidden(request: Request) -> Any:
        del request.scope["endpoint"]
        return await shop.once.session()

    @shop.post(effects=LOCAL)
    async def create(session: Annotated[Any, Depends(hidden)]) -> None:
        raise AssertionError("never entered")

    @shop.post("/steps", effects=PHASED)
    async def steps(session: Annotated[Any, Depends(hidden)]) -> None:
        raise AssertionError("never entered")

    for target in ("/orders", "/steps"):
        with pytest.raises(ConfigurationError, match=r"write through op\.connection"):
            await shop.caller(target).run(raising=True)
        assert ledger.records == []
        assert all(drawer.closed for drawer in ledger.drawers)


@pytest.mark.parametrize("driver", ["asyncpg", "psycopg"])
async def test_dependencies_receive_connections_of_real_drivers(tables_dsn: str, driver: str) -> None:
    once = Once(tables_dsn.replace("postgresql:", f"postgresql+{driver}:") + "?pool_size=2", migrate=True)
    app = FastAPI()
    once.install(app, tenant=tenant_of)
    lent = Annotated[Any, Depends(once.connection)]

    async def user(connection: lent) -> None:
        await connection.execute("SELECT 1")

    @app.post("/orders", dependencies=[Depends(user)])
    @once.protect(effects=LOCAL)
    async def create(item: str, connection: lent, op: Operation) -> None:
        assert connection is op.connection
        await connection.execute(f"INSERT INTO orders VALUES ('{item}')")
        if item == "bad":
            raise HTTPException(409)

    @app.get("/orders")
    async def listing(connection: lent) -> list[str]:
        if driver == "asyncpg":
            return [row[0] for row in await connection.fetch("SELECT item FROM orders")]
        return [row[0] for row in await (await connection.execute("SELECT item FROM orders")).fetchall()]

    with psycopg.connect(tables_dsn, autocommit=True) as connection:
        connection.execute("CREATE TABLE orders (item text)")
    await once.start(app)
    for number, (target, status) in enumerate((("?item=tea", 200), ("?item=bad", 409), ("", 422))):
        for _ in range(3):  # more often than there are connections
            key = [("Idempotency-Key", f"key-000000000000{number}")]
            assert (await Caller(app, "POST", f"/orders{target}", headers=key).run()).status == status
    for _ in range(3):
        assert (await Caller(app, "GET", "/orders").run()).json() == ["tea"]
    await once.stop()


async def test_dependency_connections_work_in_routers_and_mounts() -> None:
    # apishape 9: routers are included by reference, and a mount changes the scope
    shop = Shop()
    inner, outer = APIRouter(prefix="/v1", dependencies=[Depends(shop.once.connection)]), APIRouter(prefix="/api")

    @inner.post("/orders")
    @shop.once.protect(effects=LOCAL)
    async def create(connection: borrowed(shop), op: Operation) -> None:
        assert connection is op.connection
        connection.add("router")

    @shop.once.protect(effects=LOCAL)
    async def mounted(request: Request) -> JSONResponse:
        (await shop.once.connection()).add("mount")
        return JSONResponse({})

    outer.include_router(inner)
    shop.app.include_router(outer)
    shop.app.mount("/mounted", Starlette(routes=[Route("/orders", mounted, methods=["POST"])]))
    for number, target in enumerate(("/api/v1/orders", "/mounted/orders")):
        assert (await shop.send(target, key=f"key-000000000000{number}")).status == 200
    assert shop.ledger.rows == ["router", "mount"]
    assert shop.ledger.open == 0


@pytest.mark.parametrize("ends", ["answers", "fails"])
async def test_a_sqlite_duplicate_keeps_its_dependency_connection(tmp_path: Path, ends: str) -> None:
    # R82, L8: the dependency reads before the claim without becoming the writer, and the handler writes through it
    shop = RealShop(SqliteFile(tmp_path / "shop.db"))
    entered, looked, go = asyncio.Event(), asyncio.Event(), asyncio.Event()

    async def counted(connection: Annotated[Any, Depends(shop.once.connection)]) -> Any:
        await connection.execute("SELECT count(*) FROM orders")
        if entered.is_set():
            looked.set()
        return connection

    @shop.app.post("/orders", status_code=201)
    @shop.once.protect(effects=LOCAL, operation="create", on_in_progress="wait")
    async def create(connection: Annotated[Any, Depends(counted)]) -> None:
        shop.runs.append(1)
        await connection.execute("INSERT INTO orders VALUES (?)", (f"tea {len(shop.runs)}",))
        if not entered.is_set():
            entered.set()
            await go.wait()
            if ends == "fails":
                raise HTTPException(500)

    async with shop.open(), asyncio.timeout(PATIENCE):
        first = asyncio.create_task(shop.send())
        await entered.wait()
        second = asyncio.create_task(shop.send())
        await looked.wait()
        go.set()
        # The second may have finished before the failure of the first is stored: the key has its answer then.
        assert (await first).status in ({201} if ends == "answers" else {500, 201})
        assert (await second).status == 201
        assert shop.rows == ["tea 1" if ends == "answers" else "tea 2"]
