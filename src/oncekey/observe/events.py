"""The events: one frozen class for each action of requests, workers, operators and stores.

An observer is any callable that takes an event: `Once(..., observers=[Prometheus(), print])`. An event is reported
after the store has replied, so it describes committed facts; the two exceptions are documented. An event does not show
the key: it has the record's id, and computes its digest on request. Without observers no event is created.

`counted` maps events to the twelve counters, for every backend.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from types import MappingProxyType
from typing import TYPE_CHECKING, Final, TypeAlias, assert_never

from oncekey.core.keys import key_digest
from oncekey.core.model import SECOND, Code, Duration, State, value
from oncekey.core.scope import tenant_of

if TYPE_CHECKING:
    from uuid import UUID

    from oncekey.core.model import Claim, Effects, EntryKind, Finished, Outcome, Parcel, ParcelKind, Record, RecordId
    from oncekey.core.transitions import Actor, Trigger

log = logging.getLogger("oncekey")


@value
class About:
    """The operation and the key that an event is about."""

    operation: str
    """The operation; for a parcel its topic, for a contradiction the call."""
    effects: Effects | None
    """None if only the parcel is known."""
    _id: RecordId = field(repr=False)
    incarnation: UUID
    """The incarnation of the key: the same for all attempts, parcels and repairs of one request."""

    @classmethod
    def of(cls, what: Claim | Record | Finished) -> About:
        """The subject of a claim or a record."""
        return cls(what.operation, what.effects, what.id, what.incarnation)

    @classmethod
    def of_parcel(cls, parcel: Parcel) -> About:
        """The subject of a parcel."""
        return cls(parcel.topic, None, parcel.record_id, parcel.incarnation)

    @property
    def tenant(self) -> str:
        """The owner of the key."""
        return tenant_of(self._id.scope)

    @property
    def key_digest(self) -> str:
        """The digest of the key."""
        return key_digest(self._id.key)


class How(StrEnum):
    """How a request got the right to execute."""

    NEW = "new"
    """The key is new, or its record has expired."""
    RETRIED = "retried"
    """An earlier run had failed, provably without effect or with work that can be resumed."""
    TAKEN_OVER = "taken_over"
    """The lease of its owner had expired."""


# Events about requests


@value
class Reserved:
    """A request, or the completer without its client, got the right to execute.

    LOCAL in one commit has only locked the key at this point, and commits nothing before the response.
    """

    about: About
    how: How
    seconds: float
    """How long the claim took."""
    resumed: bool = False
    """The completer claimed it, without the client."""
    after: Duration | None = None
    """The time since the previous run began, if there was one."""


@value
class Replayed:
    """A request received the stored response."""

    about: About
    seconds: float


@value
class Refused:
    """A request was not executed. Nothing is written for it."""

    about: About
    code: Code
    seconds: float


@dataclass(frozen=True, slots=True)
class TurnedAway:
    """A request was refused before it had a claim: no key, a body that could not be read, no store yet."""

    operation: str
    """Empty if no handler was chosen yet."""
    code: Code


@dataclass(frozen=True, slots=True)
class Keyless:
    """A request without a key ran unprotected, on a route that does not require one."""

    operation: str


@dataclass(frozen=True, slots=True)
class LookedUp:
    """A client queried the status resource for a key, and received the key's state or a refusal."""

    outcome: State | Code
    seconds: float


@dataclass(frozen=True, slots=True)
class Bypassed:
    """The store was unavailable, and the route fails open: its handler runs unprotected."""

    about: About


@dataclass(frozen=True, slots=True)
class Stepped:
    """A phased handler took a step, or got the stored result."""

    about: About
    name: str
    kind: EntryKind
    seconds: float
    recalled: bool = False
    error: str | None = None
    """The class of the exception."""


@value
class Settled:
    """An operation has ended, and its record is settled. `to` is None if the claim was withdrawn."""

    about: About
    to: State | None
    outcome: Outcome | None
    handler: float
    """How long the handler ran, in seconds."""
    settling: float
    """How long the settlement took, with the commit of the handler's rows."""


@dataclass(frozen=True, slots=True)
class Unsettled:
    """An operation has ended, but its settlement was not acknowledged.

    The record has another owner, or could not be reached; or the settlement was committed, and its reply was lost.
    """

    about: About
    handler: float
    settling: float


# Events about abandoned work


@dataclass(frozen=True, slots=True)
class Swept:
    """The sweeper, or a request, found a record with an expired lease, and moved it."""

    about: About
    to: State
    by: Actor
    late: Duration | None
    """How long the lease had been expired; None if a request found it, which does not read the store's clock."""


@dataclass(frozen=True, slots=True)
class Doubted:
    """An outcome became unknown: from now on the reconciler checks it."""

    about: About
    why: str
    by: Actor


@dataclass(frozen=True, slots=True)
class Resolved:
    """An unknown outcome was settled."""

    about: About
    to: State | None
    by: Actor
    after: Duration
    """The time since its last run began."""


@dataclass(frozen=True, slots=True)
class GivenUp:
    """No resolver checks this unknown outcome, or none does any longer: an operator must resolve it."""

    about: About
    tries: int
    why: str


@dataclass(frozen=True, slots=True)
class Messaged:
    """A webhook responded to a message. A `status` of 401 means that the signature is wrong or too old."""

    source: str
    """The webhook's name."""
    status: int


@dataclass(frozen=True, slots=True)
class Contradicted:
    """A provider contradicts the record, which is not changed: an operator must decide."""

    about: About
    source: str


@dataclass(frozen=True, slots=True)
class Reaped:
    """A batch of records ended: purged, marked, or abandoned."""

    what: str
    records: int


@dataclass(frozen=True, slots=True)
class Delivered:
    """A parcel was delivered."""

    about: About
    kind: ParcelKind
    attempts: int


@dataclass(frozen=True, slots=True)
class Buried:
    """A parcel became a dead letter, and its record, if it has one, does not wait for it."""

    about: About
    kind: ParcelKind
    attempts: int
    why: str


@dataclass(frozen=True, slots=True)
class Beat:
    """A worker wrote its heartbeat; or, `leaving`, removed it."""

    who: str
    tasks: tuple[str, ...]
    leaving: bool = False


@dataclass(frozen=True, slots=True)
class Operated:
    """An operator moved a record, or a dead letter."""

    about: About
    trigger: Trigger
    to: State | None
    who: str


@dataclass(frozen=True, slots=True)
class ShortLease:
    """One in a hundred runs of an operation takes more than half of its lease."""

    operation: str
    lease: Duration
    p99: Duration


# Events about the store


@dataclass(frozen=True, slots=True)
class Asked:
    """The store ran one transaction; `failed` is the class of the error, if there was one."""

    name: str
    seconds: float
    failed: str | None = None


@dataclass(frozen=True, slots=True)
class StoreFailed:
    """The store failed for a request or a worker. `where` is what it was doing."""

    where: str
    error: str
    """The class only: an error's text may contain client data."""


class Found(StrEnum):
    """The reply of a front (a cache before the store)."""

    HIT = "hit"
    NOTHING = "miss"
    STALE = "stale"
    """Its copy is too old."""
    REFUSED = "refused"
    """Its value was not stored by this installation for this key."""
    UNAVAILABLE = "unavailable"
    """It did not reply in time, or recently failed and was skipped."""


@dataclass(frozen=True, slots=True)
class Consulted:
    """A front was queried before the store, which decides if the front has no result."""

    front: str
    """The setting: `replay_cache` or `lock_hint`."""
    found: Found


Event: TypeAlias = (
    Reserved
    | Replayed
    | Refused
    | TurnedAway
    | Keyless
    | LookedUp
    | Bypassed
    | Stepped
    | Settled
    | Unsettled
    | Swept
    | Doubted
    | Resolved
    | GivenUp
    | Messaged
    | Contradicted
    | Reaped
    | Delivered
    | Buried
    | Beat
    | Operated
    | ShortLease
    | Asked
    | StoreFailed
    | Consulted
)

Observer: TypeAlias = Callable[[Event], None]
Notify: TypeAlias = Callable[[Event], None]
"""Passes an event to all observers, and never raises."""


# Counting


class Count(StrEnum):
    """The twelve counters, by their names."""

    CREATED = "api.idempotency.reserve.created.count"
    REPLAY = "api.idempotency.reserve.replay.count"
    IN_PROGRESS = "api.idempotency.reserve.in_progress.count"
    KEY_MISUSE = "api.idempotency.reserve.key_misuse.count"
    FAILED_RETRY = "api.idempotency.reserve.failed_retry.count"
    UNKNOWN = "api.idempotency.reserve.unknown.count"
    STORE_ERROR = "api.idempotency.store.error.count"
    ZOMBIE_KEY = "api.idempotency.zombie_key.count"
    TTL_PRUNED = "api.idempotency.ttl_pruned.count"
    SCHEDULED = "api.idempotency.reconcile.scheduled.count"
    RESOLVED = "api.idempotency.reconcile.resolved.count"
    FAILED = "api.idempotency.reconcile.failed.count"


MEANING: Final[Mapping[Count, str]] = MappingProxyType(
    {
        Count.CREATED: "Keys that were reserved for the first time",
        Count.REPLAY: "Requests that received the stored response",
        Count.IN_PROGRESS: "Requests that found the same request in progress",
        Count.KEY_MISUSE: "Keys that were reused with another payload",
        Count.FAILED_RETRY: "Keys that had failed, and were reserved again",
        Count.UNKNOWN: "Requests that found an unknown outcome",
        Count.STORE_ERROR: "Failures of the store",
        Count.ZOMBIE_KEY: "Keys whose owner died",
        Count.TTL_PRUNED: "Expired records that were deleted",
        Count.SCHEDULED: "Outcomes that became unknown",
        Count.RESOLVED: "Unknown outcomes that were resolved",
        Count.FAILED: "Unknown outcomes and parcels that were given up",
    }
)

RESERVATIONS: Final[Mapping[How, Count]] = MappingProxyType(
    {How.NEW: Count.CREATED, How.RETRIED: Count.FAILED_RETRY, How.TAKEN_OVER: Count.ZOMBIE_KEY}
)
REFUSALS: Final[Mapping[Code, Count]] = MappingProxyType(
    {
        Code.IN_PROGRESS: Count.IN_PROGRESS,
        Code.KEY_REUSED: Count.KEY_MISUSE,
        Code.OUTCOME_UNKNOWN: Count.UNKNOWN,
    }
)
"""Refusals that have their own counter; all of them are also counted by their code."""
PURGED: Final = "purged"

TENANTS: Final = 50
"""How many tenants have their own series by default."""
QUICK: Final = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10)
LONG: Final = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300)
SLOW: Final = (0.1, 1, 5, 15, 60, 300, 900, 3600, 6 * 3600, 24 * 3600)
"""Buckets in seconds: for the store, for operations, and for pending work."""


def counted(event: Event) -> tuple[Count, int] | None:
    """Which of the twelve counters an event increments, and by how much."""
    match event:
        case Reserved():
            return RESERVATIONS[event.how], 1
        case Settled():
            return None
        case Replayed():
            return Count.REPLAY, 1
        case Refused():
            count = REFUSALS.get(event.code)
            return None if count is None else (count, 1)
        case Swept():
            return Count.ZOMBIE_KEY, 1
        case Doubted():
            return Count.SCHEDULED, 1
        case Resolved():
            return Count.RESOLVED, 1
        case GivenUp() | Buried():
            return Count.FAILED, 1
        case Reaped():
            return (Count.TTL_PRUNED, event.records) if event.what == PURGED else None
        case StoreFailed():
            return Count.STORE_ERROR, 1
        case (
            Bypassed()
            | Stepped()
            | Unsettled()
            | TurnedAway()
            | Keyless()
            | LookedUp()
            | Messaged()
            | Contradicted()
            | Delivered()
            | Beat()
            | Operated()
            | ShortLease()
            | Asked()
            | Consulted()
        ):
            return None
        case _:
            assert_never(event)


def requested(event: Event) -> tuple[str, str] | None:
    """The operation and the outcome under which a request is counted, if the event is the end of one."""
    match event:
        case Reserved():
            return event.about.operation, event.how._value_  # `value` calls a function of the enum module
        case Replayed():
            return event.about.operation, "replayed"
        case Refused():
            return event.about.operation, event.code.value
        case TurnedAway():
            return event.operation, event.code.value
        case Keyless():
            return event.operation, "keyless"
        case Bypassed():
            return event.about.operation, "bypassed"
        case _:
            return None


def recovered(event: Event) -> tuple[str, float] | None:
    """How a failed run was resumed, and how many seconds after it began, if the event is about that."""
    if isinstance(event, Reserved) and event.after is not None:
        return "completer" if event.resumed else "requester", event.after / SECOND
    return (event.by.value, event.after / SECOND) if isinstance(event, Resolved) else None


# Reporting


def notify_all(observers: Iterable[Observer]) -> Notify | None:
    """A function that passes an event to all observers; None if there are none, so that no event is created.

    If an observer raises, that is logged once: a lost observation must not cost a client its response.
    """
    several = tuple(observers)
    if not several:
        return None
    complained: set[int] = set()

    def notify(event: Event) -> None:
        for observer in several:
            try:
                observer(event)
            except Exception as error:  # noqa: BLE001  (whatever an observer raises)
                if id(observer) not in complained:
                    complained.add(id(observer))
                    log.error(
                        "oncekey: the observer %r failed with %s; further failures are not logged",
                        observer,
                        type(error).__name__,
                    )

    return notify
