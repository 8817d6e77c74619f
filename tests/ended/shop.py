"""A shop whose handlers lose their transaction, on every driver and session that a handler can write through.

`python -m ended.shop PLACE URL` serves it and prints its port. `POST /EFFECTS/WAY/THEN` writes a row, ends the
transaction in a way, and then returns, writes once more and returns, or writes once more and raises 404. Only the first
run of a key does so; the next one writes its row and returns. `GET /refused` tells which last writes were refused.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import sys
import threading
from collections.abc import Awaitable, Callable, Generator
from dataclasses import dataclass
from functools import partial
from typing import Any
from urllib.parse import urlsplit
from weakref import WeakKeyDictionary

import psycopg
import pymysql
from fastapi import FastAPI, HTTPException, Request
from sqlalchemy import create_engine, text
from sqlalchemy.ext.asyncio import create_async_engine

from harness.patience import wait_until
from oncekey import LOCAL, OUTBOX, PHASED, SINGLE_TENANT, Once, Operation, SyncOperation

EFFECTS = {"local": LOCAL, "phased": PHASED, "outbox": OUTBOX}


@dataclass(frozen=True, slots=True)
class Step:
    """One thing that a handler does on its connection, or that somebody else does meanwhile."""

    does: str
    words: str = ""


def sql(words: str) -> Step:
    return Step("execute", words)


def below(*words: str) -> list[Step]:
    """What is sent past every guard, on the connection of the database's own library."""
    return [Step("below", one) for one in words]


HOLD = sql("UPDATE accounts SET n = n + 1 WHERE id = 2")
CROSS = sql("UPDATE accounts SET n = n + 1 WHERE id = 1")
RIVAL = Step("rival")
"""Another transaction holds account 1, wants account 2 and has written more, so that ours ends the deadlock."""
BELOW = {
    "commit below": below("COMMIT"),
    "rollback below": below("ROLLBACK"),
    "another below": below("COMMIT", "BEGIN"),
}
WAYS: dict[str, dict[str, list[Step]]] = {
    "mariadb": {
        "deadlock": [RIVAL, HOLD, sql("CALL await_rival()"), CROSS],
        "deadlock in a procedure": [RIVAL, Step("call", "crossing")],
        "deadlock in several": [RIVAL, Step("several", f"{HOLD.words}; CALL await_rival(); {CROSS.words}; DO 0")],
        "deadlock that a procedure hides": [RIVAL, Step("call", "crossing_quietly")],
        "time-out": [Step("hold"), sql("SET SESSION innodb_lock_wait_timeout = 1"), CROSS],
        "row that changed": [sql("SELECT n FROM accounts"), Step("elsewhere", CROSS.words), CROSS],
        "connection that is lost": [Step("kill", "SELECT CONNECTION_ID()"), Step("ping")],
        "silence": [sql("SET SESSION wait_timeout = 1"), Step("outlive", "SELECT CONNECTION_ID()")],
        "procedure that commits": [Step("call", "commits")],
        "procedure that begins": [Step("call", "begins")],
        "procedure that makes a table": [Step("call", "makes_a_table")],
        **BELOW,
    },
    "sqlite": {
        "or rollback": [sql("INSERT OR ROLLBACK INTO coupons (code) VALUES ('taken')")],
        "conflict of a column": [sql("INSERT INTO vouchers (code) VALUES ('taken')")],
        "trigger": [sql("INSERT INTO guarded (code) VALUES ('any')")],
        **BELOW,
    },
    "postgresql": {
        "failed statement": [sql("SELECT 1 / 0")],
        "connection that is lost": [Step("kill", "SELECT pg_backend_pid()")],
        "silence": [
            sql("SET LOCAL idle_in_transaction_session_timeout = 100"),
            Step("outlive", "SELECT pg_backend_pid()"),
        ],
        **BELOW,
    },
}

Scenario = Generator[Step, Any, None]


class Notes:
    """What happened, by key."""

    def __init__(self) -> None:
        self.runs: dict[str, int] = {}
        self.refused: dict[str, str] = {}

    def scenario(self, family: str, key: str, way: str, then: str) -> Scenario:
        """A handler's work."""
        self.runs[key] = run = self.runs.get(key, 0) + 1
        yield sql(f"INSERT INTO orders (item) VALUES ('before {run}')")
        if run > 1:
            return
        with contextlib.suppress(Exception):  # "no coupon then"
            for step in WAYS[family][way]:  # noqa: UP028  (a list cannot be sent the results)
                yield step
        if then != "return":
            try:
                yield sql("INSERT INTO orders (item) VALUES ('after')")
            except Exception as error:
                self.refused[key] = f"{type(error).__name__}: {error}"


class Elsewhere:
    """Other sessions on the same database."""

    def __init__(self, url: str) -> None:
        self._parts = urlsplit(url)
        self._url = url

    def execute(self, words: str) -> None:
        with self.connect() as connection:
            connection.cursor().execute(words)

    def connect(self, *, autocommit: bool = True) -> Any:
        if self._url.startswith("postgresql"):
            return psycopg.connect(self._url.replace("+psycopg", "").replace("+asyncpg", ""), autocommit=autocommit)
        parts = self._parts
        return pymysql.connect(
            host="127.0.0.1", port=parts.port or 0, user="root", database=parts.path[1:], autocommit=autocommit
        )

    def kill(self, number: int) -> None:
        words = "SELECT pg_terminate_backend({})" if self._url.startswith("postgresql") else "KILL {}"
        self.execute(words.format(number))

    def outlive(self, number: int) -> None:
        """Wait until the server has ended a session."""
        words = "SELECT 1 FROM information_schema.processlist WHERE id = {}"
        if self._url.startswith("postgresql"):
            words = "SELECT 1 FROM pg_stat_activity WHERE pid = {}"
        with self.connect() as looking, looking.cursor() as cursor:

            def is_there() -> bool:
                cursor.execute(words.format(number))
                return bool(cursor.fetchall())

            wait_until(lambda: not is_there(), "the server did not end the session")

    def hold(self) -> None:
        """Lock account 1 until our own transaction has given up."""
        other = self.connect(autocommit=False)
        other.cursor().execute(CROSS.words)
        threading.Thread(target=self._let_go, args=(other,)).start()

    def _let_go(self, other: Any) -> None:
        with contextlib.closing(other):
            with self.connect() as looking, looking.cursor() as cursor:

                def waits() -> bool:
                    cursor.execute("SHOW GLOBAL STATUS LIKE 'Innodb_row_lock_current_waits'")
                    return int(cursor.fetchone()[1]) > 0

                wait_until(waits, "nobody waited")
                wait_until(lambda: not waits(), "somebody still waits")
            other.rollback()

    def rival(self) -> None:
        """Begin a deadlock: hold account 1, and ask for account 2 as soon as that is locked."""
        other = self.connect(autocommit=False)
        cursor = other.cursor()
        cursor.executemany("INSERT INTO heavy (x) VALUES (%s)", [(number,) for number in range(300)])
        cursor.execute(CROSS.words)
        threading.Thread(target=self._cross, args=(other,)).start()

    def _cross(self, other: Any) -> None:
        with contextlib.closing(other):
            with self.connect() as looking, looking.cursor() as cursor:

                def is_locked() -> bool:
                    cursor.execute("SELECT id FROM accounts WHERE id = 2 FOR UPDATE SKIP LOCKED")
                    return not cursor.fetchall()

                wait_until(is_locked, "nobody locked account 2")
            other.cursor().execute(HOLD.words)
            other.rollback()


@dataclass(frozen=True, slots=True)
class Hands:
    """How a handler of one place executes a text, and what lies below its connection."""

    execute: Callable[[Any, str], Any]
    below: Callable[[Any], Any]
    call: Callable[[Any, str], Any] | None = None
    several: Callable[[Any, str], Any] | None = None
    ping: Callable[[Any], Any] | None = None


def performing(hands: Hands, connection: Any, elsewhere: Elsewhere, step: Step) -> Generator[Any, Any, Any]:
    """One step: it yields what may have to be awaited."""
    match step.does:
        case "execute":
            return (yield hands.execute(connection, step.words))
        case "call" if hands.call is not None:
            return (yield hands.call(connection, step.words))
        case "call":
            return (yield hands.execute(connection, f"CALL {step.words}()"))
        case "several":
            return (yield (hands.several or hands.execute)(connection, step.words))
        case "below":
            raw = hands.below(connection)
            return (yield (getattr(raw, "query", None) or raw.execute)(step.words))
        case "ping":
            return (yield hands.ping(connection)) if hands.ping is not None else None
        case "kill" | "outlive":
            number = yield hands.execute(connection, step.words)
            act = partial(getattr(elsewhere, step.does), number)
            slow = step.does == "outlive" and inspect.iscoroutinefunction(hands.execute)
            return (yield asyncio.to_thread(act) if slow else act())  # the handler's loop goes on meanwhile
        case "elsewhere":
            return elsewhere.execute(step.words)
        case "hold":
            return elsewhere.hold()
        case "rival":
            return elsewhere.rival()
        case _:
            raise AssertionError(step)


def playing(scenario: Scenario, perform: Callable[[Step], Generator[Any, Any, Any]]) -> Generator[Any, Any, None]:
    """All steps of a handler; it hears the errors of each."""
    step = next(scenario)
    while True:
        advance: Callable[[], Step]
        try:
            advance = partial(scenario.send, (yield from perform(step)))
        except Exception as error:
            advance = partial(scenario.throw, error)
        try:
            step = advance()
        except StopIteration:
            return


def blocking(steps: Generator[Any, Any, None]) -> None:
    with contextlib.suppress(StopIteration):
        result = next(steps)
        while True:
            result = steps.send(result)


async def awaiting(steps: Generator[Any, Any, None]) -> None:
    try:
        result = next(steps)
        while True:
            try:
                done = await result if isinstance(result, Awaitable) else result
            except Exception as error:
                result = steps.throw(error)
            else:
                result = steps.send(done)
    except StopIteration:
        return


# How each library is used


async def aiomysql_execute(connection: Any, words: str) -> Any:
    async with connection.cursor() as cursor:
        await cursor.execute(words)
        row = await cursor.fetchone()
        return row and row[0]


async def aiomysql_call(connection: Any, name: str) -> None:
    async with connection.cursor() as cursor:
        await cursor.callproc(name)


async def aiomysql_several(connection: Any, words: str) -> None:
    async with connection.cursor() as cursor:
        await cursor.execute(words)
        while await cursor.nextset():
            pass


def pymysql_execute(connection: Any, words: str) -> Any:
    with connection.cursor() as cursor:
        cursor.execute(words)
        row = cursor.fetchone()
        return row and row[0]


def pymysql_call(connection: Any, name: str) -> None:
    with connection.cursor() as cursor:
        cursor.callproc(name)


def pymysql_several(connection: Any, words: str) -> None:
    with connection.cursor() as cursor:
        cursor.execute(words)
        while cursor.nextset():
            pass


async def asyncpg_execute(connection: Any, words: str) -> Any:
    return await connection.fetchval(words)


async def psycopg_execute(connection: Any, words: str) -> Any:
    cursor = await connection.execute(words)
    return (await cursor.fetchone())[0] if cursor.description else None


def dbapi_execute(connection: Any, words: str) -> Any:
    cursor = connection.execute(words)
    return cursor.fetchone()[0] if cursor.description else None


async def sqlite_execute(connection: Any, words: str) -> Any:
    await connection.execute(words)


def one_cursor(connection: Any, words: str) -> Any:
    """A handler that keeps its cursor."""
    if connection not in _cursors:
        _cursors[connection] = connection.cursor()
    _cursors[connection].execute(words)


_cursors: WeakKeyDictionary[Any, Any] = WeakKeyDictionary()


async def engine_execute(connection: Any, words: str) -> Any:
    result = await connection.execute(text(words))
    return result.scalar() if result.returns_rows else None


def blocking_engine_execute(connection: Any, words: str) -> Any:
    result = connection.execute(text(words))
    return result.scalar() if result.returns_rows else None


def django_execute(connection: Any, words: str) -> Any:
    with connection.cursor() as cursor:
        cursor.execute(words)
        return cursor.fetchone()[0] if cursor.description else None


HANDS: dict[str, Hands] = {
    "aiomysql": Hands(aiomysql_execute, lambda c: c._raw, aiomysql_call, aiomysql_several, lambda c: c.ping()),
    "pymysql": Hands(pymysql_execute, lambda c: c._raw, pymysql_call, pymysql_several, lambda c: c.ping()),
    "sqlite": Hands(sqlite_execute, lambda c: c._transaction._sqlite._raw),
    "sqlite def": Hands(one_cursor, lambda c: c._speaker._raw),
    "asyncpg": Hands(asyncpg_execute, lambda c: c._raw),
    "psycopg": Hands(psycopg_execute, lambda c: c._raw),
    "psycopg def": Hands(dbapi_execute, lambda c: c._raw),
    "engine": Hands(engine_execute, lambda c: c.sync_connection.connection.driver_connection),
    "engine def": Hands(blocking_engine_execute, lambda c: c.connection.driver_connection),
    "flask": Hands(blocking_engine_execute, lambda c: c.connection().connection.driver_connection),
    "django": Hands(django_execute, lambda c: c.connection),
}


# The applications


@dataclass(frozen=True, slots=True)
class Shop:
    """The notes, the hands and the neighbours of one place."""

    hands: Hands
    family: str
    elsewhere: Elsewhere
    notes: Notes

    def steps(self, connection: Any, *asked: str) -> Generator[Any, Any, None]:
        """What a handler does on its connection, for a key, a way and what comes then."""
        perform = partial(performing, self.hands, connection, self.elsewhere)
        return playing(self.notes.scenario(self.family, *asked), perform)

    def refuses(self, key: str, then: str) -> bool:
        return then == "refuse" and self.notes.runs[key] == 1


def fastapi_app(shop: Shop, store: Any, *, threads: bool) -> Any:
    once = Once(store, migrate=True)
    app = FastAPI(lifespan=once.lifespan)
    once.install(app, tenant=SINGLE_TENANT)
    once.topic("parcel", repeatable=True)(lambda message: None)

    async def work(request: Request, op: Operation, way: str, then: str) -> dict[str, bool]:
        key = request.headers["Idempotency-Key"]

        async def phase(connection: Any) -> None:
            await awaiting(shop.steps(connection, key, way, then))
            if shop.refuses(key, then):
                raise HTTPException(404)

        if request.url.path.startswith("/phased"):
            await op.phase("only", phase)
        else:
            await phase(op.connection)
        if request.url.path.startswith("/outbox"):
            op.defer("parcel", {})
        return {"ok": True}

    def work_in_a_thread(request: Request, op: SyncOperation, way: str, then: str) -> dict[str, bool]:
        key = request.headers["Idempotency-Key"]

        def phase(connection: Any) -> None:
            blocking(shop.steps(connection, key, way, then))
            if shop.refuses(key, then):
                raise HTTPException(404)

        if request.url.path.startswith("/phased"):
            op.phase("only", phase)
        else:
            phase(op.connection)
        if request.url.path.startswith("/outbox"):
            op.defer("parcel", {})
        return {"ok": True}

    for name, effects in EFFECTS.items():
        handler: Any = work_in_a_thread if threads else work
        app.post(f"/{name}/{{way}}/{{then}}", status_code=201)(once.protect(effects=effects, operation=name)(handler))
    app.get("/refused")(lambda: shop.notes.refused)
    return app


def flask_app(shop: Shop, url: str) -> Any:
    import flask
    from flask_sqlalchemy import SQLAlchemy

    from oncekey.flask import database

    db = SQLAlchemy()
    once = Once(database(db), migrate=True)
    once.topic("parcel", repeatable=True)(lambda message: None)
    app = flask.Flask("shop")
    app.config.update(SQLALCHEMY_DATABASE_URI=url)
    db.init_app(app)

    def view(name: str) -> Callable[..., Any]:
        def work(op: SyncOperation, way: str, then: str) -> Any:
            key = flask.request.headers["Idempotency-Key"]

            def phase(_: Any) -> None:
                blocking(shop.steps(db.session, key, way, then))
                if shop.refuses(key, then):
                    flask.abort(404)

            if name == "phased":
                op.phase("only", phase)
            else:
                phase(None)
            if name == "outbox":
                op.defer("parcel", {})
            return {"ok": True}, 201

        work.__name__ = name
        return work

    for name, effects in EFFECTS.items():
        app.post(f"/{name}/<way>/<then>")(once.protect(effects=effects, operation=name)(view(name)))
    app.get("/refused")(lambda: shop.notes.refused)
    once.flask(app, tenant=SINGLE_TENANT)
    return app


urlpatterns: list[Any] = []


def django_app(shop: Shop, url: str) -> Any:
    import django
    from django.conf import settings
    from django.core.management import call_command
    from django.core.wsgi import get_wsgi_application
    from django.db import connection
    from django.http import Http404, JsonResponse
    from django.urls import path

    from skins.on_django import _database

    settings.configure(
        ALLOWED_HOSTS=["*"],
        DATABASES={"default": _database(url)},
        INSTALLED_APPS=["oncekey.django"],
        MIDDLEWARE=["oncekey.django.Middleware"],
        ROOT_URLCONF=__name__,
        ONCEKEY=f"{__name__}.once",
    )
    django.setup()
    from oncekey.django import Database
    from oncekey.django import Once as DjangosOnce

    global once
    once = DjangosOnce(Database("default"), tenant=SINGLE_TENANT, survey=False)
    once.topic("parcel", repeatable=True)(lambda message: None)
    call_command("migrate", verbosity=0)

    def view(name: str) -> Callable[..., Any]:
        def work(request: Any, op: SyncOperation, way: str, then: str) -> Any:
            key = request.headers["Idempotency-Key"]

            def phase(_: Any) -> None:
                blocking(shop.steps(connection, key, way, then))
                if shop.refuses(key, then):
                    raise Http404

            if name == "phased":
                op.phase("only", phase)
            else:
                phase(None)
            if name == "outbox":
                op.defer("parcel", {})
            return JsonResponse({"ok": True}, status=201)

        return work

    urlpatterns[:] = [
        *(
            path(f"{name}/<way>/<then>", once.protect(effects=effects, operation=name)(view(name)))
            for name, effects in EFFECTS.items()
        ),
        path("refused", lambda request: JsonResponse(shop.notes.refused)),
    ]
    return get_wsgi_application()


once: Any = None


def family_of(url: str) -> str:
    return "mariadb" if url.startswith(("mariadb", "mysql")) else url.partition(":")[0].partition("+")[0]


def made(place: str, url: str) -> tuple[Any, bool]:
    """The application of a place, and whether it is WSGI's."""
    shop = Shop(HANDS[place], family_of(url), Elsewhere(url), Notes())
    match place:
        case "flask":
            return flask_app(shop, url), True
        case "django":
            return django_app(shop, url), True
        case "engine":
            isolation = {"isolation_level": "REPEATABLE READ"} if "repeatable" in sys.argv else {}
            return fastapi_app(shop, create_async_engine(url, **isolation), threads=False), False
        case "engine def":
            return fastapi_app(shop, create_engine(url), threads=True), False
        case _:
            return fastapi_app(shop, url, threads=place.endswith("def") or place == "pymysql"), False


def main() -> None:
    place, url = sys.argv[1:3]
    app, wsgi = made(place, url)
    if wsgi:
        import waitress

        server = waitress.create_server(app, host="127.0.0.1", port=0, threads=8)
        print(server.effective_port, flush=True)
        server.run()
        return
    import socket

    import uvicorn

    listener = socket.create_server(("127.0.0.1", 0))
    print(listener.getsockname()[1], flush=True)
    uvicorn.Server(uvicorn.Config(app, lifespan="on", log_level="warning")).run(sockets=[listener])


if __name__ == "__main__":
    main()
