"""The reaper: what is finished and expired goes, and nothing else ever does."""

from __future__ import annotations

import asyncio
import json
import logging
import threading
from dataclasses import replace

import pytest

from harness import flows
from oncekey.core.errors import StoreUnavailableError
from oncekey.core.model import HOUR, MINUTE, Outcome, Proceed, Replay, State
from oncekey.core.policy import Policy
from oncekey.core.transitions import Actor, Trigger
from oncekey.core.upkeep import REAP_GRACE, Expired
from oncekey.engine.upkeep import ABANDONED_FOR
from oncekey.testing.claims import OTHER_FINGERPRINT, TTL, again, answered
from oncekey.workers.service import ClockWatch
from oncekey.workers.upkeep import SHORTEST_REST
from upkeep.keeping import (
    CALL,
    FR,
    LONG,
    UNKNOWN,
    Naps,
    a_reaper,
    call,
    completed,
    history_of,
    notes_of,
    pending,
    phased,
    resumable,
    resumable_call,
    retryable,
    running,
    state_of,
    states,
    step,
    taken,
    unknown,
)


def one_of_each(world):
    """A record in every state that a store without an outbox has."""
    claim, lease = phased(world)
    step(world, lease)
    open_call, lease = phased(world)
    call(world, lease, CALL)
    return {
        "completed": completed(world),
        "retryable": retryable(world),
        "in_progress": running(world)[0],
        "begun": claim,
        "open_call": open_call,
        "unknown": unknown(world),
        "resumable": resumable(world),
        "resumable_call": resumable_call(world),
    }


async def test_only_finished_expired_records_are_deleted(world, caplog):
    """All are long expired; R166 forbids to go by their age."""
    # R165, R166, R171, R216, R261, F3, row 18
    caplog.set_level(logging.INFO, "oncekey.worker")
    claims = one_of_each(world)
    world.advance(LONG)
    reaper = a_reaper(world)
    assert await reaper.run_once() == 4
    assert "reaper: 2 parked, 2 purged" in caplog.messages
    assert states(world, **claims) == {
        "completed": None,
        "retryable": None,
        "in_progress": State.IN_PROGRESS,
        "begun": State.IN_PROGRESS,
        "open_call": State.IN_PROGRESS,
        "unknown": UNKNOWN,
        "resumable": UNKNOWN,
        "resumable_call": UNKNOWN,
    }
    ticket = world.record(claims["resumable"].id)
    assert (ticket.last_error, ticket.reconcile_after) == ("expired_before_resumed", world.clock.now)
    assert ticket.memo  # what was done is not forgotten
    world.advance(LONG)
    assert await reaper.run_once() == 0
    assert dict(reaper.counts) == {"purged": 2, "parked": 2, "abandoned": 0, "notes": 0, "workers": 0}


async def test_deferred_work_is_abandoned_only_if_never_claimed(sql_world):
    """And its parcel goes in the same transaction, so that nobody is charged after hearing "failed"."""
    # R112, R167, R266 (E8), F30, O4, row 28
    world = sql_world
    touched, touched_parcel = taken(world)
    abandoned, parcel = pending(world)
    kept, _ = pending(world, ttl=LONG * 2)
    world.advance(LONG)
    reaper = a_reaper(world)
    assert await reaper.run_once() == 1
    assert states(world, abandoned=abandoned, touched=touched, kept=kept) == {
        "abandoned": State.COMPLETED,
        "touched": State.PENDING,
        "kept": State.PENDING,
    }
    assert world.go(flows.find_parcel(world.store.outbox, parcel.id)) is None
    assert world.go(flows.find_parcel(world.store.outbox, touched_parcel.id)) is not None
    # Whoever asks hears it, after two more rounds, too.
    assert await reaper.run_once() == 0
    assert await reaper.run_once() == 0
    heard = world.begin(again(abandoned))
    assert isinstance(heard, Replay)
    response = heard.record.response
    assert (response.status, heard.record.outcome) == (408, Outcome.FAILURE)
    body = json.loads(response.body)
    assert (body["error"], body["code"], body["status"]) == ("timeout", "idempotency_request_timed_out", 408)
    assert heard.record.expires_at == world.clock.now + ABANDONED_FOR
    assert history_of(world, abandoned) == [(State.PENDING, State.COMPLETED, Actor.REAPER, Trigger.ABANDON)]
    # A tombstone has its time, and goes.
    world.advance(ABANDONED_FOR + REAP_GRACE)
    assert await reaper.run_once() == 1
    assert state_of(world, abandoned) is None


async def test_a_worker_that_takes_the_parcel_first_wins(sql_world):
    # O4: reaper against worker
    world = sql_world
    claim, parcel = pending(world)
    world.advance(LONG)
    took = []
    world.before("abandon", lambda: took.extend(world.go(world.store.outbox.due("worker", ("transfers",), 10, HOUR))))
    assert await a_reaper(world).run_once() == 0
    assert [one.parcel.id for one in took] == [parcel.id]
    assert state_of(world, claim) is State.PENDING
    assert notes_of(world, claim) == ()


async def test_a_failed_abandonment_keeps_the_parcel(sql_world):
    """The parcel was deleted first: what does not fit is undone as a whole."""
    world = sql_world
    claim, parcel = pending(world)
    world.advance(LONG)
    seen = world.record(claim.id)
    stale = replace(seen, version=seen.version - 1)
    with pytest.raises(StoreUnavailableError):
        world.go(world.store.upkeep.abandon(stale, answered(), HOUR))
    assert world.go(flows.find_parcel(world.store.outbox, parcel.id)) is not None
    assert state_of(world, claim) is State.PENDING


async def test_an_expired_record_is_kept_for_the_grace_period(world):
    claim = completed(world)
    reaper = a_reaper(world)
    world.advance(TTL + REAP_GRACE - 1)
    assert await reaper.run_once() == 0
    assert state_of(world, claim) is State.COMPLETED
    world.advance(1)
    assert await reaper.run_once() == 1
    assert state_of(world, claim) is None


async def test_soft_expiry_marks_records_and_deletes_them_after_audit_ttl(world):
    # R168, R174, row 29
    claim, retry = completed(world), retryable(world)
    policy = Policy(expiry_mode="soft", audit_ttl=5 * 24 * 3600)
    reaper = a_reaper(world, policy)
    world.advance(TTL + REAP_GRACE)
    assert await reaper.run_once() == 2
    assert states(world, claim=claim, retry=retry) == {"claim": State.EXPIRED, "retry": None}
    world.advance(5 * TTL - 1)
    assert await reaper.run_once() == 0
    assert isinstance(world.begin(again(completed(world))), Replay)  # a live one is not touched by any of this
    world.advance(1)
    assert await reaper.run_once() == 1
    assert state_of(world, claim) is None
    assert [to for _, to, _, _ in history_of(world, claim)][-1] is None


async def test_a_marked_record_is_not_replayed_and_can_be_reused(world):
    # R161, R168
    claim = completed(world)
    world.advance(TTL + REAP_GRACE)
    assert await a_reaper(world, Policy(expiry_mode="soft")).run_once() == 1
    verdict = world.begin(again(claim, fingerprint=OTHER_FINGERPRINT))
    assert isinstance(verdict, Proceed)
    assert verdict.record.response is None


async def test_hard_expiry_deletes_marked_records(world):
    claim = completed(world)
    world.advance(TTL + REAP_GRACE)
    assert await a_reaper(world, Policy(expiry_mode="soft")).run_once() == 1
    assert await a_reaper(world).run_once() == 1
    assert state_of(world, claim) is None


async def test_a_reused_key_never_sees_its_deleted_record(world):
    """Before the reaper, after it, and against an owner of the first life who is still about."""
    # R161, R163, F1
    claim, zombie = running(world)
    assert world.settle(zombie, answered(b"the first life")).ours
    world.advance(LONG)
    assert await a_reaper(world).run_once() == 1
    second = again(claim, fingerprint=OTHER_FINGERPRINT)
    verdict = world.begin(second)
    assert isinstance(verdict, Proceed)
    assert verdict.record.incarnation == second.incarnation
    assert (verdict.record.response, verdict.record.memo, verdict.record.intent) == (None, (), None)
    assert not world.settle(zombie, answered(b"the first life")).ours
    assert world.settle(verdict.lease, answered(b"the second life")).ours
    heard = world.begin(again(second))
    assert isinstance(heard, Replay)
    assert heard.record.response.body == b"the second life"
    # The audit tells the lives apart.
    assert [entry.note.incarnation for entry in notes_of(world, claim)] == [claim.incarnation]


async def test_a_key_reused_during_reaping_is_kept(world):
    """The DELETE proves the version, and looks at state and expiry once more."""
    # R165
    claim = completed(world)
    world.advance(LONG)
    anew = again(claim)
    world.before("purge_expired", lambda: world.begin(anew))
    assert await a_reaper(world).run_once() == 0
    assert world.record(claim.id).incarnation == anew.incarnation
    assert [trigger for _, _, _, trigger in history_of(world, claim)] == [Trigger.SUPERSEDE]


async def test_the_delete_statement_checks_state_and_expiry(world):
    """Even a reaper that judged wrongly deletes nothing that is unfinished or not expired."""
    # R165, row 30
    claims = one_of_each(world)
    fresh = completed(world, ttl=LONG * 3)
    world.advance(LONG)
    due = Expired(REAP_GRACE, world.clock.now - REAP_GRACE)
    assert world.go(world.store.upkeep.purge(due, 100)).moved == 2
    assert world.go(world.store.upkeep.mark(due, 100)).moved == 0
    assert world.go(world.store.upkeep.purge_kept(due, 100)).moved == 0
    gone = {name for name, state in states(world, **claims, fresh=fresh).items() if state is None}
    assert gone == {"completed", "retryable"}


async def test_a_late_settlement_starts_a_full_ttl(world):
    """Late settlements count from when they were made (P6)."""
    # F2, R159
    claim, lease = running(world, deadline=10 * TTL, lease=10 * TTL)
    world.advance(TTL + HOUR)
    assert world.settle(lease, answered()).ours
    assert await a_reaper(world).run_once() == 0
    assert isinstance(world.begin(again(claim)), Replay)
    world.advance(TTL + REAP_GRACE)
    assert await a_reaper(world).run_once() == 1


async def test_purges_are_noted_and_the_audit_outlives_the_record(world):
    # R172, R173
    claims = [completed(world) for _ in range(5)]
    world.advance(LONG)
    reaper = a_reaper(world, Policy(audit="each"))
    assert await reaper.run_once() == 5
    assert reaper.counts["purged"] == 5
    for claim in claims:
        [entry] = notes_of(world, claim)
        assert (entry.note.source, entry.note.to) == (State.COMPLETED, None)
        assert (entry.note.actor, entry.note.trigger, entry.note.why) == (Actor.REAPER, Trigger.PURGE, "expired")
        assert claim.id.key not in repr(entry)


async def test_a_deleted_batch_writes_one_audit_line(world):
    """Its transaction writes both: a batch that is undone has neither."""
    # R172, R173
    claims = [completed(world) for _ in range(7)]
    world.advance(LONG)
    assert await a_reaper(world, Policy(reap_batch=4)).run_once() == 7
    lines = world.go(world.store.audit.deletions(claims[0].id.scope, 10))
    assert [line.note.why.partition(",")[0] for line in lines] == ["expired: 3 keys", "expired: 4 keys"]
    assert all(notes_of(world, claim) == () for claim in claims)


async def test_audit_lines_are_deleted_in_batches_after_audit_ttl(world):
    # R169, R173, R174
    claims = [completed(world) for _ in range(7)]
    world.advance(LONG)
    policy = Policy(audit_ttl=30 * 24 * 3600, reap_batch=3, audit="each")
    reaper = a_reaper(world, policy)
    assert await reaper.run_once() == 7
    world.advance(30 * TTL - 1)
    assert await reaper.run_once() == 0
    assert reaper.counts["notes"] == 0
    world.advance(1)
    naps, ticks = Naps(), iter(range(0, 10_000_000, 250_000))
    reaper = a_reaper(world, policy, sleep=naps, clock=lambda: next(ticks))
    assert await reaper.run_once() == 0
    assert reaper.counts["notes"] == 7
    assert naps.seconds == [SHORTEST_REST * 0.25, SHORTEST_REST * 0.25]
    assert all(notes_of(world, claim) == () for claim in claims)


async def test_the_reaper_pauses_in_proportion_to_each_batch(world):
    # R169
    for _ in range(10):
        completed(world)
    world.advance(LONG)
    naps, ticks = Naps(), iter(range(0, 10_000_000, 250_000))
    reaper = a_reaper(world, Policy(reap_batch=4), sleep=naps, clock=lambda: next(ticks))
    assert await reaper.run_once() == 10
    assert naps.seconds == [SHORTEST_REST * 0.25, SHORTEST_REST * 0.25]


async def test_a_batch_that_times_out_is_halved_and_grows_again(world):
    # R169
    for _ in range(90):
        completed(world)
    world.advance(LONG)
    reaper = a_reaper(world, Policy(reap_batch=80))
    sizes = []

    def slow(times):
        def outage():
            sizes.append(reaper.batch)
            if times:
                world.before("purge_expired", slow(times - 1))
                raise StoreUnavailableError("canceling statement due to statement timeout")
            world.before("purge_expired", slow(0))

        return outage

    world.before("purge_expired", slow(2))
    assert await reaper.run_once() == 90
    assert sizes == [80, 40, 20, 40, 80]


async def test_an_outage_is_raised_after_the_smallest_batch(world):
    completed(world)
    world.advance(LONG)
    reaper = a_reaper(world, Policy(reap_batch=20))

    def away():
        world.before("purge_expired", away)
        raise StoreUnavailableError("the store is away")

    world.before("purge_expired", away)
    with pytest.raises(StoreUnavailableError):
        await reaper.run_once()
    assert reaper.batch == 10


async def test_undeletable_rows_do_not_block_deletable_ones(sql_world):
    world = sql_world
    for _ in range(4):
        taken(world)  # pending, and not to be abandoned: first on every page
    world.advance(MINUTE)
    claims = [completed(world) for _ in range(5)]
    world.advance(LONG)
    assert await a_reaper(world, Policy(reap_batch=2)).run_once() == 5
    assert {state_of(world, claim) for claim in claims} == {None}


async def test_a_forward_clock_jump_deletes_no_live_response(world, caplog):
    """The store's clock jumps by days: everything looks expired, and each answer still has its full time."""
    # A3, F41
    claim = completed(world)
    start, passed = world.clock.now, 0
    watch = ClockWatch(wall=world.clock, boot=lambda: start + passed)
    reaper = a_reaper(world, watch=watch)
    assert await reaper.run_once() == 0
    world.advance(LONG)  # nothing of it has passed
    for _ in range(3):
        assert await reaper.run_once() == 0
    assert "moved by" in caplog.text
    passed += TTL - 1
    world.advance(TTL - 1)
    assert await reaper.run_once() == 0
    assert state_of(world, claim) is State.COMPLETED
    passed += 1
    world.advance(1)
    assert await reaper.run_once() == 1


async def test_clock_jumps_in_both_directions_are_detected(world):
    claim = completed(world)
    start, passed = world.clock.now, 0
    watch = ClockWatch(wall=world.clock, boot=lambda: start + passed)
    reaper = a_reaper(world, watch=watch)
    assert await reaper.run_once() == 0
    world.advance(LONG)
    assert await reaper.run_once() == 0
    world.advance(-LONG)
    for _ in range(2):
        assert await reaper.run_once() == 0
    passed += TTL + REAP_GRACE
    world.advance(TTL + REAP_GRACE)
    assert await reaper.run_once() == 1
    assert state_of(world, claim) is None


async def test_a_host_with_a_wrong_clock_deletes_nothing(world, caplog):
    # A3
    claim = completed(world)
    world.advance(LONG)
    reaper = a_reaper(world, watch=ClockWatch(wall=lambda: world.clock.now + HOUR, boot=world.clock))
    with caplog.at_level(logging.ERROR, "oncekey.worker"):
        assert await reaper.run_once() == 0
    assert state_of(world, claim) is State.COMPLETED
    assert "differ by 3600 s" in caplog.text


def test_three_reapers_remove_each_record_once(world):
    claims = [completed(world) for _ in range(60)]
    world.advance(LONG)
    reapers = [a_reaper(world, Policy(reap_batch=7, audit="each")) for _ in range(3)]
    start = threading.Barrier(3)

    def reap(reaper):
        start.wait()
        asyncio.run(reaper.run_once())

    threads = [threading.Thread(target=reap, args=(reaper,)) for reaper in reapers]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    asyncio.run(reapers[0].run_once())  # what one had locked when another came by
    assert sum(reaper.counts["purged"] for reaper in reapers) == 60
    assert all(len(notes_of(world, claim)) == 1 for claim in claims)


async def test_the_reaper_writes_no_audit_lines_with_audit_off(world):
    claim = completed(world)
    world.advance(LONG)
    assert await a_reaper(world, Policy(audit=False)).run_once() == 1
    assert notes_of(world, claim) == ()


async def test_the_reaper_stops_between_two_batches(world):
    completed(world)
    world.advance(LONG)
    reaper = a_reaper(world)
    await reaper.stop(0)
    assert await reaper.run_once() == 0


async def test_a_page_of_expired_records_contains_no_responses(world):
    """A batch of a thousand answers of a megabyte would be a gigabyte."""
    completed(world)
    world.advance(LONG)
    page = world.go(world.store.upkeep.expiring(10, REAP_GRACE))
    assert [record.response for record in page.records] == [None]


async def test_live_keys_are_counted_by_scope_up_to_a_limit(world):
    # R188
    completed(world)
    unknown(world)
    retryable(world, ttl=TTL // 2)
    running(world)
    world.advance(TTL // 2)
    assert world.go(world.store.upkeep.live_keys("shop|tenant-1", 10)) == 3
    assert world.go(world.store.upkeep.live_keys("shop|tenant-1", 2)) == 2
    assert world.go(world.store.upkeep.live_keys("shop|tenant-2", 10)) == 0


def test_these_tests_cover_every_record_state():
    """A state that is added has to be thought of here."""
    assert set(State) == {
        State.PENDING,
        State.IN_PROGRESS,
        State.COMPLETED,
        FR,
        UNKNOWN,
        State.EXPIRED,
    }
