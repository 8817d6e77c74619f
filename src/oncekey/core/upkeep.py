"""Which records the sweeper and the reaper move, and whether the store's clock can be trusted for that.

The table decides, from the record's own effects (rows 14, 15, 18, 28, 29, 30). The store's statements only compare
and swap, so a record that moved since it was read is left alone.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from datetime import timedelta
from enum import StrEnum
from typing import TYPE_CHECKING, Final, assert_never

from oncekey.core.errors import ConfigurationError
from oncekey.core.guards import MAX_ATTEMPTS, Facts, Guard
from oncekey.core.model import (
    MINUTE,
    SECOND,
    Code,
    Completed,
    Duration,
    Instant,
    Outcome,
    Record,
    State,
    StoredResponse,
    moment,
)
from oncekey.core.policy import ErrorFormat, ExpiryMode, Flavor, Policy, micros
from oncekey.core.problems import render
from oncekey.core.transitions import Actor, Transition, Trigger, find_transition

if TYPE_CHECKING:
    from collections.abc import Sequence

SWEEP_GRACE: Final = 5 * SECOND
"""How long after the end of a lease the sweeper leaves the record to its owner and its clients."""
REAP_GRACE: Final = 5 * MINUTE
"""How long after its expiry a record is left alone: clocks that differ by less do no harm (A3)."""
CLOCK_TOLERANCE: Final = 5 * MINUTE
"""By how much clocks may differ before the sweeper and the reaper stop (A3)."""
RESUMABLE_EXPIRED: Final = "expired_before_resumed"
"""The error code of a record that was begun, handed back, and not resumed before it expired (row 18)."""
EXPIRED: Final = "expired"
"""Why a record was marked or deleted."""
ABANDONED: Final = "abandoned"
"""Why a pending record was ended: no worker ever claimed its parcel (row 28)."""


def expired_batch(expiries: Sequence[Instant]) -> str:
    """The reason in an audit line about several expired records."""
    return f"{EXPIRED}: {len(expiries)} keys, expiry {moment(min(expiries))} to {moment(max(expiries))}"


@dataclass(frozen=True, slots=True)
class Page:
    """The records of one read, with the store's clock at that moment."""

    now: Instant
    records: tuple[Record, ...]


@dataclass(frozen=True, slots=True)
class ReapPosition:
    """The reaper's position in the order of expiry."""

    expires_at: Instant
    scope: str
    key: str


START: Final = ReapPosition(-1, "", "")


@dataclass(frozen=True, slots=True)
class Expired:
    """The finished records that one statement may move: the conditions of `reaping_of` for PURGE and MARK."""

    age: Duration
    """The minimum time since their expiry, by the store's clock."""
    until: Instant
    """The latest expiry: the same limit as an instant, which the worker compared with its own clocks."""
    soft: bool = False
    """Finished records are marked, not deleted."""
    trusted_for: Duration | None = None
    """Only those whose time to live is at most this; None: all."""


@dataclass(frozen=True, slots=True)
class Gone:
    """The result of moving one batch of finished records."""

    moved: int
    full: bool
    """There may be more after `last`."""
    last: ReapPosition | None = None
    now: Instant | None = None
    """The store's clock; None if there was nothing to move."""


def sweep_to(
    record: Record, now: Instant, *, max_attempts: int = MAX_ATTEMPTS, grace: Duration = SWEEP_GRACE
) -> State | None:
    """The state to which the sweeper moves a stale record (rows 14, 15). None: not due, or not for the sweeper."""
    facts = Facts(record, now, grace=grace, max_attempts=max_attempts)
    # Row 15 is also for the requester, which does not wait for a grace; the sweeper always does.
    if not Guard.GRACE_OVER.holds(facts):
        return None
    row = find_transition(Trigger.SWEEP, Actor.SWEEPER, facts)
    return row.to if isinstance(row, Transition) else None


class Reaping(StrEnum):
    """What the reaper does with an expired record."""

    PURGE = "purge"
    """Delete it (row 30)."""
    MARK = "mark"
    """Keep it as EXPIRED (row 29)."""
    PARK = "park"
    """Make it unknown, for an operator: it began and never ended (row 18)."""
    ABANDON = "abandon"
    """Settle it with a time-out response: no worker ever claimed its parcel (row 28)."""


@dataclass(frozen=True, slots=True)
class Retention:
    """How long records are kept after their expiry, and whether they are marked or deleted."""

    soft: bool = False
    kept: Duration = 0
    """How long an EXPIRED record stays, in addition to the grace; nothing is kept forever."""
    grace: Duration = REAP_GRACE

    @classmethod
    def by(cls, policy: Policy) -> Retention:
        """The retention of the policy; a record that is kept for the audit is kept as long as the audit."""
        soft = policy.expiry_mode is ExpiryMode.SOFT
        return cls(soft=soft, kept=micros(policy.audit_ttl) if soft else 0)


def reaping_of(
    record: Record, now: Instant, retention: Retention, trusted_for: Duration | None = None
) -> Reaping | None:
    """What the reaper does with this record now, if anything.

    `trusted_for` is how long the clocks have agreed since they last differed: every record that was stamped before that
    is kept for its full time again (ADR 0009). None: they never differed.
    """
    if trusted_for is not None and trusted_for < record.ttl:
        return None
    late = now - retention.grace
    match record.state:
        case State.COMPLETED if retention.soft:
            return Reaping.MARK if _allowed(Trigger.EXPIRE, Facts(record, late, soft=True)) else None
        case State.COMPLETED:
            return Reaping.PURGE if _allowed(Trigger.PURGE, Facts(record, late)) else None
        case State.EXPIRED:
            return Reaping.PURGE if _allowed(Trigger.PURGE, Facts(record, late - retention.kept)) else None
        case State.FAILED_RETRYABLE:
            if _allowed(Trigger.PURGE, Facts(record, late)):
                return Reaping.PURGE
            return Reaping.PARK if _allowed(Trigger.EXPIRE, Facts(record, late)) else None
        case State.PENDING:
            # The statement that deletes the parcel proves that no worker claimed it.
            return Reaping.ABANDON if _allowed(Trigger.ABANDON, Facts(record, late)) else None
        case State.IN_PROGRESS | State.UNKNOWN:
            return None
        case _:
            assert_never(record.state)


def _allowed(trigger: Trigger, facts: Facts) -> bool:
    return isinstance(find_transition(trigger, Actor.REAPER, facts), Transition)


def timed_out(policy: Policy) -> Completed:
    """The response to a request whose deferred call no worker ever began."""
    page = render(Code.TIMED_OUT, policy.abandoned_status, policy)
    body = page.body
    if policy.error_format is not ErrorFormat.FAULT and policy.flavor is not Flavor.STRIPE:
        body = json.dumps({**json.loads(body), "error": "timeout"}, separators=(",", ":")).encode("ascii")
    headers = ((b"content-type", page.media_type),)
    return Completed(StoredResponse(policy.abandoned_status, headers, body), Outcome.FAILURE)


@dataclass(frozen=True, slots=True)
class Trust:
    """Whether the store's clock can be trusted, judged by repeated readings of three clocks (A3, F41).

    `boot` is a clock that cannot be set. The store's clock has to agree with the host's own and must not move against
    `boot`. After a move the new time is trusted from the next reading on, because the clock may have been corrected;
    but records that were stamped before are kept for their full time, which `trusted_for` counts.
    """

    anchor: Duration | None = None
    wrong: bool = False
    wrong_at: Instant | None = None
    why: str = ""

    def looked(self, store: Instant, wall: Instant, boot: Instant) -> Trust:
        """The trust after a reading; `store` is the instant that was read with the records in question."""
        apart, moved = abs(store - wall), 0 if self.anchor is None else abs(store - boot - self.anchor)
        why = ""
        if apart > CLOCK_TOLERANCE:
            why = f"the store's clock and this host's differ by {apart // SECOND} s"
        elif moved > CLOCK_TOLERANCE:
            why = f"the store's clock moved by {moved // SECOND} s against the time that passed"
        steady = self.anchor is not None and moved <= CLOCK_TOLERANCE
        # The first correct reading still counts as wrong: the clock may have been corrected just before it.
        disturbed = bool(why) or self.wrong
        return Trust(
            anchor=self.anchor if steady else store - boot,
            wrong=bool(why),
            wrong_at=boot if disturbed else self.wrong_at,
            why=why,
        )

    def disturbed(self, boot: Instant) -> Trust:
        """The trust after an outage: owners that could not renew during it must not count as dead at once."""
        return replace(self, wrong_at=boot)

    def trusted_for(self, boot: Instant) -> Duration | None:
        """How long the clocks have agreed; None: always."""
        return None if self.wrong_at is None else boot - self.wrong_at


@dataclass(frozen=True, slots=True)
class Run:
    """How long a finished operation took."""

    operation: str
    took: Duration


ENOUGH: Final = 20
"""The minimum number of runs for a 99th percentile."""


def short_leases(runs: Sequence[Run], lease: Duration) -> dict[str, Duration]:
    """The operations for which twice the 99th percentile is longer than the lease, with that percentile."""
    by_operation: dict[str, list[Duration]] = {}
    for run in runs:
        by_operation.setdefault(run.operation, []).append(run.took)
    slow = {name: percentile(took, 99) for name, took in by_operation.items() if len(took) >= ENOUGH}
    return {name: p99 for name, p99 in slow.items() if lease < 2 * p99}


def percentile(values: Sequence[Duration], rank: int) -> Duration:
    """The smallest value that is not less than `rank` percent of them."""
    ordered = sorted(values)
    return ordered[max(0, -(-len(ordered) * rank // 100) - 1)]


def lifetime(*, retries: timedelta, recovery: timedelta, audit: timedelta = timedelta()) -> timedelta:
    """The `ttl` that an API needs: `Policy(ttl=lifetime(retries=..., recovery=...))`.

    `retries` is the longest time over which a client retries, `recovery` the longest outage that clients wait for, and
    `audit` how long you want to look up records. Less than a day is rounded up to one, the shortest default `ttl`.
    """
    for name, span in (("retries", retries), ("recovery", recovery), ("audit", audit)):
        if span < timedelta():
            raise ConfigurationError(f"{name}={span!r} is negative: give the longest time that you expect")
    return max(retries + recovery + audit, timedelta(days=1))
