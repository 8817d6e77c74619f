"""SQLite's lane: an event loop's queue of writers for a file, and the thread in which they write.

SQLite has one writer at a time, and its calls block. In the event loop a blocked call would stop everything, including
the writer that it waits for. So a transaction that writes takes a turn, awaits it, and does all its work in
the lane's one writing thread:

    event loop                          lane                             writing thread
    ──────────                          ────                             ──────────────
    tx A: do(first job)  ────────────▶  A HELD, taken          ───────▶  A: BEGIN, lock, read
    tx B: do(first job)  ────────────▶  B WAITING with its job
    A's handler: do(statement)  ─────▶  A HELD                 ───────▶  A: INSERT ...
    tx A: do(COMMIT, last=True)  ────▶  A OVER                 ───────▶  A: record, COMMIT
                                        pass_on: B HELD        ◀──────┘
                                                               ───────▶  B: BEGIN, lock, read

* Only the transaction with the turn puts jobs into the writing thread, so it can always continue: no job in the
  thread waits for another transaction of this event loop.
* A waiting transaction leaves its first job with its turn. The thread itself calls `pass_on` after a last job and
  continues with the next transaction at once, so the file is not idle until the event loop has noticed the end.
* A task that is cancelled before its turn has come is removed with its job. After that the job runs to its end, and
  the turn records the cancellation (`cancelled`), so that the transaction is rolled back and not committed.
* Reading needs no turn: it has its own threads (`READERS`).

A statement in SQLite takes no longer than passing it to a thread and back, so that path is short: a job and its future
are one entry in a queue, and the event loop is woken once for all jobs that have ended. The file's `Writer` separates
writers in other threads and event loops of this process, and SQLite itself those of other processes.
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
from oncekey.databases.handler_sql import OVER

T = TypeVar("T")

READERS: Final = 4
"""The number of threads for reading. Writers have their own, so readers cannot delay them."""

LINGER: Final = 0.05
"""Seconds that an idle thread waits for its next job before it ends; an exiting process waits for it."""

_lanes: dict[tuple[asyncio.AbstractEventLoop, str], Lane] = {}


class Job(NamedTuple):
    """A function to run in a thread. The task that waits for it may be cancelled; the job is not."""

    future: asyncio.Future[Any]
    do: Callable[[], Any]
    then: Callable[[], None] | None = None
    """Called in the thread after the job, before the event loop receives the result."""


class WorkerThreads:
    """Threads that run the blocking jobs of one event loop, in order."""

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
        """Run a job; called in the event loop. The future needs no shield: cancelling it does not stop the job."""
        future = self._loop.create_future()
        self.put(Job(future, job))
        return future

    def put(self, job: Job) -> None:
        """Run a job that already has a future; may be called from any thread."""
        with self._guard:
            self._jobs.put(job)
            self._pending += 1
            if self._pending <= self._there or self._there == self._most:
                return
            self._there += 1
        try:
            self._pool.submit(self._work)
        except RuntimeError as error:  # no thread can be started while the interpreter shuts down
            with self._guard:
                self._there -= 1
            raise StoreUnavailableError("the store's driver was closed") from error

    def dismiss(self) -> None:
        """Accept no more jobs."""
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
            del future, do, then, result, error  # the thread must not keep them alive while it waits
            if not self._called:
                self._called = True
                self._call()

    def _call(self) -> None:
        try:
            self._loop.call_soon_threadsafe(self._deliver)
        except RuntimeError:  # the event loop was closed: no task is waiting
            self._called = False

    def _deliver(self) -> None:
        self._called = False  # before the check: a job that ends from now on calls again
        done = self._done
        while done:
            future, result, error = done.popleft()
            if future.done():
                continue  # the waiting task was cancelled
            if error is None:
                future.set_result(result)
            elif isinstance(error, StopIteration):  # a future does not accept one
                future.set_exception(RuntimeError("a job in a thread raised StopIteration"))
            else:
                future.set_exception(error)


class TurnState(Enum):
    """The state of a turn."""

    OUTSIDE = "outside"
    WAITING = "waiting"
    HELD = "held"
    OVER = "over"


class Turn:
    """The turn of one transaction: its first job waits for it, and its last job passes it on."""

    __slots__ = ("_lane", "cancelled", "jobs", "number", "state", "timer")

    def __init__(self, lane: Lane) -> None:
        self._lane = lane
        self.state = TurnState.OUTSIDE
        self.jobs: list[Job] = []
        """The jobs to run when the turn has come."""
        self.number = 0
        """Its position in the queue, which it keeps if it returns."""
        self.timer: asyncio.TimerHandle | None = None
        self.cancelled = False
        """Whether a task was cancelled whose job still runs."""

    async def do(self, job: Callable[[], T], patience: float, *, last: bool = False) -> T:
        """Run a job in the thread when the turn has come; `StoreBusyError` if that takes too long.

        If the task is cancelled before that, the job is dropped. Afterwards the job still runs to its end.
        """
        lane = self._lane
        future: asyncio.Future[T] = lane.loop.create_future()
        job_in_lane = Job(future, job, lane.pass_on if last else None)
        lane.wait(self, job_in_lane, patience)
        try:
            return await future
        except asyncio.CancelledError:
            self.cancelled = self.cancelled or not lane.forget(self, job_in_lane)
            raise
        finally:
            if self.timer is not None and self.state is not TurnState.WAITING:
                self.timer.cancel()
                self.timer = None

    def withdraw(self) -> bool:
        """Give up the turn, unless it has come; jobs that wait for it fail."""
        return self._lane.give_up(self, TransactionControlError(OVER))


class Lane:
    """The turns for one file in one event loop, held and waiting, and their threads."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self.writing = WorkerThreads(loop, 1, "oncekey-write")
        self.reading = WorkerThreads(loop, READERS, "oncekey-read")
        self.taken = False
        """Whether the next writer has to wait."""
        self._guard = Lock()
        self._waiting: deque[Turn] = deque()
        self._last_number = 0

    def wait(self, turn: Turn, job: Job, patience: float) -> None:
        """Run a job when its turn has come, which may be now; called in the event loop."""
        with self._guard:
            if turn.state is TurnState.OVER:
                raise TransactionControlError(OVER)
            turn.jobs.append(job)
            if turn.state is TurnState.HELD:
                self._hand(turn)
            elif not self.taken:
                self.taken = True
                self._hand(turn)
            elif turn.state is TurnState.OUTSIDE:
                self._line_up(turn)
                turn.timer = self.loop.call_later(patience, self._too_long, turn)

    def forget(self, turn: Turn, job: Job) -> bool:
        """Drop the job of a cancelled task. False: its turn has come, and the job runs without a task."""
        with self._guard:
            if turn.state is TurnState.WAITING:
                turn.jobs.remove(job)
                if not turn.jobs:
                    self._step_out(turn)
                return True
            return turn.state is TurnState.OUTSIDE

    def give_up(self, turn: Turn, error: Exception) -> bool:
        """Stop waiting for a turn. False: it has come."""
        with self._guard:
            if turn.state in (TurnState.HELD, TurnState.OVER):
                return False
            jobs = turn.jobs
            if turn.state is TurnState.WAITING:
                self._step_out(turn)
        for job in jobs:
            if not job.future.done():
                job.future.set_exception(error)
        return True

    def pass_on(self) -> None:
        """End the turn, and begin the next one; called in the thread."""
        with self._guard:
            if self._waiting:
                self._hand(self._waiting.popleft())
            else:
                self.taken = False

    def _hand(self, turn: Turn) -> None:
        jobs, turn.jobs = turn.jobs, []
        turn.state = TurnState.HELD if jobs[-1].then is None else TurnState.OVER
        for job in jobs:
            self.writing.put(job)

    def _line_up(self, turn: Turn) -> None:
        turn.state = TurnState.WAITING
        if not turn.number:
            self._last_number = turn.number = self._last_number + 1
            self._waiting.append(turn)
            return
        before = sum(1 for other in self._waiting if other.number < turn.number)
        self._waiting.insert(before, turn)

    def _step_out(self, turn: Turn) -> None:
        self._waiting.remove(turn)
        turn.state, turn.jobs = TurnState.OUTSIDE, []

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
