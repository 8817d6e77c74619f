"""What a handler registers for its own response is a part of the stored one: a retry gets what the first client got."""

from __future__ import annotations

import uuid
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import fastapi
import flask
import litestar
import pytest
from litestar.background_tasks import BackgroundTask as LitestarTask
from starlette.applications import Starlette
from starlette.background import BackgroundTask
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route

from harness.asgi import call
from oncekey import INLINE, LOCAL, SINGLE_TENANT, Once
from oncekey.core.model import Effects
from oncekey.litestar import OncePlugin

Answered = tuple[int, bytes, str | None]
Serve = Callable[[Once, Effects, list[str]], Awaitable[list[Answered]]]

FINAL = (202, b'{"state":"final"}', "/orders/5")


async def asked(app: Any) -> list[Answered]:
    lines = {"content-type": "application/json", "idempotency-key": uuid.uuid4().hex}
    found = [await call(app, "POST", "/orders", headers=lines, body=b"{}") for _ in range(2)]
    assert [one.replayed for one in found] == [False, True]
    return [(one.status, one.body, one.header("location")) for one in found]


def _finish(response: flask.Response) -> flask.Response:
    response.set_data(response.get_data().replace(b"draft", b"final").strip())
    response.status_code = 202 if response.status_code == 201 else 410
    response.headers["Location"] = "/orders/5"
    return response


def _of_flask(app: flask.Flask, once: Once) -> list[Answered]:
    once.flask(app, tenant=SINGLE_TENANT)
    client, lines = app.test_client(), {"Idempotency-Key": uuid.uuid4().hex}
    found = [client.post("/orders", json={}, headers=lines) for _ in range(2)]
    assert [one.headers.get("Idempotent-Replayed") for one in found] == [None, "true"]
    return [(one.status_code, one.data, one.headers.get("Location")) for one in found]


async def by_flask(once: Once, effects: Effects, ran: list[str]) -> list[Answered]:
    app = flask.Flask("shop")

    @app.post("/orders")
    @once.protect(effects=effects)  # type: ignore[call-overload, untyped-decorator]  # LOCAL or INLINE
    def create() -> Any:
        ran.append("view")
        flask.after_this_request(_finish)
        return {"state": "draft"}, 201

    return _of_flask(app, once)


async def by_an_error_handler_of_flask(once: Once, effects: Effects, ran: list[str]) -> list[Answered]:
    app = flask.Flask("shop")

    @app.errorhandler(418)
    def refused(_: Exception) -> Any:
        flask.after_this_request(_finish)
        return {"state": "draft"}, 409

    @app.post("/orders")
    @once.protect(effects=effects)  # type: ignore[call-overload, untyped-decorator]  # LOCAL or INLINE
    def create() -> Any:
        ran.append("view")
        flask.abort(418)

    found = _of_flask(app, once)
    assert [status for status, _, _ in found] == [410, 410]
    return [(202, body, location) for _, body, location in found]


async def by_starlette(once: Once, effects: Effects, ran: list[str]) -> list[Answered]:
    @once.protect(effects=effects)  # type: ignore[call-overload, untyped-decorator]  # LOCAL or INLINE
    async def create(request: Request) -> JSONResponse:
        ran.append("view")
        task = BackgroundTask(ran.append, "background")
        return JSONResponse({"state": "final"}, 202, {"Location": "/orders/5"}, background=task)

    app = Starlette(routes=[Route("/orders", create, methods=["POST"])])
    once.install(app, tenant=SINGLE_TENANT)
    async with once.lifespan(app):
        found = await asked(app)
    assert ran.pop() == "background"
    return found


async def by_fastapi(once: Once, effects: Effects, ran: list[str]) -> list[Answered]:
    app = fastapi.FastAPI()

    @app.post("/orders")
    @once.protect(effects=effects)  # type: ignore[call-overload, untyped-decorator]  # LOCAL or INLINE
    async def create(response: fastapi.Response, tasks: fastapi.BackgroundTasks) -> dict[str, str]:
        ran.append("view")
        response.status_code, response.headers["Location"] = 202, "/orders/5"
        tasks.add_task(ran.append, "background")
        return {"state": "final"}

    once.install(app, tenant=SINGLE_TENANT)
    async with once.lifespan(app):
        found = await asked(app)
    assert ran.pop() == "background"
    return found


async def by_litestar(once: Once, effects: Effects, ran: list[str]) -> list[Answered]:
    async def finish(response: litestar.Response[Any]) -> litestar.Response[Any]:
        changed = {"status_code": 202, "headers": {"Location": "/orders/5"}, "background": response.background}
        return litestar.Response({"state": "final"}, **changed)

    @litestar.post("/orders", after_request=finish)
    @once.protect(effects=effects)  # type: ignore[call-overload, untyped-decorator]  # LOCAL or INLINE
    async def create() -> litestar.Response[dict[str, str]]:
        ran.append("view")
        return litestar.Response({"state": "draft"}, background=LitestarTask(ran.append, "background"))

    app = litestar.Litestar([create], plugins=[OncePlugin(once, tenant=SINGLE_TENANT)], logging_config=None)
    async with app.lifespan():
        found = await asked(app)
    assert ran.pop() == "background"
    return found


SERVED = [by_flask, by_an_error_handler_of_flask, by_starlette, by_fastapi, by_litestar]


@pytest.mark.parametrize("effects", [LOCAL, INLINE])
@pytest.mark.parametrize("served", SERVED)
async def test_response_hooks_are_part_of_the_stored_response(tmp_path: Path, served: Serve, effects: Effects) -> None:
    ran: list[str] = []
    once = Once(f"sqlite:///{tmp_path}/shop.db", migrate=True)
    assert await served(once, effects, ran) == [FINAL, FINAL]
    assert ran == ["view"]
