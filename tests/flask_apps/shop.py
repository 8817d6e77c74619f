"""A shop as tutorials write it: Flask, Flask-SQLAlchemy, `db.session.commit()` in every view, a login that reads.

`FLASK_SHOP=URL python -m gunicorn flask_apps.shop:served` serves it, and `python -m flask_apps.shop URL` in a process
of its own, with waitress, which says its port; with `mortal` behind the URL an order may kill it.
"""

from __future__ import annotations

import functools
import io
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import flask
from flask.views import MethodView
from flask_sqlalchemy import SQLAlchemy
from sqlalchemy import text
from sqlalchemy.exc import IntegrityError

from harness.patience import PATIENCE
from oncekey import INLINE, LOCAL, OUTBOX, PHASED, Once, Operation, Policy, SyncOperation, resumed_as
from oncekey.flask import database

TABLES = (
    "CREATE TABLE orders (id {key} PRIMARY KEY, item VARCHAR(50) NOT NULL UNIQUE, tenant VARCHAR(50) NOT NULL)",
    "CREATE TABLE refunds (id {key} PRIMARY KEY, item VARCHAR(500), tenant VARCHAR(50) NOT NULL)",
    "CREATE TABLE users (token VARCHAR(50) PRIMARY KEY, tenant VARCHAR(50) NOT NULL)",
    "INSERT INTO users VALUES ('alpha', 'alpha'), ('beta', 'beta')",
)


@dataclass
class Shop:
    """An application, and what its handlers do."""

    url: str
    engine: dict[str, Any] = field(default_factory=dict)
    """Options of the engine."""
    binds: dict[str, str] = field(default_factory=dict)
    policy: Policy = field(default_factory=Policy)
    lease: float = 60.0
    dies: bool = False
    entered: threading.Semaphore = field(default_factory=lambda: threading.Semaphore(0))
    go_on: threading.Event = field(default_factory=threading.Event)
    events: list[str] = field(default_factory=list)
    runs: list[str] = field(default_factory=list)
    charges: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.db = SQLAlchemy()
        self.models()
        self.once = Once(database(self.db), policy=self.policy, migrate=True)
        self.app = self.create_app()

    def models(self) -> None:
        db: Any = self.db

        class Order(db.Model):  # type: ignore[misc, name-defined]
            __tablename__ = "orders"
            id = db.Column(db.Integer, primary_key=True)
            item = db.Column(db.String(50), nullable=False, unique=True)
            tenant = db.Column(db.String(50), nullable=False)

        class Refund(db.Model):  # type: ignore[misc, name-defined]
            __tablename__ = "refunds"
            id = db.Column(db.Integer, primary_key=True)
            item = db.Column(db.String(500))
            tenant = db.Column(db.String(50), nullable=False)

        class User(db.Model):  # type: ignore[misc, name-defined]
            __tablename__ = "users"
            token = db.Column(db.String(50), primary_key=True)
            tenant = db.Column(db.String(50), nullable=False)

        class Note(db.Model):  # type: ignore[misc, name-defined]
            __bind_key__ = "elsewhere"
            __tablename__ = "notes"
            id = db.Column(db.Integer, primary_key=True)

        self.order, self.refund, self.user, self.note = Order, Refund, User, Note

    # The application

    def create_app(self) -> flask.Flask:
        app = flask.Flask("shop")
        app.config.update(
            SQLALCHEMY_DATABASE_URI=self.url, SQLALCHEMY_ENGINE_OPTIONS=dict(self.engine), SQLALCHEMY_BINDS=self.binds
        )
        self.db.init_app(app)
        self.hooks(app)
        self.views(app)
        app.register_blueprint(self.blueprint())
        self.once.flask(app, tenant=lambda _: flask.g.user.tenant, principal=lambda request: flask.g.user.token)
        return app

    def hooks(self, app: flask.Flask) -> None:
        @app.before_request
        def authenticate() -> Any:
            self.events.append("before_request")
            token = resumed_as(flask.request) or flask.request.headers.get("Authorization", "").removeprefix("Bearer ")
            flask.g.user = self.db.session.get(self.user, token)
            if flask.g.user is None:
                return {"error": "who are you?"}, 401
            if flask.request.headers.get("Seen"):
                self.db.session.execute(text("UPDATE users SET tenant = tenant WHERE token = :token"), {"token": token})
            return None

        @app.after_request
        def decorate(response: flask.Response) -> flask.Response:
            self.events.append("after_request")
            if "after_request" in flask.request.headers.get("Commits", ""):
                self.db.session.commit()
            response.headers["X-After"] = flask.request.headers.get("Origin", "none")
            flask.session["seen"] = flask.session.get("seen", 0) + 1
            if flask.request.headers.get("Fails-After") and response.status_code < 500:
                raise RuntimeError("after_request fails")
            return response

        @app.teardown_request
        def over(error: BaseException | None) -> None:
            self.events.append("teardown")
            if "teardown_request" in flask.request.headers.get("Commits", "") and error is None:
                self.db.session.commit()

        @app.errorhandler(IntegrityError)
        def taken(_: IntegrityError) -> Any:
            self.events.append("error handler")
            self.db.session.rollback()
            return {"error": "taken"}, 409

        app.secret_key = "for the cookie"

    def views(self, app: flask.Flask) -> None:
        protect = self.once.protect

        def login_required(view: Callable[..., Any]) -> Callable[..., Any]:
            @functools.wraps(view)
            def checked(*args: Any, **kwargs: Any) -> Any:
                self.events.append("login_required")
                return flask.current_app.ensure_sync(view)(*args, **kwargs)

            return checked

        @app.post("/orders")
        @login_required
        @protect(effects=LOCAL, operation="orders")
        def create_order() -> Any:
            return self.ordered()

        @app.post("/optional")
        @protect(effects=LOCAL, operation="optional", require_key=False)
        def optionally() -> Any:
            return self.ordered()

        @app.post("/async")
        @login_required
        @protect(effects=LOCAL, operation="async")
        async def asynchronously(op: Operation) -> Any:
            assert op.attempt == 1
            return self.ordered()

        @app.post("/charges")
        @protect(effects=INLINE, operation="charges")
        def charge(op: SyncOperation) -> Any:
            self.runs.append("inline")
            self.charges.append(op.downstream_key("charge"))
            self.does(flask.request.get_json())
            return {"charges": len(self.charges)}, 201

        @app.post("/payments")
        @protect(effects=PHASED, operation="payments", lease=self.lease)
        def pay(op: SyncOperation) -> Any:
            return self.paid(op)

        @app.post("/parcels")
        @protect(effects=OUTBOX, operation="parcels")
        def send(op: SyncOperation) -> Any:
            self.add(flask.request.get_json()["item"])
            op.defer("charge", {"item": flask.request.get_json()["item"]})
            self.db.session.commit()
            return {"sent": True}, 202

        def valid(view: Callable[..., Any]) -> Callable[..., Any]:
            @functools.wraps(view)
            def checked() -> Any:
                given = flask.request.get_json()
                if not isinstance(given, dict) or not isinstance(given.get("item"), str):
                    return {"error": "which item?"}, 400
                return view()

            return checked

        @app.post("/refunds")
        @valid  # above: what is corrected and sent again with its key has claimed nothing before
        @protect(effects=LOCAL, operation="refunds")
        def refund() -> Any:
            given = flask.request.get_json()
            refund = self.refund(item=given["item"], tenant=flask.g.user.tenant)
            self.db.session.add(refund)
            self.db.session.commit()
            time.sleep(float(flask.request.headers.get("Slow", "0")))
            return {"id": refund.id, "item": refund.item}, 201

        @app.get("/refunds")
        def refunds() -> Any:
            return {"total": self.db.session.query(self.refund).filter_by(tenant=flask.g.user.tenant).count()}

        @app.get("/orders")
        def count() -> Any:
            mine = self.db.session.query(self.order).filter_by(tenant=flask.g.user.tenant)
            return {"total": mine.count()}

        @self.once.topic("charge", repeatable=True)
        def deliver(message: Any) -> Any:
            return {"charged": message.payload["item"]}

    def blueprint(self) -> flask.Blueprint:
        once, shop = self.once, self
        blueprint = flask.Blueprint("stock", "stock", url_prefix="/stock")

        class SoldOutError(Exception):
            """Only the blueprint knows what to say to it."""

        @blueprint.errorhandler(SoldOutError)
        def sold_out(_: SoldOutError) -> Any:
            return {"error": "sold out"}, 410

        class Items(MethodView):
            @once.protect(effects=LOCAL, operation="stock.post")
            def post(self, name: str) -> Any:
                shop.add(name)
                if name == "sold-out":
                    raise SoldOutError
                if name == "file":
                    return flask.send_file(io.BytesIO(b"of a file"), mimetype="text/plain")
                if name == "stream":
                    number = shop.db.session.query(shop.order).count()
                    pieces = flask.stream_with_context(f"{shop.db.session.query(shop.order).count()}" for _ in "ab")
                    return flask.Response(pieces, status=201, headers={"Number": str(number)})
                if name == "broken":
                    return flask.Response((str(1 // 0) for _ in "a"), status=201)
                return "", 204

            @once.protect(effects=LOCAL, operation="stock.put")
            async def put(self, name: str) -> Any:
                shop.add(name)
                shop.db.session.commit()
                return {"put": name}

        blueprint.add_url_rule("/<name>", view_func=Items.as_view("items"))
        return blueprint

    # What handlers do

    def add(self, item: str) -> Any:
        order = self.order(item=item, tenant=flask.g.user.tenant)
        self.db.session.add(order)
        return order

    def ordered(self) -> Any:
        self.events.append("handler")
        self.runs.append("local")
        given = flask.request.get_json()
        if given.get("does") == "begin first":
            with self.db.session.begin():
                self.add(given["item"])
            raise ValueError("it stumbled")
        order = self.add(given["item"])
        if given.get("does") != "forget to commit" and not given.get("pending"):
            self.db.session.commit()
        self.does(given)
        return {"id": order.id, "item": order.item}, given.get("status", 201)

    def paid(self, op: SyncOperation) -> Any:
        self.runs.append("phased")
        given = flask.request.get_json()

        def order(_: Any) -> int:
            order = self.add(given["item"])
            self.db.session.commit()
            return int(order.id)

        def settle(_: Any, number: int, note: str) -> None:
            self.db.session.get(self.order, number).item += note

        number = op.phase("ordered", order)
        if op.attempt == 1:
            self.does(given)
        charge = op.call("charged", self.charged, repeatable=True)
        if given.get("does") == "write outside":
            self.add("outside")
            self.db.session.commit()
        op.phase("settled", settle, number, note=" paid")
        return {"id": number, "charge": charge, "attempt": op.attempt}, 201

    def charged(self, key: str) -> str:
        self.charges.append(key)
        return key

    def does(self, given: dict[str, Any]) -> None:  # noqa: PLR0912
        session = self.db.session
        match given.get("does"):
            case "wait":
                self.entered.release()
                assert self.go_on.wait(PATIENCE)
            case "die" if self.dies:
                os.kill(os.getpid(), signal.SIGKILL)
            case "raise":
                raise ValueError("it stumbled")
            case "exit":
                raise SystemExit("the worker took too long")
            case "abort":
                flask.abort(418)
            case "commit as text":
                session.execute(text("commit"))
            case "commit the connection":
                session.connection().commit()
            case "roll back":
                session.rollback()
            case "swallow":
                session.add(self.order(item=given["item"], tenant="x"))
                try:
                    session.commit()
                except IntegrityError:
                    session.rollback()
            case "swallow in a savepoint":
                try:
                    with session.begin_nested():
                        session.add(self.order(item=given["item"], tenant="x"))
                except IntegrityError:
                    pass
            case "begin":
                with session.begin():
                    session.add(self.order(item=f"{given['item']} too", tenant="x"))
            case "remove":
                session.remove()
            case "go on after remove" | "go on after close":
                session.remove() if given["does"] == "go on after remove" else session.close()
                self.add(given["item"])
                session.commit()
            case "write elsewhere":
                session.add(self.note())
                session.commit()
            case _:
                pass


def served(environ: Any, start_response: Any) -> Any:
    """The application for servers that import it."""
    return _shop().app(environ, start_response)


@functools.cache
def _shop() -> Shop:
    return Shop(os.environ["FLASK_SHOP"], dies=True, lease=1.0)


def main() -> None:
    """Serve in a process of its own, with waitress."""
    import waitress

    url, *more = sys.argv[1:]
    shop = Shop(url, dies="mortal" in more, lease=1.0)
    server = waitress.create_server(shop.app, host="127.0.0.1", port=0, threads=16)
    print(server.effective_port, flush=True)
    server.run()


if __name__ == "__main__":
    main()
elif "FLASK_SHOP" in os.environ:
    if "FLASK_SHOP_SERVES_FIRST" in os.environ:
        with _shop().app.test_client() as client:  # before the fork of gunicorn --preload
            sent = {"Authorization": "Bearer alpha", "Idempotency-Key": "the-key-of-the-parent"}
            assert client.post("/orders", json={"item": "parent"}, headers=sent).status_code == 201
    once, app = _shop().once, _shop().app
