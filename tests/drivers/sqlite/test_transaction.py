"""A business transaction on SQLite, as a blocking handler sees it."""

from __future__ import annotations

import gc
import threading

import pytest

from drivers.speaking import ALL_ITEMS, a_stranger, insert, items, items_of, saying
from harness import flows
from oncekey.core.errors import CommitAmbiguousError, RolledBackError, StoreUnavailableError, TransactionControlError
from oncekey.core.flow import Mode
from oncekey.core.model import Proceed, Replay, State
from oncekey.core.policy import Policy
from oncekey.databases.sqlite.blocking import SqliteDriver
from oncekey.databases.sqlite.execute import commit_error
from oncekey.databases.sqlite.store import SqliteStore
from oncekey.engine.shell import Engine
from oncekey.testing.claims import a_claim, again, answered

INSERT = "INSERT INTO orders (item) VALUES (?)"


@pytest.fixture
def driver(path, module):
    driver = SqliteDriver(path, busy_timeout=0.05, module=module)
    yield driver
    driver.close()


@pytest.fixture
def engine(driver):
    return Engine(SqliteStore(), driver)


def test_rows_and_record_commit_together(driver, engine):  # L4, L6
    claim = a_claim()
    verdict = flows.begin(engine, claim, Policy())
    assert isinstance(verdict, Proceed)
    tx = engine.open()
    tx.connection.execute(INSERT, ("tea",))

    assert flows.settle_within(engine, tx, verdict.lease, answered()).ours
    assert flows.find(engine, claim.id).record.state is State.IN_PROGRESS  # nobody sees it yet
    tx.commit()

    assert items(driver) == ["tea"]
    assert isinstance(flows.begin(engine, again(claim), Policy()), Replay)


def test_rollback_undoes_rows_and_record(driver, engine):  # L6
    claim = a_claim()
    lease = flows.begin(engine, claim, Policy()).lease
    tx = engine.open()
    tx.connection.execute(INSERT, ("tea",))
    flows.settle_within(engine, tx, lease, answered())

    tx.rollback()

    assert items(driver) == []
    assert flows.find(engine, claim.id).record.state is State.IN_PROGRESS


def test_nothing_is_locked_before_the_first_statement(driver):
    tx = driver.begin()
    driver.run(saying(Mode.SINGLE, insert("tea")))

    assert [row["item"] for row in tx.connection.execute("SELECT item FROM orders")] == ["tea"]
    with pytest.raises(StoreUnavailableError):
        driver.run(saying(Mode.SINGLE, insert("milk")))
    tx.rollback()
    driver.run(saying(Mode.SINGLE, insert("milk")))

    assert items(driver) == ["tea", "milk"]


def test_readers_do_not_wait_for_a_writer(driver):
    tx = driver.begin()
    tx.connection.execute(INSERT, ("tea",))

    assert items(driver) == []
    tx.commit()
    assert items(driver) == ["tea"]


def test_empty_transaction_ends_without_effect(driver):
    for end in ("commit", "rollback"):
        tx = driver.begin()
        getattr(tx, end)()
        getattr(tx, end)()  # and may be ended again
        with pytest.raises(TransactionControlError, match="over"):
            tx.connection.execute("SELECT 1")


def test_finished_transaction_rejects_statements(driver):
    tx = driver.begin()
    connection = tx.connection
    connection.execute(INSERT, ("tea",))
    tx.commit()

    with pytest.raises(TransactionControlError, match="over"):
        connection.execute(INSERT, ("milk",))
    with pytest.raises(TransactionControlError, match="over"):
        tx.run(SqliteStore().settling(None, None))
    tx.rollback()
    assert items(driver) == ["tea"]


def test_it_may_be_committed_in_another_thread(driver):
    tx = driver.begin()
    tx.connection.execute(INSERT, ("tea",))
    thread = threading.Thread(target=tx.commit)
    thread.start()
    thread.join()

    assert items(driver) == ["tea"]


# The facade


def test_connection_wrapper_behaves_like_a_connection(driver):
    tx = driver.begin()
    connection = tx.connection
    cursor = connection.execute(INSERT, ("tea",))
    assert (cursor.lastrowid, cursor.rowcount) == (1, 1)
    assert connection.executemany(INSERT, [("milk",), ("sugar",)]).rowcount == 2
    cursor = connection.cursor()
    assert cursor.execute("SELECT id, item FROM orders WHERE id > :id", {"id": 0}) is cursor
    assert [column[0] for column in cursor.description] == ["id", "item"]
    first = cursor.fetchone()
    assert (first["item"], first[1]) == ("tea", "tea")
    assert [row["item"] for row in cursor.fetchmany(1)] == ["milk"]
    assert [row["item"] for row in cursor.fetchmany()] == ["sugar"]
    assert cursor.fetchall() == []
    assert cursor.executemany("DELETE FROM orders WHERE item = ?", [("milk",)]).rowcount == 1
    cursor.close()
    tx.commit()

    assert items(driver) == ["tea", "sugar"]


def test_handler_can_use_sqlite_savepoints(driver):
    tx = driver.begin()
    connection = tx.connection
    connection.execute(INSERT, ("tea",))
    connection.execute("SAVEPOINT a")
    connection.execute(INSERT, ("milk",))
    connection.execute("ROLLBACK TO a")
    connection.execute("RELEASE a")
    tx.commit()

    assert items(driver) == ["tea"]


@pytest.mark.parametrize(
    "attempt",
    [
        lambda connection: connection.commit(),
        lambda connection: connection.rollback(),
        lambda connection: connection.close(),
        lambda connection: connection.executescript("SELECT 1"),
        lambda connection: connection.cursor().executescript("SELECT 1"),
        lambda connection: connection.execute("COMMIT"),
        lambda connection: connection.execute("-- it is late\n rollback"),
        lambda connection: connection.executemany("END", []),
        lambda connection: connection.cursor().execute("COMMIT"),
        lambda connection: connection.cursor().executemany("BEGIN", []),
        lambda connection: connection.execute("ATTACH 'x.db' AS x"),
        lambda connection: connection.execute("PRAGMA journal_mode = MEMORY"),
        lambda connection: connection.__enter__(),
        lambda connection: setattr(connection, "isolation_level", "DEFERRED"),
        lambda connection: setattr(connection, "autocommit", True),
    ],
)
def test_handler_cannot_end_the_transaction(driver, attempt):  # F16, L5
    tx = driver.begin()
    tx.connection.execute(INSERT, ("tea",))

    with pytest.raises(TransactionControlError, match="ended by oncekey"):
        attempt(tx.connection)

    tx.rollback()
    assert items(driver) == []


def test_a_refused_statement_begins_nothing(driver):
    tx = driver.begin()
    with pytest.raises(TransactionControlError):
        tx.connection.execute("COMMIT")
    driver.run(saying(Mode.SINGLE, insert("tea")))
    tx.rollback()


def test_unsupported_connection_attribute_is_named(driver):
    with pytest.raises(AttributeError, match="no backup"):
        _ = driver.begin().connection.backup


def test_database_error_reaches_the_handler_and_keeps_the_transaction(driver, module):
    tx = driver.begin()
    tx.connection.execute(INSERT, ("tea",))
    assert tx.connection.IntegrityError is module.IntegrityError

    with pytest.raises(tx.connection.IntegrityError):
        tx.connection.execute(INSERT, ("tea",))
    tx.connection.execute(INSERT, ("milk",))
    tx.commit()

    assert items(driver) == ["tea", "milk"]


def test_a_deferred_constraint_that_fails_at_the_commit_is_a_rollback(module):  # X1, F20
    connection = module.connect(":memory:", isolation_level=None)
    for sql in (
        "PRAGMA foreign_keys = ON",
        "CREATE TABLE parent (id INTEGER PRIMARY KEY)",
        "CREATE TABLE child (p INTEGER REFERENCES parent (id) DEFERRABLE INITIALLY DEFERRED)",
        "BEGIN",
        "INSERT INTO child VALUES (5)",
    ):
        connection.execute(sql)
    with pytest.raises(module.IntegrityError) as caught:
        connection.execute("COMMIT")
    assert type(commit_error(caught.value, "committing")) is RolledBackError
    connection.close()


def test_a_transaction_that_sqlite_rolled_back_is_not_settled(driver, engine):  # L3, L6
    claim = a_claim()
    lease = flows.begin(engine, claim, Policy()).lease
    tx = engine.open()
    tx.connection.execute(INSERT, ("tea",))
    with pytest.raises(tx.connection.IntegrityError):
        tx.connection.execute("INSERT OR ROLLBACK INTO orders (item) VALUES ('tea')")

    with pytest.raises(TransactionControlError, match="the database rolled it back"):
        tx.connection.execute(INSERT, ("milk",))
    with pytest.raises(TransactionControlError, match="the database rolled it back"):
        flows.settle_within(engine, tx, lease, answered())
    with pytest.raises(TransactionControlError, match="the database rolled it back"):
        tx.commit()

    assert items(driver) == []
    assert flows.find(engine, claim.id).record.state is State.IN_PROGRESS
    driver.run(saying(Mode.SINGLE, insert("free again")))


# What goes wrong


def test_first_statement_can_be_retried_after_a_lock_timeout(driver, path, module):
    other = a_stranger(path, module)
    tx = driver.begin()

    with pytest.raises(StoreUnavailableError, match="SQLITE_BUSY"):
        tx.connection.execute(INSERT, ("milk",))
    other.close()
    tx.connection.execute(INSERT, ("milk",))
    tx.commit()

    assert items(driver) == ["milk"]


def test_open_cursor_does_not_keep_an_old_snapshot(driver):
    driver.run(saying(Mode.ATOMIC, insert("tea"), insert("milk")))
    tx = driver.begin()
    cursor = tx.connection.execute("SELECT item FROM orders ORDER BY id")
    cursor.fetchone()
    tx.commit()
    driver.run(saying(Mode.SINGLE, insert("sugar")))

    assert items_of(driver.run(ALL_ITEMS)) == ["tea", "milk", "sugar"]
    gc.collect()


def test_a_commit_that_the_disk_did_not_confirm_is_ambiguous(driver, module):  # P7
    tx = driver.begin()
    tx.connection.execute(INSERT, ("tea",))
    tx._raw = FailingCommit(tx._raw, module, "SQLITE_IOERR_FSYNC")

    with pytest.raises(CommitAmbiguousError):
        tx.commit()


def test_failed_commit_raises_store_unavailable(driver, module):
    tx = driver.begin()
    tx.connection.execute(INSERT, ("tea",))
    tx._raw = FailingCommit(tx._raw, module, "SQLITE_FULL")

    with pytest.raises(StoreUnavailableError):
        tx.commit()

    driver.run(saying(Mode.SINGLE, insert("free again")))
    assert items(driver) == ["free again"]


class FailingCommit:
    """A connection whose disk fails at the worst moment."""

    def __init__(self, connection, module, name):
        self._connection, self._module, self._name = connection, module, name

    def execute(self, sql, *parameters):
        if sql == "COMMIT":
            error = self._module.OperationalError("disk I/O error")
            error.sqlite_errorname = self._name
            raise error
        return self._connection.execute(sql, *parameters)

    def __getattr__(self, name):
        return getattr(self._connection, name)


@pytest.mark.parametrize("sql", ["CREATE TEMP TABLE mine (x)", 'CREATE TABLE "Temp" . mine (x)'])
@pytest.mark.parametrize("end", ["commit", "rollback"])
def test_temporary_table_does_not_reach_the_next_transaction(driver, end, sql):  # X12
    for _ in range(2):
        tx = driver.begin()
        tx.connection.execute(sql)
        getattr(tx, end)()
        following = driver.begin()
        assert following.connection.execute("SELECT name FROM sqlite_temp_master").fetchall() == []
        following.rollback()


def test_commit_with_an_open_cursor_fails_at_once(path, module):
    driver = SqliteDriver(path, busy_timeout=20.0, look_after=0.001, module=module)
    tx = driver.begin()
    cursor = tx.connection.execute("INSERT INTO orders (item) VALUES ('tea'), ('milk') RETURNING item")
    tries, commit = [], tx._send_commit
    tx._send_commit = lambda connection: (tries.append(1), commit(connection))

    with pytest.raises(StoreUnavailableError, match="SQLITE_BUSY"):
        tx.commit()

    assert len(tries) == 1
    cursor.close()
    assert not driver.is_full
    driver.close()
