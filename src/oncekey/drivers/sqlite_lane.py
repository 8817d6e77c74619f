"""The one writer that an event loop has for a SQLite file: turns to wait for, and a thread to write in.

A raw SQLite connection on the event loop would block it, and with it the writer that everybody waits for. Here
waiting is awaiting, and the thread belongs to whoever has the turn, so the holder can always go on.

A statement of SQLite's takes no longer than handing it to a thread and back, so the way there is short. A job and its
future are one entry of a queue, and the event loop is woken once for all that was done meanwhile. Whoever waits for a
turn leaves what it wants to do there: when the thread has done a writer's last job, it goes on with the next
writer's first one, and the file does not lie idle until the event loop has heard of the end.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from enum import Enum
from queue import Empty, SimpleQueue
from threading import Lock
from typing import Any, Final, NamedTuple, TypeVar

from oncekey.core.errors import StoreBusyError, StoreUnavailableError, TransactionControlError
from oncekey.drivers.guard import OVER

T = TypeVar("T")

READERS: Final = 4
"""Threads for reading. Writers have their own, so no crowd of readers can stand in a writer's way."""

LINGER: Final = 0.05
"""Seconds that a thread waits for its next job before it has to be called again; an exiting process waits for it."""

_lanes: dict[tuple[asyncio.AbstractEventLoop, str], Lane] = {}


class Job(NamedTuple):
    """Something to do in a thread. Whoever waits for it may be cancelled; the job is not."""

    future: asyncio.Future[Any]
    do: Callable[[], Any]
    then: Callable[[], None] | None = None
    """Said in the thread when it is done, before anybody hears of it."""


class Crew:
    """Threads that do the blocking jobs of one event loop, in order."""

    def __init__(self, loop: asyncio.AbstractEventLoop, threads: int, name: str) -> None:
        self._loop = loop
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix=name)
        self._most = threads
        self._jobs: SimpleQueue[Job] = SimpleQueue()
        self._guard = Lock()
        self._pending = 0
        self._there = 0
        self._done: deque[tuple[asyncio.Future[Any], Any, BaseException | None]] = deque()
        self._called = False

    def do(self, job: Callable[[], T]) -> asyncio.Future[T]:
        """Do a job; called in the event loop. Who awaits the future needs no shield."""
        future = self._loop.create_future()
        self.put(Job(future, job))
        return future

    def put(self, job: Job) -> None:
        """The same for a job that has a future already; from whichever thread."""
        with self._guard:
            self._jobs.put(job)
            self._pending += 1
            if self._pending <= self._there or self._there == self._most:
                return
            self._there += 1
        try:
            self._pool.submit(self._work)
        except RuntimeError as error:  # no thread takes a job after the interpreter was shut down
            with self._guard:
                self._there -= 1
            raise StoreUnavailableError("the store's driver was closed") from error

    def dismiss(self) -> None:
        """No more jobs will come."""
        self._pool.shutdown(wait=False)

    def _work(self) -> None:
        while True:
            try:
                future, do, then = self._jobs.get(timeout=LINGER)
            except Empty:
                with self._guard:
                    if self._jobs.empty():
                        self._there -= 1
                        return
                continue
            result, error = None, None
            try:
                result = do()
            except BaseException as raised:  # noqa: BLE001  (raised in each waiting task)
                error = raised
            if then is not None:
                then()
            with self._guard:
                self._pending -= 1
            self._done.append((future, result, error))
            del future, do, then, result, error  # nothing of it may live on while the thread waits
            if not self._called:
                self._called = True
                self._call()

    def _call(self) -> None:
        try:
            self._loop.call_soon_threadsafe(self._deliver)
        except RuntimeError:  # the event loop was closed: nobody waits any more
            self._called = False

    def _deliver(self) -> None:
        self._called = False  # before looking: what is done from now on calls again
        done = self._done
        while done:
            future, result, error = done.popleft()
            if future.done():
                continue  # whoever waited was cancelled
            if error is None:
                future.set_result(result)
            elif isinstance(error, StopIteration):  # no future takes one
                future.set_exception(RuntimeError("a job in a thread raised StopIteration"))
            else:
                future.set_exception(error)


class State(Enum):
    """Where a turn is."""

    OUTSIDE = "outside"
    WAITING = "waiting"
    HELD = "held"
    OVER = "over"


class Turn:
    """One writer's turn: it is waited for with the first job, and passed on by the last one."""

    __slots__ = ("_lane", "cancelled", "jobs", "number", "state", "timer")

    def __init__(self, lane: Lane) -> None:
        self._lane = lane
        self.state = State.OUTSIDE
        self.jobs: list[Job] = []
        """What is to be done when it has come."""
        self.number = 0
        """Its place among those that wait: whoever comes back gets it again."""
        self.timer: asyncio.TimerHandle | None = None
        self.cancelled = False
        """Whether somebody was cancelled whose job was to be done all the same."""

    async def do(self, job: Callable[[], T], patience: float, *, last: bool = False) -> T:
        """Do a job in the thread when the turn has come; `StoreBusyError` if that takes too long.

        Who is cancelled before it has come is forgotten, and the job with it. Afterwards the job is done all the same.
        """
        lane = self._lane
        future: asyncio.Future[T] = lane.loop.create_future()
        said = Job(future, job, lane.pass_on if last else None)
        lane.wait(self, said, patience)
        try:
            return await future
        except asyncio.CancelledError:
            self.cancelled = self.cancelled or not lane.forget(self, said)
            raise
        finally:
            if self.timer is not None and self.state is not State.WAITING:
                self.timer.cancel()
                self.timer = None

    def withdraw(self) -> bool:
        """Unless it has come, it is not wanted any more; whoever still waits for it hears that it is too late."""
        return self._lane.give_up(self, TransactionControlError(OVER))


class Lane:
    """Whose turn it is, who waits for one, and the threads."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self.writing = Crew(loop, 1, "oncekey-write")
        self.reading = Crew(loop, READERS, "oncekey-read")
        self.taken = False
        """Whether whoever comes now has to wait."""
        self._guard = Lock()
        self._waiting: deque[Turn] = deque()
        self._last_number = 0

    @property
    def queue(self) -> int:
        """How many wait."""
        return len(self._waiting)

    def wait(self, turn: Turn, job: Job, patience: float) -> None:
        """Let a job be done when its turn has come, which may be now; called in the event loop."""
        with self._guard:
            if turn.state is State.OVER:
                raise TransactionControlError(OVER)
            turn.jobs.append(job)
            if turn.state is State.HELD:
                self._hand(turn)
            elif not self.taken:
                self.taken = True
                self._hand(turn)
            elif turn.state is State.OUTSIDE:
                self._line_up(turn)
                turn.timer = self.loop.call_later(patience, self._too_long, turn)

    def forget(self, turn: Turn, job: Job) -> bool:
        """Whoever wanted a job has gone. False: its turn has come, and it is done for nobody."""
        with self._guard:
            if turn.state is State.WAITING:
                turn.jobs.remove(job)
                if not turn.jobs:
                    self._step_out(turn)
                return True
            return turn.state is State.OUTSIDE

    def give_up(self, turn: Turn, error: Exception) -> bool:
        """A turn is not waited for any more. False: it has come."""
        with self._guard:
            if turn.state in (State.HELD, State.OVER):
                return False
            jobs = turn.jobs
            if turn.state is State.WAITING:
                self._step_out(turn)
        for job in jobs:
            if not job.future.done():
                job.future.set_exception(error)
        return True

    def pass_on(self) -> None:
        """The turn is over, and the next one begins; called in the thread."""
        with self._guard:
            if self._waiting:
                self._hand(self._waiting.popleft())
            else:
                self.taken = False

    def _hand(self, turn: Turn) -> None:
        jobs, turn.jobs = turn.jobs, []
        turn.state = State.HELD if jobs[-1].then is None else State.OVER
        for job in jobs:
            self.writing.put(job)

    def _line_up(self, turn: Turn) -> None:
        turn.state = State.WAITING
        if not turn.number:
            self._last_number = turn.number = self._last_number + 1
            self._waiting.append(turn)
            return
        before = sum(1 for other in self._waiting if other.number < turn.number)
        self._waiting.insert(before, turn)

    def _step_out(self, turn: Turn) -> None:
        self._waiting.remove(turn)
        turn.state, turn.jobs = State.OUTSIDE, []

    def _too_long(self, turn: Turn) -> None:
        self.give_up(turn, StoreBusyError("another writer held the SQLite file for too long"))


def lane_of(path: str) -> Lane:
    """The lane of the running event loop for a file, by its real path; all drivers of that file share it."""
    loop = asyncio.get_running_loop()
    lane = _lanes.get((loop, path))
    if lane is None:
        _forget_closed_loops()
        lane = _lanes[loop, path] = Lane(loop)
    return lane


def _forget_closed_loops() -> None:
    for at in [at for at in list(_lanes) if at[0].is_closed()]:
        lane = _lanes.pop(at)
        lane.writing.dismiss()
        lane.reading.dismiss()
