"""The row that shows that this worker lives: written with every heartbeat, and deleted when the worker stops."""

from __future__ import annotations

import asyncio
import logging
import uuid
from types import MappingProxyType
from typing import TYPE_CHECKING, Final

from oncekey.core.errors import StoreError
from oncekey.core.model import SECOND
from oncekey.engine.notifying import notify_failure
from oncekey.flow import adrive
from oncekey.observe.events import Beat
from oncekey.workers.clocks import this_process
from oncekey.workers.service import Pace

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterable, Mapping

    from oncekey.flow import Transaction
    from oncekey.observe.events import Notify
    from oncekey.ports import Upkeep
    from oncekey.workers.service import Task

log = logging.getLogger("oncekey.worker")

EVERY: Final = 15.0
"""The longest time in seconds between two heartbeats."""
NO_CALLS: Final[Mapping[str, tuple[str, ...]]] = MappingProxyType({})
FORGOTTEN: Final = 24 * 3600 * SECOND
"""How long the row of a dead worker is kept, so that an operator can see that it died."""


class Presence:
    """A task that writes the heartbeat. It looks for no work, so it always finds none."""

    name: Final = "heartbeat"
    failed: Final = 0

    def __init__(
        self,
        store: Upkeep,
        run: Callable[[Transaction[object]], Awaitable[object]],
        tasks: Iterable[Task],
        *,
        calls: Mapping[str, tuple[str, ...]] = NO_CALLS,
        every: float = EVERY,
        who: str | None = None,
        notify: Notify | None = None,
    ) -> None:
        self.pace = Pace(shortest=every, longest=every)
        # A container's process has the same number after every start, so the name has a random part.
        self.who = who or f"{this_process()}:{uuid.uuid4().hex[:6]}"
        self._store = store
        self._run = run
        self._tasks = tuple(task.name for task in tasks)
        self._calls = calls
        self._notify = notify
        self._every = round(every * SECOND)
        self._stopped = False
        self._writing = asyncio.Lock()

    async def run_once(self) -> int:
        """Write one heartbeat."""
        async with self._writing:
            if not self._stopped:
                await adrive(self._store.beat(self.who, self._tasks, self._every, self._calls), self._run)
                self._tells(leaving=False)
        return 0

    async def shut_down(self) -> None:
        """Nothing to wait for: a heartbeat leaves nothing open."""

    async def stop(self, grace: float) -> None:  # noqa: ARG002  (one statement)
        """Remove the row, after a heartbeat that is under way; if the store does not answer, it stays for a day."""
        self._stopped = True
        async with self._writing:
            try:
                await adrive(self._store.leave(self.who), self._run)
            except StoreError as error:
                log.warning("heartbeat: the store did not answer (%s); the row stays", type(error).__name__)
                notify_failure(self._notify, self.name, error)
            else:
                self._tells(leaving=True)

    def _tells(self, *, leaving: bool) -> None:
        if self._notify is not None:
            self._notify(Beat(self.who, self._tasks, leaving))
