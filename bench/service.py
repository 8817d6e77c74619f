"""The server under load, in a process of its own: the demo, or the same shop without oncekey.

`python -m bench.service (protected | unprotected) STORE [CPU]` says its port on its first line.
"""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from http import HTTPStatus

import uvicorn
from fastapi import FastAPI, Response

from oncekey import wire
from oncekey.core.policy import Policy
from oncekey.demo.app import create_app
from oncekey.demo.delay import Delay
from oncekey.demo.limits import BodyLimit
from oncekey.demo.listening import listen
from oncekey.demo.models import Order, OrderIn, place
from oncekey.demo.orders import Orders
from oncekey.demo.problems import add_problems
from oncekey.demo.tables import Tables
from oncekey.demo.tenants import Tenant
from oncekey.engine.shell import AsyncEngine
from oncekey.flow import Mode, Rows, Statement, Steps, Transaction

COUNT = Statement("bench.count", "SELECT count(*) AS orders FROM demo_order")


def protected(store: str) -> FastAPI:
    """The demo as it is, without the workers: what they do meanwhile is no part of a request."""
    app = create_app(store, Policy(), workers=False)
    add_count(app, store)
    return app


def unprotected(store: str) -> FastAPI:
    """The same route, models, checks, driver and transaction, and nobody who remembers the key."""
    engines: list[AsyncEngine] = []
    tables = Tables(lambda: engines[0])
    orders = Orders(tables)

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        engines.append(wire.aconnect(store))
        await tables.create()
        yield
        await engines.pop().close()

    app = FastAPI(lifespan=lifespan, docs_url=None, redoc_url=None)
    add_problems(app)
    app.add_middleware(BodyLimit, limit=Policy().max_request_bytes)

    @app.post("/orders", status_code=HTTPStatus.CREATED)
    async def create_order(wanted: OrderIn, tenant: Tenant, delay: Delay, response: Response) -> Order:
        tx = await engines[0].open()
        try:
            await asyncio.sleep(delay)
            order = place(wanted)
            await orders.insert(tx.connection, tenant, order)
            await tx.commit()
        except BaseException:
            await tx.rollback()
            raise
        response.headers["Location"] = f"/orders/{order.id}"
        return order

    add_count(app, store)
    return app


def add_count(app: FastAPI, store: str) -> None:
    """How many orders there are, so that the figures can be checked against the rows."""

    @app.get("/bench/count")
    async def count() -> int:
        def body() -> Steps[Rows]:
            return (yield COUNT)

        engine = wire.aconnect(store)
        try:
            rows = await engine.driver.run(Transaction("bench.count", Mode.READ, body))
        finally:
            await engine.close()
        return int(rows[0]["orders"])


def main(variant: str, store: str, cpu: str = "") -> None:
    """Serve until terminated."""
    if cpu:
        os.sched_setaffinity(0, {int(cpu)})
    app = {"protected": protected, "unprotected": unprotected}[variant](store)
    with listen("127.0.0.1", 0) as listener:
        print(listener.getsockname()[1], flush=True)
        uvicorn.Server(uvicorn.Config(app, log_level="warning", access_log=False)).run(sockets=[listener])


if __name__ == "__main__":
    main(*sys.argv[1:])
