"""The driver for blocking SQLAlchemy engines, on PostgreSQL by way of psycopg and on SQLite."""

from __future__ import annotations

import os
import threading
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psycopg
import pytest
from sqlalchemy import Engine, create_engine, event, text
from sqlalchemy.exc import IntegrityError, OperationalError
from sqlalchemy.orm import Session
from sqlalchemy.pool import NullPool, StaticPool

from drivers.speaking import insert, items, saying
from harness.databases import DatabaseServer
from harness.dsn import through
from harness.patience import PATIENCE, wait_until
from harness.proxy import Proxy
from oncekey.core.errors import (
    CommitAmbiguousError,
    ConfigurationError,
    SchemaError,
    StoreBusyError,
    StoreError,
    StoreUnavailableError,
    TransactionControlError,
)
from oncekey.core.flow import Body, Mode, Statement, Transaction
from oncekey.databases.handler_sql import LEFT_BEHIND
from oncekey.databases.postgres.store import PostgresStore
from oncekey.databases.sqlalchemy.blocking import BorrowedEngine
from oncekey.databases.sqlalchemy.errors import BROKEN, ENDED, FAILURES
from oncekey.databases.sqlalchemy.generated.driver import BlockingSqlalchemyDriver
from oncekey.databases.sqlite.store import SqliteStore
from oncekey.once import Once
from oncekey.wire import connect_to

NOWHERE = "postgresql+psycopg://nobody@127.0.0.1:1/nothing"
TABLE = "CREATE TABLE orders (id {key} PRIMARY KEY, item text NOT NULL UNIQUE {late})"
ADD = text("INSERT INTO orders (item) VALUES (:item)")


@pytest.fixture(scope="module")
def database(postgres_server: DatabaseServer) -> Iterator[str]:
    """One database for all tests of this module, which each find its table empty."""
    name = f"blocking_{uuid.uuid4().hex}"
    dsn = postgres_server.create_database(name)
    with psycopg.connect(dsn, autocommit=True) as connection:
        connection.execute(TABLE.format(key="serial", late="DEFERRABLE INITIALLY IMMEDIATE").encode())
    yield dsn
    postgres_server.drop_database(name)


@pytest.fixture
def dsn(database: str) -> str:
    with psycopg.connect(database, autocommit=True) as connection:
        connection.execute("TRUNCATE orders")
    return database


@pytest.fixture(params=["postgresql", "sqlite"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """A database of either kind with the table."""
    if request.param == "postgresql":
        found: str = request.getfixturevalue("dsn")
        return engine_url(found)
    url = f"sqlite:///{tmp_path}/shop.db"
    engine = create_engine(url)
    with engine.begin() as connection:
        connection.execute(text(TABLE.format(key="INTEGER", late="")))
    engine.dispose()
    return url


def engine_url(dsn: str) -> str:
    return dsn.replace("postgresql:", "postgresql+psycopg:")


@contextmanager
def driving(url: str, **options: Any) -> Iterator[tuple[BlockingSqlalchemyDriver, Engine]]:
    """A driver; at the end all connections must be back."""
    engine = create_engine(url, **options)
    driver = BlockingSqlalchemyDriver(engine)
    try:
        yield driver, engine
        driver.close()
        assert getattr(engine.pool, "checkedout", int)() == 0
    finally:
        engine.dispose()


def steps(sql: str, **params: Any) -> Body[Any]:
    rows = yield Statement("test", sql, params)
    return [dict(row) for row in rows]


@pytest.mark.parametrize("mode", [Mode.SINGLE, Mode.ATOMIC])
def test_statements_are_committed(url: str, mode: Mode) -> None:
    with driving(url) as (driver, _):
        driver.run(saying(mode, insert("tea"), insert("milk")))
        assert items(driver) == ["tea", "milk"]


def test_atomic_is_all_or_nothing_and_single_is_not(url: str) -> None:
    with driving(url) as (driver, _):
        for mode in (Mode.ATOMIC, Mode.SINGLE):
            with pytest.raises(StoreError, match=r"23505|CONSTRAINT"):
                driver.run(saying(mode, insert("tea"), insert("tea")))
        assert items(driver) == ["tea"]


def test_first_read_belongs_to_the_atomic_transaction(url: str) -> None:
    # ATOMIC on SQLite: nobody writes between a look and the change that follows from it
    with driving(url) as (driver, engine):
        other = create_engine(url, connect_args={"timeout": 0} if "sqlite" in url else {})
        tried: list[bool] = []

        def body() -> Body[None]:
            yield Statement("count", "SELECT count(*) FROM orders")
            with suppress(Exception), other.begin() as connection:
                connection.execute(ADD, {"item": "theirs"})
                tried.append(True)
            yield Statement("insert", "INSERT INTO orders (item) VALUES ('ours')")

        driver.run(Transaction("test", Mode.ATOMIC, body))
        assert tried == ([] if "sqlite" in url else [True])
        other.dispose()
        assert engine.pool.checkedout() == 0


@pytest.mark.parametrize("sql", ["SELECT * FROM missing", "SELECT missing FROM orders"])
def test_errors_map_to_store_errors(url: str, sql: str) -> None:
    with driving(url) as (driver, _):
        with pytest.raises(SchemaError):
            driver.run(saying(Mode.SINGLE, sql))
        tx = driver.begin()
        with pytest.raises(SchemaError):
            tx.run(steps(sql))
        tx.rollback()


def test_unreachable_server_is_unavailable() -> None:
    with driving(NOWHERE) as (driver, _):
        with pytest.raises(StoreUnavailableError):
            driver.run(saying(Mode.SINGLE, "SELECT 1"))
        with pytest.raises(StoreUnavailableError):
            driver.begin()


def test_serialization_failures_are_retried(dsn: str) -> None:
    # R64, E5
    tries = 0

    def body() -> Body[None]:
        nonlocal tries
        tries += 1
        yield Statement("strict", "SET TRANSACTION ISOLATION LEVEL SERIALIZABLE")
        yield Statement("count", "SELECT count(*) FROM orders")
        if tries == 1:
            with psycopg.connect(dsn, autocommit=True) as other:
                other.execute("SET default_transaction_isolation = 'serializable'")
                other.execute("INSERT INTO orders (item) SELECT 'other' || count(*) FROM orders")
        yield Statement("insert", "INSERT INTO orders (item) SELECT 'ours' || count(*) FROM orders")

    with driving(engine_url(dsn)) as (driver, _):
        driver.run(Transaction("test", Mode.ATOMIC, body))
        assert (tries, items(driver)) == (2, ["other0", "ours1"])


def test_store_transactions_are_read_committed(dsn: str) -> None:
    # whatever level the application's engine has
    with driving(engine_url(dsn), isolation_level="REPEATABLE READ") as (driver, _):
        ((level,),) = driver.run(saying(Mode.ATOMIC, "SHOW transaction_isolation"))
        assert level == ("read committed",)
        tx = driver.begin()
        assert tx.connection.scalar(text("SHOW transaction_isolation")) == "repeatable read"
        tx.rollback()


def test_lost_connection_error_depends_on_the_operation(dsn: str) -> None:
    # P7, F8
    with Proxy.before(dsn) as proxy, driving(engine_url(through(dsn, proxy.port))) as (driver, _):
        lost = proxy.lose_reply(b"SELECT item")
        assert items(driver) == []  # a read is said again
        assert lost.is_set()
        proxy.lose_reply(b"single", b"INSERT 0 1")
        with pytest.raises(CommitAmbiguousError):
            driver.run(saying(Mode.SINGLE, insert("single")))
        lost = proxy.lose_reply(b"atomic", b"INSERT 0 1")
        driver.run(saying(Mode.ATOMIC, insert("atomic")))  # never committed, so it is said again
        assert lost.is_set()
        proxy.lose_reply(b"COMMIT\0", b"COMMIT")
        with pytest.raises(CommitAmbiguousError):
            driver.run(saying(Mode.ATOMIC, insert("commit")))
        tx = driver.begin()
        tx.connection.execute(ADD, {"item": "business"})
        proxy.lose_reply(b"COMMIT\0", b"COMMIT")
        with pytest.raises(CommitAmbiguousError):
            tx.commit()
        assert items(driver) == ["single", "atomic", "commit", "business"]


def test_business_transaction_commits_or_rolls_back(url: str) -> None:
    with driving(url) as (driver, engine):
        for item, end in (("tea", "commit"), ("milk", "rollback")):
            tx = driver.begin()
            tx.connection.execute(ADD, {"item": item})
            assert tx.run(steps("SELECT count(*) AS n FROM orders")) == [{"n": 1 if item == "tea" else 2}]
            getattr(tx, end)()
            tx.rollback()  # what is over stays as it is
            assert engine.pool.checkedout() == 0
            for late in (lambda tx=tx: tx.run(steps("SELECT 1")), tx.commit):
                with pytest.raises(TransactionControlError, match="over"):
                    late()
        assert items(driver) == ["tea"]


def test_handler_connection_cannot_end_the_transaction(url: str) -> None:
    # L5, F16
    with driving(url) as (driver, _):
        tx = driver.begin()
        connection = tx.connection
        connection.execute(ADD, {"item": "tea"})
        for name in ("commit", "rollback", "close", "invalidate", "detach", "begin", "__enter__"):
            with pytest.raises(TransactionControlError, match="ended by oncekey"):
                getattr(connection, name)()
        with pytest.raises(TransactionControlError, match="isolation_level"):
            connection.execution_options(isolation_level="AUTOCOMMIT")
        for sql in ("COMMIT", "/* x */ ROLLBACK", "BEGIN", "end"):
            with pytest.raises(TransactionControlError):
                connection.execute(text(sql))
            with pytest.raises(TransactionControlError):
                connection.exec_driver_sql(sql)
        with connection.begin_nested():
            connection.execute(ADD, {"item": "milk"})
        tx.commit()
        assert items(driver) == ["tea", "milk"]


@pytest.mark.parametrize("how", ["transaction", "session"])
def test_commit_that_bypasses_oncekey_is_rolled_back(url: str, how: str) -> None:
    # F16: and the connection that goes back has no open transaction
    with driving(url, pool_size=2, max_overflow=0, pool_reset_on_return=None) as (driver, engine):
        tx = driver.begin()
        tx.connection.execute(ADD, {"item": "tea"})
        session = Session(tx.connection, join_transaction_mode="control_fully")
        session.execute(text("SELECT 1"))
        root: Any = tx.connection.get_transaction()
        with pytest.raises(TransactionControlError, match=r"commit\(\)"):
            {"transaction": root.commit, "session": session.commit}[how]()
        with pytest.raises(TransactionControlError) as caught:
            tx.run(steps("SELECT 1"))
        assert str(caught.value) == ENDED
        tx.rollback()
        with engine.connect() as one, engine.connect() as two:
            for connection in (one, two):
                assert connection.scalar(text("SELECT count(*) FROM orders")) == 0


def test_application_session_joins_the_transaction(url: str) -> None:
    with driving(url) as (driver, _):
        for end in ("rollback", "commit"):
            tx = driver.begin()
            with Session(tx.connection) as session:
                session.execute(ADD, {"item": end})
                session.commit()
            getattr(tx, end)()
        assert items(driver) == ["commit"]


def test_a_transaction_that_failed_is_not_committed(dsn: str) -> None:
    # F20: PostgreSQL answers ROLLBACK to its COMMIT, and nobody would hear it
    with driving(engine_url(dsn)) as (driver, _):
        tx = driver.begin()
        tx.connection.execute(ADD, {"item": "tea"})
        with suppress(IntegrityError):
            tx.connection.execute(ADD, {"item": "tea"})
        with pytest.raises(TransactionControlError) as caught:
            tx.commit()
        assert (str(caught.value), items(driver)) == (BROKEN, [])


@pytest.mark.parametrize("first", ["savepoint", "with"])
def test_first_statement_of_a_handler_is_rolled_back(url: str, first: str) -> None:
    # SQLite's own module begins no transaction before either of them, and what it then ends is committed
    with driving(url) as (driver, _):
        tx = driver.begin()
        if first == "savepoint":
            with tx.connection.begin_nested():
                tx.connection.execute(ADD, {"item": "tea"})
        else:
            tx.connection.execute(
                text("WITH one AS (SELECT 'tea' AS item) INSERT INTO orders (item) SELECT * FROM one")
            )
        tx.rollback()
        assert items(driver) == []


def test_locked_sqlite_file_raises_to_the_handler(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/shop.db"
    with driving(url, connect_args={"timeout": 0.05}) as (driver, engine):
        driver.run(saying(Mode.ATOMIC, TABLE.format(key="INTEGER", late="")))
        with engine.connect() as other:
            other.exec_driver_sql("BEGIN IMMEDIATE")
            tx = driver.begin()
            with pytest.raises(OperationalError, match="locked"):
                tx.connection.execute(ADD, {"item": "tea"})
            with pytest.raises(StoreBusyError):
                tx.run(steps("INSERT INTO orders (item) VALUES ('tea') RETURNING id"))
        tx.run(steps("INSERT INTO orders (item) VALUES ('milk') RETURNING id"))
        tx.commit()
        assert items(driver) == ["milk"]


def test_failure_undone_by_a_savepoint_can_commit(url: str) -> None:
    with driving(url) as (driver, _):
        tx = driver.begin()
        tx.connection.execute(ADD, {"item": "tea"})
        with suppress(IntegrityError), tx.connection.begin_nested():
            tx.connection.execute(ADD, {"item": "tea"})
        tx.commit()
        assert items(driver) == ["tea"]


def test_an_error_at_the_commit_is_definite(dsn: str) -> None:
    # F20
    with driving(engine_url(dsn)) as (driver, _):
        tx = driver.begin()
        tx.connection.execute(text("SET CONSTRAINTS ALL DEFERRED"))
        for _ in range(2):
            tx.connection.execute(ADD, {"item": "tea"})
        with pytest.raises(StoreError, match="23505") as caught:
            tx.commit()
        assert not isinstance(caught.value, CommitAmbiguousError)
        assert items(driver) == []


def test_a_connection_that_died_under_the_handler_is_unavailable(dsn: str) -> None:
    with driving(engine_url(dsn)) as (driver, engine):
        tx = driver.begin()
        pid = tx.connection.scalar(text("SELECT pg_backend_pid()"))
        with engine.connect() as other:
            other.execute(text("SELECT pg_terminate_backend(:pid)"), {"pid": pid})
        with pytest.raises(StoreUnavailableError):
            tx.run(steps("SELECT 1"))
        tx.rollback()
        tx = driver.begin()
        pid = tx.connection.scalar(text("SELECT pg_backend_pid()"))
        with engine.connect() as other:
            other.execute(text("SELECT pg_terminate_backend(:pid)"), {"pid": pid})
        with suppress(*FAILURES):
            tx.connection.scalar(text("SELECT 1"))
        with pytest.raises((StoreError, TransactionControlError)):
            tx.commit()


def test_session_settings_do_not_reach_the_next_handler(dsn: str) -> None:
    # X12: and what the application set for each connection is set again
    with driving(engine_url(dsn), pool_size=2, max_overflow=0) as (driver, engine):

        @event.listens_for(engine, "connect")
        def prepared(raw: Any, _: object) -> None:
            raw.execute("SET application_name = 'shop'")
            raw.commit()

        for _ in range(2):
            tx = driver.begin()
            found = tx.connection.scalar(text("SELECT current_setting('shop.left', true)"))
            assert not found
            tx.connection.execute(text("SELECT set_config('shop.left', 'behind', false)"))
            with pytest.raises(TransactionControlError, match="SET LOCAL"):
                tx.connection.execute(text("SET shop.left = 'behind'"))
            assert tx.connection.scalar(text("SHOW application_name")) == "shop"
            tx.commit()


def test_temporary_table_does_not_reach_the_next_handler(url: str) -> None:
    with driving(url, pool_size=2, max_overflow=0) as (driver, _):
        for _ in range(2):
            tx = driver.begin()
            tx.connection.execute(text("CREATE TEMPORARY TABLE mine (x integer)"))
            tx.commit()


@pytest.mark.parametrize(("size", "overflow", "places"), [(2, 0, 1), (5, 0, 4), (5, 10, 12)])
def test_a_fifth_of_the_pool_is_kept_free(dsn: str, size: int, overflow: int, places: int) -> None:
    with driving(engine_url(dsn), pool_size=size, max_overflow=overflow, pool_timeout=0.05) as (driver, _):
        open_ones = [driver.begin() for _ in range(places)]
        assert driver.is_full
        with pytest.raises(StoreUnavailableError, match="in use"):
            driver.begin()
        assert items(driver) == []  # claims and heartbeats still have theirs
        for tx in open_ones:
            tx.rollback()
        assert not driver.is_full


def test_failed_begin_takes_no_slot(dsn: str) -> None:
    with driving(engine_url(dsn), pool_size=2, max_overflow=0, pool_timeout=0.05) as (driver, engine):

        @event.listens_for(engine, "begin")
        def fails(connection: Any) -> None:
            connection.exec_driver_sql("SELECT missing")

        for _ in range(3):
            with pytest.raises(SchemaError):
                driver.begin()
        assert not driver.is_full


@pytest.mark.parametrize("pool", [{"poolclass": NullPool}, {"max_overflow": -1}])
def test_unlimited_pool_has_no_slot_limit(dsn: str, pool: dict[str, Any]) -> None:
    with driving(engine_url(dsn), **pool) as (driver, _):
        for tx in [driver.begin() for _ in range(9)]:
            tx.rollback()


@pytest.mark.parametrize("pool", [{"pool_size": 1, "max_overflow": 0}, {"poolclass": StaticPool}])
def test_a_pool_of_one_is_refused(pool: dict[str, Any]) -> None:
    with pytest.raises(ConfigurationError, match=r"create_engine.*pool_size=2"):
        BlockingSqlalchemyDriver(create_engine(NOWHERE, **pool))


def test_autocommit_engine_is_rejected(dsn: str) -> None:
    with driving(engine_url(dsn), isolation_level="AUTOCOMMIT") as (driver, _):
        with pytest.raises(ConfigurationError, match="AUTOCOMMIT"):
            driver.begin()
        driver.run(saying(Mode.SINGLE, insert("tea")))


def test_a_thread_that_was_left_behind_is_not_committed(dsn: str, monkeypatch: pytest.MonkeyPatch) -> None:
    # its statement is under way when the transaction is to be ended
    monkeypatch.setattr("oncekey.databases.sqlalchemy.handler_connection.PATIENCE", 0.05)
    with driving(engine_url(dsn)) as (driver, engine):
        tx = driver.begin()
        tx.connection.execute(ADD, {"item": "tea"})

        def lingers() -> None:
            with suppress(Exception):
                tx.connection.execute(text("SELECT pg_sleep(60)"))

        left = threading.Thread(target=lingers)
        left.start()
        wait_until(lambda: bool(tx.connection.watch.running), "nothing is under way")
        with pytest.raises(TransactionControlError) as caught:
            tx.commit()
        assert str(caught.value) == LEFT_BEHIND
        left.join(PATIENCE)
        assert not left.is_alive()
        assert (items(driver), engine.pool.checkedout()) == ([], 0)


def test_forked_process_opens_its_own_connections(dsn: str) -> None:
    engine = create_engine(engine_url(dsn), pool_size=2, max_overflow=0)
    borrowed = BorrowedEngine(engine)
    asks = text("SELECT pg_backend_pid()")
    with engine.connect() as connection:
        ours = connection.scalar(asks)
    reads, writes = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            with engine.connect() as connection:
                os.write(writes, str(connection.scalar(asks)).encode())
        finally:
            os._exit(0)
    os.waitpid(child, 0)
    theirs = int(os.read(reads, 100))
    with engine.connect() as connection:
        assert connection.scalar(asks) == ours
    assert theirs != ours
    assert borrowed.engines == (engine,)
    engine.dispose()


def test_the_store_is_chosen_by_the_dialect() -> None:
    for url, kind in ((NOWHERE, PostgresStore), ("sqlite:///unused.db", SqliteStore)):
        once = Once(create_engine(url))
        assert isinstance(connect_to(once.store).store, kind)


def test_other_databases_and_drivers_are_refused() -> None:
    with pytest.raises(ConfigurationError, match=r"mysql\+pymysql.*postgresql\+psycopg"):
        Once(create_engine("mysql+pymysql://nobody@127.0.0.1/nothing"))
