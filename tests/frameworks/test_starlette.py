"""Plain Starlette, class-based endpoints, mounts, and any other ASGI application by its paths."""

from __future__ import annotations

import json
from typing import Any

import pytest
from starlette.applications import Starlette
from starlette.authentication import AuthCredentials, SimpleUser
from starlette.endpoints import HTTPEndpoint
from starlette.exceptions import HTTPException
from starlette.middleware.authentication import AuthenticationMiddleware
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Mount, Route

from frameworks.shop import KEY, LedgerOnce, Shop, new_key
from harness.asgi import Caller, call
from harness.ledger import Ledger
from oncekey.core.errors import ConfigurationError
from oncekey.core.model import INLINE, LOCAL
from oncekey.core.policy import Policy
from oncekey.engine.operation import Operation, SyncOperation


def starlette_shop(**shopping: Any) -> Shop:
    return Shop(app=Starlette(), **shopping)


def serve(shop: Shop, path: str, endpoint: Any, **about: Any) -> None:
    shop.app.router.routes.insert(0, Route(path, endpoint, **about))


@pytest.mark.parametrize("effects", [LOCAL, INLINE])
async def test_a_starlette_endpoint_is_protected(effects: Any) -> None:
    shop = starlette_shop()

    @shop.once.protect(effects=effects)
    async def create(request: Request, op: Operation) -> Response:
        shop.runs.append(await request.json())
        if effects is LOCAL:
            op.connection.add("row")
        return JSONResponse({"path": request.url.path}, status_code=201)

    serve(shop, "/orders", create, methods=["POST"])
    await shop.once.start(shop.app)
    first = await shop.send("/orders", {"n": 1})
    again = await shop.send("/orders", {"n": 1})
    assert (first.status, again.body, again.replayed, shop.runs) == (201, first.body, True, [{"n": 1}])
    assert (await shop.send("/orders", {"n": 2})).status == 422
    assert (await shop.send("/orders", {"n": 2}, key=None)).status == 400
    status = await shop.send(f"/idempotency-keys/{KEY}", method="GET", key=None)
    assert (status.status, status.json()["state"]) == (200, "completed")


async def test_a_def_endpoint_of_starlette_is_protected() -> None:
    shop = starlette_shop()

    @shop.once.protect(effects=LOCAL)
    def create(request: Request, op: SyncOperation) -> Response:
        op.connection.add("row")
        return PlainTextResponse("done")

    serve(shop, "/orders", create, methods=["POST"])
    assert [(await shop.send("/orders")).replayed for _ in range(2)] == [False, True]
    assert shop.ledger.rows == ["row"]


async def test_class_based_endpoint_methods_are_protected(caplog: pytest.LogCaptureFixture) -> None:
    # apishape 0
    shop = starlette_shop()

    class Orders(HTTPEndpoint):
        async def get(self, request: Request) -> Response:
            return PlainTextResponse("orders")

        @shop.once.protect(effects=LOCAL)
        async def post(self, request: Request, op: Operation) -> Response:
            op.connection.add(type(self).__name__)
            return PlainTextResponse("made", 201)

        @shop.once.protect(effects=INLINE)
        def patch(self, request: Request) -> Response:
            shop.runs.append(1)
            return PlainTextResponse("changed")

    serve(shop, "/orders", Orders)
    await shop.once.start(shop.app)
    assert ["the store is memory" in line for line in caplog.messages] == [True]  # and no word about the methods
    assert [(await shop.send("/orders")).replayed for _ in range(2)] == [False, True]
    assert [(await shop.send("/orders", method="PATCH", key=new_key())).status for _ in range(2)] == [200, 200]
    assert (await shop.send("/orders", method="GET")).body == b"orders"
    assert (shop.ledger.rows, shop.runs) == (["Orders"], [1, 1])


async def test_routes_in_a_mount_are_found(caplog: pytest.LogCaptureFixture) -> None:
    shop = starlette_shop()

    @shop.once.protect(effects=INLINE)
    async def create(request: Request) -> Response:
        return PlainTextResponse("done")

    shop.app.router.routes.append(Mount("/v1", routes=[Route("/orders", create, methods=["POST"])]))
    await shop.once.start(shop.app)
    assert "no route serves it" not in caplog.text
    assert (await shop.send("/v1/orders")).status == 200
    assert (await shop.send("/v1/orders")).replayed


async def test_protection_above_a_starlette_route_is_rejected() -> None:
    shop = starlette_shop()

    async def create(request: Request) -> Response:
        return PlainTextResponse("done")

    serve(shop, "/orders", create, methods=["POST"])
    shop.once.protect(effects=INLINE)(create)
    with pytest.raises(ConfigurationError, match="is served without its protection"):
        await shop.once.start(shop.app)


async def test_authentication_middleware_runs_before_the_key_check() -> None:
    # R20, R186
    class Backend:
        async def authenticate(self, conn: Any) -> Any:
            user = conn.headers.get("x-user")
            return (AuthCredentials(["authenticated"]), SimpleUser(user)) if user else None

    shop = starlette_shop(tenant=lambda request: request.user.display_name)
    shop.app.add_middleware(AuthenticationMiddleware, backend=Backend())

    @shop.once.protect(effects=INLINE)
    async def create(request: Request) -> Response:
        shop.runs.append(request.user.display_name)
        return PlainTextResponse("done")

    serve(shop, "/orders", create, methods=["POST"])
    for user in ("ann", "bob", "ann"):
        await shop.send("/orders", headers=[("X-User", user)])
    assert shop.runs == ["ann", "bob"]


async def test_a_starlette_http_exception_is_stored_and_rolls_back() -> None:
    # L6
    shop = starlette_shop()

    @shop.once.protect(effects=LOCAL)
    async def create(request: Request, op: Operation) -> Response:
        op.connection.add("row")
        raise HTTPException(402, "declined")

    serve(shop, "/orders", create, methods=["POST"])
    first, again = await shop.send("/orders"), await shop.send("/orders")
    assert (first.status, again.body, again.replayed, shop.ledger.rows) == (402, first.body, True, [])


async def test_websockets_pass_through_untouched() -> None:
    outer, inner = starlette_shop(), starlette_shop()
    seen: list[Any] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        seen.append((scope["type"], scope["path"], receive, send))

    inner.app.router.routes.append(Mount("/ws", app=app))
    outer.app.mount("/v1", inner.app)
    protected = outer.once.asgi(outer.app, tenant=lambda _: "acme", enrol={})
    scope = {"type": "websocket", "path": "/v1/ws/x", "headers": [(b"idempotency-key", b"x")], "subprotocols": []}
    await protected(scope, "receive", "send")  # type: ignore[arg-type]
    ((kind, path, receive, _),) = seen
    assert (kind, path, receive) == ("websocket", "/v1/ws/x", "receive")


# ------------------------------------------------------------------------------------------ by path, from outside


class Legacy:
    """An ASGI application that knows nothing of us."""

    def __init__(self) -> None:
        self.requests: list[tuple[str, str, bytes]] = []
        self.status = 201

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        body = b""
        while True:
            message = await receive()
            body += message.get("body", b"")
            if not message.get("more_body"):
                break
        self.requests.append((scope["method"], scope["path"], body))
        answer = json.dumps({"n": len(self.requests)}).encode()
        headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(answer))]
        await send({"type": "http.response.start", "status": self.status, "headers": headers})
        await send({"type": "http.response.body", "body": answer})


def by_path(*patterns: str, **options: Any) -> tuple[Legacy, Any, Ledger]:
    ledger, legacy = Ledger(), Legacy()
    once = LedgerOnce(ledger)
    enrolments = {
        pattern: once.by_path(effects=INLINE, operation=f"legacy {number}", **options)
        for number, pattern in enumerate(patterns)
    }
    tenant = lambda scope: dict(scope["headers"]).get(b"x-tenant", b"acme").decode()  # noqa: E731
    return legacy, once.asgi(legacy, tenant=tenant, enrol=enrolments), ledger


def keyed(**headers: str) -> dict[str, str]:
    return {"Idempotency-Key": KEY, **headers}


async def test_any_application_can_be_protected_by_its_paths() -> None:
    # apishape 2: claimed in the middleware, before the application
    legacy, app, ledger = by_path("POST /orders/{id}")
    first = await call(app, "POST", "/orders/7", headers=keyed(), body=[b"a", b"b"])
    again = await call(app, "POST", "/orders/7", headers=keyed(), body=b"ab")
    assert (first.status, again.status, again.body, again.replayed) == (201, 201, first.body, True)
    assert legacy.requests == [("POST", "/orders/7", b"ab")]
    assert (await call(app, "POST", "/orders/7", headers=keyed(), body=b"other")).status == 422
    assert (await call(app, "POST", "/orders/7", body=b"ab")).code == "idempotency_key_missing"
    assert (await call(app, "POST", "/orders/7", headers={"Idempotency-Key": "bad"})).status == 400
    assert (await call(app, "POST", "/orders/7", headers=keyed(**{"X-Tenant": "globex"}))).json() == {"n": 2}
    assert len(ledger.records) == 2


@pytest.mark.parametrize(
    ("pattern", "method", "path", "enrolled"),
    [
        ("POST /orders", "POST", "/orders", True),
        ("POST /orders", "POST", "/orders/", True),
        ("POST /orders", "POST", "//orders", True),
        ("POST /orders/", "POST", "/orders", True),
        ("POST /orders/{rest:path}", "POST", "/orders/", True),
        ("POST /orders", "PATCH", "/orders", False),
        ("POST /orders/{id}", "POST", "/orders/7", True),
        ("POST /orders/{id}", "POST", "/orders/7/items", False),
        ("POST /orders/{id}", "POST", "/orders/", False),
        ("POST /orders/{rest:path}", "POST", "/orders/7/items", True),
        ("POST /a.b/{id}", "POST", "/aXb/7", False),
        ("POST /a+b", "POST", "/a+b", True),
        ("PUT /orders/{id}", "PUT", "/orders/7", True),
        ("DELETE /orders/{id}", "DELETE", "/orders/7", True),
    ],
)
async def test_a_pattern_matches_its_method_and_path(pattern: str, method: str, path: str, enrolled: bool) -> None:
    # C27: a method that a pattern names is opted in by that
    _, app, ledger = by_path(pattern)
    replies = [await call(app, method, path, headers=keyed()) for _ in range(2)]
    assert [reply.replayed for reply in replies] == [False, enrolled]
    assert len(ledger.records) == int(enrolled)


async def test_the_first_pattern_that_matches_wins() -> None:
    _, app, ledger = by_path("POST /orders/{id}", "POST /{rest:path}")
    await call(app, "POST", "/orders/7", headers=keyed())
    await call(app, "POST", "/other", headers={"Idempotency-Key": new_key()})
    assert sorted(record["operation"] for record in ledger.records) == ["legacy 0", "legacy 1"]


async def test_an_optional_key_may_be_omitted_by_path() -> None:
    # R12
    legacy, app, ledger = by_path("POST /orders", require_key=False)
    for _ in range(2):
        assert (await call(app, "POST", "/orders")).status == 201
    assert (len(legacy.requests), ledger.records) == (2, [])


@pytest.mark.parametrize(
    ("status", "state"), [(201, "completed"), (404, "completed"), (401, "unknown"), (503, "unknown")]
)
async def test_a_401_by_path_leaves_an_unknown_outcome(status: int, state: str) -> None:
    # adr 0007, P4
    legacy, app, ledger = by_path("POST /orders")
    legacy.status = status
    reply = await call(app, "POST", "/orders", headers=keyed())
    assert reply.status == (409 if status == 401 else status)
    assert (reply.code == "idempotency_outcome_unknown") is (status == 401)
    assert ledger.record["state"] == state


async def test_not_executed_statuses_allow_a_retry() -> None:
    # R72, R73: the way to say it for code that cannot be decorated
    legacy, app, ledger = by_path("POST /orders", not_executed_statuses={401, 422, 429})
    legacy.status = 401
    await call(app, "POST", "/orders", headers=keyed())
    assert ledger.record["state"] == "failed_retryable"
    legacy.status = 201
    assert (await call(app, "POST", "/orders", headers=keyed())).status == 201


async def test_an_oversized_request_by_path_is_rejected_early() -> None:
    # peers 12
    legacy, app, _ = by_path("POST /orders", max_request_bytes=10)
    caller = Caller(app, "POST", "/orders", headers=keyed(), body=[b"x" * 20] + [b"x"] * 50)
    # The installation's own limit is the widest one; the route's decides.
    reply = await caller.run()
    assert (reply.status, reply.code, legacy.requests) == (413, "idempotency_body_too_large", [])


async def test_a_refusal_by_path_does_not_wait_for_the_body() -> None:
    # apishape 1: with Expect: 100-continue the body is never asked for
    legacy, app, _ = by_path("POST /orders")
    for headers in ({}, {"Idempotency-Key": "bad"}):
        caller = Caller(app, "POST", "/orders", headers=headers, body=b"x")
        assert (await caller.run()).status == 400
        assert caller.receives == 0
    assert legacy.requests == []


async def test_a_starlette_application_may_enrol_by_path_too() -> None:
    once = LedgerOnce(Ledger())
    app = Starlette(routes=[Route("/legacy", lambda _: PlainTextResponse("done"), methods=["POST"])])
    once.install(app, tenant=lambda _: "acme", enrol={"POST /legacy": once.by_path(effects=INLINE, operation="old")})
    assert [(await call(app, "POST", "/legacy", headers=keyed())).replayed for _ in range(2)] == [False, True]


async def test_enrolling_a_handler_by_path_and_decorator_is_rejected() -> None:
    # it would claim its key from itself
    once = LedgerOnce(Ledger())

    @once.protect(effects=INLINE)
    async def create(request: Request) -> Response:
        return PlainTextResponse("done")

    app = Starlette(routes=[Route("/orders", create, methods=["POST"])])
    once.install(app, tenant=lambda _: "acme", enrol={"POST /orders": once.by_path(effects=INLINE, operation="twice")})
    with pytest.raises(ConfigurationError, match=r"is enrolled twice, by path and by @once\.protect"):
        await once.start(app)


@pytest.mark.parametrize("inner", [Starlette(), Legacy()])
async def test_startup_behind_once_asgi_skips_the_install_checks(inner: Any) -> None:
    once = LedgerOnce(Ledger())
    once.asgi(inner, tenant=lambda _: "acme", enrol={})
    async with once.lifespan(inner):
        pass
    assert once.ledger.log == ["close"]


async def test_a_decorated_handler_behind_once_asgi_raises() -> None:
    once = LedgerOnce(Ledger())

    @once.protect(effects=INLINE)
    async def create(request: Request) -> Response:
        return PlainTextResponse("done")

    app = once.asgi(Starlette(routes=[Route("/orders", create, methods=["POST"])]), tenant=lambda _: "acme", enrol={})
    with pytest.raises(RuntimeError, match=r"this framework needs once\.install\(app\)"):
        await Caller(app, "POST", "/orders").run(raising=True)


def test_settings_of_a_path_are_checked_too() -> None:
    once = LedgerOnce(Ledger(), policy=Policy())
    with pytest.raises(ConfigurationError, match="leese is not a setting; the closest one is lease"):
        once.by_path(effects=INLINE, operation="x", leese=3)
    with pytest.raises(ConfigurationError, match="set naturally_idempotent=True"):
        once.by_path(effects=INLINE, operation="x", on_5xx="retry_fresh")
