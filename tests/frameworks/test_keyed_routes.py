"""A repeat whose answer is stored does not enter the application, where nobody there may say no, and hears the same."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from datetime import timedelta
from typing import Annotated, Any

import pytest
from fastapi import APIRouter, Cookie, Depends, FastAPI, Header, HTTPException
from fastapi.routing import APIRoute
from pydantic import BaseModel
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Host, Mount, Route, Router

from frameworks.realshop import RealShop, SqliteFile
from frameworks.shop import Shop, new_key
from harness.asgi import Reply
from harness.ledger import down
from oncekey.canonical.fingerprint import Selection
from oncekey.core.model import LOCAL, SECOND
from oncekey.core.policy import Policy
from oncekey.engine.operation import Operation
from oncekey.frameworks.asgi.installation import KeyedRoutes
from oncekey.once import Once
from oncekey.testing.claims import ManualClock

NOW = 1_700_000_000 * SECOND


class OrderIn(BaseModel):
    item: str


class Noted(OrderIn):
    note: int = 0


class Entrances:
    """Counts how often the application behind the middleware is entered."""

    def __init__(self, shop: Any) -> None:
        self.count = 0
        router = shop.app.router
        inner = router.__call__

        async def counted(scope: Any, receive: Any, send: Any) -> None:
            self.count += scope["type"] == "http"
            await inner(scope, receive, send)

        shop.app.build_middleware_stack = functools.partial(self._built, shop.app, counted)

    @staticmethod
    def _built(app: Any, counted: Any) -> Any:
        kept, app.router = app.router, _Forwarding(app.router, counted)
        try:
            return type(app).build_middleware_stack(app)
        finally:
            app.router = kept


class _Forwarding:
    def __init__(self, router: Any, counted: Any) -> None:
        self._router, self._counted = router, counted

    def __getattr__(self, name: str) -> Any:
        return getattr(self._router, name)

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        await self._counted(scope, receive, send)


def a_shop(**options: Any) -> tuple[Shop, Entrances]:
    shop = Shop(**options)

    @shop.post("/orders/{number}", effects=LOCAL, status_code=201)
    async def create(number: int, order: OrderIn, op: Operation, note: str = "") -> dict[str, Any]:
        shop.runs.append((number, order.item, note))
        op.connection.add(order.item)
        return {"number": number, "item": order.item, "note": note}

    return shop, Entrances(shop)


def seen(reply: Reply) -> Any:
    """All that a client sees, but what names one refusal."""
    if reply.replayed or reply.status < 300:
        return reply.status, sorted(reply.lines), reply.body
    return reply.status, reply.code


TEA = {"item": "tea"}


async def test_a_replay_skips_the_application() -> None:
    # R96
    shop, entered = a_shop()
    first = await shop.send("/orders/1", TEA)
    again = await shop.send("/orders/1", TEA)
    assert (again.status, again.body, again.replayed) == (201, first.body, True)
    assert (entered.count, shop.runs) == (1, [(1, "tea", "")])


REQUESTS: dict[str, dict[str, Any]] = {
    "the same": {},
    "spelled otherwise": {"body": b'{ "item" : "tea" }', "headers": [("Content-Type", "application/json")]},
    "another body": {"body": {"item": "coffee"}},
    "no body": {"body": None},
    "not JSON": {"body": b"{", "headers": [("Content-Type", "application/json")]},
    "not what the model wants": {"body": {"item": 3}},
    "another query": {"target": "/orders/1?note=x"},
    "another path": {"target": "/orders/2"},
    "no such path": {"target": "/nothing/1"},
    "another method": {"method": "PUT"},
    "another tenant": {"headers": [("x-tenant", "other")]},
    "quoted": {"key": '"key-000000000000001"'},
    "twice the key": {"headers": [("Idempotency-Key", "key-000000000000002")]},
    "too short a key": {"key": "short"},
    "mounted elsewhere": {"root_path": "/api", "target": "/api/orders/1"},
}


@pytest.mark.parametrize("cached", [False, True], ids=["stored", "cached"])
@pytest.mark.parametrize("name", REQUESTS)
async def test_shortcut_responses_equal_full_path_responses(
    name: str, cached: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    # R38, R67, R88
    policy = Policy(replay_cache=timedelta(seconds=30)) if cached else None
    heard = []
    for short in (True, False):
        with monkeypatch.context() as patched:
            if not short:
                patched.setattr(KeyedRoutes, "add", lambda *_: None)
            shop, _ = a_shop(policy=policy, clock=ManualClock(NOW))
            for _ in range(2):
                assert (await shop.send("/orders/1", TEA)).status == 201
            request = {"target": "/orders/1", "body": TEA, **REQUESTS[name]}
            replies = [await shop.send(**request) for _ in range(2)]
            replies.append(await shop.send("/orders/1", TEA))
            heard.append(([seen(reply) for reply in replies], shop.runs, shop.ledger.rows, len(shop.ledger.records)))
    assert heard[0] == heard[1]


@pytest.mark.parametrize("short", [True, False], ids=["short", "long"])
async def test_an_expired_key_runs_again_with_or_without_shortcut(short: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    # R161
    if not short:
        monkeypatch.setattr(KeyedRoutes, "add", lambda *_: None)
    clock = ManualClock(NOW)
    shop, _ = a_shop(clock=clock, policy=Policy(ttl=timedelta(hours=1), allow_short_ttl=True))
    assert not (await shop.send("/orders/1", TEA)).replayed
    assert (await shop.send("/orders/1", TEA)).replayed
    clock.advance(2 * 3600 * SECOND)
    assert not (await shop.send("/orders/1", TEA)).replayed
    assert len(shop.runs) == 2


@pytest.mark.parametrize(
    "options",
    [{"fingerprint": lambda request: b"the same"}, {"selection": Selection(exclude=("note",))}],
    ids=["chosen by the route", "without a field"],
)
async def test_fields_outside_the_fingerprint_are_validated_again(options: dict[str, Any]) -> None:
    # R39: two bodies under one fingerprint, of which the application takes one
    shop = Shop()

    @shop.post(effects=LOCAL, **options)
    async def create(order: Noted, op: Operation) -> str:
        return order.item

    assert (await shop.send("/orders", {"item": "tea", "note": 1})).status == 200
    assert (await shop.send("/orders", {"item": "tea", "note": 2})).replayed
    refused = await shop.send("/orders", {"item": "tea", "note": "none"})
    assert (refused.status, refused.replayed) == (422, False)


async def test_an_outage_on_the_shortcut_uses_the_full_path() -> None:
    # R110, R111
    shop, entered = a_shop()
    await shop.send("/orders/1", TEA)
    shop.ledger.faults["recall"].append(down)
    shop.ledger.faults["claim"].append(down)
    reply = await shop.send("/orders/1", TEA)
    assert (reply.status, reply.code, entered.count) == (503, "idempotency_store_unavailable", 2)
    assert (await shop.send("/orders/1", TEA)).replayed
    assert entered.count == 2


async def test_tenant_function_errors_become_application_responses() -> None:
    known = [True]

    def tenant(_: Request) -> str:
        if not known[0]:
            raise HTTPException(401, "who are you?")
        return "acme"

    shop, entered = a_shop(tenant=tenant)
    await shop.send("/orders/1", TEA)
    known[0] = False
    reply = await shop.send("/orders/1", TEA)
    assert (reply.status, reply.json(), entered.count) == (401, {"detail": "who are you?"}, 2)


async def test_outer_middleware_sees_the_matched_route_on_a_replay() -> None:
    shop, entered = a_shop()
    scopes: list[Any] = []

    class Watching:
        def __init__(self, app: Any) -> None:
            self.app = app

        async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
            await self.app(scope, receive, send)
            scopes.append({name: scope.get(name) for name in ("endpoint", "path_params", "route")})

    shop.app.user_middleware.insert(0, Middleware(Watching))
    for _ in range(2):
        await shop.send("/orders/1", TEA)
    assert entered.count == 1
    assert scopes[0] == scopes[1]
    assert scopes[1]["path_params"] == {"number": "1"}


# Who may say no is asked every time.


def guard(x_token: Annotated[str, Header()] = "") -> None:
    if x_token != "good":
        raise HTTPException(401)


class Guarding:
    """Middleware that asks for the token."""

    def __init__(self, app: Any) -> None:
        self.app = app

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "http" and (b"x-token", b"good") not in scope["headers"]:
            await JSONResponse({}, 401)(scope, receive, send)
            return
        await self.app(scope, receive, send)


def guarded(handler: Any) -> Any:
    @functools.wraps(handler)
    async def outer(request: Request) -> Any:
        if request.headers.get("x-token") != "good":
            raise HTTPException(401)
        return await handler()

    request = inspect.Parameter("request", inspect.Parameter.KEYWORD_ONLY, annotation=Request)
    outer.__signature__ = inspect.Signature([request])  # type: ignore[attr-defined]
    return outer


class GuardedRoute(APIRoute):
    def get_route_handler(self) -> Callable[..., Any]:
        inner = super().get_route_handler()

        async def asked(request: Request) -> Any:
            if request.headers.get("x-token") != "good":
                raise HTTPException(401)
            return await inner(request)

        return asked


def of_fastapi(once: Once, how: str) -> Any:
    app = FastAPI(dependencies=[Depends(guard)] if how == "of the application" else None)
    once.install(app, tenant=lambda _: "acme", status=None)

    async def plain() -> str:
        return "done"

    async def header(x_token: Annotated[str, Header(pattern="good")]) -> str:
        return "done"

    async def cookie(session: Annotated[str, Cookie(pattern="good")]) -> str:
        return "done"

    async def depends(_: Annotated[None, Depends(guard)]) -> str:
        return "done"

    handlers = {"a header": header, "a cookie": cookie, "a parameter": depends}
    handler = once.protect(effects=LOCAL)(handlers.get(how, plain))
    place: Any = app
    if how == "of a router":
        place = APIRouter(dependencies=[Depends(guard)])
    if how == "of a route's class":
        app.router.route_class = GuardedRoute
    if how == "a decorator":
        handler = guarded(handler)
    place.post("/orders", dependencies=[Depends(guard)] if how == "of the route" else None)(handler)
    if how == "of a router":
        app.include_router(place)
    return app


def of_starlette(once: Once, how: str) -> Any:
    @once.protect(effects=LOCAL)
    async def plain(request: Request) -> JSONResponse:
        return JSONResponse("done")

    middleware = [Middleware(Guarding)]
    if how == "of a mount":
        routes: list[Any] = [Mount("/", routes=[Route("/orders", plain, methods=["POST"])], middleware=middleware)]
    elif how == "of a host":
        denying = Route("/orders", lambda _: JSONResponse({}, 401), methods=["POST"])
        routes = [Host("bad", Router([denying])), Route("/orders", plain, methods=["POST"])]
    else:
        routes = [Route("/orders", plain, methods=["POST"], middleware=middleware)]
    app = Starlette(routes=routes)
    once.install(app, tenant=lambda _: "acme", status=None)
    return app


GUARDS = [
    (of_fastapi, "of the application"),
    (of_fastapi, "of a router"),
    (of_fastapi, "of the route"),
    (of_fastapi, "of a route's class"),
    (of_fastapi, "a parameter"),
    (of_fastapi, "a header"),
    (of_fastapi, "a cookie"),
    (of_fastapi, "a decorator"),
    (of_starlette, "of a route's middleware"),
    (of_starlette, "of a mount"),
    (of_starlette, "of a host"),
]


@pytest.mark.parametrize(("make", "how"), GUARDS, ids=[how for _, how in GUARDS])
async def test_guards_run_for_every_replay(make: Any, how: str) -> None:
    # R198: a stored answer is as well guarded as the handler that gave it
    shop = Shop(install=False)
    shop.app = make(shop.once, how)
    good = [("x-token", "good"), ("cookie", "session=good"), ("host", "good")]
    bad = [("x-token", "bad"), ("cookie", "session=bad"), ("host", "bad")]
    first = await shop.send("/orders", headers=good)
    assert first.status == 200
    for _ in range(2):
        assert (await shop.send("/orders", headers=good)).replayed
        assert (await shop.send("/orders", headers=bad)).status in {401, 422}


async def test_a_route_inserted_in_front_takes_precedence() -> None:
    shop, entered = a_shop()
    await shop.send("/orders/1", TEA)

    async def denying(_: Request) -> JSONResponse:
        return JSONResponse({}, 403)

    class Choosy(Route):
        pass

    shop.app.router.routes.insert(0, Choosy("/orders/{number}", denying, methods=["POST"]))
    assert (await shop.send("/orders/1", TEA)).status == 403
    assert entered.count == 2


async def test_starlette_routes_use_the_replay_shortcut() -> None:
    shop = Shop(app=Starlette())

    @shop.once.protect(effects=LOCAL)
    async def create(request: Request) -> JSONResponse:
        shop.runs.append(await request.body())
        return JSONResponse("done")

    shop.app.router.routes.append(Route("/orders", create, methods=["POST"]))
    entered = Entrances(shop)
    first, again = await shop.send("/orders", TEA), await shop.send("/orders", TEA)
    assert (first.status, again.body, again.replayed) == (200, first.body, True)
    assert (entered.count, len(shop.runs)) == (1, 1)


async def test_a_replay_from_sqlite_skips_the_application(tmp_path: Any) -> None:
    shop = RealShop(SqliteFile(tmp_path / "shop.db"))

    @shop.app.post("/orders", status_code=201)
    @shop.once.protect(effects=LOCAL)
    async def create(op: Operation, item: str = "tea") -> str:
        await shop.database.insert(op.connection, item)
        return item

    entered = Entrances(shop)
    async with shop.open():
        key = new_key()
        first = await shop.send(key=key)
        again = await shop.send(key=key)
        assert (again.body, again.replayed, entered.count) == (first.body, True, 1)
        assert shop.rows == ["tea"]
        shop.database.execute("DELETE FROM oncekey_record")
        shop.database.execute("DELETE FROM orders")
        assert not (await shop.send(key=key)).replayed  # a remembered route is no proof: the record is gone
        assert (shop.rows, entered.count) == (["tea"], 2)


def test_the_oldest_shortcut_is_evicted() -> None:
    routes = KeyedRoutes(most=2)
    for line in (b"a", b"b", b"a", b"c"):
        routes.add(line, {"method": "POST", "path": "/", "endpoint": None}, "", None)  # type: ignore[arg-type]
    assert list(routes.known) == [b"b", b"c"]


def test_a_long_key_line_or_path_gets_no_shortcut() -> None:
    # Ten thousand of them would fill the memory of a process.
    routes = KeyedRoutes()
    for line, path in ((b'"k";a="' + b"x" * 60_000 + b'"', "/"), (b"k", "/" + "x" * 60_000)):
        routes.add(line, {"method": "POST", "path": path, "endpoint": None}, "", None)  # type: ignore[arg-type]
    assert routes.known == {}
