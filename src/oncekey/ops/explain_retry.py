"""A record in sentences: what its state means, and what a client's retry will meet (A1).

The last sentence follows RULINGS: an operator should know before and after a change what the next request does.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final, assert_never

from oncekey.canonical.digests import downstream_key
from oncekey.core.answers import is_accepted
from oncekey.core.guards import Facts, Guard
from oncekey.core.model import Effects, Instant, Outcome, Record, State, moment
from oncekey.core.operate import Order
from oncekey.core.rulings import Situation, situate

WHY: Final[Mapping[str, str]] = MappingProxyType(
    {
        "attempts_exhausted": "it failed as often as it may be tried",
        "busted": "an operator took its answer away",
        "call_parameters_changed": "the call was announced with other parameters than it would be made with now",
        "call_uncertain": "a call to the outside got no answer",
        "commit_failed": "its transaction could not be committed",
        "dead_letter": "its call was tried as often as it may be, or may have been made and may not be repeated",
        "handler_raised": "its handler ended with an error",
        "failed_lock_expired": "its owner did not come back before its lease ended, and an operator has to look",
        "in_progress_lock_expired": "its owner did not come back before its lease ended",
        "not_deferred_once": "its handler did not defer exactly one call",
        "not_executed": "its handler said that nothing was executed",
        "replay_diverged": "the handler asks for other steps than those that are stored: its code has changed",
        "response_incomplete": "its answer was broken off",
        "result_not_storable": "what the call returned could not be stored",
        "result_not_valid": "the stored result of the call is not what the handler declares by result=",
        "rolled_back_by_handler": "its handler undid its own rows",
        "stopped": "its process was stopped",
        "unknown_recovery_point": "its last step is none that this version knows",
    }
)
"""Error codes in words."""


def why(record: Record) -> str | None:
    """Why the record is not done, in a sentence; an error code of the application is shown as it is."""
    code = record.last_error
    return None if code is None else WHY.get(code, code.replace("status_", "its handler answered "))


def meaning(record: Record, now: Instant) -> str:
    """What the state of a record means, in a sentence."""
    match situate(record, now):
        case Situation.EXPIRED:
            return "Expired: its time is over, and the key is free."
        case Situation.PENDING:
            return "Accepted: its call waits in the outbox, or in the hands of a worker."
        case Situation.LIVE:
            return "In progress: its owner is at work."
        case Situation.STALE:
            return "Stuck: it is in progress, and its owner did not come back in time."
        case Situation.COMPLETED:
            status = "" if record.response is None else f" ({record.response.status})"
            if record.outcome is Outcome.SUCCESS:
                return f"Done: it succeeded{status}."
            return f"Done: it failed for good{status}, and that is its answer."
        case Situation.RETRYABLE:
            if record.memo or record.intent is not None:
                return f"Interrupted after the step {record.recovery_point!r}: it can be gone on with."
            return "Failed, and nothing of it was done: it can be tried again."
        case Situation.UNKNOWN:
            return _doubt(record)
        case Situation.ABSENT:
            raise AssertionError("a record is there")
        case rest:
            assert_never(rest)


def _doubt(record: Record) -> str:
    if record.intent is not None:
        return f"Unknown: the call {record.intent.phase!r} may have been made, and its result did not come back."
    if record.effects is Effects.INLINE:
        return "Unknown: its handler may have called the provider, and how that ended is not known."
    if record.memo:
        return f"Stopped after the step {record.recovery_point!r}: no call is open, but a person has to look."
    return "Unknown: it may have happened, and what became of it is not known."


_PURPOSES: Final[Mapping[Order, str]] = MappingProxyType(
    {
        Order.EXECUTED: "It happened",
        Order.DECLINED: "The provider refused it for good",
        Order.NOT_EXECUTED: "It did not happen",
        Order.RELEASE: "Nothing is under way, and it shall be gone on with",
        Order.RETRY: "Nothing was sent, or sending again is safe; the worker shall try again",
        Order.DISCARD: "It was not made or was undone, and is given up",
        Order.EXTEND: "The client will still retry after its time is over",
        Order.BUST: "Its cause is mended, and a retry shall execute it",
    }
)


def purpose(order: Order, record: Record) -> str:
    """What an operator has found out if this order is right."""
    if order in {Order.EXECUTED, Order.DECLINED} and record.intent is None and record.memo:
        what = "was something else" if order is Order.EXECUTED else "was a final no"
        return f"The result that was given by hand is wrong, and {what}"
    if order is Order.BUST and record.memo:
        return "The handler's mistake is mended, and a retry shall compute the response from the finished steps"
    return _PURPOSES[order]


def downstream_keys(record: Record, calls: tuple[str, ...]) -> dict[str, str]:
    """The downstream keys of the calls that may have been made; `calls` names those of INLINE handlers."""
    if record.intent is not None:
        return {record.intent.phase: record.intent.downstream_key}
    if record.effects is not Effects.INLINE:
        return {}
    return {name: downstream_key(record.seed, name) for name in calls}


def prospect(record: Record | None, now: Instant) -> str:
    """What a retry will do."""
    situation = situate(record, now)
    if record is None or situation is Situation.ABSENT:
        return "A request with this key is executed as a new one."
    match situation:
        case Situation.EXPIRED:
            return "The key's time is over: a request with it is executed as a new one, whatever its body."
        case Situation.PENDING:
            return "A retry gets 202, accepted and not done yet; a worker makes the call. No handler runs."
        case Situation.LIVE if is_accepted(record):
            return "A retry gets 202, accepted and not done yet; a worker is making the call. No handler runs."
        case Situation.LIVE:
            until = "" if record.lease_until is None else f", until {moment(record.lease_until)} at least"
            return f"A retry gets the answer that the request is in progress{until}. Nothing is executed."
        case Situation.STALE:
            return _stale(record, now)
        case Situation.COMPLETED:
            return _answered(record)
        case Situation.RETRYABLE:
            return _again(record)
        case Situation.UNKNOWN:
            return "A retry gets the answer that the outcome is unknown. Nothing is executed until it is resolved."
        case _:
            assert_never(situation)


def _answered(record: Record) -> str:
    response = record.response
    if response is not None and response.body is None and record.state is State.COMPLETED:
        return f"A retry gets the answer that it is done ({response.status}), without the body. Nothing is executed."
    status = "" if response is None else f" ({response.status})"
    return f"A retry gets the stored answer{status}. Nothing is executed."


def _stale(record: Record, now: Instant) -> str:
    if Guard.RUNS_AGAIN.holds(Facts(record, now)):
        return f"Its owner did not come back. {_again(record)}"
    return "Its owner did not come back, and may have executed it: a retry turns it into unknown. Nothing is executed."


def _again(record: Record) -> str:
    if record.effects is Effects.PHASED and (record.memo or record.intent):
        done = f"after the step {record.recovery_point!r}; finished steps are not repeated" if record.memo else ""
        sent = (
            "" if record.intent is None else f"the open call {record.intent.phase!r} is made again, with the same key"
        )
        who = "A retry goes on" if record.request is None else "A retry or a completer goes on"
        return f"{who} {'; '.join(part for part in (done, sent) if part)}."
    return "A retry executes the operation, from the beginning."
