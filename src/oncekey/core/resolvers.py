"""Resolvers: the functions that ask a provider what became of a call, and what goes in and out of them."""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, TypeVar, assert_never

from oncekey.canonical.digests import downstream_key
from oncekey.core import memo
from oncekey.core.errors import ConfigurationError, ResultNotStorableError
from oncekey.core.model import Completed, Effects, EntryKind, Instant, Intent, MemoEntry, Outcome, Record
from oncekey.core.operate import OperatorCommand, Order
from oncekey.core.resolution import Executed, NotExecuted, Rejected, Resolution, Undecided
from oncekey.core.topics import Reply, contained, reply_of

if TYPE_CHECKING:
    from oncekey.core.policy import Policy

__all__ = ["Executed", "NotExecuted", "Question", "Rejected", "Resolver", "Resolvers", "Sighting", "Undecided"]

F = TypeVar("F", bound=Callable[..., Any])

DECLINED = 402
"""The status of a decline that is given as plain data."""
_ERRORS = 400
_ROOM = 64 * 1024


@dataclass(frozen=True, slots=True)
class Question:
    """What a resolver is asked: what became of this call? Look it up at the provider by `downstream_key`."""

    operation: str
    scope: str = field(repr=False)
    key: str = field(repr=False)
    downstream_key: str | None = field(repr=False)
    """Of the open call; for INLINE that of the `call` that the resolver was registered for."""
    phase: str | None
    """The name of the open call."""
    payload: Any = field(repr=False)
    """Of the parcel, for OUTBOX; None else."""
    intent: Intent | None = field(repr=False)
    attempts: int
    """How often the handler was begun."""
    tries: int
    """How often the provider was asked before."""
    asked_at: Instant
    """The store's clock, in microseconds, before the question."""
    effects: Effects


@dataclass(frozen=True, slots=True)
class Resolver:
    """One function, for one operation."""

    operation: str
    function: Callable[[Question], Any]
    blocking: bool
    call: str | None = None
    """The name that an INLINE handler asks its downstream key for."""
    answer: Callable[[Question, Any], Any] | None = None
    """Makes the operation's own answer of what a webhook brings."""


class Resolvers:
    """The functions by the names of their operations."""

    def __init__(self) -> None:
        self._resolvers: dict[str, Resolver] = {}

    def resolver(
        self, operation: str, *, call: str | None = None, answer: Callable[[Question, Any], Any] | None = None
    ) -> Callable[[F], F]:
        """Register the decorated function for an operation; `def` functions are called in a thread.

        It is given a `Question` and answers `Executed`, `Rejected`, `NotExecuted` or `Undecided`; if it raises, it is
        asked again later. `call` is for INLINE handlers: the name in `op.downstream_key(name)`, so that webhooks and
        the ledger find their records, which announce no calls. `answer` is for webhooks, which know the provider's
        object and not our operation: it is given the question and what `parse` gave, and returns what this operation
        gives, a `Reply` or, for PHASED, the result of the call. It does no I/O.
        """
        if not operation:
            raise ConfigurationError('a resolver is for an operation: @once.resolver("create_payment")')

        def register(function: F) -> F:
            if operation in self._resolvers:
                raise ConfigurationError(f"two resolvers are registered for {operation!r}: one of them has to go")
            blocking = not inspect.iscoroutinefunction(function)
            self._resolvers[operation] = Resolver(operation, function, blocking, call, answer)
            return function

        return register

    @property
    def names(self) -> tuple[str, ...]:
        """All operations that have one, sorted."""
        return tuple(sorted(self._resolvers))

    @property
    def inline_calls(self) -> Mapping[str, str]:
        """By operation, the name of the call that an INLINE handler makes."""
        return {name: one.call for name, one in self._resolvers.items() if one.call is not None}

    def get(self, operation: str) -> Resolver | None:
        """The resolver of an operation, if it has one."""
        return self._resolvers.get(operation)


@dataclass(frozen=True, slots=True)
class Sighting:
    """What a webhook tells: a resolution of the call that the provider knows by one of these names."""

    resolution: Resolution
    downstream_key: str | None = None
    provider_id: str | None = None
    event_id: str | None = None
    """What the provider numbers its events by; without it a repetition is recognised by its content."""


def question_of(record: Record, resolver: Resolver, payload: Any, now: Instant) -> Question:  # noqa: ANN401
    """What is asked about a record."""
    return Question(
        operation=record.operation,
        scope=record.id.scope,
        key=record.id.key,
        downstream_key=called_by(record, resolver.call),
        phase=record.intent.phase if record.intent is not None else resolver.call,
        payload=payload,
        intent=record.intent,
        attempts=record.attempts,
        tries=record.reconcile_tries,
        asked_at=now,
        effects=record.effects,
    )


def answered(resolution: Executed | Rejected, resolver: Resolver, question: Question) -> Executed | Rejected:
    """What a webhook brought, as the operation itself would have answered."""
    if resolver.answer is None:
        return resolution
    try:
        return replace(resolution, result=resolver.answer(question, resolution.result))
    except BaseException as error:  # noqa: BLE001  (whatever the application's function raises)
        cause = contained(error)
        raise ResultNotStorableError(
            f"the answer of {question.operation} cannot be made of what a webhook brought: {type(error).__name__}"
        ) from cause


def called_by(record: Record, call: str | None) -> str | None:
    """The name that the provider knows a record's open call by."""
    if record.intent is not None:
        return record.intent.downstream_key
    if record.effects is Effects.INLINE and call is not None:
        return downstream_key(record.seed, call)
    return None


def to_text(resolution: Resolution, policy: Policy) -> str:
    """The stored form of a resolution, for evidence that waits for its record."""
    match resolution:
        case Executed(given) | Rejected(given):
            kind = "executed" if isinstance(resolution, Executed) else "declined"
            reply = isinstance(given, Reply)
            value = [given.status, given.body, given.headers] if isinstance(given, Reply) else given
            limit = policy.max_result_bytes + policy.max_response_bytes + _ROOM
            shape = {"kind": kind, "reply": reply, "given": memo.encode(value, limit)}
        case NotExecuted(closed):
            shape = {"kind": "unexecuted", "closed": closed}
        case Undecided(why):
            shape = {"kind": "undecided", "why": why}
        case _:
            assert_never(resolution)
    return json.dumps(shape)


def from_text(text: str) -> Resolution:
    """The resolution of a stored form; `RecordUnreadableError` if it is sealed under a key that is not there."""
    memo.check_text(text)
    shape = json.loads(text)
    match shape["kind"]:
        case "unexecuted":
            return NotExecuted(closed=shape["closed"])
        case "undecided":
            return Undecided(shape["why"])
    given = memo.decode(shape["given"])
    if shape["reply"]:
        status, body, headers = given
        given = Reply(status, body, tuple((name, value) for name, value in headers))
    return Executed(given) if shape["kind"] == "executed" else Rejected(given)


def command_of(
    resolution: Executed | Rejected | NotExecuted, record: Record, policy: Policy, why: str
) -> OperatorCommand:
    """What is to be done about a record if this is true; what cannot be stored raises `ResultNotStorableError`."""
    if isinstance(resolution, NotExecuted):
        return OperatorCommand(Order.NOT_EXECUTED, why, closed=resolution.closed)
    declined = isinstance(resolution, Rejected)
    order = Order.DECLINED if declined else Order.EXECUTED
    if record.effects is Effects.PHASED:
        return OperatorCommand(order, why, result=_result(resolution, policy))
    return OperatorCommand(order, why, answer=_answer(resolution, policy))


def _result(resolution: Executed | Rejected, policy: Policy) -> str:
    """The result of the open call as the handler finds it when it resumes (H5)."""
    if isinstance(resolution.result, Reply):
        raise ResultNotStorableError("a phased handler computes its answer itself: give the call's result, no Reply")
    text = memo.encode(resolution.result, policy.max_result_bytes)
    if isinstance(resolution, Executed):
        return text
    return memo.rejected(MemoEntry("", EntryKind.CALL, text)).result


def _answer(resolution: Executed | Rejected, policy: Policy) -> Completed:
    if isinstance(resolution, Executed):
        reply = reply_of(resolution.result)
        if not reply.is_final:
            raise ResultNotStorableError(f"{reply.status} says 'not now', which is no answer for good: use Undecided")
        failed = reply.status >= _ERRORS
        return Completed(reply.stored(policy), Outcome.FAILURE if failed else Outcome.SUCCESS)
    given = resolution.result
    reply = given if isinstance(given, Reply) else Reply(DECLINED, given)
    if reply.status < _ERRORS:
        raise ResultNotStorableError(f"a decline is answered by an error, and {reply.status} is none")
    return Completed(reply.stored(policy), Outcome.FAILURE)
