"""An OUTBOX route and an OUTBOX consumer on any store, in processes that kill themselves at a step.

`python -c "from outbox.accepting import main; main()" KIND URL CALLS` reads one order a line and forks a process for
it. The imports are shared; the application, its connections and its death are the child's own.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import json
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import django
import flask
import httpx
from django.conf import settings
from django.core.wsgi import get_wsgi_application
from django.http import JsonResponse
from django.urls import path
from psycopg.conninfo import conninfo_to_dict
from sqlalchemy import create_engine
from sqlalchemy.ext.asyncio import create_async_engine
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route

from oncekey.core.model import OUTBOX
from oncekey.core.topics import Message, Reply
from oncekey.engine import relay, settle
from oncekey.engine.operation import Operation, SyncOperation
from oncekey.once import SINGLE_TENANT, Once
from oncekey.stores.keystore import ParcelStore
from oncekey.workers.tasks import tasks_for

BOOKED, SENT = {"booked": 1}, {"sent": 1}
"""What the handler returns, and what the worker does."""
EARLY = ("claimed", "running", "parcel")
"""Steps at which nothing is committed yet."""
STEPS = (*EARLY, "committed", "called", "delivered")

KINDS = {
    "sqlite": ("sqlite:///", False),
    "psycopg": ("postgresql+psycopg://", False),
    "asyncpg": ("postgresql+asyncpg://", True),
    "pymysql": ("mariadb://", False),
    "mysql": ("mysql://", False),
    "sqlalchemy-sqlite": ("sqlite:///", False),
    "sqlalchemy-aiosqlite": ("sqlite+aiosqlite:///", True),
    "sqlalchemy-psycopg": ("postgresql+psycopg://", False),
    "sqlalchemy-asyncpg": ("postgresql+asyncpg://", True),
    "sqlalchemy-aiomysql": ("mysql+aiomysql://", True),
    "django-sqlite": ("sqlite:///", False),
    "django-postgresql": ("postgresql://", False),
}
"""Every store that has an outbox, and the ways to it: how its address begins, and whether its handlers are awaited."""

urlpatterns: list[Any] = []
once: Any = None
"""What Django looks up."""


class Application:
    """The route and the consumer, for one process."""

    def __init__(self, kind: str, address: str, die: str | None) -> None:
        scheme, self.awaits = KINDS[kind]
        self.kind, self.url, self._die = kind, scheme + address, die
        self.once = _once(kind, self.url)

    def die(self, step: str) -> None:
        if step == self._die:
            os.kill(os.getpid(), signal.SIGKILL)

    def book(self, op: Any) -> dict[str, int]:
        self.die("claimed")
        connection, insert = op.connection, "INSERT INTO bookings VALUES (1)"
        if hasattr(connection, "exec_driver_sql"):
            connection.exec_driver_sql(insert)
        elif hasattr(connection, "execute"):
            connection.execute(insert)
        else:
            with connection.cursor() as cursor:
                cursor.execute(insert)
        return self._deferred(op)

    async def book_awaited(self, op: Any) -> dict[str, int]:
        self.die("claimed")
        connection, insert = op.connection, "INSERT INTO bookings VALUES (1)"
        if hasattr(connection, "exec_driver_sql"):
            await connection.exec_driver_sql(insert)
        elif hasattr(connection, "execute"):
            await connection.execute(insert)
        else:
            async with connection.cursor() as cursor:
                await cursor.execute(insert)
        return self._deferred(op)

    def _deferred(self, op: Any) -> dict[str, int]:
        self.die("running")
        op.defer("send", {})
        return BOOKED

    # Over HTTP

    def ask(self, key: str) -> dict[str, Any]:
        """Send the request, and return what its client gets."""
        headers = {"Idempotency-Key": key}
        if self.awaits:
            return asyncio.run(self._ask_awaited(headers))
        app = self._django() if self.kind.startswith("django") else self._flask()
        with httpx.Client(transport=httpx.WSGITransport(app), base_url="http://localhost") as client:
            return _told(client.post("/bookings", json={}, headers=headers))

    async def _ask_awaited(self, headers: dict[str, str]) -> dict[str, Any]:
        @self.once.protect(effects=OUTBOX, operation="book")
        async def book(request: Request, op: Operation) -> JSONResponse:
            return JSONResponse(await self.book_awaited(op))

        app = Starlette(routes=[Route("/bookings", book, methods=["POST"])])
        self.once.install(app, tenant=SINGLE_TENANT)
        await self.once.start()
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://localhost") as client:
            told = _told(await client.post("/bookings", json={}, headers=headers))
        await self.once.stop()
        return told

    def _flask(self) -> flask.Flask:
        app = flask.Flask("bookings")

        @app.post("/bookings")
        @self.once.protect(effects=OUTBOX, operation="book")
        def book(op: SyncOperation) -> dict[str, int]:
            return self.book(op)

        self.once.flask(app, tenant=SINGLE_TENANT)
        return app

    def _django(self) -> Any:
        @self.once.protect(effects=OUTBOX, operation="book")
        def book(_: Any, op: SyncOperation) -> JsonResponse:
            return JsonResponse(self.book(op))

        urlpatterns[:] = [path("bookings", book)]
        return get_wsgi_application()

    # By a message

    def take(self, key: str) -> dict[str, Any]:
        """Deliver the message, and return its receipt."""
        consumer = self.once.inbox(consumer="bookings", effects=OUTBOX)
        receipt: Any
        if self.awaits:

            async def taken() -> Any:
                @consumer
                async def book(op: Operation, event: str) -> dict[str, int]:
                    return await self.book_awaited(op)

                await self.once.start()
                receipt = await book(key, "")
                await self.once.stop()
                return receipt

            receipt = asyncio.run(taken())
        else:

            @consumer
            def book(op: SyncOperation, event: str) -> dict[str, int]:
                return self.book(op)

            receipt = book(key, "")
        return {"said": receipt.handling.value, "body": receipt.result}


def _told(response: httpx.Response) -> dict[str, Any]:
    return {"said": response.status_code, "body": response.json()}


def _once(kind: str, url: str) -> Any:
    if kind.startswith("sqlalchemy"):
        make: Callable[..., Any] = create_async_engine if KINDS[kind][1] else create_engine
        return Once(make(url))
    if not kind.startswith("django"):
        return Once(url)
    if url.startswith("sqlite"):
        database = {"ENGINE": "django.db.backends.sqlite3", "NAME": url.removeprefix("sqlite:///")}
    else:
        options = conninfo_to_dict(url)
        database = {"ENGINE": "django.db.backends.postgresql", "NAME": options.pop("dbname"), "OPTIONS": options}
    settings.configure(
        SECRET_KEY="of the tests",
        ALLOWED_HOSTS=["*"],
        DATABASES={"default": database},
        INSTALLED_APPS=["oncekey.django"],
        MIDDLEWARE=["oncekey.django.Middleware"],
        ROOT_URLCONF=__name__,
        ONCEKEY=f"{__name__}.once",
    )
    django.setup()
    djangos = importlib.import_module("oncekey.django")
    globals()["once"] = djangos.Once(djangos.Database("default"), tenant=lambda _: "acme")
    return once


def _append(calls: Path, line: str) -> None:
    with calls.open("a") as file:
        file.write(f"{line}\n")


async def work(url: str, calls: str, die: Callable[[str], None]) -> None:
    """What a worker does with all that is due."""
    once = Once(url)

    @once.topic("send", repeatable=True)
    async def send(message: Message) -> Reply:
        await asyncio.to_thread(_append, Path(calls), message.downstream_key)
        die("called")
        return Reply(201, SENT)

    await once.start()
    (task,) = [task for task in tasks_for(once) if task.name == "relay"]
    await task.run_once()
    await task.shut_down()
    await once.stop()


def _killing(app: Application) -> None:
    """Let the process die between a write and its commit, after the commit, and after the delivery."""
    put, note, deliver = ParcelStore.putting, settle._note_stored, relay._deliver

    def putting(*given: Any) -> Any:
        yield from put(*given)
        app.die("parcel")

    def noted(*given: Any) -> None:
        app.die("committed")
        note(*given)

    def delivered(*given: Any) -> Any:
        ended = yield from deliver(*given)
        app.die("delivered")
        return ended

    ParcelStore.putting, settle._note_stored, relay._deliver = putting, noted, delivered  # type: ignore[method-assign,assignment]


def _perform(kind: str, address: str, calls: str, order: dict[str, Any]) -> dict[str, Any]:
    app = Application(kind, address, order["die"])
    _killing(app)
    match order["do"]:
        case "http":
            return app.ask(order["key"])
        case "inbox":
            return app.take(order["key"])
        case _:
            native = "sqlite" if "sqlite" in app.url else "mysql" if "m" in app.url.partition(":")[0] else "postgresql"
            asyncio.run(work(f"{native}://{'/' if native == 'sqlite' else ''}{address}", calls, app.die))
            return {}


def main() -> None:
    """Fork for each order, and say what came of it; nothing if the process was killed."""
    kind, address, calls = sys.argv[1:]
    for line in sys.stdin:
        reading, writing = os.pipe()
        if (child := os.fork()) == 0:
            os.close(reading)
            told = _perform(kind, address, calls, json.loads(line))
            os.write(writing, json.dumps(told).encode())
            os._exit(0)
        os.close(writing)
        with os.fdopen(reading, "rb") as pipe:
            told = pipe.read()
        _, status = os.waitpid(child, 0)
        killed = os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL
        with contextlib.suppress(BrokenPipeError):
            print(json.dumps({"killed": killed, **json.loads(told or b'{"said": "failed", "body": null}')}), flush=True)
