"""Flows under asyncio: what ends a process is an interruption like a cancellation."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from oncekey.databases.memory import AsyncMemoryDriver
from oncekey.engine.actions import Call, Interrupted, Life, Rollback, Sleep
from oncekey.engine.shell import AsyncEngine
from oncekey.runtimes.aio import AsyncRuntime, RunningWork
from oncekey.stores.memory import MemoryStore


async def test_system_exit_interrupts_a_flow() -> None:
    tidied: list[str] = []

    def leaves() -> Any:
        raise SystemExit("the application's own")

    def life() -> Life[None]:
        try:
            yield Call(leaves)
        except Interrupted:
            yield Sleep(0)
            tidied.append("up")
            raise

    flow = life()
    with pytest.raises(SystemExit, match="own"):
        await AsyncRuntime(AsyncEngine(MemoryStore(), AsyncMemoryDriver()), RunningWork()).drive(flow)
    assert tidied == ["up"]
    assert flow.gi_frame is None


class Slow:
    """A transaction whose roll-back is answered when the test says so."""

    def __init__(self) -> None:
        self.answered = asyncio.Event()
        self.ended = False

    async def rollback(self) -> None:
        await self.answered.wait()
        self.ended = True


class Left(Slow):
    """The same of a driver that need not wait for the answer."""

    def leave(self) -> None:
        self.ended = True


def rolled_back(tx: Slow) -> Life[str]:
    yield Rollback(tx, wait=False)
    return "answer"


async def test_response_does_not_wait_for_rollback_but_shutdown_does() -> None:
    work, tx = RunningWork(), Slow()
    runtime = AsyncRuntime(AsyncEngine(MemoryStore(), AsyncMemoryDriver()), work)
    assert await runtime.drive(rolled_back(tx)) == "answer"
    assert not tx.ended
    stop = asyncio.ensure_future(work.wait(10))
    await asyncio.sleep(0)
    tx.answered.set()
    assert await stop
    assert tx.ended


async def test_rollback_continues_after_its_request_is_cancelled() -> None:
    work, tx = RunningWork(), Slow()
    runtime = AsyncRuntime(AsyncEngine(MemoryStore(), AsyncMemoryDriver()), work)

    async def request() -> None:
        await runtime.drive(rolled_back(tx))
        await asyncio.Event().wait()

    task = asyncio.ensure_future(request())
    await asyncio.sleep(0)
    task.cancel()
    await asyncio.wait([task])
    tx.answered.set()
    assert await work.wait(10)
    assert tx.ended


async def test_rollback_that_needs_no_wait_is_not_awaited() -> None:
    work, tx = RunningWork(), Left()
    runtime = AsyncRuntime(AsyncEngine(MemoryStore(), AsyncMemoryDriver()), work)
    assert await runtime.drive(rolled_back(tx)) == "answer"
    assert tx.ended
    assert work.pending == 0
