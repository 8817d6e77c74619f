"""The completer: resumes phased requests whose server died, or whose worker released them at a stop (H7).

It does not take records over itself. It sends the stored request through the application, where the same claim, handler
and settlement run as for the client's own retry.
"""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, Final, Protocol

from oncekey.core.errors import StoreError
from oncekey.core.flow import adrive
from oncekey.core.guards import Facts
from oncekey.core.keys import key_digest
from oncekey.core.model import State
from oncekey.core.scope import is_in
from oncekey.core.topics import contained
from oncekey.core.transitions import Actor, Transition, Trigger, find_transition
from oncekey.engine.kept_request import UnreadableError
from oncekey.engine.notifying import notify_failure
from oncekey.frameworks.resuming import resume
from oncekey.ops.tasks import COMPLETER
from oncekey.workers.calling import Sleep, abandon
from oncekey.workers.service import Pace

if TYPE_CHECKING:
    from collections.abc import Callable
    from uuid import UUID

    from oncekey.core.model import Record, Snapshot
    from oncekey.engine.enrolment import Enrolment
    from oncekey.engine.shell import AsyncEngine
    from oncekey.frameworks.asgi import App
    from oncekey.observe.events import Notify

log = logging.getLogger("oncekey")

PAGE: Final = 50
CONCURRENCY: Final = 8
LONGEST_REST: Final = 64
"""The maximum number of rounds for which a request is skipped after the application refused it."""

NOT_LET_IN: Final = (
    "oncekey: a completer's request for %s received %s before its handler was called (digest %s): accept "
    "oncekey.resumed_as(request) in the application's authentication, in the `tenant` and `principal` functions, and "
    "in its checks of CSRF tokens and host names, or set complete=False on the route"
)


class CompletedApplication(Protocol):
    """The interface of an application that the completer needs."""

    def asynchronous(self) -> AsyncEngine:
        """The engine of the running event loop."""

    def enrolment_of(self, operation: str) -> Enrolment | None:
        """The enrolment of an operation."""

    def app_of(self, operation: str) -> App | None:
        """The application that serves an operation."""

    def quiesce(self) -> None:
        """Stop phased handlers at their next step."""


class Completer:
    """Finds phased requests without an owner, and sends them through the application."""

    name: Final = COMPLETER.name
    about: Final = ""

    def __init__(
        self,
        served: CompletedApplication,
        *,
        page: int = PAGE,
        concurrency: int = CONCURRENCY,
        stopping: Callable[[], bool] = bool,
        pace: Pace | None = None,
        sleep: Sleep = asyncio.sleep,
        notify: Notify | None = None,
    ) -> None:
        self.pace = pace or Pace()
        self._stopped = False
        self._served = served
        self._page = page
        self._slots = asyncio.Semaphore(concurrency)
        self._asked_to_stop = stopping
        self._sleep = sleep
        self._notify = notify
        self._going: set[asyncio.Task[bool]] = set()
        self._resting: dict[UUID, _Rest] = {}
        self.done = 0
        """Requests that were completed."""
        self.failed = 0
        """Requests that could not be resumed, or whose handler failed again."""

    async def run_once(self) -> int:
        """Resume everything that is due; returns how many requests were resumed."""
        engine = self._served.asynchronous()
        done, after = 0, None
        met: set[UUID] = set()
        while not self._stopping():
            page = await adrive(engine.store.phases.resumable(self._page, after), engine.driver.run)
            done += await self._all(page)
            met.update(snapshot.record.incarnation for snapshot in page if snapshot.record is not None)
            if len(page) < self._page:
                # A request that is no longer listed was resumed by another process or its client.
                self._resting = {one: rest for one, rest in self._resting.items() if one in met}
                return done
            after = page[-1].record
        return done

    async def shut_down(self) -> None:
        """Wait for every request that was started."""
        while self._going:
            await asyncio.wait(set(self._going))

    async def stop(self, grace: float) -> None:
        """Start no further request; running ones stop at their next step, calls after `grace` seconds (P5, F10)."""
        self._stopped = True
        if not self._going:
            return
        self._served.quiesce()
        drained, timer = asyncio.ensure_future(self.shut_down()), asyncio.ensure_future(self._sleep(grace))
        await asyncio.wait({drained, timer}, return_when=asyncio.FIRST_COMPLETED)
        drained.cancel()
        timer.cancel()
        if stubborn := await abandon(self._going):
            log.warning("completer: %d handlers ignore their cancellation; the worker exits without them", stubborn)

    async def _all(self, page: tuple[Snapshot, ...]) -> int:
        tasks = {asyncio.create_task(self._go_on(snapshot), name="oncekey-completion") for snapshot in page}
        if not tasks:
            return 0
        self._going |= tasks
        for task in tasks:
            task.add_done_callback(self._going.discard)
        try:
            await asyncio.wait(tasks)
        except asyncio.CancelledError:
            for task in tasks:
                task.cancel()
            raise
        return sum(task.result() for task in tasks if not task.cancelled())

    def _stopping(self) -> bool:
        return self._stopped or self._asked_to_stop()

    async def _go_on(self, snapshot: Snapshot) -> bool:
        record = snapshot.record
        assert record is not None
        enrolment, app = self._served.enrolment_of(record.operation), self._served.app_of(record.operation)
        if enrolment is None or app is None or self._rests(record):
            return False
        if not is_in(enrolment.policy.namespace, record.id.scope):
            return False  # another application's, on the same store
        facts = Facts(record, snapshot.now, max_attempts=enrolment.policy.max_attempts)
        if not isinstance(find_transition(Trigger.TAKE_OVER, Actor.COMPLETER, facts), Transition):
            return False  # it waits for a resolver, or for an operator
        async with self._slots:
            return not self._stopping() and await self._sent(app, record, enrolment)

    async def _sent(self, app: App, record: Record, enrolment: Enrolment) -> bool:
        operation, digest = record.operation, key_digest(record.id.key)
        try:
            end = str(await resume(app, record, enrolment.policy))
        except UnreadableError as error:
            log.error("completer: %s cannot be completed without its client: %s (digest %s)", operation, error, digest)
            return self._refused(record)
        except StoreError as error:
            self.failed += 1
            log.error("completer: resuming %s failed with %s (digest %s)", operation, error.reason, digest)
            notify_failure(self._notify, self.name, error)
            return False
        except BaseException as raised:  # noqa: BLE001  (of the handler: its record has the meaning)
            contained(raised)  # a cancellation of this task is raised again
            end = type(raised).__name__
        found = (await self._served.asynchronous().find(record.id)).record
        if found is not None and (found.incarnation, found.version) == (record.incarnation, record.version):
            log.error(NOT_LET_IN, operation, end, digest)
            return self._refused(record)
        self._resting.pop(record.incarnation, None)
        if found is None or found.state is State.COMPLETED:
            self.done += 1
            log.info("completer: resumed %s: %s (digest %s)", operation, end, digest)
        elif found.state is not State.IN_PROGRESS:  # otherwise its client came first
            self.failed += 1
            log.warning(
                "completer: %s failed again: %s; its record is %s (digest %s)", operation, end, found.state, digest
            )
        return True

    def _refused(self, record: Record) -> bool:
        """Skip a request for some rounds: its record is as it was."""
        self.failed += 1
        self._resting.setdefault(record.incarnation, _Rest()).again()
        return False

    def _rests(self, record: Record) -> bool:
        rest = self._resting.get(record.incarnation)
        return rest is not None and rest.skips()


class _Rest:
    """A number of rounds without another attempt; it doubles after each refusal."""

    __slots__ = ("_left", "_length")

    def __init__(self) -> None:
        self._length = 1
        self._left = 0

    def again(self) -> None:
        self._left, self._length = self._length, min(self._length * 2, LONGEST_REST)

    def skips(self) -> bool:
        self._left -= 1
        return self._left >= 0
