"""The audit: each line with its move or not at all, found by key, and nothing in it that was secret (R173)."""

from __future__ import annotations

from oncekey.core.deferred import DEAD_LETTER
from oncekey.core.errors import CommitAmbiguousError
from oncekey.core.model import SECOND, Effects, Proceed, RecordId, Recovery, Refuse, State
from oncekey.core.policy import Policy
from oncekey.core.transitions import Actor, Trigger
from oncekey.core.upkeep import SWEEP_GRACE
from oncekey.testing.claims import LEASE, TTL, again
from upkeep.keeping import CALL, a_sweeper, completed, history_of, notes_of, pending, running


def taken_up(world, owner="worker-7"):
    claim, parcel = pending(world)
    held = world.go(world.store.outbox.due(owner, ("transfers",), 10, LEASE))
    [mine] = [one for one in held if one.parcel.id == parcel.id]
    return claim, world.go(world.store.outbox.take_up(mine, owner, CALL, LEASE))


async def test_the_audit_records_a_workers_failures(sql_world):
    """Try again, and then the dead letters: rows 26 and 27."""
    # R173
    world = sql_world
    claim, taken = taken_up(world)
    later = world.store.outbox.try_again(taken.lease, taken.held, SECOND, "refused", CALL.digest, never_sent=True)
    assert world.go(later) is not None
    world.advance(2 * SECOND)
    [held] = world.go(world.store.outbox.due("worker-8", ("transfers",), 10, LEASE))
    taken = world.go(world.store.outbox.take_up(held, "worker-8", CALL, LEASE))
    park = world.store.outbox.park(taken.lease, taken.held, Trigger.DEAD_LETTER, DEAD_LETTER, "tried too often")
    assert world.go(park) is not None
    assert history_of(world, claim) == [
        (State.IN_PROGRESS, State.PENDING, Actor.WORKER, Trigger.TRY_AGAIN),
        (State.IN_PROGRESS, State.UNKNOWN, Actor.WORKER, Trigger.DEAD_LETTER),
    ]
    assert [(entry.note.who, entry.note.why) for entry in notes_of(world, claim)] == [
        ("worker-7", "refused"),
        ("worker-8", DEAD_LETTER),
    ]
    fences = [entry.note.fence for entry in notes_of(world, claim)]
    assert fences == sorted(set(fences))


async def test_a_sweep_with_a_lost_reply_is_audited_once(world):
    claim, _ = running(world, Effects.INLINE, Recovery.UNKNOWN)
    world.advance(LEASE + SWEEP_GRACE)
    world.lose_reply("sweep")
    sweeper = a_sweeper(world)
    try:
        await sweeper.run_once()
    except CommitAmbiguousError:
        world.advance(LEASE)
    await sweeper.run_once()
    assert len(notes_of(world, claim)) == 1


async def test_a_history_covers_one_key_in_one_scope(world):
    claim, _ = running(world)
    running(world)
    world.advance(LEASE + SWEEP_GRACE)
    assert await a_sweeper(world).run_once() == 2
    assert len(notes_of(world, claim)) == 1
    elsewhere = RecordId("shop|tenant-2", claim.id.key)
    assert world.go(world.store.audit.history(elsewhere)) == ()


async def test_the_audit_records_requests_after_a_crash(world):
    """A take-over, a doubt and a new life, each with who and why; an ordinary claim and its answer are not."""
    # R173, ADR 0014
    ordinary = completed(world)
    stale, _ = running(world)
    lost, _ = running(world, Effects.INLINE, Recovery.UNKNOWN)
    world.advance(LEASE)
    taken, doubted = again(stale), again(lost)
    assert isinstance(world.begin(taken), Proceed)
    assert isinstance(world.begin(doubted), Refuse)
    world.advance(TTL)
    anew = again(ordinary)
    assert isinstance(world.begin(anew), Proceed)
    assert history_of(world, stale) == [(State.IN_PROGRESS, State.IN_PROGRESS, Actor.REQUESTER, Trigger.TAKE_OVER)]
    assert history_of(world, lost) == [(State.IN_PROGRESS, State.UNKNOWN, Actor.REQUESTER, Trigger.SWEEP)]
    assert history_of(world, ordinary) == [(State.COMPLETED, State.IN_PROGRESS, Actor.REQUESTER, Trigger.SUPERSEDE)]
    [life] = notes_of(world, ordinary)
    assert (life.note.incarnation, life.note.why, life.note.who) == (
        ordinary.incarnation,
        str(anew.incarnation),
        anew.owner,
    )


async def test_a_takeover_with_audit_off_writes_no_audit_line(world):
    stale, _ = running(world)
    world.advance(LEASE)
    assert isinstance(world.begin(again(stale), Policy(audit=False)), Proceed)
    assert notes_of(world, stale) == ()


async def test_the_loser_of_a_takeover_race_writes_no_audit_line(world):
    stale, _ = running(world)
    world.advance(LEASE)
    first = again(stale)
    world.before("take_over", lambda: world.begin(first, Policy(audit=False)))
    assert isinstance(world.begin(again(stale)), Refuse)
    assert notes_of(world, stale) == ()
