"""Every effect on an engine of SQLAlchemy for MariaDB and MySQL, over a real socket, with workers beside it."""

from __future__ import annotations

import gc
import http.client
import json
import warnings
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from fastapi import FastAPI
from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine

from frameworks.realshop import MariadbDatabase
from frameworks.shop import new_key
from harness.patience import wait_until
from harness.served import Served
from oncekey import INLINE, LOCAL, OUTBOX, PHASED, SINGLE_TENANT, Once, Operation
from oncekey.core.policy import Policy
from oncekey.core.topics import Message

ADD = text("INSERT INTO orders VALUES (:item)")


class Shop:
    """A route for each effect. A call of PHASED fails once, after the provider did its part."""

    def __init__(self, url: str) -> None:
        self.database = MariadbDatabase(url, "aiomysql")
        self.engine = create_async_engine(url.replace("://", "+aiomysql://", 1), pool_size=5)
        self.once = Once(self.engine, migrate=True, workers=True, policy=Policy(lease=5, deadline=600))
        self.runs: list[str] = []
        self.charges: list[str] = []
        self.shipped: list[Message] = []
        self.app = FastAPI(lifespan=self.lifespan)
        self.once.install(self.app, tenant=SINGLE_TENANT)
        self.once.topic("ship")(self.ship)
        self.once.topic("tell")(self.shipped.append)
        for effects, handler in ((LOCAL, self.local), (OUTBOX, self.outbox), (INLINE, self.inline)):
            self.app.post(f"/{effects.value}", status_code=201)(self.once.protect(effects=effects)(handler))
        phased = self.once.protect(effects=PHASED, send_window=1, call_timeout=1, complete=False)(self.phased)
        self.app.post("/phased", status_code=201)(phased)

    @asynccontextmanager
    async def lifespan(self, app: FastAPI) -> AsyncIterator[None]:
        async with self.once.lifespan(app):
            yield
        assert self.engine.pool.checkedout() == 0  # type: ignore[attr-defined]
        await self.engine.dispose()

    def ship(self, message: Message) -> dict[str, Any]:
        self.shipped.append(message)
        return {"shipped": message.payload["item"]}

    async def local(self, op: Operation[Any], item: str) -> dict[str, str]:
        self.runs.append(item)
        async with AsyncSession(op.connection) as session:
            await session.execute(ADD, {"item": item})
            await session.commit()
        op.emit("tell", {"item": item})
        return {"ordered": item}

    async def outbox(self, op: Operation[Any], item: str) -> None:
        self.runs.append(item)
        await op.connection.execute(ADD, {"item": item})
        op.defer("ship", {"item": item})

    async def phased(self, op: Operation[Any], item: str) -> dict[str, Any]:
        self.runs.append(item)

        async def ordered(connection: Any) -> None:
            await connection.execute(ADD, {"item": item})

        async def charge(*, key: str) -> str:
            if key not in self.charges:
                self.charges.append(key)
                raise ConnectionResetError
            return key

        await op.phase("ordered", ordered)
        return {"charge": await op.call("charge", charge, repeatable=True)}

    async def inline(self, op: Operation[Any], item: str) -> dict[str, str]:
        self.runs.append(item)
        return {"sent": op.downstream_key("charge")}


@pytest.fixture
def served(either_url: str) -> Iterator[tuple[Shop, int]]:
    shop = Shop(either_url)
    with Served(shop.app) as server:
        yield shop, server.port
    with warnings.catch_warnings(action="ignore", category=ResourceWarning):
        gc.collect()  # aiomysql leaves a connection open which it could not say goodbye to


def post(port: int, path: str, key: str) -> tuple[int, Any, bool]:
    """The status, the content, and whether it is an answer from the store."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    connection.request("POST", path, headers={"Idempotency-Key": key})
    answer = connection.getresponse()
    body = answer.read()
    connection.close()
    return answer.status, json.loads(body) if body else None, answer.headers["Idempotent-Replayed"] is not None


def test_all_four_effects_execute_once(served: tuple[Shop, int]) -> None:
    # R87, R115, R116
    shop, port = served
    keys = {path: new_key() for path in ("local", "outbox", "phased", "inline")}

    assert post(port, "/local?item=tea", keys["local"]) == (201, {"ordered": "tea"}, False)
    assert post(port, "/local?item=tea", keys["local"]) == (201, {"ordered": "tea"}, True)

    assert post(port, "/outbox?item=milk", keys["outbox"])[0] == 202
    wait_until(lambda: post(port, "/outbox?item=milk", keys["outbox"]) == (200, {"shipped": "milk"}, True))

    # The provider charged, and its reply was lost: the client comes again, and the phase is not repeated.
    assert post(port, "/phased?item=cake", keys["phased"])[0] == 500
    status, first, _ = post(port, "/phased?item=cake", keys["phased"])
    assert (status, first) == (201, {"charge": shop.charges[0]})
    assert post(port, "/phased?item=cake", keys["phased"]) == (201, first, True)

    status, sent, _ = post(port, "/inline?item=mail", keys["inline"])
    assert (status, post(port, "/inline?item=mail", keys["inline"])) == (201, (201, sent, True))

    wait_until(lambda: len(shop.shipped) == 2)  # what LOCAL emitted, and what OUTBOX deferred
    assert shop.runs == ["tea", "milk", "cake", "cake", "mail"]
    assert sorted(shop.database.execute("SELECT item FROM orders")) == [("cake",), ("milk",), ("tea",)]
    assert len(shop.charges) == 1
    assert shop.database.execute("SELECT state FROM oncekey_record") == [("completed",)] * 4
