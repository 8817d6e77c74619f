"""Two applications on one store: a worker does the work of its own namespace only, also if all names are equal."""

from __future__ import annotations

from contextlib import AsyncExitStack
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from fastapi import FastAPI
from sqlalchemy.ext.asyncio import create_async_engine

from harness.asgi import Caller
from oncekey import OUTBOX, PHASED, SINGLE_TENANT, Message, Once, Operation, Policy
from oncekey.core.resolution import Executed
from oncekey.core.resolvers import Question
from oncekey.workers.service import Done, Service
from oncekey.workers.tasks import tasks_for

STORES = ("sqlite", "asyncpg", "psycopg", "aiomysql", "mysql", "sqlalchemy")


@pytest.fixture(params=STORES)
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """A store with its tables."""

    def named(fixture: str, scheme: str) -> str:
        return scheme + str(request.getfixturevalue(fixture)).partition("://")[2]

    match request.param:
        case "sqlite":
            return f"sqlite:///{tmp_path}/shared.db"
        case "aiomysql":
            return named("mariadb_url", "mariadb+aiomysql://")
        case "mysql":
            return named("mysql_url", "mysql+aiomysql://")
        case "sqlalchemy":
            return f"sqlite+aiosqlite:///{tmp_path}/shared.db"
        case package:
            return named("postgres_dsn", f"postgresql+{package}://")


class Application:
    """One of the two: it writes down what its code did."""

    def __init__(self, store: Any, namespace: str) -> None:
        self.did: list[str] = []
        self.fails = True
        policy = Policy(namespace=namespace, complete_interval=timedelta(microseconds=1))  # a worker need not wait
        self.once = once = Once(store, policy=policy, migrate=True, survey=False)
        self.app = FastAPI()
        once.install(self.app, tenant=SINGLE_TENANT)

        @self.app.post("/payments")
        @once.protect(effects=PHASED, operation="pay")
        async def pay(op: Operation[Any]) -> str:
            charged: str = await op.call("charged", self.charge, repeatable=True)
            return charged

        @self.app.post("/refunds")
        @once.protect(effects=PHASED, operation="refund")
        async def refund(op: Operation[Any]) -> str:
            refunded: str = await op.call("refunded", self.charge, repeatable=False)
            return refunded

        @self.app.post("/mails")
        @once.protect(effects=OUTBOX, operation="mail")
        async def mail(op: Operation[Any]) -> None:
            op.emit("receipt", {"of": namespace})
            op.defer("mail", {"of": namespace})

        @once.topic("receipt")
        async def receipt(message: Message) -> None:
            self.did.append(f"receipt of {message.payload['of']}")

        @once.topic("mail")
        async def send(message: Message) -> dict[str, str]:
            self.did.append(f"mail of {message.payload['of']}")
            return {}

        @once.resolver("refund", call="refunded")
        async def resolve(question: Question) -> Executed:
            self.did.append("resolved")
            return Executed("found")

    async def charge(self, *, key: str) -> str:
        if self.fails:
            raise ConnectionResetError
        self.did.append("charged")
        return "charged"

    async def send(self, path: str) -> int:
        key = f"the-same-key-of-both{path.replace('/', '-')}"
        return (await Caller(self.app, "POST", path, headers=[("Idempotency-Key", key)]).run()).status

    async def work(self) -> Done:
        self.fails = False
        return await Service(tasks_for(self.once)).once()


@pytest.mark.parametrize("names", [("", "billing"), ("shop", "billing")])
async def test_workers_leave_other_namespaces_alone(url: str, names: tuple[str, str]) -> None:
    # R23, R27
    async with AsyncExitStack() as stack:
        shop, billing = (Application(create_async_engine(url) if "aiosqlite" in url else url, name) for name in names)
        for one in (shop, billing):
            await stack.enter_async_context(one.app.router.lifespan_context(one.app))
        statuses = [await shop.send(path) for path in ("/payments", "/refunds", "/mails")]
        assert statuses == [500, 409, 202]

        assert await billing.work() == Done(0, 0)
        assert billing.did == []
        done = await shop.work()
        assert (done.failed, sorted(shop.did)) == (
            0,
            ["charged", f"mail of {names[0]}", f"receipt of {names[0]}", "resolved"],
        )
        assert [await shop.send(path) for path in ("/payments", "/refunds", "/mails")] == [200, 200, 200]
        assert await billing.send("/mails") == 202  # its own request, with the same key
