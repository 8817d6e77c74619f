"""What MariaDB and MySQL do that other databases do not: that the store's statements do not fall into it.

Each pitfall is shown on the real servers where that takes no more than a sentence, so one without it is noticed.
`tests/local/test_mariadb.py` has those of transactions: keys as bytes, texts that are cut, implicit commits, time-outs.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Iterator
from contextlib import closing

import pymysql
import pytest

from harness.patience import wait_until
from local.databases import lock_for
from oncekey.core.flow import Mode, Statement, Transaction, drive
from oncekey.core.model import HOUR, MINUTE, Effects, Lease
from oncekey.core.onecommit import WriteKind, WriteTarget
from oncekey.databases.mariadb.generated.pymysql import PymysqlDriver
from oncekey.databases.mariadb.store import MariadbStore
from oncekey.stores.sql import ONE_ROW
from oncekey.stores.statements import load
from oncekey.testing.claims import a_claim, answered

STORE = MariadbStore()
SAID = {
    name: re.sub(r"--[^\n]*|/\*.*?\*/", " ", text, flags=re.DOTALL)
    for name, text in load("oncekey.databases.mariadb", *ONE_ROW, shared="oncekey.stores.onerow").items()
}
"""Every statement of the store, without its comments."""
CLOCK = "SELECT TIMESTAMPDIFF(MICROSECOND, '1970-01-01', UTC_TIMESTAMP(6))"
WAITS = "SHOW GLOBAL STATUS LIKE 'innodb_row_lock_current_waits'"
"""How many wait for a row. `innodb_trx` would not do: who reads it again within 0.1 s reads the same as before."""


@pytest.fixture
def driver(empty_either):
    with closing(PymysqlDriver(empty_either)) as driver:
        yield driver


@pytest.fixture
def session(empty_either, either_server):
    """A session of somebody else's."""
    with either_server.connect(empty_either.rpartition("/")[2]) as connection, connection.cursor() as cursor:
        yield cursor
        cursor.execute("ROLLBACK")


def asked(cursor, text):
    cursor.execute(text)
    return cursor.fetchone()[-1]


def claimed(driver, key, **changes):
    return drive(STORE.claim(a_claim(key, **changes)), driver.run).record


def sentences(start: str) -> Iterator[tuple[str, str]]:
    """All sentences that begin so, with the name of their statement."""
    for name, text in SAID.items():
        for sentence in text.split(";"):
            if sentence.strip().startswith(start):
                yield name, sentence.strip()


def assignments(update: str) -> list[tuple[str, str]]:
    """What an UPDATE sets: each column, and what it becomes."""
    found = re.search(r"\bSET\b(.*?)(?=\bWHERE\b|\Z)", update, re.DOTALL)
    assert found is not None, update
    parts, depth = [""], 0
    for char in found[1]:
        depth += (char == "(") - (char == ")")
        if char == "," and depth == 0:
            parts.append("")
        else:
            parts[-1] += char
    return [(column.strip(" \n`"), value) for column, _, value in (part.partition("=") for part in parts)]


@pytest.mark.parametrize(
    "word", [r"RETURNING", r"IGNORE", r"REPLACE\s+INTO", r"GET_LOCK", r"SYSDATE", r"NOW\(", r"CURRENT_TIMESTAMP"]
)
def test_statements_avoid_unsafe_keywords(word):
    """MySQL has no RETURNING, IGNORE swallows more than duplicates, and the others are local or the session's."""
    assert [name for name, text in SAID.items() if re.search(rf"\b{word}", text, re.IGNORECASE)] == []


def test_a_key_is_claimed_by_a_plain_insert():
    """An upsert that gives its row back gives another's, too: 25 of 150 races had two winners."""
    upserts = {name for name, text in SAID.items() if "ON DUPLICATE KEY" in text}
    assert upserts == {"lock", "beat"}  # a lock's is said without waiting, and a worker's row is its own
    assert "SET STATEMENT innodb_lock_wait_timeout = 0" in STORE.locks._statements._commands["lock"]


def test_updates_never_read_a_column_they_assigned(session):
    """`SET a = a + 1, b = a` reads the new `a`, against the standard. So nothing is read behind its assignment."""
    session.execute("CREATE TEMPORARY TABLE pair (a INT, b INT) SELECT 1 AS a, 0 AS b")
    session.execute("UPDATE pair SET a = a + 1, b = a")
    assert asked(session, "SELECT b FROM pair") == 2
    found = []
    for name, update in sentences("UPDATE"):
        before: set[str] = set()
        for column, value in assignments(update):
            # Parameters, texts and the names of other tables' columns are no columns of this one.
            names = set(re.findall(r"(?<![:.'\w$])[a-z_]+", re.sub(r"'[^']*'", "", value)))
            found += [(name, column, read) for read in sorted(names & before)]
            before.add(column)
    # It takes the later of the two once more, which is what the lease has become.
    assert found == [("extend_parcel", "due_at", "lease_until")]


def test_every_write_of_a_record_moves_its_version():
    """So it has changed a row, also for a connection that is not told of rows which stayed the same."""
    still = [name for name, update in sentences("UPDATE oncekey_record") if "version" not in dict(assignments(update))]
    assert still == []


def test_driver_counts_matched_rows_without_changes(driver, session, empty_either, either_server):
    """ROW_COUNT() is 0 for it on a plain connection. The driver's own ones are told of rows that were found."""
    same = "UPDATE oncekey_lock SET mark = mark WHERE number = 1"
    session.execute("INSERT INTO oncekey_lock (number, mark) VALUES (1, 1)")
    session.execute(same)
    assert asked(session, "SELECT ROW_COUNT()") == 0

    def body():
        return (yield Statement("same", f"{same};\nSELECT 1 AS told FROM DUAL WHERE ROW_COUNT() > 0"))

    assert len(driver.run(Transaction("same", Mode.ATOMIC, body))) == 1


def test_no_lease_becomes_null_by_a_maximum(driver, session):
    """GREATEST with NULL is NULL: a deferred record has no lease at first, and gets one by its first heartbeat."""
    assert asked(session, "SELECT GREATEST(NULL, 7)") is None
    record = claimed(driver, "deferred", effects=Effects.OUTBOX)
    session.execute("UPDATE oncekey_record SET lease_until = NULL")
    assert drive(STORE.renew(Lease.of(record), MINUTE), driver.run) > record.created_at


def test_clock_is_utc_and_advances_within_a_transaction(driver, session):
    """Instants are of the sentence and not of the transaction's begin, in UTC, whatever zone a handler has chosen."""
    claim = a_claim("zone")
    tx = driver.begin()
    look = tx.run(STORE.locks.locking(lock_for(claim), claim))
    with tx.connection.cursor() as cursor:
        cursor.execute("SET time_zone = '+05:00'")
        assert asked(cursor, "SELECT TIMESTAMPDIFF(HOUR, UTC_TIMESTAMP(6), NOW(6))") == 5
        cursor.execute("DO SLEEP(0.002)")
    before = asked(session, CLOCK)
    sealed = tx.run(STORE.locks.completing(claim, WriteTarget(WriteKind.NEW), answered(), look.begun))
    assert look.snapshot.now < before <= sealed.expires_at - claim.ttl <= asked(session, CLOCK)
    tx.commit()


def test_locking_read_of_a_free_key_does_not_acquire_it(driver, session):
    """FOR UPDATE of a row that is not there locks nothing at READ COMMITTED: the INSERT behind it decides."""
    claim = a_claim("free")
    lock = lock_for(claim)
    session.execute("SET SESSION TRANSACTION ISOLATION LEVEL READ COMMITTED")
    session.execute("START TRANSACTION")
    session.execute(f"SELECT 1 FROM oncekey_lock WHERE number = {lock.number} FOR UPDATE")
    tx = driver.begin()
    assert tx.run(STORE.locks.locking(lock, claim)).got
    with pytest.raises(pymysql.OperationalError, match=r"1205|3572"):
        session.execute(f"SELECT 1 FROM oncekey_lock WHERE number = {lock.number} FOR UPDATE NOWAIT")
    tx.rollback()


def test_a_lease_that_waited_for_a_lock_ends_earlier_and_never_later(driver, session):
    """The clock of a sentence stands still while it waits, so who renews is given the time from when it asked."""
    record = claimed(driver, "waits")
    began = asked(session, CLOCK)
    session.execute("START TRANSACTION")
    session.execute("SELECT 1 FROM oncekey_record FOR UPDATE")
    until: list[int | None] = []
    renewing = threading.Thread(
        target=lambda: until.append(drive(STORE.renew(Lease.of(record), HOUR // 2), driver.run))
    )
    renewing.start()
    wait_until(lambda: int(asked(session, WAITS)) == 1)
    released = asked(session, CLOCK)
    session.execute("COMMIT")
    renewing.join()
    assert until[0] is not None
    assert began <= until[0] - HOUR // 2 < released


def test_transaction_is_rolled_back_and_repeated_after_a_deadlock(driver, session):
    """1213, unlike 1205, leaves nothing: the second try finds its place free, and its writes are there once."""
    records = [claimed(driver, "one"), claimed(driver, "two")]
    one, two = (f"scope = '{record.id.scope}' AND `key` = '{record.id.key}'" for record in records)
    tries: list[int] = []

    def body():
        tries.append(len(tries))
        yield Statement("first", "INSERT INTO oncekey_lock (number, mark) VALUES (1, 1)")
        yield Statement("second", f"UPDATE oncekey_record SET version = version + 1 WHERE {two}")
        yield Statement("third", f"UPDATE oncekey_record SET version = version + 1 WHERE {one}")

    session.execute("START TRANSACTION")
    # InnoDB lets the one live that has written more.
    session.executemany(
        "INSERT INTO oncekey_lock (number, mark) VALUES (%s, %s)", [(number, 1) for number in range(1000, 1100)]
    )
    session.execute(f"SELECT 1 FROM oncekey_record WHERE {one} FOR UPDATE")
    victim = threading.Thread(target=lambda: driver.run(Transaction("both", Mode.ATOMIC, body)))
    victim.start()
    wait_until(lambda: int(asked(session, WAITS)) == 1)
    session.execute(f"SELECT 1 FROM oncekey_record WHERE {two} FOR UPDATE")
    session.execute("ROLLBACK")
    victim.join()
    assert len(tries) == 2
    assert asked(session, "SELECT count(*) FROM oncekey_lock") == 1
    found = [drive(STORE.find(record.id), driver.run).record for record in records]
    assert [record.version for record in found] == [record.version + 1 for record in records]
