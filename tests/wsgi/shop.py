"""A shop behind WSGI, as a plain application and as Flask's, over real servers."""

from __future__ import annotations

import functools
import http.client
import json
import os
import socketserver
import sqlite3
import threading
import uuid
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from typing import Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer, make_server

import flask
import psycopg
import werkzeug.serving
from flask.views import MethodView

from harness.patience import PATIENCE
from oncekey.core.model import INLINE, LOCAL, PHASED
from oncekey.core.policy import Policy
from oncekey.engine.operation import SyncOperation
from oncekey.once import Once

TABLE = "CREATE TABLE sold (item TEXT NOT NULL)"


def execute(url: str, sql: str) -> list[Any]:
    """What anybody else sees or does."""
    if url.startswith("sqlite"):
        with closing(sqlite3.connect(url.removeprefix("sqlite:///"))) as connection, connection:
            return connection.execute(sql).fetchall()
    with psycopg.connect(url.replace("postgresql+psycopg", "postgresql"), autocommit=True) as connection:
        cursor = connection.execute(sql.encode())
        return cursor.fetchall() if cursor.description else []


@dataclass
class Shop:
    """What the handlers of all kinds of applications do."""

    url: str
    policy: Policy = field(default_factory=Policy)
    entered: threading.Semaphore = field(default_factory=lambda: threading.Semaphore(0))
    """Released by each handler that waits."""
    go_on: threading.Event = field(default_factory=threading.Event)
    charges: list[str] = field(default_factory=list)
    runs: list[str] = field(default_factory=list)
    stumbled: set[str] = field(default_factory=set)
    workers: bool = False

    def __post_init__(self) -> None:
        self.once = Once(self.url, policy=self.policy, migrate=True, workers=self.workers)

    @property
    def sold(self) -> list[str]:
        return sorted(item for (item,) in execute(self.url, "SELECT item FROM sold"))

    def insert(self, connection: Any, item: str) -> str:
        connection.execute(f"INSERT INTO sold VALUES ({'?' if self.url.startswith('sqlite') else '%s'})", (item,))
        return item

    def local(self, op: SyncOperation[Any], order: dict[str, Any]) -> tuple[dict[str, Any], int]:
        """Rows that commit with the key."""
        self.runs.append("local")
        self.insert(op.connection, order["item"])
        self._does(order)
        return {"item": order["item"], "attempt": op.attempt}, order.get("status", 201)

    def inline(self, op: SyncOperation[Any], order: dict[str, Any]) -> tuple[dict[str, Any], int]:
        """A call to the outside."""
        self.runs.append("inline")
        self.charges.append(op.downstream_key("charge"))
        self._does(order)
        return {"charges": len(self.charges)}, 201

    def phased(self, op: SyncOperation[Any], order: dict[str, Any]) -> tuple[dict[str, Any], int]:
        """Order, draw, charge, mark as paid."""
        self.runs.append("phased")
        item = op.phase("ordered", self.insert, order["item"])
        drawn = op.value("drawn", lambda: uuid.uuid4().hex)
        charge = op.call("charge", self._charge, repeatable=False)
        self._does(order)
        op.phase("paid", self.insert, f"{item} paid")
        return {"drawn": drawn, "charge": charge, "attempt": op.attempt}, 201

    def where(self, op: SyncOperation[Any], order: dict[str, Any]) -> tuple[dict[str, Any], int]:
        """Which process serves, and on which connection."""
        self.insert(op.connection, order["item"])
        if self.url.startswith("sqlite"):
            return {"pid": os.getpid(), "backend": None}, 201
        (backend,) = op.connection.execute("SELECT pg_backend_pid()").fetchone()
        return {"pid": os.getpid(), "backend": backend}, 201

    def _charge(self, key: str) -> str:
        self.charges.append(key)
        return key

    def _does(self, order: dict[str, Any]) -> None:
        match order.get("does"):
            case "wait":
                self.entered.release()
                assert self.go_on.wait(PATIENCE)
            case "stumble" if order["item"] not in self.stumbled:
                self.stumbled.add(order["item"])
                raise ValueError("it stumbled")
            case "exit":
                raise SystemExit("the worker took too long")
            case _:
                pass

    # Applications

    def application(self, kind: str) -> Any:
        """A WSGI application, protected."""
        return {"plain": self.plain, "flask": self.flask}[kind]()

    def plain(self) -> Any:
        """Handlers that are WSGI applications themselves."""

        def served(handler: Callable[..., Any], **options: Any) -> Callable[..., Any]:
            @self.once.protect(operation=f"plain {options.get('operation', handler.__name__)}", **_but(options))
            def view(environ: Any, start_response: Any, op: SyncOperation[Any]) -> Iterable[bytes]:
                size = int(environ.get("CONTENT_LENGTH") or 0)
                body, status = handler(op, json.loads(environ["wsgi.input"].read(size)))
                start_response(f"{status} Status", [("Content-Type", "application/json")])
                return [json.dumps(body).encode()]

            return view

        routes = {
            "/local": served(self.local, effects=LOCAL),
            "/optional": served(self.local, operation="optional", effects=LOCAL, require_key=False),
            "/where": served(self.where, effects=LOCAL),
            "/inline": served(self.inline, effects=INLINE),
            "/phased": served(self.phased, effects=PHASED),
        }

        def app(environ: Any, start_response: Any) -> Iterable[bytes]:
            if environ["PATH_INFO"] == "/stream":
                return self._stream(environ, start_response)
            try:
                return routes[environ["PATH_INFO"]](environ, start_response)
            except ValueError:
                start_response("500 Oops", [])
                return [b"oops"]

        return self.once.wsgi(app, tenant=tenant_of, status="/idempotency-keys")

    @staticmethod
    def _stream(environ: Any, start_response: Any) -> Iterator[bytes]:
        """An application that is a generator: it begins with its first piece, and nobody protects it."""
        read = len(environ["wsgi.input"].read(int(environ.get("CONTENT_LENGTH") or 0)))
        start_response("200 OK", [("Content-Type", "text/plain")])
        yield b"read "
        yield str(read).encode()

    def flask(self) -> flask.Flask:
        """Views of Flask."""
        app = flask.Flask("shop")
        seen: list[Any] = app.config.setdefault("SEEN", [])

        @app.before_request
        def reads_first() -> None:
            seen.append(flask.request.get_json(silent=True))

        def logged(view: Callable[..., Any]) -> Callable[..., Any]:
            @functools.wraps(view)
            def wrapper(*args: Any, **kwargs: Any) -> Any:
                seen.append("logged in")
                return view(*args, **kwargs)

            return wrapper

        def served(handler: Callable[..., Any], path: str, **options: Any) -> None:
            @self.once.protect(operation=f"flask {path}", **options)
            def view(op: SyncOperation[Any]) -> Any:
                return handler(op, flask.request.get_json())

            app.add_url_rule(path, path, logged(view), methods=["POST"])

        served(self.local, "/local", effects=LOCAL)
        served(self.local, "/optional", effects=LOCAL, require_key=False)
        served(self.where, "/where", effects=LOCAL)
        served(self.inline, "/inline", effects=INLINE)
        served(self.phased, "/phased", effects=PHASED)
        once, insert = self.once, self.insert

        class Orders(MethodView):
            @once.protect(effects=LOCAL, operation="flask orders")
            def post(self, name: str, op: SyncOperation[Any]) -> Any:
                insert(op.connection, name)
                if name == "refused":
                    flask.abort(409)
                if name == "large":
                    return flask.Response(b"x" * 3_000_000)
                if name == "events":
                    return flask.Response(iter([b"data: 1"] * 5), mimetype="text/event-stream")
                return flask.Response(iter([b"one ", b"two"]), status=201)

            @once.protect(effects=LOCAL, operation="flask look")
            def get(self, name: str) -> str:
                return f"looked at {name}"

        app.add_url_rule("/orders/<name>", view_func=Orders.as_view("orders"))
        app.add_url_rule("/stream", view_func=lambda: f"read {len(flask.request.data)}", methods=["POST"])
        # In Flask's own context, as an application that authenticates in `before_request` needs it.
        served_app = self.once.wsgi(app, tenant=lambda _: tenant_of(flask.request.environ), status="/idempotency-keys")
        assert served_app is app
        return app


def tenant_of(environ: dict[str, Any]) -> str:
    """Whom the request says to be from."""
    tenant: str = environ.get("HTTP_TENANT", "acme")
    return tenant


def _but(options: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in options.items() if name != "operation"}


@dataclass(frozen=True)
class Reply:
    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def replayed(self) -> bool:
        return self.headers.get("idempotent-replayed") == "true"

    def json(self) -> Any:
        return json.loads(self.body)


def send(port: int, path: str, order: Any = None, *, key: str | None, method: str = "POST", **headers: str) -> Reply:
    """One request on a connection of its own."""
    sent = {"Content-Type": "application/json", **headers}
    if key is not None:
        sent["Idempotency-Key"] = key
    with closing(http.client.HTTPConnection("127.0.0.1", port, timeout=PATIENCE)) as connection:
        connection.request(method, path, json.dumps(order or {}), sent)
        response = connection.getresponse()
        names = {name.lower(): value for name, value in response.getheaders()}
        return Reply(response.status, names, response.read())


class _Threaded(socketserver.ThreadingMixIn, WSGIServer):
    daemon_threads = False
    request_queue_size = 64


class _Quiet(WSGIRequestHandler):
    def log_message(self, *_: object) -> None: ...


class _QuietWerkzeug(werkzeug.serving.WSGIRequestHandler):
    def log(self, *_: object) -> None: ...


@contextmanager
def served(app: Any) -> Iterator[int]:
    """A threaded server on loopback: the standard library's, or werkzeug's for Flask; its port."""
    server: Any
    if isinstance(app, flask.Flask):
        server = werkzeug.serving.make_server("127.0.0.1", 0, app, threaded=True, request_handler=_QuietWerkzeug)
    else:
        server = make_server("127.0.0.1", 0, app, _Threaded, _Quiet)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield server.server_port
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
