"""Selects the tasks of `oncekey.ops.tasks` that an application needs.

The calls in PHASED handlers determine which tasks are needed. The source code of a handler is parsed, not run, and its
names are resolved.
"""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final, Protocol

from oncekey.core.errors import ConfigurationError, ResultInvalidError
from oncekey.core.model import Effects, Record
from oncekey.core.results import fitted
from oncekey.ops.tasks import NAMES, TASKS
from oncekey.workers.completer import CompletedApplication, Completer
from oncekey.workers.health import Presence
from oncekey.workers.reconciler import Reconciler
from oncekey.workers.relay import CONCURRENCY, Relay
from oncekey.workers.service import Pace, Task
from oncekey.workers.upkeep import Reaper, Sweeper

if TYPE_CHECKING:
    from oncekey.core.policy import Policy
    from oncekey.core.resolvers import Resolvers
    from oncekey.core.topics import Topics
    from oncekey.engine.shell import AsyncEngine
    from oncekey.observe.events import Notify


NO_OUTBOX = "topics need a store with an outbox: run `oncekey stores` to list them"


class Application(CompletedApplication, Protocol):
    """The interface of `Once` that a worker needs."""

    policy: Policy
    enrolled: dict[str, Callable[..., Any]]
    notify: Notify | None

    @property
    def topics(self) -> Topics:
        """Its topics."""

    @property
    def resolvers(self) -> Resolvers:
        """Its resolvers."""

    @property
    def reconciles(self) -> bool:
        """Whether it has resolvers or webhooks."""

    def policy_of(self, operation: str) -> Policy:
        """The policy of an operation."""

    def healthy(self) -> bool:
        """Whether this process can renew its own leases: if not, it must not treat other owners as dead."""


@dataclass(frozen=True, slots=True)
class Wanted:
    """The options of `oncekey worker`."""

    names: frozenset[str] = frozenset(NAMES)
    topics: tuple[str, ...] | None = None
    """The topics that the relay delivers, if not all."""
    concurrency: int = CONCURRENCY


EVERYTHING: Final = Wanted()


def tasks_for(once: Application, wanted: Wanted = EVERYTHING) -> list[Task]:
    """The tasks that an application has work for."""
    made = (_MAKERS[kind.name](once, wanted) for kind in TASKS if kind.name in wanted.names)
    return [task for task in made if task is not None]


def presence_of(once: Application, tasks: Sequence[Task]) -> Presence | None:
    """The task that writes the heartbeat of these tasks; None for a store without a list of workers."""
    engine = once.asynchronous()
    if engine.store.upkeep is None:
        return None
    return Presence(engine.store.upkeep, engine.driver.run, tasks, calls=inline_calls_of(once), notify=once.notify)


def chosen(only: str | None, without: str | None) -> frozenset[str]:
    """Parses `--only a,b` and `--without a,b`."""
    named, left_out = _words(only), _words(without)
    for name in (*named, *left_out):
        if name not in NAMES:
            raise ConfigurationError(f"no task {name!r}; the tasks are {', '.join(NAMES)}")
    return frozenset(named or NAMES) - frozenset(left_out)


def _words(text: str | None) -> tuple[str, ...]:
    return tuple(word.strip() for word in (text or "").split(",") if word.strip())


def _relay(once: Application, wanted: Wanted) -> Relay | None:
    if not once.topics.names:
        return None
    for name in wanted.topics or ():
        if name not in once.topics:
            raise ConfigurationError(f"no topic {name!r}; the topics are {', '.join(once.topics.names)}")
    if wanted.concurrency < 1:
        raise ConfigurationError(f"concurrency={wanted.concurrency}: a relay needs at least 1")
    engine = once.asynchronous()
    if engine.store.outbox is None:
        raise ConfigurationError(NO_OUTBOX)
    return Relay(
        engine.store.outbox,
        engine.driver.run,
        once.topics,
        once.policy,
        only=wanted.topics,
        concurrency=wanted.concurrency,
        notify=once.notify,
    )


def _completer(once: Application, _: Wanted) -> Completer | None:
    enrolments = map(once.enrolment_of, once.enrolled)
    if not any(one is not None and one.effects is Effects.PHASED and one.policy.complete for one in enrolments):
        return None
    # A handler that is still running at its deadline has lost its record: its result is not used.
    patience = 2 * max(once.policy_of(name).deadline for name in once.enrolled).total_seconds()
    pace = Pace(longest=once.policy.complete_interval.total_seconds(), patience=patience)
    return Completer(once, pace=pace, notify=once.notify)


def _sweeper(once: Application, _: Wanted) -> Sweeper | None:
    # If this process serves requests, its breaker shows whether it can renew its own leases.
    return sweeper_of(once.asynchronous(), once.policy, healthy=once.healthy, notify=once.notify)


def sweeper_of(
    engine: AsyncEngine, policy: Policy, *, healthy: Callable[[], bool] = lambda: True, notify: Notify | None = None
) -> Sweeper | None:
    """The task that moves keys of dead owners; None for a store without upkeep."""
    upkeep = engine.store.upkeep
    return None if upkeep is None else Sweeper(upkeep, engine.driver.run, policy, healthy=healthy, notify=notify)


def _reconciler(once: Application, _: Wanted) -> Reconciler | None:
    return reconciler_of(once) if once.reconciles else None


def reconciler_of(once: Application) -> Reconciler:
    """The task that settles unknown outcomes."""
    engine = once.asynchronous()
    return Reconciler(
        engine.store, engine.driver.run, once.resolvers, once.policy, policy_of=once.policy_of, notify=once.notify
    )


def _reaper(once: Application, _: Wanted) -> Reaper | None:
    return reaper_of(once.asynchronous(), once.policy, notify=once.notify)


def reaper_of(engine: AsyncEngine, policy: Policy, *, notify: Notify | None = None) -> Reaper | None:
    """The task that removes expired records; None for a store without upkeep."""
    store = engine.store
    return None if store.upkeep is None else Reaper(store.upkeep, store.audit, engine.driver.run, policy, notify=notify)


_MAKERS: Final[Mapping[str, Callable[[Application, Wanted], Task | None]]] = MappingProxyType(
    {
        Relay.name: _relay,
        Completer.name: _completer,
        Sweeper.name: _sweeper,
        Reconciler.name: _reconciler,
        Reaper.name: _reaper,
    }
)
"""The function that creates a task, by the task's name; it returns None if the application has no work for it."""


def declared_by(handler: Callable[..., Any], phase: str) -> Any:  # noqa: ANN401  (whatever was declared)
    """The `result=` of `op.call(phase, ..., result=DECLARED)`; None if it is not visible in the code."""
    for attribute, name, node in _calls_in(handler):
        if (attribute, name) == ("call", phase):
            given = next((one.value for one in node.keywords if one.arg == "result"), None)
            if given is None or isinstance(given, ast.Constant):
                return None
            return _looked_up(given, inspect.unwrap(handler))
    return None


def result_mismatch(once: Application, record: Record, value: Any) -> str | None:  # noqa: ANN401  (whatever a call returned)
    """Why a result does not match what the handler declares for the call that it is for; None if it does."""
    handler = once.enrolled.get(record.operation)
    last = record.memo[-1].name if record.memo else None
    phase = last if record.intent is None else record.intent.phase
    declared = None if handler is None or phase is None else declared_by(handler, phase)
    if declared is None:
        return None
    try:
        fitted(value, declared)
    except ResultInvalidError as error:
        return f"{error}, which the handler declares for {phase!r}"
    return None


def inline_calls_of(once: Application) -> dict[str, tuple[str, ...]]:
    """The calls of INLINE handlers by operation, from resolvers and `op.downstream_key`."""
    found: dict[str, tuple[str, ...]] = {operation: (name,) for operation, name in once.resolvers.inline_calls.items()}
    for operation, handler in once.enrolled.items():
        enrolment = once.enrolment_of(operation)
        if enrolment is not None and enrolment.effects is Effects.INLINE:
            names = (name for attribute, name, _ in _calls_in(handler) if attribute == "downstream_key")
            found[operation] = tuple(dict.fromkeys((*found.get(operation, ()), *names)))
    return {operation: names for operation, names in found.items() if names}


def _calls_in(handler: Callable[..., Any]) -> Iterator[tuple[str, str, ast.Call]]:
    """Every method call with a string as its first argument: the method, the string, and the call itself."""
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(inspect.unwrap(handler))))
    except (OSError, TypeError, SyntaxError):
        return  # the handler was defined at a prompt, or by another program
    for node in ast.walk(tree):
        match node:
            case ast.Call(func=ast.Attribute(attr=attribute), args=[ast.Constant(value=str() as name), *_]):
                yield attribute, name, node


def _looked_up(node: ast.expr, function: Callable[..., Any]) -> Any:  # noqa: ANN401  (whatever it names)
    """The value of a name, or of a type such as `list[Charge]` or `Charge | None`; None if it is anything else."""
    match node:
        case ast.Name(id=name):
            seen = inspect.getclosurevars(function)
            return {**seen.builtins, **seen.globals, **seen.nonlocals}.get(name)
        case ast.Attribute(value=inner, attr=name):
            return getattr(_looked_up(inner, function), name, None)
        case ast.Constant(value=None):
            return type(None)
        case ast.Subscript(value=generic, slice=arguments):
            listed = arguments.elts if isinstance(arguments, ast.Tuple) else [arguments]
            of, *parts = (_looked_up(one, function) for one in (generic, *listed))
            if of is None or None in parts:
                return None
            return of[tuple(parts) if isinstance(arguments, ast.Tuple) else parts[0]]
        case ast.BinOp(left=left, op=ast.BitOr(), right=right):
            either = [_looked_up(one, function) for one in (left, right)]
            return None if None in either else either[0] | either[1]
        case _:
            return None
