"""LOCAL in one commit on SQLite: the writer is the lock, the process knows whose it is, and replays wait for nobody."""

from __future__ import annotations

import asyncio
import gc
import os
import sqlite3
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, closing
from pathlib import Path
from types import ModuleType
from typing import Any
from uuid import uuid4

import pysqlite3.dbapi2 as pysqlite3
import pytest

from harness import flows
from harness.patience import PATIENCE
from local.databases import lock_for
from oncekey.core.errors import RolledBackError, StoreBusyError, StoreError, TransactionControlError
from oncekey.core.flow import Statement, adrive
from oncekey.core.model import (
    HOUR,
    UNAVAILABLE,
    Claim,
    Code,
    Deferred,
    Effects,
    Parcel,
    ParcelKind,
    Refuse,
    Replay,
    Retryable,
)
from oncekey.core.onecommit import Holder, Stored, WriteKind, WriteTarget
from oncekey.core.policy import Policy
from oncekey.databases.sqlite.asynchronous import AsyncSqliteDriver
from oncekey.databases.sqlite.blocking import SqliteDriver, SqliteTransaction
from oncekey.databases.sqlite.files import writer_of
from oncekey.databases.sqlite.store import SqliteLocks, SqliteStore
from oncekey.engine import local
from oncekey.engine.local import ClaimFirst, Entry, LockHeld
from oncekey.engine.shell import AsyncEngine, Engine
from oncekey.ports.store import AsyncFolds
from oncekey.testing.claims import OTHER_FINGERPRINT, START, TTL, ManualClock, a_claim, again, answered

RECORD = "SELECT state, fence, version, attempts, response_body, effects FROM oncekey_record"
INSERT = "INSERT INTO effects VALUES (?)"


@pytest.fixture(params=(sqlite3, pysqlite3), ids=("journal", "wal"))
def module(request: pytest.FixtureRequest) -> Any:
    """A SQLite that is used with a rollback journal, and one with a write-ahead log."""
    return request.param


@pytest.fixture
def path(module: ModuleType, tmp_path: Path) -> Path:
    file = tmp_path / "shop.db"
    with closing_engine(file, module) as engine:
        engine.migrate()
    with closing(module.connect(file)) as connection:
        connection.execute("CREATE TABLE effects (key TEXT NOT NULL)")
    return file


class closing_engine(closing[Engine]):  # noqa: N801  (as contextlib's)
    """A blocking engine, closed at its end."""

    def __init__(self, path: Path, module: ModuleType) -> None:
        driver = SqliteDriver(path, module=module)
        super().__init__(Engine(SqliteStore(writer=driver.writer), driver))


class Desk:
    """An engine on a file, at a time that the test owns."""

    def __init__(self, path: Path, module: ModuleType, patience: float, look_after: float) -> None:
        self.path, self.module, self.clock = path, module, ManualClock(START)
        self.driver = AsyncSqliteDriver(
            path, busy_timeout=patience, lock_timeout=patience, look_after=look_after, module=module
        )
        self.engine = AsyncEngine(SqliteStore(writer=self.driver.writer, clock=self.clock), self.driver)
        assert isinstance(self.engine.store.locks, SqliteLocks)
        self.locks = self.engine.store.locks

    async def enter(self, claim: Claim) -> tuple[Entry, Any]:
        """Open a transaction and lock a key."""
        tx, look = await self.driver.begin_with(self.locks.locking(lock_for(claim), claim))
        return local.enter(look, claim, Policy()), tx

    async def finish(self, claim: Claim, entered: Entry, tx: Any, body: bytes = b"done") -> Stored | None:
        """Write the business and the record, and commit both or neither."""
        assert isinstance(entered, LockHeld)
        await tx.connection.execute(INSERT, (claim.id.key,))
        sealed: Stored | None = await tx.run(
            self.locks.completing(claim, entered.target, answered(body), entered.begun)
        )
        await (tx.commit() if sealed else tx.rollback())
        return sealed

    async def look(self, claim: Claim) -> Entry:
        """What entering means, with nothing left behind."""
        entry, tx = await self.enter(claim)
        await tx.rollback()
        return entry

    async def glance(self, claim: Claim) -> Replay | Refuse | None:
        """What a request hears that does not want to wait."""
        flow = local.peek(self.engine.store, self.locks, lock_for(claim), claim, Policy())
        return await adrive(flow, self.driver.run)

    def rows(self, sql: str = RECORD) -> list[Any]:
        """What anybody else sees."""
        with closing(self.module.connect(self.path)) as connection:
            found: list[Any] = connection.execute(sql).fetchall()
            return found

    @property
    def effects(self) -> int:
        """How often the business happened."""
        return len(self.rows("SELECT key FROM effects"))


@asynccontextmanager
async def desk(
    path: Path, module: ModuleType, patience: float = PATIENCE, look_after: float = PATIENCE
) -> AsyncIterator[Desk]:
    at = Desk(path, module, patience, look_after)
    try:
        yield at
    finally:
        await at.driver.close()


@pytest.fixture
def stranger(path: Path, module: ModuleType) -> Iterator[Any]:
    """Another process's writer, as far as this process's drivers know."""
    with closing(module.connect(path, isolation_level=None)) as connection:
        connection.execute("BEGIN IMMEDIATE")
        yield connection


# One commit


async def test_a_new_key_is_locked_and_has_no_row_until_the_commit(path: Path, module: ModuleType) -> None:
    # L1, L3, L8, R38
    async with desk(path, module) as at:
        claim = a_claim()
        other = again(claim, fingerprint=OTHER_FINGERPRINT)
        entry, tx = await at.enter(claim)
        assert isinstance(entry, LockHeld)
        assert (entry.target.kind, entry.proceed.lease.fence, entry.proceed.lease.attempt) == (WriteKind.NEW, 1, 1)
        assert await adrive(at.locks.held(lock_for(claim).number), at.driver.run)
        assert not await adrive(at.locks.held(lock_for(a_claim()).number), at.driver.run)
        assert (await at.glance(again(claim)), await at.glance(other)) == (local.BUSY, local.TAKEN)
        assert await at.glance(a_claim()) is None
        assert at.rows() == []

        assert await at.finish(claim, entry, tx) == Stored(START + TTL)
        assert at.rows() == [("completed", 1, 1, 1, b"done", "local")]
        assert not await adrive(at.locks.held(lock_for(claim).number), at.driver.run)
        assert isinstance(await at.glance(again(claim)), Replay)
        assert isinstance(await at.look(again(claim)), Replay)
        assert await at.look(other) == Refuse(Code.KEY_REUSED)
        assert at.effects == 1


async def test_a_rollback_leaves_neither_row_nor_lock(path: Path, module: ModuleType) -> None:  # L6
    async with desk(path, module) as at:
        claim = a_claim()
        entry, tx = await at.enter(claim)
        assert isinstance(entry, LockHeld)
        await tx.connection.execute(INSERT, ("x",))
        await tx.rollback()
        assert (at.rows(), at.effects, await at.glance(again(claim))) == ([], 0, None)
        assert isinstance(await at.look(again(claim)), LockHeld)


async def test_existing_record_is_settled_by_its_version(path: Path, module: ModuleType) -> None:  # L3, F14
    async with desk(path, module) as at:
        first = a_claim()
        verdict: Any = await flows.abegin(at.engine, first, Policy())
        assert await at.look(again(first)) == Refuse(Code.IN_PROGRESS, retry_after=1, record=verdict.record)
        await flows.asettle(at.engine, verdict.lease, Retryable("x"))
        entry, tx = await at.enter(again(first))
        assert isinstance(entry, LockHeld)
        assert entry.target.kind is WriteKind.RETRYABLE
        assert await at.finish(first, entry, tx)
        assert at.rows() == [("completed", 2, 3, 2, b"done", "local")]

        at.clock.advance(TTL + HOUR)
        second = again(first, fingerprint=OTHER_FINGERPRINT)
        entry, tx = await at.enter(second)
        assert isinstance(entry, LockHeld)
        assert entry.target.kind is WriteKind.REPLACE_EXPIRED
        assert await at.finish(second, entry, tx, b"anew")
        assert at.rows() == [("completed", 3, 4, 1, b"anew", "local")]
        assert at.effects == 2


async def test_a_record_of_other_effects_is_claimed_first(path: Path, module: ModuleType) -> None:  # L3
    async with desk(path, module) as at:
        first = a_claim(effects=Effects.PHASED)
        verdict: Any = await flows.abegin(at.engine, first, Policy())
        await flows.asettle(at.engine, verdict.lease, Retryable("x"))
        assert await at.look(again(first, effects=Effects.LOCAL)) == ClaimFirst()


async def test_deferred_response_commits_with_its_parcel(path: Path, module: ModuleType) -> None:  # O1, row 31
    async with desk(path, module) as at:
        first = a_claim()
        await at.finish(first, *await at.enter(first))
        at.clock.advance(TTL + HOUR)
        for claim, kind in (
            (a_claim(effects=Effects.OUTBOX), WriteKind.NEW),
            (again(first, effects=Effects.OUTBOX), WriteKind.REPLACE_EXPIRED),
        ):
            entry, tx = await at.enter(claim)
            assert isinstance(entry, LockHeld)
            assert entry.target.kind is kind
            parcel = Parcel(uuid4(), ParcelKind.DEFER, claim.id, claim.incarnation, "pay", "{}", f"down-{kind}")
            assert at.locks.completing_at_commit(claim, entry.target, Deferred(parcel), entry.begun) is None
            assert await tx.run(at.locks.completing(claim, entry.target, Deferred(parcel), entry.begun))
            await tx.commit()
        assert at.rows() == [("pending", 2, 2, 1, None, "outbox"), ("pending", 1, 1, 1, None, "outbox")]
        assert len(at.rows("SELECT 1 FROM oncekey_outbox")) == 2


# One turn of the thread


async def folded(at: Desk, claim: Claim, entered: Entry, tx: Any) -> Any:
    """The business, and the record in the same breath as its commit."""
    assert isinstance(entered, LockHeld)
    await tx.connection.execute(INSERT, (claim.id.key,))
    fold = at.locks.completing_at_commit(claim, entered.target, answered(b"done"), entered.begun)
    assert fold is not None
    rows = await tx.commit_with(fold.statement)
    return None if rows is None else fold.read(rows)


async def test_record_can_be_written_with_the_commit(path: Path, module: ModuleType) -> None:
    async with desk(path, module) as at:
        assert isinstance(at.driver, AsyncFolds)
        claim = a_claim()
        entry, tx = await at.enter(claim)
        assert await folded(at, claim, entry, tx) == Stored(START + TTL)
        assert (at.rows(), at.effects) == ([("completed", 1, 1, 1, b"done", "local")], 1)
        with pytest.raises(TransactionControlError):
            await tx.commit_with(Statement("late", "SELECT 1"))
        await tx.rollback()
        assert not at.driver.is_full


async def test_failure_at_commit_leaves_no_open_transaction(path: Path, module: ModuleType) -> None:
    async with desk(path, module) as at:
        claim = a_claim()
        _, tx = await at.enter(claim)
        await tx.connection.execute(INSERT, ("x",))
        with pytest.raises(StoreError):
            await tx.commit_with(Statement("wrong", "INSERT INTO nowhere VALUES (1)"))
        assert (at.effects, at.driver.is_full) == (0, False)
        with pytest.raises(StoreError):
            await at.driver.begin_with(wrong())
        assert not at.driver.is_full
        assert isinstance(await at.look(claim), LockHeld)


def wrong() -> Any:
    yield Statement("wrong", "SELECT * FROM nowhere")


async def test_a_cancelled_statement_is_not_committed_with_anything(path: Path, module: ModuleType) -> None:  # P5
    async with desk(path, module) as at:
        _, tx = await at.enter(a_claim())
        gate = threading.Event()
        saying = asyncio.create_task(tx.say(lambda: gate.wait(PATIENCE)))
        await asyncio.sleep(0)
        saying.cancel()
        with pytest.raises(asyncio.CancelledError):
            await saying
        gate.set()
        with pytest.raises(RolledBackError):
            await folded_last(at, tx)
        assert (at.rows(), at.driver.is_full) == ([], False)


async def folded_last(at: Desk, tx: Any) -> Any:
    claim = a_claim()
    return await tx.commit_with(next(at.locks.completing(claim, WriteTarget(WriteKind.NEW), answered(), 0)))


# Who waits for whom


async def test_waiting_request_does_not_reject_another_body(path: Path, module: ModuleType) -> None:  # R38, L8
    async with desk(path, module) as at:
        _, holder = await at.enter(a_claim())
        claim = a_claim()
        other = again(claim, fingerprint=OTHER_FINGERPRINT)
        queueing = asyncio.create_task(at.enter(claim))
        await asyncio.sleep(0)
        assert at.driver.is_full
        assert (await at.glance(again(claim)), await at.glance(other)) == (local.BUSY, local.BUSY)
        queueing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await queueing
        assert (await at.glance(again(claim)), await at.glance(other)) == (None, None)
        await holder.rollback()
        assert isinstance(await at.look(other), LockHeld)


async def test_replay_does_not_wait_for_another_process(path: Path, module: ModuleType, stranger: Any) -> None:
    # R96: the look comes before the turn to write
    stranger.execute("ROLLBACK")
    async with desk(path, module, patience=0.01) as at:
        claim = a_claim()
        await at.finish(claim, *await at.enter(claim))
        stranger.execute("BEGIN IMMEDIATE")
        assert isinstance(await at.look(again(claim)), Replay)
        assert await at.look(again(claim, fingerprint=OTHER_FINGERPRINT)) == Refuse(Code.KEY_REUSED)
        with pytest.raises(StoreBusyError):
            await at.enter(a_claim())
        assert not at.driver.is_full
        stranger.execute("ROLLBACK")
        assert isinstance(await at.look(a_claim()), LockHeld)


async def test_replay_does_not_wait_for_a_running_handler(path: Path, module: ModuleType) -> None:
    # R96: where the turn is long in coming, the look comes before it
    async with desk(path, module, look_after=0.001) as at:
        claim = a_claim()
        await at.finish(claim, *await at.enter(claim))
        _, holder = await at.enter(a_claim())
        assert isinstance(await at.look(again(claim)), Replay)
        assert await at.look(again(claim, fingerprint=OTHER_FINGERPRINT)) == Refuse(Code.KEY_REUSED)
        blocking = SqliteDriver(path, look_after=0.001, module=module)
        look = blocking.begin().run(at.locks.locking(lock_for(claim), claim))
        assert isinstance(local.enter(look, claim, Policy()), Replay)
        blocking.close()
        await holder.rollback()
        assert not at.driver.is_full


async def test_request_looks_up_the_record_again_under_the_lock(path: Path, module: ModuleType) -> None:  # L1
    async with desk(path, module, look_after=0.001) as at:
        claim = a_claim()
        entered, holder = await at.enter(claim)
        looked, find = threading.Event(), SqliteTransaction.look

        def looking(tx: SqliteTransaction, statement: Statement) -> Any:
            rows = find(tx, statement)
            looked.set()
            return rows

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(SqliteTransaction, "look", looking)
            late = asyncio.create_task(at.look(again(claim)))
            while not looked.is_set():  # noqa: ASYNC110  (a thread sets it)
                await asyncio.sleep(0)
        assert not late.done()
        await at.finish(claim, entered, holder)
        assert isinstance(await late, Replay)
        assert at.effects == 1


async def test_new_key_is_looked_up_once_without_a_writer(path: Path, module: ModuleType) -> None:
    async with desk(path, module) as at:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(SqliteTransaction, "look", None)
            claim = a_claim()
            await at.finish(claim, *await at.enter(claim))
            assert isinstance(await at.look(again(claim)), Replay)


async def test_a_commit_waits_for_readers_for_longer_than_its_connection_does(path: Path) -> None:
    # Only a rollback journal lets readers keep a commit waiting.
    async with desk(path, sqlite3, look_after=0.001) as at:
        claim = a_claim()
        entry, tx = await at.enter(claim)
        tries, commit = list[int](), SqliteTransaction._send_commit
        reader = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
        reader.execute("BEGIN")
        reader.execute("SELECT count(*) FROM effects").fetchall()

        def trying(tx: SqliteTransaction, connection: sqlite3.Connection) -> None:
            tries.append(1)
            if len(tries) == 3:
                reader.execute("ROLLBACK")
            commit(tx, connection)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(SqliteTransaction, "_send_commit", trying)
            assert await at.finish(claim, entry, tx) is not None
        assert (len(tries), at.effects) == (3, 1)
        reader.close()


async def test_all_drivers_of_a_process_share_the_writer(path: Path, module: ModuleType) -> None:
    link = path.with_name("link.db")
    link.symlink_to(path)
    blocking = SqliteDriver(link, busy_timeout=0.01, module=module)
    store = SqliteStore(writer=blocking.writer)
    assert store.locks is not None
    async with desk(path, module) as at:
        claim = a_claim()
        _, tx = await at.enter(claim)
        assert (blocking.is_full, blocking.writer.holder(lock_for(claim))) == (True, Holder.UNKNOWN_HOLDER)
        with pytest.raises(StoreBusyError, match="of this process"):
            blocking.begin().run(store.locks.locking(lock_for(a_claim()), a_claim()))
        await tx.rollback()

        theirs = blocking.begin()
        theirs.run(store.locks.locking(lock_for(claim), claim))
        assert at.driver.is_full
        assert await at.glance(again(claim, fingerprint=OTHER_FINGERPRINT)) == local.TAKEN
        theirs.rollback()
        assert (at.driver.is_full, await at.glance(again(claim))) == (False, None)
    blocking.close()


async def test_a_lost_commit_is_looked_for_under_the_lock(path: Path, module: ModuleType) -> None:  # P7
    async with desk(path, module) as at:
        claim = a_claim()

        async def became() -> Any:
            return await adrive(local.lost_commit(at.locks, lock_for(claim), claim, Policy()), at.driver.run)

        assert await became() == UNAVAILABLE
        await at.finish(claim, *await at.enter(claim))
        assert isinstance(await became(), Replay)
        assert not at.driver.is_full


async def test_final_failure_is_stored_without_rows(path: Path, module: ModuleType) -> None:  # L6
    async with desk(path, module) as at:
        claim = a_claim()
        flow = local.store_record_only(at.locks, lock_for(claim), claim, Policy(), answered(b"no", status=402))
        assert await adrive(flow, at.driver.run) == Stored(START + TTL)
        assert at.rows() == [("completed", 1, 1, 1, b"no", "local")]


def test_garbage_collected_transaction_releases_the_writer_lock(path: Path, module: ModuleType) -> None:
    driver = SqliteDriver(path, busy_timeout=0.01, module=module)
    tx = driver.begin()
    tx.connection.execute(INSERT, ("x",))
    del tx
    gc.collect()
    assert not driver.is_full
    driver.begin().connection.execute(INSERT, ("y",))
    gc.collect()
    driver.close()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there are no forked processes here")
def test_a_forked_process_does_not_inherit_the_turn(path: Path, module: ModuleType) -> None:
    driver = SqliteDriver(path, module=module)
    claim = a_claim()
    driver.writer.take(0)
    driver.writer.lock(lock_for(claim))
    child = os.fork()
    if not child:
        writer = writer_of(str(path))
        os._exit(int(writer.busy or writer.holder(lock_for(claim)) is not Holder.NOBODY))
    assert os.waitpid(child, 0)[1] == 0
    assert driver.writer.holder(lock_for(claim)) is Holder.UNKNOWN_HOLDER
    driver.writer.leave()
    driver.close()
