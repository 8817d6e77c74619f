"""asyncpg's connections between two borrowers: who gets which, and which are not lent again."""

from __future__ import annotations

import asyncio
import warnings
from contextlib import asynccontextmanager

import asyncpg
import pytest

from harness.asgi import until
from harness.patience import PATIENCE
from oncekey.core.errors import StoreBusyError, StoreUnavailableError
from oncekey.databases.postgres.address import PostgresAddress
from oncekey.databases.postgres.asyncpg import MAX_AGE, MAX_IDLE, AsyncpgPool
from oncekey.databases.postgres.asyncpg_connections import Wait, Watch


@pytest.fixture
def pool(dsn):
    return AsyncpgPool(PostgresAddress.parse(dsn), 2, 5.0, 100)


@asynccontextmanager
async def lent(pool):
    """A connection for a moment."""
    connection = await pool.borrow()
    try:
        yield connection
    finally:
        await pool.give_back(connection)


async def pid_of(connection) -> int:
    return await connection.fetchval("SELECT pg_backend_pid()")


async def gone(raw, pid: int) -> None:
    """Return when the server has noticed the end of a connection."""
    await until(lambda: raw.execute("SELECT count(*) FROM pg_stat_activity WHERE pid = %s", [pid]).fetchone() == (0,))


async def test_pool_reuses_the_last_returned_connection(pool):
    first = await pool.take()
    async with lent(pool) as second:
        assert second is not first
    await pool.give(first)
    async with lent(pool) as again:
        assert again is first
    await pool.close()


async def test_connection_idle_for_too_long_is_replaced(pool, raw):
    async with lent(pool) as connection:
        pid = await pid_of(connection)
    connection.rested -= MAX_IDLE + 10
    async with lent(pool) as other:
        assert await pid_of(other) != pid
    await gone(raw, pid)
    await pool.close()


async def test_connection_beyond_its_maximum_age_is_closed(pool, raw):
    async with lent(pool) as connection:
        pid = await pid_of(connection)
        connection.born -= MAX_AGE
    await gone(raw, pid)
    await pool.close()


async def test_suspect_connection_closes_idle_connections(pool, raw):
    idle = await pool.take()
    async with lent(pool) as suspect:
        pids = await pid_of(suspect), await pid_of(idle)
        await pool.give(idle)
        suspect.suspect = True
    for pid in pids:
        await gone(raw, pid)
    async with lent(pool) as fresh:
        assert await pid_of(fresh) not in pids
    await pool.close()


async def test_suspect_connection_closes_borrowed_connections_on_return(pool, raw):
    business = await pool.take()
    pid = await pid_of(business)
    async with lent(pool) as suspect:
        suspect.suspect = True
    await pool.give(business)
    await gone(raw, pid)
    await pool.close()


async def test_a_transaction_that_was_left_open_is_rolled_back(pool, raw):
    for begin in ("BEGIN", "BEGIN; SELECT 1 / 0"):
        connection = await pool.take()
        pid = await pid_of(connection)
        with pytest.raises(asyncpg.PostgresError) if "/" in begin else warnings.catch_warnings():
            await connection.execute(begin)
        await pool.give(connection)
        async with lent(pool) as same:
            assert await pid_of(same) == pid
            assert not same.is_in_transaction()
    await pool.close()


async def test_listeners_left_by_a_handler_are_removed(pool):
    heard = []
    connection = await pool.take()
    connection.add_log_listener(lambda _, said: heard.append(said.message))
    await connection.add_listener("news", lambda *said: heard.append(said))
    with pytest.warns(asyncpg.InterfaceWarning, match="active"):
        await pool.give(connection)
    async with lent(pool) as same:
        assert same is connection
        await same.execute("DO $$ BEGIN RAISE WARNING 'private'; RAISE INFO 'x' USING ERRCODE = 'OK001'; END $$")
        assert same.notice == "x"  # we still listen ourselves
        await same.execute("NOTIFY news, 'private'")
        assert heard == []
    await pool.close()


async def test_close_waits_for_borrowed_connections(pool):
    connection = await pool.take()
    closing = asyncio.create_task(pool.close())
    await asyncio.sleep(0)
    assert await pid_of(connection)
    assert not closing.done()
    await pool.give(connection)
    await closing
    assert connection.is_closed()
    with pytest.raises(StoreUnavailableError, match="closed"):
        await pool.take()


async def test_close_gives_up_after_its_timeout(pool):
    connection = await pool.take()
    pool._timeout = 0.05
    await pool.close()
    assert connection.is_closed()
    await pool.give(connection)


async def test_business_transactions_leave_connections_to_others(pool):
    business = await pool.take()
    assert pool.business.full
    pool._timeout = 0.05
    with pytest.raises(StoreBusyError):
        await pool.take()
    pool._timeout = PATIENCE
    async with lent(pool) as connection:
        assert await pid_of(connection)
    await pool.give(business)
    assert not pool.business.full
    await pool.close()


async def test_task_cancelled_while_connecting_releases_its_slot(dsn):
    pool = AsyncpgPool(PostgresAddress.parse(dsn), 1, 5.0, 100)
    task = asyncio.create_task(pool.take())
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await pool.give(await pool.take())
    await pool.close()


class TestWatch:
    """Deadlines of messages, as `asyncio.timeout` keeps them (R110)."""

    @staticmethod
    async def notice(watch: Watch, seconds: float) -> bool:
        """Wait for nothing; whether the deadline is what ended that."""
        wait = Wait(watch, seconds)
        try:
            await asyncio.get_running_loop().create_future()
        except asyncio.CancelledError:
            return wait.explains()
        finally:
            watch.waits.discard(wait)
        return False

    async def test_only_the_task_past_its_deadline_is_interrupted(self):
        watch = Watch()
        late = asyncio.create_task(self.notice(watch, 3600))
        await asyncio.sleep(0)
        soon = asyncio.create_task(self.notice(watch, 0))  # whose deadline is earlier, though it came later
        assert await soon
        assert soon.cancelling() == 0
        assert not late.done()
        late.cancel()
        assert not await late
        assert not watch.waits

    async def test_external_cancellation_wins_over_the_deadline(self):
        watch = Watch()
        task = asyncio.create_task(self.notice(watch, 3600))
        await asyncio.sleep(0)
        (wait,) = watch.waits
        wait.deadline = 0.0
        watch._look(asyncio.get_running_loop())
        task.cancel()
        assert wait.expired
        assert not await task

    async def test_watch_uses_one_timer_for_all_waits(self, monkeypatch):
        watch, loop, timers = Watch(), asyncio.get_running_loop(), []
        made = loop.call_at
        monkeypatch.setattr(loop, "call_at", lambda at, *rest: timers.append(at) or made(at, *rest))
        for _ in range(3):
            tasks = [asyncio.create_task(self.notice(watch, 3600)) for _ in range(3)]
            await asyncio.sleep(0)
            for task in tasks:
                task.cancel()
            assert not any(await asyncio.gather(*tasks))
        assert len(timers) == 1
