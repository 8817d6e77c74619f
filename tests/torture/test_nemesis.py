"""A fault is counted when it was injected, also if the run ends before the fault does."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from oncekey_demo.torture import nemesis
from oncekey_demo.torture.nemesis import Nemesis, Trouble


class SlowChild:
    """A process that does not start again before the run is over."""

    def __init__(self) -> None:
        self.paused, self.ready, self.alive = False, True, True
        self.struck, self.run_is_over = asyncio.Event(), asyncio.Event()

    async def kill(self) -> None:
        self.alive = self.ready = False
        self.struck.set()

    async def start(self) -> None:
        await self.run_is_over.wait()
        self.alive = True

    def pause(self) -> None:
        self.paused = True
        self.struck.set()

    def go_on(self) -> None:
        self.paused = False


@pytest.mark.parametrize("kind", [Trouble.KILL_SERVER, Trouble.PAUSE_SERVER])
async def test_a_fault_that_outlasts_the_run_is_counted(kind: Trouble, monkeypatch: pytest.MonkeyPatch) -> None:
    async def calm_provider(*_: Any, **__: Any) -> None: ...

    monkeypatch.setattr(nemesis, "ask", calm_provider)
    monkeypatch.setattr(nemesis, "BETWEEN", (0, 0))
    monkeypatch.setattr(nemesis, "WEIGHTS", {one: int(one is kind) for one in Trouble})
    child: Any = SlowChild()
    unseen = Nemesis(1, [child], [child], "http://127.0.0.1", [])
    running = asyncio.create_task(unseen.run())
    await child.struck.wait()
    running.cancel()
    child.run_is_over.set()
    await unseen.heal()
    assert unseen.done == {kind: 1}
    assert (child.alive, child.paused) == (True, False)
