"""A clock that tests move by hand, and claims and responses with default values that a test may override."""

from __future__ import annotations

import uuid
from dataclasses import replace
from typing import Any

from oncekey.core.model import (
    HOUR,
    MINUTE,
    SECOND,
    Claim,
    Completed,
    Duration,
    Effects,
    Instant,
    Outcome,
    RecordId,
    Recovery,
    StoredResponse,
)

START: Instant = 1_800_000_000_000_000


class ManualClock:
    """An instant that only `advance` moves; give it to a store as its `clock`."""

    def __init__(self, start: Instant = START) -> None:
        self.now = start

    def __call__(self) -> Instant:
        """The current instant."""
        return self.now

    def advance(self, span: Duration) -> Instant:
        """Move the clock forward; returns the new instant."""
        self.now += span
        return self.now


LEASE: Duration = 5 * MINUTE
DEADLINE: Duration = HOUR
TTL: Duration = 24 * HOUR
FINGERPRINT = "jcs1:sha256:" + "5c" * 32
OTHER_FINGERPRINT = "jcs1:sha256:" + "a7" * 32


def a_claim(key: str | None = None, **changes: Any) -> Claim:  # noqa: ANN401  (any field of a claim)
    """A new claim, on a new key unless one is given."""
    claim = Claim(
        id=RecordId("shop|tenant-1", key or uuid.uuid4().hex),
        incarnation=uuid.uuid4(),
        operation="create_order",
        effects=Effects.LOCAL,
        recovery=Recovery.RETRY,
        method="POST",
        path="/orders",
        fingerprint=FINGERPRINT,
        seed=bytes(range(32)),
        owner=uuid.uuid4().hex,
        lease=LEASE,
        deadline=DEADLINE,
        call_timeout=30 * SECOND,
        ttl=TTL,
    )
    return replace(claim, **changes)


def again(claim: Claim, **changes: Any) -> Claim:  # noqa: ANN401  (any field of a claim)
    """The claim of a retry: the same request with another incarnation and another owner."""
    return replace(claim, **{"incarnation": uuid.uuid4(), "owner": uuid.uuid4().hex, **changes})


def answered(body: bytes | None = b'{"id":7}', *, status: int = 201) -> Completed:
    """A settlement with a response."""
    headers = ((b"content-type", b"application/json"), (b"location", b"/orders/7"))
    outcome = Outcome.SUCCESS if status < 400 else Outcome.FAILURE  # noqa: PLR2004  (where HTTP's errors begin)
    return Completed(StoredResponse(status, headers, body), outcome)
