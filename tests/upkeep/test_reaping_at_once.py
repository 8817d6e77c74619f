"""The reaper's one statement: it moves what the rules say, notes what Python would note, and waits for nobody."""

from __future__ import annotations

import asyncio
import threading
from contextlib import closing

import psycopg
import pytest

from oncekey.core.errors import StoreError
from oncekey.core.keys import key_digest
from oncekey.core.model import HOUR, Proceed, State
from oncekey.core.policy import Policy
from oncekey.core.transitions import Trigger
from oncekey.core.upkeep import REAP_GRACE, Expired, Reaping, Retention, reaping_of
from oncekey.testing.claims import TTL, again, answered
from oncekey.workers.service import ClockWatch
from oncekey.workers.upkeep import LONGEST_REST, SHORTEST_REST, BatchRests
from upkeep.keeping import (
    LONG,
    Naps,
    a_reaper,
    call,
    completed,
    history_of,
    notes_of,
    phased,
    resumable,
    resumable_call,
    retryable,
    running,
    state_of,
    step,
    unknown,
)

KEYS = (
    "plain-4c1d9a3e",
    "ümläut ß",
    "日本語のキー",
    "🙂 emoji \U0001f9fe",
    "quo'te \"\\ back",
    "x" * 255,
    "é",
    "e\u0301",
)


def everything(world):
    """A record of every kind, old and young; some were marked before."""
    made = []
    for ttl in (TTL, 2 * TTL):
        made += [completed(world, ttl=ttl), retryable(world, ttl=ttl), unknown(world, ttl=ttl)]
        made += [running(world, ttl=ttl)[0], resumable(world, ttl=ttl), resumable_call(world, ttl=ttl)]
        begun, lease = phased(world, ttl=ttl)
        step(world, lease)
        called, lease = phased(world, ttl=ttl)
        call(world, lease)
        made += [begun, called]
    return made


@pytest.mark.parametrize("trusted_for", [None, TTL - 1, TTL])
@pytest.mark.parametrize("soft", [False, True])
@pytest.mark.parametrize("past", [TTL + REAP_GRACE - 1, TTL + REAP_GRACE, LONG])
def test_the_statements_match_the_reaping_rules(world, soft, trusted_for, past):  # R165, R166, rows 29, 30
    marked_before = [completed(world, ttl=ttl) for ttl in (TTL // 2, TTL // 4)]
    world.advance(TTL // 2 + REAP_GRACE)
    early = Expired(REAP_GRACE, world.clock.now - REAP_GRACE, soft=True)
    assert world.go(world.store.upkeep.mark(early, 10)).moved == 2
    claims = [*everything(world), *marked_before]
    world.advance(past)
    retention = Retention(soft=soft, kept=TTL if soft else 0)
    seen = {claim.id: world.record(claim.id) for claim in claims}
    due = {one: reaping_of(record, world.clock.now, retention, trusted_for) for one, record in seen.items()}

    grace, kept = retention.grace, retention.grace + retention.kept
    store, now = world.store.upkeep, world.clock.now
    world.go(store.purge_kept(Expired(kept, now - kept, soft=soft, trusted_for=trusted_for), 100))
    if soft:
        world.go(store.mark(Expired(grace, now - grace, soft=True, trusted_for=trusted_for), 100))
    world.go(store.purge(Expired(grace, now - grace, soft=soft, trusted_for=trusted_for), 100))

    for one, record in seen.items():
        after = world.find(one).record
        match due[one]:
            case Reaping.PURGE:
                assert after is None, record
            case Reaping.MARK:
                assert (after.state, after.version) == (State.EXPIRED, record.version + 1)
            case _:
                assert after == record


def test_the_deletion_uses_the_compared_instant(world):
    """A store whose clock jumps between the look and the deletion deletes what was due before the jump, at most."""
    # A3, F41
    claim = completed(world)
    looked = world.clock.now
    world.advance(LONG)
    assert world.go(world.store.upkeep.purge(Expired(REAP_GRACE, looked - REAP_GRACE), 10)).moved == 0
    assert state_of(world, claim) is State.COMPLETED


@pytest.mark.parametrize("soft", [False, True])
async def test_audit_digests_in_sql_equal_those_of_python(sql_world, soft):  # R173, R195
    world = sql_world
    claims = [completed(world, key=key) for key in KEYS]
    world.advance(LONG)
    assert await a_reaper(world, Policy(expiry_mode="soft" if soft else "hard", audit="each")).run_once() == len(KEYS)
    for claim in claims:
        [entry] = notes_of(world, claim)  # found by the digest that Python makes
        assert entry.note.key_digest == key_digest(claim.id.key)
        assert (entry.note.incarnation, entry.note.operation, entry.note.fence) == (
            claim.incarnation,
            claim.operation,
            1,
        )
        assert (entry.note.source, entry.note.to) == (State.COMPLETED, State.EXPIRED if soft else None)
        assert (entry.note.who, entry.note.why) == ("test", "expired")
        assert entry.at == world.clock.now


async def test_a_finished_record_is_never_read(sql_world):
    """No page of a thousand answers for the ordinary case: one look whether there is anything, and one statement."""
    world = sql_world
    for _ in range(20):
        completed(world)
    world.advance(LONG)
    said = []
    reaper = a_reaper(world)
    reaper._run = listening(reaper._run, said)
    assert await reaper.run_once() == 20
    assert said.count("purge_expired") == 1
    assert said[:2] == ["expiring", "purge_expired"]


def listening(run, said):
    async def heard(transaction):
        said.append(transaction.name)
        return await run(transaction)

    return heard


class TestConcurrentWriters:
    """PostgreSQL, where others write at the same time."""

    @pytest.mark.parametrize("sql_world", ["psycopg"], indirect=True)
    async def test_the_reaper_skips_locked_rows(self, sql_world, empty_dsn):
        # R254
        world = sql_world
        claims = [completed(world) for _ in range(5)]
        world.advance(LONG)
        with closing(psycopg.connect(empty_dsn)) as other:
            other.execute("SELECT FROM oncekey.record WHERE key = %s FOR UPDATE", [claims[2].id.key])
            assert await a_reaper(world, Policy(audit="each")).run_once() == 4
            other.rollback()
        assert [state_of(world, claim) for claim in claims] == [None, None, State.COMPLETED, None, None]
        assert await a_reaper(world).run_once() == 1
        assert [len(notes_of(world, claim)) for claim in claims] == [1] * 5

    @pytest.mark.parametrize("sql_world", ["psycopg"], indirect=True)
    async def test_a_key_being_reused_is_neither_deleted_nor_audited(self, sql_world, empty_dsn):
        world = sql_world
        claim = completed(world)
        world.advance(LONG)
        with closing(psycopg.connect(empty_dsn)) as other:
            # As a superseding claim does, up to its commit.
            other.execute(
                "UPDATE oncekey.record SET incarnation = gen_random_uuid(), version = version + 1, expires_at = %s"
                " WHERE key = %s",
                [world.clock.now + TTL, claim.id.key],
            )
            assert await a_reaper(world).run_once() == 0
            other.commit()
        assert await a_reaper(world).run_once() == 0
        assert state_of(world, claim) is State.COMPLETED
        assert history_of(world, claim) == []

    @pytest.mark.parametrize("sql_world", ["psycopg", "asyncpg"], indirect=True)
    def test_reapers_and_claims_race_for_expired_keys(self, sql_world):
        """Each life ends once: it was superseded, or purged and noted; and every new life is there."""
        world = sql_world
        claims = [completed(world) for _ in range(120)]
        world.advance(LONG)
        anew = [again(claim) for claim in claims]
        start, lost = threading.Barrier(4), []

        def reap():
            reaper = a_reaper(world, Policy(reap_batch=9, audit="each"))
            start.wait()
            for _ in range(3):
                asyncio.run(reaper.run_once())

        def claim(mine):
            start.wait()
            for one in mine:
                try:
                    verdict = world.begin(one)
                except StoreError as error:  # it lost the race, and its client comes again
                    lost.append(error)
                    verdict = world.begin(one)
                assert isinstance(verdict, Proceed)
                assert world.settle(verdict.lease, answered()).ours

        threads = [threading.Thread(target=reap) for _ in range(2)]
        threads += [threading.Thread(target=claim, args=(mine,)) for mine in (anew[::2], anew[1::2])]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

        for old, new in zip(claims, anew, strict=True):
            assert world.record(new.id).incarnation == new.incarnation
            ends = [entry.note for entry in notes_of(world, old) if entry.note.incarnation == old.incarnation]
            assert len(ends) == 1, ends
            assert ends[0].trigger in {Trigger.PURGE, Trigger.SUPERSEDE}


class TestResumingAReap:
    async def test_a_second_reaper_continues_after_a_stopped_one(self, world):
        claims = [completed(world) for _ in range(25)]
        world.advance(LONG)
        first = a_reaper(world, Policy(reap_batch=4, audit="each"), sleep=Naps())
        first._run = stopping(first, first._run, after=3)
        assert await first.run_once() == 12
        assert await a_reaper(world, Policy(reap_batch=4, audit="each")).run_once() == 13
        assert all(len(notes_of(world, claim)) == 1 for claim in claims)

    async def test_a_clock_jump_stops_a_running_reaper(self, world, caplog):  # A3
        for _ in range(20):
            completed(world)
        kept = completed(world, ttl=50 * TTL)
        world.advance(LONG)
        wrong = [0]
        watch = ClockWatch(wall=lambda: world.clock.now + wrong[0], boot=world.clock)
        reaper = a_reaper(world, Policy(reap_batch=5), watch=watch)
        world.before("purge_expired", lambda: world.before("purge_expired", lambda: wrong.__setitem__(0, HOUR)))
        assert await reaper.run_once() == 10
        assert "differ by 3600 s" in caplog.text
        assert state_of(world, kept) is State.COMPLETED

    async def test_a_purge_continues_after_skipped_rows(self, world):
        """What may not go yet (here: its time is not proven) is passed, and the next batch begins behind it."""
        for _ in range(6):
            completed(world, ttl=3 * TTL)
        young = [completed(world, ttl=TTL) for _ in range(6)]
        world.advance(LONG)
        due = Expired(REAP_GRACE, world.clock.now - REAP_GRACE, trusted_for=2 * TTL)
        gone = world.go(world.store.upkeep.purge(due, 4))
        assert (gone.moved, gone.full, gone.now) == (4, True, world.clock.now)
        rest = world.go(world.store.upkeep.purge(due, 4, gone.last))
        assert (rest.moved, rest.full) == (2, False)
        assert {state_of(world, claim) for claim in young} == {None}


def stopping(reaper, run, after):
    """Let the reaper be stopped when so many batches are done."""
    done = []

    async def counted(transaction):
        result = await run(transaction)
        if transaction.name == "purge_expired":
            done.append(1)
            if len(done) == after:
                await reaper.stop(0)
        return result

    return counted


def test_batch_pauses_follow_the_configured_rate():
    # R169
    assert BatchRests().after(20_000, 1000) == pytest.approx(0.03)  # 1000 records may take 50 ms, and 20 are over
    assert BatchRests().after(12_500, 1000) == pytest.approx(0.0375)
    assert BatchRests().after(5_000, 1000) == pytest.approx(0.045)  # no faster than its rate
    assert BatchRests(rate=40_000).after(10_000, 1000) == pytest.approx(0.015)


def test_batch_pauses_grow_when_the_store_slows_down():
    # R169
    assert BatchRests().after(60_000, 1000) == pytest.approx(SHORTEST_REST * 0.06)  # too slow for its rate
    assert BatchRests(usual=60.0).after(60_000, 1000) == pytest.approx(SHORTEST_REST * 0.06)
    assert BatchRests(usual=60.0).after(90_000, 1000) == pytest.approx(SHORTEST_REST * 1.5 * 0.09)  # others are served
    assert BatchRests(usual=60.0).after(10_000_000, 1000) == pytest.approx(LONGEST_REST * 10)
    assert BatchRests(usual=60.0).after(40_000, 0) == pytest.approx(SHORTEST_REST * 0.04)


def test_batch_pauses_recover_if_the_store_stays_slow():
    """Else one lucky batch would slow the reaper down for good, and it would never keep up."""
    rests = BatchRests(usual=1.0)
    share = [rests.after(60_000, 1000) / 0.06 for _ in range(150)]
    assert share[0] == LONGEST_REST
    assert share[-1] == pytest.approx(SHORTEST_REST, rel=0.01)
    assert share == sorted(share, reverse=True)
