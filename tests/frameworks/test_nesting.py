"""Applications in each other, several `Once` in one, a scope that passes twice: each request is claimed by its own."""

from contextlib import asynccontextmanager
from typing import Annotated, Any
from uuid import uuid4

import httpx
import pytest
from fastapi import APIRouter, Depends, FastAPI, Request
from sqlalchemy import text
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.routing import Host, Mount, Route

from frameworks.shop import KEY, LedgerOnce, Shop, new_key, tenant_of
from frameworks.sqlshop import engine_for
from harness.asgi import Caller, call
from harness.ledger import Ledger
from harness.patience import PATIENCE
from harness.served import Served
from oncekey.core.errors import ConfigurationError, StoreUnavailableError
from oncekey.core.model import INLINE, LOCAL, PHASED, SECOND
from oncekey.core.policy import Policy
from oncekey.engine.operation import Operation
from oncekey.once import SINGLE_TENANT, Once
from oncekey.testing.claims import ManualClock
from oncekey.workers.completer import Completer
from phased.bank import ClockedOnce


def keyed(key: str = KEY, **more: str) -> dict[str, str]:
    return {"Idempotency-Key": key, **more}


def mounted(inner: Shop, outer: Shop, path: str = "/v1") -> None:
    outer.app.mount(path, inner.app)


# ------------------------------------------------------------------------------------------- two Once, one in the other


@pytest.mark.parametrize("effects", [LOCAL, INLINE])
@pytest.mark.parametrize("required", [True, False], ids=["required", "optional"])
async def test_a_mounted_application_uses_its_own_tenants_and_store(effects: Any, required: bool) -> None:
    # R23, R24
    outer, inner = Shop(tenant=SINGLE_TENANT), Shop()

    @inner.post("/cards", effects=effects, require_key=required)
    async def create(request: Request, op: Operation) -> dict[str, str]:
        if effects is LOCAL:
            op.connection.add(tenant_of(request))
        inner.runs.append(1)
        return {"of": tenant_of(request), "scope": op.scope}

    mounted(inner, outer)
    async with outer.once.lifespan(outer.app), inner.once.lifespan(inner.app):
        for _ in range(2):
            for tenant in ("acme", "bolt"):
                reply = await outer.send("/v1/cards", headers=[("X-Tenant", tenant)])
                assert (reply.status, reply.json()["of"]) == (200, tenant)
                assert tenant in reply.json()["scope"]
        assert (len(inner.runs), len(inner.ledger.records), outer.ledger.records) == (2, 2, [])
        theirs = await outer.send(f"/v1/idempotency-keys/{KEY}", method="GET", key=None)
        assert (theirs.status, theirs.json()["state"]) == (200, "completed")
        stranger = await outer.send(
            f"/v1/idempotency-keys/{KEY}", method="GET", key=None, headers=[("X-Tenant", "carol")]
        )
        assert stranger.status == 404
        assert (await outer.send(f"/idempotency-keys/{KEY}", method="GET", key=None)).status == 404
    assert (inner.ledger.open, outer.ledger.open) == (0, 0)


async def test_outer_routes_use_the_outer_store() -> None:
    outer, inner = Shop(tenant=SINGLE_TENANT), Shop()

    @outer.post(effects=LOCAL)
    async def reindex(op: Operation) -> str:
        op.connection.add("outer")
        return op.scope

    mounted(inner, outer)
    replies = [await outer.send("/orders") for _ in range(2)]
    assert [reply.replayed for reply in replies] == [False, True]
    assert (outer.ledger.rows, inner.ledger.records) == (["outer"], [])


async def test_refusals_and_status_links_use_the_inner_settings() -> None:
    # R29, R84
    outer = Shop(tenant=SINGLE_TENANT, status="/outer-keys")
    inner = Shop(status="/inner-keys", policy=Policy(docs_url="/inner-docs", on_in_progress="accepted"))
    began: list[Any] = []

    @inner.post(effects=INLINE)
    async def create() -> str:
        if not began:
            began.append(await outer.send("/v1/orders"))
        return "done"

    mounted(inner, outer)
    assert (await outer.send("/v1/orders")).status == 200
    (duplicate,) = began
    assert (duplicate.status, duplicate.header("location")) == (202, f"/v1/inner-keys/{KEY}")
    assert "/inner-docs" in (await outer.send("/v1/orders", key=None)).header("link")


async def test_the_inner_application_receives_the_whole_body() -> None:
    outer, inner = Shop(policy=Policy(max_request_bytes=10)), Shop(policy=Policy(max_request_bytes=100))

    @inner.post(effects=INLINE)
    async def create(request: Request) -> int:
        return len(await request.body())

    mounted(inner, outer)
    # The outer limit is for what the outer one claims.
    reply = await outer.send("/v1/orders", [b"x" * 30, b"y" * 30])
    assert (reply.status, reply.body) == (200, b"60")
    assert (await outer.send("/v1/orders", [b"x" * 60, b"y" * 60], key=new_key())).status == 413


async def test_the_claiming_installation_settles_an_exception() -> None:
    outer, inner = Shop(), Shop()

    @inner.post(effects=INLINE)
    async def create() -> None:
        raise TimeoutError

    mounted(inner, outer)
    assert (await outer.send("/v1/orders")).status == 500
    assert (await outer.send("/v1/orders")).code == "idempotency_outcome_unknown"
    assert (inner.state, outer.ledger.records) == ("unknown", [])


@pytest.mark.parametrize("wrapping", ["mount", "middleware", "host", "copy"])
async def test_every_kind_of_mount_uses_the_inner_installation(wrapping: str) -> None:
    class Around:
        def __init__(self, app: Any) -> None:
            self.app = app

        async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
            await self.app(dict(scope) if wrapping == "copy" else scope, receive, send)

    outer, inner = Shop(app=Starlette(), tenant=SINGLE_TENANT), Shop()

    @inner.post(effects=LOCAL)
    async def create(op: Operation, connection: Annotated[Any, Depends(inner.once.connection)]) -> None:
        connection.add("row")

    route = {
        "mount": Mount("/v1", app=inner.app),
        "middleware": Mount("/v1", app=inner.app, middleware=[Middleware(Around)]),
        "host": Mount("/v1", routes=[Host("shop.example", app=inner.app)]),
        "copy": Mount("/v1", app=Around(inner.app)),
    }[wrapping]
    outer.app.router.routes.append(route)
    async with outer.once.lifespan(outer.app), inner.once.lifespan(inner.app):
        replies = [await outer.send("/v1/orders", headers=[("Host", "shop.example")]) for _ in range(2)]
    assert [(reply.status, reply.replayed) for reply in replies] == [(200, False), (200, True)]
    assert (inner.ledger.rows, outer.ledger.records) == (["row"], [])


async def test_calling_another_application_creates_a_separate_record() -> None:
    # L7
    outer, other = Shop(), Shop()

    @other.post("/charges", effects=LOCAL)
    async def charge(op: Operation) -> str:
        op.connection.add("charge")
        return "charged"

    @outer.post(effects=LOCAL)
    async def create(op: Operation) -> str:
        op.connection.add("order")
        transport = httpx.ASGITransport(other.app)
        async with httpx.AsyncClient(transport=transport, base_url="http://other") as client:
            return (await client.post("/charges", headers=keyed())).text

    replies = [await outer.send("/orders") for _ in range(2)]
    assert [(reply.status, reply.replayed) for reply in replies] == [(200, False), (200, True)]
    assert (outer.ledger.rows, other.ledger.rows) == (["order"], ["charge"])


async def test_a_called_application_does_not_inherit_the_exchange() -> None:
    # The context of a caller is inherited; its installation is not.
    outer, bare = Shop(), FastAPI()

    @outer.once.protect(effects=INLINE)
    async def charge() -> str:
        outer.runs.append(1)
        return "charged"

    bare.post("/charges")(charge)

    @outer.app.post("/orders")
    async def create() -> str:
        await Caller(bare, "POST", "/charges", headers=keyed()).run(raising=True)
        return "done"

    for target in (Caller(bare, "POST", "/charges", headers=keyed()), outer.caller("/orders")):
        with pytest.raises(RuntimeError, match=r"once\.install\(app\) is missing|was called as a function by"):
            await target.run(raising=True)
    assert outer.runs == []


# ------------------------------------------------------------------------------------ two Once in one application


async def test_two_once_instances_claim_for_their_own_handlers() -> None:
    shop = Shop()
    payments = LedgerOnce(Ledger(), policy=Policy(namespace="payments", docs_url="/payments-idempotency"))
    payments.install(shop.app, tenant=SINGLE_TENANT, status="/payment-keys")

    @shop.post(effects=LOCAL)
    async def order(op: Operation) -> str:
        op.connection.add("order")
        return op.scope

    router = APIRouter()

    @router.post("/pay")
    @payments.protect(effects=LOCAL)
    async def pay(op: Operation, connection: Annotated[Any, Depends(payments.connection)]) -> str:
        assert op.connection is connection
        connection.add("payment")
        return op.scope

    shop.app.include_router(router)
    async with shop.once.lifespan(shop.app), payments.lifespan(shop.app):
        for path in ("/orders", "/pay"):
            replies = [await shop.send(path) for _ in range(2)]
            assert [(reply.status, reply.replayed) for reply in replies] == [(200, False), (200, True)]
        assert (shop.ledger.rows, payments.ledger.rows) == (["order"], ["payment"])
        for path in ("/idempotency-keys", "/payment-keys"):
            assert (await shop.send(f"{path}/{KEY}", method="GET", key=None)).status == 200


def test_two_once_instances_need_distinct_page_paths() -> None:
    shop = Shop()
    payments = Once("memory:")
    with pytest.raises(ConfigurationError, match=r"another Once already serves /idempotency-keys .* status=None"):
        payments.install(shop.app, tenant=SINGLE_TENANT)
    with pytest.raises(ConfigurationError, match=r"another Once already serves /idempotency .*docs_url"):
        payments.install(shop.app, tenant=SINGLE_TENANT, status=None)


async def test_a_router_of_an_uninstalled_once_is_rejected() -> None:
    shop, payments = Shop(), LedgerOnce(Ledger())
    router = APIRouter()

    @router.post("/pay")
    @payments.protect(effects=INLINE, operation="pay")
    async def pay() -> None:
        shop.runs.append(1)

    shop.app.include_router(router, prefix="/v1")
    with pytest.raises(ConfigurationError, match=r"pay is served at /v1/pay, but the Once that protects it is not"):
        await shop.once.start(shop.app)
    for key in (KEY, None):
        with pytest.raises(RuntimeError, match="pay is protected by a Once that is not installed here: call install"):
            await shop.caller("/v1/pay", key=key).run(raising=True)
    assert shop.runs == []


async def test_a_missing_installation_is_refused_at_start_up() -> None:
    once = LedgerOnce(Ledger())
    app = FastAPI(lifespan=once.lifespan)

    @app.post("/orders")
    @once.protect(effects=INLINE, operation="create_order")
    async def create() -> None: ...

    with pytest.raises(ConfigurationError, match=r"create_order is served at /orders, .* call install\(app, tenant="):
        async with app.router.lifespan_context(app):
            pass
    other = FastAPI(lifespan=once.lifespan)
    other.mount("/v1", app)
    with pytest.raises(ConfigurationError, match="create_order is served at /v1/orders"):
        async with other.router.lifespan_context(other):
            pass


async def test_an_install_on_the_outer_application_is_enough() -> None:
    once = LedgerOnce(Ledger())
    inner, outer = FastAPI(), FastAPI()
    once.install(outer, tenant=tenant_of)

    @inner.post("/orders")
    @once.protect(effects=INLINE)
    async def create() -> None: ...

    outer.mount("/v1", inner)
    async with once.lifespan(outer), once.lifespan(inner):
        assert (await call(outer, "POST", "/v1/orders", headers=keyed())).status == 200


async def test_decorated_handlers_behind_once_asgi_are_rejected_at_startup() -> None:
    once = LedgerOnce(Ledger())

    @once.protect(effects=INLINE)
    async def create(request: Request) -> Any: ...

    app = once.asgi(Starlette(routes=[Route("/orders", create, methods=["POST"])]), tenant=lambda _: "acme", enrol={})
    with pytest.raises(ConfigurationError, match=r"is not installed there: call install\(app, tenant="):
        await once.start(app)


def test_an_enrolment_of_another_once_is_refused() -> None:
    once, other = Once("memory:"), Once("memory:")
    with pytest.raises(ConfigurationError, match="old was created by another Once"):
        once.install(FastAPI(), tenant=SINGLE_TENANT, enrol={"POST /x": other.by_path(effects=INLINE, operation="old")})


# ----------------------------------------------------------------------------------- one Once, installed twice


@pytest.mark.parametrize("effects", [LOCAL, INLINE])
async def test_the_innermost_installation_of_one_once_claims(effects: Any) -> None:
    once = LedgerOnce(Ledger())
    inner, outer = FastAPI(), FastAPI()
    once.install(outer, tenant=lambda _: "outer")
    once.install(inner, tenant=lambda _: "inner")

    async def create(op: Operation) -> str:
        if effects is LOCAL:
            op.connection.add("row")
        return op.scope

    inner.post("/orders")(once.protect(effects=effects, operation="inner")(create))
    outer.post("/orders")(once.protect(effects=effects, operation="outer")(create))
    outer.mount("/v1", inner)
    async with once.lifespan(outer), once.lifespan(inner):
        for path, tenant in (("/v1/orders", "inner"), ("/orders", "outer")):
            replies = [await call(outer, "POST", path, headers=keyed()) for _ in range(2)]
            assert [reply.replayed for reply in replies] == [False, True]
            assert all(tenant in reply.json() for reply in replies)
            status = await call(outer, "GET", f"{path.removesuffix('orders')}idempotency-keys/{KEY}")
            assert status.status == 200
        assert (once.app_of("inner"), once.app_of("outer")) == (inner, outer)
    assert len(once.ledger.records) == 2
    assert once.ledger.log.count("close") == 1


async def test_nested_lifespans_stop_with_the_outermost() -> None:
    once = LedgerOnce(Ledger())
    async with once.lifespan():
        async with once.lifespan():
            pass
        assert (once.running, once.ledger.log) == (True, [])
    assert (once.running, once.ledger.log) == (False, ["close"])


@pytest.mark.parametrize("both", ["one Once", "two Once"])
async def test_a_completer_resumes_in_the_application_that_claimed(both: str, tmp_path: Any) -> None:
    # H7: through the application of that installation, under the path and the root that it had there
    clock = ManualClock()
    once = ClockedOnce(f"sqlite:///{tmp_path / 'a.db'}", clock, Policy())
    around = once if both == "one Once" else ClockedOnce(f"sqlite:///{tmp_path / 'b.db'}", clock, Policy())
    inner, outer = FastAPI(), FastAPI()
    around.install(outer, tenant=lambda _: "outer")
    once.install(inner, tenant=lambda _: "inner")
    runs: list[str] = []

    @inner.post("/pay")
    @once.protect(effects=PHASED)
    async def pay(request: Request, op: Operation) -> str:
        runs.append(f"{request.scope['root_path']} {op.scope}")
        await op.phase("noted", lambda _: None)
        if len(runs) == 1:
            raise ConnectionResetError
        return "paid"

    outer.mount("/v1", inner)
    async with around.lifespan(outer), once.lifespan(inner):
        assert (await call(outer, "POST", "/v1/pay", headers=keyed())).status == 500
        clock.advance(6 * SECOND)
        assert await Completer(once).run_once() == 1
        assert (await call(outer, "POST", "/v1/pay", headers=keyed())).replayed
    assert len(runs) == 2
    assert runs[0] == runs[1]
    assert runs[0].startswith("/v1 ")
    assert runs[0].endswith("inner")


# ------------------------------------------------------------------------------------------ the right database


async def test_connections_use_the_database_of_their_once(tmp_path: Any) -> None:
    public, internal = (Once(f"sqlite:///{tmp_path / name}.db", migrate=True) for name in ("public", "internal"))
    api, app = FastAPI(), FastAPI()
    public.install(api, tenant=tenant_of)
    internal.install(app, tenant=SINGLE_TENANT)

    async def file_of(connection: Any) -> str:
        rows = await (await connection.execute("PRAGMA database_list")).fetchall()
        return str(rows[0]["file"]).rpartition("/")[2]

    @api.post("/orders")
    @public.protect(effects=LOCAL)
    async def create(op: Operation, lent: Annotated[Any, Depends(public.connection)]) -> list[str]:
        return [await file_of(op.connection), await file_of(lent)]

    @api.get("/orders")
    async def listing(
        ours: Annotated[Any, Depends(public.connection)], theirs: Annotated[Any, Depends(internal.connection)]
    ) -> list[str]:
        return [await file_of(ours), await file_of(theirs)]

    @api.post("/steps")
    @public.protect(effects=PHASED)
    async def steps(op: Operation) -> str:
        return await op.phase("here", file_of)

    @api.post("/wrong")
    @public.protect(effects=LOCAL)
    async def wrong(op: Operation, lent: Annotated[Any, Depends(internal.connection)]) -> None: ...

    app.mount("/v1", api)
    async with internal.lifespan(app), public.lifespan(api):
        assert (await call(app, "POST", "/v1/orders", headers=keyed())).json() == ["public.db"] * 2
        assert (await call(app, "GET", "/v1/orders")).json() == ["public.db", "internal.db"]
        assert (await call(app, "POST", "/v1/steps", headers=keyed(new_key()))).json() == "public.db"
        with pytest.raises(ConfigurationError, match=r"once\.connection would lose what is written here"):
            await Caller(app, "POST", "/v1/wrong", headers=keyed(new_key())).run(raising=True)


@pytest.fixture
def two_databases(postgres_server: Any) -> Any:
    names = [f"oncekey_{uuid4().hex}" for _ in range(2)]
    yield [postgres_server.create_database(name) for name in names]
    for name in names:
        postgres_server.drop_database(name)


async def test_sessions_use_the_database_of_their_once(two_databases: list[str]) -> None:
    ours, theirs = (engine_for(dsn, "asyncpg") for dsn in two_databases)
    async with theirs.begin() as connection:
        await connection.execute(text("CREATE TABLE seen (item TEXT)"))
    once, auditing = Once(ours, migrate=True), Once(theirs, migrate=True)
    app, outer = FastAPI(), FastAPI()
    once.install(app, tenant=tenant_of)
    auditing.install(outer, tenant=SINGLE_TENANT)

    @app.post("/orders")
    @once.protect(effects=LOCAL)
    async def create(
        session: Annotated[Any, Depends(once.session)], seen: Annotated[Any, Depends(auditing.session)]
    ) -> str:
        # The other database's session is an ordinary one: what it commits is its own.
        await seen.execute(text("INSERT INTO seen VALUES ('tea')"))
        await seen.commit()
        return str((await session.execute(text("SELECT current_database()"))).scalar_one())

    outer.mount("/v1", app)
    async with auditing.lifespan(outer), once.lifespan(app):
        replies = [await call(outer, "POST", "/v1/orders", headers=keyed()) for _ in range(2)]
    assert [(reply.status, reply.replayed) for reply in replies] == [(200, False), (200, True)]
    assert replies[0].json() == ours.url.database
    async with theirs.connect() as connection:
        # The dependencies of a replay are asked again, its handler is not.
        assert (await connection.execute(text("SELECT count(*) FROM seen"))).scalar_one() == 1
    await ours.dispose()
    await theirs.dispose()


async def test_a_store_failure_after_the_claim_leaves_an_unknown_outcome(tables_dsn: str) -> None:
    # R110: the outer one lent a session and never claimed; what ran, ran for the inner one
    engine = engine_for(tables_dsn, "asyncpg")
    lending, shop = Once(engine, migrate=True, policy=Policy(docs_url="/lending")), Shop(install=False)
    lending.install(shop.app, tenant=SINGLE_TENANT, status=None)
    shop.once.install(shop.app, tenant=tenant_of)

    @shop.post("/pay", effects=INLINE)
    async def pay(session: Annotated[Any, Depends(lending.session)]) -> None:
        shop.runs.append(1)
        raise StoreUnavailableError("the other database is gone")

    async with lending.lifespan(shop.app), shop.once.lifespan(shop.app):
        with pytest.raises(StoreUnavailableError):
            await shop.caller("/pay").run(raising=True)
        assert (await shop.send("/pay")).code == "idempotency_outcome_unknown"
    assert (shop.runs, shop.state) == ([1], "unknown")
    await engine.dispose()


# ------------------------------------------------------------------------------------------- the same scope again


class Retry:
    """Middleware that sends the same scope through the application a second time."""

    def __init__(self, app: Any, on: type[Exception]) -> None:
        self.app = app
        self.on = on

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        try:
            await self.app(scope, receive, send)
        except self.on:
            await self.app(scope, receive, send)


async def test_a_middleware_retry_of_an_enrolled_path_runs_once() -> None:
    once, charges = LedgerOnce(Ledger()), []

    async def pay(request: Request) -> Any:
        charges.append(await request.body())
        raise TimeoutError("the provider charged and hung up")

    app = Starlette(routes=[Route("/pay", pay, methods=["POST"])])
    once.install(app, tenant=lambda _: "acme", enrol={"POST /pay": once.by_path(effects=INLINE, operation="pay")})
    app.add_middleware(Retry, on=TimeoutError)
    for _ in range(2):
        reply = await call(app, "POST", "/pay", headers=keyed(), body=[b"1", b"2"])
        assert (reply.status, reply.code) == (409, "idempotency_outcome_unknown")
    assert charges == [b"12"]


@pytest.mark.parametrize("effects", [LOCAL, INLINE])
@pytest.mark.parametrize("body", [b"", b"one", [b"one", b"two"]])
async def test_a_middleware_retry_counts_as_a_second_attempt(effects: Any, body: Any) -> None:
    shop = Shop()

    @shop.post(effects=effects)
    async def create(request: Request, op: Operation) -> str:
        shop.runs.append(await request.body())
        if effects is LOCAL:
            op.connection.add("row")
        if len(shop.runs) == 1:
            raise TimeoutError
        return "done"

    shop.app.add_middleware(Retry, on=TimeoutError)
    reply = await shop.send("/orders", body or None)
    whole = b"".join(body) if isinstance(body, list) else body
    if effects is LOCAL:
        # What was rolled back runs again, with the same body, and is committed once.
        assert (reply.status, shop.runs, shop.ledger.rows) == (200, [whole, whole], ["row"])
        assert (await shop.send("/orders", body or None)).replayed
    else:
        assert (reply.code, shop.runs) == ("idempotency_outcome_unknown", [whole])
    assert shop.ledger.open == 0


async def test_a_retry_between_two_installs_counts_as_a_second_attempt() -> None:
    once = LedgerOnce(Ledger())
    inner, outer, runs = FastAPI(), FastAPI(), []
    once.install(inner, tenant=tenant_of)
    LedgerOnce(Ledger()).install(outer, tenant=SINGLE_TENANT)

    @inner.post("/orders")
    @once.protect(effects=LOCAL)
    async def create(request: Request, op: Operation) -> str:
        runs.append(await request.body())
        op.connection.add("row")
        if len(runs) == 1:
            raise TimeoutError
        return "done"

    inner.add_middleware(Retry, on=TimeoutError)
    outer.mount("/v1", inner)
    reply = await call(outer, "POST", "/v1/orders", headers=keyed(), body=[b"a", b"b"])
    assert (reply.status, runs, once.ledger.rows) == (200, [b"ab", b"ab"], ["row"])


# ------------------------------------------------------------------------------------------- handlers as functions


async def test_a_protected_handler_that_is_called_by_another_route_raises() -> None:
    # L7
    shop = Shop()

    @shop.post("/one", effects=INLINE, operation="one")
    async def one() -> str:
        shop.runs.append(1)
        return "done"

    @shop.app.post("/batch")
    @shop.app.get("/batch")
    async def batch() -> str:
        await one()
        return "all done"

    for method, key in (("POST", None), ("POST", KEY), ("GET", None)):
        with pytest.raises(
            RuntimeError, match=r"one is protected and was called as a function by .*batch, which is not"
        ):
            await shop.caller("/batch", method=method, key=key).run(raising=True)
    assert (shop.runs, shop.ledger.records) == ([], [])
    assert (await shop.send("/one")).status == 200


@pytest.mark.parametrize("key", [KEY, None])
async def test_a_protected_handler_that_is_called_by_another_protected_one_raises(key: str | None) -> None:
    # L7
    shop = Shop()

    @shop.post("/one", effects=INLINE, require_key=False, operation="one")
    async def one() -> str:
        shop.runs.append(1)
        return "done"

    @shop.post("/two", effects=INLINE, require_key=False, operation="two")
    async def two() -> str:
        return await one()

    with pytest.raises(RuntimeError, match=r"one request is one operation|was called as a function by"):
        await shop.caller("/two", key=key).run(raising=True)
    assert shop.runs == []


async def test_calling_a_protected_handler_of_another_once_raises() -> None:
    # L7
    outer, inner = Shop(), Shop()

    @outer.once.protect(effects=LOCAL)
    async def order(op: Operation) -> None:
        outer.runs.append(1)

    @inner.post(effects=LOCAL)
    async def create(op: Operation) -> None:
        await order()

    mounted(inner, outer)
    with pytest.raises(RuntimeError, match="one request is one operation"):
        await outer.caller("/v1/orders").run(raising=True)
    assert (outer.runs, outer.ledger.records) == ([], [])


async def test_enrolling_the_path_of_another_onces_handler_is_rejected() -> None:
    # one request would be two operations
    gate, shop = LedgerOnce(Ledger()), Shop()

    @shop.post("/orders", effects=INLINE)
    async def create() -> None:
        shop.runs.append(1)

    enrolment = gate.by_path(effects=INLINE, operation="gate")
    app = gate.asgi(shop.app, tenant=lambda _: "acme", enrol={"POST /orders": enrolment})
    with pytest.raises(ConfigurationError, match=r"POST /orders is enrolled twice"):
        await gate.start(app)
    with pytest.raises(RuntimeError, match="one request is one operation"):
        await Caller(app, "POST", "/orders", headers=keyed()).run(raising=True)
    assert shop.runs == []


# ---------------------------------------------------------------------------------------------- over a real socket


def test_mounted_applications_are_served_over_a_socket(tmp_path: Any) -> None:
    # R23
    public, internal = (Once(f"sqlite:///{tmp_path / name}.db", migrate=True) for name in ("public", "internal"))
    api = FastAPI()

    @asynccontextmanager
    async def lifespan(app: Any) -> Any:
        async with internal.lifespan(app), public.lifespan(api):
            yield

    app = FastAPI(lifespan=lifespan)
    public.install(api, tenant=tenant_of)
    internal.install(app, tenant=SINGLE_TENANT)
    failed: list[int] = []

    @api.post("/cards", status_code=201)
    @public.protect(effects=INLINE)
    async def card(request: Request) -> str:
        return tenant_of(request)

    @api.put("/cards")
    @public.protect(effects=LOCAL)
    async def flaky(request: Request, op: Operation) -> int:
        failed.append(len(await request.body()))
        if len(failed) == 1:
            raise TimeoutError
        return len(failed)

    app.mount("/v1", api)
    api.add_middleware(Retry, on=TimeoutError)
    with (
        Served(app, root_path="/proxied") as server,
        httpx.Client(base_url=f"http://127.0.0.1:{server.port}", timeout=PATIENCE) as client,
    ):
        for tenant in ("acme", "bolt", "acme"):
            reply = client.post("/v1/cards", headers=keyed(**{"X-Tenant": tenant}))
            assert (reply.status_code, reply.json()) == (201, tenant)
        assert client.get(f"/v1/idempotency-keys/{KEY}", headers={"X-Tenant": "bolt"}).status_code == 200
        assert client.get(f"/v1/idempotency-keys/{KEY}", headers={"X-Tenant": "eve"}).status_code == 404
        assert client.get(f"/idempotency-keys/{KEY}").status_code == 404
        again = [client.put("/v1/cards", headers=keyed(new_key()), content=b"x" * 70_000) for _ in range(1)]
        assert [(reply.status_code, reply.json()) for reply in again] == [(200, 2)]
        assert failed == [70_000, 70_000]
