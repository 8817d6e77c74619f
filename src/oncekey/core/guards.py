"""Facts and guards: the named, pure conditions under which a row of TRANSITIONS holds.

Either the store or the mover checks a guard. The store repeats its guards in the statement that writes, by its own
clock and on the current row: a mover that decided by an older read, or by another clock, is refused. The mover checks
what no row contains: whether the handler was entered, whether a call was made, what a policy allows, what an operator
confirmed. It also checks a few guards on a memo or on several values; for those, the proof of the write, which
compares the version or the whole memo, ensures that what the mover read is still true. The contract suite that ships
with oncekey tests this for every store (`oncekey_contract.Walk`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum, StrEnum

from oncekey.core.model import Duration, Effects, Finished, Instant, Outcome, Record, Recovery, State

MAX_ATTEMPTS = 10
"""How often a phased handler may start before its record is parked (H6); a policy may set another number."""


@dataclass(frozen=True, slots=True)
class Facts:
    """The input of a guard: the record as read, the store's clock, and facts that only the mover has."""

    record: Record | None
    now: Instant
    effects: Effects = Effects.LOCAL
    """Of the request, for a new incarnation only; a record's own effects always win (P2)."""
    phase: str = ""
    """The phase that the owner announces or reports."""
    entered: bool = True
    """Whether the owner called its handler."""
    never_sent: bool = False
    """It is proven that this attempt sent nothing; it proves nothing about earlier attempts (F24)."""
    call_open: bool = False
    """The owner made a call of unknown outcome, so its handler's response is not used (F6)."""
    locked: bool = False
    """The transaction-scoped lock of LOCAL in one commit is held."""
    waited: bool = False
    """The resolver queried the provider after the waiting time, or closed the reference there (U1)."""
    result_given: bool = False
    """The resolver returned the result of the open call, with which the handler resumes (H5)."""
    parcel_claimed: bool = False
    """The parcel was claimed at least once."""
    parcel_sent: bool = False
    """The parcel may have been sent."""
    parcel_repeatable: bool = False
    """Sending the parcel again is safe: its window has not passed."""
    reason: bool = False
    """The operator gave a reason."""
    runs_again: bool = False
    """An operator confirmed that a success will be executed again."""
    soft: bool = False
    """Expired records are kept as EXPIRED."""
    grace: Duration = 0
    """How long after a lease's end a sweeper leaves the record to its owner and its clients."""
    max_attempts: int = MAX_ATTEMPTS


def _of(*kinds: Effects) -> Callable[[Facts], bool]:
    return lambda facts: (facts.record.effects if facts.record else facts.effects) in kinds


def _record(look: Callable[[Record, Facts], bool]) -> Callable[[Facts], bool]:
    return lambda facts: facts.record is not None and look(facts.record, facts)


def _intent_repeatable(record: Record, facts: Facts) -> bool:
    until = record.intent.repeatable_until if record.intent else None
    return until is not None and facts.now < until


def _resumable(record: Record, facts: Facts) -> bool:
    return (
        record.effects is Effects.PHASED
        and record.recovery is Recovery.RESUME
        and (record.intent is None or _intent_repeatable(record, facts))
    )


def _attempts_left(record: Record, facts: Facts) -> bool:
    """A phased handler starts only so often (H6); starts of other handlers are not limited."""
    return record.effects is not Effects.PHASED or record.attempts < facts.max_attempts


def _runs_again(record: Record, facts: Facts) -> bool:
    """Whether another owner may run this record after its lease is over."""
    if record.effects is Effects.PHASED:
        return _resumable(record, facts)
    return record.recovery is Recovery.RETRY and _plain(record, facts)


def _may_announce(record: Record, facts: Facts) -> bool:
    """No call is open, or this same call may be repeated: each send is announced, including the second (ADR 0009)."""
    if record.intent is None:
        return True
    return record.intent.phase == facts.phase and _intent_repeatable(record, facts)


def is_past_expiry(record: Record | Finished, now: Instant) -> bool:
    """Whether the record's expiry has passed; what that means depends on its state."""
    return record.expires_at <= now


def is_plain(record: Record) -> bool:
    """Whether the record has no steps that a later owner could resume."""
    return not record.memo and record.intent is None


def _past_expiry(record: Record, facts: Facts) -> bool:
    return is_past_expiry(record, facts.now)


def _plain(record: Record, _: Facts) -> bool:
    return is_plain(record)


def _free(record: Record, facts: Facts) -> bool:
    """Whether the record has expired and has nothing to resume, so that a new request may use the key (P6)."""
    return _past_expiry(record, facts) and (record.state is not State.FAILED_RETRYABLE or _plain(record, facts))


def _worker_began(record: Record, _: Facts) -> bool:
    """Whether a worker has claimed the parcel: from then on its record has an intent or a result (O1, O2)."""
    return record.effects is Effects.OUTBOX and bool(record.memo or record.intent)


def _nothing_open(record: Record) -> bool:
    """Whether no call can be under way: then the fence is enough, and no waiting time is needed (ADR 0009)."""
    return record.effects is not Effects.INLINE and record.intent is None


def _parcel_safe(facts: Facts) -> bool:
    """Whether claiming the parcel cannot lead to a second effect; with a stored result no worker calls (O1)."""
    stored = facts.record is not None and bool(facts.record.memo)
    return stored or not facts.parcel_sent or facts.parcel_repeatable


class CheckedBy(StrEnum):
    """Who checks a guard."""

    STORE = "store"
    """The store compares it in the write."""
    MOVER = "mover"
    """The actor that moves the record checked it, and the proof of the write ensures that it is still true."""


class Guard(Enum):
    """A named, pure condition. All guards of a row must hold."""

    LOCAL = (_of(Effects.LOCAL), CheckedBy.STORE)
    PHASED = (_of(Effects.PHASED), CheckedBy.STORE)
    OUTBOX = (_of(Effects.OUTBOX), CheckedBy.STORE)
    INLINE_OR_OUTBOX = (_of(Effects.INLINE, Effects.OUTBOX), CheckedBy.STORE)
    REQUEST_LOCAL = (lambda f: f.effects is Effects.LOCAL, CheckedBy.MOVER)
    REQUEST_OUTBOX = (lambda f: f.effects is Effects.OUTBOX, CheckedBy.MOVER)
    NOT_OUTBOX = (_of(Effects.LOCAL, Effects.PHASED, Effects.INLINE), CheckedBy.STORE)
    BEFORE_DEADLINE = (_record(lambda r, f: f.now < r.deadline), CheckedBy.STORE)
    LEASE_OVER = (_record(lambda r, f: r.lease_until is not None and r.lease_until <= f.now), CheckedBy.STORE)
    GRACE_OVER = (_record(lambda r, f: r.lease_until is not None and r.lease_until + f.grace <= f.now), CheckedBy.MOVER)
    NO_INTENT = (_record(lambda r, _: r.intent is None), CheckedBy.STORE)
    INTENT_OPEN = (_record(lambda r, _: r.intent is not None), CheckedBy.STORE)
    NO_INTENT_OR_INLINE = (_record(lambda r, _: r.intent is None or r.effects is Effects.INLINE), CheckedBy.STORE)
    SENT_ONCE = (_record(lambda r, _: r.intent is not None and r.intent.sends <= 1), CheckedBy.STORE)
    NEVER_SENT = (lambda f: f.never_sent, CheckedBy.MOVER)
    NO_INTENT_OR_SAME_AGAIN = (_record(_may_announce), CheckedBy.STORE)
    NO_RESULT_YET = (_record(lambda r, f: all(entry.name != f.phase for entry in r.memo)), CheckedBy.MOVER)
    CALLS_KNOWN = (lambda f: not f.call_open, CheckedBy.MOVER)
    SOME_MEMO = (_record(lambda r, _: bool(r.memo)), CheckedBy.STORE)
    NO_MEMO = (_record(lambda r, _: not r.memo), CheckedBy.STORE)
    NOT_RESUMABLE = (_record(lambda r, _: not (r.memo and r.state is State.FAILED_RETRYABLE)), CheckedBy.STORE)
    NOT_ENTERED = (lambda f: not f.entered, CheckedBy.MOVER)
    ENTERED = (lambda f: f.entered, CheckedBy.MOVER)
    RESUMABLE = (_record(_resumable), CheckedBy.STORE)
    RUNS_AGAIN = (_record(_runs_again), CheckedBy.STORE)
    ATTEMPTS_LEFT = (_record(_attempts_left), CheckedBy.MOVER)
    RUNS_NEVER_AGAIN = (_record(lambda r, f: not (_runs_again(r, f) and _attempts_left(r, f))), CheckedBy.MOVER)
    PAST_EXPIRY = (_record(_past_expiry), CheckedBy.STORE)
    BEFORE_EXPIRY = (_record(lambda r, f: not _past_expiry(r, f)), CheckedBy.STORE)
    FREE = (_record(_free), CheckedBy.STORE)
    PLAIN = (_record(_plain), CheckedBy.STORE)
    BEGUN = (_record(lambda r, f: not _plain(r, f)), CheckedBy.STORE)
    WORKER_BEGAN = (_record(_worker_began), CheckedBy.STORE)
    WORKER_NEVER_BEGAN = (_record(lambda r, f: not _worker_began(r, f)), CheckedBy.STORE)
    WAITED_OR_NOTHING_OPEN = (_record(lambda r, f: f.waited or _nothing_open(r)), CheckedBy.MOVER)
    WAITED_OR_PARCEL_REPEATABLE = (lambda f: f.waited or f.parcel_repeatable, CheckedBy.MOVER)
    LAST_RESULT_BY_HAND = (_record(lambda r, _: bool(r.memo) and r.memo[-1].by_hand), CheckedBy.MOVER)
    RESULT_GIVEN = (lambda f: f.result_given, CheckedBy.MOVER)
    LOCKED = (lambda f: f.locked, CheckedBy.MOVER)
    PARCEL_SAFE = (_parcel_safe, CheckedBy.MOVER)
    PARCEL_UNSAFE = (lambda f: not _parcel_safe(f), CheckedBy.MOVER)
    PARCEL_NEVER_CLAIMED = (lambda f: not f.parcel_claimed, CheckedBy.MOVER)
    SOFT = (lambda f: f.soft, CheckedBy.MOVER)
    REASON = (lambda f: f.reason, CheckedBy.MOVER)
    CONFIRMED_IF_SUCCESS = (_record(lambda r, f: r.outcome is not Outcome.SUCCESS or f.runs_again), CheckedBy.MOVER)

    @property
    def checked_by(self) -> CheckedBy:
        """Who checks this guard."""
        checked_by: CheckedBy = self.value[1]
        return checked_by

    def holds(self, facts: Facts) -> bool:
        """Whether the condition is true for these facts."""
        look: Callable[[Facts], bool] = self.value[0]
        return look(facts)
