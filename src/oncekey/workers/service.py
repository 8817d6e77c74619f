"""The service: runs each task in its own loop; busy tasks poll again at once, idle ones at growing intervals.

Before a task acts on a lease, a watch compares the store's clock with this host's clocks (A3, F41).
"""

from __future__ import annotations

import asyncio
import atexit
import logging
import os
import random
import socket
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from math import inf
from typing import TYPE_CHECKING, Final, Protocol

from oncekey.core.errors import StoreError
from oncekey.core.model import SECOND, Duration, Instant
from oncekey.core.topics import contained
from oncekey.core.upkeep import Trust
from oncekey.engine.notifying import notify_failure
from oncekey.runtimes import boottime
from oncekey.workers.calling import CANCELLED_WITHIN, Sleep, abandon

if TYPE_CHECKING:
    from oncekey.observe.events import Notify
    from oncekey.workers.health import Presence


log = logging.getLogger("oncekey.worker")

GRACE: Final = 30.0
"""Seconds that a stop waits for open calls."""
RESTART: Final = 1.0
"""Seconds until a task that ended is restarted."""


@dataclass(frozen=True, slots=True)
class Pace:
    """Seconds between rounds that find nothing: each pause is twice the last, up to the longest, with jitter."""

    shortest: float = 0.05
    longest: float = 2.0
    patience: float = inf
    """Seconds that a round may take; a task whose round takes longer is not ready."""

    @property
    def fixed(self) -> bool:
        """Whether the pause is fixed. Such a task is not woken, because it does not look for new commits."""
        return self.shortest == self.longest

    def pause(self, idle: int, chance: float) -> float:
        """The pause after that many rounds that found nothing; `chance` is a random number from 0 to 1."""
        envelope: float = min(self.longest, self.shortest * 2 ** min(idle, 30))
        return envelope * (0.5 + chance / 2)


class Task(Protocol):
    """A task that looks for work."""

    @property
    def name(self) -> str:
        """Its name in the log."""

    @property
    def pace(self) -> Pace:
        """How often it runs."""

    @property
    def about(self) -> str:
        """What it works on, for the worker's start-up output; empty for a task that works on all records."""

    @property
    def done(self) -> int:
        """How many of its items succeeded."""

    @property
    def failed(self) -> int:
        """How many of its items failed; the log has the details."""

    async def run_once(self) -> int:
        """Run one round: look for work, and start it; returns how many items were found."""

    async def shut_down(self) -> None:
        """Wait for everything that was started."""

    async def stop(self, grace: float) -> None:
        """Start nothing more, release what has not started, and wait for the rest up to `grace` seconds."""


@dataclass(slots=True)
class TaskHealth:
    """The rounds of a task: when the last successful one ended, and the error since then."""

    patience: float
    good_at: float | None = None
    failed: str | None = None
    began: float | None = None
    """When the current round began."""

    @property
    def wrong(self) -> str | None:
        """The problem: the last round failed, or the current one takes too long."""
        taken = 0.0 if self.began is None else boottime() - self.began
        return f"a round has taken {taken:.0f} s" if taken > self.patience else self.failed


@dataclass(frozen=True, slots=True)
class Done:
    """The result of `once`, until nothing was due."""

    done: int
    """Items that succeeded."""
    failed: int
    """Calls, messages, requests and rounds that failed."""


class Service:
    """Runs tasks until it is stopped. Time, chance and sleep are parameters, so that tests control them."""

    def __init__(
        self,
        tasks: Iterable[Task],
        *,
        presence: Presence | None = None,
        grace: float = GRACE,
        sleep: Sleep = asyncio.sleep,
        chance: Callable[[], float] = random.random,
        notify: Notify | None = None,
    ) -> None:
        self.tasks = tuple(tasks)
        # Only a service that runs until it is stopped writes heartbeats; a single run ends too soon.
        self._looking: tuple[Task, ...] = self.tasks if presence is None else (*self.tasks, presence)
        if presence is not None:
            presence.troubles = self.troubles
        self._grace = grace
        self._sleep = sleep
        self._chance = chance
        self._notify = notify
        self._stopping = asyncio.Event()
        self._wakes: dict[Task, asyncio.Event] = {}
        self.looks = {task.name: TaskHealth(task.pace.patience) for task in self._looking}
        self._loop: asyncio.AbstractEventLoop | None = None

    async def run(self) -> None:
        """Run until `stop`; then drain."""
        self._loop = asyncio.get_running_loop()
        loops = [asyncio.create_task(self._keep_alive(task), name=f"oncekey-{task.name}") for task in self._looking]
        try:
            await self._stopping.wait()
        finally:
            await self._end(loops)

    async def _end(self, loops: list[asyncio.Task[None]]) -> None:
        # Concurrently: a loop may be waiting for a slot that its own task's stop frees.
        stops = [asyncio.create_task(task.stop(self._grace), name=f"oncekey-{task.name}") for task in self._looking]
        if not stops:
            return
        ending = asyncio.ensure_future(asyncio.wait({*stops, *loops}))
        # A task takes a little longer than the grace period: it then cancels what is still open.
        timer = asyncio.ensure_future(self._sleep(self._grace + 2 * CANCELLED_WITHIN))
        await asyncio.wait({ending, timer}, return_when=asyncio.FIRST_COMPLETED)
        timer.cancel()
        ending.cancel()
        for task in stops:
            if task.done() and not task.cancelled() and (error := task.exception()) is not None:
                log.error("%s: failed with %s while stopping", task.get_name(), type(error).__name__)
        late = sorted({task.get_name() for task in (*stops, *loops) if not task.done()})
        if late:
            log.warning("stopped without waiting any longer for %s", ", ".join(late))
        await abandon((*stops, *loops))

    async def once(self) -> Done:
        """Run until nothing is due, and stop; one task's results may be work for another."""
        errors = 0
        found = True
        while found:
            found = False
            for task in self.tasks:
                while await self._look(task):
                    found = True
                    await task.shut_down()
            errors += sum(look.wrong is not None for look in self.looks.values())
            found = found and not errors  # a task whose round fails finds nothing, however often it runs
        for task in self.tasks:
            await task.stop(self._grace)
        return Done(sum(task.done for task in self.tasks), sum(task.failed for task in self.tasks) + errors)

    def stop(self) -> None:
        """Begin the shutdown; `run` returns when it is complete. For signal handlers of the event loop."""
        self._stopping.set()
        self._rouse()

    def wake(self) -> None:
        """Poll now: something was committed. May be called from any thread; a no-op when nothing runs."""
        if self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._rouse)

    def _rouse(self) -> None:
        for task, wake in self._wakes.items():
            if self._stopping.is_set() or not task.pace.fixed:
                wake.set()

    async def _keep_alive(self, task: Task) -> None:
        """Run a task's loop until the stop. A loop that ends earlier is an error, and is restarted after a pause."""
        wake = self._wakes[task] = asyncio.Event()
        while not self._stopping.is_set():
            try:
                await self._keep_looking(task, wake)
            except BaseException as raised:  # noqa: BLE001  (no caller would see it: logged here)
                error = contained(raised)
                look = self.looks[task.name]
                look.began, look.failed = None, f"ended with {error}"
                # Only the class is logged: an error's text may contain client data.
                log.error("%s: ended with %s; restarting it", task.name, type(raised).__name__)
                await self._pause(wake, RESTART)

    async def _keep_looking(self, task: Task, wake: asyncio.Event) -> None:
        idle = 0
        while not self._stopping.is_set():
            # Cleared before the round: a commit during the round needs another one.
            wake.clear()
            if await self._look(task):
                idle = 0
                await asyncio.sleep(0)
                continue
            await self._pause(wake, task.pace.pause(idle, self._chance()))
            idle = 0 if wake.is_set() else idle + 1

    async def _look(self, task: Task) -> int:
        look = self.looks[task.name]
        look.began = boottime()
        try:
            did = await task.run_once()
        except StoreError as error:
            look.failed = type(error).__name__
            log.warning("%s: the store did not respond (%s)", task.name, error.reason)
            notify_failure(self._notify, task.name, error)
        except Exception as error:  # noqa: BLE001  (a task that failed once must run again)
            look.failed = type(error).__name__
            # Only the class is logged: an error's text may contain client data.
            log.error("%s: failed with %s", task.name, type(error).__name__)
        else:
            look.good_at, look.failed = boottime(), None
            return did
        finally:
            look.began = None
        return 0

    def troubles(self) -> dict[str, str]:
        """The problems of tasks, by name."""
        return {name: look.wrong for name, look in self.looks.items() if look.wrong is not None}

    @property
    def ready(self) -> bool:
        """Whether every task has completed a round and none has an error; False while stopping."""
        good = all(look.good_at is not None and look.wrong is None for look in self.looks.values())
        return good and not self._stopping.is_set()

    async def _pause(self, wake: asyncio.Event, seconds: float) -> None:
        if self._stopping.is_set():
            return
        woken = asyncio.ensure_future(wake.wait())
        slept = asyncio.ensure_future(self._sleep(seconds))
        await asyncio.wait({woken, slept}, return_when=asyncio.FIRST_COMPLETED)
        woken.cancel()
        slept.cancel()


class WorkerThread:
    """Workers in a threaded server: an event loop in its own thread, until the process ends."""

    def __init__(self, lifespan: Callable[[], AbstractAsyncContextManager[None]]) -> None:
        self._lifespan = lifespan
        self._loop: asyncio.AbstractEventLoop | None = None
        self._ending: asyncio.Event
        self._thread = threading.Thread(target=lambda: asyncio.run(self._live()), name="oncekey-workers", daemon=True)
        self._thread.start()
        atexit.register(self.stop)

    def stop(self) -> None:
        """Stop the workers as a server's lifespan would, and wait for them."""
        atexit.unregister(self.stop)
        if self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._ending.set)
            self._thread.join()

    async def _live(self) -> None:
        self._ending = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        try:
            async with self._lifespan():
                await self._ending.wait()
        except Exception as error:  # noqa: BLE001  (no caller would see it: logged here)
            log.error("oncekey: the background workers ended: %s", type(error).__name__)


def wall() -> Instant:
    """The host's wall clock."""
    return time.time_ns() // 1000


def boot() -> Instant:
    """A clock that cannot be set, and that advances while the machine sleeps."""
    return round(boottime() * SECOND)


def this_process() -> str:
    """The name of this process in the audit."""
    return f"{socket.gethostname()}:{os.getpid()}"


class ClockWatch:
    """Compares the store's clock, which comes with each page, with the host's, and records when it was last wrong.

    The timestamp of the page decides what is due, so it is the one to compare: a worker that read the clock separately
    and then paused would decide by a different time.
    """

    def __init__(self, *, wall: Callable[[], Instant] = wall, boot: Callable[[], Instant] = boot) -> None:
        self._wall = wall
        self._boot = boot
        self._trust = Trust()

    def look(self, store: Instant) -> bool:
        """Whether the clocks agree."""
        self._trust = self._trust.looked(store, self._wall(), self._boot())
        return not self._trust.wrong

    def disturbed(self) -> None:
        """Record that the store failed: owners could not renew their leases either."""
        self._trust = self._trust.disturbed(self._boot())

    @property
    def why(self) -> str:
        """The problem in one sentence; empty if there is none."""
        return self._trust.why

    @property
    def trusted_for(self) -> Duration | None:
        """How long the clocks have agreed; None if they always have."""
        return self._trust.trusted_for(self._boot())
