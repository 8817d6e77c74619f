"""A message with BEGIN or COMMIT, interrupted at every edge of the protocol: rows and record, or neither (P7)."""

from __future__ import annotations

import asyncio
from collections import Counter
from contextlib import suppress

import pytest

from drivers.postgres.drivers import ASYNC_PSYCOPG, ASYNCPG, ask, opened
from drivers.postgres.test_folding import insert, order, performed, sealed, there
from harness.asgi import until
from harness.cutting import CuttingProxy, Side, edges
from harness.dsn import through
from local.databases import lock_for
from oncekey.core.errors import CommitAmbiguousError, StoreError
from oncekey.databases.postgres.store import PostgresStore
from oncekey.testing.claims import a_claim

BEGINS, COMMITS = 0, 2
"""Which of the three messages of a request is interrupted."""

MOST = {Side.CLIENT: 4, Side.SERVER: 20}
"""So many frames, and more, a COMMIT's message and its answer have."""

BUSY = """
    SELECT count(*) FROM pg_stat_activity
    WHERE datname = current_database() AND pid <> pg_backend_pid() AND (state <> 'idle' OR xact_start IS NOT NULL)
"""
COMMITTED, UNKNOWN, NOT_COMMITTED, CANCELLED = "committed", "unknown", "not committed", "cancelled"


@pytest.fixture
def proxy(dsn):
    with CuttingProxy.before(dsn) as proxy:
        yield proxy


class Request:
    """One request, whose messages are counted."""

    def __init__(self, driver, proxy) -> None:
        self.driver, self.proxy = driver, proxy
        self.claim, self.item = a_claim(), order()

    async def run(self) -> str:
        locks = PostgresStore().locks
        try:
            tx, look = await self.driver.begin_with(locks.locking(lock_for(self.claim), self.claim))
            try:
                # A lost BEGIN is said again on another connection, and the server may still have the first one.
                if not look.got:
                    return NOT_COMMITTED
                await ask(tx, insert(self.item))
                return COMMITTED if await sealed(tx, look, self.claim) else NOT_COMMITTED
            finally:
                await tx.rollback()
        except CommitAmbiguousError:
            return UNKNOWN
        except StoreError:
            return NOT_COMMITTED

    async def judge(self, raw, outcome: str) -> int:
        """Rows and record together or not at all, nothing left open, and the next one goes through."""
        await until(lambda: raw.execute(BUSY).fetchone() == (0,))  # nobody is left in a transaction
        found = there(raw, self.claim, self.item)
        assert found in ((0, 0), (1, 1))
        if outcome in (COMMITTED, NOT_COMMITTED):
            assert (outcome == COMMITTED) == (found == (1, 1))
        return found[0]


async def ready(driver, proxy) -> None:
    """A connection that is there and said nothing yet that counts."""
    await (await driver.begin()).rollback()
    proxy.count()


async def sizes(driver, proxy, message: int, side: Side) -> list[int]:
    """Where the message of a whole request can be stopped."""
    await ready(driver, proxy)
    await performed(driver, a_claim(), order())
    sent, answer = proxy.messages[0 if message == BEGINS else -1]
    return list(edges(sent if side is Side.CLIENT else answer))


@pytest.fixture(params=[(message, side) for message in (BEGINS, COMMITS) for side in Side], ids=str)
def where(request):
    """Which message is interrupted, and whose part of it."""
    return request.param


async def test_connection_lost_at_each_protocol_boundary(kind, dsn, raw, proxy, where):
    message, side = where
    outcomes: Counter[tuple[str, int]] = Counter()
    async with opened(kind, through(dsn, proxy.port), pool_size=2) as driver:
        for after in await sizes(driver, proxy, message, side):
            await ready(driver, proxy)
            request = Request(driver, proxy)
            stop = proxy.stop(index(kind, message), side, after, ends=True)
            outcome = await request.run()
            found = await request.judge(raw, outcome)
            if stop.happened.is_set():
                outcomes[outcome, found] += 1
            else:
                assert outcome == COMMITTED  # a number of this request is shorter than one of the measured one
            assert await performed(driver, a_claim(), order())
    if message == COMMITS:
        assert {outcome for outcome, _ in outcomes} == {UNKNOWN}
        assert outcomes.total() > MOST[side], outcomes
        # A part of a text is nothing, and what is answered has arrived as a whole.
        assert not outcomes[UNKNOWN, 1 if side is Side.CLIENT else 0], outcomes
    else:
        assert UNKNOWN not in {outcome for outcome, _ in outcomes}, "nothing can be committed by a BEGIN"


@pytest.mark.parametrize("kind", [ASYNCPG, ASYNC_PSYCOPG])
async def test_task_cancelled_at_each_protocol_boundary(kind, dsn, raw, proxy, where):
    message, side = where
    async with opened(kind, through(dsn, proxy.port), pool_size=2) as driver:
        for after in await sizes(driver, proxy, message, side):
            await ready(driver, proxy)
            request = Request(driver, proxy)
            stop = proxy.stop(index(kind, message), side, after, ends=False)
            task = asyncio.create_task(request.run())
            task.add_done_callback(lambda _, at=stop: at.happened.set())
            await asyncio.to_thread(stop.happened.wait, 60)
            task.cancel()
            stop.let_go.set()
            outcome = CANCELLED
            with suppress(asyncio.CancelledError):
                outcome = await task
            await request.judge(raw, outcome)
            assert await performed(driver, a_claim(), order())


def index(kind: str, message: int) -> int:
    """asyncpg prepares a handler's statement in a message of its own, and executes it in another."""
    return message + 1 if kind == ASYNCPG and message == COMMITS else message
