"""A LOCAL request with a new key does not ask TRANSITIONS: its short cut decides what the table would."""

from __future__ import annotations

import pytest

from oncekey.core.model import LOCAL, OUTBOX, SECOND, Effects, Lease, Snapshot
from oncekey.core.onecommit import KINDS, Locked, write_target_for
from oncekey.core.policy import Policy
from oncekey.core.transitions import TRANSITIONS, Trigger
from oncekey.engine.local import NEW, LockHeld, enter, record_as_claimed
from oncekey.testing.claims import a_claim

NOW = 1_700_000_000 * SECOND


@pytest.mark.parametrize(("effects", "trigger"), [(LOCAL, Trigger.COMMIT), (OUTBOX, Trigger.DEFER)])
def test_new_key_fast_path_matches_the_transition_table(effects: Effects, trigger: Trigger) -> None:
    claim, snapshot = a_claim(effects=effects), Snapshot(None, NOW)
    (row,) = TRANSITIONS[None][trigger]

    entry = enter(Locked(got=True, snapshot=snapshot, begun=7), claim, Policy())

    assert isinstance(entry, LockHeld)
    assert entry.target == NEW == write_target_for(snapshot, claim)
    assert entry.target.kind is KINDS[row.number]
    assert entry.proceed.lease == Lease.of(record_as_claimed(claim, NEW, NOW))
