"""Acknowledgements in batches: one statement for many messages, and nobody goes on before his was written."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Final
from uuid import UUID

from oncekey.core.errors import StoreError

if TYPE_CHECKING:
    from oncekey.core.model import HeldParcel
    from oncekey.workers.calling import Sleep

MOST: Final = 100
SOONEST: Final = 0.05
"""Seconds that a message waits for others to be acknowledged with."""


class Acks:
    """Collects what was delivered; flushed when there is enough, after a moment, or when it is told to."""

    def __init__(
        self, send: Callable[[tuple[HeldParcel, ...]], Awaitable[frozenset[UUID]]], sleep: Sleep, most: int = MOST
    ) -> None:
        self._send = send
        self._sleep = sleep
        self._most = most
        self._waiting: list[tuple[HeldParcel, asyncio.Future[bool]]] = []
        self._timer: asyncio.Task[None] | None = None
        self._closing = False

    async def add(self, held: HeldParcel) -> bool:
        """Wait until it is acknowledged. False: another worker has it."""
        told: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        self._waiting.append((held, told))
        if self._closing or len(self._waiting) >= self._most:
            await self.flush()
        elif self._timer is None:
            self._timer = asyncio.create_task(self._later(), name="oncekey-acks")
        return await told

    async def close(self) -> None:
        """From now on everything is written at once."""
        self._closing = True
        await self.flush()

    async def flush(self) -> None:
        """Write what is waiting; whoever waits is told, also of an outage."""
        batch, self._waiting = self._waiting, []
        if not batch:
            return
        try:
            done = await self._send(tuple(held for held, _ in batch))
        except StoreError as error:
            for _, told in batch:
                if not told.done():
                    told.set_exception(error)
            return
        for held, told in batch:
            if not told.done():
                told.set_result(held.parcel.id in done)

    async def _later(self) -> None:
        try:
            await self._sleep(SOONEST)
        finally:
            self._timer = None
        await self.flush()
