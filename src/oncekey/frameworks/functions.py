"""Functions as operations: a call is claimed under its key like a request, with its arguments for a body.

What the function returns is stored as JSON, and `RejectedError` is its final no; every caller gets what was stored.
Whatever a request would be refused with is raised. A `def` function lives in the thread that calls it, an
`async def` function in its event loop; what happens in between is the engine's (`engine/serve.py`).
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Awaitable, Callable, Mapping
from typing import TYPE_CHECKING, Any

from oncekey.core.answers import Answer
from oncekey.core.errors import RejectedError
from oncekey.core.model import UNAVAILABLE
from oncekey.core.refusals import NotRunError, error_of
from oncekey.engine.effects import Rests
from oncekey.engine.operation import Operation, SyncOperation, operation_of
from oncekey.engine.serve import abandon
from oncekey.frameworks.blocking import called, not_awaitable, unkeyed_operation
from oncekey.frameworks.calling import DECLINED, DONE, Calling, CallOutcome, FunctionCall, check_nesting, running
from oncekey.frameworks.resuming import RESUMPTION
from oncekey.runtimes.aio import Changed, flush, flushes, shielded

if TYPE_CHECKING:
    from oncekey.core.calls import Shape
    from oncekey.engine.enrolment import Enrolment
    from oncekey.engine.run import Site
    from oncekey.frameworks.asgi.installation import Installation
    from oncekey.frameworks.asgi.types import Receive, Scope, Send
    from oncekey.frameworks.blocking import Threads
    from oncekey.frameworks.shared import Premises

    Chooser = Callable[[Mapping[str, Any]], Any]

_OPERATIONS = (Operation, SyncOperation)


class Function:
    """One protected function."""

    def __init__(
        self,
        function: Callable[..., Any],
        enrolment: Enrolment,
        shape: Shape,
        *,
        key: Chooser,
        tenant: Chooser,
        threads: Threads,
        loops: Installation,
    ) -> None:
        self.__wrapped__ = function
        self.__oncekey__ = enrolment
        self.shape = shape
        self._key = key
        self._tenant = tenant
        self._threads = threads
        self._loops = loops

    def __call__(self, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
        """The value of a call, or for `async def` what is awaited for it."""
        return self.run(args, kwargs).value if self.__oncekey__.blocking else _value(self.arun(args, kwargs))

    def run(self, args: tuple[Any, ...], kwargs: Mapping[str, Any], key: object = None) -> CallOutcome:
        """One call of a `def` function; a caller that knows the key passes it as `key`."""
        return self._in_thread(self._asked(args, kwargs, key))

    async def arun(self, args: tuple[Any, ...], kwargs: Mapping[str, Any], key: object = None) -> CallOutcome:
        """One call of an `async def` function."""
        return await self._in_loop(self._asked(args, kwargs, key))

    async def enter(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Go on with a call whose process died: a completer's request, as an application is sent one (H7)."""
        stored, status = (await receive())["body"], DONE
        asked = FunctionCall(scope[RESUMPTION].record.id.key, "", {}, stored, scope[RESUMPTION])
        try:
            await (asyncio.to_thread(self._in_thread, asked) if self.__oncekey__.blocking else self._in_loop(asked))
        except (NotRunError, RejectedError):
            status = DECLINED
        await send({"type": "http.response.start", "status": status, "headers": []})

    def _asked(self, args: tuple[Any, ...], kwargs: Mapping[str, Any], key: object) -> FunctionCall:
        check_nesting(self.__oncekey__.operation)
        arguments = self.shape.bind(args, kwargs)
        chosen = self._key(arguments) if key is None else key
        return FunctionCall(chosen, self._tenant(arguments), arguments, self.shape.written(arguments))

    def _calling(self, asked: FunctionCall, premises: Premises, site: Site) -> Calling:
        return Calling(self.__wrapped__, self.__oncekey__, self.shape, asked, premises=premises, site=site)

    def _in_thread(self, asked: FunctionCall) -> CallOutcome:
        threads = self._threads
        if not threads.ready():
            raise error_of(UNAVAILABLE, self.__oncekey__.policy, self.__oncekey__.operation)
        calling = self._calling(asked, threads, threads.site)
        runtime, run = threads.runtime, calling.run
        try:
            came = runtime.run(calling.life)
            if not isinstance(came, Rests):
                if isinstance(came, Answer):
                    return calling.outcome_of(came)
                bare = unkeyed_operation(SyncOperation, run.claim, None)
                return CallOutcome(not_awaitable(calling.invoke(bare), run.enrolment), replayed=False)
            token = running.set(run)
            try:
                op = operation_of(SyncOperation, run, calling.stepping(runtime.drive))
                calling.returned(called(calling.invoke, op, calling.ended, run.enrolment))
            except BaseException as error:  # noqa: BLE001  (whatever it is, the life ends before it goes on)
                calling.raised(error)
            finally:
                running.reset(token)
            return calling.over(runtime.run(calling.life, calling.decision()))
        finally:
            if calling.unsettled:
                runtime.instead(calling.life, abandon(run, calling.life, entered=calling.ended.entered))

    async def _in_loop(self, asked: FunctionCall) -> CallOutcome:
        loops = self._loops
        runtime, site = loops.life()
        calling = self._calling(asked, loops, site)
        run = calling.run
        loops.running_work.began()
        try:
            try:
                came = await runtime.run(calling.life)
            except Changed as changed:
                raise changed.cancelled from None
            if not isinstance(came, Rests):
                if isinstance(came, Answer):
                    return calling.outcome_of(came)
                return CallOutcome(await calling.invoke(unkeyed_operation(Operation, run.claim, None)), replayed=False)
            token = running.set(run)
            if run.phased_run is not None:
                calling.entered_by(asyncio.current_task())
                loops.interruptible.add(calling)
            try:
                op = operation_of(Operation, run, calling.stepping(runtime.drive))
                calling.ended.entered = True
                try:
                    value = await calling.invoke(op)
                finally:
                    calling.ended.kept, calling.ended.rolled_back = op.kept, op.rolled_back
                if run.tx is not None and not op.rolled_back and flushes(run.tx.__class__):
                    await flush(run.tx)
                calling.returned(value)
            except BaseException as error:  # noqa: BLE001
                calling.raised(error)
            finally:
                running.reset(token)
            settled, cancelled = await runtime.finish(calling.life, calling.decision())
            if cancelled is not None:
                raise cancelled
            return calling.over(settled)
        finally:
            loops.interruptible.discard(calling)
            loops.running_work.ended()
            if calling.unsettled:
                await shielded(runtime.drive(abandon(run, calling.life, entered=calling.ended.entered)))


async def _value(coming: Awaitable[CallOutcome]) -> Any:  # noqa: ANN401  (what the function returns)
    return (await coming).value


def protected(function: Function, name: str | None) -> Any:  # noqa: ANN401  (a function like the one that it protects)
    """What callers see: the function without its operation, `name`. A unit test may call it with one of its own."""
    inner = function.__wrapped__

    def bare(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
        return (name is not None and name in kwargs) or any(isinstance(one, _OPERATIONS) for one in args)

    @functools.wraps(inner)
    def plain(*args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
        return inner(*args, **kwargs) if bare(args, kwargs) else function(*args, **kwargs)

    @functools.wraps(inner)
    async def awaited(*args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
        return await inner(*args, **kwargs) if bare(args, kwargs) else await function(*args, **kwargs)

    wrapper: Any = plain if function.__oncekey__.blocking else awaited
    wrapper.__signature__ = function.shape.signature
    wrapper.__annotations__ = {key: note for key, note in inner.__annotations__.items() if key != name}
    wrapper.__oncekey_function__ = function
    return wrapper
