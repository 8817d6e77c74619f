"""Claims and answers for tests, with ordinary values that a test may change."""

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
    Outcome,
    RecordId,
    Recovery,
    StoredResponse,
)

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
    """The same request, sent once more: another incarnation and another owner."""
    return replace(claim, **{"incarnation": uuid.uuid4(), "owner": uuid.uuid4().hex, **changes})


def answered(body: bytes | None = b'{"id":7}', *, status: int = 201) -> Completed:
    """A settlement with an answer."""
    headers = ((b"content-type", b"application/json"), (b"location", b"/orders/7"))
    outcome = Outcome.SUCCESS if status < 400 else Outcome.FAILURE  # noqa: PLR2004  (where HTTP's errors begin)
    return Completed(StoredResponse(status, headers, body), outcome)
