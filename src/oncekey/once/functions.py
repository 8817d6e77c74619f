"""The protected functions and consumers of one `Once`: how they are enrolled, and where they run.

`Once.function` and `Once.inbox` are decorators of this module. Each function is an operation, like a route's
handler: workers, resolvers and operators use its name. All functions share two installations, one for threads and one
for event loops, which stop and fork with those of the applications.
"""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable, Coroutine, Mapping
from typing import TYPE_CHECKING, Any, Concatenate, Final, ParamSpec, Protocol, TypeVar, cast, overload

from oncekey.canonical.fingerprint import Selection
from oncekey.core.calls import Chooses, Shape, operation_name
from oncekey.core.errors import ConfigurationError
from oncekey.core.model import Effects
from oncekey.core.policy import InProgress, Policy
from oncekey.engine.enrolment import WHAT_EFFECTS_MEAN, Enrolment
from oncekey.engine.operation import Operation
from oncekey.engine.sync_operation import SyncOperation
from oncekey.frameworks.asgi.installation import Installation
from oncekey.frameworks.asgi.protect import operation_parameter
from oncekey.frameworks.blocking import Threads
from oncekey.frameworks.functions import Function, protected
from oncekey.frameworks.inbox import Receipt, received
from oncekey.frameworks.options import NO_THREADS, SINGLE_TENANT, settings_of
from oncekey.options import CallOptions
from oncekey.wire import check_stakes, has_threads

if TYPE_CHECKING:
    from oncekey.core.resolvers import Resolvers
    from oncekey.frameworks.shared import ApplicationShared, Engines
    from oncekey.observe.events import Notify

P = ParamSpec("P")
R = TypeVar("R")

FUNCTION: Final = "once.function"
INBOX: Final = "once.inbox"
NO_KEY: Final = (
    "@once.function(key=...) is missing: give the name of the parameter that holds the key, or a function of "
    "parameters, such as key=lambda order: order.id"
)
NO_CONSUMER: Final = (
    "@once.inbox(consumer=...) is missing: give the consumer a name that stays the same; each consumer handles a "
    "message once"
)
NO_ACCEPTED: Final = (
    "on_in_progress='accepted' is an HTTP response: use 'conflict', which raises, or 'wait' for a function"
)


class InboxOptions(CallOptions, total=False):
    """Settings of a consumer; its name is the name of its operation."""


class FunctionOptions(CallOptions, total=False):
    """Settings of a protected function."""

    operation: str


class Protects(Protocol):
    """The decorator of `once.function`: callers leave out the operation, which is the first parameter.

    A function without that parameter is protected too, but type checkers reject it: with a third overload they could
    not choose one if a parameter is `Any`.
    """

    @overload
    def __call__(self, function: Callable[Concatenate[Operation[Any], P], R], /) -> Callable[P, R]: ...

    @overload
    def __call__(self, function: Callable[Concatenate[SyncOperation[Any], P], R], /) -> Callable[P, R]: ...


class Receives(Protocol):
    """The decorator of `once.inbox`: a consumer takes the message's id first, and returns a `Receipt`."""

    @overload
    def __call__(
        self, function: Callable[Concatenate[Operation[Any], P], Any], /
    ) -> Callable[Concatenate[str, P], Coroutine[Any, Any, Receipt]]: ...

    @overload
    def __call__(
        self, function: Callable[Concatenate[SyncOperation[Any], P], Any], /
    ) -> Callable[Concatenate[str, P], Receipt]: ...


class Owner(Protocol):
    """The part of `Once` that functions use."""

    policy: Policy
    enrolled: dict[str, Callable[..., Any]]
    store: Any
    notify: Notify | None

    @property
    def resolvers(self) -> Resolvers:
        """Its resolvers."""


class Functions:
    """The functions of one `Once`."""

    def __init__(self, owner: Owner, engines: Engines) -> None:
        self._owner = owner
        self._engines = engines
        self._shared: tuple[Threads, Installation] | None = None
        self.by_operation: dict[str, Function] = {}

    @property
    def shared(self) -> tuple[ApplicationShared, ...]:
        """The installations for threads and for event loops; none while there is no function."""
        return self._shared or ()

    @property
    def threads(self) -> Threads | None:
        """The installation of `def` functions, if there are any functions."""
        return None if self._shared is None else self._shared[0]

    @property
    def loops(self) -> Installation | None:
        """The installation of `async def` functions, if there are any functions."""
        return None if self._shared is None else self._shared[1]

    def function(self, effects: object, options: Mapping[str, Any], key: Chooses | None) -> Protects:
        """The decorator of `once.function`."""
        if key is None:
            raise ConfigurationError(NO_KEY)
        _check(options, FunctionOptions, effects, FUNCTION)

        def decorate(function: Callable[..., Any]) -> Any:  # noqa: ANN401  (a function like the one that it protects)
            enrolled, op = self._enrol(function, Effects(str(effects)), dict(options), key, FUNCTION)
            return protected(enrolled, op)

        return cast("Protects", decorate)

    def inbox(self, effects: object, options: Mapping[str, Any], consumer: str | None) -> Receives:
        """The decorator of `once.inbox`."""
        if not isinstance(consumer, str) or not consumer:
            raise ConfigurationError(NO_CONSUMER)
        _check(options, InboxOptions, effects, INBOX)

        def decorate(function: Callable[..., Any]) -> Any:  # noqa: ANN401
            named = {**options, "operation": consumer}
            return received(self._enrol(function, Effects(str(effects)), named, None, INBOX)[0])

        return cast("Receives", decorate)

    def _enrol(
        self, function: Callable[..., Any], effects: Effects, options: dict[str, Any], key: Chooses | None, word: str
    ) -> tuple[Function, str | None]:
        operation = operation_name(function, options.pop("operation", None), decorator=word)
        if operation in self._owner.enrolled:
            raise ConfigurationError(f"two operations have the name {operation}: rename one of them")
        tenant, result = options.pop("tenant", None), options.pop("result", None)
        ignore, blocking = tuple(options.pop("ignore", ())), not inspect.iscoroutinefunction(function)
        settings = settings_of(effects, options)
        check_stakes(self._owner.store, operation, low_stakes=settings.pop("low_stakes", False))
        policy = self._policy(operation, settings)
        if blocking and not has_threads(self._owner.store):
            raise ConfigurationError(f"{operation}: {NO_THREADS}")
        enrolment = Enrolment(operation, effects, policy, self._owner, blocking=blocking)
        op = operation_parameter(function, blocking=blocking)
        shape = Shape(function, operation, op=op, ignore=ignore, result=result, resumed=enrolment.completes)
        threads, loops = self._places()
        for place in (threads, loops):
            place.admit(enrolment)
        enrolled = Function(
            function,
            enrolment,
            shape,
            key=_nothing if key is None else shape.chooser(key, "key", function),
            key_name=_named(key),
            tenant=SINGLE_TENANT if tenant is None else shape.chooser(tenant, "tenant", function),
            threads=threads,
            loops=loops,
        )
        self.by_operation[operation] = self._owner.enrolled[operation] = enrolled
        return enrolled, op

    def _policy(self, operation: str, settings: dict[str, Any]) -> Policy:
        """The application's policy with the function's settings, and without those for HTTP."""
        policy = self._owner.policy
        if policy.on_in_progress is InProgress.ACCEPTED:
            policy = policy.override(on_in_progress=InProgress.CONFLICT)
        policy = policy.override(require_key=True, max_request_age=None, selection=Selection(), **settings)
        if policy.on_in_progress is InProgress.ACCEPTED:
            raise ConfigurationError(f"{operation}: {NO_ACCEPTED}")
        return policy

    def _places(self) -> tuple[Threads, Installation]:
        if self._shared is None:
            owner, policy = self._owner, self._owner.policy
            threads = Threads(self._engines, policy, tenant=SINGLE_TENANT)
            loops = Installation(self._engines, policy, tenant=SINGLE_TENANT)
            for place in (threads, loops):
                place.inline_calls = lambda: owner.resolvers.inline_calls
                place.notify = owner.notify
            self._shared = (threads, loops)
        return self._shared


def _check(options: Mapping[str, Any], offered: type, effects: object, word: str) -> None:
    """Reject settings that a function does not have: most settings of a route are for HTTP."""
    if effects not in tuple(Effects):
        raise TypeError(f"@{word}(effects=...): {WHAT_EFFECTS_MEAN}")
    known = [*inspect.get_annotations(offered)]
    for name in options:
        if name not in known:
            close = difflib.get_close_matches(name, known, n=1, cutoff=0.0)
            raise ConfigurationError(f"@{word}(...) takes no {name}; the closest is {close[0]}")


def _named(key: Chooses | None) -> str:
    """Where the key comes from, for the error about one that no client could send."""
    if key is None:
        return "the message ID"
    return f"key={key!r}" if isinstance(key, str) else f"the result of key={getattr(key, '__name__', 'function')}"


def _nothing(_: Mapping[str, Any]) -> None:
    """No key is chosen: the id of the message is the key."""
