"""A record in sentences: the meaning of its state, and the effect of a client's retry (A1).

The effect of a retry follows RULINGS: operators see it before and after each change.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Final, assert_never

from oncekey.canonical.digests import downstream_key
from oncekey.core.answers import is_accepted
from oncekey.core.guards import Facts, Guard, is_plain
from oncekey.core.model import Effects, Instant, Outcome, Record, State, moment
from oncekey.core.operate import Order
from oncekey.core.rulings import Situation, situate
from oncekey.core.transitions import Actor, Trigger

if TYPE_CHECKING:
    from oncekey.core.resolution import AnnouncedCall
    from oncekey.core.transitions import AuditEntry

WHY: Final[Mapping[str, str]] = MappingProxyType(
    {
        "attempts_exhausted": "it failed the maximum number of times",
        "busted": "an operator deleted its response",
        "call_parameters_changed": "the call was announced with parameters that differ from the current ones",
        "call_uncertain": "an external call got no reply",
        "commit_failed": "its transaction could not be committed",
        "dead_letter": "its call failed the maximum number of times, or may have been made and must not be repeated",
        "handler_raised": "its handler raised an error",
        "failed_lock_expired": "its lease expired without a settlement, so an operator must decide",
        "in_progress_lock_expired": "its lease expired without a settlement",
        "not_deferred_once": "its handler did not defer exactly one call",
        "not_executed": "its handler reported that nothing was executed",
        "replay_diverged": "the handler's steps differ from the stored ones: its code has changed",
        "response_incomplete": "its response was cut off",
        "result_not_storable": "the result of the call could not be stored",
        "result_not_valid": "the stored result of the call does not match the handler's result=",
        "retryable": "it was free to be retried",
        "rolled_back_by_handler": "its handler rolled back its own rows",
        "stopped": "its process was stopped",
        "unknown_recovery_point": "its last step does not exist in this version",
    }
)
"""Error codes as text."""


_SETTLED: Final[Mapping[Trigger, str]] = MappingProxyType(
    {
        Trigger.EXECUTED: "recorded the outcome of its call",
        Trigger.DECLINED: "recorded that its call was declined",
        Trigger.NOT_EXECUTED: "released it: it was not executed",
        Trigger.REPLACE: "replaced the result of its call",
        Trigger.DLQ_RETRY: "returned its call to the outbox",
    }
)
"""The moves that settle a record from outside. They leave the error of its last run in the record."""


def why(record: Record, audit: Sequence[AuditEntry] = ()) -> str | None:
    """Why the record is not completed, in a sentence; error codes of the application are shown unchanged.

    With the audit of the key, a record that was settled since its last run is explained by that.
    """
    code = record.last_error
    settled = audit[-1] if audit else None
    if code is not None and settled is not None and _is_of(settled, record):
        note = settled.note
        return f"{note.who if note.actor is Actor.OPERATOR else f'a {note.actor}'} {_SETTLED[note.trigger]}"
    return None if code is None else WHY.get(code, code.replace("status_", "its handler returned "))


def _is_of(entry: AuditEntry, record: Record) -> bool:
    """Whether this line of the audit settled the record, and no owner has run since."""
    note = entry.note
    current = (note.incarnation, note.to) == (record.incarnation, record.state)
    return current and note.trigger in _SETTLED and entry.at >= record.last_run_at


def resent_after(record: Record, calls: Sequence[AnnouncedCall], audit: Sequence[AuditEntry]) -> Instant | None:
    """When the open call was declared not executed, if it was announced before that, too: `sends` begins anew there."""
    intent = record.intent
    if intent is None:
        return None
    announced = [one.at for one in calls if (one.incarnation, one.phase) == (record.incarnation, intent.phase)]
    first = min(announced, default=intent.first_sent_at)
    return max(
        (at for at in returns(record, audit, Trigger.NOT_EXECUTED) if first < at <= intent.first_sent_at), default=None
    )


def returns(record: Record, audit: Sequence[AuditEntry], *triggers: Trigger) -> Iterator[Instant]:
    """When one of these moves was made in this incarnation."""
    return (one.at for one in audit if one.note.incarnation == record.incarnation and one.note.trigger in triggers)


def expires(record: Record) -> bool:
    """Whether the record expires: an unfinished one does not, unless a retry would start from the beginning."""
    retryable = record.state is State.FAILED_RETRYABLE
    return record.state in {State.COMPLETED, State.EXPIRED} or (retryable and is_plain(record))


def meaning(record: Record, now: Instant) -> str:
    """The meaning of a record's state, in a sentence."""
    match situate(record, now):
        case Situation.EXPIRED:
            return "Expired: the key can be used again."
        case Situation.PENDING:
            return "Accepted: its call waits in the outbox, or a worker is making it."
        case Situation.LIVE:
            return "In progress: its lease has not ended, so its owner may be running."
        case Situation.STALE:
            return "Stuck: in progress, but its lease has expired."
        case Situation.COMPLETED:
            status = "" if record.response is None else f" ({record.response.status})"
            if record.outcome is Outcome.SUCCESS:
                return f"Done: it succeeded{status}."
            return f"Done: it failed permanently{status}; this is the stored response."
        case Situation.RETRYABLE:
            if record.memo or record.intent is not None:
                return f"Interrupted after the step {record.recovery_point!r}: it can be resumed."
            return "Failed without effects: it can be retried."
        case Situation.UNKNOWN:
            return _doubt(record)
        case Situation.ABSENT:
            raise AssertionError("the record exists")
        case rest:
            assert_never(rest)


def _doubt(record: Record) -> str:
    if record.intent is not None:
        return f"Unknown: the call {record.intent.phase!r} may have been made, and its reply was lost."
    if record.effects is Effects.INLINE:
        return "Unknown: its handler may have called the provider, and the result was lost."
    if record.memo:
        return f"Stopped after the step {record.recovery_point!r}: no call is open, but an operator must decide."
    return "Unknown: it may have been executed."


_PURPOSES: Final[Mapping[Order, str]] = MappingProxyType(
    {
        Order.EXECUTED: "It happened",
        Order.DECLINED: "The provider declined it permanently",
        Order.NOT_EXECUTED: "It was not executed",
        Order.RELEASE: "Nothing is running, and it should be resumed",
        Order.RETRY: "Nothing was sent, or sending again is safe; the worker should retry",
        Order.DISCARD: "It was not made, or was undone, and should be given up",
        Order.EXTEND: "The client may retry after the key has expired",
        Order.BUST: "The cause is fixed, and a retry should execute it",
    }
)


def purpose(order: Order, record: Record) -> str:
    """When this command is the right one, as a sentence for operators."""
    if order in {Order.EXECUTED, Order.DECLINED} and record.intent is None and record.memo:
        what = "was something else" if order is Order.EXECUTED else "was a final refusal"
        return f"The result given by hand is wrong; it {what}"
    if order is Order.BUST and record.memo:
        return "The handler's bug is fixed, and a retry should compute the response from the finished steps"
    return _PURPOSES[order]


def downstream_keys(record: Record, calls: tuple[str, ...]) -> dict[str, str]:
    """The downstream keys of the calls that may have been made; `calls` names those of INLINE handlers."""
    if record.intent is not None:
        return {record.intent.phase: record.intent.downstream_key}
    if record.effects is not Effects.INLINE:
        return {}
    return {name: downstream_key(record.seed, name) for name in calls}


def prospect(record: Record | None, now: Instant) -> str:
    """The effect of a retry."""
    situation = situate(record, now)
    if record is None or situation is Situation.ABSENT:
        return "A request with this key executes as a new one."
    match situation:
        case Situation.EXPIRED:
            return "The key has expired: a request with it executes as a new one, whatever its body."
        case Situation.PENDING:
            return "A retry receives 202 (accepted); a worker makes the call. No handler runs."
        case Situation.LIVE if is_accepted(record):
            return "A retry receives 202 (accepted); a worker is making the call. No handler runs."
        case Situation.LIVE:
            until = "" if record.lease_until is None else f", until {moment(record.lease_until)} at least"
            return f"A retry receives the response for a request in progress{until}. Nothing is executed."
        case Situation.STALE:
            return _stale(record, now)
        case Situation.COMPLETED:
            return _answered(record)
        case Situation.RETRYABLE:
            return _again(record)
        case Situation.UNKNOWN:
            return "A retry receives the response for an unknown outcome. Nothing is executed until it is resolved."
        case _:
            assert_never(situation)


def _answered(record: Record) -> str:
    response = record.response
    if response is not None and response.body is None and record.state is State.COMPLETED:
        return f"A retry receives the stored status ({response.status}) without the body. Nothing is executed."
    status = "" if response is None else f" ({response.status})"
    return f"A retry receives the stored response{status}. Nothing is executed."


def _stale(record: Record, now: Instant) -> str:
    if Guard.RUNS_AGAIN.holds(Facts(record, now)):
        return f"Its owner has died. {_again(record)}"
    return "Its owner has died, and may have executed it: a retry makes it unknown. Nothing is executed."


def _again(record: Record) -> str:
    if record.effects is Effects.PHASED and (record.memo or record.intent):
        done = f"after the step {record.recovery_point!r}; finished steps are not repeated" if record.memo else ""
        sent = (
            "" if record.intent is None else f"the open call {record.intent.phase!r} is made again, with the same key"
        )
        who = "A retry resumes it" if record.request is None else "A retry or a completer resumes it"
        return f"{who}{f' {done}' if done else ''}{f'; {sent}' if sent else ''}."
    return "A retry executes the operation, from the beginning."
