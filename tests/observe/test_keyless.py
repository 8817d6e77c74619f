"""A request without a key on a route that does not require one is reported once, by every kind of front."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import flask
import pytest
from fastapi import FastAPI
from litestar import Litestar
from litestar import post as litestar_post

from harness.served import Served
from oncekey import INLINE, LOCAL, SINGLE_TENANT, Once, Operation, SyncOperation
from oncekey.litestar import OncePlugin
from oncekey.observe.events import Keyless, TurnedAway, requested
from wsgi.shop import send as send_to
from wsgi.shop import served as served_by_threads

KEY = "a-key-of-a-client-that-has-one"


def by_fastapi(once: Once, options: dict[str, Any]) -> Any:
    app = FastAPI(lifespan=once.lifespan)
    once.install(app, tenant=SINGLE_TENANT)

    @app.post("/orders", status_code=201)
    @once.protect(effects=LOCAL, operation="order", **options)
    async def order(op: Operation) -> dict[str, int]:
        return {}

    return app


def by_fastapi_in_a_thread(once: Once, options: dict[str, Any]) -> Any:
    app = FastAPI(lifespan=once.lifespan)
    once.install(app, tenant=SINGLE_TENANT)

    @app.post("/orders", status_code=201)
    @once.protect(effects=LOCAL, operation="order", **options)
    def order(op: SyncOperation) -> dict[str, int]:
        return {}

    return app


def by_litestar(once: Once, options: dict[str, Any]) -> Any:
    @litestar_post("/orders")
    @once.protect(effects=LOCAL, operation="order", **options)
    async def order(op: Operation) -> dict[str, int]:
        return {}

    return Litestar([order], plugins=[OncePlugin(once, tenant=SINGLE_TENANT)])


def by_path(once: Once, options: dict[str, Any]) -> Any:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "lifespan":
            for step in ("startup", "shutdown"):
                await receive()
                await send({"type": f"lifespan.{step}.complete"})
            return
        await send({"type": "http.response.start", "status": 201, "headers": []})
        await send({"type": "http.response.body", "body": b"{}"})

    enrolled = once.by_path(effects=INLINE, operation="order", **options)
    return once.asgi(app, tenant=SINGLE_TENANT, enrol={"POST /orders": enrolled})


def by_flask(once: Once, options: dict[str, Any]) -> Any:
    app = flask.Flask(__name__)
    once.flask(app, tenant=SINGLE_TENANT)

    @app.post("/orders")
    @once.protect(effects=LOCAL, operation="order", **options)
    def order() -> tuple[dict[str, int], int]:
        return {}, 201

    return app


def by_wsgi_path(once: Once, options: dict[str, Any]) -> Any:
    def app(environ: Any, start_response: Any) -> Any:
        start_response("201 Created", [("Content-Type", "application/json"), ("Content-Length", "2")])
        return [b"{}"]

    enrolled = once.by_path(effects=INLINE, operation="order", **options)
    return once.wsgi(app, tenant=SINGLE_TENANT, enrol={"POST /orders": enrolled})


LOOPS: list[Callable[[Once, dict[str, Any]], Any]] = [by_fastapi, by_fastapi_in_a_thread, by_litestar, by_path]
THREADS: list[Callable[[Once, dict[str, Any]], Any]] = [by_flask, by_wsgi_path]


@pytest.mark.parametrize("required", [False, True], ids=["optional", "required"])
@pytest.mark.parametrize("make", [*LOOPS, *THREADS], ids=lambda make: make.__name__)
def test_a_request_without_a_key_is_counted_once(
    make: Callable[[Once, dict[str, Any]], Any], required: bool, tmp_path: Path
) -> None:
    seen: list[Any] = []
    once = Once(f"sqlite:///{tmp_path}/keyless.db", migrate=True, observers=[seen.append])
    app = make(once, {"require_key": required})
    with Served(app) if make in LOOPS else served_by_threads(app) as server:
        port = server.port if isinstance(server, Served) else server
        statuses = [send_to(port, "/orders", {}, key=key).status for key in (None, KEY, KEY)]
    assert statuses == [400 if required else 201, 201, 201]
    outcomes = [outcome for one in seen if (outcome := requested(one)) is not None]
    first = "idempotency_key_missing" if required else "keyless"
    assert outcomes == [("order", first), ("order", "new"), ("order", "replayed")]
    assert [type(one) for one in seen if isinstance(one, Keyless | TurnedAway)] == [TurnedAway if required else Keyless]
