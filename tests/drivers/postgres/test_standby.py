"""A primary with a synchronous standby: commits that stop waiting, hosts that only read, and a fail-over.

A frozen standby confirms nothing, so a commit waits; whoever cancels the wait makes it visible on one server only.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import uuid
from collections.abc import AsyncIterator, Awaitable, Iterator
from typing import Any

import psycopg
import pytest
from sqlalchemy import create_engine
from sqlalchemy.ext.asyncio import create_async_engine
from sqlalchemy.pool import NullPool

from cli.operating import oncekey
from drivers.postgres.conftest import ORDERS
from drivers.postgres.drivers import ASYNCPG, InThreads, ask, engine, hurried, opened, saying
from drivers.postgres.test_folding import entered, insert, order, sealed
from drivers.postgres.test_pgbouncer import PooledShop, serving
from frameworks.shop import new_key
from harness import flows
from harness.asgi import Reply, until
from harness.pair import PostgresPair
from harness.postgres import installations
from harness.tables import make_tables
from oncekey.core.errors import CommitAmbiguousError, StoreUnavailableError
from oncekey.core.flow import Mode
from oncekey.core.model import Proceed
from oncekey.core.policy import Policy
from oncekey.databases.sqlalchemy.asynchronous import SqlalchemyDriver
from oncekey.databases.sqlalchemy.generated.driver import BlockingSqlalchemyDriver
from oncekey.testing.claims import a_claim, answered
from sessions.ways import SQLALCHEMY, WAYS, Shop

CANCEL = "SELECT count(pg_cancel_backend(pid)) FROM pg_stat_activity WHERE wait_event = 'SyncRep'"
OUTAGE = (503, "idempotency_store_unavailable")
WRITING = """
    INSERT INTO orders (item)
    SELECT gen_random_uuid()::text FROM set_config('synchronous_commit', 'on', true) AS setting WHERE setting = 'on'
"""
WARNING = """
    CREATE FUNCTION warn() RETURNS trigger LANGUAGE plpgsql AS $$BEGIN RAISE WARNING 'low on stock'; RETURN NULL; END$$;
    CREATE TRIGGER at_once AFTER INSERT ON oncekey.record FOR EACH ROW EXECUTE FUNCTION warn();
    CREATE CONSTRAINT TRIGGER at_commit AFTER INSERT ON oncekey.record DEFERRABLE INITIALLY DEFERRED
        FOR EACH ROW EXECUTE FUNCTION warn();
"""


@pytest.fixture(scope="module")
def pair() -> Iterator[PostgresPair]:
    with PostgresPair(installations()[-1]) as pair:
        yield pair


@pytest.fixture
def dsn(pair: PostgresPair) -> Iterator[str]:
    """The primary's address of a database of the test's own, on both servers."""
    name = f"pair_{uuid.uuid4().hex}"
    dsn = make_tables(pair.primary.create_database(name))
    pair.await_applied()
    yield dsn
    pair.standby.thaw()
    pair.primary.drop_database(name)


@pytest.fixture
def raw(dsn: str) -> Iterator[psycopg.Connection[Any]]:
    """The operator, who waits for no standby."""
    with psycopg.connect(dsn, autocommit=True, options="-c synchronous_commit=local") as connection:
        yield connection


def both(pair: PostgresPair, dsn: str) -> str:
    """The same database by an address of both hosts, the one that only reads first."""
    return pair.dsn(dsn.rpartition("/")[2])


async def given_up(raw: psycopg.Connection[Any], committing: Awaitable[Any]) -> Any:
    """Do something whose every wait for the standby is cancelled by an operator."""
    task = asyncio.ensure_future(committing)
    while not task.done():
        raw.execute(CANCEL)
        await asyncio.wait([task], timeout=0.005)
    return task.result()


@contextlib.asynccontextmanager
async def shop_of(way: str, dsn: str, url: str) -> AsyncIterator[Any]:
    """A shop by one of the ways; each has `send`."""
    if way in SQLALCHEMY:
        shop = Shop(way, url)
        async with shop.open():
            yield shop
    else:
        async with serving(way, dsn, f"{url}?pgbouncer=0", pool_size=4) as shop:
            yield shop


async def sent(shop: Any, key: str, path: str = "/orders") -> Reply:
    """A request; the handlers of both shops give each run another answer."""
    if isinstance(shop, PooledShop):
        return await shop.send(f"{path}?item={key}", key=key)
    return await shop.send(lambda _: {"run": shop.runs}, key=key)


def runs_of(shop: Any, key: str) -> int:
    return shop.runs.count(key) if isinstance(shop, PooledShop) else shop.runs


class TestGivenUp:
    """P7: what the primary shows is no proof that its standby has it."""

    @pytest.mark.parametrize("way", WAYS)
    async def test_unconfirmed_success_is_replayed_after_the_standby_confirms(
        self, way: str, pair: PostgresPair, dsn: str, raw: Any
    ) -> None:
        async with shop_of(way, dsn, dsn) as shop:
            key = new_key()
            pair.standby.freeze()
            first = await given_up(raw, sent(shop, key))
            assert first.status == 503, first
            assert raw.execute("SELECT state FROM oncekey.record").fetchall() == [("completed",)]
            again = await given_up(raw, sent(shop, key))
            assert (again.status, again.code) == OUTAGE
            pair.standby.thaw()
            last = await sent(shop, key)
            assert (last.status // 100, last.replayed, runs_of(shop, key)) == (2, True, 1)

    @pytest.mark.parametrize("way", WAYS)
    async def test_warning_of_a_trigger_is_not_a_cancelled_wait(
        self, way: str, pair: PostgresPair, dsn: str, raw: Any
    ) -> None:
        # PostgreSQL gives RAISE WARNING the same SQLSTATE, in a statement and at COMMIT.
        raw.execute(WARNING)
        async with shop_of(way, dsn, dsn) as shop:
            key = new_key()
            first = await sent(shop, key)
            assert (first.status // 100, first.replayed) == (2, False)
            pair.await_applied()
            pair.standby.freeze()
            again = await sent(shop, key)  # it reads, so nothing waits for the standby
            assert (again.status, again.replayed, runs_of(shop, key)) == (first.status, True, 1)

    @pytest.mark.parametrize("way", ["asyncpg", "psycopg", "def"])
    async def test_nothing_is_executed_on_a_claim_whose_wait_was_cancelled(
        self, way: str, pair: PostgresPair, dsn: str, raw: Any
    ) -> None:
        async with shop_of(way, dsn, dsn) as shop:
            key = new_key()
            pair.standby.freeze()
            assert (await given_up(raw, sent(shop, key, "/charges"))).status == 503
            assert shop.charges == {}
            pair.standby.thaw()
            assert (await sent(shop, new_key(), "/charges")).status == 201

    async def test_every_unconfirmed_commit_is_ambiguous(
        self, kind: str, pair: PostgresPair, dsn: str, raw: Any
    ) -> None:
        raw.execute(ORDERS)
        async with opened(kind, dsn) as driver:
            claim = a_claim()
            tx, look = await entered(driver, claim)
            await ask(tx, insert(order()))
            verdict = await flows.abegin(engine(driver), a_claim(), Policy())
            assert isinstance(verdict, Proceed)
            other = await driver.begin()
            await ask(other, insert(order()))
            assert (await flows.asettle_within(engine(driver), other, verdict.lease, answered())).ours
            third = await driver.begin()
            await ask(third, insert(order()))
            pair.standby.freeze()
            with pytest.raises(CommitAmbiguousError, match="standby"):
                await given_up(raw, sealed(tx, look, claim))
            with pytest.raises(CommitAmbiguousError, match="standby"):
                await given_up(raw, other.commit())
            with pytest.raises(StoreUnavailableError, match="confirmed"):
                await given_up(raw, driver.run(saying(Mode.READ, "SELECT 1")))
            getattr(third, "transaction", third)._limit = 0.1
            with pytest.raises(CommitAmbiguousError):
                await third.commit()  # given up by ourselves
            with hurried(driver, wait=0.1), pytest.raises(StoreUnavailableError):
                await driver.begin()
            pair.standby.thaw()
            assert await driver.run(saying(Mode.READ, "SELECT count(*) FROM orders")) == [(3,)]

    async def test_terminated_waiting_backend_leaves_commit_ambiguous(
        self, kind: str, pair: PostgresPair, dsn: str, raw: Any
    ) -> None:
        raw.execute(ORDERS)
        async with opened(kind, dsn) as driver:
            tx = await driver.begin()
            await ask(tx, insert(order()))
            pair.standby.freeze()
            committing = asyncio.ensure_future(tx.commit())
            await until(lambda: raw.execute(CANCEL.replace("cancel", "terminate")).fetchone() != (0,))
            with pytest.raises(CommitAmbiguousError):
                await committing
            assert raw.execute("SELECT count(*) FROM orders").fetchone() == (1,)  # for all to see
            with pytest.raises(StoreUnavailableError, match="confirmed"):
                await given_up(raw, driver.run(saying(Mode.READ, "SELECT 1")))
            pair.standby.thaw()
            assert await driver.run(saying(Mode.READ, "SELECT count(*) FROM orders")) == [(1,)]

    async def test_unconfirmed_single_write_is_ambiguous(
        self, kind: str, pair: PostgresPair, dsn: str, raw: Any
    ) -> None:
        raw.execute(ORDERS)
        async with opened(kind, dsn) as driver:
            pair.standby.freeze()
            with pytest.raises(CommitAmbiguousError, match="standby"):
                await given_up(raw, driver.run(saying(Mode.SINGLE, WRITING)))
            # Many ask, and one of them asks the server.
            asked = (driver.run(saying(Mode.READ, "SELECT 1")) for _ in range(5))
            told = await given_up(raw, asyncio.gather(*asked, return_exceptions=True))
            assert {type(one) for one in told} == {StoreUnavailableError}
            pair.standby.thaw()
            asked = (driver.run(saying(Mode.READ, "SELECT 1")) for _ in range(5))
            assert await asyncio.gather(*asked) == [[(1,)]] * 5

    @pytest.mark.parametrize("blocking", [False, True], ids=["asyncio", "threads"])
    async def test_a_standby_that_confirms_nothing_is_an_outage(
        self, blocking: bool, pair: PostgresPair, dsn: str
    ) -> None:
        # Nobody cancels the wait: SQLAlchemy's drivers give the question up by themselves.
        url = dsn.replace("postgresql:", "postgresql+psycopg:")
        pool = {"poolclass": NullPool}
        driver: Any = SqlalchemyDriver(create_async_engine(url, **pool))
        if blocking:
            driver = InThreads(BlockingSqlalchemyDriver(create_engine(url, **pool)))
        pair.standby.freeze()
        getattr(driver, "driver", driver).unconfirmed.add()
        with pytest.raises(StoreUnavailableError, match="confirmed"):
            await driver.run(saying(Mode.READ, "SELECT 1"))
        pair.standby.thaw()
        assert await driver.run(saying(Mode.READ, "SELECT 1")) == [(1,)]
        await driver.close()


class TestHosts:
    @pytest.mark.parametrize("way", WAYS)
    async def test_writable_host_is_selected(self, way: str, pair: PostgresPair, dsn: str) -> None:
        url = both(pair, dsn)
        if way == "sa-asyncpg":  # SQLAlchemy reads the hosts by itself
            hosts = f"host=127.0.0.1:{pair.standby.port}&host=127.0.0.1:{pair.primary.port}"
            url = f"postgresql://postgres@/{dsn.rpartition('/')[2]}?{hosts}&target_session_attrs=read-write"
        elif way == "sa-psycopg":
            ports = f"host=127.0.0.1,127.0.0.1&port={pair.standby.port},{pair.primary.port}"
            url = f"postgresql://postgres@/{dsn.rpartition('/')[2]}?{ports}&target_session_attrs=read-write"
        async with shop_of(way, dsn, url) as shop:
            key = new_key()
            assert [(await sent(shop, key)).status // 100 for _ in range(2)] == [2, 2]
            assert runs_of(shop, key) == 1

    async def test_silent_host_is_skipped(self, pair: PostgresPair, dsn: str) -> None:
        async with opened(ASYNCPG, both(pair, dsn), timeout=0.3) as driver:
            pair.standby.freeze()
            assert await driver.run(saying(Mode.READ, "SELECT pg_is_in_recovery()")) == [(False,)]

    async def test_hosts_that_all_only_read_are_an_outage(self, kind: str, pair: PostgresPair, dsn: str) -> None:
        reader = both(pair, dsn).replace(str(pair.primary.port), str(pair.standby.port))
        async with opened(kind, reader) as driver:
            with pytest.raises(StoreUnavailableError, match="read-only"):
                await driver.begin()


async def test_failover_keeps_acknowledged_responses() -> None:
    """Our own drivers at once on one pair: the primary is killed under open pools, and the other one is promoted."""
    with PostgresPair() as pair:
        dsns = {way: make_tables(pair.primary.create_database(f"over_{at}")) for at, way in enumerate(WAYS[:3])}
        pair.await_applied()
        async with contextlib.AsyncExitStack() as stack:
            shops = [await stack.enter_async_context(shop_of(way, dsn, both(pair, dsn))) for way, dsn in dsns.items()]
            keys = [new_key() for _ in range(4)]
            before = [[await sent(shop, key) for key in keys] for shop in shops]
            await asyncio.to_thread(pair.fail_over)
            after = [[await sent(shop, key) for key in keys] for shop in shops]
            for shop, first, again in zip(shops, before, after, strict=True):
                assert [reply.status for reply in (*first, *again)] == [201] * 8
                assert [reply.body for reply in first] == [reply.body for reply in again]
                assert [shop.runs.count(key) for key in keys] == [1] * 4
                assert (await sent(shop, new_key())).status == 201


async def test_connection_to_a_demoted_primary_is_dropped(kind: str, pair: PostgresPair, dsn: str) -> None:
    """A pooler or an address in between may lead to a standby, and to the primary a moment later."""
    async with opened(kind, dsn) as driver:
        pids = [(await driver.run(saying(Mode.READ, "SELECT pg_backend_pid()")))[0][0]]
        with pytest.raises(StoreUnavailableError, match="read-only"):
            await driver.run(saying(Mode.ATOMIC, "SET LOCAL transaction_read_only = on", "CREATE TABLE one (two int)"))
        pids.append((await driver.run(saying(Mode.READ, "SELECT pg_backend_pid()")))[0][0])
        assert len(set(pids)) == 2


async def test_unconfirmed_state_clears_without_standby(kind: str, postgres_dsn: str) -> None:
    async with opened(kind, postgres_dsn) as driver:
        ours = getattr(driver, "driver", driver)
        ours._pool.unconfirmed.add()
        assert await driver.run(saying(Mode.READ, "SELECT 1")) == [(1,)]
        assert not ours._pool.unconfirmed


def test_doctor_reports_standby_and_synchronous_commit(pair: PostgresPair, dsn: str) -> None:
    def seen(url: str) -> set[str]:
        return {one["seen"] for one in json.loads(oncekey("doctor", "--store", url, "--json").stdout)["items"]}

    assert "commits wait for standby" in seen(dsn)
    assert "this is a standby" in seen(pair.standby.dsn(dsn.rpartition("/")[2]))
