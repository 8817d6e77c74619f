"""The demo's workers, in its own process: what `oncekey worker` does for an application that is larger than this."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Final

from oncekey.workers.completer import Completer
from oncekey.workers.service import Pace, Service
from oncekey.workers.tasks import tasks_for

if TYPE_CHECKING:
    from oncekey.once import Once

GRACE_SECONDS: Final = 5.0


@asynccontextmanager
async def housework(once: Once) -> AsyncIterator[None]:
    """Work as long as the application serves."""
    tasks = tasks_for(once)
    if all(task.name != Completer.name for task in tasks):
        tasks.append(Completing(once))
    service = Service(tasks, grace=GRACE_SECONDS)
    working = asyncio.create_task(service.run())
    try:
        yield
    finally:
        service.stop()
        await working


class Completing:
    """The completer as a task of the service: each look waits for what it found."""

    name: Final = Completer.name

    def __init__(self, once: Once) -> None:
        self.pace = Pace(longest=once.policy.complete_interval.total_seconds())
        self._ending = False
        self._completer = Completer(once, stopping=lambda: self._ending)

    async def run_once(self) -> int:
        """Go on with what nobody does any more."""
        return await self._completer.run_once()

    async def drain(self) -> None:
        """Nothing is left to wait for after a look."""

    async def stop(self, grace: float) -> None:
        """Begin nothing more."""
        del grace
        self._ending = True
