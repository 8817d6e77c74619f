"""One call of a topic's function: within its send window, in its time, and off the event loop if it blocks.

A function whose code has no `await` ends before anybody else has a turn, so no time-out could end it sooner: it is
called at once. Every other one gets a task or a thread of its own, which can be left behind.
"""

from __future__ import annotations

import asyncio
import contextvars
import dis
import inspect
import threading
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import TYPE_CHECKING, Any, TypeAlias

from oncekey.core.errors import NotExecuted

if TYPE_CHECKING:
    from oncekey.topics import Message, Topic

Sleep: TypeAlias = Callable[[float], Awaitable[None]]
Clock: TypeAlias = Callable[[], float]


class TooLateError(NotExecuted):
    """The send window was over before the call began, so it was not made (U1)."""


class CallTimeoutError(TimeoutError):
    """The call did not return in its time; what it does now nobody waits for."""


class CallBrokenError(Exception):
    """The function was cancelled, or raised what is no ordinary error: nobody knows how far it came."""


async def call(
    topic: Topic, message: Message, *, limit: float, send_by: float | None, clock: Clock, sleep: Sleep
) -> object:
    """The function's return value. `limit` is in seconds; a thread that overstays is left behind."""

    def in_time() -> Any:  # noqa: ANN401  (whatever the function returns)
        # Looked at as late as can be: what stands between here and the send is the function itself.
        if send_by is not None and clock() > send_by:
            raise TooLateError("the send window is over")
        return topic.function(message)

    async def awaited() -> object:
        return await in_time()

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
        made.add_done_callback(_heard)
        made.cancel()


def awaits_nothing(function: Callable[..., Any]) -> bool:
    """Whether it is an `async def` that cannot be interrupted: there is no `await` in it, of whatever kind."""
    code = getattr(function, "__code__", None)
    if code is None or not inspect.iscoroutinefunction(function):
        return False
    # `await`, `async with`, `async for` and asynchronous comprehensions all wait by this one instruction.
    return all(step.opname != "SEND" for step in dis.get_instructions(code))


def call_at_once(topic: Topic, message: Message) -> object:
    """The return value of a function that awaits nothing; it has a context of its own, as it would have in a task."""
    coroutine = topic.function(message)
    try:
        contextvars.copy_context().run(coroutine.send, None)
    except StopIteration as stop:
        return stop.value
    except asyncio.CancelledError as error:
        raise CallBrokenError("CancelledError") from error
    coroutine.close()
    raise CallBrokenError("it awaits something after all")


async def _slept(sleep: Sleep, seconds: float) -> None:
    await sleep(seconds)


def _tellable(error: BaseException) -> Exception:
    """What may be raised in the event loop without ending it."""
    if isinstance(error, Exception) and not isinstance(error, StopIteration):
        return error
    return CallBrokenError(type(error).__name__)


def _heard(future: asyncio.Future[Any]) -> None:
    """Nobody waits for it any more, so its error is no news."""
    if not future.cancelled():
        future.exception()


def _in_thread(function: Callable[[], Any]) -> asyncio.Future[Any]:
    """The function in a thread of its own: a hung one then keeps nobody else waiting, nor the process from ending."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[Any] = loop.create_future()
    context = contextvars.copy_context()

    def tell(result: object, error: Exception | None) -> None:
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
        except BaseException as error:  # noqa: BLE001  (told to whoever awaits it)
            failure = _tellable(error)
        with suppress(RuntimeError):  # the loop is closed: nobody is left to be told
            loop.call_soon_threadsafe(tell, result, failure)

    threading.Thread(target=run, name="oncekey-topic", daemon=True).start()
    return future
