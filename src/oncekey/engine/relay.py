"""The relay's flows for one parcel: prepare its call, and store the result.

A message (`emit`) is delivered at least once and never touches a record. A deferred call (`defer`) is one announced
call of its record. If its result is stored, the relay settles without calling; if it may have been sent, the relay
repeats it only while that is safe. The flows make no calls: the worker does, between two flows.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from hashlib import blake2b
from typing import TYPE_CHECKING, Final, TypeAlias, assert_never

from oncekey.core import memo
from oncekey.core.deferred import DEAD_LETTER, Orphaned, Parked, Postponed, TakenUp
from oncekey.core.model import SECOND, Announcement, Completed, EntryKind, MemoEntry, Outcome, StoredResponse
from oncekey.core.policy import Policy, micros
from oncekey.core.transitions import Trigger

if TYPE_CHECKING:
    from oncekey.core.flow import Flow
    from oncekey.core.model import Duration, HeldParcel, Parcel
    from oncekey.ports.store import Outbox

MARGIN: Final[Duration] = 5 * SECOND
"""The time by which a parcel's lease exceeds its longest call: the result has to be written, too."""
NOT_STORABLE: Final = "result_not_storable"
"""The error code of a record whose call was made, and whose result cannot be stored."""
SPENT: Final = "attempts_exhausted"
"""The error of a parcel whose worker disappeared without reporting one."""

_ROOM: Final = 64 * 1024
_ERRORS: Final = 400


class ParcelEnded(StrEnum):
    """How a parcel ended."""

    DELIVERED = "delivered"
    POSTPONED = "postponed"
    PARKED = "parked"
    """A deferred call: its outcome is unknown, and the parcel is a dead letter."""
    BURIED = "buried"
    """A message that failed too often."""
    ORPHANED = "orphaned"
    """A deferred call whose record is gone."""
    LOST = "lost"
    """Another worker has it."""


@dataclass(frozen=True, slots=True)
class CallAnswered:
    """The provider's final response, which becomes the response to the request."""

    response: StoredResponse
    provider_id: str | None = None
    rejected: bool = False


@dataclass(frozen=True, slots=True)
class Unstorable:
    """The call was made, and its result cannot be stored."""


@dataclass(frozen=True, slots=True)
class CallFailed:
    """The call did not return. `never_sent`: this attempt provably sent nothing; earlier ones may have."""

    error: str
    after: Duration = 0
    never_sent: bool = False
    counted: bool = True


ParcelEnding: TypeAlias = CallAnswered | Unstorable | CallFailed


def lease_of(policy: Policy) -> Duration:
    """The lease of a parcel: at least as long as the longest call, from its announcement to its result."""
    return max(micros(policy.outbox_lease), micros(policy.send_window) + micros(policy.call_timeout) + MARGIN)


def digest_of(parcel: Parcel) -> str:
    """A digest of what is sent: other content under the same announcement is not a repetition."""
    content = f"{parcel.topic}\n{parcel.payload}".encode("utf-8", "surrogatepass")
    return blake2b(content, digest_size=16).hexdigest()


def begin_call(
    outbox: Outbox, held: HeldParcel, owner: str, repeatable: Duration | None, policy: Policy
) -> Flow[TakenUp | ParcelEnded]:
    """Take up a deferred call. `TakenUp`: make the call now, within the send window; any other result is final."""
    parcel = held.parcel
    call = Announcement(
        phase=parcel.topic,
        downstream_key=parcel.downstream_key,
        digest=digest_of(parcel),
        sends=1,
        repeatable=repeatable,
        send_window=micros(policy.send_window),
        call_timeout=micros(policy.call_timeout),
    )
    taken = yield from outbox.take_up(held, owner, call, lease_of(policy))
    match taken:
        case TakenUp(record=record) if record.memo:
            return (yield from _deliver(outbox, taken, record.memo[0]))
        case TakenUp() if held.attempts > policy.outbox_max_attempts:
            return (yield from _park(outbox, taken, held.last_error or SPENT))
        case TakenUp():
            return taken
        case Parked():
            return ParcelEnded.PARKED
        case Orphaned():
            return ParcelEnded.ORPHANED
        case None:
            return ParcelEnded.LOST
        case _:
            assert_never(taken)


def end_call(outbox: Outbox, taken: TakenUp, ending: ParcelEnding, policy: Policy) -> Flow[ParcelEnded]:
    """Store the end of a call: the result first, then the response together with the parcel's end."""
    match ending:
        case CallAnswered():
            return (yield from _keep(outbox, taken, ending, policy))
        case Unstorable():
            parked = yield from outbox.park(taken.lease, taken.held, Trigger.DOUBT, NOT_STORABLE, NOT_STORABLE)
            return ParcelEnded.LOST if parked is None else ParcelEnded.PARKED
        case CallFailed():
            if ending.counted and taken.held.attempts >= policy.outbox_max_attempts:
                return (yield from _park(outbox, taken, ending.error))
            moved = yield from outbox.try_again(
                taken.lease,
                taken.held,
                ending.after,
                ending.error[:_ERRORS],
                digest_of(taken.held.parcel),
                never_sent=ending.never_sent,
                counted=ending.counted,
            )
            match moved:
                case Postponed():
                    return ParcelEnded.POSTPONED
                case Parked():
                    return ParcelEnded.PARKED
                case None:
                    return ParcelEnded.LOST
                case _:
                    assert_never(moved)
        case _:
            assert_never(ending)


def fail_message(outbox: Outbox, held: HeldParcel, failed: CallFailed, policy: Policy) -> Flow[ParcelEnded]:
    """Store that a message was not delivered: it is retried later, or becomes a dead letter."""
    if failed.counted and held.attempts >= policy.outbox_max_attempts:
        return ParcelEnded.BURIED if (yield from outbox.bury(held, failed.error[:_ERRORS])) else ParcelEnded.LOST
    ours = yield from outbox.again(held, failed.after, failed.error[:_ERRORS], counted=failed.counted)
    return ParcelEnded.POSTPONED if ours else ParcelEnded.LOST


def entry_of(phase: str, answered: CallAnswered, policy: Policy) -> MemoEntry:
    """The stored form of a result: the whole response, and the provider's own id for it."""
    response = answered.response
    kept = {
        "status": response.status,
        "headers": [[name.decode("latin-1"), value.decode("latin-1")] for name, value in response.headers],
        "body": response.body,
        "provider_id": answered.provider_id,
    }
    entry = MemoEntry(phase, EntryKind.CALL, memo.encode(kept, 2 * policy.max_response_bytes + _ROOM))
    return memo.rejected(entry) if answered.rejected else entry


def answer_of(entry: MemoEntry) -> CallAnswered:
    """The response in a stored result."""
    kept = memo.decode(entry.result)
    headers = tuple((name.encode("latin-1"), value.encode("latin-1")) for name, value in kept["headers"])
    response = StoredResponse(kept["status"], headers, kept["body"])
    return CallAnswered(response, kept["provider_id"], rejected=memo.is_rejection(entry))


def _keep(outbox: Outbox, taken: TakenUp, answered: CallAnswered, policy: Policy) -> Flow[ParcelEnded]:
    entry = entry_of(taken.held.parcel.topic, answered, policy)
    kept = yield from outbox.result(taken.lease, taken.held, entry, lease_of(policy))
    if kept is None or kept.held is None:
        return ParcelEnded.LOST
    return (yield from _deliver(outbox, TakenUp(taken.lease, kept.held, taken.record, taken.now), entry))


def _deliver(outbox: Outbox, taken: TakenUp, entry: MemoEntry) -> Flow[ParcelEnded]:
    answered = answer_of(entry)
    failed = answered.rejected or answered.response.status >= 400  # noqa: PLR2004  (where HTTP's errors begin)
    settlement = Completed(answered.response, Outcome.FAILURE if failed else Outcome.SUCCESS)
    settled = yield from outbox.deliver(taken.lease, taken.held, settlement)
    return ParcelEnded.DELIVERED if settled.ours else ParcelEnded.LOST


def _park(outbox: Outbox, taken: TakenUp, error: str) -> Flow[ParcelEnded]:
    parked = yield from outbox.park(taken.lease, taken.held, Trigger.DEAD_LETTER, DEAD_LETTER, error[:_ERRORS])
    return ParcelEnded.LOST if parked is None else ParcelEnded.PARKED
