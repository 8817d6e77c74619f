"""The record of a key, and the values that pass between request, engine and store.

Instants are integer microseconds of the *store's* clock, durations are integer microseconds. Nothing here
reads a clock: `now` always arrives with a `Snapshot`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import UTC, datetime
from enum import StrEnum
from typing import TYPE_CHECKING, Final, NamedTuple, TypeAlias, TypeVar, dataclass_transform

if TYPE_CHECKING:
    from collections.abc import Callable
    from uuid import UUID

T = TypeVar("T")


@dataclass_transform(frozen_default=True, field_specifiers=(field,))
def value(cls: type[T]) -> type[T]:
    """Declare a class whose objects never change: `@dataclass(frozen=True, slots=True)` to a type checker.

    At run time a frozen dataclass sets each field with a call, which takes four times as long, and each request creates
    a dozen of these objects. So here only the type checker refuses a change.
    """
    declared: Callable[[type[T]], type[T]] = dataclass(slots=True, unsafe_hash=True)
    return declared(cls)


Instant: TypeAlias = int
"""Microseconds since the epoch, by the store's clock."""

Duration: TypeAlias = int
"""Microseconds."""

SECOND: Duration = 1_000_000
MINUTE: Duration = 60 * SECOND
HOUR: Duration = 60 * MINUTE

Headers: TypeAlias = tuple[tuple[bytes, bytes], ...]


class Effects(StrEnum):
    """A handler's side effects; they alone decide what a crash means."""

    LOCAL = "local"
    PHASED = "phased"
    OUTBOX = "outbox"
    INLINE = "inline"


class State(StrEnum):
    """The state of a record. `None` means "no row" wherever a state may be absent."""

    PENDING = "pending"
    IN_PROGRESS = "in_progress"
    COMPLETED = "completed"
    FAILED_RETRYABLE = "failed_retryable"
    UNKNOWN = "unknown"
    EXPIRED = "expired"


class Outcome(StrEnum):
    """The outcome of a completed record: a success, or a final failure of the business."""

    SUCCESS = "success"
    FAILURE = "failure"


class Recovery(StrEnum):
    """The meaning of an expired lease; stored at the claim, so a deploy cannot change it (P2)."""

    RETRY = "retry"
    RESUME = "resume"
    UNKNOWN = "unknown"
    FAIL = "fail"


class Code(StrEnum):
    """Why a request was not executed: the machine-readable `code` of every problem that oncekey returns."""

    KEY_MISSING = "idempotency_key_missing"
    KEY_MALFORMED = "idempotency_key_malformed"
    BODY_INVALID = "idempotency_body_invalid"
    BODY_LENGTH_MISSING = "idempotency_body_length_missing"
    BODY_TOO_LARGE = "idempotency_body_too_large"
    BODY_TOO_SLOW = "idempotency_body_too_slow"
    KEY_REUSED = "idempotency_key_reused_with_different_payload"
    IN_PROGRESS = "idempotency_key_in_progress"
    OUTCOME_UNKNOWN = "idempotency_outcome_unknown"
    RESPONSE_NOT_STORED = "idempotency_response_not_stored"
    KEY_EXPIRED = "idempotency_key_expired"
    KEY_NOT_FOUND = "idempotency_key_not_found"
    STORE_UNAVAILABLE = "idempotency_store_unavailable"
    RECORD_UNREADABLE = "idempotency_record_unreadable"
    EXECUTION_FAILED = "idempotency_execution_failed"
    TIMED_OUT = "idempotency_request_timed_out"
    RATE_LIMITED = "idempotency_rate_limited"
    REQUEST_TOO_OLD = "idempotency_request_too_old"


class EntryKind(StrEnum):
    """The kind of step in a memo entry."""

    PHASE = "phase"
    CALL = "call"
    VALUE = "value"


@value
class RecordId:
    """The identity of a record: the caller's scope and the client's key."""

    scope: str
    key: str


class Sealable:
    """A value that keeps the form in which it was sealed, so that it can be written again byte for byte.

    A seal may produce other bytes each time, and a memo is compared as a whole. The slot is not a field: it is empty
    if nothing is sealed, and costs nothing when such a value is created.
    """

    __slots__ = ("sealed",)


@value
class MemoEntry(Sealable):
    """One finished step of a phased handler, with its encoded result (H1, H4)."""

    name: str
    kind: EntryKind
    result: str
    by_hand: bool = False
    """An operator entered the result: until the next step is stored, an operator may replace it."""


@value
class Intent:
    """An external call that was announced and has no result yet (H2, H3)."""

    phase: str
    downstream_key: str
    digest: str
    sends: int
    first_sent_at: Instant
    send_by: Instant
    repeatable_until: Instant | None


RESPONSE_SCHEMA: Final = 1
"""The form of stored responses that this version writes; it does not read a later one."""
LONGEST_NAME: Final = 100
"""The longest name of a step, and of a topic."""
SEALED_SCHEMA: Final = 2
"""The form of sealed responses (`oncekey.core.envelopes`)."""


@value
class StoredResponse:
    """A response as it is replayed, byte for byte. `body is None` is a tombstone: done, body not stored (A4)."""

    status: int
    headers: Headers
    body: bytes | None
    schema_version: int = RESPONSE_SCHEMA


@value
class Record:
    """One key's row. Calls, evidence and audit refer to its `incarnation`, never to the client's key."""

    id: RecordId
    incarnation: UUID
    operation: str
    effects: Effects
    recovery: Recovery
    method: str
    path: str
    fingerprint: str
    seed: bytes
    state: State
    outcome: Outcome | None
    entered: bool
    fence: int
    version: int
    owner: str | None
    lease_until: Instant | None
    deadline: Instant
    call_timeout: Duration
    ttl: Duration
    attempts: int
    recovery_point: str
    memo: tuple[MemoEntry, ...]
    intent: Intent | None
    response: StoredResponse | None
    last_error: str | None
    reconcile_after: Instant | None
    reconcile_tries: int
    created_at: Instant
    last_run_at: Instant
    finished_at: Instant | None
    expires_at: Instant
    request: bytes | None = field(default=None, repr=False)
    """Stored until the settlement: for a PHASED operation the request that the completer repeats, sealed if there is
    a secret (H7); for an accepted OUTBOX operation the response of its 202 (O5)."""


@value
class Finished:
    """The part of a completed record that a repeat needs."""

    id: RecordId
    incarnation: UUID
    operation: str
    effects: Effects
    fingerprint: str
    response: StoredResponse | None
    expires_at: Instant


class Glimpse(NamedTuple):
    """A completed record as a repeat reads it, with the store's clock at that moment."""

    finished: Finished
    now: Instant


@value
class Snapshot:
    """A record as it was read (or its absence), with the store's clock at that moment."""

    record: Record | None
    now: Instant


@value
class Claim:
    """A request for the right to execute, in its own incarnation.

    `incarnation` and `owner` are created for this request alone. So repeating a claim or a take-over whose reply
    was lost is safe: a record in progress with our owner is ours (P7).
    """

    id: RecordId
    incarnation: UUID
    operation: str
    effects: Effects
    recovery: Recovery
    method: str
    path: str
    fingerprint: str
    seed: bytes
    owner: str
    lease: Duration
    deadline: Duration
    call_timeout: Duration
    ttl: Duration
    entered: bool = True
    request: bytes | None = field(default=None, repr=False)
    """Stored with the claim if a completer may resume without the client (H7)."""


@value
class Lease:
    """Ownership of a record: every write of the owner proves `incarnation` and `fence` (P1)."""

    id: RecordId
    incarnation: UUID
    fence: int
    attempt: int
    effects: Effects
    lease_until: Instant
    deadline: Instant
    expires_at: Instant
    owner: str = ""
    alone: bool = field(default=False, compare=False)
    """Whether the claim created a record without steps, calls and kept request."""

    @classmethod
    def new(cls, claim: Claim, now: Instant) -> Lease:
        """The lease of the owner whose claim has just created the record."""
        return cls(
            claim.id,
            claim.incarnation,
            1,
            1,
            claim.effects,
            now + claim.lease,
            now + claim.deadline,
            now + claim.ttl,
            claim.owner,
            claim.request is None,
        )

    @classmethod
    def of(cls, record: Record) -> Lease:
        """The lease that the owner of `record` holds."""
        return cls(
            id=record.id,
            incarnation=record.incarnation,
            fence=record.fence,
            attempt=record.attempts,
            effects=record.effects,
            lease_until=record.lease_until or 0,
            deadline=record.deadline,
            expires_at=record.expires_at,
            owner=record.owner or "",
            alone=record.request is None
            and not record.memo
            and record.intent is None
            and record.reconcile_after is None
            and record.reconcile_tries == 0,
        )


class ParcelKind(StrEnum):
    """The purpose of a parcel."""

    DEFER = "defer"
    """The request's own external call; its result becomes the response."""
    EMIT = "emit"
    """A message to others after the commit, delivered at least once; the response does not depend on it."""


@value
class Parcel:
    """One parcel of the outbox, written in the same transaction as the rows it belongs to.

    `payload` is JSON. Parcels with the same `order_by` are delivered one after the other, in the order of their
    transactions. `downstream_key` is the same whenever the same request writes the same parcel (D1).
    """

    id: UUID
    kind: ParcelKind
    record_id: RecordId
    incarnation: UUID
    topic: str
    payload: str
    downstream_key: str
    position: int = 0
    order_by: str | None = None


@value
class HeldParcel:
    """A parcel that a worker has claimed: every write about it proves `fence`."""

    parcel: Parcel
    fence: int
    attempts: int
    lease_until: Instant
    created_at: Instant
    first_error: str | None = None
    last_error: str | None = None


@value
class DeadLetter:
    """A parcel that no worker tries again until an operator decides: tried too often, or of unknown outcome."""

    parcel: Parcel
    attempts: int
    created_at: Instant
    died_at: Instant
    first_error: str | None
    last_error: str


@value
class Announcement:
    """An external call that the owner is about to make; the store adds the instants (H2)."""

    phase: str
    downstream_key: str
    digest: str
    sends: int
    repeatable: Duration | None
    """For how long after the first send a repetition is safe; None: not at all (H3)."""
    send_window: Duration
    call_timeout: Duration


@value
class Completed:
    """Settle as done: this is the key's response from now on."""

    response: StoredResponse
    outcome: Outcome


@value
class Retryable:
    """Settle as provably not executed: a retry may run."""

    last_error: str


@value
class Doubtful:
    """Settle as unknown: it may have happened, and no retry may run it again."""

    last_error: str


@value
class HandedBack:
    """Settle as resumable: finished steps are kept, the rest waits for the client or a completer (H6)."""

    last_error: str
    resume_after: Duration = 0
    counted: bool = True
    """False if the attempt does not count: the process stopped, the handler did not fail."""


@value
class Deferred:
    """Settle as pending: the business rows and the parcel are stored, a worker makes the call (O1)."""

    parcel: Parcel
    accepted: bytes | None = field(default=None, repr=False)
    """The stored form of the handler's response, which clients receive until the worker is done (O5)."""


@value
class Discarded:
    """Remove the claim: the handler was never entered, so the key counts as unused."""


@value
class Settled:
    """The result of a settlement: `ours` if the record now has our outcome, and the record in either case."""

    ours: bool
    snapshot: Snapshot


Settlement: TypeAlias = Completed | Retryable | Doubtful | HandedBack | Deferred | Discarded


@value
class Proceed:
    """Execute: the lease is ours. `now` is the store's clock when the record was read."""

    lease: Lease
    record: Record | None
    """None: a new key in one commit, for which no row is written yet."""
    now: Instant = 0
    met: Record | None = None
    """The record that this request found, if there was one."""


@value
class Replay:
    """Return the stored response; a repeat may have read only the part of the record that it needs."""

    record: Record | Finished
    now: Instant


@value
class Refuse:
    """Do not execute. `retry_after` (whole seconds) is set if waiting helps."""

    code: Code
    detail: str = ""
    retry_after: int | None = None
    record: Record | None = None
    met: Record | None = None
    """The record that this request made unknown, as it was before."""
    final: bool = False
    """The response is stored, so every retry receives it."""


UNAVAILABLE: Final = Refuse(Code.STORE_UNAVAILABLE, retry_after=1)
"""Nothing was executed, because the store could not be reached or refused the write: the client may retry."""


@value
class Bypass:
    """The store failed and the route fails open: the handler runs without a record."""


Verdict: TypeAlias = Proceed | Replay | Refuse | Bypass


def moment(instant: Instant | None) -> str | None:
    """The instant as RFC 3339, in UTC."""
    if instant is None:
        return None
    return datetime.fromtimestamp(instant / SECOND, tz=UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def lapse(span: Duration) -> str:
    """The duration, for people."""
    for unit, name in ((24 * HOUR, "d"), (HOUR, "h"), (MINUTE, "min")):
        if span >= 2 * unit:
            return f"{span // unit} {name}"
    return f"{max(0, span) // SECOND} s"


LOCAL: Final = Effects.LOCAL
"""The handler writes only to its own database, in the commit that stores its response."""
PHASED: Final = Effects.PHASED
"""The handler runs named steps, each once, also if another process resumes it after a crash."""
OUTBOX: Final = Effects.OUTBOX
"""The handler writes to its own database, and leaves one external call to a worker."""
INLINE: Final = Effects.INLINE
"""The handler makes external calls directly; after a crash it is unknown what was sent."""
