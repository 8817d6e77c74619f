"""Records in every state, and a sweeper and a reaper over a store whose clock the test owns."""

from __future__ import annotations

import uuid

from oncekey.core.flow import Mode, Transaction
from oncekey.core.model import (
    HOUR,
    SECOND,
    Announcement,
    Deferred,
    Doubtful,
    Effects,
    EntryKind,
    HandedBack,
    MemoEntry,
    Parcel,
    ParcelKind,
    Recovery,
    Retryable,
    State,
)
from oncekey.core.policy import Policy
from oncekey.testing.claims import LEASE, TTL, a_claim, answered
from oncekey.workers.service import ClockWatch
from oncekey.workers.upkeep import Reaper, Sweeper

STEP = MemoEntry("order", EntryKind.PHASE, '{"id":7}')
CALL = Announcement(
    phase="charge",
    downstream_key="oncekey-7",
    digest="d1",
    sends=1,
    repeatable=None,
    send_window=5 * SECOND,
    call_timeout=30 * SECOND,
)
LONG = 10 * TTL


class Naps:
    """A sleep that only remembers."""

    def __init__(self):
        self.seconds = []

    async def __call__(self, seconds):
        self.seconds.append(seconds)


def watch_of(world):
    """A host whose clocks agree with the store's, whatever the test does to them together."""
    return ClockWatch(wall=world.clock, boot=world.clock)


def runner(world):
    async def run(transaction):
        return world._once(transaction)

    return run


def a_sweeper(world, policy=None, **options):
    options.setdefault("watch", watch_of(world))
    return Sweeper(world.store.upkeep, runner(world), policy or Policy(), who="test", **options)


def a_reaper(world, policy=None, **options):
    options.setdefault("watch", watch_of(world))
    options.setdefault("sleep", Naps())
    options.setdefault("clock", world.clock)
    return Reaper(world.store.upkeep, world.store.audit, runner(world), policy or Policy(), who="test", **options)


def parcel_of(claim, **changes):
    given = {
        "id": uuid.uuid4(),
        "kind": ParcelKind.DEFER,
        "record_id": claim.id,
        "incarnation": claim.incarnation,
        "topic": "transfers",
        "payload": "{}",
        "downstream_key": str(uuid.uuid4()),
    }
    return Parcel(**{**given, **changes})


def running(world, effects=Effects.LOCAL, recovery=Recovery.RETRY, **changes):
    claim = a_claim(effects=effects, recovery=recovery, **changes)
    return claim, world.owned(claim)


def phased(world, **changes):
    return running(world, Effects.PHASED, Recovery.RESUME, **changes)


def step(world, lease):
    """One finished phase."""
    body = lambda: world.store.phases.checkpointing(lease, (), (STEP,), LEASE)  # noqa: E731
    assert world.go(_flow(Transaction("checkpoint", Mode.ATOMIC, body))) is not None


def call(world, lease, announcement=CALL):
    """A call that was announced and has no result."""
    assert world.go(world.store.phases.announce(lease, (), (), announcement)) is not None


def completed(world, **changes):
    claim, lease = running(world, **changes)
    assert world.settle(lease, answered()).ours
    return claim


def retryable(world, **changes):
    claim, lease = running(world, **changes)
    assert world.settle(lease, Retryable("refused")).ours
    return claim


def unknown(world, **changes):
    claim, lease = running(world, Effects.INLINE, Recovery.UNKNOWN, **changes)
    assert world.settle(lease, Doubtful("time_out")).ours
    return claim


def resumable(world, **changes):
    """Begun, handed back, not gone on with (FR+)."""
    claim, lease = phased(world, **changes)
    step(world, lease)
    assert world.settle(lease, HandedBack("restart")).ours
    return claim


def resumable_call(world, **changes):
    """The same with nothing but an open call that may be repeated."""
    claim, lease = phased(world, **changes)
    call(world, lease, Announcement("charge", "k", "d1", 1, HOUR, 5 * SECOND, 30 * SECOND))
    assert world.settle(lease, HandedBack("restart")).ours
    return claim


def pending(world, **changes):
    claim, lease = running(world, Effects.OUTBOX, Recovery.RETRY, **changes)
    parcel = parcel_of(claim)
    assert world.settle(lease, Deferred(parcel)).ours
    return claim, parcel


def taken(world, **changes):
    """A pending record whose parcel a worker took and gave back."""
    claim, parcel = pending(world, **changes)
    held = world.go(world.store.outbox.due("worker-1", ("transfers",), 10, LEASE))
    mine = [one for one in held if one.parcel.id == parcel.id]
    assert world.go(world.store.outbox.hand_back(*mine)) == {parcel.id}
    return claim, parcel


def state_of(world, claim):
    record = world.find(claim.id).record
    return None if record is None else record.state


def states(world, **claims):
    return {name: state_of(world, claim) for name, claim in claims.items()}


def history_of(world, claim):
    return [(e.note.source, e.note.to, e.note.actor, e.note.trigger) for e in notes_of(world, claim)]


def notes_of(world, claim):
    return world.go(world.store.audit.history(claim.id))


def _flow(transaction):
    return (yield transaction)


FR, UNKNOWN = State.FAILED_RETRYABLE, State.UNKNOWN
