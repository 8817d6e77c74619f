"""Functions as operations: a call is claimed under its key like a request, with its arguments as the body.

The function's return value is stored as JSON, and `RejectedError` is its final refusal; every caller gets the stored
result. The refusal of a call is raised, and kept apart from exceptions of the function itself (`CallRefused`): an inner
protected function raises the same classes, which do not concern the outer call. A `def` function runs in the thread
that calls it, an `async def` function in its event loop; the engine does the rest (`engine/serve.py`).

A `Calling` corresponds to the exchange of a request. While the engine's flow is suspended at the function, it captures
the function's result: a value, a `RejectedError`, or an exception.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeGuard

from oncekey.core.answers import Answer, accepted_of
from oncekey.core.errors import MalformedError, OncekeyError, RejectedError, ResultNotStorableError
from oncekey.core.keys import looks_personal
from oncekey.core.model import UNAVAILABLE, Claim, Code, Headers, RecordId, Refuse
from oncekey.core.not_run import InProgressError, error_of
from oncekey.core.policy import KeyCheck
from oncekey.core.scope import scope_of
from oncekey.databases import handler_sql
from oncekey.engine.actions import StoppedAtHandler
from oncekey.engine.claiming import JSON, Caller, ClaimInput, Parts, claim_for, fingerprint_for, personal
from oncekey.engine.deciding import HandlerEnded, decided, is_inner, leaving
from oncekey.engine.operation import Operation, operation_of, unkeyed_operation
from oncekey.engine.run import Run, Site
from oncekey.engine.serve import end_after_bug, serve
from oncekey.engine.steps import Stepping
from oncekey.engine.sync_operation import SyncOperation
from oncekey.frameworks import blocking, threaded
from oncekey.frameworks.asgi import Receive, Scope, Send, requests
from oncekey.frameworks.asgi.middleware import Exchange
from oncekey.frameworks.resuming import Resumption
from oncekey.frameworks.shared import RESUMPTION, ApplicationShared, thread_exchange
from oncekey.runtimes.aio import Changed, shielded

if TYPE_CHECKING:
    from oncekey.core.calls import Shape
    from oncekey.core.endings import Decision
    from oncekey.engine.enrolment import Enrolment
    from oncekey.frameworks.asgi.installation import Installation

    Chooser = Callable[[Mapping[str, Any]], Any]


_OPERATIONS = (Operation, SyncOperation)
DONE: Final = 200
DECLINED: Final = 422
"""The status that stands for a returned value (`DONE`) or a final refusal (`DECLINED`)."""
_NO: Final = 400
_FAULT: Final = 500
_ABANDONED: Final = (408, 410)
"""The stored result of an operation that no process may finish any more."""
CALL: Final = "CALL"
"""The method of a function's call; its path is the name of its operation."""
_FUNCTION: Final = "function"
_JSON: Final[Headers] = ((b"content-type", b"application/json"),)
NESTED: Final = (
    "{inner} was called while {outer} holds a transaction: its effects would remain if the rows of {outer} are rolled "
    "back; call it before or after, or call {inner}.__wrapped__ with the same op"
)
running: ContextVar[Run | None] = ContextVar("oncekey_function", default=None)
"""The current call."""


class Function:
    """One protected function."""

    def __init__(
        self,
        function: Callable[..., Any],
        enrolment: Enrolment,
        shape: Shape,
        *,
        key: Chooser,
        key_name: str,
        tenant: Chooser,
        threads: blocking.Threads,
        loops: Installation,
    ) -> None:
        self.__wrapped__ = function
        self.__oncekey__ = enrolment
        self.shape = shape
        self._key, self._key_name = key, key_name
        self._tenant = tenant
        self._threads = threads
        self._loops = loops
        self.op_name: str | None = None
        """The parameter that takes the operation."""

    def is_bare(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
        """Whether the caller passes its own operation, as a unit test does: then the call is not protected."""
        return (self.op_name is not None and self.op_name in kwargs) or any(
            isinstance(one, _OPERATIONS) for one in args
        )

    def __call__(self, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
        """The value of a call, or for `async def` an awaitable."""
        return self.run(args, kwargs).result() if self.__oncekey__.blocking else _result(self.arun(args, kwargs))

    def run(self, args: tuple[Any, ...], kwargs: Mapping[str, Any], key: object = None) -> CallOutcome:
        """One call of a `def` function, whose exceptions are raised; a caller that has the key passes it as `key`."""
        try:
            return self._in_thread(self._asked(args, kwargs, key))
        except CallRefused as refused:
            return CallOutcome(None, replayed=False, refusal=refused.error)
        except BaseException as error:
            leaving(error)
            raise

    async def arun(self, args: tuple[Any, ...], kwargs: Mapping[str, Any], key: object = None) -> CallOutcome:
        """One call of an `async def` function."""
        try:
            return await self._in_loop(self._asked(args, kwargs, key))
        except CallRefused as refused:
            return CallOutcome(None, replayed=False, refusal=refused.error)
        except BaseException as error:
            leaving(error)
            raise

    async def enter(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Resume a call whose process died: a completer sends it as a request, as it does to an application."""
        stored, status = (await receive())["body"], DONE
        asked = FunctionCall(scope[RESUMPTION].record.id.key, "", "", {}, stored, scope[RESUMPTION])
        try:
            await (asyncio.to_thread(self._in_thread, asked) if self.__oncekey__.blocking else self._in_loop(asked))
        except CallRefused:
            status = DECLINED
        await send({"type": "http.response.start", "status": status, "headers": []})

    def _asked(self, args: tuple[Any, ...], kwargs: Mapping[str, Any], key: object) -> FunctionCall:
        check_nesting(self.__oncekey__.operation)
        try:
            arguments = self.shape.bind(args, kwargs)
            chosen = self._key(arguments) if key is None else key
            return FunctionCall(
                chosen, self._key_name, self._tenant(arguments), arguments, self.shape.written(arguments)
            )
        except MalformedError as error:
            raise CallRefused(error) from error

    def _calling(self, asked: FunctionCall, shared: ApplicationShared, site: Site) -> Calling:
        return Calling(self.__wrapped__, self.__oncekey__, self.shape, asked, shared=shared, site=site)

    def _in_thread(self, asked: FunctionCall) -> CallOutcome:
        threads = self._threads
        if not threads.ready():
            raise CallRefused(error_of(UNAVAILABLE, self.__oncekey__.policy, self.__oncekey__.operation))
        calling = self._calling(asked, threads, threads.site)
        runtime, run = threads.runtime, calling.run
        try:
            result = runtime.run(calling.life)
            if not isinstance(result, StoppedAtHandler):
                if isinstance(result, Answer):
                    return calling.outcome_of(result)
                bare = unkeyed_operation(SyncOperation, run.claim, None)
                with calling.unprotected():
                    return CallOutcome(threaded.not_awaitable(calling.invoke(bare), run.enrolment), replayed=False)
            token = running.set(run)
            try:
                op = operation_of(SyncOperation, run, calling.stepping(runtime.drive))
                calling.returned(threaded.called(calling.invoke, op, calling.ended, run.enrolment))
            except BaseException as error:  # noqa: BLE001  (any exception: the flow ends before it is raised)
                calling.raised(error)
            finally:
                running.reset(token)
            return calling.over(runtime.run(calling.life, calling.decision()))
        finally:
            if calling.unsettled:
                runtime.instead(calling.life, end_after_bug(run, calling.life, entered=calling.ended.entered))

    async def _in_loop(self, asked: FunctionCall) -> CallOutcome:
        loops = self._loops
        runtime, site = loops.runtime_and_site()
        calling = self._calling(asked, loops, site)
        run = calling.run
        loops.running_work.began()
        try:
            try:
                result = await runtime.run(calling.life)
            except Changed as changed:
                raise changed.cancelled from None
            if not isinstance(result, StoppedAtHandler):
                if isinstance(result, Answer):
                    return calling.outcome_of(result)
                with calling.unprotected():
                    bare = unkeyed_operation(Operation, run.claim, None)
                    return CallOutcome(await calling.invoke(bare), replayed=False)
            token = running.set(run)
            if run.phased_run is not None:
                calling.entered_by(asyncio.current_task())
                loops.interruptible.add(calling)
            try:
                op = operation_of(Operation, run, calling.stepping(runtime.drive))
                calling.ended.entered, opened = True, handler_sql.running.set(run.enrolment)
                try:
                    value = await calling.invoke(op)
                finally:
                    handler_sql.running.reset(opened)
                    calling.ended.kept, calling.ended.rolled_back = op.kept, op.rolled_back
                if run.tx is not None and not op.rolled_back and hasattr(run.tx, "flush"):
                    await run.tx.flush()
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
                await shielded(runtime.drive(end_after_bug(run, calling.life, entered=calling.ended.entered)))


async def _result(coming: Awaitable[CallOutcome]) -> Any:  # noqa: ANN401  (what the function returns)
    return (await coming).result()


def protected(function: Function, name: str | None) -> Any:  # noqa: ANN401  (a function like the one that it protects)
    """The public signature: the function without its operation, `name`. A unit test may pass its own."""
    inner, function.op_name = function.__wrapped__, name

    @functools.wraps(inner)
    def plain(*args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
        return inner(*args, **kwargs) if function.is_bare(args, kwargs) else function(*args, **kwargs)

    @functools.wraps(inner)
    async def awaited(*args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
        return await inner(*args, **kwargs) if function.is_bare(args, kwargs) else await function(*args, **kwargs)

    wrapper: Any = plain if function.__oncekey__.blocking else awaited
    wrapper.__signature__ = function.shape.signature
    wrapper.__annotations__ = {key: note for key, note in inner.__annotations__.items() if key != name}
    wrapper.__oncekey_function__ = function
    return wrapper


# One call, from its claim to its caller's result: shared by threads and event loops.


class FunctionCall(NamedTuple):
    """The arguments of a claim."""

    key: object
    key_name: str
    tenant: str
    arguments: dict[str, Any]
    stored: bytes
    resumption: Resumption | None = None


class CallOutcome(NamedTuple):
    """The result of a call: the function's value, and whether it was stored by an earlier call; or an error."""

    value: Any
    replayed: bool
    refusal: OncekeyError | None = None
    """The refusal of this call, or the function's own final refusal."""

    def result(self) -> Any:  # noqa: ANN401  (what the function returns)
        """The value, as a caller gets it."""
        if self.refusal is not None:
            raise leaving(self.refusal)
        return self.value


class CallRefused(Exception):  # noqa: N818  (it never leaves this module)
    """Carries the refusal of this call past all exceptions of the function itself."""

    def __init__(self, error: OncekeyError) -> None:
        super().__init__(str(error))
        self.error = error


class Calling:
    """A call in progress. Its flow begins with the claim and is suspended while `invoke` runs."""

    def __init__(
        self,
        function: Callable[..., Any],
        enrolment: Enrolment,
        shape: Shape,
        asked: FunctionCall,
        *,
        shared: ApplicationShared,
        site: Site,
    ) -> None:
        resumption = asked.resumption
        if resumption is None:
            claim = claim_of_call(asked, enrolment)
            if isinstance(claim, Refuse):
                raise CallRefused(error_of(claim, enrolment.policy, enrolment.operation))
        else:
            claim = resumption.claim(enrolment.policy)
        limits = None
        if resumption is None and enrolment.limited:
            limits = shared.limits.of(site.store, (), claim, enrolment.policy)
        self._function = function
        self._shape = shape
        self._arguments = shape.read(asked.stored, asked.arguments)
        self.run = Run(site, claim, enrolment, self, resumed=resumption is not None, limits=limits)
        self.life = serve(self.run)
        self.ended = HandlerEnded()
        self._value: Any = None
        self._ours: Answer | None = None
        self._task: asyncio.Task[Any] | None = None
        # The call as a request and a response.
        self.status: int | None = None
        self.headers = _JSON
        self.kept: bytes | None = b""
        self.refused: str | None = None
        self.echo: bytes | None = None
        self.status_url: str | None = None
        self.trace_id = ""

    @property
    def unsettled(self) -> bool:
        """Whether it is claimed and not yet settled."""
        return inspect.getgeneratorstate(self.life) == inspect.GEN_SUSPENDED

    def invoke(self, op: object) -> Any:  # noqa: ANN401  (what the function returns)
        """Call the function."""
        args, kwargs = self._shape.invocation(self._arguments, op)
        return self._function(*args, **kwargs)

    def stepping(self, drive: Callable[[Any], Any]) -> Stepping | None:
        """The steps of a phased function."""
        run = self.run
        if run.phased_run is None:
            return None
        run.phased_run.check()
        return Stepping(drive, run.store, run.phased_run, run.parcels)

    def entered_by(self, task: asyncio.Task[Any] | None) -> None:
        """Set the task that a shutdown may cancel, because a worker or another caller can resume the call."""
        self._task = task

    def interrupt(self) -> None:
        """Cancel the call at the end of the shutdown's grace period, unless an outside call is open."""
        phased_run = self.run.phased_run
        if self._task is not None and phased_run is not None and phased_run.intent is None:
            phased_run.halted = True
            self._task.cancel()

    # How it ended.

    def returned(self, value: object) -> None:
        """Note the function's return value."""
        self.kept, self._value = self._shape.returned(value)
        self.status = DONE

    def raised(self, error: BaseException) -> None:
        """Note the function's exception. Its own `RejectedError` is its result, which every later caller gets, too."""
        self.ended.error = error
        self.ended.cancelled = not isinstance(error, Exception)
        if self._is_own_no(error):
            try:
                self.kept = self._shape.stored(error.value)
            except ResultNotStorableError as unfit:
                self.ended.error = unfit
            else:
                error.value, self.status = self._shape.plain(self.kept), DECLINED

    def decision(self) -> Decision:
        """The decision about its end."""
        error = self.ended.error if self.status is None else None
        decision, self._ours = decided(self.run, self.ended, self, error)
        return decision

    # The caller's result.

    def over(self, settled: object) -> CallOutcome:
        """The result of a run, once it is settled."""
        error = self.ended.error
        answer = settled if isinstance(settled, Answer) else self._ours
        if isinstance(error, RejectedError) and self.status == DECLINED and answer is None:
            raise CallRefused(error)
        if error is not None and (answer is None or not isinstance(error, Exception) or _is_failure(answer)):
            raise error
        return CallOutcome(self._value, replayed=False) if answer is None else self.outcome_of(answer)

    def outcome_of(self, answer: Answer) -> CallOutcome:
        """The exception for a call that was not run, or that replaces its result."""
        verdict = answer.verdict
        assert verdict is not None
        if isinstance(verdict, Refuse):
            raise self._refusal(verdict, self.ended.error)
        stored = verdict.record.response
        if stored is None or stored.body is None:
            raise self._refusal(Refuse(Code.RESPONSE_NOT_STORED))
        if stored.status < _NO:
            return CallOutcome(self._shape.result(stored.body), replayed=True)
        if stored.status in _ABANDONED:
            raise self._refusal(Refuse(Code.TIMED_OUT))
        if stored.status >= _FAULT:
            raise self._refusal(Refuse(Code.EXECUTION_FAILED))
        raise CallRefused(RejectedError(self._shape.plain(stored.body)))

    @contextmanager
    def unprotected(self) -> Iterator[None]:
        """Wraps a run without a record, whose own final refusal is still a refusal."""
        try:
            yield
        except RejectedError as error:
            if self._is_own_no(error):
                raise CallRefused(error) from error
            raise

    def _is_own_no(self, error: BaseException) -> TypeGuard[RejectedError[Any]]:
        """Whether the function itself rejects, and not one that it called."""
        return isinstance(error, RejectedError) and not is_inner(error, self.ended.began)

    def _refusal(self, refuse: Refuse, cause: BaseException | None = None) -> CallRefused:
        error = error_of(refuse, self.run.policy, self.run.enrolment.operation)
        accepted = accepted_of(refuse.record)
        if isinstance(error, InProgressError) and accepted is not None:
            error.value = self._shape.result(accepted.body)
        error.__cause__ = cause
        return CallRefused(error)


def check_nesting(operation: str) -> None:
    """Raise for a call inside a transaction that is not the call's own."""
    for run in _around():
        if run.tx is not None or (run.phased_run is not None and run.phased_run.in_phase):
            raise RuntimeError(NESTED.format(inner=operation, outer=run.enrolment.operation))


def _around() -> Iterator[Run]:
    """The operations that are running here: functions, and handlers of requests."""
    threaded, request = thread_exchange.get(), requests.current.get()
    if threaded is not None and threaded.run is not None and threaded.unsettled:
        yield threaded.run
    if isinstance(request, Exchange) and request.run is not None and request.state is requests.ExchangeState.RUNNING:
        yield request.run
    run = running.get()
    if run is not None:
        yield run


def _is_failure(answer: Answer) -> bool:
    """Whether the response only reports that the run failed: the function's own exception is more precise."""
    return isinstance(answer.verdict, Refuse) and answer.verdict.code is Code.EXECUTION_FAILED


def claim_of_call(asked: FunctionCall, enrolment: Enrolment) -> Claim | Refuse:
    """The claim of a function's call, or the refusal.

    The program chooses the key, which often names a thing, such as an order. Two functions may act on the same thing,
    so each has its own scope within the tenant's.
    """
    policy = enrolment.policy
    given = asked.key
    wrong = _wrong_with(given, policy.min_key_length or 1, policy.max_key_length)
    if wrong is not None or not isinstance(given, str):
        return Refuse(Code.KEY_MALFORMED, detail=f"{asked.key_name} must {wrong}")
    named = personal(given, policy) if policy.pii_check is not KeyCheck.OFF and looks_personal(given) else given
    if isinstance(named, Refuse):
        return named
    parts = Parts(CALL, enrolment.operation, b"", ((b"content-type", JSON),), JSON, asked.stored)
    fingerprint = fingerprint_for(parts, enrolment)
    if isinstance(fingerprint, Refuse):
        return fingerprint
    scope = scope_of(enrolment.namespace, asked.tenant, _FUNCTION, enrolment.operation)
    return claim_for(ClaimInput(RecordId(scope, named), fingerprint, parts, Caller(asked.tenant)), enrolment)


def _wrong_with(key: object, shortest: int, longest: int) -> str | None:
    """The rule that the key of a call breaks; None if a client could send it."""
    if not isinstance(key, str):
        return f"be text, but its value is of type {type(key).__name__}: write it as a str"
    if not key.strip(" "):
        return "not be empty"
    if not (key.isascii() and key.isprintable()):
        return "have printable ASCII characters only: use a digest of anything else"
    if len(key.strip(" ")) < shortest:
        return f"have at least {shortest} characters, spaces around it not counted"
    return None if len(key) <= longest else f"have at most {longest} characters: use a digest of a longer one"
