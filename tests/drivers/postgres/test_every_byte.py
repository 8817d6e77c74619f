"""BEGIN and COMMIT, cut and cancelled at every single byte, as a client sees it (R264, F12, F20, P7, L8).

Each try is a whole request over HTTP on a real server. After so many bytes of one of its messages, or of the answer to
it, the connection ends or the request is cancelled; then the client comes again with its key. Whatever byte it was,
the row is there once, both requests were told the same, none was told "not accepted" of what was accepted, and neither
a lock nor a transaction is left.

No message has to be measured before: a stride is over where the message is. Half an answer is tried at each byte; of
half a message the server executes nothing, so that some of its bytes stand for all.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from functools import partial
from typing import Any

import psycopg
import pytest

from frameworks.realshop import PostgresDatabase, RealShop
from frameworks.shop import new_key
from harness.asgi import Reply, cancelled_at, until
from harness.cutting import CuttingProxy, Side
from harness.databases import DatabaseServer
from harness.dsn import through
from harness.patience import PATIENCE
from harness.tables import database_with_tables
from oncekey.core.answers import Answer
from oncekey.core.model import LOCAL, PHASED, UNAVAILABLE, MemoEntry
from oncekey.engine import settle, steps
from oncekey.engine.actions import Life, Rollback
from oncekey.engine.deciding import refused
from oncekey.engine.operation import Operation
from oncekey.engine.phases import PhasedRun
from oncekey.engine.run import Run

STRIDES = 2
PART = 13
"""A server executes nothing of a message that has not come as a whole, so some of its bytes stand for all."""
MESSAGES = 3
PACKAGES = ("asyncpg", "psycopg")
ORDERS, STEPS = "/orders", "/steps"
ENTER, SEAL, KEEP = b"oncekey.enter", b"oncekey.seal", b"oncekey.keep"
SHORTEST = {
    (ENTER, Side.CLIENT): 200,
    (ENTER, Side.SERVER): 40,
    (SEAL, Side.CLIENT): 700,
    (SEAL, Side.SERVER): 200,
    (KEEP, Side.CLIENT): 400,
    (KEEP, Side.SERVER): 200,
}
"""So many bytes, and more, a message or an answer has: less would mean that something else was cut."""

FOUND = """
    SELECT (SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND pid <> pg_backend_pid()
                AND (state <> 'idle' OR xact_start IS NOT NULL)),
           (SELECT count(*) FROM pg_locks WHERE locktype = 'advisory'
                AND database = (SELECT oid FROM pg_database WHERE datname = current_database())),
           (SELECT count(*) FROM orders WHERE item = %s), (SELECT count(*) FROM oncekey.record WHERE key = %s)
"""


class Trial:
    """A shop behind a relay, and one request after the other that something happens to."""

    def __init__(self, shop: RealShop, proxy: CuttingProxy, raw: psycopg.Connection[Any], path: str) -> None:
        self.shop, self.proxy, self.raw, self.path = shop, proxy, raw, path

    async def cut(self, message: bytes, side: Side, after: int) -> bool:
        """End the connection there; whether that message has so many bytes."""
        key, item = new_key(), uuid.uuid4().hex
        stop = self._armed(message, side, after, ends=True)
        first = await self.shop.send(f"{self.path}?item={item}", key=key)
        await self._judge(key, item, first)
        return stop.happened.is_set()

    async def cancel(self, message: bytes, side: Side, after: int) -> bool:
        """Cancel the request's task while a message, or the answer, has come so far."""
        key, item = new_key(), uuid.uuid4().hex
        stop = self._armed(message, side, after, ends=False)
        caller = self.shop.caller(f"{self.path}?item={item}", key=key)
        task = asyncio.create_task(caller.run())
        await until(lambda: stop.happened.is_set() or task.done())
        task.cancel()
        stop.let_go.set()
        with contextlib.suppress(asyncio.CancelledError):
            await task
        await self._judge(key, item, caller.reply if caller.answered else None)
        return stop.happened.is_set()

    async def cancel_at(self, number: int) -> bool:
        """Cancel the request's task when it waits for the n-th time; whether it ever waits so often."""
        key, item = new_key(), uuid.uuid4().hex
        caller = self.shop.caller(f"{self.path}?item={item}", key=key)
        ended = await cancelled_at(number, caller.run())
        await self._judge(key, item, caller.reply if caller.answered else None)
        return ended is None

    def _armed(self, message: bytes, side: Side, after: int, *, ends: bool) -> Any:
        self.proxy.count()
        return self.proxy.stop(message, side, after, ends=ends)

    async def _judge(self, key: str, item: str, first: Reply | None) -> None:
        rows = await self._found(key, item)
        done = first is not None and first.status == 201
        if done:
            assert rows == 1, "it was said to be done"
        if first is not None and first.code == "idempotency_store_unavailable":
            assert rows == 0, "it was said not to be accepted"
        again = await self.shop.send(f"{self.path}?item={item}", key=key)
        # Who takes steps is not done with the row, but goes on with it.
        assert (again.status, again.replayed) == (201, done if self.path == STEPS else rows == 1), again
        assert not done or again.body == first.body, "two answers to one key"
        assert await self._found(key, item) == 1

    async def _found(self, key: str, item: str) -> int:
        """How many rows there are once everybody is at rest: a server takes a moment to see that a client is gone."""
        deadline = time.monotonic() + PATIENCE
        while (found := self.raw.execute(FOUND, [item, key]).fetchone()) is None or found[:2] != (0, 0):
            assert time.monotonic() < deadline, f"a transaction or a lock is left: {found}"
            await asyncio.sleep(0.001)
        _, _, rows, records = found
        assert rows <= records <= 1, "no rows without a record"
        assert rows == records or self.path == STEPS, "rows and record together, once, or neither"
        return int(rows)


@pytest.fixture(params=PACKAGES)
def package(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def prepared(postgres_server: DatabaseServer) -> Iterator[str]:
    """One database for all of them."""
    with database_with_tables(postgres_server, "bytes") as dsn:
        PostgresDatabase(dsn, PACKAGES[0])
        yield dsn


@contextlib.asynccontextmanager
async def trial(package: str, dsn: str, path: str = ORDERS) -> AsyncIterator[Trial]:
    """A shop whose answer differs from run to run."""
    with CuttingProxy.before(dsn) as proxy, psycopg.connect(dsn, autocommit=True) as raw:
        database = PostgresDatabase.__new__(PostgresDatabase)
        database.dsn, database.package = dsn, package
        database.url = f"{through(dsn, proxy.port).replace('postgresql://', f'postgresql+{package}://')}?pool_size=2"
        shop = RealShop(database)

        @shop.app.post(ORDERS, status_code=201)
        @shop.once.protect(effects=LOCAL)
        async def create(op: Operation, item: str) -> dict[str, str]:
            await database.insert(op.connection, item)
            return {"run": uuid.uuid4().hex}

        @shop.app.post(STEPS, status_code=201)
        @shop.once.protect(effects=PHASED)
        async def stepwise(op: Operation, item: str) -> dict[str, str]:
            async def write(tx: Any) -> str:
                await database.insert(tx, item)
                return uuid.uuid4().hex

            return {"run": await op.phase("written", write)}

        async with shop.open():
            yield Trial(shop, proxy, raw, path)


async def each_byte(attempt: Callable[[int], Awaitable[bool]], start: int, stride: int = STRIDES) -> int:
    """Try every byte of a stride until there is none; the last one."""
    after, missed = start, 0
    # One number in a message may have a few digits less than in the next one.
    while missed < 4:
        missed = 0 if await attempt(after) else missed + 1
        after += stride
    return after - stride * missed


@pytest.mark.parametrize("message", [ENTER, SEAL], ids=bytes.decode)
async def test_the_connection_ends_after_any_byte_of_a_message(package: str, message: bytes, prepared: str) -> None:
    # Both packages send the same, and do not know how far it came.
    async with trial(package, prepared) as tried:
        last = await each_byte(partial(tried.cut, message, Side.CLIENT), PACKAGES.index(package), PART)
    assert last > SHORTEST[message, Side.CLIENT]


async def test_both_drivers_send_identical_messages(prepared: str) -> None:
    said: dict[str, list[bytes]] = {}
    for package in PACKAGES:
        async with trial(package, prepared) as tried:
            for _ in range(2):
                tried.proxy.count()
                assert (await tried.shop.send(f"/orders?item={uuid.uuid4().hex}", key=new_key())).status == 201
            # But for its length in front, and the values in it.
            said[package] = [
                re.sub(rb"[0-9a-f-]+", b"", one[5:]) for one, _ in tried.proxy.messages if ENTER in one or SEAL in one
            ]
    assert len(said[PACKAGES[0]]) == 2
    assert said[PACKAGES[0]] == said[PACKAGES[1]]


@pytest.mark.parametrize("message", [ENTER, SEAL], ids=bytes.decode)
async def test_connection_lost_after_each_byte_of_the_reply(package: str, message: bytes, prepared: str) -> None:
    # What half an answer means is found out by the engine, so that each package cuts at every second byte.
    async with trial(package, prepared) as tried:
        last = await each_byte(partial(tried.cut, message, Side.SERVER), PACKAGES.index(package))
    assert last > SHORTEST[message, Side.SERVER]


@pytest.mark.parametrize("message", [ENTER, SEAL], ids=bytes.decode)
async def test_task_cancelled_after_each_byte_of_the_reply(package: str, message: bytes, prepared: str) -> None:
    # How far a message came, its sender does not know: for cancellations the edges in test_folding_faults are enough.
    # A task that is cancelled has not looked at half an answer, so that each package stops at every second byte.
    async with trial(package, prepared) as tried:
        last = await each_byte(partial(tried.cancel, message, Side.SERVER), PACKAGES.index(package))
    assert last > SHORTEST[message, Side.SERVER]


async def test_the_task_is_cancelled_wherever_it_waits(package: str, prepared: str) -> None:
    async with trial(package, prepared) as tried:
        number = 1
        while await tried.cancel_at(number):
            number += 1
    assert number > MESSAGES


async def test_connection_lost_after_each_byte_of_a_phase_commit_reply(package: str, prepared: str) -> None:
    # What an answer means is found out by the engine, so that each package cuts at every second byte.
    async with trial(package, prepared, STEPS) as tried:
        last = await each_byte(partial(tried.cut, KEEP, Side.SERVER), PACKAGES.index(package))
    assert last > SHORTEST[KEEP, Side.SERVER]


async def test_a_phase_is_cut_or_cancelled_within_its_commit(package: str, prepared: str) -> None:
    async with trial(package, prepared, STEPS) as tried:
        last = await each_byte(partial(tried.cut, KEEP, Side.CLIENT), PACKAGES.index(package), PART)
        assert last > SHORTEST[KEEP, Side.CLIENT]
        last = await each_byte(partial(tried.cancel, KEEP, Side.SERVER), PACKAGES.index(package), PART)
        assert last > SHORTEST[KEEP, Side.SERVER]


def taken_for_done(run: Run) -> Life[Answer | None]:
    return None
    yield from ()


def taken_for_undone(run: Run) -> Life[Answer | None]:
    return refused(run, UNAVAILABLE)
    yield from ()


@pytest.mark.parametrize(
    "mutant",
    [(taken_for_done, Side.CLIENT, "said to be done"), (taken_for_undone, Side.SERVER, "said not to be accepted")],
    ids=["done", "undone"],
)
async def test_skipping_the_lost_commit_check_is_detected(
    package: str, mutant: tuple[Any, Side, str], prepared: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    concludes, side, noticed = mutant
    monkeypatch.setattr(settle, "_lost_commit", concludes)
    async with trial(package, prepared) as tried:
        with pytest.raises(AssertionError, match=noticed):
            await tried.cut(SEAL, side, 100)


def taken_for_kept(_store: Any, phased_run: PhasedRun, tx: Any, memo: tuple[MemoEntry, ...]) -> Life[bool]:
    yield Rollback(tx)
    phased_run.written(memo, None)
    return True


async def test_skipping_the_lost_phase_check_is_detected(
    package: str, prepared: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(steps, "_found_out", taken_for_kept)
    async with trial(package, prepared, STEPS) as tried:
        with pytest.raises(AssertionError, match="said to be done"):
            await tried.cut(KEEP, Side.CLIENT, 100)
