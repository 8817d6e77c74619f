"""The blocking SQLite driver: modes, durability, and what goes wrong."""

from __future__ import annotations

import logging
import os
import signal
import sqlite3
import subprocess
import sys
import textwrap

import pytest

from drivers.speaking import ALL_ITEMS, a_stranger, insert, items, saying
from oncekey.core.errors import ConfigurationError, SchemaError, StoreError, StoreUnavailableError
from oncekey.core.flow import Mode, Statement, Transaction
from oncekey.databases.memory import MemoryDriver
from oncekey.databases.sqlite import files as sqlite_files
from oncekey.databases.sqlite.blocking import SqliteDriver
from oncekey.databases.sqlite.files import wal_is_safe
from oncekey.ports.store import Shares


@pytest.fixture
def driver(path, module):
    driver = SqliteDriver(path, busy_timeout=0.05, module=module)
    yield driver
    driver.close()


def test_driver_shares_application_transactions(driver):
    assert isinstance(driver, Shares)
    assert not isinstance(MemoryDriver(), Shares)


def test_sqlite_rows_are_accessed_by_column_name(driver):
    def body():
        rows = yield Statement("one", "SELECT 1 AS a, :b AS b", {"b": "x", "unused": 3})
        return rows[0]["a"], rows[0]["b"]

    assert driver.run(Transaction("one", Mode.READ, body)) == (1, "x")


def test_single_statements_commit_one_by_one(driver):
    with pytest.raises(StoreError):
        driver.run(saying(Mode.SINGLE, insert("tea"), insert("tea")))

    assert items(driver) == ["tea"]


def test_atomic_statements_commit_together_or_not_at_all(driver):
    driver.run(saying(Mode.ATOMIC, insert("tea"), insert("milk")))
    with pytest.raises(StoreError):
        driver.run(saying(Mode.ATOMIC, insert("sugar"), insert("tea")))

    assert items(driver) == ["tea", "milk"]


def test_exception_in_a_transaction_body_rolls_back(driver):
    def body():
        yield Statement("insert", *insert("tea"))
        raise LookupError("a bug of the caller's")

    with pytest.raises(LookupError):
        driver.run(Transaction("buggy", Mode.ATOMIC, body))

    assert items(driver) == []


def test_commits_are_durable_and_wal_is_used_only_if_safe(driver, module):
    ((mode,),), ((synchronous,),) = driver.run(saying(Mode.READ, "PRAGMA journal_mode", "PRAGMA synchronous"))

    assert mode == ("wal" if wal_is_safe(module.sqlite_version_info) else "persist")
    assert synchronous == 2  # FULL


def test_unsafe_sqlite_version_is_logged_once(tmp_path, module, caplog, monkeypatch):
    caplog.set_level(logging.INFO, logger="oncekey")
    monkeypatch.setattr(sqlite_files, "_warned", set())
    monkeypatch.setattr(sqlite_files, "wal_is_safe", lambda _: False)
    for name in ("a.db", "b.db"):
        driver = SqliteDriver(tmp_path / name, module=module)
        driver.run(saying(Mode.READ, "SELECT 1"))
        driver.close()

    assert [record.levelno for record in caplog.records] == [logging.INFO]
    assert module.sqlite_version in caplog.text


def test_unsafe_sqlite_version_switches_the_file_off_wal(tmp_path, module, monkeypatch):
    path = tmp_path / "a.db"
    for safe, expected in ((True, "wal"), (False, "persist"), (True, "wal")):
        monkeypatch.setattr(sqlite_files, "wal_is_safe", lambda _, safe=safe: safe)
        driver = SqliteDriver(path, module=module)
        assert driver.run(saying(Mode.READ, "PRAGMA journal_mode")) == [[(expected,)]]
        driver.close()


def test_unsafe_sqlite_version_rejects_a_wal_in_use(tmp_path, module, monkeypatch):
    monkeypatch.setattr(sqlite_files, "wal_is_safe", lambda _: True)
    other = SqliteDriver(tmp_path / "a.db", module=module)
    other.run(saying(Mode.SINGLE, "CREATE TABLE t (x)"))
    monkeypatch.setattr(sqlite_files, "wal_is_safe", lambda _: False)
    driver = SqliteDriver(tmp_path / "a.db", busy_timeout=0.02, module=module)

    with pytest.raises(StoreUnavailableError, match=r"pip install 'oncekey\[sqlite\]'"):
        driver.run(saying(Mode.READ, "SELECT 1"))

    other.close()
    driver.close()


def test_standard_library_sqlite_is_the_default(tmp_path):
    assert SqliteDriver(tmp_path / "a.db").begin().error_class("Error") is sqlite3.Error


def test_repaired_sqlite_module_must_be_installed_and_recent(monkeypatch):
    import pysqlite3.dbapi2

    assert sqlite_files.repaired_module() is pysqlite3.dbapi2
    monkeypatch.setattr(pysqlite3.dbapi2, "sqlite_version_info", (3, 51, 1))
    with pytest.raises(ConfigurationError, match="not repaired"):
        sqlite_files.repaired_module()
    monkeypatch.setitem(sys.modules, "pysqlite3.dbapi2", None)
    with pytest.raises(ConfigurationError, match=r"pip install 'oncekey\[sqlite\]'"):
        sqlite_files.repaired_module()


def test_in_memory_database_is_rejected(module):
    with pytest.raises(ConfigurationError, match="file"):
        SqliteDriver(":memory:", module=module)


# What goes wrong


def test_another_writer_that_does_not_end_is_an_outage(driver, path, module):
    other = a_stranger(path, module)

    with pytest.raises(StoreUnavailableError, match="SQLITE_BUSY"):
        driver.run(saying(Mode.SINGLE, insert("milk")))
    with pytest.raises(StoreUnavailableError, match="SQLITE_BUSY"):
        driver.run(saying(Mode.ATOMIC, insert("milk")))
    other.close()

    assert items(driver) == []


def test_a_writer_of_the_same_driver_that_does_not_end_is_an_outage(driver):
    other = driver.begin()
    other.connection.execute("INSERT INTO orders (item) VALUES ('tea')")

    with pytest.raises(StoreUnavailableError, match="too long"):
        driver.run(saying(Mode.SINGLE, insert("milk")))
    other.rollback()
    driver.run(saying(Mode.SINGLE, insert("sugar")))

    assert items(driver) == ["sugar"]


def test_missing_folder_raises_store_unavailable(tmp_path, module):
    driver = SqliteDriver(tmp_path / "nowhere" / "a.db", module=module)

    with pytest.raises(StoreUnavailableError, match="cannot be opened"):
        driver.run(ALL_ITEMS)


def test_file_that_is_not_a_database_raises_store_unavailable(tmp_path, module):
    path = tmp_path / "a.db"
    path.write_bytes(b"nothing that SQLite ever wrote" * 100)

    with pytest.raises(StoreUnavailableError, match="not a SQLite database"):
        SqliteDriver(path, module=module).run(ALL_ITEMS)


def test_a_damaged_file_is_an_outage(path, module):
    content = path.read_bytes()
    path.write_bytes(content[:4096] + b"\x55" * (len(content) - 4096))
    driver = SqliteDriver(path, module=module)

    with pytest.raises(StoreUnavailableError, match="damaged"):
        driver.run(saying(Mode.READ, "SELECT * FROM oncekey_record"))
    driver.close()


def test_a_full_disk_is_an_outage_and_nothing_of_the_transaction_happened(driver):
    with driver._file.lent() as connection:
        connection.execute("PRAGMA max_page_count = 1").fetchall()

    with pytest.raises(StoreUnavailableError, match="full"):
        driver.run(saying(Mode.ATOMIC, insert("tea"), insert("x" * 100_000)))

    assert items(driver) == []


def test_a_file_that_was_moved_away_is_an_outage(tmp_path, module, monkeypatch):
    monkeypatch.setattr(sqlite_files, "wal_is_safe", lambda _: False)
    path = tmp_path / "a.db"
    driver = SqliteDriver(path, module=module)
    driver.run(saying(Mode.SINGLE, "CREATE TABLE orders (item)"))
    path.rename(tmp_path / "b.db")

    for _ in range(2):
        with pytest.raises(StoreUnavailableError, match="deleted or moved away"):
            driver.run(saying(Mode.SINGLE, insert("tea")))
    assert not path.exists()
    driver.close()


WRITES_TOO_MUCH = """
    import resource, sys
    from importlib import import_module
    from oncekey.core.errors import StoreUnavailableError
    from oncekey.databases.sqlite.blocking import SqliteDriver
    from drivers.speaking import a_stranger, insert, items, saying
    from oncekey.core.flow import Mode

    driver = SqliteDriver(sys.argv[1], module=import_module(sys.argv[2]))
    driver.run(saying(Mode.SINGLE, insert("tea")))
    resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, 200_000))
    try:
        driver.run(saying(Mode.SINGLE, insert("x" * 1_000_000)))
    except StoreUnavailableError as error:
        print(error)
    print(items(driver))
"""


def test_a_disk_that_fails_is_an_outage(path, module):
    answer = in_process(WRITES_TOO_MUCH, str(path), module.__name__)

    assert "the disk failed" in answer
    assert answer.endswith("['tea']\n")


def test_missing_tables_are_an_error_of_the_schema(driver):
    for sql in ("SELECT * FROM nowhere", "SELECT missing FROM orders", "INSERT INTO orders (missing) VALUES (1)"):
        with pytest.raises(SchemaError, match="oncekey migrate up"):
            driver.run(saying(Mode.SINGLE, sql))


SECRET = "4111111111111111"


@pytest.mark.parametrize(
    ("sql", "value"),
    [
        ("INSERT INTO orders (item) VALUES (:value)", SECRET),
        ("INSERT INTO orders (id, item) VALUES (:value, 'x')", int(SECRET) ** 3),
        ("INSERT INTO orders (item) VALUES (:value)", SECRET + "\ud800"),
        ("INSERT INTO orders (item) VALUES (:value); SELECT 1", SECRET),
        ("INSERT INTO orders (item) VALUES (:value, :nothing)", SECRET),
    ],
)
def test_no_error_repeats_a_value(driver, sql, value):
    driver.run(saying(Mode.SINGLE, insert(SECRET)))

    with pytest.raises(StoreError) as caught:
        driver.run(saying(Mode.SINGLE, (sql, {"value": value})))

    assert SECRET not in str(caught.value)
    assert SECRET not in repr(caught.value.__cause__)


def test_closed_driver_raises_store_unavailable(driver):
    driver.close()

    with pytest.raises(StoreUnavailableError, match="closed"):
        driver.run(ALL_ITEMS)


def test_failed_connection_is_not_reused(driver):
    with pytest.raises(SchemaError):
        driver.run(saying(Mode.SINGLE, "BEGIN IMMEDIATE", "SELECT * FROM nowhere"))

    driver.run(saying(Mode.SINGLE, insert("tea")))
    assert items(driver) == ["tea"]


def test_connections_are_used_again(driver):
    with driver._file.lent() as first:
        pass
    with driver._file.lent() as second:
        pass

    assert first is second


def test_a_child_process_does_not_use_its_parents_connections(driver, monkeypatch):
    with driver._file.lent() as parents:
        pass
    monkeypatch.setattr(sqlite_files.os, "getpid", lambda: -1)

    with driver._file.lent() as own:
        assert own is not parents
    assert parents.execute("SELECT 1").fetchone()[0] == 1  # and leaves them open
    parents.close()
    sqlite_files._inherited.remove(parents)


# What was acknowledged is there


def test_committed_rows_survive_a_restart(path, module):
    for item in ("tea", "milk"):
        driver = SqliteDriver(path, module=module)
        driver.run(saying(Mode.SINGLE, insert(item)))
        driver.close()

    driver = SqliteDriver(path, module=module)
    assert items(driver) == ["tea", "milk"]
    driver.close()


WRITES_UNTIL_KILLED = """
    import itertools, sys
    from importlib import import_module
    from oncekey.databases.sqlite.blocking import SqliteDriver
    from drivers.speaking import a_stranger, insert, saying
    from oncekey.core.flow import Mode

    driver = SqliteDriver(sys.argv[1], module=import_module(sys.argv[2]))
    for number in itertools.count():
        driver.run(saying(Mode.ATOMIC if number % 2 else Mode.SINGLE, insert(f"{number} " + "x" * 5000)))
        print(number, flush=True)
"""


def test_killed_process_keeps_acknowledged_commits(path, module):
    command = [sys.executable, "-c", textwrap.dedent(WRITES_UNTIL_KILLED), str(path), module.__name__]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment()) as process:
        for _ in range(60):
            process.stdout.readline()
        process.send_signal(signal.SIGKILL)
        rest = process.stdout.read().split()
    acknowledged = 60 + len(rest)

    driver = SqliteDriver(path, module=module)
    kept = items(driver)
    assert [int(item.split()[0]) for item in kept] == list(range(len(kept)))
    assert acknowledged <= len(kept) <= acknowledged + 1  # the last one may be in without having been told
    assert driver.run(saying(Mode.READ, "PRAGMA integrity_check")) == [[("ok",)]]
    driver.close()


def in_process(script: str, *arguments: str) -> str:
    command = [sys.executable, "-c", textwrap.dedent(script), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True, env=environment()).stdout


def environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": os.pathsep.join(part for part in sys.path if part)}
