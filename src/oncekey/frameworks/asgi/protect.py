"""`protect`: the wrapper around a handler that claims just before it calls the handler.

A wrapper runs after all of the route's dependencies and validation, which a dependency of oncekey's could not
guarantee. Its `__signature__` hides the handler's `op` parameter from the framework.

That parameter is found by its annotation: a type, or text whose names are looked up. Text is never evaluated, because
some names can only be imported by a type checker.

A handler also runs without a record, if the client sent no key or the route fails open while the store is down
(`run_unkeyed`): then a retry runs it again, and the rows of a LOCAL handler are committed or rolled back as with a key.
"""

from __future__ import annotations

import ast
import asyncio.coroutines
import builtins
import functools
import inspect
import sys
from types import UnionType
from typing import TYPE_CHECKING, Annotated, Any, Final, TypeVar, Union, cast, get_args, get_origin

from oncekey.core.answers import Answer
from oncekey.core.errors import ConfigurationError, StoreError
from oncekey.core.lazy import Lazy
from oncekey.core.model import UNAVAILABLE, Claim, Effects, Refuse
from oncekey.databases.handler_sql import running
from oncekey.engine.deciding import rows_of
from oncekey.engine.enrolment import SAFE, Enrolment
from oncekey.engine.operation import Held, Operation, operation_of, unkeyed_operation
from oncekey.engine.serve import NoConnectionError, Unkeyed, serve_unkeyed
from oncekey.frameworks.asgi.middleware import Exchange
from oncekey.frameworks.asgi.requests import ExchangeState, UnkeyedRequest, current, request_for, trace_of
from oncekey.frameworks.shared import thread_exchange
from oncekey.runtimes.aio import Changed, shielded

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from oncekey.engine import steps, sync_operation
    from oncekey.engine.run import Run
    from oncekey.frameworks import threaded
    from oncekey.frameworks.asgi import transactions
    from oncekey.frameworks.asgi.installation import Installation
    from oncekey.frameworks.asgi.transactions import TransactionUser
else:
    steps = Lazy("oncekey.engine.steps")
    sync_operation = Lazy("oncekey.engine.sync_operation")
    threaded = Lazy("oncekey.frameworks.threaded")
    transactions = Lazy("oncekey.frameworks.asgi.transactions")


F = TypeVar("F", bound="Callable[..., Any]")

NO_FACTORY = "this framework needs once.install(app), which creates its responses"


def protect(handler: F, enrolment: Enrolment) -> F:
    """Wrap a handler so that it claims. The wrapper keeps its type: a unit test calls it with its own `op`."""
    name = operation_name(handler, enrolment)

    @functools.wraps(handler)
    async def awaited(*args: Any, **kwargs: Any) -> Any:
        if (args or name in kwargs) and has_operation(name, args, kwargs):
            return await _plainly(handler, args, kwargs)
        request = request_for(enrolment)
        if type(request) is not Exchange or request.scope["method"] in SAFE:
            return await _without_key(request, enrolment, _invocation(handler, name, args, kwargs))
        await request.claim(enrolment)
        if request.state is ExchangeState.RUNNING:
            return await _run(request, enrolment, handler, name, args, kwargs)
        if request.answer is None:
            assert request.run is not None
            return await _unkeyed(request, enrolment, _invocation(handler, name, args, kwargs), request.run.claim)
        # The exchange sends its own bytes, whatever this returns. Inner logs and metrics see the true status.
        return _respond(request.installation, Answer(request.answer.status, (), b""))

    @functools.wraps(handler)
    def direct(*args: Any, **kwargs: Any) -> Any:
        exchange = thread_exchange.get()
        if exchange is not None:
            return exchange.call(handler, enrolment, name, args, kwargs)
        if current.get() is not None and not _in_event_loop():
            # The framework did not see that this is awaitable, and has called it in a thread like a `def` handler.
            from anyio import from_thread  # noqa: PLC0415  (a framework that calls handlers in threads has it)

            return from_thread.run(functools.partial(awaited, *args, **kwargs))
        if not has_operation(name, args, kwargs):
            request_for(enrolment)  # raises outside of a request, also where nothing awaits the result
        return awaited(*args, **kwargs)

    return cast("F", shown(_awaitable(direct) if enrolment.blocking else awaited, handler, enrolment, name))


def shown(wrapper: Any, handler: Callable[..., Any], enrolment: Enrolment, name: str | None) -> Any:
    """Make a wrapper look to a framework like the handler without its operation parameter, and add its enrolment."""
    signature = inspect.signature(handler)
    others = [parameter for parameter in signature.parameters.values() if parameter.name != name]
    wrapper.__signature__ = signature.replace(parameters=others)
    wrapper.__annotations__ = {key: note for key, note in handler.__annotations__.items() if key != name}
    wrapper.__oncekey__ = enrolment
    wrapper.__oncekey_wrapper__ = wrapper  # a decorator above copies both attributes, and is another function
    return wrapper


def operation_name(handler: Callable[..., Any], enrolment: Enrolment) -> str | None:
    """The name of a handler's operation parameter, if it has one; raises for a generator, which cannot be protected."""
    if inspect.isgeneratorfunction(handler) or inspect.isasyncgenfunction(handler):
        raise ConfigurationError(
            f"{handler.__qualname__}: a generator streams its response piece by piece, which cannot be stored before "
            "it is sent; return a StreamingResponse or the whole response"
        )
    return operation_parameter(handler, blocking=enrolment.blocking)


def has_operation(name: str | None, args: Any, kwargs: Any) -> bool:
    """Whether a unit test calls the handler with its own operation."""
    return (name is not None and name in kwargs) or (bool(args) and any(isinstance(arg, Held) for arg in args))


def _in_event_loop() -> bool:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True


def _awaitable(function: Callable[..., Any]) -> Callable[..., Any]:
    """Mark a function as a coroutine function for ASGI frameworks; under WSGI it returns its result at once."""
    if sys.version_info >= (3, 12):
        return inspect.markcoroutinefunction(function)
    function._is_coroutine = asyncio.coroutines._is_coroutine  # type: ignore[attr-defined]  # noqa: SLF001
    return function


async def _plainly(handler: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    result = handler(*args, **kwargs)
    return await result if inspect.isawaitable(result) else result


async def _run(  # noqa: PLR0917  (an object for them would cost one more call)
    exchange: Exchange,
    enrolment: Enrolment,
    handler: Callable[..., Any],
    name: str | None,
    args: Any,
    kwargs: Any,
) -> Any:
    """Call the handler of a request that has claimed its key."""
    run, ended, stepping = exchange.run, exchange.ended, None
    assert run is not None
    try:
        if run.phased_run is not None:
            run.phased_run.check()
        if exchange.transaction is not None and run.tx is not None:
            exchange.transaction.joins(run.tx, enrolment)
        if enrolment.blocking:
            return await _in_thread(exchange, run, _invocation(handler, name, args, kwargs))
        if run.phased_run is not None:
            runtime = transactions.RequestRuntime(exchange.runtime, exchange)
            stepping = steps.Stepping(runtime.drive, run.store, run.phased_run, run.parcels)
        op = operation_of(Operation, run, stepping)
        if name is not None:
            kwargs[name] = op
        ended.entered, token = True, running.set(enrolment)
        try:
            result = await handler(*args, **kwargs)
        finally:
            running.reset(token)
            ended.kept, ended.rolled_back = op.kept, op.rolled_back
        if run.tx is not None and not op.rolled_back and hasattr(run.tx, "flush"):
            await run.tx.flush()
        if stepping is not None and exchange.transaction is not None:
            exchange.transaction.check()
            await exchange.transaction.rest()
    except BaseException as error:
        ended.error = error
        raise
    return result


async def _in_thread(exchange: Exchange, run: Run, invoke: Callable[[object], Any]) -> Any:
    """Run the handler in a thread. It has its connection already, so that it never waits for one there."""
    installation, enrolment = exchange.installation, run.enrolment
    stepping = None
    if run.phased_run is not None and enrolment.effects is not Effects.INLINE:
        runtime = installation.threads()
        stepping = steps.Stepping(runtime.drive, runtime.engine.store, run.phased_run, run.parcels)
    op = operation_of(sync_operation.SyncOperation, run, stepping)
    return await threaded.in_thread(
        installation.handlers, lambda: threaded.called(invoke, op, exchange.ended, enrolment)
    )


async def _without_key(
    request: Exchange | UnkeyedRequest, enrolment: Enrolment, invoke: Callable[[object], Any]
) -> Any:
    """Refuse a request without a key if the policy requires one; otherwise run the handler unprotected."""
    if request.scope["method"] not in SAFE:
        refusal = request.installation.without_key(enrolment, trace_of(request.scope))
        if refusal is not None:
            return _respond(request.installation, refusal)
    return await _unkeyed(request, enrolment, invoke, None)


async def _unkeyed(
    request: Exchange | UnkeyedRequest, enrolment: Enrolment, invoke: Callable[[object], Any], claim: Claim | None
) -> Any:
    try:
        return await run_unkeyed(invoke, enrolment, request, claim)
    except NoConnectionError as error:
        request.installation.failed("begin", error.why)
        return _turned_away(request, UNAVAILABLE, enrolment)


def _turned_away(request: Exchange | UnkeyedRequest, refused: Refuse, enrolment: Enrolment) -> Any:
    installation = request.installation
    return _respond(installation, installation.turn_away(refused, enrolment, trace_id=trace_of(request.scope)))


def _invocation(handler: Callable[..., Any], name: str | None, args: Any, kwargs: Any) -> Callable[[object], Any]:
    return lambda op: handler(*args, **(kwargs if name is None else {**kwargs, name: op}))


def _respond(installation: Installation, answer: Answer) -> Any:
    if installation.respond is None:
        raise RuntimeError(NO_FACTORY)
    return installation.respond(answer)


_BY_NAME: Final = {"Operation": False, "SyncOperation": True}
"""The names of the operation classes, and whether each is for `def` handlers."""


def operation_parameter(handler: Callable[..., Any], *, blocking: bool) -> str | None:
    """The name of the parameter that is annotated as an operation, if there is one."""
    wanted, other = ("SyncOperation", "Operation") if blocking else ("Operation", "SyncOperation")
    names = getattr(inspect.unwrap(handler), "__globals__", {})
    named: list[str] = []
    for parameter in inspect.signature(handler).parameters.values():
        if parameter.name == "op" and parameter.annotation is parameter.empty:
            raise ConfigurationError(
                f"{handler.__qualname__} has a parameter op without an annotation, which the framework would take for "
                f"one of the request's: write op: {wanted}"
            )
        kinds = list(_kinds(parameter.annotation, names))
        if parameter.name == "op" and not kinds and _is_unresolved(parameter.annotation, names):
            raise ConfigurationError(
                f"{handler.__qualname__}: the annotation {parameter.annotation} of op exists for type checkers only, "
                f"so the framework would take op for a parameter of the request's: write op: {wanted}"
            )
        if (not blocking) in kinds:
            word = "def" if blocking else "async def"
            raise ConfigurationError(
                f"{handler.__qualname__} is `{word}`, so annotate {parameter.name} as {wanted}, not {other}"
            )
        if blocking in kinds:
            named.append(parameter.name)
    if len(named) > 1:
        raise ConfigurationError(f"{handler.__qualname__} has {len(named)} parameters of type {wanted}: one is enough")
    return named[0] if named else None


def _is_unresolved(annotation: object, names: Mapping[str, object]) -> bool:
    """Whether an annotation is a name that does not exist when the program runs."""
    name = annotation.partition("[")[0].strip() if isinstance(annotation, str) else ""
    return name.isidentifier() and name not in names and not hasattr(builtins, name)


def _kinds(annotation: object, names: Mapping[str, object]) -> Iterator[bool]:
    """The operations that an annotation names, by `Held.blocking`: `Operation[X]`, `Operation | None`, or an alias."""
    if isinstance(annotation, str):
        try:
            yield from _spoken(ast.parse(annotation.strip(), mode="eval").body, names)
        except SyntaxError:
            return
    elif get_origin(annotation) in (Union, UnionType, Annotated):
        for part in get_args(annotation):
            yield from _kinds(part, names)
    else:
        meant = get_origin(annotation) or annotation
        if isinstance(meant, type) and issubclass(meant, Held) and meant.__base__ is Held:
            yield meant.blocking


def _spoken(node: ast.expr, names: Mapping[str, object]) -> Iterator[bool]:
    match node:
        case ast.BinOp(left=left, op=ast.BitOr(), right=right):
            yield from _spoken(left, names)
            yield from _spoken(right, names)
        case ast.Subscript(value=ast.Name(id="Annotated" | "Optional" | "Union"), slice=ast.Tuple(elts=parts)):
            for part in parts:
                yield from _spoken(part, names)
        case ast.Subscript(value=ast.Name(id="Annotated" | "Optional" | "Union"), slice=part):
            yield from _spoken(part, names)
        case ast.Subscript(value=value):
            yield from _spoken(value, names)
        case ast.Constant(value=str() as text):
            yield from _kinds(text, names)
        case ast.Name(id=name):
            yield from _looked_up(names.get(name), name)
        case ast.Attribute(value=ast.Name(id=module), attr=name):
            yield from _looked_up(getattr(names.get(module), name, None), name)
        case ast.Attribute(attr=name):
            yield from _looked_up(None, name)


def _looked_up(found: object, name: str) -> Iterator[bool]:
    """The operations that a name refers to; if only a type checker imports its value, the name itself decides."""
    if found is not None:
        yield from _kinds(found, {})
    elif name in _BY_NAME:
        yield _BY_NAME[name]


async def run_unkeyed(
    invoke: Callable[[object], Any], enrolment: Enrolment, request: TransactionUser, claim: Claim | None
) -> object:
    """Call the handler without a record, in a separate transaction if it is LOCAL."""
    installation = request.installation
    if enrolment.effects is not Effects.LOCAL:
        if enrolment.blocking:
            op = unkeyed_operation(sync_operation.SyncOperation, claim, None)
            return await threaded.in_thread(
                installation.handlers, lambda: threaded.not_awaitable(invoke(op), enrolment)
            )
        return await invoke(unkeyed_operation(Operation, claim, None))
    await request.read_ahead(enrolment.policy)
    runtime, site = installation.runtime_and_site()
    if enrolment.blocking:
        run, threads = Unkeyed(site, claim), installation.threads()
        return await threaded.in_thread(
            installation.handlers, lambda: threaded.run_blocking(invoke, enrolment, run, threads)
        )
    transaction = request.transaction
    if transaction is not None:
        await transaction.rest()
    run = Unkeyed(site, claim, None if transaction is None else transaction.business_tx)
    flow = serve_unkeyed(run)
    try:
        await runtime.run(flow)
    except Changed as changed:
        raise changed.cancelled from None
    except StoreError as error:
        raise NoConnectionError(error) from error
    operation = unkeyed_operation(Operation, claim, run)
    try:
        request.unkeyed_tx = run.tx  # for a dependency that requests it only now
        if transaction is not None:
            transaction.joins(run.tx, enrolment)
        result = await invoke(operation)
        rows = rows_of(enrolment, operation, result, raised=False)
    except BaseException as error:
        # The roll-back is shielded: in a cancelled scope it would be cancelled, too.
        await shielded(runtime.finish(flow, rows_of(enrolment, operation, error, raised=True)))
        raise
    _, cancelled = await runtime.finish(flow, rows)
    if cancelled is not None:
        raise cancelled
    return cast("object", result)
