"""The lock, the look and the finished record on PostgreSQL, through both packages (L1-L5, P7)."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import psycopg
import pytest

from harness import flows
from harness.postgres import PostgresServer
from harness.postgres_binaries import installations
from harness.tables import make_tables
from local.databases import EFFECTS, PACKAGES, connected, lock_for, locks_held, marks_held, rows, write
from oncekey.core.errors import StoreError
from oncekey.core.flow import adrive
from oncekey.core.model import (
    HOUR,
    SECOND,
    UNAVAILABLE,
    Claim,
    Code,
    Effects,
    Lease,
    Recovery,
    Refuse,
    Replay,
    Retryable,
    Snapshot,
)
from oncekey.core.onecommit import Holder, Locked, Stored, WriteKind
from oncekey.core.policy import OnExpired, Policy
from oncekey.engine import local
from oncekey.engine.local import ClaimFirst, Entry, LockHeld
from oncekey.engine.shell import AsyncEngine
from oncekey.ports.store import AsyncOpenTransaction
from oncekey.stores.locks import Guess
from oncekey.testing.claims import OTHER_FINGERPRINT, START, TTL, ManualClock, a_claim, again, answered

RECORD = "SELECT state, fence, version, attempts, incarnation::text, response_body, effects FROM oncekey.record"


class Desk:
    """An engine on a database, at a time that the test owns."""

    def __init__(self, engine: AsyncEngine, dsn: str, clock: ManualClock) -> None:
        self.engine, self.dsn, self.clock = engine, dsn, clock
        assert engine.store.locks is not None
        self.locks = engine.store.locks

    async def enter(self, claim: Claim, policy: Policy | None = None) -> tuple[Entry, AsyncOpenTransaction]:
        """Open a transaction and try the lock of a key."""
        tx = await self.engine.open()
        try:
            look = await tx.run(self.locks.locking(lock_for(claim), claim))
        except StoreError:
            await tx.rollback()
            raise
        return local.enter(look, claim, policy or Policy()), tx

    async def finish(
        self, claim: Claim, entered: Entry, tx: AsyncOpenTransaction, body: bytes = b"done"
    ) -> Stored | None:
        """Write the business and the record, and commit both or neither."""
        assert isinstance(entered, LockHeld)
        await write(self.engine, tx.connection, claim.id.key)
        sealed = await tx.run(self.locks.completing(claim, entered.target, answered(body), entered.begun))
        await (tx.commit() if sealed else tx.rollback())
        return sealed

    async def look(self, claim: Claim, policy: Policy | None = None) -> Entry:
        """What entering would mean, and nothing left behind."""
        entry, tx = await self.enter(claim, policy)
        await tx.rollback()
        return entry

    def record(self) -> Any:
        """The only record."""
        (found,) = rows(self.dsn, RECORD)
        return found

    @property
    def effects(self) -> int:
        """How often the business happened."""
        return len(rows(self.dsn, "SELECT key FROM effects"))


@pytest.fixture(params=PACKAGES)
def package(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def dsn(tables_dsn: str) -> str:
    rows(tables_dsn, EFFECTS)
    return tables_dsn


@asynccontextmanager
async def desk(package: str, dsn: str) -> AsyncIterator[Desk]:
    clock = ManualClock(START)
    async with connected(package, dsn, clock=clock) as engine:
        yield Desk(engine, dsn, clock)


async def test_a_new_key_is_locked_and_has_no_row_until_the_commit(package: str, dsn: str) -> None:
    # F12, L1: the lock is there although there is no row to join
    async with desk(package, dsn) as at:
        claim = a_claim()
        entry, tx = await at.enter(claim)
        assert isinstance(entry, LockHeld)
        assert (entry.target.kind, entry.proceed.lease.fence, entry.proceed.lease.attempt) == (WriteKind.NEW, 1, 1)
        assert (locks_held(dsn), marks_held(dsn)) == (1, 1)
        assert await adrive(at.locks.held(lock_for(claim).number), at.engine.driver.run)
        assert not await adrive(at.locks.held(lock_for(a_claim()).number), at.engine.driver.run)
        assert await at.look(again(claim)) == local.BUSY
        assert await at.look(again(claim, fingerprint=OTHER_FINGERPRINT)) == local.TAKEN  # R38
        assert rows(dsn, RECORD) == []
        sealed = await at.finish(claim, entry, tx)
        assert sealed == Stored(START + TTL)
        assert (locks_held(dsn), marks_held(dsn)) == (0, 0)
        assert at.record() == ("completed", 1, 1, 1, str(claim.incarnation), b"done", "local")
        assert isinstance(await at.look(again(claim)), Replay)
        assert await at.look(again(claim, fingerprint=OTHER_FINGERPRINT)) == Refuse(Code.KEY_REUSED)


async def test_identical_duplicate_is_detected_without_reading_all_locks(package: str, dsn: str) -> None:
    # R66: a crowd of retries costs the server no more than before
    rows(
        dsn,
        "CREATE OR REPLACE FUNCTION oncekey.lock_holder(lock bigint, family integer, mark integer) RETURNS text "
        "LANGUAGE plpgsql AS $$ BEGIN RAISE 'all locks were read'; END $$",
    )
    async with desk(package, dsn) as at:
        claim = a_claim()
        entry, tx = await at.enter(claim)
        assert [await at.look(again(claim)) for _ in range(3)] == [local.BUSY] * 3
        with pytest.raises(StoreError):
            await at.look(again(claim, fingerprint=OTHER_FINGERPRINT))
        assert await at.finish(claim, entry, tx)


async def test_concurrent_mismatching_requests_do_not_interfere(package: str, dsn: str) -> None:
    # R38: their marks stay until their transactions end, and prove nothing, because they do not hold the key
    async with desk(package, dsn) as at:
        claim = a_claim()
        other = again(claim, fingerprint=OTHER_FINGERPRINT)
        entry, tx = await at.enter(claim)
        visits = [await at.enter(again(other)) for _ in range(2)]
        assert [told for told, _ in visits] == [local.TAKEN] * 2
        assert marks_held(dsn) == 3
        assert await at.look(again(claim)) == local.BUSY
        for _, visitor in visits:
            await visitor.rollback()
        assert await at.finish(claim, entry, tx)
        # Whoever is there first is in the right, and that is a question of the moment.
        assert isinstance(await at.look(again(claim)), Replay)


async def test_lock_holder_without_mark_is_reported_as_busy(package: str, dsn: str) -> None:
    # R38: a false 422 would end a client's retries, so it needs a mark that was seen and not one that was missed
    async with desk(package, dsn) as at:
        claim = a_claim()
        lock = lock_for(claim)
        with psycopg.connect(dsn) as older:
            older.execute("SELECT pg_advisory_xact_lock(%s)", [lock.number])
            assert await at.look(claim) == local.BUSY
            assert await at.look(again(claim, fingerprint=OTHER_FINGERPRINT)) == local.BUSY
            assert await adrive(at.locks.holder(lock), at.engine.driver.run) is Holder.UNKNOWN_HOLDER


async def test_record_committed_during_the_holder_check_is_replayed(package: str, dsn: str) -> None:
    # R38: the owner commits, another body takes the free lock for a moment, and the owner's duplicate sees that one
    async with desk(package, dsn) as at:
        first = a_claim()
        await at.finish(first, *await at.enter(first))
        rows(dsn, "CREATE TABLE kept AS SELECT * FROM oncekey.record; DELETE FROM oncekey.record")
        rows(
            dsn,
            "CREATE OR REPLACE FUNCTION oncekey.lock_holder(lock bigint, family integer, mark integer) RETURNS text "
            "LANGUAGE sql VOLATILE AS $$ INSERT INTO oncekey.record SELECT * FROM kept; SELECT 'other' $$",
        )
        with psycopg.connect(dsn) as visitor:
            visitor.execute("SELECT pg_advisory_xact_lock(%s)", [lock_for(first).number])
            assert isinstance(await at.look(again(first)), Replay)
        assert rows(dsn, RECORD) == []


async def test_lock_of_a_mismatching_request_reports_busy_to_the_retry(package: str, dsn: str) -> None:
    # R38, L1: another body takes the lock only to be refused by the record, and proves nothing meanwhile
    async with desk(package, dsn) as at:
        first = a_claim()
        verdict: Any = await flows.abegin(at.engine, first, Policy())
        await flows.asettle(at.engine, verdict.lease, Retryable("x"))
        refused, tx = await at.enter(again(first, fingerprint=OTHER_FINGERPRINT))
        assert (refused, locks_held(dsn)) == (Refuse(Code.KEY_REUSED), 1)
        retry = again(first)
        assert await at.look(retry) == local.BUSY
        glance = local.peek(at.engine.store, at.locks, lock_for(retry), retry, Policy())
        assert await adrive(glance, at.engine.driver.run) == local.BUSY
        await tx.rollback()
        assert isinstance(await at.look(retry), LockHeld)


async def test_expired_key_belongs_to_the_first_new_request(package: str, dsn: str) -> None:
    # R38, row 31
    async with desk(package, dsn) as at:
        first = a_claim()
        await at.finish(first, *await at.enter(first))
        at.clock.advance(TTL + HOUR)
        second = again(first, fingerprint=OTHER_FINGERPRINT)
        _, tx = await at.enter(second)
        assert (await at.look(again(first)), await at.look(again(second))) == (local.TAKEN, local.BUSY)
        await tx.rollback()


async def test_peek_distinguishes_the_same_request_from_another(package: str, dsn: str) -> None:
    # R38, L8
    async with desk(package, dsn) as at:
        claim = a_claim()
        other = again(claim, fingerprint=OTHER_FINGERPRINT)

        async def glance(at_claim: Claim) -> Any:
            flow = local.peek(at.engine.store, at.locks, lock_for(at_claim), at_claim, Policy())
            return await adrive(flow, at.engine.driver.run)

        entry, tx = await at.enter(claim)
        assert (await glance(again(claim)), await glance(other)) == (local.BUSY, local.TAKEN)
        assert (locks_held(dsn), marks_held(dsn)) == (1, 1)
        await at.finish(claim, entry, tx)
        assert isinstance(await glance(again(claim)), Replay)
        assert await glance(other) == Refuse(Code.KEY_REUSED)
        assert await glance(a_claim()) is None


async def test_record_only_store_is_busy_while_another_holds_the_lock(package: str, dsn: str) -> None:
    # L6, R38: its roll-back freed the key for a moment, and another body came
    async with desk(package, dsn) as at:
        claim = a_claim()
        _, tx = await at.enter(again(claim, fingerprint=OTHER_FINGERPRINT))
        flow = local.store_record_only(at.locks, lock_for(claim), claim, Policy(), answered(b"no", status=402))
        assert await adrive(flow, at.engine.driver.run) == local.BUSY
        await tx.rollback()


async def test_missing_mark_makes_another_body_wait(package: str, dsn: str) -> None:
    # R38: who misses the lock cannot know whose it is
    spoil(dsn, "lock_request_2", "marked := pg_try_advisory_xact_lock_shared(family, mark)", "marked := true")
    spoil(dsn, "lock_request_2", "marked := pg_try_advisory_xact_lock(family, mark)", "NULL")
    async with desk(package, dsn) as at:
        claim = a_claim()
        _, tx = await at.enter(claim)
        assert await at.look(again(claim, fingerprint=OTHER_FINGERPRINT)) == local.BUSY
        await tx.rollback()


async def test_missing_mark_treated_as_mismatch_would_reject_retries(package: str, dsn: str) -> None:
    # R38: during a deploy, and whenever a transaction ends whose locks go one by one
    seen, missed = "count(marked.pid) > 0 AND NOT bool_or(", "bool_and(marked.pid IS NULL OR NOT "
    spoil(dsn, "lock_holder", seen, missed)
    async with desk(package, dsn) as at:
        claim = a_claim()
        with psycopg.connect(dsn) as older:
            older.execute("SELECT pg_advisory_xact_lock(%s)", [lock_for(claim).number])
            assert await at.look(claim) == local.TAKEN


def spoil(dsn: str, function: str, line: str, instead: str) -> None:
    """Change a line of one of our functions."""
    ((source,),) = rows(dsn, f"SELECT pg_get_functiondef('oncekey.{function}'::regproc)")
    assert line in source
    rows(dsn, source.replace(line, instead))


async def test_a_record_counts_whether_or_not_the_lock_was_got(package: str, dsn: str) -> None:
    # L1, F19: somebody else holds the number, and the answer is there all the same
    async with desk(package, dsn) as at:
        claim = a_claim()
        await at.finish(claim, *await at.enter(claim))
        with psycopg.connect(dsn) as other:
            other.execute("SELECT pg_advisory_xact_lock(%s)", [lock_for(claim).number])
            assert isinstance(await at.look(again(claim)), Replay)
            assert await at.look(again(claim, fingerprint=OTHER_FINGERPRINT)) == Refuse(Code.KEY_REUSED)


async def test_retryable_record_is_completed_in_its_incarnation(package: str, dsn: str) -> None:
    # row 17, L3, F14
    async with desk(package, dsn) as at:
        first = a_claim()
        verdict: Any = await flows.abegin(at.engine, first, Policy())
        await flows.asettle(at.engine, verdict.lease, Retryable("x"))
        second = again(first)
        entry, tx = await at.enter(second)
        assert isinstance(entry, LockHeld)
        lease = entry.proceed.lease
        assert (entry.target.kind, lease.fence, lease.attempt, lease.incarnation) == (
            WriteKind.RETRYABLE,
            2,
            2,
            first.incarnation,
        )
        assert await at.look(again(first, fingerprint=OTHER_FINGERPRINT)) == Refuse(Code.KEY_REUSED)
        assert await at.finish(second, entry, tx)
        assert at.record() == ("completed", 2, 3, 2, str(first.incarnation), b"done", "local")
        assert at.effects == 1


@pytest.mark.parametrize("ended", ["completed", "retryable"])
async def test_expired_record_starts_a_new_incarnation(package: str, dsn: str, ended: str) -> None:
    # row 31, L3, F14
    async with desk(package, dsn) as at:
        first = a_claim()
        verdict: Any = await flows.abegin(at.engine, first, Policy())
        await flows.asettle(at.engine, verdict.lease, answered(b"old") if ended == "completed" else Retryable("x"))
        at.clock.advance(TTL + HOUR)
        second = again(first, fingerprint=OTHER_FINGERPRINT)
        assert await at.look(second, Policy(on_expired=OnExpired.GONE)) == Refuse(Code.KEY_EXPIRED)
        entry, tx = await at.enter(second)
        assert isinstance(entry, LockHeld)
        assert (entry.target.kind, entry.proceed.lease.fence, entry.proceed.lease.attempt) == (
            WriteKind.REPLACE_EXPIRED,
            2,
            1,
        )
        assert await at.finish(second, entry, tx)
        assert at.record() == ("completed", 2, 3, 1, str(second.incarnation), b"done", "local")
        found: Any = await at.look(again(second))
        assert found.record.expires_at == at.clock() + TTL


@pytest.mark.parametrize("kind", [WriteKind.RETRYABLE, WriteKind.REPLACE_EXPIRED])
async def test_commit_with_an_outdated_version_writes_nothing(package: str, dsn: str, kind: WriteKind) -> None:
    # F14, L3: version and predicate are compared in the statement that writes
    async with desk(package, dsn) as at:
        first = a_claim()
        verdict: Any = await flows.abegin(at.engine, first, Policy())
        await flows.asettle(at.engine, verdict.lease, Retryable("x"))
        if kind is WriteKind.REPLACE_EXPIRED:
            at.clock.advance(TTL)
        late = again(first)
        entry, tx = await at.enter(late)
        assert isinstance(entry, LockHeld)
        assert entry.target.kind is kind
        # Somebody who claims first needs no lock; his record is of a later version.
        assert await flows.abegin(at.engine, again(first), Policy())
        assert await at.finish(late, entry, tx) is None
        assert (at.record()[0], at.effects) == ("in_progress", 0)


async def test_concurrent_commits_of_a_new_key_store_one_response(package: str, dsn: str) -> None:
    # R68, row 2: the primary key is the last line of defence (a collision of a lock that was lost)
    async with desk(package, dsn) as at:
        claim = a_claim()
        entry, tx = await at.enter(claim)
        other = await flows.abegin(at.engine, again(claim), Policy())
        assert await at.finish(claim, entry, tx) is None
        assert at.effects == 0
        assert await adrive(local.answer_of_record(at.engine.store, claim, Policy()), at.engine.driver.run) == Refuse(
            Code.IN_PROGRESS,
            retry_after=1,
            record=other.record,  # type: ignore[union-attr]
        )


@pytest.mark.parametrize("effects", [Effects.INLINE, Effects.PHASED, Effects.OUTBOX])
async def test_record_with_other_effects_must_be_claimed_first(package: str, dsn: str, effects: Effects) -> None:
    # L3, P2, F4: a deploy changed the route's effects
    async with desk(package, dsn) as at:
        first = a_claim(effects=effects, recovery=Recovery.RETRY)
        verdict: Any = await flows.abegin(at.engine, first, Policy())
        await flows.asettle(at.engine, verdict.lease, Retryable("x"))
        assert await at.look(again(first, effects=Effects.LOCAL)) == ClaimFirst()


async def test_claim_in_progress_is_not_overwritten(package: str, dsn: str) -> None:
    # L3: of a version of ours that claims first
    async with desk(package, dsn) as at:
        first = a_claim()
        verdict: Any = await flows.abegin(at.engine, first, Policy())
        refused: Any = await at.look(again(first))
        assert (refused.code, refused.record) == (Code.IN_PROGRESS, verdict.record)
        at.clock.advance(first.lease)
        assert await at.look(again(first)) == ClaimFirst()


async def test_an_outbox_request_that_is_declined_is_one_record(package: str, dsn: str) -> None:
    # row 3 without its defer: claim and settle, in one write
    async with desk(package, dsn) as at:
        claim = a_claim(effects=Effects.OUTBOX)
        entry, tx = await at.enter(claim)
        assert await at.finish(claim, entry, tx, b"no")
        assert at.record() == ("completed", 1, 1, 1, str(claim.incarnation), b"no", "outbox")


async def test_the_transaction_has_the_leases_time_outs(package: str, dsn: str) -> None:
    # L4, F15
    ((name,),) = rows(dsn, "SELECT current_database()")
    rows(dsn, f"ALTER DATABASE {name} SET synchronous_commit = off")
    async with desk(package, dsn) as at:
        _, tx = await at.enter(a_claim(lease=7 * SECOND))
        shown = [
            (await told(tx, f"SELECT current_setting('{name}')"))
            for name in ("idle_in_transaction_session_timeout", "statement_timeout", "synchronous_commit")
        ]
        await tx.rollback()
        assert shown == ["7s", "7s", "on"]


async def told(tx: AsyncOpenTransaction, sql: str) -> str:
    """One value, read through the handler's connection."""
    if hasattr(tx.connection, "fetchval"):
        return str(await tx.connection.fetchval(sql))
    return str((await (await tx.connection.execute(sql)).fetchone())[0])


async def test_missing_record_proves_rollback_only_under_the_lock(package: str, dsn: str) -> None:
    # F8, P7
    async with desk(package, dsn) as at:
        claim, policy = a_claim(), Policy()

        async def ask() -> Any:
            return await adrive(local.lost_commit(at.locks, lock_for(claim), claim, policy), at.engine.driver.run)

        entry, tx = await at.enter(claim)
        assert await ask() == local.BUSY  # its COMMIT may still be under way
        await tx.rollback()
        assert await ask() == UNAVAILABLE
        await at.finish(claim, *await at.enter(claim))
        assert (await ask()).record.incarnation == claim.incarnation
        assert isinstance(entry, LockHeld)


async def test_record_is_stored_without_business_rows(package: str, dsn: str) -> None:
    # L6: what a raised 4xx leaves; said twice it is the same record
    async with desk(package, dsn) as at:
        claim = a_claim()

        async def store() -> Any:
            flow = local.store_record_only(at.locks, lock_for(claim), claim, Policy(), answered(b"no", status=402))
            return await adrive(flow, at.engine.driver.run)

        _, tx = await at.enter(again(claim))
        assert await store() == local.BUSY
        await tx.rollback()
        assert isinstance(await store(), Stored)
        assert (await store()).record.response.body == b"no"
        assert at.record()[:4] == ("completed", 1, 1, 1)


async def test_transaction_timeout_is_the_deadline_from_postgres_17() -> None:
    # F15: such a client is neither idle nor executing, so no other time-out of the server sees it
    newest = max(installations(), key=lambda one: one.major)
    assert newest.major >= 17
    with PostgresServer(newest) as server:
        dsn = make_tables(server.create_database("silent"))
        rows(dsn, EFFECTS)
        async with desk("asyncpg", dsn) as at:
            _, tx = await at.enter(a_claim(lease=7 * SECOND, deadline=9 * SECOND))
            assert await told(tx, "SELECT current_setting('transaction_timeout')") == "9s"
            await tx.rollback()


@pytest.mark.parametrize("now", [0, 17 * HOUR])
def test_lease_of_a_new_key_equals_a_claimed_one(now: int) -> None:
    claim = a_claim()
    entry = local.enter(Locked(got=True, snapshot=Snapshot(None, now), begun=1), claim, Policy())
    assert isinstance(entry, LockHeld)
    lease, known = entry.proceed.lease, Lease.of(local.record_as_claimed(claim, entry.target, now))
    assert (lease, lease.alone) == (known, known.alone)


class Ticking:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def test_expiry_guess_needs_a_server_time() -> None:
    assert Guess(Ticking()).second(TTL) is None


def test_expiry_guess_keeps_the_highest_estimate() -> None:
    clock = Ticking()
    guess = Guess(clock)
    guess.learn(5_000_400_000)  # the server's clock said 5000.4 some time ago
    clock.now += 1
    assert guess.second(TTL) == (5_001_400_000 + TTL) // SECOND
    guess.learn(5_001_700_000)  # told sooner
    clock.now += 1
    assert guess.second(0) == 5002
    guess.learn(5_002_100_000)  # told later: the other one was better
    clock.now += 0.5
    assert guess.second(0) == 5003


def test_a_clock_that_was_set_is_believed() -> None:
    clock = Ticking()
    guess = Guess(clock)
    guess.learn(9_000 * SECOND)
    for instant in (5_000 * SECOND, 7_000 * SECOND):
        guess.learn(instant)
        assert guess.second(TTL) == (instant + TTL) // SECOND
