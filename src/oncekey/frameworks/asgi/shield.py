"""Work that must come to its end whoever cancels: settlements, and whatever a stop has to wait for."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import sys
from typing import TYPE_CHECKING, Any, TypeVar

from oncekey.core.errors import StoreError

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Coroutine

T = TypeVar("T")
log = logging.getLogger("oncekey")

FIRST_PAUSE = 0.1
LONGEST_PAUSE = 5.0


async def shielded(work: Coroutine[Any, Any, T]) -> T:
    """Run `work` to its end through any number of cancellations; the caller re-raises its own.

    A task alone survives `task.cancel()`, an anyio scope alone survives anyio's: it takes both. That is too dear
    for every request, so this is only for the second try, after a cancellation has arrived.
    """
    task = asyncio.ensure_future(work)
    with _anyio_shield():
        while not task.done():
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.shield(task)
    return task.result()


def _anyio_shield() -> contextlib.AbstractContextManager[object]:
    # Where anyio was never imported, none of its scopes can exist.
    anyio = sys.modules.get("anyio")
    return anyio.CancelScope(shield=True) if anyio is not None else contextlib.nullcontext()


class Drain:
    """Counts operations under way, and runs errands: settlements that could not reach the store yet.

    An operation counts from its claim to its end: a server that stops cancels its handlers and does not wait, so
    their settlements may not even have begun when the stop is here.
    """

    def __init__(self) -> None:
        self._busy = 0
        self._idle: asyncio.Event | None = None  # made by whoever waits: an application may see several event loops
        self._errands: set[asyncio.Task[None]] = set()

    def began(self) -> None:
        """One operation more."""
        self._busy += 1

    def ended(self) -> None:
        """One operation less."""
        self._busy -= 1
        if self._busy == 0 and self._idle is not None:
            self._idle.set()

    def errand(self, work: Callable[[], Awaitable[object]], *, patience: float) -> None:
        """Repeat `work` until the store has answered, for at most `patience` seconds (P7)."""
        task = asyncio.get_running_loop().create_task(self._repeat(work, patience))
        self._errands.add(task)
        task.add_done_callback(self._errands.discard)

    async def wait(self, seconds: float) -> bool:
        """Wait for what is under way, at most `seconds`; whether everything came to its end."""
        try:
            async with asyncio.timeout(seconds):
                while self._busy:
                    self._idle = asyncio.Event()
                    await self._idle.wait()
                while self._errands:
                    await asyncio.wait(self._errands)
        except TimeoutError:
            log.error("oncekey: stopped with %d settlements not written; their leases will run out", self.pending)
            for errand in self._errands:
                errand.cancel()
            return False
        return True

    @property
    def pending(self) -> int:
        """How many operations and errands are under way."""
        return self._busy + len(self._errands)

    @staticmethod
    async def _repeat(work: Callable[[], Awaitable[object]], patience: float) -> None:
        pause, ends = FIRST_PAUSE, asyncio.get_running_loop().time() + patience
        while asyncio.get_running_loop().time() < ends:
            try:
                await work()
            except StoreError:
                await asyncio.sleep(pause)
                pause = min(pause * 2, LONGEST_PAUSE)
            except Exception as error:  # noqa: BLE001  (nobody else would ever hear of it)
                log.error("oncekey: a settlement failed and is not tried again: %s", type(error).__name__)
                return
            else:
                return
        log.error("oncekey: a settlement could not be written; its lease runs out")
