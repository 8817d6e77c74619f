"""`protect`: the wrapper that claims when the handler is about to be called, and not a moment earlier.

It hides the handler's `op` parameter from the framework by its `__signature__`, and it runs after the route's
dependencies and validation, which no dependency of ours could promise.
"""

from __future__ import annotations

import asyncio.coroutines
import functools
import inspect
import sys
from typing import TYPE_CHECKING, Any, TypeVar, cast

from oncekey.core.answers import Answer
from oncekey.core.errors import ConfigurationError
from oncekey.core.model import Code, Effects, Refuse
from oncekey.engine.answering import refusal
from oncekey.engine.enrolment import SAFE
from oncekey.engine.steps import Stepping
from oncekey.frameworks import wsgi_exchange
from oncekey.frameworks.asgi.annotations import operation_parameter
from oncekey.frameworks.asgi.exchange import Exchange, Phase, Visit
from oncekey.frameworks.asgi.lending import LendingRuntime
from oncekey.frameworks.asgi.nesting import request_for
from oncekey.frameworks.asgi.operation import Operation, SyncOperation, operation_of
from oncekey.frameworks.asgi.threads import in_thread, not_awaitable
from oncekey.frameworks.asgi.unkeyed import NoConnectionError, run_unkeyed
from oncekey.runtimes.aio import flush

if TYPE_CHECKING:
    from collections.abc import Callable

    from oncekey.core.model import Claim
    from oncekey.engine.enrolment import Enrolment
    from oncekey.engine.run import Run
    from oncekey.frameworks.asgi.installation import Installation

F = TypeVar("F", bound="Callable[..., Any]")

STORE_DOWN = Refuse(Code.STORE_UNAVAILABLE, retry_after=1)
NO_FACTORY = "this framework needs once.install(app), which knows how to make its responses"


def protect(handler: F, enrolment: Enrolment) -> F:
    """The handler, protected. It keeps its type: a unit test calls it with an `op` of its own."""
    if inspect.isgeneratorfunction(handler) or inspect.isasyncgenfunction(handler):
        raise ConfigurationError(
            f"{handler.__qualname__}: a generator streams its answer piece by piece, which cannot be stored before "
            "it is sent; return a StreamingResponse or the whole answer"
        )
    name = operation_parameter(handler, blocking=enrolment.blocking)

    @functools.wraps(handler)
    async def awaited(*args: Any, **kwargs: Any) -> Any:
        if (name is not None and name in kwargs) or any(isinstance(arg, Operation | SyncOperation) for arg in args):
            return await _plainly(handler, args, kwargs)
        call = _Call(handler, enrolment, name, args, kwargs)
        request = request_for(enrolment)
        if isinstance(request, Exchange) and request.scope["method"] not in SAFE:
            return await call.with_key(request)
        return await call.without_key(request)

    @functools.wraps(handler)
    def called(*args: Any, **kwargs: Any) -> Any:
        exchange = wsgi_exchange.current.get()
        if exchange is None:
            return awaited(*args, **kwargs)
        return exchange.call(handler, enrolment, name, args, kwargs)

    wrapper: Any = _awaitable(called) if enrolment.blocking else awaited
    signature = inspect.signature(handler)
    shown = [parameter for parameter in signature.parameters.values() if parameter.name != name]
    wrapper.__signature__ = signature.replace(parameters=shown)
    wrapper.__annotations__ = {key: note for key, note in handler.__annotations__.items() if key != name}
    wrapper.__oncekey__ = enrolment
    return cast("F", wrapper)


def _awaitable(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function that ASGI frameworks await, although it returns its result at once where a WSGI server calls it."""
    if sys.version_info >= (3, 12):
        return inspect.markcoroutinefunction(function)
    function._is_coroutine = asyncio.coroutines._is_coroutine  # type: ignore[attr-defined]  # noqa: SLF001
    return function


async def _plainly(handler: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    result = handler(*args, **kwargs)
    return await result if inspect.isawaitable(result) else result


class _Call:
    """One call of a protected handler."""

    __slots__ = ("args", "enrolment", "handler", "kwargs", "name")

    def __init__(
        self,
        handler: Callable[..., Any],
        enrolment: Enrolment,
        name: str | None,
        args: Any,
        kwargs: Any,
    ) -> None:
        self.handler = handler
        self.enrolment = enrolment
        self.name = name
        self.args = args
        self.kwargs = kwargs

    async def with_key(self, exchange: Exchange) -> Any:
        """Claim, then run what may run; a replay or a refusal is sent by the exchange whatever we return."""
        await exchange.claim(self.enrolment)
        if exchange.phase is Phase.RUNNING:
            return await self._run(exchange)
        if exchange.answer is None:
            assert exchange.run is not None
            return await self._unkeyed(exchange, exchange.run.claim)
        # Inner logs and metrics see the true status; the bytes are the exchange's.
        return _respond(exchange.installation, Answer(exchange.answer.status, (), b""))

    async def without_key(self, request: Exchange | Visit) -> Any:
        """Refuse, or run as if we were not there."""
        policy = self.enrolment.policy
        if policy.require_key and request.scope["method"] not in SAFE:
            return _respond(request.installation, refusal(Refuse(Code.KEY_MISSING), policy))
        return await self._unkeyed(request, None)

    async def _run(self, exchange: Exchange) -> Any:
        run = exchange.run
        assert run is not None
        try:
            if run.course is not None:
                run.course.check()
            if exchange.lent is not None and run.tx is not None:
                exchange.lent.joins(run.tx, self.enrolment)
            return await (self._in_thread if self.enrolment.blocking else self._in_loop)(exchange, run)
        except BaseException as error:
            exchange.ended.error = error
            raise

    async def _in_loop(self, exchange: Exchange, run: Run) -> Any:
        tx, ended = run.tx, exchange.ended
        stepping = None
        if run.course is not None:
            runtime = LendingRuntime(exchange.runtime, exchange)
            stepping = Stepping(runtime.drive, run.store, run.course, run.parcels)
        op = operation_of(Operation, run, stepping)
        ended.entered = True
        try:
            result = await self.handler(*self.args, **self._with(op))
        finally:
            ended.kept, ended.rolled_back = op.kept, op.rolled_back
        if tx is not None and not op.rolled_back:
            await flush(tx)
        if stepping is not None and exchange.lent is not None:
            exchange.lent.check()
            await exchange.lent.rest()
        return result

    async def _in_thread(self, exchange: Exchange, run: Run) -> Any:
        """Run the handler in a thread, with a connection in its hands: a handler never waits for one there."""
        installation, ended = exchange.installation, exchange.ended
        stepping = None
        if run.course is not None and self.enrolment.effects is not Effects.INLINE:
            runtime = installation.threads()
            stepping = Stepping(runtime.drive, runtime.engine.store, run.course, run.parcels)
        op = operation_of(SyncOperation, run, stepping)

        def called() -> Any:
            ended.entered = True
            try:
                return not_awaitable(self.handler(*self.args, **self._with(op)), self.enrolment)
            finally:
                ended.kept, ended.rolled_back = op.kept, op.rolled_back

        return await in_thread(installation.handlers, called)

    async def _unkeyed(self, request: Exchange | Visit, claim: Claim | None) -> Any:
        try:
            return await run_unkeyed(
                lambda op: self.handler(*self.args, **self._with(op)), self.enrolment, request, claim
            )
        except NoConnectionError:
            return _respond(request.installation, refusal(STORE_DOWN, self.enrolment.policy))

    def _with(self, op: object) -> dict[str, Any]:
        return self.kwargs if self.name is None else {**self.kwargs, self.name: op}


def _respond(installation: Installation, answer: Answer) -> Any:
    if installation.respond is None:
        raise RuntimeError(NO_FACTORY)
    return installation.respond(answer)
