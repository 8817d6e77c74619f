"""What a client's retry with the same key and the same body will meet, in one sentence (A1).

It is RULINGS read aloud: an operator should know before and after a change what the next request does.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, assert_never

from oncekey.core.guards import Facts, Guard
from oncekey.core.model import Effects, Record, State
from oncekey.core.rulings import Situation, situate
from oncekey.core.showing import moment

if TYPE_CHECKING:
    from oncekey.core.model import Instant


def prospect(record: Record | None, now: Instant) -> str:
    """What a retry will do."""
    situation = situate(record, now)
    if record is None or situation is Situation.ABSENT:
        return "A request with this key is executed as a new one."
    match situation:
        case Situation.EXPIRED:
            return "The key's time is over: a request with it is executed as a new one, whatever its body."
        case Situation.PENDING:
            return (
                "A retry hears that the request is accepted and not done yet; a worker makes the call. No handler runs."
            )
        case Situation.LIVE:
            until = "" if record.lease_until is None else f", until {moment(record.lease_until)} at least"
            return f"A retry hears that the request is in progress{until}. Nothing is executed."
        case Situation.STALE:
            return _stale(record, now)
        case Situation.COMPLETED:
            return _answered(record)
        case Situation.RETRYABLE:
            return _again(record)
        case Situation.UNKNOWN:
            return "A retry hears that the outcome is unknown. Nothing is executed until somebody settles it."
        case _:
            assert_never(situation)


def _answered(record: Record) -> str:
    response = record.response
    if response is not None and response.body is None and record.state is State.COMPLETED:
        return f"A retry hears that it is done ({response.status}), without the body. Nothing is executed."
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
