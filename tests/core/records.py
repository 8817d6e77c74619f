"""Records to judge: each as ordinary as can be until a test says otherwise."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from uuid import UUID

from oncekey.core.model import (
    HOUR,
    MINUTE,
    SECOND,
    Claim,
    Effects,
    EntryKind,
    Intent,
    MemoEntry,
    Outcome,
    Record,
    RecordId,
    Recovery,
    State,
    StoredResponse,
)

NOW = 1_700_000_000 * SECOND
ID = RecordId("shop", "key-0000000000001")
MEMO = (MemoEntry("charge", EntryKind.CALL, '"ch_1"'),)
INCARNATION = UUID(int=1)


def an_intent(*, repeatable: bool = False, sends: int = 1, phase: str = "charge") -> Intent:
    until = NOW + HOUR if repeatable else None
    return Intent(phase, "dk", "digest", sends, NOW - MINUTE, NOW - MINUTE + 5 * SECOND, until)


def a_record(state: State = State.IN_PROGRESS, **changes) -> Record:
    done = state in {State.COMPLETED, State.EXPIRED}
    record = Record(
        id=ID,
        incarnation=INCARNATION,
        operation="pay",
        effects=Effects.LOCAL,
        recovery=Recovery.RETRY,
        method="POST",
        path="/payments",
        fingerprint="same",
        seed=b"seed",
        state=state,
        outcome=Outcome.SUCCESS if done else None,
        entered=True,
        fence=1,
        version=1,
        owner="owner" if state is State.IN_PROGRESS else None,
        lease_until=NOW + MINUTE if state is State.IN_PROGRESS else None,
        deadline=NOW + HOUR,
        call_timeout=30 * SECOND,
        ttl=24 * HOUR,
        attempts=1,
        recovery_point="started",
        memo=(),
        intent=None,
        response=StoredResponse(201, (), b"{}") if done else None,
        last_error=None,
        reconcile_after=NOW if state is State.UNKNOWN else None,
        reconcile_tries=0,
        created_at=NOW - MINUTE,
        last_run_at=NOW - MINUTE,
        finished_at=NOW - SECOND if done else None,
        expires_at=NOW + HOUR,
    )
    return replace(record, **changes)


def a_claim(**changes) -> Claim:
    claim = Claim(
        id=ID,
        incarnation=UUID(int=2),
        operation="pay",
        effects=Effects.LOCAL,
        recovery=Recovery.RETRY,
        method="POST",
        path="/payments",
        fingerprint="same",
        seed=b"seed",
        owner="another",
        lease=5 * MINUTE,
        deadline=HOUR,
        call_timeout=30 * SECOND,
        ttl=24 * HOUR,
    )
    return replace(claim, **changes)


LEASES = (None, NOW + MINUTE, NOW)
EXPIRIES = (NOW + 1, NOW)
INTENTS = (None, an_intent(), an_intent(repeatable=True), an_intent(repeatable=True, sends=2))


def all_records(state: State) -> list[Record]:
    """Every combination of what a guard looks at."""
    return [
        a_record(
            state,
            effects=effects,
            recovery=recovery,
            memo=memo,
            intent=intent,
            lease_until=lease,
            expires_at=expiry,
            attempts=attempts,
        )
        for effects, recovery, memo, intent, lease, expiry, attempts in product(
            Effects, Recovery, ((), MEMO), INTENTS, LEASES, EXPIRIES, (1, 10)
        )
    ]
