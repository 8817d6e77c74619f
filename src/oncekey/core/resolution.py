"""What a provider says about a call whose outcome nobody knows, and from when on it is believed (U1-U3, H5).

An answer that it was executed, or finally refused, is a fact whenever it is heard. "I know nothing of it" is only an
observation: it becomes a fact when nobody can send the call any more, and the question must have *begun* after that.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Any, Final, TypeAlias

from oncekey.core.memo import is_rejection, was_not_sent
from oncekey.core.model import Effects, Outcome, State
from oncekey.core.operate import UNSEEN_OWNER, believed_from

if TYPE_CHECKING:
    from uuid import UUID

    from oncekey.core.model import Duration, Instant, Record, RecordId

EXHAUSTED: Final = "reconcile_exhausted"
"""Why nobody asks any more: the provider was asked often enough, and only an operator is left."""


@dataclass(frozen=True, slots=True)
class Executed:
    """It was done. `given` is the answer for the client (INLINE, OUTBOX) or the result of the open call (PHASED)."""

    given: Any = None
    provider_id: str | None = None


@dataclass(frozen=True, slots=True)
class Declined:
    """It was finally refused: the client hears this no, or the phased handler a `Rejected` with this value."""

    given: Any = None
    provider_id: str | None = None


@dataclass(frozen=True, slots=True)
class Unexecuted:
    """The provider knows nothing of it. `closed`: and never will, because its reference was closed there."""

    closed: bool = False


@dataclass(frozen=True, slots=True)
class Undecided:
    """Ask again later."""

    why: str = "still_unknown"


Resolution: TypeAlias = Executed | Declined | Unexecuted | Undecided


@dataclass(frozen=True, slots=True)
class Call:
    """A call that was announced, as it is looked up by."""

    id: RecordId
    incarnation: UUID
    operation: str
    phase: str
    downstream_key: str
    provider_id: str | None
    at: Instant


class Verdict(StrEnum):
    """What became of evidence."""

    SETTLED = "settled"
    """It settled its record."""
    AGREES = "agrees"
    """The record says the same by itself."""
    CONTRADICTS = "contradicts"
    """The record says otherwise: somebody has to look."""


@dataclass(frozen=True, slots=True)
class Heard:
    """What somebody said about a call, before anything is made of it."""

    source: str
    event_id: str
    said: str
    """The resolution, in its stored form."""
    downstream_key: str | None = None
    provider_id: str | None = None


@dataclass(frozen=True, slots=True)
class Evidence:
    """What was heard, as it is kept."""

    id: int
    at: Instant
    heard: Heard
    verdict: Verdict | None


@dataclass(frozen=True, slots=True)
class Patience:
    """How long after an owner was last heard of "not executed" is not believed yet."""

    lag: Duration
    """How long a provider may take until what it did can be seen there."""
    send_window: Duration
    lease: Duration


@dataclass(frozen=True, slots=True)
class Sight:
    """When somebody first saw that a record is unknown: by the store's clock, and by a clock that nobody can set."""

    store: Instant
    boot: Instant


def is_open(record: Record) -> bool:
    """Whether a call of this record may be under way. INLINE announces none, so one always may."""
    return record.effects is Effects.INLINE or record.intent is not None


def wait_span(record: Record, patience: Patience) -> Duration:
    """How long whoever was the owner may yet send, and the provider take to show it."""
    if not is_open(record):
        return 0
    if record.effects is Effects.INLINE:
        return max(patience.lease, UNSEEN_OWNER) + patience.lag
    return patience.send_window + record.call_timeout + patience.lag


def not_before(record: Record, patience: Patience, first: Sight) -> Instant:
    """The earliest instant of the store at which the question may begin.

    An INLINE owner's lease had ended when anybody saw the record in doubt, so the first sight bounds it.
    """
    if record.effects is not Effects.INLINE:
        return believed_from(record, patience.lag)
    ended = min(first.store, believed_from(record, 0) - UNSEEN_OWNER)
    return ended + wait_span(record, patience)


def has_waited(record: Record, patience: Patience, first: Sight, asked: Sight) -> bool:
    """Whether "the provider knows nothing of it" is a fact, if the question began at `asked` (U1, F34).

    By the store's clock, and by the asker's own: the store's may have been put right in the meantime.
    """
    by_store = asked.store >= not_before(record, patience, first)
    return by_store and asked.boot - first.boot >= wait_span(record, patience)


def still_to_wait(record: Record, patience: Patience, first: Sight, asked: Sight) -> Duration:
    """How long until `has_waited`, so that nobody asks in vain before."""
    by_store = not_before(record, patience, first) - asked.store
    return max(by_store, wait_span(record, patience) - (asked.boot - first.boot), 0)


def is_about(record: Record, downstream_key: str) -> bool:
    """Whether an announced call of this name is the one that is open: the word on one call settles no other."""
    if record.effects is Effects.INLINE:
        return True
    return record.intent is not None and record.intent.downstream_key == downstream_key


def standing(record: Record, phase: str) -> Outcome | None:
    """What the record itself says about a call; None: nothing yet."""
    for entry in record.memo:
        if entry.name == phase:
            return Outcome.FAILURE if is_rejection(entry) or was_not_sent(entry) else Outcome.SUCCESS
    return record.outcome if record.state in {State.COMPLETED, State.EXPIRED} else None
