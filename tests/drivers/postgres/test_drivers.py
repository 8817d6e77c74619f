"""Transactions through each driver: modes, conflicts, refusals, pools."""

from __future__ import annotations

import asyncio
import subprocess
import sys

import pytest

from drivers.postgres.drivers import ASYNC_PSYCOPG, ASYNCPG, PSYCOPG, engine, hurried, opened, saying
from harness import flows
from harness.patience import PATIENCE, wait_until
from oncekey.core.errors import (
    CommitAmbiguousError,
    SchemaError,
    StoreError,
    StoreUnavailableError,
)
from oncekey.core.flow import Mode, Statement, Transaction
from oncekey.core.model import Proceed, Replay
from oncekey.core.policy import Policy
from oncekey.databases.retries import ConflictError
from oncekey.testing.claims import a_claim, again, answered

# A sequence keeps counting when a transaction is rolled back, so this fails so many times and then no more.
LOSING = """
    CREATE SEQUENCE IF NOT EXISTS tries;
    CREATE OR REPLACE FUNCTION lose(times int, code text) RETURNS int LANGUAGE plpgsql AS $$
        BEGIN
            IF nextval('tries') <= times THEN RAISE EXCEPTION USING ERRCODE = code; END IF;
            RETURN 1;
        END $$;
"""
SESSIONS = "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND pid <> pg_backend_pid()"


@pytest.fixture
def tries(raw):
    """How often something was tried."""
    raw.execute(LOSING)
    raw.execute("ALTER SEQUENCE tries RESTART")
    return lambda: raw.execute("SELECT last_value FROM tries").fetchone()[0]


def lose(mode: Mode, times: int, code: str) -> Transaction:
    return saying(mode, "SELECT lose(:times::int, :code)", times=times, code=code)


class TestModes:
    async def test_nothing_is_connected_before_it_is_needed(self, kind):
        async with opened(kind, "postgresql://nobody:sesame@127.0.0.1:1/nothing", timeout=4 * PATIENCE) as driver:
            async with asyncio.timeout(PATIENCE):  # R110: reported at once, not when the time for it is over
                with pytest.raises(StoreUnavailableError) as refused:
                    await driver.run(saying(Mode.READ, "SELECT 1"))
                with pytest.raises(StoreUnavailableError):
                    await driver.begin()
            assert "sesame" not in str(refused.value)

    @pytest.mark.parametrize("mode", Mode)
    async def test_rows_are_accessed_by_column_name(self, kind, dsn, mode):
        def body():
            rows = yield Statement("test", "SELECT :a::int AS one, :b::text AS two", {"a": 1, "b": "x%:y"})
            return [(row["one"], row["two"]) for row in rows]

        async with opened(kind, dsn) as driver:
            assert await driver.run(Transaction("test", mode, body)) == [(1, "x%:y")]
            assert await driver.run(saying(mode, "CREATE TEMP TABLE IF NOT EXISTS nothing ()")) == []

    async def test_an_atomic_transaction_is_all_or_nothing(self, kind, dsn, raw):
        insert = "INSERT INTO orders (item) VALUES (:item)"
        async with opened(kind, dsn, pool_size=1) as driver:
            with pytest.raises(StoreError):
                await driver.run(saying(Mode.ATOMIC, insert, "SELECT 1 / 0", item="half"))
            with pytest.raises(StoreError):
                await driver.run(saying(Mode.SINGLE, insert, "SELECT 1 / 0", item=f"single {kind}"))
            await driver.run(saying(Mode.ATOMIC, insert, "SELECT 1", item=f"whole {kind}"))
        found = {row[0] for row in raw.execute("SELECT item FROM orders").fetchall()}
        assert found >= {f"whole {kind}", f"single {kind}"}
        assert "half" not in found

    async def test_it_is_read_committed_whatever_the_default_is(self, kind, dsn):  # R64
        strict = f"{dsn}?options=-c%20default_transaction_isolation%3Dserializable"
        show = saying(Mode.ATOMIC, "SELECT current_setting('transaction_isolation')")
        async with opened(kind, strict) as driver:
            assert await driver.run(show) == [("read committed",)]
            transaction = await driver.begin()
            shown = await transaction.run(show.body())
            await transaction.rollback()
            assert shown == [("read committed",)]

    async def test_internal_error_is_raised_and_not_reported_as_outage(self, kind, dsn):
        def body():
            yield Statement("test", "SELECT 1")
            raise KeyError("a bug")

        async with opened(kind, dsn, pool_size=1) as driver:
            for mode in Mode:
                with pytest.raises(KeyError):
                    await driver.run(Transaction("test", mode, body))
            assert await driver.run(saying(Mode.READ, "SELECT 1")) == [(1,)]


class TestConflicts:
    """R64, E5: whoever loses against another transaction says it again, and not for ever."""

    @pytest.mark.parametrize("code", ["40001", "40P01"])
    @pytest.mark.parametrize("mode", Mode)
    async def test_conflicting_transaction_is_retried_until_it_succeeds(self, kind, dsn, tries, mode, code):
        async with opened(kind, dsn, pool_size=1) as driver:
            assert await driver.run(lose(mode, 3, code)) == [(1,)]
        assert tries() == 4

    @pytest.mark.parametrize("mode", Mode)
    async def test_conflict_retries_are_limited(self, kind, dsn, tries, mode):
        async with opened(kind, dsn, pool_size=1) as driver:
            with pytest.raises(StoreUnavailableError):
                await driver.run(lose(mode, 10**6, "40001"))
            assert tries() == ConflictError.tries
            assert await driver.run(saying(Mode.READ, "SELECT 1")) == [(1,)]

    async def test_a_real_deadlock_is_survived(self, kind, dsn, raw):
        raw.execute("INSERT INTO orders (item) VALUES (%s), (%s)", [f"left {kind}", f"right {kind}"])
        update = "UPDATE orders SET item = item WHERE item = :item"
        both = asyncio.Barrier(2)
        async with opened(kind, dsn) as driver:
            first, second = await driver.begin(), await driver.begin()
            left, right = ({"item": f"{side} {kind}"} for side in ("left", "right"))

            async def lock(transaction, one, other):
                def body():
                    yield Statement("test", "SET LOCAL deadlock_timeout = '10ms'")
                    yield Statement("test", update, one)

                await transaction.run(body())
                await both.wait()
                try:
                    await transaction.run(iter_once(Statement("test", update, other)))
                    await transaction.commit()
                except StoreUnavailableError:
                    await transaction.rollback()
                    return "lost"
                return "won"

            outcomes = await asyncio.gather(lock(first, left, right), lock(second, right, left))
        assert sorted(outcomes) == ["lost", "won"]


def iter_once(statement):
    yield statement


class TestRefusals:
    """Only the store's own errors leave a driver, and none of them repeats a value."""

    @pytest.mark.parametrize("mode", Mode)
    @pytest.mark.parametrize(
        ("text", "meaning"),
        [
            ("SELECT * FROM oncekey.nothing", SchemaError),
            ("SELECT nothing FROM orders", SchemaError),
            ("INSERT INTO orders (item) VALUES (NULL)", StoreError),
            ("SELECT 'sesame'::int", StoreError),
            ("not even SQL", StoreError),
        ],
    )
    async def test_server_errors_map_to_store_errors(self, kind, dsn, mode, text, meaning):
        async with opened(kind, dsn, pool_size=1) as driver:
            with pytest.raises(StoreError) as refused:
                await driver.run(saying(mode, text))
            assert type(refused.value) is meaning
            assert not isinstance(refused.value, StoreUnavailableError | CommitAmbiguousError)
            assert "sesame" not in told(refused.value)
            assert await driver.run(saying(mode, "SELECT 1")) == [(1,)]

    @pytest.mark.parametrize("value", ["sesame\x00", "sesame\ud800", 2**80])
    async def test_unbindable_value_raises_store_error(self, kind, dsn, value):
        text = "SELECT :value::bigint" if isinstance(value, int) else "SELECT :value::text"
        async with opened(kind, dsn, pool_size=1) as driver:
            with pytest.raises(StoreError) as refused:
                await driver.run(saying(Mode.SINGLE, text, value=value))
            assert "sesame" not in told(refused.value)
            assert str(2**80) not in told(refused.value)
            assert await driver.run(saying(Mode.READ, "SELECT 1")) == [(1,)]

    async def test_a_row_that_a_constraint_refuses_is_not_shown(self, kind, dsn):
        text = "UPDATE oncekey.record SET state = :state, last_error = :secret WHERE key = :key"
        claim = a_claim()
        async with opened(kind, dsn) as driver:
            assert isinstance(await flows.abegin(engine(driver), claim, Policy()), Proceed)
            with pytest.raises(StoreError) as refused:
                await driver.run(saying(Mode.SINGLE, text, state=None, secret="sesame", key=claim.id.key))
        assert "sesame" not in told(refused.value)

    async def test_a_standby_is_an_outage(self, kind, dsn):
        reader = f"{dsn}?options=-c%20default_transaction_read_only%3Don"
        async with opened(kind, reader) as driver:
            with pytest.raises(StoreUnavailableError, match="25006"):
                await flows.abegin(engine(driver), a_claim(), Policy())


def told(error: BaseException) -> str:
    """Everything that a log would show of an error."""
    chain, one = [], error
    while one is not None:
        chain.append(f"{one} {getattr(one, 'detail', '')}")
        one = one.__cause__ or (None if one.__suppress_context__ else one.__context__)
    return "\n".join(chain)


class TestPools:
    async def test_the_wait_for_a_connection_is_bounded(self, kind, dsn):
        # Handlers may hold all but a part of the pool, which is left to claims and heartbeats.
        async with opened(kind, dsn, pool_size=2) as driver:
            held = await driver.begin()
            async with asyncio.timeout(PATIENCE):
                with hurried(driver, wait=0.1), pytest.raises(StoreUnavailableError, match="in use"):
                    await driver.begin()
            assert isinstance(await flows.abegin(engine(driver), a_claim(), Policy()), Proceed)
            await held.rollback()
            await (await driver.begin()).rollback()

    async def test_returned_connection_is_given_to_a_waiting_task(self, kind, dsn):
        async with opened(kind, dsn, pool_size=1, timeout=PATIENCE) as driver:
            held = await driver.begin()
            waiting = [asyncio.create_task(driver.run(saying(Mode.READ, "SELECT 1"))) for _ in range(5)]
            await asyncio.sleep(0)
            await held.commit()
            assert await asyncio.gather(*waiting) == [[(1,)]] * 5

    async def test_it_makes_no_more_connections_than_it_may(self, kind, dsn, raw):
        async with opened(kind, dsn, pool_size=3, timeout=30) as driver:
            await asyncio.gather(*(driver.run(saying(Mode.READ, "SELECT pg_sleep(0.01)")) for _ in range(30)))
            assert raw.execute(SESSIONS).fetchone() == (3,)
        wait_until(lambda: raw.execute(SESSIONS).fetchone() == (0,), "a closed driver left connections behind")

    async def test_connection_returned_in_a_transaction_is_cleaned(self, kind, dsn):
        async with opened(kind, dsn, pool_size=1) as driver:
            with pytest.raises(StoreError):
                await driver.run(saying(Mode.SINGLE, "BEGIN", "SELECT 1 / 0"))
            assert await driver.run(saying(Mode.READ, "SELECT 1")) == [(1,)]

    async def test_work_is_shared_by_many(self, kind, dsn):
        async with opened(kind, dsn, pool_size=4, timeout=30) as driver:
            through = engine(driver)
            claims = [a_claim() for _ in range(40)]

            async def serve(claim):
                verdict = await flows.abegin(through, claim, Policy())
                return (await flows.asettle(through, verdict.lease, answered())).ours

            assert all(await asyncio.gather(*map(serve, claims)))
            assert all(
                isinstance(one, Replay)
                for one in await asyncio.gather(*(flows.abegin(through, again(claim), Policy()) for claim in claims))
            )


class TestPoolers:
    """Nothing outlives its transaction, so a server connection may be another's next time."""

    PREPARED = "SELECT count(*) FROM pg_prepared_statements WHERE statement LIKE '%oncekey.record%'"

    @pytest.mark.parametrize(
        ("kind", "suffix", "options", "prepared"),
        [
            (PSYCOPG, "", {}, False),
            (PSYCOPG, "", {"prepare_threshold": 0}, True),
            (PSYCOPG, "?pgbouncer=1", {"prepare_threshold": 0}, False),
            (PSYCOPG, "?pgbouncer=0", {}, True),
            (ASYNC_PSYCOPG, "", {}, False),
            (ASYNC_PSYCOPG, "?pgbouncer=0", {}, True),
            (ASYNC_PSYCOPG, "", {"prepare_threshold": 0}, True),
            (ASYNC_PSYCOPG, "?pgbouncer=1", {"prepare_threshold": 0}, False),
            (ASYNCPG, "", {}, True),
            (ASYNCPG, "", {"statement_cache_size": 0}, False),
            (ASYNCPG, "?pgbouncer=1", {}, False),
            (ASYNCPG, "?pgbouncer=0", {}, True),
        ],
    )
    async def test_statements_are_prepared_only_where_that_is_safe(self, dsn, kind, suffix, options, prepared):
        async with opened(kind, dsn + suffix, pool_size=1, **options) as driver:
            for _ in range(10):
                verdict = await flows.abegin(engine(driver), a_claim(), Policy())
                assert (await flows.asettle(engine(driver), verdict.lease, answered())).ours
            [(count,)] = await driver.run(saying(Mode.READ, self.PREPARED))
            assert (count > 0) == prepared
            for _ in range(10):
                transaction = await driver.begin()
                await transaction.rollback()

    async def test_no_setting_is_left_behind(self, kind, dsn):
        settings = "SELECT name, setting FROM pg_settings WHERE source = 'session'"
        async with opened(kind, dsn, pool_size=1) as driver:
            before = await driver.run(saying(Mode.READ, settings))
            verdict = await flows.abegin(engine(driver), a_claim(), Policy())
            transaction = await driver.begin()
            await flows.asettle_within(engine(driver), transaction, verdict.lease, answered())
            await transaction.commit()
            assert await driver.run(saying(Mode.READ, settings)) == before
            [(locks,)] = await driver.run(
                saying(Mode.READ, "SELECT count(*) FROM pg_locks WHERE locktype = 'advisory'")
            )
            assert locks == 0


FORKING = """
import os, sys
from oncekey.databases.postgres.generated.psycopg import PsycopgDriver
from oncekey.core.flow import Mode, Statement, Transaction

def body():
    rows = yield Statement("pid", "SELECT pg_backend_pid() AS pid")
    return rows[0]["pid"]

look = Transaction("pid", Mode.READ, body)
driver = PsycopgDriver(sys.argv[1])
before = driver.run(look)
child = os.fork()
if child == 0:
    theirs = driver.run(look)
    driver.close()
    sys.exit(0 if theirs != before else 3)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
assert driver.run(look) == before
driver.close()
"""


def test_a_fork_does_not_share_connections(dsn):
    done = subprocess.run([sys.executable, "-c", FORKING, dsn], capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0, done.stderr
