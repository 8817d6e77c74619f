"""Repeats that come together: read together, each by a statement that was sent after it had asked."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from oncekey.core.errors import StoreUnavailableError
from oncekey.core.flow import Transaction, drive
from oncekey.core.model import Glimpse, Lease, RecordId
from oncekey.databases.memory import MemoryDriver
from oncekey.engine import request
from oncekey.runtimes import aio
from oncekey.runtimes.aio import AT_ONCE, MOST, Recaller
from oncekey.stores.memory import MemoryStore
from oncekey.testing.claims import a_claim, answered


class Server:
    """A store whose answers are held back, one transaction at a time, until the test lets them go."""

    def __init__(self) -> None:
        self.store, self.driver = MemoryStore(), MemoryDriver()
        self.said: list[str] = []
        self.held: list[asyncio.Future[None]] = []
        self.recaller = Recaller(self.store, self.run)

    async def run(self, transaction: Transaction[Any]) -> Any:
        self.said.append(transaction.name)
        gate = asyncio.get_running_loop().create_future()
        self.held.append(gate)
        await gate
        return self.driver.run(transaction)

    def stored(self, body: bytes) -> RecordId:
        """A key whose answer is stored."""
        claim = a_claim()
        record = drive(self.store.claim(claim), self.driver.run).record
        assert record is not None
        drive(request.settle(self.store, Lease.of(record), answered(body)), self.driver.run)
        return claim.id

    def ask(self, record_id: RecordId) -> asyncio.Task[Glimpse | None]:
        return asyncio.ensure_future(self.recaller.recall(record_id))

    async def asked(self, *record_ids: RecordId) -> list[asyncio.Task[Glimpse | None]]:
        """They have all asked, and nobody was answered."""
        tasks = [self.ask(one) for one in record_ids]
        await asyncio.sleep(0)
        return tasks

    async def let_go(self, error: BaseException | None = None) -> None:
        """The answers that are held back now, and what follows from them."""
        held, self.held = self.held, []
        for gate in held:
            if not gate.done():
                gate.set_result(None) if error is None else gate.set_exception(error)
        for _ in range(5):
            await asyncio.sleep(0)


@asynccontextmanager
async def crowd(server: Server) -> AsyncIterator[list[asyncio.Task[Glimpse | None]]]:
    """As many reads under way as there may be at a time."""
    yield await server.asked(*[server.stored(b"first") for _ in range(AT_ONCE)])


def body_of(task: asyncio.Task[Glimpse | None]) -> bytes | None:
    glimpse = task.result()
    assert glimpse is not None
    assert glimpse.finished.response is not None
    return glimpse.finished.response.body


async def test_single_repeat_is_read_at_once() -> None:
    server = Server()
    (task,) = await server.asked(server.stored(b"alone"))
    assert server.said == ["recall"]
    await server.let_go()
    assert body_of(task) == b"alone"


async def test_concurrent_repeats_are_read_by_one_statement() -> None:
    server = Server()
    async with crowd(server) as first:
        others = [server.stored(b"%d" % number) for number in range(5)]
        missing = RecordId("shop|tenant-1", "nobody-used-this-one")
        later = await server.asked(*others, others[0], missing)
        assert server.said == ["recall"] * AT_ONCE
        await server.let_go()
        assert [body_of(task) for task in first] == [b"first"] * AT_ONCE
        assert server.said == ["recall"] * AT_ONCE + ["recall_all"]
        assert not any(task.done() for task in later)
        await server.let_go()
    assert [body_of(task) for task in later[:-1]] == [b"0", b"1", b"2", b"3", b"4", b"0"]
    assert later[-1].result() is None


async def test_repeat_behind_many_cancelled_ones_is_read() -> None:
    server = Server()
    async with crowd(server):
        gone = await server.asked(*[server.stored(b"gone")] * (AT_ONCE * MOST))
        (task,) = await server.asked(server.stored(b"patient"))
        for one in gone:
            one.cancel()
        await server.let_go()
        await server.let_go()
    assert body_of(task) == b"patient"


async def test_batched_read_sees_rows_stored_before_the_request() -> None:
    """The statement for those who wait is sent after they have asked, never the one that is under way."""
    server = Server()
    async with crowd(server):
        (task,) = await server.asked(server.stored(b"stored a moment ago"))
        await server.let_go()
        await server.let_go()
    assert body_of(task) == b"stored a moment ago"


async def test_cancelled_repeat_does_not_affect_the_others() -> None:
    server = Server()
    async with crowd(server) as first:
        waiting = await server.asked(*[server.stored(b"%d" % number) for number in range(3)])
        first[0].cancel()  # who reads for itself is as free to go
        waiting[0].cancel()
        await server.let_go()
        waiting[1].cancel()
        await server.let_go()
        await server.let_go()
    assert body_of(waiting[2]) == b"2"
    assert [task.cancelled() for task in (first[0], *waiting)] == [True, True, True, False]
    (task,) = await server.asked(server.stored(b"after"))
    await server.let_go()
    assert body_of(task) == b"after"


async def test_batch_of_cancelled_repeats_is_not_read() -> None:
    server = Server()
    async with crowd(server):
        for task in await server.asked(server.stored(b"a"), server.stored(b"b")):
            task.cancel()
        await server.let_go()
    assert server.said == ["recall"] * AT_ONCE
    assert server.held == []


async def test_outage_fails_the_batch_but_not_later_reads() -> None:
    server = Server()
    async with crowd(server):
        waiting = await server.asked(server.stored(b"a"), server.stored(b"b"))
        await server.let_go()
        await server.let_go(StoreUnavailableError("down"))
    for task in waiting:
        assert isinstance(task.exception(), StoreUnavailableError)
    (task,) = await server.asked(server.stored(b"after"))
    await server.let_go()
    assert body_of(task) == b"after"


async def test_unreadable_record_does_not_fail_its_batch() -> None:
    server = Server()
    async with crowd(server):
        spoilt, whole = server.stored(b"spoilt"), server.stored(b"whole")
        server.driver.table[spoilt.scope, spoilt.key]["response_schema"] = 9
        waiting = await server.asked(spoilt, whole)
        await server.let_go()
        await server.let_go()
    assert waiting[0].result() is None
    assert body_of(waiting[1]) == b"whole"


async def test_batch_size_is_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(aio, "MOST", 2)
    server = Server()
    async with crowd(server):
        waiting = await server.asked(*[server.stored(b"%d" % number) for number in range(5)])
        for _ in range(3):
            await server.let_go()
        assert server.said.count("recall_all") == 3
    assert [body_of(task) for task in waiting] == [b"0", b"1", b"2", b"3", b"4"]
