"""Records with which scenarios begin: every state that a request can bring about, and leases that do not fit them."""

from __future__ import annotations

import uuid
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from oncekey.core.model import (
    SECOND,
    Announcement,
    Discarded,
    Doubtful,
    Effects,
    EntryKind,
    Intent,
    MemoEntry,
    Recovery,
    Retryable,
    State,
)
from oncekey.stores.phases import MARGIN
from oncekey.testing.claims import DEADLINE, LEASE, a_claim, again, answered

if TYPE_CHECKING:
    from oncekey.core.model import Claim, Lease, Record, Settlement
    from oncekey.testing.contract.world import World


@dataclass(frozen=True, slots=True)
class Standing:
    """A record that was brought into a state, with the claim and the lease of its owner."""

    claim: Claim
    lease: Lease
    state: State | None


SETTLEMENTS: Mapping[str, Settlement] = MappingProxyType(
    {
        "completed": answered(),
        "completed otherwise": answered(b"another answer", status=402),
        "retryable": Retryable("provider_refused"),
        "retryable otherwise": Retryable("another_error"),
        "doubtful": Doubtful("provider_timeout"),
        "doubtful otherwise": Doubtful("another_error"),
        "discarded": Discarded(),
    }
)

_INTO: Mapping[State | None, Settlement | None] = MappingProxyType(
    {
        State.IN_PROGRESS: None,
        State.COMPLETED: SETTLEMENTS["completed"],
        State.FAILED_RETRYABLE: SETTLEMENTS["retryable"],
        State.UNKNOWN: SETTLEMENTS["doubtful"],
        None: SETTLEMENTS["discarded"],
    }
)
STATES = tuple(_INTO)


def stand(world: World, state: State | None, **changes: Any) -> Standing:  # noqa: ANN401  (any field of a claim)
    """A fresh record in this state; `None` is a record that was there and was taken back."""
    claim = a_claim(**changes)
    lease = world.owned(claim)
    settlement = _INTO[state]
    if settlement is not None:
        assert world.settle(lease, settlement).ours
    return Standing(claim, lease, state)


def forgeries(lease: Lease) -> Iterator[Lease]:
    """The lease with one thing wrong at a time (P1, F1)."""
    yield replace(lease, fence=lease.fence - 1)
    yield replace(lease, fence=lease.fence + 1)
    yield replace(lease, incarnation=uuid.uuid4())


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
