"""The one writer that an event loop has for a SQLite file: a turn to wait for, and a thread to write in.

A raw SQLite connection on the event loop would block it, and with it the writer that everybody waits for. Here
waiting is awaiting, and the thread belongs to whoever has the turn, so the holder can always go on.
"""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor

from oncekey.core.errors import StoreBusyError

_lanes: dict[tuple[asyncio.AbstractEventLoop, str], Lane] = {}


class Lane:
    """The turn and the thread."""

    def __init__(self) -> None:
        self.thread = ThreadPoolExecutor(1, thread_name_prefix="oncekey-write")
        self._turn = asyncio.Lock()

    @property
    def taken(self) -> bool:
        """Whether whoever comes now has to wait."""
        return self._turn.locked()

    async def enter(self, patience: float) -> None:
        """Wait for the turn, but not for ever."""
        try:
            async with asyncio.timeout(patience):
                await self._turn.acquire()
        except TimeoutError:
            raise StoreBusyError("another writer held the SQLite file for too long") from None

    def leave(self) -> None:
        """Let the next one have it; called in the event loop."""
        self._turn.release()


def lane_of(path: str) -> Lane:
    """The lane of the running event loop for a file, by its real path; all drivers of that file share it."""
    at = (asyncio.get_running_loop(), path)
    lane = _lanes.get(at)
    if lane is None:
        _forget_closed_loops()
        lane = _lanes[at] = Lane()
    return lane


def _forget_closed_loops() -> None:
    for at in [at for at in list(_lanes) if at[0].is_closed()]:
        _lanes.pop(at).thread.shutdown(wait=False)
