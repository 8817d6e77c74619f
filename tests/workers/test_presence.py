"""Workers on the roll: seen while they run, gone when they stop, and the dead ones forgotten."""

from __future__ import annotations

import asyncio

import pytest

from oncekey import INLINE, PHASED, Once, Operation
from oncekey.core.errors import StoreUnavailableError
from oncekey.core.flow import adrive
from oncekey.core.model import SECOND
from oncekey.core.policy import Policy
from oncekey.ops.stats import Worker
from oncekey.wire import aconnect
from oncekey.workers.health import FORGOTTEN, Presence
from oncekey.workers.service import Service
from oncekey.workers.tasks import inline_calls_of
from oncekey.workers.upkeep import Reaper


@pytest.fixture(params=["memory", "sqlite", "postgres"])
def url(request, tmp_path):
    if request.param == "memory":
        return "memory:"
    return f"sqlite:///{tmp_path / 'shop.db'}" if request.param == "sqlite" else request.getfixturevalue("postgres_dsn")


async def roll(engine):
    return (await adrive(engine.store.upkeep.workers(), engine.driver.run)).workers


async def until_seen(engine, count):
    for _ in range(6000):
        if len(seen := await roll(engine)) == count:
            return seen
        await asyncio.sleep(0.01)
    raise AssertionError("nobody came")


async def test_in_process_workers_are_listed_while_they_run(url):
    once = Once(url, migrate=True, workers=True)
    async with once.lifespan():
        engine = once.asynchronous()
        (seen,) = await until_seen(engine, 1)
        assert seen.tasks == ("sweeper", "reaper")
        assert seen.is_alive(seen.seen_at + 3 * seen.every)
        assert not seen.is_alive(seen.seen_at + 3 * seen.every + 1)
        assert seen.is_alive(seen.seen_at + 3 * seen.every + 1, silence=4 * seen.every)
    if url != "memory:":
        engine = aconnect(url)
        assert await roll(engine) == ()
        await engine.close()


async def test_a_pending_presence_beat_does_not_outlive_the_stop(url):
    engine = aconnect(url)
    await engine.migrate()
    here, go_on = asyncio.Event(), asyncio.Event()

    async def run(transaction):
        if transaction.name == "beat":
            here.set()
            await go_on.wait()
        return await engine.driver.run(transaction)

    presence = Presence(engine.store.upkeep, run, (), who="host:1:aa")
    beating = asyncio.create_task(presence.run_once())
    await here.wait()
    stopping = asyncio.create_task(presence.stop(0))
    await asyncio.sleep(0)
    go_on.set()
    await asyncio.gather(beating, stopping)

    assert await roll(engine) == ()
    await presence.run_once()
    assert await roll(engine) == ()
    await engine.close()


async def test_a_store_outage_does_not_block_stopping(caplog):
    async def run(transaction):
        raise StoreUnavailableError("gone")

    service = Service([], presence=Presence(aconnect("memory:").store.upkeep, run, ()))
    service.stop()
    await service.run()

    assert "the row stays" in caplog.text


async def test_two_workers_with_one_process_id_have_two_rows():
    # A container's process is number 1 on every host of the same name.
    engine = aconnect("memory:")
    for _ in range(2):
        await Presence(engine.store.upkeep, engine.driver.run, ()).run_once()
    assert len(await roll(engine)) == 2


async def test_the_reaper_deletes_workers_that_died_long_ago(url):
    engine = aconnect(url)
    await engine.migrate()
    await adrive(engine.store.upkeep.beat("dead", ("relay",), -FORGOTTEN), engine.driver.run)
    await adrive(engine.store.upkeep.beat("late", ("relay",), 0), engine.driver.run)
    reaper = Reaper(engine.store.upkeep, engine.store.audit, engine.driver.run, Policy())

    assert await reaper.run_once() == 0

    assert reaper.counts["workers"] == 1
    assert [one.name for one in await roll(engine)] == ["late"]
    await engine.close()


def test_a_worker_is_alive_for_three_beats():
    worker = Worker("host:1:aa", ("relay",), 0, 100 * SECOND, 15 * SECOND)
    assert worker.is_alive(145 * SECOND)
    assert not worker.is_alive(145 * SECOND + 1)


def test_inline_calls_are_read_from_the_handlers_source():
    # An operator looks for them at the provider by the keys that are made from these names.
    once = Once("memory:")

    @once.protect(effects=INLINE, operation="pay")
    async def pay(op: Operation) -> None:
        op.downstream_key("charge")
        op.downstream_key("receipt")
        op.downstream_key(f"computed-{op.attempt}")

    @once.protect(effects=PHASED)
    async def order(op: Operation) -> None:
        op.downstream_key("announced by its own call")

    @once.protect(effects=INLINE)
    async def silent(op: Operation) -> None:
        pass

    @once.resolver("elsewhere", call="ship")
    async def look(question: object) -> None: ...

    assert inline_calls_of(once) == {"elsewhere": ("ship",), "pay": ("charge", "receipt")}
    # Code that has no source.
    exec("async def made(op: Operation): op.downstream_key('charge')", namespace := {"Operation": Operation})
    once.protect(effects=INLINE)(namespace["made"])
    assert "made" not in inline_calls_of(once)
