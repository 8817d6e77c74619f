"""What the network and the server can do to a driver: lost replies, lost commits, silence, restarts."""

from __future__ import annotations

import asyncio
import uuid
from collections import Counter

import psycopg
import pytest

from drivers.postgres.drivers import ASYNCPG, ask, engine, hurried, opened, raw_of, saying
from harness import flows
from harness.dsn import through
from harness.patience import PATIENCE, wait_until
from harness.postgres import PostgresServer
from harness.proxy import Proxy
from harness.tables import await_waiters, make_tables
from oncekey.core.errors import CommitAmbiguousError, StoreError, StoreUnavailableError
from oncekey.core.flow import Mode, Statement, Transaction
from oncekey.core.model import Proceed, Replay, Retryable, State
from oncekey.core.policy import Policy
from oncekey.testing.claims import a_claim, again, answered

INSERT = "INSERT INTO orders (item) VALUES ('{}')"


@pytest.fixture
def proxy(dsn):
    with Proxy.before(dsn) as proxy:
        yield proxy


@pytest.fixture
def far(dsn, proxy):
    """The database, with the proxy in between."""
    return through(dsn, proxy.port)


def count(raw, item: str) -> int:
    return raw.execute("SELECT count(*) FROM orders WHERE item = %s", [item]).fetchone()[0]


async def claimed(driver, claim=None):
    verdict = await flows.abegin(engine(driver), claim or a_claim(), Policy())
    assert isinstance(verdict, Proceed)
    return verdict.lease


async def ready_to_commit(driver):
    """A claim, an order and the record in one transaction that has yet to be committed."""
    item = uuid.uuid4().hex
    lease, transaction = await claimed(driver), await driver.begin()
    await ask(transaction, INSERT.format(item))
    assert (await flows.asettle_within(engine(driver), transaction, lease, answered())).ours
    return lease, transaction, item


class TestLostCommits:
    """P7, F8: nobody knows until the record's own row says so."""

    async def test_lost_reply_to_a_successful_commit_finds_the_record(self, kind, dsn, far, proxy, raw):
        async with opened(kind, far) as driver:
            lease, transaction, item = await ready_to_commit(driver)
            lost = proxy.lose_reply(b"COMMIT", b"COMMIT")
            with pytest.raises(CommitAmbiguousError):
                await transaction.commit()
            assert lost.is_set()
            await transaction.rollback()
            settled = await flows.asettle_lost_commit(engine(driver), lease)
            assert not settled.ours
            assert settled.snapshot.record.state is State.COMPLETED
            assert settled.snapshot.record.response == answered().response
            assert count(raw, item) == 1

    async def test_lost_commit_request_is_settled_as_retryable(self, kind, far, proxy, raw):
        async with opened(kind, far) as driver:
            lease, transaction, item = await ready_to_commit(driver)
            lost = proxy.lose_request(b"COMMIT")
            with pytest.raises(CommitAmbiguousError):
                await transaction.commit()
            assert lost.is_set()
            await transaction.rollback()
            settled = await flows.asettle_lost_commit(engine(driver), lease)
            assert settled.ours
            assert settled.snapshot.record.state is State.FAILED_RETRYABLE
            assert count(raw, item) == 0

    async def test_pending_commit_is_awaited(self, kind, dsn, far, proxy, raw):  # F8
        async with opened(kind, far) as driver:
            lease, transaction, item = await ready_to_commit(driver)
            late = proxy.postpone(b"COMMIT", b"COMMIT")
            with pytest.raises(CommitAmbiguousError):
                await transaction.commit()
            await transaction.rollback()
            # A plain look would take it for rolled back.
            assert (await engine(driver).find(lease.id)).record.state is State.IN_PROGRESS
            finding_out = asyncio.create_task(flows.asettle_lost_commit(engine(driver), lease))
            await asyncio.to_thread(await_waiters, dsn)
            assert not finding_out.done()
            await asyncio.to_thread(late.deliver)
            settled = await finding_out
            assert not settled.ours
            assert settled.snapshot.record.state is State.COMPLETED
            assert count(raw, item) == 1

    async def test_wait_for_a_pending_commit_is_limited(self, kind, far, proxy):  # F8
        async with opened(kind, far) as driver:
            lease, transaction, _ = await ready_to_commit(driver)
            late = proxy.postpone(b"COMMIT", b"COMMIT")
            with pytest.raises(CommitAmbiguousError):
                await transaction.commit()
            await transaction.rollback()
            async with asyncio.timeout(PATIENCE):
                with hurried(driver), pytest.raises(StoreError):
                    await flows.asettle_lost_commit(engine(driver), lease)
            await asyncio.to_thread(late.deliver)
            settled = await flows.asettle_lost_commit(engine(driver), lease)
            assert settled.snapshot.record.state is State.COMPLETED

    async def test_lost_commit_of_an_atomic_transaction_is_ambiguous(self, kind, far, proxy, raw):
        item = uuid.uuid4().hex
        async with opened(kind, far) as driver:

            def body():
                yield Statement("order", INSERT.format(item))
                # Not before: the text of BEGIN has the word in it, too.
                proxy.lose_reply(b"COMMIT", b"COMMIT")

            with pytest.raises(CommitAmbiguousError):
                await driver.run(Transaction("order", Mode.ATOMIC, body))
        assert count(raw, item) == 1


class TestLostReplies:
    async def test_claim_with_lost_reply_finds_its_own_record(self, kind, far, proxy):  # P7, F8
        async with opened(kind, far) as driver:
            await claimed(driver)  # asyncpg prepares its statement here, and later sends only the values
            claim = a_claim()
            lost = proxy.lose_reply(claim.id.key.encode(), claim.owner.encode())
            lease = await claimed(driver, claim)
            assert lost.is_set()
            record = (await engine(driver).find(claim.id)).record
            assert (record.owner, record.fence, record.version, record.attempts) == (claim.owner, 1, 1, 1)
            # It is no zombie: what it says next is heard.
            assert (await flows.asettle(engine(driver), lease, answered())).ours

    async def test_claim_that_never_arrived_is_repeated(self, kind, far, proxy):
        async with opened(kind, far) as driver:
            await claimed(driver)
            claim = a_claim()
            lost = proxy.lose_request(claim.id.key.encode())
            await claimed(driver, claim)
            assert lost.is_set()

    async def test_takeover_with_lost_reply_finds_its_own_record(self, kind, far, proxy):
        async with opened(kind, far) as driver:
            claim = a_claim()
            await flows.asettle(engine(driver), await claimed(driver, claim), Retryable("x"))
            ours = again(claim)
            # Only a take-over names the incarnation that it saw.
            seen = claim.incarnation.bytes if kind == ASYNCPG else str(claim.incarnation).encode()
            lost = proxy.lose_reply(seen, ours.owner.encode())
            lease = await claimed(driver, ours)
            assert lost.is_set()
            assert lease.fence == 2

    async def test_a_settlement_is_repeated(self, kind, far, proxy):
        async with opened(kind, far) as driver:
            await flows.asettle(engine(driver), await claimed(driver), answered())
            lease, body = await claimed(driver), uuid.uuid4().hex.encode()
            lost = proxy.lose_reply(body, body)
            settled = await flows.asettle(engine(driver), lease, answered(body))
            assert lost.is_set()
            assert settled.ours
            assert settled.snapshot.record.version == 2

    async def test_a_single_write_is_ambiguous(self, kind, far, proxy, raw):
        item = uuid.uuid4().hex
        text = "INSERT INTO orders (item) VALUES (:item) RETURNING item"
        async with opened(kind, far) as driver:
            await driver.run(saying(Mode.SINGLE, text, item=uuid.uuid4().hex))
            proxy.lose_reply(item.encode(), item.encode())
            with pytest.raises(CommitAmbiguousError):
                await driver.run(saying(Mode.SINGLE, text, item=item))
        assert count(raw, item) == 1

    async def test_read_with_lost_reply_is_repeated_on_a_new_connection(self, kind, far, proxy):
        text = "SELECT :word::text"
        async with opened(kind, far) as driver:
            await driver.run(saying(Mode.READ, text, word="warm"))
            lost = proxy.lose_reply(b"once", b"once")
            assert await driver.run(saying(Mode.READ, text, word="once")) == [("once",)]
            assert lost.is_set()

    async def test_read_is_repeated_only_once(self, kind, far, proxy):
        text = "SELECT :word::text"
        async with opened(kind, far) as driver:
            await driver.run(saying(Mode.READ, text, word="warm"))
            lost = [proxy.lose_request(b"never") for _ in range(2)]
            with pytest.raises(StoreUnavailableError):
                await driver.run(saying(Mode.READ, text, word="never"))
            assert all(one.is_set() for one in lost)

    async def test_uncommitted_transaction_with_lost_reply_is_repeated(self, kind, far, proxy, raw):
        item = uuid.uuid4().hex
        text = "INSERT INTO orders (item) VALUES (:item) RETURNING item"
        async with opened(kind, far) as driver:
            await driver.run(saying(Mode.SINGLE, text, item=uuid.uuid4().hex))
            lost = proxy.lose_reply(item.encode(), item.encode())
            assert await driver.run(saying(Mode.ATOMIC, text, item=item)) == [(item,)]
            assert lost.is_set()
        assert count(raw, item) == 1

    async def test_a_business_transaction_that_loses_its_connection_did_not_happen(self, kind, far, proxy, raw):
        async with opened(kind, far, pool_size=2) as driver:
            lease, transaction, item = await ready_to_commit(driver)
            await asyncio.to_thread(proxy.cut)
            with pytest.raises(StoreError):
                await flows.asettle_within(engine(driver), transaction, lease, answered())
            await transaction.rollback()
            assert count(raw, item) == 0
            await (await driver.begin()).rollback()
            assert (await flows.asettle_lost_commit(engine(driver), lease)).ours


class TestSilence:
    async def test_silent_server_times_out(self, kind, far, proxy):
        # Techniques, test 5: no hang past the time-out.
        async with opened(kind, far, pool_size=4) as driver:
            await asyncio.gather(*(driver.run(saying(Mode.READ, "SELECT pg_sleep(0.01)")) for _ in range(4)))
            await asyncio.to_thread(proxy.hold)
            async with asyncio.timeout(PATIENCE):
                for mode in (Mode.READ, Mode.SINGLE):
                    with hurried(driver, wait=0.3), pytest.raises((StoreUnavailableError, CommitAmbiguousError)):
                        await driver.run(saying(mode, "SELECT 1"))
            await asyncio.to_thread(proxy.release)
            assert await driver.run(saying(Mode.READ, "SELECT 1")) == [(1,)]

    async def test_lock_wait_is_limited(self, kind, dsn, raw):
        async with opened(kind, dsn) as driver:
            claim = a_claim()
            lease = await claimed(driver, claim)
            with raw.transaction():
                raw.execute("SELECT * FROM oncekey.record WHERE key = %s FOR UPDATE", [claim.id.key])
                async with asyncio.timeout(PATIENCE):
                    with hurried(driver), pytest.raises((StoreUnavailableError, CommitAmbiguousError)):
                        await flows.asettle(engine(driver), lease, answered())
            settled = await flows.asettle(engine(driver), lease, answered())
            assert settled.ours
            assert isinstance(await flows.abegin(engine(driver), again(claim), Policy()), Replay)

    async def test_a_statement_that_the_server_stopped_did_not_happen(self, dsn, raw):
        # psycopg hears that it was stopped, so this is certain; asyncpg does not wait to hear it.
        async with opened("psycopg", dsn) as driver:
            with raw.transaction():
                raw.execute("LOCK TABLE orders")
                with hurried(driver), pytest.raises(StoreUnavailableError, match="57014"):
                    await driver.run(saying(Mode.SINGLE, INSERT.format("stopped")))
        assert count(raw, "stopped") == 0


TERMINATE = """
    SELECT count(pg_terminate_backend(pid)) FROM pg_stat_activity
    WHERE datname = current_database() AND pid <> pg_backend_pid()
"""


class TestServers:
    async def test_terminated_sessions_are_noticed_before_anything_is_lost_on_them(self, kind, dsn, raw):
        async with opened(kind, dsn, pool_size=5, timeout=30) as driver:
            await asyncio.gather(*(driver.run(saying(Mode.READ, "SELECT pg_sleep(0.01)")) for _ in range(20)))
            assert raw.execute(TERMINATE).fetchone()[0] >= 5
            await self.all_gone(raw)
            # Not one of these is ambiguous: nothing was sent on the dead connections.
            for _ in range(5):
                assert await driver.run(saying(Mode.SINGLE, "SELECT 1")) == [(1,)]
            await (await driver.begin()).rollback()

    async def all_gone(self, raw):
        query = "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND pid <> pg_backend_pid()"
        wait_until(lambda: raw.execute(query).fetchone() == (0,))
        # An event loop reads what came in only when it gets a turn.
        for _ in range(3):
            await asyncio.sleep(0)

    async def test_acknowledged_writes_survive_repeated_terminations(self, kind, dsn):
        # Techniques, test 4: whatever was acknowledged is there, and the pool recovers by itself.
        acknowledged, outcomes = [], Counter()
        async with opened(kind, dsn, pool_size=6, timeout=PATIENCE) as driver:
            over = asyncio.Event()

            async def client():
                while not over.is_set():
                    claim, body = a_claim(), uuid.uuid4().hex.encode()
                    try:
                        lease = await claimed(driver, claim)
                        if (await flows.asettle(engine(driver), lease, answered(body))).ours:
                            acknowledged.append((claim, body))
                            outcomes["acknowledged"] += 1
                    except (StoreUnavailableError, CommitAmbiguousError) as error:
                        outcomes[type(error).__name__] += 1

            def storm():
                with psycopg.connect(dsn, autocommit=True) as killer:
                    blows, hit = 0, False
                    while blows < 30 or not hit:  # until somebody was hit: most blows meet connections that are idle
                        wait_until(lambda blows=blows: len(acknowledged) > blows)  # between blows somebody gets on
                        killer.execute(TERMINATE)
                        blows, hit = blows + 1, sum(outcomes.values()) > outcomes["acknowledged"]

            async def bad_connections():
                await asyncio.to_thread(storm)
                over.set()

            await asyncio.gather(bad_connections(), *(client() for _ in range(6)))
            assert await driver.run(saying(Mode.SINGLE, "SELECT 1")) == [(1,)]
            for claim, body in acknowledged:
                verdict = await flows.abegin(engine(driver), again(claim), Policy())
                assert isinstance(verdict, Replay)
                assert verdict.record.response.body == body

    async def test_a_restart_is_survived(self, kind, crashable_postgres: PostgresServer):
        # Techniques, section 4: peers need to be restarted themselves.
        server = crashable_postgres
        dsn = make_tables(server.create_database("restarted"))
        async with opened(kind, dsn, pool_size=5, timeout=4 * PATIENCE) as driver:
            claim = a_claim()
            await flows.asettle(engine(driver), await claimed(driver, claim), answered())
            await asyncio.gather(*(driver.run(saying(Mode.READ, "SELECT pg_sleep(0.01)")) for _ in range(20)))
            for end in (server.stop, server.kill):
                open_one = await driver.begin()
                await asyncio.to_thread(end)
                async with asyncio.timeout(PATIENCE):  # R110: said at once, each time, and not when its time is over
                    for _ in range(3):
                        with pytest.raises((StoreUnavailableError, CommitAmbiguousError)):
                            await driver.run(saying(Mode.SINGLE, "SELECT 1"))
                        with pytest.raises(StoreUnavailableError):
                            await driver.begin()
                    with pytest.raises(StoreError):
                        await open_one.commit()
                await asyncio.to_thread(server.start)
                # Not a moment later, and without help.
                assert isinstance(await flows.abegin(engine(driver), again(claim), Policy()), Replay)
                await claimed(driver)
                await (await driver.begin()).rollback()


async def test_repr_of_a_guarded_connection_shows_the_connection(kind, dsn):
    async with opened(kind, dsn) as driver:
        transaction = await driver.begin()
        assert repr(raw_of(transaction)).rpartition(" at ")[0] in repr(transaction.connection)
        await transaction.rollback()
