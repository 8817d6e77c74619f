"""`Once(create_engine(...))`: `def` handlers under ASGI and WSGI, and functions, with all effects."""

from __future__ import annotations

import json
import threading
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import flask
import pytest
from fastapi import FastAPI, Request
from sqlalchemy import Engine, create_engine, text
from sqlalchemy.ext.asyncio import create_async_engine
from sqlalchemy.orm import Session

from harness.asgi import call
from oncekey import INLINE, LOCAL, OUTBOX, PHASED, SINGLE_TENANT, Once, Operation, SyncOperation
from oncekey.core.errors import ConfigurationError

ADD = text("INSERT INTO sold (item) VALUES (:item)")


@pytest.fixture(params=["sqlite", "postgresql"])
def engine(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Engine]:
    if request.param == "sqlite":
        url = f"sqlite:///{tmp_path}/shop.db"
    else:
        url = request.getfixturevalue("tables_dsn").replace("postgresql:", "postgresql+psycopg:")
    engine = create_engine(url, pool_size=2, max_overflow=1)
    with engine.begin() as connection:
        connection.execute(text("CREATE TABLE sold (item VARCHAR(50) NOT NULL)"))
    yield engine
    assert engine.pool.checkedout() == 0  # type: ignore[attr-defined]
    engine.dispose()


def sold(engine: Engine) -> list[str]:
    with engine.connect() as connection:
        return [item for (item,) in connection.execute(text("SELECT item FROM sold ORDER BY item"))]


class Shop:
    """Handlers that write as SQLAlchemy's users do."""

    def __init__(self, engine: Engine) -> None:
        self.once = Once(engine, migrate=True)
        self.runs: list[str] = []
        self.once.topic("parcel", repeatable=True)(lambda message: {"sent": message.payload})

    def local(self, op: SyncOperation[Any], item: str) -> dict[str, Any]:
        self.runs.append("local")
        with Session(op.connection) as session:
            session.execute(ADD, {"item": item})
            session.commit()
        if item == "refused":
            raise ValueError(item)
        return {"item": item, "attempt": op.attempt}

    def phased(self, op: SyncOperation[Any], item: str) -> dict[str, Any]:
        self.runs.append("phased")
        op.phase("ordered", lambda connection: connection.execute(ADD, {"item": item}) and None)
        if op.attempt == 1 and item == "stumbles":
            raise ValueError(item)
        key = op.call("charged", lambda key: key, repeatable=True)
        op.phase("paid", lambda connection: connection.execute(ADD, {"item": f"{item} paid"}) and None)
        return {"charge": key, "attempt": op.attempt}

    def outbox(self, op: SyncOperation[Any], item: str) -> dict[str, Any]:
        op.connection.execute(ADD, {"item": item})
        op.defer("parcel", {"item": item})
        return {}

    def inline(self, op: SyncOperation[Any], item: str) -> dict[str, Any]:
        self.runs.append("inline")
        return {"key": op.downstream_key("charge")}

    def fastapi(self) -> FastAPI:
        app = FastAPI(lifespan=self.once.lifespan)
        self.once.install(app, tenant=SINGLE_TENANT)

        def served(path: str, effects: Any, handler: Any) -> None:
            def view(order: dict[str, str], op: SyncOperation) -> Any:
                return handler(op, order["item"])

            app.post(path)(self.once.protect(effects=effects, operation=f"fastapi {path}")(view))

        for path, effects, handler in self.handlers:
            served(path, effects, handler)
        return app

    def flask(self) -> flask.Flask:
        app = flask.Flask("shop")

        def served(path: str, effects: Any, handler: Any) -> None:
            def view(op: SyncOperation) -> Any:
                return handler(op, flask.request.get_json()["item"])

            protected = self.once.protect(effects=effects, operation=f"flask {path}")(view)
            app.add_url_rule(path, path, protected, methods=["POST"])

        for path, effects, handler in self.handlers:
            served(path, effects, handler)
        self.once.flask(app, tenant=SINGLE_TENANT)
        return app

    @property
    def handlers(self) -> list[tuple[str, Any, Any]]:
        return [
            ("/local", LOCAL, self.local),
            ("/phased", PHASED, self.phased),
            ("/outbox", OUTBOX, self.outbox),
            ("/inline", INLINE, self.inline),
        ]


async def test_blocking_engine_serves_all_effects_under_asgi(engine: Engine) -> None:
    shop = Shop(engine)
    app = shop.fastapi()

    async def post(path: str, item: str, key: str) -> Any:
        headers = {"Content-Type": "application/json", "Idempotency-Key": key}
        return await call(app, "POST", path, headers=headers, body=json.dumps({"item": item}).encode())

    async with app.router.lifespan_context(app):
        for path, status in (("/local", 200), ("/phased", 200), ("/outbox", 202), ("/inline", 200)):
            key = uuid.uuid4().hex
            first, again = await post(path, path, key), await post(path, path, key)
            assert (first.status, again.status) == (status, status), path
            assert first.body == again.body or path == "/outbox"
        key = uuid.uuid4().hex
        assert (await post("/local", "refused", key)).status == 500
        key = uuid.uuid4().hex
        assert (await post("/phased", "stumbles", key)).status == 500
        assert (await post("/phased", "stumbles", key)).json()["attempt"] == 2
    assert sold(engine) == ["/local", "/outbox", "/phased", "/phased paid", "stumbles", "stumbles paid"]
    assert shop.runs == ["local", "phased", "inline", "local", "phased", "phased"]


def test_blocking_engine_serves_all_effects_under_flask(engine: Engine) -> None:
    shop = Shop(engine)
    app = shop.flask()
    for path, status in (("/local", 200), ("/phased", 200), ("/outbox", 202), ("/inline", 200)):
        headers = {"Idempotency-Key": uuid.uuid4().hex}
        first, again = [app.test_client().post(path, json={"item": path}, headers=headers) for _ in "ab"]
        assert (first.status_code, again.status_code) == (status, status)
        assert first.data == again.data or path == "/outbox"
    refused = app.test_client().post("/local", json={"item": "refused"}, headers={"Idempotency-Key": uuid.uuid4().hex})
    assert refused.status_code == 500
    assert sold(engine) == ["/local", "/outbox", "/phased", "/phased paid"]


def test_concurrent_threads_with_one_key_run_the_handler_once(engine: Engine) -> None:
    # P1, on a pool of three
    shop = Shop(engine)
    app, key, statuses = shop.flask(), uuid.uuid4().hex, []

    def ask() -> None:
        said = app.test_client().post("/local", json={"item": "tea"}, headers={"Idempotency-Key": key})
        statuses.append(said.status_code)

    threads = [threading.Thread(target=ask) for _ in range(12)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert set(statuses) <= {200, 409}
    assert (sold(engine), shop.runs) == (["tea"], ["local"])


def test_protected_functions_replay_on_a_blocking_engine(engine: Engine) -> None:
    shop = Shop(engine)

    @shop.once.function(effects=LOCAL, key="number", operation="order")
    def order(number: str, item: str, op: SyncOperation) -> Any:
        return shop.local(op, item)

    @shop.once.function(effects=PHASED, key="number", operation="pay", complete=False)
    def pay(number: str, item: str, op: SyncOperation) -> Any:
        return shop.phased(op, item)

    number = uuid.uuid4().hex
    assert order(number, "tea") == order(number, "tea") == {"item": "tea", "attempt": 1}
    assert pay(number, "milk") == pay(number, "milk")
    assert (sold(engine), shop.runs) == (["milk", "milk paid", "tea"], ["local", "phased"])


async def test_async_handlers_on_a_blocking_engine_are_rejected(tmp_path: Path) -> None:
    once = Once(create_engine(f"sqlite:///{tmp_path}/shop.db"), migrate=True)
    app = FastAPI(lifespan=once.lifespan)
    once.install(app, tenant=SINGLE_TENANT)

    @app.post("/orders")
    @once.protect(effects=LOCAL)
    async def order(request: Request, op: Operation) -> None: ...

    with pytest.raises(ConfigurationError, match="plain `def`"):
        async with app.router.lifespan_context(app):
            pass


def test_flask_rejects_an_async_engine() -> None:
    once = Once(create_async_engine("sqlite+aiosqlite://"))
    with pytest.raises(ConfigurationError, match=r"once\.flask needs blocking connections"):
        once.flask(flask.Flask("shop"), tenant=SINGLE_TENANT)
