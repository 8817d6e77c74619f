"""Steps of an `async def` view: transactions in the request's own thread, the view's code in its event loop."""

from __future__ import annotations

import asyncio
import inspect
from typing import TYPE_CHECKING, Any, TypeVar

from asgiref.sync import iscoroutinefunction, sync_to_async

from oncekey.engine.effects import Call, Interrupted, Sleep

if TYPE_CHECKING:
    from oncekey.engine.effects import Effect, Life
    from oncekey.runtimes.threads import ThreadRuntime

T = TypeVar("T")


async def drive(runtime: ThreadRuntime, flow: Life[T]) -> T:
    """Perform a flow that never rests; a cancellation is told to it once, and raised when it is over."""
    cancelled: asyncio.CancelledError | None = None
    try:
        effect = flow.send(None)
        while True:
            try:
                value = await _performed(runtime, effect)
            except asyncio.CancelledError as error:
                if cancelled is not None:
                    raise
                cancelled = error
                effect = flow.throw(Interrupted())
            except Exception as error:  # noqa: BLE001  (a flow is told of everything that its effects raise)
                effect = flow.throw(error)
            else:
                effect = flow.send(value)
    except StopIteration as stop:
        if cancelled is not None:
            raise cancelled from None
        result: T = stop.value
        return result
    except Interrupted:
        assert cancelled is not None
        raise cancelled from None


async def _performed(runtime: ThreadRuntime, effect: Effect) -> Any:  # noqa: ANN401  (what the effect gives)
    if type(effect) is Sleep:
        return await asyncio.sleep(effect.seconds)
    if type(effect) is not Call:
        return await sync_to_async(runtime.perform, thread_sensitive=True)(effect)
    async with asyncio.timeout(effect.limit):
        if iscoroutinefunction(effect.fn):
            return await effect.fn(*effect.arguments)
        # A `def` may use models, which must not be done in an event loop.
        said = await sync_to_async(effect.fn, thread_sensitive=True)(*effect.arguments)
        return await said if inspect.isawaitable(said) else said
