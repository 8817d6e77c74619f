"""Behind a real PgBouncer in transaction mode, with the settings of docs/howto/postgresql.md.

It has few server connections, so a session is somebody else's as soon as a transaction is over: whatever is left in it,
prepared in it or locked by it would be missed by its owner and met by another client.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import pytest

from drivers.postgres.drivers import ASYNC_PSYCOPG, ASYNCPG, PSYCOPG, ask, opened, saying
from drivers.postgres.test_folding import entered, insert, order, performed, sealed
from frameworks.realshop import PostgresDatabase, RealShop
from frameworks.shop import new_key
from harness.asgi import cancelled_at, until
from harness.dsn import address, through
from harness.pgbouncer import MISSING, VARIABLE, PgBouncer, PgBouncerMissingError
from harness.proxy import Proxy
from local.databases import locks_held
from oncekey.core.errors import CommitAmbiguousError, StoreUnavailableError
from oncekey.core.flow import Mode
from oncekey.core.model import INLINE, LOCAL, PHASED
from oncekey.engine.operation import Operation, SyncOperation
from oncekey.testing.claims import a_claim

WAYS = ("asyncpg", "psycopg", "def")
SIZE = 3
"""Server connections, for the ten and more that a process has."""

IN_PROGRESS = "idempotency_key_in_progress"
ENDING = {"asyncpg": b"oncekey.seal", "psycopg": b"oncekey.seal", "def": b";COMMIT;"}
"""What the message of a commit has; a `def` handler's is no folded one."""


class PooledShop(RealShop):
    """A shop with a route for each kind of effect; each run of a handler gives another answer."""

    def __init__(self, way: str, dsn: str, url: str, *, pool_size: int = 12) -> None:
        database = PostgresDatabase(dsn, "psycopg" if way == "def" else way)
        database.url = f"{url.replace('postgresql://', f'postgresql+{database.package}://')}&pool_size={pool_size}"
        super().__init__(database)
        self.charges: Counter[str] = Counter()
        self.fails: list[str] = []
        handlers = self._blocking() if way == "def" else self._async()
        for path, effects, handler in zip(("/orders", "/charges", "/payments"), _EFFECTS, handlers, strict=True):
            self.app.post(path, status_code=201)(self.once.protect(effects=effects)(handler))

    def charge(self, key: str) -> str:
        """What happens outside; it may fail after it happened."""
        self.charges[key] += 1
        if self.fails:
            raise ConnectionError(self.fails.pop())
        return key

    def _async(self) -> tuple[Callable[..., Any], ...]:
        async def create(op: Operation, item: str) -> dict[str, Any]:
            self.runs.append(item)
            await self.database.insert(op.connection, item)
            return {"run": len(self.runs)}

        async def charge(op: Operation, item: str) -> dict[str, Any]:
            self.runs.append(item)
            return {"run": len(self.runs), "charge": self.charge(op.downstream_key("charge"))}

        async def pay(op: Operation, item: str) -> dict[str, Any]:
            self.runs.append(item)

            async def made(connection: Any) -> str:
                await self.database.insert(connection, item)
                return item

            async def charged(key: str) -> str:
                return self.charge(key)

            async def paid(connection: Any) -> str:
                await self.database.insert(connection, f"{item} paid")
                return "paid"

            ordered = await op.phase("order", made)
            return {
                "order": ordered,
                "by": await op.call("charge", charged, repeatable=True),
                "is": await op.phase("paid", paid),
            }

        return create, charge, pay

    def _blocking(self) -> tuple[Callable[..., Any], ...]:
        def create(op: SyncOperation, item: str) -> dict[str, Any]:
            self.runs.append(item)
            self.database.insert_blocking(op.connection, item)
            return {"run": len(self.runs)}

        def charge(op: SyncOperation, item: str) -> dict[str, Any]:
            self.runs.append(item)
            return {"run": len(self.runs), "charge": self.charge(op.downstream_key("charge"))}

        def pay(op: SyncOperation, item: str) -> dict[str, Any]:
            self.runs.append(item)
            ordered = op.phase("order", self.database.insert_blocking, item)
            charged = op.call("charge", self.charge, repeatable=True)
            op.phase("paid", self.database.insert_blocking, f"{item} paid")
            return {"order": ordered, "by": charged, "is": "paid"}

        return create, charge, pay


_EFFECTS = (LOCAL, INLINE, PHASED)


@pytest.fixture(params=WAYS)
def way(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def pooler(postgres_dsn: str) -> Iterator[PgBouncer]:
    with PgBouncer(postgres_dsn, size=SIZE) as pooler:
        yield pooler


@contextlib.asynccontextmanager
async def serving(way: str, dsn: str, url: str, **options: Any) -> AsyncIterator[PooledShop]:
    shop = PooledShop(way, dsn, url, **options)
    async with shop.open():
        yield shop


@pytest.mark.parametrize("path", ["/orders", "/charges", "/payments"])
async def test_concurrent_requests_and_retries_behind_pgbouncer(
    way: str, path: str, postgres_dsn: str, pooler: PgBouncer
) -> None:
    async with serving(way, postgres_dsn, pooler.dsn(postgres_dsn)) as shop:
        keys = [new_key() for _ in range(24)]

        async def all_of_them() -> list[Any]:
            return await asyncio.gather(*(shop.send(f"{path}?item={key}", key=key) for key in keys))

        first, again = await all_of_them(), await all_of_them()
        assert [reply.status for reply in (*first, *again)] == [201] * 48
        assert [reply.body for reply in first] == [reply.body for reply in again]
        assert (any(reply.replayed for reply in first), all(reply.replayed for reply in again)) == (False, True)
        assert sorted(shop.runs) == sorted(keys)
        assert set(shop.charges.values()) <= {1}
        if path == "/orders":
            assert shop.rows == sorted(keys)
        await until(lambda: locks_held(postgres_dsn) == 0)


@pytest.mark.parametrize("path", ["/orders", "/charges", "/payments"])
async def test_a_race_for_one_key(way: str, path: str, postgres_dsn: str, pooler: PgBouncer) -> None:
    async with serving(way, postgres_dsn, pooler.dsn(postgres_dsn)) as shop:
        for _ in range(5):
            key = new_key()
            replies = await asyncio.gather(*(shop.send(f"{path}?item={key}", key=key) for _ in range(10)))
            told = {reply.body for reply in replies if reply.status == 201}
            assert len(told) == 1
            assert {reply.code for reply in replies if reply.status != 201} <= {IN_PROGRESS}
            assert shop.runs.count(key) == 1
            assert (await shop.send(f"{path}?item={key}", key=key)).body in told
        await until(lambda: locks_held(postgres_dsn) == 0)


async def test_failed_payment_is_resumed_behind_pgbouncer(way: str, postgres_dsn: str, pooler: PgBouncer) -> None:
    async with serving(way, postgres_dsn, pooler.dsn(postgres_dsn)) as shop:
        shop.fails.append("the charge was made, and its reply was lost")
        key = new_key()
        assert (await shop.send("/payments?item=tea", key=key)).status >= 500
        assert shop.rows == ["tea"]
        assert (await shop.send("/payments?item=tea", key=key)).status == 201
        assert (shop.rows, shop.runs) == (["tea", "tea paid"], ["tea", "tea"])
        assert len(shop.charges) == 1  # under one key, so the provider knows that it is one


@pytest.mark.parametrize("path", ["/orders", "/payments"])
async def test_request_cancelled_at_each_await_behind_pgbouncer(
    way: str, path: str, postgres_dsn: str, pooler: PgBouncer
) -> None:
    async with serving(way, postgres_dsn, pooler.dsn(postgres_dsn)) as shop:
        number, ended = 0, None
        while ended is None:
            number += 1
            key = new_key()
            ended = await cancelled_at(number, shop.caller(f"{path}?item={key}", key=key).run())
            # A session that PgBouncer took from a client who is gone may need a moment to end.
            for _ in range(1000):
                again = await shop.send(f"{path}?item={key}", key=key)
                if again.code != IN_PROGRESS:
                    break
                await asyncio.sleep(0.01)
            assert again.status == 201, again
            assert shop.rows.count(key) == 1
            assert (await shop.send(f"{path}?item={key}", key=key)).body == again.body
        await until(lambda: locks_held(postgres_dsn) == 0)
    assert number > 1


@pytest.mark.parametrize("between", ["us and PgBouncer", "PgBouncer and PostgreSQL"])
@pytest.mark.parametrize("lost", ["the request", "the reply"])
async def test_lost_commit_is_recovered_behind_pgbouncer(way: str, between: str, lost: str, postgres_dsn: str) -> None:
    # P7: what PgBouncer says of a server that it lost is no roll-back
    with contextlib.ExitStack() as stack:
        if between == "us and PgBouncer":
            pooler = stack.enter_context(PgBouncer(postgres_dsn, size=SIZE))
            proxy = stack.enter_context(Proxy("127.0.0.1", pooler.port))
            url = f"{through(postgres_dsn, proxy.port)}?pgbouncer=1"
        else:
            proxy = stack.enter_context(Proxy.before(postgres_dsn))
            url = stack.enter_context(PgBouncer(through(postgres_dsn, proxy.port), size=SIZE)).dsn(postgres_dsn)
        async with serving(way, postgres_dsn, url) as shop:
            assert (await shop.send("/orders?item=warm", key=new_key())).status == 201
            for number in range(5):
                key = new_key()
                happened = (
                    proxy.lose_request(ENDING[way])
                    if lost == "the request"
                    else proxy.lose_reply(ENDING[way], b"COMMIT")
                )
                first = await shop.send(f"/orders?item={number}", key=key)
                assert happened.is_set()
                if lost == "the reply":
                    assert (first.status, shop.rows.count(str(number))) == (201, 1), first
                else:
                    assert (first.code, shop.rows.count(str(number))) == ("idempotency_store_unavailable", 0), first
                again = await shop.send(f"/orders?item={number}", key=key)
                assert (again.status, again.replayed) == (201, lost == "the reply")
                assert first.status != 201 or first.body == again.body
                assert shop.rows.count(str(number)) == 1
        await until(lambda: locks_held(postgres_dsn) == 0)


@pytest.mark.parametrize("kind", [ASYNCPG, ASYNC_PSYCOPG, PSYCOPG])
class TestSessions:
    async def test_session_state_does_not_reach_the_next_client(
        self, kind: str, dsn: str, postgres_server: Any
    ) -> None:
        # server_reset_query_always is what docs/howto/postgresql.md asks for
        with PgBouncer(dsn, size=1) as pooler:
            async with opened(kind, pooler.dsn(dsn), pool_size=2) as driver:
                claim = a_claim()
                tx, look = await entered(driver, claim)
                await ask(tx, "SELECT set_config('app.tenant', 'acme', false), pg_advisory_lock(4712)")
                assert await sealed(tx, look, claim)
                tx = await driver.begin()
                assert await ask(tx, "SELECT COALESCE(current_setting('app.tenant', true), '')") == [("",)]
                held = "SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND objid = 4712"
                assert await ask(tx, held) == [(0,)]
                await tx.rollback()

    async def test_stopped_pooler_raises_store_unavailable(self, kind: str, dsn: str, raw: Any) -> None:
        with PgBouncer(dsn, size=2) as pooler:
            async with opened(kind, pooler.dsn(dsn), pool_size=2) as driver:
                assert await performed(driver, a_claim(), order())
                claim, item = a_claim(), order()
                tx, look = await entered(driver, claim)
                await ask(tx, insert(item))
                pooler.__exit__()
                with pytest.raises((CommitAmbiguousError, StoreUnavailableError)):
                    await sealed(tx, look, claim)
                with pytest.raises(StoreUnavailableError):
                    await driver.begin()
        assert raw.execute("SELECT count(*) FROM orders WHERE item = %s", [item]).fetchone() == (0,)


async def test_wrong_pgbouncer_option_error_suggests_the_right_one(dsn: str) -> None:
    with PgBouncer(dsn, size=1, prepared=0) as pooler:
        async with opened(ASYNCPG, f"{through(dsn, pooler.port)}?pgbouncer=0") as driver:
            await driver.run(saying(Mode.READ, "SELECT 1"))  # prepared, and gone with the transaction
            with pytest.raises(StoreUnavailableError, match=r"\?pgbouncer=1"):
                await driver.run(saying(Mode.READ, "SELECT 1"))


def test_a_missing_pooler_is_a_failure(monkeypatch: pytest.MonkeyPatch, postgres_dsn: str) -> None:
    assert address(PgBouncer(postgres_dsn).dsn(postgres_dsn)) != address(postgres_dsn)
    monkeypatch.setenv(VARIABLE, "/nowhere/pgbouncer")
    with pytest.raises(PgBouncerMissingError, match=VARIABLE), PgBouncer(postgres_dsn):
        pass
    assert "make pooler" in MISSING
