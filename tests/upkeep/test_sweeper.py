"""The sweeper: stale leases mean what the record's own effects say, and a live owner is never swept."""

from __future__ import annotations

import asyncio
import logging
import threading

import pytest

from oncekey.core.errors import RecordUnreadableError, StoreUnavailableError
from oncekey.core.flow import Mode, Statement, Transaction
from oncekey.core.keys import key_digest
from oncekey.core.model import HOUR, SECOND, Announcement, Effects, Proceed, Recovery, State
from oncekey.core.policy import Policy
from oncekey.core.rulings import FAILED_BY_LEASE
from oncekey.core.transitions import Actor, Trigger
from oncekey.core.upkeep import SWEEP_GRACE
from oncekey.databases.sqlite.store import SqliteStore
from oncekey.observe.events import GivenUp
from oncekey.stores.statements import execute
from oncekey.testing.claims import LEASE, again, answered
from oncekey.workers.service import ClockWatch
from upkeep.keeping import (
    CALL,
    FR,
    UNKNOWN,
    a_sweeper,
    call,
    history_of,
    notes_of,
    pending,
    phased,
    running,
    state_of,
    states,
    step,
)


@pytest.mark.parametrize("effects", [Effects.LOCAL, Effects.INLINE, Effects.PHASED, Effects.OUTBOX])
async def test_recovery_fail_hands_an_expired_lease_to_operators(world, caplog, effects):  # R147
    claim, _ = running(world, effects, Recovery.FAIL)
    world.advance(LEASE + SWEEP_GRACE)
    told = []

    assert await a_sweeper(world, notify=told.append).run_once() == 1

    record = world.record(claim.id)
    # Unknown without an instant is the operators' queue: `oncekey unknown list --given-up`.
    assert (record.state, record.last_error, record.reconcile_after) == (UNKNOWN, FAILED_BY_LEASE, None)
    assert [event.why for event in told if isinstance(event, GivenUp)] == [FAILED_BY_LEASE]
    assert [line.levelname for line in caplog.records if "the owner of a key died" in line.message] == ["ERROR"]
    if world.store.reconcile is not None:
        assert world.go(world.store.reconcile.due(10)).records == ()


async def test_effects_and_recovery_decide_the_swept_state(world):
    """Rows 14 and 15, each effect and each recovery that a policy can have stored."""
    # R146, R147, R55, R142, R151
    local, _ = running(world)
    strict, _ = running(world, Effects.LOCAL, Recovery.UNKNOWN)
    inline, _ = running(world, Effects.INLINE, Recovery.UNKNOWN)
    natural, _ = running(world, Effects.INLINE, Recovery.RETRY)
    before_defer, _ = running(world, Effects.OUTBOX, Recovery.RETRY)
    resume, lease = phased(world)
    step(world, lease)
    open_call, lease = phased(world, lease=LEASE)
    call(world, lease, CALL)
    repeatable, lease = phased(world)
    call(world, lease, Announcement("charge", "k", "d1", 1, HOUR, 5 * SECOND, 30 * SECOND))
    world.advance(LEASE + SWEEP_GRACE)

    assert await a_sweeper(world).run_once() == 8

    assert states(
        world,
        local=local,
        strict=strict,
        inline=inline,
        natural=natural,
        before_defer=before_defer,
        resume=resume,
        open_call=open_call,
        repeatable=repeatable,
    ) == {
        "local": FR,
        "strict": UNKNOWN,
        "inline": UNKNOWN,
        "natural": FR,
        "before_defer": FR,
        "resume": FR,
        "open_call": UNKNOWN,
        "repeatable": FR,
    }
    record = world.record(inline.id)
    assert (record.last_error, record.reconcile_after) == ("in_progress_lock_expired", world.clock.now)
    assert (record.owner, record.lease_until, record.fence) == (None, None, 1)  # the fence does not move (P1)


async def test_a_phased_record_with_exhausted_attempts_becomes_unknown(world):
    # H6
    claim, lease = phased(world)
    step(world, lease)
    world.advance(LEASE + SWEEP_GRACE)
    assert await a_sweeper(world, Policy(max_attempts=1)).run_once() == 1
    assert state_of(world, claim) is UNKNOWN


async def test_no_record_is_swept_within_the_grace_period(world):
    claims = [running(world)[0], running(world, Effects.INLINE, Recovery.UNKNOWN)[0]]
    sweeper = a_sweeper(world)
    world.advance(LEASE + SWEEP_GRACE - 1)
    assert await sweeper.run_once() == 0
    assert {state_of(world, claim) for claim in claims} == {State.IN_PROGRESS}
    world.advance(1)
    assert await sweeper.run_once() == 2


async def test_a_renewed_lease_is_not_swept(world):
    """An operation of three leases and more is not swept, and its lease is no row of the index's order."""
    # R155
    claim, lease = running(world, Effects.INLINE, Recovery.UNKNOWN)
    sweeper = a_sweeper(world)
    for _ in range(10):
        world.advance(LEASE // 3)
        assert world.renew(lease, LEASE) is not None
        assert await sweeper.run_once() == 0
    assert state_of(world, claim) is State.IN_PROGRESS
    assert world.settle(lease, answered()).ours


async def test_the_sweeper_ignores_deferred_outbox_records(sql_world):
    """The parcel's lease is the only one (O1)."""
    # F32
    world = sql_world
    waiting, _ = pending(world)
    held, parcel = pending(world)
    [taken] = [
        one
        for one in world.go(world.store.outbox.due("worker", ("transfers",), 10, LEASE))
        if one.parcel.id == parcel.id
    ]
    assert world.go(world.store.outbox.take_up(taken, "worker", CALL, LEASE)) is not None
    world.advance(100 * LEASE)
    assert await a_sweeper(world).run_once() == 0
    assert states(world, waiting=waiting, held=held) == {"waiting": State.PENDING, "held": State.IN_PROGRESS}


async def test_a_swept_owner_may_settle_unless_superseded(world):
    # F11, F35
    late, late_lease = running(world, Effects.INLINE, Recovery.UNKNOWN)
    lost, lost_lease = running(world)
    world.advance(LEASE + SWEEP_GRACE)
    assert await a_sweeper(world).run_once() == 2
    assert isinstance(world.begin(again(lost)), Proceed)
    assert world.settle(late_lease, answered()).ours
    assert not world.settle(lost_lease, answered()).ours
    assert states(world, late=late, lost=lost) == {"late": State.COMPLETED, "lost": State.IN_PROGRESS}


async def test_a_concurrent_write_wins_over_the_sweeper(world):
    """The sweeper proves the version that it read: a heartbeat or a settlement that comes first stays."""
    beating, beating_lease = running(world)
    world.advance(1)  # the older one is looked at first
    settling, settling_lease = running(world)
    world.advance(LEASE + SWEEP_GRACE)
    first = iter((beating_lease, settling_lease))

    def stranger():
        lease = next(first)
        if lease is beating_lease:
            assert world.renew(lease, LEASE) is not None
            world.before("sweep", stranger)
        else:
            assert world.settle(lease, answered()).ours

    world.before("sweep", stranger)
    sweeper = a_sweeper(world)
    assert await sweeper.run_once() == 0
    assert states(world, beating=beating, settling=settling) == {
        "beating": State.IN_PROGRESS,
        "settling": State.COMPLETED,
    }
    assert not sweeper.counts
    assert notes_of(world, beating) == ()


def test_three_sweepers_move_each_record_once(world):
    # R154
    claims = [running(world, Effects.INLINE, Recovery.UNKNOWN)[0] for _ in range(60)]
    world.advance(LEASE + SWEEP_GRACE)
    sweepers = [a_sweeper(world, page=7) for _ in range(3)]
    start = threading.Barrier(3)
    moved = [0, 0, 0]

    def sweep(place):
        start.wait()
        moved[place] = asyncio.run(sweepers[place].run_once())

    threads = [threading.Thread(target=sweep, args=(place,)) for place in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sum(moved) == 60
    assert all(len(notes_of(world, claim)) == 1 for claim in claims)
    assert {state_of(world, claim) for claim in claims} == {UNKNOWN}


async def test_a_page_of_unsweepable_rows_does_not_block_the_rest(world):
    """Paging goes on behind what was looked at, whatever became of it."""
    # techniques 2.3
    hopeless = [running(world)[0] for _ in range(6)]
    world.advance(SECOND)
    due = [running(world, lease=SECOND)[0] for _ in range(3)]  # younger
    world.advance(LEASE)  # the old ones are over, and within their grace: on the page, and not due
    assert await a_sweeper(world, page=2).run_once() == 3
    assert {state_of(world, claim) for claim in due} == {FR}
    assert {state_of(world, claim) for claim in hopeless} == {State.IN_PROGRESS}


async def test_every_swept_key_is_logged_counted_and_audited(world, caplog):  # R216
    # R150, R173
    claim, lease = running(world, Effects.INLINE, Recovery.UNKNOWN)
    world.advance(LEASE + SWEEP_GRACE)
    sweeper = a_sweeper(world)
    with caplog.at_level(logging.WARNING, "oncekey.worker"):
        await sweeper.run_once()
    assert dict(sweeper.counts) == {("create_order", UNKNOWN): 1}
    assert claim.id.key not in caplog.text
    [entry] = notes_of(world, claim)
    assert entry.note.key_digest in caplog.text
    assert "create_order" in caplog.text
    assert history_of(world, claim) == [(State.IN_PROGRESS, UNKNOWN, Actor.SWEEPER, Trigger.SWEEP)]
    assert (entry.at, entry.note.who, entry.note.why) == (world.clock.now, "test", "in_progress_lock_expired")
    assert (entry.note.fence, entry.note.incarnation) == (lease.fence, claim.incarnation)


async def test_the_sweeper_writes_no_audit_lines_with_audit_off(world):
    claim, _ = running(world)
    world.advance(LEASE + SWEEP_GRACE)
    assert await a_sweeper(world, Policy(audit=False)).run_once() == 1
    assert notes_of(world, claim) == ()


async def test_a_sweeper_whose_clock_disagrees_with_the_stores_stops(world, caplog):
    # A3, F41
    claim, _ = running(world)
    world.advance(LEASE + SWEEP_GRACE)
    wrong = ClockWatch(wall=lambda: world.clock.now - HOUR, boot=world.clock)
    assert await a_sweeper(world, watch=wrong).run_once() == 0
    assert state_of(world, claim) is State.IN_PROGRESS
    assert "differ by 3600 s" in caplog.text


async def test_a_clock_jump_gives_live_owners_a_full_lease(world):
    """The store's clock jumps forward: every lease looks over, and nobody is dead."""
    # A3, F41
    claim, lease = running(world, Effects.INLINE, Recovery.UNKNOWN)
    start, passed = world.clock.now, 0
    watch = ClockWatch(wall=world.clock, boot=lambda: start + passed)
    sweeper = a_sweeper(world, watch=watch)
    assert await sweeper.run_once() == 0
    world.advance(HOUR - SECOND)  # nothing of this has passed
    for _ in range(3):
        assert await sweeper.run_once() == 0
    assert world.renew(lease, LEASE) is not None
    passed += LEASE // 2
    world.advance(LEASE // 2)
    assert await sweeper.run_once() == 0
    assert world.settle(lease, answered()).ours
    # From a whole lease after the jump on, who was not heard is dead.
    dead, _ = running(world, Effects.INLINE, Recovery.UNKNOWN)
    passed += 2 * LEASE
    world.advance(2 * LEASE)
    assert await sweeper.run_once() == 1
    assert states(world, claim=claim, dead=dead) == {"claim": State.COMPLETED, "dead": UNKNOWN}


async def test_a_failed_sweeper_waits_a_full_lease(world):
    """After an outage nobody could renew, so everybody looks dead (techniques 2.3, River #1321)."""
    claim, lease = running(world, Effects.INLINE, Recovery.UNKNOWN)
    other, _ = running(world)
    world.advance(LEASE + SWEEP_GRACE)

    def outage():
        raise StoreUnavailableError("the store is away")

    sweeper = a_sweeper(world)
    world.before("sweep", outage)
    with pytest.raises(StoreUnavailableError):
        await sweeper.run_once()
    assert await sweeper.run_once() == 0
    assert world.renew(lease, LEASE) is not None  # here it is again
    world.advance(LEASE - 1)
    assert await sweeper.run_once() == 0
    world.advance(1)
    assert await sweeper.run_once() == 1
    assert states(world, claim=claim, other=other) == {"claim": State.IN_PROGRESS, "other": FR}


async def test_an_unhealthy_process_sweeps_no_records(world):
    claim, _ = running(world)
    world.advance(LEASE + SWEEP_GRACE)
    well = False
    sweeper = a_sweeper(world, healthy=lambda: well)
    assert await sweeper.run_once() == 0
    well = True
    assert await sweeper.run_once() == 0
    assert state_of(world, claim) is State.IN_PROGRESS
    world.advance(LEASE)
    assert await sweeper.run_once() == 1


async def test_a_lease_too_short_for_its_operation_logs_a_warning(world, caplog):
    # R149
    for number in range(30):
        claim, lease = running(world, operation="slow" if number % 2 else "fast", deadline=10 * HOUR)
        world.advance(200 * SECOND if number % 2 else SECOND)
        assert world.settle(lease, answered()).ours, claim
    for _ in range(10):
        _, lease = running(world, operation="slow")
        world.advance(200 * SECOND)
        assert world.settle(lease, answered()).ours
    await a_sweeper(world, Policy(lease=300)).run_once()
    assert "short for slow" in caplog.text
    assert "fast" not in caplog.text
    caplog.clear()
    await a_sweeper(world, Policy(lease=401)).run_once()
    assert caplog.text == ""


async def test_the_sweeper_stops_between_two_pages(world):
    for _ in range(5):
        running(world)
    world.advance(LEASE + SWEEP_GRACE)
    sweeper = a_sweeper(world, page=2)
    await sweeper.stop(0)
    assert await sweeper.run_once() == 0


async def test_the_sweeper_runs_every_minute(world):
    # R148; tests/upkeep/test_bound.py measures the bound that follows from it
    assert a_sweeper(world).pace.pause(0, 1.0) == 60


@pytest.mark.parametrize("world", ["sqlite", "psycopg"], indirect=True)
async def test_an_unreadable_record_does_not_block_the_sweeper(world, caplog):
    unreadable, lease = phased(world)
    step(world, lease)
    local, _ = running(world)
    table = "oncekey_record" if isinstance(world.store, SqliteStore) else "oncekey.work"

    def body():
        yield Statement("spoil", f"UPDATE {table} SET memo = 'x' WHERE memo IS NOT NULL", {})

    world.go(execute(Transaction("spoil", Mode.SINGLE, body)))
    world.advance(LEASE + SWEEP_GRACE)
    for _ in range(2):
        await a_sweeper(world).run_once()
    assert state_of(world, local) is State.FAILED_RETRYABLE
    told = [line.getMessage() for line in caplog.records if key_digest(unreadable.id.key) in line.getMessage()]
    assert len(told) == 1  # said once, and not at every round
    assert "its memo has a value that this version of oncekey does not write" in told[0]
    with pytest.raises(RecordUnreadableError):
        world.find(unreadable.id)
