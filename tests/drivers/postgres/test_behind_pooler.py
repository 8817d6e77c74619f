"""Everything else behind a real PgBouncer in transaction mode: OUTBOX and its workers, SQLAlchemy, operators' tools."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from fastapi import FastAPI
from sqlalchemy import text
from sqlalchemy.ext.asyncio import create_async_engine

from cli.operating import oncekey
from console.visiting import Visitor, console_on
from drivers.postgres.drivers import ASYNC_PSYCOPG, ASYNCPG, opened, saying
from frameworks.realshop import PostgresDatabase
from frameworks.shop import new_key, tenant_of
from harness.asgi import Caller, Reply
from harness.dsn import through
from harness.pages import ROOT
from harness.pgbouncer import PREPARES, PgBouncer
from harness.proxy import Proxy
from local.databases import locks_held
from oncekey import INLINE, LOCAL, OUTBOX, PHASED, Message, Once, Operation
from oncekey import Reply as Told
from oncekey.core.errors import StoreUnavailableError
from oncekey.core.flow import Mode
from oncekey.databases.postgres import diagnostics
from oncekey.databases.postgres.address import Pooling
from oncekey.engine.operation import SyncOperation
from sessions.ways import WAYS

PATHS = {"/orders": LOCAL, "/charges": INLINE, "/payments": PHASED, "/transfers": OUTBOX}
INSERTS = {"asyncpg": "INSERT INTO orders VALUES ($1)", "psycopg": "INSERT INTO orders VALUES (%s)"}


@pytest.fixture(scope="module")
def pooler(postgres_server: Any) -> Iterator[PgBouncer]:
    """One pooler for every database of the server, with few connections to each."""
    with PgBouncer(postgres_server.dsn(), size=3) as pooler:
        yield pooler


class FourEffects:
    """An application with a route for each kind of effect, and the workers in its own process."""

    def __init__(self, way: str, dsn: str, url: str) -> None:
        self.way, self.package = way, "psycopg" if way == "def" else way.removeprefix("sa-")
        self.runs: list[str] = []
        self.sent: list[str] = []
        self.database = PostgresDatabase(dsn, self.package)
        self.engine: Any = None
        self.once = Once(self._store(url), migrate=True, workers=True)
        self.app = FastAPI(lifespan=self.once.lifespan)
        self.once.install(self.app, tenant=tenant_of)
        for path, effects in PATHS.items():
            handler = self._blocking(effects) if way == "def" else self._async(effects)
            status = 202 if effects is OUTBOX else 201
            self.app.post(path, status_code=status)(self.once.protect(effects=effects, operation=path)(handler))
        self.once.topic("send", repeatable=True)(self._send)

    def _store(self, url: str) -> Any:
        address = url.replace("postgresql://", f"postgresql+{self.package}://")
        if not self.way.startswith("sa-"):
            return f"{address}&pool_size=8"
        # As docs/howto/postgresql.md says: an engine has settings of its own for a pooler.
        place = address.partition("?")[0]
        unprepared: dict[str, Any] = {"prepare_threshold": None}
        if self.package == "asyncpg":
            place = f"{place}?prepared_statement_cache_size=0"
            unprepared = {"statement_cache_size": 0, "prepared_statement_name_func": str}
        self.engine = create_async_engine(place, pool_size=8, max_overflow=0, connect_args=unprepared)
        return self.engine

    async def _insert(self, connection: Any, item: str) -> str:
        match self.way:
            case "asyncpg":
                await connection.execute(INSERTS["asyncpg"], item)
            case "psycopg":
                await connection.execute(INSERTS["psycopg"], (item,))
            case _:
                await connection.execute(text("INSERT INTO orders VALUES (:item)"), {"item": item})
        return item

    async def _send(self, message: Message) -> Told:
        self.sent.append(message.payload["item"])
        return Told(201, {"sent": message.payload["item"]})

    def _async(self, effects: Any) -> Any:
        async def handle(op: Operation, item: str) -> Any:
            self.runs.append(item)
            match effects:
                case _ if effects is LOCAL:
                    await self._insert(op.connection, item)
                case _ if effects is PHASED:
                    await op.phase("order", lambda connection: self._insert(connection, item))
                case _ if effects is OUTBOX:
                    await self._insert(op.connection, item)
                    op.defer("send", {"item": item})
                    return None
            return {"run": len(self.runs)}

        return handle

    def _blocking(self, effects: Any) -> Any:
        def handle(op: SyncOperation, item: str) -> Any:
            self.runs.append(item)
            if effects is PHASED:
                op.phase("order", lambda connection: self.database.insert_blocking(connection, item))
            elif effects is not INLINE:
                self.database.insert_blocking(op.connection, item)
            if effects is OUTBOX:
                op.defer("send", {"item": item})
                return None
            return {"run": len(self.runs)}

        return handle

    @asynccontextmanager
    async def open(self) -> AsyncIterator[FourEffects]:
        try:
            async with self.once.lifespan(self.app):
                yield self
        finally:
            if self.engine is not None:
                await self.engine.dispose()

    async def send(self, path: str, key: str) -> Reply:
        return await Caller(self.app, "POST", f"{path}?item={key}", headers=[("Idempotency-Key", key)]).run()

    async def finished(self, path: str, key: str) -> Reply:
        """The answer, when the worker has it."""
        reply = await self.send(path, key)
        while reply.status in {202, 409}:
            await asyncio.sleep(0.01)
            reply = await self.send(path, key)
        return reply


@pytest.mark.parametrize("way", WAYS)
async def test_all_four_effects_with_their_workers(way: str, tables_dsn: str, pooler: PgBouncer) -> None:
    async with FourEffects(way, tables_dsn, pooler.dsn(tables_dsn)).open() as shop:
        wanted = [(path, new_key()) for path in PATHS for _ in range(6)]
        first = await asyncio.gather(*(shop.send(path, key) for path, key in wanted))
        assert {reply.status for reply in first} == {201, 202}
        replies = await asyncio.gather(*(shop.finished(path, key) for path, key in wanted))
        assert [(reply.status, reply.replayed) for reply in replies] == [(201, True)] * len(wanted)
        assert sorted(shop.runs) == sorted(key for _, key in wanted)
        assert sorted(shop.sent) == sorted(key for path, key in wanted if path == "/transfers")
        stored = sorted(item for (item,) in shop.database.execute("SELECT item FROM orders"))
        assert stored == sorted(key for path, key in wanted if path != "/charges")
    assert locks_held(tables_dsn) == 0


@pytest.mark.parametrize("way", ["asyncpg", "psycopg", "def"])
async def test_prepared_statements_work_behind_a_supporting_pooler(
    way: str, tables_dsn: str, pooler: PgBouncer
) -> None:
    url = pooler.dsn(tables_dsn).replace("pgbouncer=1", "pgbouncer=prepared")
    if pooler.version < PREPARES:
        kind = ASYNCPG if way == "asyncpg" else ASYNC_PSYCOPG
        async with opened(kind, url, pool_size=4) as driver:
            asked = (driver.run(saying(Mode.READ, "SELECT 1")) for _ in range(100))
            told = await asyncio.gather(*asked, return_exceptions=True)  # all of them: none is left behind at the end
        refusals = [one for one in told if isinstance(one, BaseException)]
        assert refusals
        assert all(isinstance(one, StoreUnavailableError) and "?pgbouncer=1" in str(one) for one in refusals)
        return
    async with FourEffects(way, tables_dsn, url).open() as shop:
        for _ in range(3):
            wanted = [(path, new_key()) for path in PATHS for _ in range(6)]
            await asyncio.gather(*(shop.send(path, key) for path, key in wanted))
            replies = await asyncio.gather(*(shop.finished(path, key) for path, key in wanted))
            assert [(reply.status, reply.replayed) for reply in replies] == [(201, True)] * len(wanted)


@pytest.mark.parametrize("package", ["asyncpg", "psycopg"])
async def test_commands_and_console_run_behind_pgbouncer(package: str, tables_dsn: str, pooler: PgBouncer) -> None:
    def type_them() -> list[dict[str, Any]]:
        for words in (["migrate", "up"], ["migrate", "status"], ["reap", "--once"], ["sweep", "--once"], ["stats"]):
            told = oncekey(*words, "--store", url)
            assert told.exit_code == 0, told.output
        return pooler_findings(url)

    url = pooler.dsn(tables_dsn).replace("postgresql:", f"postgresql+{package}:")
    assert [one["level"] for one in await asyncio.to_thread(type_them)] == ["ok"]
    async with Visitor(console_on(url)) as visitor:
        await visitor.log_in()
        pages = [(await visitor.get(page)).status_code for page in ("", "records", "unknown", "letters", "audit")]
        assert pages == [200] * 5


def pooler_findings(url: str) -> list[dict[str, Any]]:
    items = json.loads(oncekey("doctor", "--store", url, "--json").stdout)["items"]
    return [one for one in items if one["about"] == "pooler"]


@pytest.mark.parametrize("kind", [ASYNCPG, ASYNC_PSYCOPG])
async def test_pooler_is_detected_whatever_the_url_declares(kind: str, tables_dsn: str, postgres_server: Any) -> None:
    with PgBouncer(tables_dsn, size=1) as pooler:
        for url, told in ((pooler.dsn(tables_dsn), True), (through(tables_dsn, pooler.port), None)):
            async with opened(kind, url) as driver:
                assert await driver.pooling() == Pooling(stands=True, per_transaction=True, declared=told)
    with Proxy.before(tables_dsn) as relay:  # which is none
        async with opened(kind, through(tables_dsn, relay.port)) as driver:
            assert await driver.pooling() == Pooling(stands=False, per_transaction=False, declared=None)


@pytest.mark.parametrize(
    ("stands", "per_transaction", "told", "level"),
    [
        (False, False, None, "ok"),
        (False, False, True, "note"),
        (True, True, True, "ok"),
        (True, False, True, "ok"),
        (True, True, None, "warning"),
        (True, True, False, "warning"),
        (True, False, None, "note"),
    ],
)
def test_doctor_rates_the_pooler_configuration(
    *, stands: bool, per_transaction: bool, told: bool | None, level: str
) -> None:
    assert diagnostics.pooler(stands=stands, per_transaction=per_transaction, declared=told).level == level


def test_the_pooler_of_the_tests_has_the_settings_of_the_page() -> None:
    page = (ROOT / "docs/howto/postgresql.md").read_text(encoding="utf-8")
    wanted = page.partition("```ini\n[pgbouncer]\n")[2].partition("```")[0].split("\n")
    assert set(filter(None, wanted)) <= set(
        PgBouncer("postgresql://postgres@127.0.0.1:5432/shop").settings().split("\n")
    )
