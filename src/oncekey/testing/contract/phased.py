"""PHASED records with which scenarios begin."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from oncekey.core.model import (
    SECOND,
    Announcement,
    Effects,
    EntryKind,
    Intent,
    MemoEntry,
    Recovery,
    State,
)
from oncekey.stores.phases import MARGIN
from oncekey.testing.claims import DEADLINE, LEASE, a_claim, again

if TYPE_CHECKING:
    from oncekey.core.model import Claim, Lease, Record
    from oncekey.testing.contract.world import World

_F, _U = State.FAILED_RETRYABLE, State.UNKNOWN

ORDER = MemoEntry("order", EntryKind.PHASE, '{"id":7}')
CHARGE = MemoEntry("charge", EntryKind.CALL, '"ch_1 \\u0000 é"')
OTHER_CHARGE = replace(CHARGE, result='"ch_2"')
REQUEST = b"a request, sealed \x00\xff"
WINDOW = 60 * SECOND

CALL = Announcement(
    phase="charge",
    downstream_key="oncekey-7",
    digest="d1",
    sends=1,
    repeatable=None,
    send_window=5 * SECOND,
    call_timeout=30 * SECOND,
)
REPEATABLE = replace(CALL, repeatable=WINDOW)
BUSY = CALL.send_window + CALL.call_timeout + MARGIN


def begun(world: World, **changes: Any) -> tuple[Claim, Lease]:  # noqa: ANN401  (any field of a claim)
    """A phased record in progress, and its owner's lease."""
    claim = a_claim(**{"effects": Effects.PHASED, "recovery": Recovery.RESUME, "request": REQUEST, **changes})
    return claim, world.owned(claim)


def announced(world: World, call: Announcement = CALL, **changes: Any) -> tuple[Claim, Lease]:  # noqa: ANN401
    """The same after one finished phase, with a call that was announced."""
    claim, lease = begun(world, **changes)
    assert world.checkpoint(lease, (), (ORDER,), LEASE) is not None
    assert world.go(world.store.phases.announce(lease, (ORDER,), (ORDER,), call)) is not None
    return claim, lease


def stolen(world: World, claim: Claim) -> Lease:
    """The lease of the next owner, after ours ran out."""
    world.advance(2 * LEASE + DEADLINE)
    return world.owned(again(claim))


def intent_of(record: Record) -> Intent:
    """The announced call of a record that has one."""
    assert record.intent is not None
    return record.intent
