"""Keys by endpoint: one key on two routes is two requests, and the status resource finds each of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import flask
import pytest
from fastapi import Depends, FastAPI
from starlette.requests import Request
from werkzeug.test import Client

from frameworks.shop import new_key
from harness.asgi import Caller
from oncekey import INLINE, ConfigurationError, Once, Policy, SyncOperation
from oncekey.litestar import OncePlugin


def policy(**more: Any) -> Policy:
    return Policy(separate_operations=True, **more)


def tenant_of(request: Request) -> str:
    return request.headers.get("x-tenant", "acme")


def a_fastapi(once: Once) -> FastAPI:
    app = FastAPI(lifespan=once.lifespan)
    once.install(app, tenant=tenant_of, principal=lambda request: request.headers["x-user"])

    @app.post("/orders", dependencies=[Depends(lambda: None)])
    @once.protect(effects=INLINE, operation="order")
    async def order() -> dict[str, str]:
        return {"made": f"order {new_key()}"}

    @app.post("/refunds")
    @once.protect(effects=INLINE, operation="refund", on_unknown=202)
    async def refund() -> dict[str, str]:
        raise TimeoutError

    return app


@pytest.mark.parametrize("bind_to", ["tenant", "principal"])
async def test_separate_operations_allow_one_key_on_two_routes(tmp_path: Path, bind_to: str) -> None:
    # R275, R24, C4
    once = Once(f"sqlite:///{tmp_path}/keys.db", policy=policy(bind_to=bind_to), migrate=True)
    app, key = a_fastapi(once), new_key()

    async def send(method: str, path: str, user: str = "ann") -> Any:
        headers = [("x-user", user), *([("Idempotency-Key", key)] if method == "POST" else [])]
        return await Caller(app, method, path, headers=headers).run(raising=False)

    async with app.router.lifespan_context(app):
        ordered = await send("POST", "/orders")
        await send("POST", "/refunds")
        doubtful = await send("POST", "/refunds")
        assert (ordered.status, doubtful.status, doubtful.code) == (200, 202, "idempotency_outcome_unknown")
        assert doubtful.header("location") == f"/idempotency-keys/{key}?operation=refund"
        for _ in range(3):
            again = await send("POST", "/orders")
            assert (again.status, again.body, again.replayed) == (200, ordered.body, True)
        assert (await send("GET", doubtful.header("location"))).json()["state"] == "unknown"
        assert (await send("GET", f"/idempotency-keys/{key}?operation=order")).json()["state"] == "completed"
        missing = await send("GET", f"/idempotency-keys/{key}")
        assert (missing.status, "add ?operation=NAME" in missing.json()["detail"]) == (404, True)
        assert (await send("GET", f"/idempotency-keys/{key}?operation=nothing")).status == 404
        stranger = await send("GET", f"/idempotency-keys/{key}?operation=order", user="bob")
        assert stranger.status == (404 if bind_to == "principal" else 200)
        page = (await send("GET", "/idempotency")).body.decode()
        assert "/idempotency-keys/{key}?operation={operation}" in page
        assert "operation <code>refund</code>" in page


def test_separate_operations_work_on_flask(tmp_path: Path) -> None:
    # R275: the status resource of WSGI
    once, app = Once(f"sqlite:///{tmp_path}/keys.db", policy=policy(), migrate=True), flask.Flask("shop")
    for name in ("orders", "refunds"):

        def make(op: SyncOperation[Any], name: str = name) -> dict[str, str]:
            return {"made": name}

        app.post(f"/{name}", endpoint=name)(once.protect(effects=INLINE, operation=name)(make))
    once.wsgi(app, tenant=lambda environ: "acme", status="/idempotency-keys")
    client, key = Client(app), new_key()
    replies = [client.post(f"/{name}", headers={"Idempotency-Key": key}) for name in ("orders", "refunds")]
    assert [reply.json for reply in replies] == [{"made": "orders"}, {"made": "refunds"}]
    for name in ("orders", "refunds"):
        found = client.get(f"/idempotency-keys/{key}?operation={name}")
        assert (found.status_code, found.json["operation"]) == (200, name)
    assert client.get(f"/idempotency-keys/{key}").status_code == 404


async def test_separate_operations_work_on_litestar(tmp_path: Path) -> None:
    # R275
    from litestar import Litestar, post

    once = Once(f"sqlite:///{tmp_path}/keys.db", policy=policy(), migrate=True)

    @post("/orders")
    @once.protect(effects=INLINE, operation="order")
    async def order() -> dict[str, str]:
        return {"made": "order"}

    app, key = Litestar([order], plugins=[OncePlugin(once, tenant=lambda request: "acme")]), new_key()
    async with app.lifespan():
        made = await Caller(app, "POST", "/orders", headers=[("Idempotency-Key", key)]).run()
        found = await Caller(app, "GET", f"/idempotency-keys/{key}?operation=order").run()
    assert (made.status, found.status, found.json()["state"]) == (201, 200, "completed")


def test_a_route_cannot_set_separate_operations() -> None:
    once = Once("sqlite:///unused.db")
    with pytest.raises(ConfigurationError, match="separate_operations"):
        once.protect(effects=INLINE, separate_operations=True)  # type: ignore[call-overload]
