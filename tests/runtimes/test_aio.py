"""Flows under asyncio: what ends a process is an interruption like a cancellation."""

from __future__ import annotations

from typing import Any

import pytest

from oncekey.databases.memory import AsyncMemoryDriver
from oncekey.engine.actions import Call, Interrupted, Life, Sleep
from oncekey.engine.shell import AsyncEngine
from oncekey.runtimes.aio import AsyncRuntime, RunningWork
from oncekey.stores.memory import MemoryStore


async def test_what_ends_a_process_interrupts_a_flow() -> None:
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
