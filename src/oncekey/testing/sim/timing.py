"""The times of a simulated world. They are short against each other's, as real ones are, and virtual: free."""

from __future__ import annotations

from datetime import timedelta
from typing import Final

from oncekey.core.model import MINUTE, SECOND, Duration
from oncekey.core.policy import Policy, micros

POLICY: Final = Policy(
    lease=timedelta(seconds=60),
    deadline=timedelta(minutes=4),
    call_timeout=timedelta(seconds=20),
    ttl=timedelta(minutes=20),
    allow_short_ttl=True,
    secret=b"the simulator's secret",
)
LEASE: Final = micros(POLICY.lease)
DEADLINE: Final = micros(POLICY.deadline)
CALL_TIMEOUT: Final = micros(POLICY.call_timeout)
TTL: Final = micros(POLICY.ttl)

PARCEL_LEASE: Final = MINUTE
"""How long a worker has a parcel; the call that it makes is over by then, or in doubt."""
SWEEP_GRACE: Final = 5 * SECOND
REAP_GRACE: Final = 5 * MINUTE
CLOCK_TOLERANCE: Final = MINUTE
"""How far the store's clock may be off before workers stop (A3); less than what U1 waits, or it is worth nothing."""

PROVIDER_LAG: Final = 10 * SECOND
"""How long a call that was sent can take to be visible at the provider."""
SEND_SLACK: Final = 4 * MINUTE
"""How long an owner may stand still between its last look at its lease and the send: no fence covers it (U1)."""
DOUBT_WAIT: Final = max(LEASE, 5 * MINUTE) + PROVIDER_LAG + CLOCK_TOLERANCE
"""How long a resolver watches an unknown record before "not executed" is believed (U1)."""

SMALL_JUMP: Final = CLOCK_TOLERANCE
BIG_JUMP: Final = 15 * MINUTE
SKEW: Final = 60 * MINUTE
"""How wrong the wall clock of a host may be: nothing may depend on it."""

_RESOLVED: Final = DEADLINE + LEASE + DOUBT_WAIT
_REAPED: Final = _RESOLVED + TTL + REAP_GRACE + MINUTE
BEATS: Final[tuple[Duration, ...]] = (
    SECOND,
    LEASE,
    LEASE + SEND_SLACK // 2,
    DEADLINE + LEASE,
    _RESOLVED,
    TTL,
    _REAPED,
    _REAPED + MINUTE,
)
"""When things are about to change: clients come, workers look and zombies wake around these instants."""
CHAOS: Final = BEATS[-1] + 3 * MINUTE
"""How long faults last."""
