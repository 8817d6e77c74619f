"""What sweepers and reapers do: which record is due for which move, and whether the clock that says so is believed.

The table decides, from the record's own effects (rows 14, 15, 18, 28, 29, 30). The store's statements only compare
and swap, so a record that moved since it was read is left alone.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import TYPE_CHECKING, Final, assert_never

from oncekey.core.choices import ErrorFormat, ExpiryMode, Flavor
from oncekey.core.guards import MAX_ATTEMPTS, Facts, Guard
from oncekey.core.model import MINUTE, SECOND, Code, Completed, Outcome, Record, State, StoredResponse
from oncekey.core.policy import Policy, micros
from oncekey.core.problems import render
from oncekey.core.transitions import Actor, Row, Trigger, judge

if TYPE_CHECKING:
    from collections.abc import Sequence

    from oncekey.core.model import Duration, Instant

SWEEP_GRACE: Final = 5 * SECOND
"""How long after a lease's end its owner and its clients still come first."""
REAP_GRACE: Final = 5 * MINUTE
"""How long after its expiry a record is left alone: clocks that differ by less can do no harm (A3)."""
CLOCK_TOLERANCE: Final = 5 * MINUTE
"""How far clocks may be apart before sweepers and reapers stop (A3)."""
RESUMABLE_EXPIRED: Final = "expired_before_resumed"
"""The error code of a record that was begun, handed back, and never gone on with until it expired (row 18)."""
EXPIRED: Final = "expired"
"""Why a record was marked or deleted."""
ABANDONED: Final = "abandoned"
"""Why a pending record was ended: its parcel was never taken (row 28)."""


@dataclass(frozen=True, slots=True)
class Page:
    """Records of one look, with the store's clock at that moment."""

    now: Instant
    records: tuple[Record, ...]


@dataclass(frozen=True, slots=True)
class Place:
    """Where in the order of their expiry a reaper has come to."""

    expires_at: Instant
    scope: str
    key: str


START: Final = Place(-1, "", "")


@dataclass(frozen=True, slots=True)
class Expired:
    """Which finished records one statement may move: the conditions that `reaping_of` has for PURGE and MARK."""

    age: Duration
    """So long ago they expired, by the store's own clock."""
    until: Instant
    """No later than this they expired: the same, by an instant that was compared with the worker's own clocks."""
    soft: bool = False
    """Finished ones are marked, and not deleted."""
    trusted_for: Duration | None = None
    """Only those whose time to live is no longer than this; None: all."""


@dataclass(frozen=True, slots=True)
class Gone:
    """What became of one batch of finished records."""

    moved: int
    full: bool
    """There may be more behind `last`."""
    last: Place | None = None
    now: Instant | None = None
    """The store's clock, if there was anything to move."""


def sweep_to(
    record: Record, now: Instant, *, max_attempts: int = MAX_ATTEMPTS, grace: Duration = SWEEP_GRACE
) -> State | None:
    """Where a sweeper moves a stale record (rows 14, 15). None: it is not due, or not a sweeper's."""
    facts = Facts(record, now, grace=grace, max_attempts=max_attempts)
    # Row 15 is also the requester's, who does not wait for a grace; a sweeper always does.
    if not Guard.GRACE_OVER.holds(facts):
        return None
    row = judge(Trigger.SWEEP, Actor.SWEEPER, facts)
    return row.to if isinstance(row, Row) else None


class Reaping(StrEnum):
    """What a reaper does with a record whose time has passed."""

    PURGE = "purge"
    """Delete it (row 30)."""
    MARK = "mark"
    """Keep it as EXPIRED (row 29)."""
    PARK = "park"
    """Somebody has to look: it was begun and never ended (row 18)."""
    ABANDON = "abandon"
    """Tell its client that it timed out: its parcel was never taken (row 28)."""


@dataclass(frozen=True, slots=True)
class Retention:
    """How long records are kept after their own time, and in which way they go."""

    soft: bool = False
    kept: Duration = 0
    """How long an EXPIRED record stays, on top of the grace; nothing is kept for ever."""
    grace: Duration = REAP_GRACE

    @classmethod
    def by(cls, policy: Policy) -> Retention:
        """What the policy says; a record that is kept for the audit is kept for as long as the audit is."""
        soft = policy.expiry_mode is ExpiryMode.SOFT
        return cls(soft=soft, kept=micros(policy.audit_ttl) if soft else 0)


def reaping_of(
    record: Record, now: Instant, retention: Retention, trusted_for: Duration | None = None
) -> Reaping | None:
    """What is due, if anything.

    `trusted_for` is how long the clocks have agreed since they last did not: whatever was stamped in between has its
    full time all the same (ADR 0009). None: they never disagreed.
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
            # That its parcel was never taken is proven where it is deleted.
            return Reaping.ABANDON if _allowed(Trigger.ABANDON, Facts(record, late)) else None
        case State.IN_PROGRESS | State.UNKNOWN:
            return None
        case _:
            assert_never(record.state)


def _allowed(trigger: Trigger, facts: Facts) -> bool:
    return isinstance(judge(trigger, Actor.REAPER, facts), Row)


def timed_out(policy: Policy) -> Completed:
    """The answer of a request whose deferred call nobody ever began."""
    page = render(Code.TIMED_OUT, policy.abandoned_status, policy)
    body = page.body
    if policy.error_format is not ErrorFormat.FAULT and policy.flavor is not Flavor.STRIPE:
        body = json.dumps({**json.loads(body), "error": "timeout"}, separators=(",", ":")).encode("ascii")
    headers = ((b"content-type", page.media_type),)
    return Completed(StoredResponse(policy.abandoned_status, headers, body), Outcome.FAILURE)


@dataclass(frozen=True, slots=True)
class Trust:
    """Whether the store's clock may be gone by, as far as looks at three clocks can tell (A3, F41).

    `boot` is a clock that nobody can set. The store's clock has to agree with the host's own and must not move against
    `boot`. A move is believed from the next look on, because the clock may have been put right; but what was stamped
    before it needs its full time first, and that is what `trusted_for` counts.
    """

    anchor: Duration | None = None
    wrong: bool = False
    wrong_at: Instant | None = None
    why: str = ""

    def looked(self, store: Instant, wall: Instant, boot: Instant) -> Trust:
        """The trust after a look, with the store's instant as it came with what it decides about."""
        apart, moved = abs(store - wall), 0 if self.anchor is None else abs(store - boot - self.anchor)
        why = ""
        if apart > CLOCK_TOLERANCE:
            why = f"the store's clock and this host's differ by {apart // SECOND} s"
        elif moved > CLOCK_TOLERANCE:
            why = f"the store's clock moved by {moved // SECOND} s against the time that passed"
        steady = self.anchor is not None and moved <= CLOCK_TOLERANCE
        # The first look that finds it right again counts as wrong, too: nobody knows how long ago that was.
        disturbed = bool(why) or self.wrong
        return Trust(
            anchor=self.anchor if steady else store - boot,
            wrong=bool(why),
            wrong_at=boot if disturbed else self.wrong_at,
            why=why,
        )

    def disturbed(self, boot: Instant) -> Trust:
        """The trust after an outage: who could not be heard may not be taken for dead at once."""
        return replace(self, wrong_at=boot)

    def trusted_for(self, boot: Instant) -> Duration | None:
        """How long nothing was wrong; None: always."""
        return None if self.wrong_at is None else boot - self.wrong_at


@dataclass(frozen=True, slots=True)
class Run:
    """How long a finished operation took."""

    operation: str
    took: Duration


ENOUGH: Final = 20
"""Fewer runs than this say nothing about the slowest of a hundred."""


def short_leases(runs: Sequence[Run], lease: Duration) -> dict[str, Duration]:
    """The operations whose 99th percentile, twice, is longer than the lease, with that percentile."""
    by_operation: dict[str, list[Duration]] = {}
    for run in runs:
        by_operation.setdefault(run.operation, []).append(run.took)
    slow = {name: percentile(took, 99) for name, took in by_operation.items() if len(took) >= ENOUGH}
    return {name: p99 for name, p99 in slow.items() if lease < 2 * p99}


def percentile(values: Sequence[Duration], rank: int) -> Duration:
    """The smallest value that is not less than `rank` percent of them."""
    ordered = sorted(values)
    return ordered[max(0, -(-len(ordered) * rank // 100) - 1)]
