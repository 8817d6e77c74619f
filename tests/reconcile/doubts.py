"""Records in doubt, of every kind of effects, and a reconciler whose clocks the test owns."""

from __future__ import annotations

import uuid

from oncekey.canonical.digests import downstream_key
from oncekey.core.model import SECOND, Announcement, Deferred, Doubtful, Effects, Parcel, ParcelKind, Recovery
from oncekey.core.policy import Policy
from oncekey.core.resolution import CallReport
from oncekey.core.resolvers import Resolvers, to_text
from oncekey.core.transitions import Actor, Mover, Trigger
from oncekey.engine import reconcile
from oncekey.testing.claims import LEASE, a_claim
from oncekey.workers.reconciler import Reconciler

POLICY = Policy()
CALL = "charge"
WEBHOOK = Mover(Actor.WEBHOOK, "test")


def inline(world, **changes):
    """An INLINE handler that did not hear how its call ended."""
    claim = a_claim(
        effects=Effects.INLINE, recovery=Recovery.UNKNOWN, operation="pay", seed=uuid.uuid4().bytes * 2, **changes
    )
    assert world.settle(world.owned(claim), Doubtful("time_out")).ours
    return claim


def announced(world, repeatable=None, **changes):
    """A phased handler whose call is under way."""
    claim = a_claim(
        effects=Effects.PHASED, recovery=Recovery.RESUME, operation="pay", seed=uuid.uuid4().bytes * 2, **changes
    )
    lease = world.owned(claim)
    call = Announcement(CALL, key_of(claim), "d1", 1, repeatable, 5 * SECOND, 30 * SECOND)
    assert world.go(world.store.phases.announce(lease, (), (), call)) is not None
    return claim, lease


def phased(world, **changes):
    """The same, and nobody knows how it ended."""
    claim, lease = announced(world, **changes)
    assert world.settle(lease, Doubtful("time_out")).ours
    return claim


def taken_up(world, **changes):
    """A deferred call that a worker is making."""
    claim = a_claim(
        effects=Effects.OUTBOX, recovery=Recovery.RETRY, operation="pay", seed=uuid.uuid4().bytes * 2, **changes
    )
    parcel = Parcel(uuid.uuid4(), ParcelKind.DEFER, claim.id, claim.incarnation, CALL, '{"amount": 7}', key_of(claim))
    assert world.settle(world.owned(claim), Deferred(parcel)).ours
    (held,) = world.go(world.store.outbox.due("worker", (CALL,), 10, LEASE))
    call = Announcement(CALL, key_of(claim), "d1", 1, None, 5 * SECOND, 30 * SECOND)
    taken = world.go(world.store.outbox.take_up(held, "worker-1", call, LEASE))
    return claim, taken


def parked(world, taken):
    """The worker does not know how it ended: its parcel is a dead letter."""
    assert world.go(world.store.outbox.park(taken.lease, taken.held, Trigger.DOUBT, "call_uncertain", "time_out"))


def outbox(world, **changes):
    """A deferred call whose outcome nobody knows."""
    claim, taken = taken_up(world, **changes)
    parked(world, taken)
    return claim


KINDS = {"inline": inline, "phased": phased, "outbox": outbox}


def key_of(claim):
    """What the provider knows the call by."""
    return downstream_key(claim.seed, CALL)


def resolving(*answers, **options):
    """A resolver that gives these answers, one after the other and the last one for ever; what it was asked."""
    asked, left = [], list(answers)
    resolvers = Resolvers()

    async def resolve(question):
        asked.append(question)
        answer = left.pop(0) if len(left) > 1 else left[0]
        if isinstance(answer, Exception):
            raise answer
        return answer(question) if callable(answer) else answer

    resolvers.resolver("pay", call=CALL, **options)(resolve)
    return resolvers, asked


def a_reconciler(world, resolvers=None, policy=POLICY, **options):
    async def run(transaction):
        return world._once(transaction)

    options.setdefault("clock", world.clock)
    options.setdefault("chance", lambda: 1.0)
    return Reconciler(world.store, run, resolvers or Resolvers(), policy, who="test", **options)


def report(claim, resolution, event_id=None, **names):
    """What a webhook brings."""
    names = names or {"downstream_key": key_of(claim)}
    return CallReport("webhook", event_id or uuid.uuid4().hex, to_text(resolution, POLICY), **names)


def receive(world, claim, resolution, event_id=None, *, resolvers=None, **names):
    """A webhook that was believed."""
    message = report(claim, resolution, event_id, **names)
    return world.go(reconcile.receive(world.store, message, WEBHOOK, lambda _: POLICY, resolvers or resolving(None)[0]))


def history(world, claim):
    """Who moved it where."""
    return [(entry.note.actor, entry.note.to) for entry in world.go(world.store.audit.history(claim.id))]
