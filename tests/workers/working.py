"""A shop whose worker's time is the test's: sleeps that end when the test says so, a clock that moves when it does."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from oncekey.core.policy import Policy
from oncekey.core.topics import Topics
from oncekey.engine.relay import lease_of
from oncekey.workers.relay import Relay
from outbox.sending import Post

POLICY = Policy()


@dataclass
class Sleeps:
    """What was slept. Naps of these lengths end at once, all others when the test ends them."""

    short: set[float] = field(default_factory=lambda: {0.05})
    asked: list[float] = field(default_factory=list)
    _ends: dict[float, asyncio.Event] = field(default_factory=dict)

    async def __call__(self, seconds: float) -> None:
        self.asked.append(seconds)
        if seconds in self.short:
            await asyncio.sleep(0)
            return
        await self._ends.setdefault(seconds, asyncio.Event()).wait()

    def end(self, seconds: float) -> None:
        """Let everybody who sleeps so long wake up, now and later."""
        self._ends.setdefault(seconds, asyncio.Event()).set()


class Shop(Post):
    """The test's view of a store, and workers on it."""

    def __init__(self, world: Any, driver: Callable[[], Any]) -> None:
        super().__init__(world)
        self.driver = driver
        self.topics = Topics()
        self.boottime = 0.0
        self.sleeps = Sleeps()

    @asynccontextmanager
    async def relay(self, *, policy: Policy = POLICY, run: Any = None, **options: Any) -> AsyncIterator[Relay]:
        """A worker's relay, stopped at the end."""
        driver = self.driver()
        given: dict[str, Any] = {"sleep": self.sleeps, "clock": lambda: self.boottime, "chance": lambda: 0.5}
        said = driver.run if run is None else lambda transaction: run(driver, transaction)
        relay = Relay(self.box, said, self.topics, policy, **{**given, **options})
        try:
            yield relay
            await relay.shut_down()
        finally:
            await relay.stop(3600)
            await driver.close()

    async def work(self, **options: Any) -> Relay:
        """Work off what is due now."""
        async with self.relay(**options) as relay:
            while await relay.run_once():
                await relay.shut_down()
        return relay

    def lease_passes(self, policy: Policy = POLICY) -> None:
        """Whoever held a parcel holds it no more."""
        self.world.advance(lease_of(policy))
