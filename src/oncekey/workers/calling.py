"""One call of a topic's function, and the acknowledgement of delivered parcels in batches.

A call is made within its send window, with a time limit, and off the event loop if it blocks.

A function without `await` ends before any other task gets a turn, so no timeout could end it sooner: it is called
directly. Every other one gets its own task or thread, which can be abandoned.
"""

from __future__ import annotations

import asyncio
import contextvars
import dis
import inspect
import threading
from collections.abc import Awaitable, Callable, Iterable, Iterator
from contextlib import suppress
from typing import Any, Final, Generic, TypeAlias, TypeVar

from oncekey.core.errors import NotExecutedError
from oncekey.core.topics import CallBrokenError, Message, Topic, contained

Sleep: TypeAlias = Callable[[float], Awaitable[None]]
Clock: TypeAlias = Callable[[], float]


class TooLateError(NotExecutedError):
    """The send window ended before the call began, so the call was not made (U1)."""


class CallTimeoutError(TimeoutError):
    """The call did not return in time; a later result is ignored."""


CANCELLED_WITHIN: Final = 1.0
"""Seconds that a task has to end after its cancellation when a worker stops."""


ABANDONED: Final[list[asyncio.Task[Any]]] = []
"""Tasks that swallowed their cancellation. This list keeps them alive: collecting one would raise an error in it."""


async def abandon(tasks: Iterable[asyncio.Task[Any]]) -> int:
    """Cancel tasks, and abandon those that swallow it; returns how many. The event loop ends without them."""
    open_tasks = {task for task in tasks if not task.done()}
    for task in open_tasks:
        task.cancel()
    left = (await asyncio.wait(open_tasks, timeout=CANCELLED_WITHIN))[1] if open_tasks else set()
    for task in left:
        asyncio._unregister_task(task)  # noqa: SLF001  (documented for extensions: else `asyncio.run` waits for it for ever)
    ABANDONED.extend(left)
    return len(left)


async def call(
    topic: Topic,
    message: Message,
    *,
    limit: float,
    send_by: float | None,
    clock: Clock,
    sleep: Sleep,
    left_behind: set[asyncio.Task[Any]],
) -> object:
    """The function's return value. `limit` is in seconds; a thread or a task that takes longer is abandoned."""

    def in_time() -> Any:  # noqa: ANN401  (whatever the function returns)
        # Checked as late as possible: only the function itself runs between here and the send.
        if send_by is not None and clock() > send_by:
            raise TooLateError("the send window has ended")
        return topic.function(message)

    async def awaited() -> object:
        try:
            return await in_time()
        except Exception:
            raise
        except BaseException as error:
            raise contained(error) from error

    made = _in_thread(in_time) if topic.blocking else asyncio.ensure_future(awaited())
    timer = asyncio.ensure_future(_slept(sleep, limit))
    try:
        await asyncio.wait({made, timer}, return_when=asyncio.FIRST_COMPLETED)
        if made.cancelled():
            raise CallBrokenError("CancelledError")
        if made.done():
            return made.result()
        raise CallTimeoutError
    finally:
        timer.cancel()
        made.add_done_callback(_take_result)
        made.cancel()
        if isinstance(made, asyncio.Task) and not made.done():
            left_behind.add(made)
            made.add_done_callback(left_behind.discard)


def awaits_nothing(function: Callable[..., Any]) -> bool:
    """Whether it is an `async def` that cannot be interrupted, because it contains no `await` of any kind."""
    code = getattr(function, "__code__", None)
    if code is None or not inspect.iscoroutinefunction(function):
        return False
    # `await`, `async with`, `async for` and asynchronous comprehensions all compile to this instruction.
    return all(step.opname != "SEND" for step in dis.get_instructions(code))


def call_at_once(topic: Topic, message: Message) -> object:
    """The return value of a function that awaits nothing; it gets its own context, as in a task."""
    coroutine = topic.function(message)
    try:
        contextvars.copy_context().run(coroutine.send, None)
    except StopIteration as stop:
        return stop.value
    except Exception:
        raise
    except BaseException as error:
        raise contained(error) from error
    coroutine.close()
    raise CallBrokenError("the function awaits after all")


async def _slept(sleep: Sleep, seconds: float) -> None:
    await sleep(seconds)


def _take_result(future: asyncio.Future[Any]) -> None:
    """Retrieve the error of an abandoned call, so that asyncio does not report it."""
    if not future.cancelled():
        future.exception()


def _in_thread(function: Callable[[], Any]) -> asyncio.Future[Any]:
    """Run the function in its own thread, so that a hung one delays neither other calls nor the process's exit."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[Any] = loop.create_future()
    context = contextvars.copy_context()

    def notify(result: object, error: Exception | None) -> None:
        if future.done():
            return
        if error is None:
            future.set_result(result)
        else:
            future.set_exception(error)

    def run() -> None:
        result, failure = None, None
        try:
            result = context.run(function)
        except BaseException as error:  # noqa: BLE001  (raised where the call is awaited)
            failure = contained(error)
        with suppress(RuntimeError):  # the loop is closed: no caller is left
            loop.call_soon_threadsafe(notify, result, failure)

    threading.Thread(target=run, name="oncekey-topic", daemon=True).start()
    return future


T = TypeVar("T")

MOST: Final = 250
"""A batch of this size is written without waiting for more; meanwhile the next one collects."""
SOONEST: Final = 0.05
"""Seconds that a delivered message waits to be acknowledged together with others."""


class Acks(Generic[T]):
    """Collects delivered parcels, and writes them when there are enough, after a short delay, or on `flush`.

    Only one statement runs at a time; parcels that arrive meanwhile go with the next one. `write` reports the result of
    each batch itself, including an outage, and raises nothing.
    """

    def __init__(self, write: Callable[[list[T]], Awaitable[None]], sleep: Sleep, most: int = MOST) -> None:
        self._write = write
        self._sleep = sleep
        self._most = most
        self._waiting: list[T] = []
        self._writing: list[T] = []
        self._writer: asyncio.Task[None] | None = None
        self._timer: asyncio.Task[None] | None = None

    @property
    def waiting(self) -> int:
        """How many are not being written yet."""
        return len(self._waiting)

    def __len__(self) -> int:
        return len(self._waiting) + len(self._writing)

    def __iter__(self) -> Iterator[T]:
        """Parcels that are waiting or being written."""
        yield from self._waiting
        yield from self._writing

    @property
    def busy(self) -> bool:
        """Whether any are waiting or being written."""
        return bool(self._waiting) or self._writer is not None

    def add(self, delivered: T) -> None:
        """Acknowledge this parcel soon."""
        self._waiting.append(delivered)
        if len(self._waiting) >= self._most:
            self.flush()
        elif self._timer is None and self._writer is None:
            self._timer = asyncio.create_task(self._later(), name="oncekey-acks-timer")

    def flush(self) -> None:
        """Write the waiting ones now."""
        if self._waiting and self._writer is None:
            self._writer = asyncio.create_task(self._written(), name="oncekey-acks")

    async def shut_down(self) -> None:
        """Write all, and wait for the writes."""
        self.flush()
        if self._writer is not None:
            await asyncio.wait({self._writer})

    def close(self) -> None:
        """Stop the timer."""
        for task in (self._timer, self._writer):
            if task is not None:
                task.cancel()

    async def _written(self) -> None:
        try:
            while self._waiting:
                self._writing, self._waiting = self._waiting, []
                await self._write(self._writing)
        finally:
            self._writing = []
            self._writer = None

    async def _later(self) -> None:
        try:
            await self._sleep(SOONEST)
        finally:
            self._timer = None
        self.flush()
