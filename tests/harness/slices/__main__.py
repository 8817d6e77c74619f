"""One small application on one framework, as a process: `python -m harness.slices APP STORE` prints its port first.

The process records every import that code of oncekey causes after `POST /mark`, and reports what it has loaded at
`GET /slice`. It ends when its standard input does.
"""

from __future__ import annotations

import asyncio
import json
import os
import socket
import sys
import threading
from collections.abc import Callable
from importlib.machinery import ModuleSpec
from typing import Any

TABLE = "CREATE TABLE IF NOT EXISTS orders (item text NOT NULL)"
INSERT = "INSERT INTO orders (item) VALUES ({})"


class Recorder:
    """A finder that finds nothing: it notes which module is looked for, and which code asked for it."""

    def __init__(self) -> None:
        self.marked = False
        self.imports: list[tuple[str, str]] = []

    def find_spec(self, name: str, path: object = None, target: object = None) -> ModuleSpec | None:
        """Note an import by oncekey since `mark`."""
        if self.marked:
            frame = sys._getframe(1)
            while frame.f_back is not None and frame.f_globals.get("__name__", "").startswith("importlib"):
                frame = frame.f_back
            by = str(frame.f_globals.get("__name__", ""))
            if by.partition(".")[0] == "oncekey" or name.partition(".")[0] == "oncekey":
                self.imports.append((name, f"{by}:{frame.f_lineno}"))
        return None

    def mark(self) -> None:
        """What was imported until now belongs to the start."""
        self.marked = True

    def seen(self) -> dict[str, Any]:
        """What the process has loaded of oncekey, and what was imported since `mark`."""
        loaded = sorted(name for name in sys.modules if name.partition(".")[0] == "oncekey")
        return {"loaded": loaded, "imports": self.imports}


RECORDER = Recorder()
RELEASED = asyncio.Event()
THREAD_RELEASED = threading.Event()


def fastapi_local(store: str) -> Any:
    from oncekey import LOCAL, Operation

    async def create_order(order: dict[str, Any], op: Operation) -> dict[str, Any]:
        await op.connection.execute(TABLE)
        await op.connection.execute(INSERT.format("$1"), order["item"])
        await _waits(order)
        return order

    return _fastapi(store, create_order, LOCAL)


def fastapi_emitting(store: str) -> Any:
    from oncekey import LOCAL, Operation

    async def create_order(order: dict[str, Any], op: Operation) -> dict[str, Any]:
        op.emit("ordered", order)
        await _waits(order)
        return order

    return _fastapi(store, create_order, LOCAL)


def fastapi_phased(store: str) -> Any:
    from oncekey import PHASED, Operation

    async def create_order(order: dict[str, Any], op: Operation) -> dict[str, Any]:
        async def stored(connection: Any) -> None:
            await connection.execute(TABLE)
            await connection.execute(INSERT.format("$1"), order["item"])
            op.emit("ordered", order)

        async def charge(*, key: str) -> dict[str, Any]:
            await _waits(order)
            return {"id": "ch_1"}

        await op.phase("stored", stored)
        await op.call("charged", charge, repeatable=True)
        return order

    return _fastapi(store, create_order, PHASED)


def fastapi_outbox(store: str) -> Any:
    from oncekey import OUTBOX, Operation

    async def create_order(order: dict[str, Any], op: Operation) -> dict[str, Any]:
        op.defer("charge", order)
        await _waits(order)
        return order

    return _fastapi(store, create_order, OUTBOX)


def fastapi_inline(store: str) -> Any:
    from oncekey import INLINE

    async def create_order(order: dict[str, Any]) -> dict[str, Any]:
        await _waits(order)
        return order

    return _fastapi(store, create_order, INLINE)


def fastapi_def(store: str) -> Any:
    from oncekey import LOCAL, SyncOperation

    def create_order(order: dict[str, Any], op: SyncOperation) -> dict[str, Any]:
        op.connection.execute(TABLE)
        op.connection.execute(INSERT.format("%s"), (order["item"],))
        if order.get("wait"):
            THREAD_RELEASED.wait()
        return order

    return _fastapi(store, create_order, LOCAL)


def fastapi_configured(store: str) -> Any:
    from oncekey import LOCAL, Operation
    from oncekey.observe.logs import Logs
    from oncekey.sealing import AesGcm

    async def create_order(order: dict[str, Any], op: Operation) -> dict[str, Any]:
        await op.connection.execute(TABLE)
        await _waits(order)
        return order

    options = {"replay_cache": 60, "max_request_age": 3600, "max_live_keys": 100, "max_new_keys_per_second": 100}
    return _fastapi(
        store,
        create_order,
        LOCAL,
        observers=[Logs()],
        seal=AesGcm({"first": bytes(32)}, current="first"),
        policy=options,
    )


async def _waits(order: dict[str, Any]) -> None:
    if order.get("wait"):
        await RELEASED.wait()


def _fastapi(store: str, handler: Any, effects: Any, *, policy: dict[str, Any] | None = None, **options: Any) -> Any:
    from fastapi import FastAPI

    from oncekey import SINGLE_TENANT, Once, Policy

    settings: dict[str, Any] = {"secret": bytes(32), **(policy or {})}
    once = Once(store, migrate=True, policy=Policy(**settings), **options)
    app = FastAPI(lifespan=once.lifespan)
    once.install(app, tenant=SINGLE_TENANT)
    app.post("/orders", status_code=201)(once.protect(effects=effects)(handler))

    def release() -> None:
        RELEASED.set()
        THREAD_RELEASED.set()

    return _with_report(app, release)


def _with_report(app: Any, release: Callable[[], None]) -> Any:
    async def released() -> None:
        release()

    async def mark() -> None:
        RECORDER.mark()

    async def loaded() -> dict[str, Any]:
        return RECORDER.seen()

    app.add_api_route("/release", released, methods=["POST"])
    app.add_api_route("/mark", mark, methods=["POST"])
    app.add_api_route("/slice", loaded)
    return app


def _done(act: Callable[[], None], response: Any) -> Callable[..., Any]:
    def view(*_: object) -> Any:
        act()
        return response

    return view


def flask_local(store: str) -> Any:
    import flask

    from oncekey import LOCAL, SINGLE_TENANT, Once, SyncOperation

    once = Once(store, migrate=True)
    app = flask.Flask("slice")
    once.flask(app, tenant=SINGLE_TENANT)
    released = threading.Event()

    @app.post("/orders")
    @once.protect(effects=LOCAL)
    def create_order(op: SyncOperation) -> tuple[dict[str, Any], int]:
        order = flask.request.get_json()
        op.connection.execute(TABLE)
        op.connection.execute(INSERT.format("%s"), (order["item"],))
        if order.get("wait"):
            released.wait()
        return order, 201

    app.post("/release", endpoint="release")(_done(released.set, ""))
    app.post("/mark", endpoint="mark")(_done(RECORDER.mark, ""))
    app.get("/slice", endpoint="slice")(RECORDER.seen)
    return app


def django_local(store: str) -> Any:
    from urllib.parse import urlsplit

    import django
    from django.conf import settings

    place = urlsplit(store)
    database = {
        "ENGINE": "django.db.backends.postgresql",
        "NAME": place.path[1:],
        "USER": place.username,
        "HOST": place.hostname,
        "PORT": place.port,
    }
    settings.configure(
        DATABASES={"default": database},
        INSTALLED_APPS=["oncekey.django"],
        MIDDLEWARE=["oncekey.django.Middleware"],
        ROOT_URLCONF=__name__,
        SECRET_KEY="slice",
        ALLOWED_HOSTS=["*"],
        ONCEKEY=f"{__name__}.once",
        USE_TZ=True,
    )
    django.setup()
    from django.core.handlers.wsgi import WSGIHandler
    from django.core.management import call_command
    from django.db import connection
    from django.http import HttpResponse, JsonResponse
    from django.urls import path

    from oncekey import LOCAL
    from oncekey.django import Once

    once = Once(tenant=lambda _: "single")
    released = threading.Event()

    @once.protect(effects=LOCAL)
    def create_order(request: Any) -> Any:
        order = json.loads(request.body)
        with connection.cursor() as cursor:
            cursor.execute(TABLE)
            cursor.execute(INSERT.format("%s"), (order["item"],))
        if order.get("wait"):
            released.wait()
        return JsonResponse(order, status=201)

    globals()["once"] = once
    globals()["urlpatterns"] = [
        path("orders", create_order),
        path("release", _done(released.set, HttpResponse())),
        path("mark", _done(RECORDER.mark, HttpResponse())),
        path("slice", lambda _: JsonResponse(RECORDER.seen())),
    ]
    call_command("migrate", verbosity=0)
    return WSGIHandler()


def _end_with_standard_input() -> None:
    while os.read(0, 1):
        pass
    os._exit(0)


def main() -> None:
    """Serve the application that the first argument names."""
    name, store = sys.argv[1:]
    threading.Thread(target=_end_with_standard_input, daemon=True).start()
    app = globals()[name](store)
    sys.meta_path.insert(0, RECORDER)
    if name.startswith("fastapi"):
        import uvicorn

        with socket.create_server(("127.0.0.1", 0)) as listener:
            print(listener.getsockname()[1], flush=True)
            config = uvicorn.Config(app, lifespan="on", log_level="warning", access_log=False)
            uvicorn.Server(config).run(sockets=[listener])
        return
    from socketserver import ThreadingMixIn
    from wsgiref.simple_server import WSGIRequestHandler, WSGIServer

    class Server(ThreadingMixIn, WSGIServer):
        daemon_threads = True

    class Handler(WSGIRequestHandler):
        def log_message(self, format: str, *args: object) -> None:  # noqa: A002
            pass

    with Server(("127.0.0.1", 0), Handler) as server:
        server.set_app(app)
        print(server.server_address[1], flush=True)
        server.serve_forever()


if __name__ == "__main__":
    main()
