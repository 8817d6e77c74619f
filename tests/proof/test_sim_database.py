"""The simulated database behaves as a real one where it matters: commits, row locks, lost connections."""

from __future__ import annotations

import pytest

from oncekey.core.errors import StoreUnavailableError
from oncekey.core.flow import Rows, Statement, run_body
from oncekey.core.model import Completed, Lease, Outcome, Retryable, StoredResponse
from oncekey.stores.memory import MemoryStore
from oncekey.stores.rows import record_of
from oncekey.testing.claims import a_claim
from oncekey_demo.history import Effect, Proof
from proof.sim.database import Database
from proof.sim.scheduler import EPOCH, Clock
from proof.sim.steps import OpenTransaction

IDLE = 1_000
CLAIM = a_claim("key")
ROW = Effect("row", CLAIM.id.scope, CLAIM.id.key, CLAIM.fingerprint, 0)
DONE = Completed(StoredResponse(201, (), b"made"), Outcome.SUCCESS)


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def database(clock: Clock) -> Database:
    return Database(clock, IDLE)


@pytest.fixture
def lease(database: Database) -> Lease:
    transaction = next(MemoryStore().claim(CLAIM))
    run_body(transaction.body(), lambda said: _rows(database.execute(said, "owner", 1)))
    return Lease.of(record_of(database.table[CLAIM.id.scope, CLAIM.id.key], None))


def _rows(rows: Rows | None) -> Rows:
    assert rows is not None
    return rows


def settling(lease: Lease, settlement: Completed | Retryable) -> Statement:
    return next(MemoryStore().settling(lease, settlement))


def settled(database: Database, lease: Lease) -> OpenTransaction:
    """A business transaction up to its commit."""
    tx = database.begin("owner")
    database.insert(tx, ROW)
    assert database.execute(settling(lease, DONE), "owner", 2, tx)
    return tx


def state(database: Database) -> str:
    return str(database.table[CLAIM.id.scope, CLAIM.id.key]["state"])


def test_simulated_writes_are_visible_after_commit_only(database: Database, lease: Lease) -> None:
    tx = settled(database, lease)
    assert (state(database), database.business, len(database.log)) == ("in_progress", [], 1)

    database.commit(tx, 3)

    assert state(database) == "completed"
    assert [(one.id, one.at) for one in database.business] == [("row", 3)]
    assert [write.name for write in database.log] == ["claim", "settle_completed"]


def test_simulated_writer_waits_for_a_concurrent_commit(database: Database, lease: Lease) -> None:
    """What a lost COMMIT is found out by (P7)."""
    tx = settled(database, lease)
    other = settling(lease, Retryable("lost"))
    assert database.execute(other, "owner", 4) is None

    database.commit(tx, 5)

    assert database.execute(other, "owner", 6) == []


def test_a_roll_back_frees_the_row_untouched(database: Database, lease: Lease) -> None:
    tx = settled(database, lease)

    database.rollback(tx)

    assert database.execute(settling(lease, Retryable("lost")), "owner", 6)
    assert (state(database), database.business) == ("failed_retryable", [])


def test_a_reader_does_not_wait(database: Database, lease: Lease) -> None:
    settled(database, lease)

    rows = database.execute(next(next(MemoryStore().find(CLAIM.id)).body()), "reader", 4)

    assert rows is not None
    assert rows[0]["state"] == "in_progress"


def test_a_writer_with_nothing_to_write_does_not_wait(database: Database, lease: Lease) -> None:
    settled(database, lease)
    stranger = Lease(lease.id, lease.incarnation, 7, 1, lease.effects, 0, 0, 0)

    assert database.execute(settling(stranger, DONE), "stranger", 4) == []


def test_lost_host_rolls_back_its_simulated_transaction(database: Database, lease: Lease) -> None:
    tx = settled(database, lease)

    database.abandon("owner")

    assert not tx.open
    assert database.locks == {}
    with pytest.raises(StoreUnavailableError):
        database.commit(tx, 5)


def test_a_transaction_that_idles_is_ended_by_the_server(database: Database, lease: Lease, clock: Clock) -> None:
    """L4."""
    tx = settled(database, lease)
    clock.boot += IDLE - 1
    database.drop_idle()
    assert tx.open

    clock.boot += 1
    database.drop_idle()

    assert not tx.open
    with pytest.raises(StoreUnavailableError):
        database.insert(tx, ROW)
    database.rollback(tx)


def test_simulated_writes_are_logged_with_their_proof(database: Database, lease: Lease, clock: Clock) -> None:
    clock.offset = 5
    database.commit(settled(database, lease), 3)

    claim, settle = database.log
    assert (claim.proof, claim.state, claim.fence, claim.version) == (Proof.NO_ROW, "in_progress", 1, 1)
    assert (settle.proof, settle.proven_incarnation, settle.proven_fence) == (
        Proof.OWNER,
        str(CLAIM.incarnation),
        1,
    )
    assert (settle.at, settle.now, settle.elapsed, settle.version) == (3, EPOCH + 5, 0, 2)
    assert (settle.expires_at, settle.ttl, settle.operation) == (EPOCH + 5 + CLAIM.ttl, CLAIM.ttl, "owner")
