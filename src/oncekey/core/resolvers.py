"""Resolvers: the functions that look up the outcome of a call at its provider, with their arguments and results."""

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
"""The status of a decline that is plain data."""
_ERRORS = 400
_ROOM = 64 * 1024


@dataclass(frozen=True, slots=True)
class Question:
    """The argument of a resolver: the call to look up at the provider, by `downstream_key`."""

    operation: str
    scope: str = field(repr=False)
    key: str = field(repr=False)
    downstream_key: str | None = field(repr=False)
    """The key of the open call; for INLINE that of the `call` that the resolver was registered for."""
    phase: str | None
    """The name of the open call."""
    payload: Any = field(repr=False)
    """The payload of the parcel, for OUTBOX; else None."""
    intent: Intent | None = field(repr=False)
    attempts: int
    """How often the handler started."""
    tries: int
    """How often the provider was queried before."""
    asked_at: Instant
    """The store's clock, in microseconds, before the query."""
    effects: Effects


@dataclass(frozen=True, slots=True)
class Resolver:
    """One function, for one operation."""

    operation: str
    function: Callable[[Question], Any]
    blocking: bool
    call: str | None = None
    """The name for which an INLINE handler requests its downstream key."""
    answer: Callable[[Question, Any], Any] | None = None
    """Converts a webhook's object to the operation's own response."""


class Resolvers:
    """The functions by the names of their operations."""

    def __init__(self) -> None:
        self._resolvers: dict[str, Resolver] = {}

    def resolver(
        self, operation: str, *, call: str | None = None, answer: Callable[[Question, Any], Any] | None = None
    ) -> Callable[[F], F]:
        """Register the decorated function for an operation; `def` functions are called in a thread.

        It receives a `Question` and returns `Executed`, `Rejected`, `NotExecuted` or `Undecided`; if it raises, it is
        called again later. `call` is for INLINE handlers: the name in `op.downstream_key(name)`, so that webhooks and
        the ledger find their records, which announce no calls. `answer` is for webhooks, which have the provider's
        object and not our operation: it receives the question and the result of `parse`, and returns the result of
        this operation: a `Reply` or, for PHASED, the result of the call. It does no I/O.
        """
        if not operation:
            raise ConfigurationError('a resolver needs the name of an operation: @once.resolver("create_payment")')

        def register(function: F) -> F:
            if operation in self._resolvers:
                raise ConfigurationError(f"two resolvers are registered for {operation!r}: remove one of them")
            blocking = not inspect.iscoroutinefunction(function)
            self._resolvers[operation] = Resolver(operation, function, blocking, call, answer)
            return function

        return register

    @property
    def names(self) -> tuple[str, ...]:
        """All operations that have a resolver, sorted."""
        return tuple(sorted(self._resolvers))

    @property
    def inline_calls(self) -> Mapping[str, str]:
        """Operation -> name of the call that its INLINE handler makes."""
        return {name: one.call for name, one in self._resolvers.items() if one.call is not None}

    def get(self, operation: str) -> Resolver | None:
        """The resolver of an operation, if it has one."""
        return self._resolvers.get(operation)


@dataclass(frozen=True, slots=True)
class Sighting:
    """The content of a webhook: a resolution of the call that has one of these names at the provider."""

    resolution: Resolution
    downstream_key: str | None = None
    provider_id: str | None = None
    event_id: str | None = None
    """The provider's id of the event; without it a repetition is recognised by its content."""


def question_of(record: Record, resolver: Resolver, payload: Any, now: Instant) -> Question:  # noqa: ANN401
    """The question about a record."""
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
    """The resolution of a webhook, converted to the operation's own response."""
    if resolver.answer is None:
        return resolution
    try:
        return replace(resolution, result=resolver.answer(question, resolution.result))
    except BaseException as error:  # noqa: BLE001  (whatever the application's function raises)
        cause = contained(error)
        raise ResultNotStorableError(
            f"the webhook's result could not be converted to a response of {question.operation}: {type(error).__name__}"
        ) from cause


def called_by(record: Record, call: str | None) -> str | None:
    """The name of a record's open call at the provider."""
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
    """The resolution of a stored form; `RecordUnreadableError` if it is sealed under a missing key."""
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
    """The command for a record with this resolution; raises `ResultNotStorableError` if it cannot be stored."""
    if isinstance(resolution, NotExecuted):
        return OperatorCommand(Order.NOT_EXECUTED, why, closed=resolution.closed)
    declined = isinstance(resolution, Rejected)
    order = Order.DECLINED if declined else Order.EXECUTED
    if record.effects is Effects.PHASED:
        return OperatorCommand(order, why, result=_result(resolution, policy))
    return OperatorCommand(order, why, answer=_answer(resolution, policy))


def _result(resolution: Executed | Rejected, policy: Policy) -> str:
    """The stored result of the open call, which the handler reads when it resumes (H5)."""
    if isinstance(resolution.result, Reply):
        raise ResultNotStorableError("a PHASED handler computes the response: return the call's result, not a Reply")
    text = memo.encode(resolution.result, policy.max_result_bytes)
    if isinstance(resolution, Executed):
        return text
    return memo.rejected(MemoEntry("", EntryKind.CALL, text)).result


def _answer(resolution: Executed | Rejected, policy: Policy) -> Completed:
    if isinstance(resolution, Executed):
        reply = reply_of(resolution.result)
        if not reply.is_final:
            raise ResultNotStorableError(f"{reply.status} means 'not now', which is not final: return Undecided")
        failed = reply.status >= _ERRORS
        return Completed(reply.stored(policy), Outcome.FAILURE if failed else Outcome.SUCCESS)
    given = resolution.result
    reply = given if isinstance(given, Reply) else Reply(DECLINED, given)
    if reply.status < _ERRORS:
        raise ResultNotStorableError(f"a decline needs an error status, not {reply.status}")
    return Completed(reply.stored(policy), Outcome.FAILURE)
