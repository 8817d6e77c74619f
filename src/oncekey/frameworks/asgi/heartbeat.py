"""The heartbeat: renews a lease at a third of its length, up to the deadline and not a moment longer (P5)."""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING

from oncekey.core.errors import StoreError
from oncekey.core.policy import micros

if TYPE_CHECKING:
    from oncekey.core.model import Lease
    from oncekey.core.policy import Policy
    from oncekey.engine.shell import AsyncEngine

log = logging.getLogger("oncekey")


class Heartbeat:
    """A timer of the event loop, not a task: most requests end before its first beat."""

    __slots__ = ("_engine", "_lease", "_loop", "_policy", "_stops_at", "_task", "_timer", "lost")

    def __init__(self, engine: AsyncEngine, lease: Lease, policy: Policy) -> None:
        self._engine = engine
        self._lease = lease
        self._policy = policy
        self._loop = asyncio.get_running_loop()
        self._stops_at = self._loop.time() + policy.deadline.total_seconds()
        self._task: asyncio.Task[None] | None = None
        self.lost = False
        self._timer: asyncio.TimerHandle | None = self._loop.call_later(policy.heartbeat.total_seconds(), self._beat)

    def stop(self) -> None:
        """No more beats. One that is under way may end; it can only renew what is still ours."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _beat(self) -> None:
        if self._loop.time() < self._stops_at:
            self._task = self._loop.create_task(self._renew())

    async def _renew(self) -> None:
        wait = self._policy.heartbeat.total_seconds()
        try:
            until = await self._engine.renew(self._lease, micros(self._policy.lease))
        except StoreError as error:
            wait /= 3  # the lease has two more beats of grace: use them
            log.warning("oncekey: a lease could not be renewed: %s", type(error).__name__)
        else:
            if until is None and self._timer is not None:  # after the end it is not lost, but settled
                self.lost = True
                log.warning("oncekey: a lease was lost while its handler was running")
                return
        if self._timer is not None:
            self._timer = self._loop.call_later(wait, self._beat)
