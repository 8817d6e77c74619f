"""`Operation`: what an `async def` handler receives as `op`; `SyncOperation`, for `def`, has its own module."""

from __future__ import annotations

import secrets
from typing import TYPE_CHECKING, Any, ClassVar, Generic, NoReturn, ParamSpec, overload

from oncekey.canonical.digests import downstream_key
from oncekey.core.errors import ConfigurationError, LeaseLostError
from oncekey.core.lazy import exports
from oncekey.core.model import Claim, Effects

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Coroutine
    from datetime import timedelta
    from typing import Concatenate

    from typing_extensions import TypeVar

    from oncekey.engine.phases import PhasedRun
    from oncekey.engine.run import Parcels, Run
    from oncekey.engine.serve import Unkeyed
    from oncekey.engine.step_types import async_call
    from oncekey.engine.steps import Stepping
    from oncekey.engine.sync_operation import SyncOperation as SyncOperation  # noqa: PLC0414  (exported, see `exports`)

    Conn = TypeVar("Conn", default=Any)
else:
    from typing import TypeVar

    Conn = TypeVar("Conn")

    def async_call(method: Callable[..., object]) -> Callable[..., object]:
        """Return the method unchanged: its type is for type checkers."""
        return method

    __getattr__ = exports(SyncOperation="engine.sync_operation")

R = TypeVar("R")
P = ParamSpec("P")
Op = TypeVar("Op", bound="Operation[Any] | SyncOperation[Any]")

LOST = "another owner has this key now: nothing that this handler does from now on is stored"
NO_CONNECTION = (
    "op.connection is for effects=LOCAL and OUTBOX, where the business rows commit with the key; a PHASED handler "
    "writes in op.phase(name, fn, ...), an INLINE handler opens its own"
)
NOT_PHASED = (
    "op.{what} is for effects=PHASED: declare the handler with it, or, if the handler only writes rows, write them "
    "through op.connection (LOCAL)"
)
NOT_OUTBOX = "op.defer is for effects=OUTBOX, where a worker makes the call and its result is the response"
NO_OUTBOX = (
    "op.emit writes a parcel with the business rows, so it is for effects=LOCAL, OUTBOX and, inside op.phase, PHASED"
    ", on a store with an outbox (`oncekey stores`)"
)
WRONG_ORDER = (
    "put @once.protect(...) directly above the function and below the route decorator: "
    "the framework must see the wrapped handler, which has no `op` parameter. A dependency cannot have one either: it "
    "gets the transaction from once.session or once.connection"
)


class Held(Generic[Conn]):
    """The base of both kinds of operations. When the lease is lost, its connection and its methods raise."""

    blocking: ClassVar = False
    """Whether it is for `def` handlers."""

    def __init__(
        self,
        *,
        key: str | None,
        scope: str,
        attempt: int = 1,
        seed: bytes = b"",
        connection: Conn | None = None,
        lost: Callable[[], bool] = bool,
        parcels: Parcels | None = None,
        phased_run: PhasedRun | None = None,
        deferring: bool = False,
        stepping: Stepping | None = None,
    ) -> None:
        self._key = key
        self._scope = scope
        self._attempt = attempt
        self._seed = seed
        self._connection = connection
        self._lost = lost
        self._parcels = parcels
        self._phased_run = phased_run
        self._deferring = deferring
        self._stepping = stepping
        self.kept = False
        self.rolled_back = False

    @property
    def key(self) -> str | None:
        """The client's key; None if the key is optional and the request has none."""
        return self._key

    @property
    def scope(self) -> str:
        """The scope of the key."""
        return self._scope

    @property
    def attempt(self) -> int:
        """1 for the first run, more after a take-over."""
        return self._attempt

    @property
    def connection(self) -> Conn:
        """The open business transaction: its rows are committed together with the stored response, or not at all."""
        self._owned()
        if self._connection is None:
            raise ConfigurationError(NO_CONNECTION)
        return self._connection

    def downstream_key(self, name: str) -> str:
        """The key to send to a provider for the call `name`: the same on every attempt of this request."""
        self._owned()
        return downstream_key(self._seed, name)

    def emit(self, topic: str, payload: object, *, order_by: str | None = None) -> None:
        """Send a message after the commit, at least once: a worker passes `payload` (JSON) to the topic's function.

        Parcels with the same `order_by` are delivered one after the other.
        """
        self._owned()
        if self._parcels is None or (self._phased_run is not None and not self._phased_run.in_phase):
            raise ConfigurationError(NO_OUTBOX)
        self._parcels.emit(topic, payload, order_by, "" if self._phased_run is None else self._phased_run.step or "")

    def defer(self, topic: str, payload: object) -> None:
        """Defer the outside call to a worker. The topic's function returns the response; until then, clients get 202.

        Call it exactly once per request. `payload` is plain JSON, and the only data that the worker gets.
        """
        self._owned()
        if self._parcels is None or not self._deferring:
            raise ConfigurationError(NOT_OUTBOX)
        self._parcels.defer(topic, payload)

    def keep(self) -> None:
        """Commit the business rows even if the handler raises an exception that becomes a final 4xx."""
        self._owned()
        self.kept = True

    def rollback(self) -> None:
        """Roll back the business rows even if the handler returns; the response is stored without them."""
        self._owned()
        self.rolled_back = True

    def _steps(self, what: str) -> Stepping:
        self._owned()
        if self._stepping is None:
            raise ConfigurationError(NOT_PHASED.format(what=what))
        return self._stepping

    def _owned(self) -> None:
        if self._lost() or (self._phased_run is not None and self._phased_run.lost):
            raise LeaseLostError(LOST)

    @classmethod
    def __get_pydantic_core_schema__(cls, *_: object) -> NoReturn:
        """Raise: a framework that calls this sees the bare handler, so the decorators are in the wrong order."""
        raise ConfigurationError(WRONG_ORDER)


class Operation(Held[Conn]):
    """One protected request, for an `async def` handler."""

    # Two signatures per method: a type checker cannot solve `Awaitable[R] | R` for a coroutine or a lambda.

    @overload
    async def phase(
        self, name: str, fn: Callable[Concatenate[Conn, P], Awaitable[R]], /, *args: P.args, **kwargs: P.kwargs
    ) -> R: ...

    @overload
    async def phase(
        self, name: str, fn: Callable[Concatenate[Conn, P], R], /, *args: P.args, **kwargs: P.kwargs
    ) -> R: ...

    def phase(self, name: str, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        """Run `fn(connection, *args, **kwargs)` in its own transaction, once; later runs get the stored result.

        The result is plain data, and is returned in its stored form on the first run, too.
        """
        return self._begun("phase", name, self._steps("phase").phase(name, fn, args, kwargs))

    @async_call
    def call(
        self,
        name: str,
        fn: Callable[..., Any],
        /,
        *args: object,
        repeatable: bool | timedelta,
        parameters: object = None,
        result: object = None,
    ) -> object:
        """Make one outside call: `fn(*args, key=downstream_key)`. It is recorded first, and its result is stored.

        All keywords of `call` are its own options, so `fn` takes its arguments by position; `functools.partial` binds
        other keywords of `fn`.
        `repeatable` declares for how long the provider recognises the downstream key (True: 20 hours). In that time, a
        call whose result was lost is repeated with the same key; otherwise the outcome is unknown, and the call is not
        repeated. `parameters` are the call's parameters: a repetition with different ones is refused.
        `result` declares the result: a type, a dataclass, a pydantic model, or a function that builds it from plain
        data. Every run converts the stored result with it. If that fails, it raises `ResultInvalidError` and parks the
        record for an operator, because the call was made and is not repeated.
        `fn` raises `NotExecutedError` if nothing was sent, and `RejectedError(value)` for the provider's final refusal.
        """
        steps = self._steps("call")
        step = steps.call(name, fn, args, repeatable=repeatable, parameters=parameters, result=result)
        return self._begun("call", name, step)

    @overload
    async def value(self, name: str, fn: Callable[P, Awaitable[R]], /, *args: P.args, **kwargs: P.kwargs) -> R: ...

    @overload
    async def value(self, name: str, fn: Callable[P, R], /, *args: P.args, **kwargs: P.kwargs) -> R: ...

    def value(self, name: str, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        """Run `fn(*args, **kwargs)` once and store its result, such as the time, a random number or an id."""
        return self._begun("value", name, self._steps("value").value(name, fn, args, kwargs))

    def _begun(self, what: str, name: str, step: Coroutine[Any, Any, Any]) -> Coroutine[Any, Any, Any]:
        """Note a step, which runs only if the handler awaits it."""
        assert self._phased_run is not None
        self._phased_run.begun[f"op.{what}({name!r}, ...)"] = step
        return step


def operation_of(kind: type[Op], run: Run, stepping: Stepping | None) -> Op:
    """The operation that the handler of a run gets."""
    assert run.lease is not None
    claim, effects = run.claim, run.enrolment.effects
    return kind(
        key=claim.id.key,
        scope=claim.id.scope,
        attempt=run.lease.attempt,
        seed=run.seed,
        connection=None if run.tx is None else run.tx.connection,
        lost=run.lost,
        parcels=None if effects is Effects.INLINE or run.store.parcels is None else run.parcels,
        phased_run=run.phased_run,
        deferring=effects is Effects.OUTBOX,
        stepping=stepping,
    )


def unkeyed_operation(kind: type[Op], claim: Claim | None, run: Unkeyed | None) -> Op:
    """The operation of a handler whose request has no record."""
    held: dict[str, Any] = {}
    if run is not None:
        held = {"connection": run.tx.connection, "parcels": run.parcels}
    if claim is not None:
        # Only the provider's own idempotency is left, so a retry must send the same downstream key.
        return kind(key=claim.id.key, scope=claim.id.scope, seed=claim.seed, **held)
    # Each request is a separate operation, so no two of them may share a downstream key.
    return kind(key=None, scope="", seed=secrets.token_bytes(32), **held)
