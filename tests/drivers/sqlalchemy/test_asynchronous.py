"""The driver for SQLAlchemy engines, on PostgreSQL by way of asyncpg and of psycopg."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, suppress
from typing import Any

import psycopg
import pytest
from sqlalchemy import create_engine, event, text
from sqlalchemy.exc import IntegrityError
from sqlalchemy.ext.asyncio import AsyncEngine, AsyncSession, create_async_engine
from sqlalchemy.pool import NullPool, StaticPool

from drivers.speaking import insert, saying
from harness.asgi import until
from harness.databases import DatabaseServer
from harness.dsn import through
from harness.proxy import Proxy
from oncekey.core.errors import (
    CommitAmbiguousError,
    ConfigurationError,
    SchemaError,
    StoreError,
    StoreUnavailableError,
    TransactionControlError,
)
from oncekey.core.flow import Body, Mode, Statement, Transaction
from oncekey.databases.postgres.store import PostgresStore
from oncekey.databases.sqlalchemy.asynchronous import SqlalchemyDriver, SqlalchemyTransaction
from oncekey.databases.sqlalchemy.errors import BROKEN, ENDED, FAILURES
from oncekey.databases.sqlite.store import SqliteStore
from oncekey.once import Once
from oncekey.wire.given import aconnect_sqlalchemy

DIALECTS = ("asyncpg", "psycopg")
COMMIT = {"asyncpg": b"COMMIT;", "psycopg": b"COMMIT\0"}
NOWHERE = "postgresql+psycopg://nobody@127.0.0.1:1/nothing"

each_dialect = pytest.mark.parametrize("dialect", DIALECTS)


@pytest.fixture(scope="module")
def database(postgres_server: DatabaseServer) -> Iterator[str]:
    """One database for all tests of this module, which each find its table empty."""
    name = f"sqlalchemy_{uuid.uuid4().hex}"
    dsn = postgres_server.create_database(name)
    with psycopg.connect(dsn, autocommit=True) as connection:
        connection.execute(
            "CREATE TABLE orders (id serial PRIMARY KEY, item text NOT NULL UNIQUE DEFERRABLE INITIALLY IMMEDIATE)"
        )
    yield dsn
    postgres_server.drop_database(name)


@pytest.fixture
def dsn(database: str) -> str:
    with psycopg.connect(database, autocommit=True) as connection:
        connection.execute("TRUNCATE orders")
    return database


@asynccontextmanager
async def driving(dsn: str, dialect: str, **options: Any) -> AsyncIterator[tuple[SqlalchemyDriver, AsyncEngine]]:
    """A driver; at the end all connections must be back."""
    engine = create_async_engine(dsn.replace("postgresql:", f"postgresql+{dialect}:"), **options)
    driver = SqlalchemyDriver(engine)
    try:
        yield driver, engine
        await driver.close()
        assert getattr(engine.pool, "checkedout", int)() == 0
    finally:
        await engine.dispose()


async def items(driver: SqlalchemyDriver) -> list[str]:
    (rows,) = await driver.run(saying(Mode.READ, "SELECT item FROM orders ORDER BY id"))
    return [row[0] for row in rows]


def steps(sql: str, **params: Any) -> Body[Any]:
    rows = yield Statement("test", sql, params)
    return [dict(row) for row in rows]


@each_dialect
@pytest.mark.parametrize("mode", [Mode.SINGLE, Mode.ATOMIC])
async def test_statements_are_committed(dsn: str, dialect: str, mode: Mode) -> None:
    async with driving(dsn, dialect) as (driver, _):
        await driver.run(saying(mode, insert("tea"), insert("milk")))
        assert await items(driver) == ["tea", "milk"]


@each_dialect
async def test_atomic_is_all_or_nothing_and_single_is_not(dsn: str, dialect: str) -> None:
    async with driving(dsn, dialect) as (driver, _):
        for mode in (Mode.ATOMIC, Mode.SINGLE):
            with pytest.raises(StoreError, match="23505"):
                await driver.run(saying(mode, insert("tea"), insert("tea")))
        assert await items(driver) == ["tea"]


@each_dialect
async def test_placeholders_casts_and_colons_are_distinguished(dsn: str, dialect: str) -> None:
    async with driving(dsn, dialect) as (driver, _):
        sql = "SELECT :a::bigint + 1, ':b' || :b, '%', ':now'::text, 10 % 3, (ARRAY[1,2,3])[2:3]  -- see: :a or :c"
        ((row,),) = await driver.run(saying(Mode.READ, (sql, {"a": 2**40, "b": "x", "unused": None})))
        assert row == (2**40 + 1, ":bx", "%", ":now", 1, [2, 3])


@each_dialect
async def test_rows_answer_by_name(dsn: str, dialect: str) -> None:
    async with driving(dsn, dialect) as (driver, _):
        result = await driver.run(Transaction("test", Mode.READ, lambda: steps("SELECT 1 AS one, NULL AS none")))
        assert result == [{"one": 1, "none": None}]


@each_dialect
@pytest.mark.parametrize(
    ("sql", "kind"),
    [
        ("SELECT * FROM missing", SchemaError),
        ("SELECT * FROM oncekey.record", SchemaError),
        ("SELECT 1 / 0", StoreError),
    ],
)
async def test_errors_map_to_store_errors(dsn: str, dialect: str, sql: str, kind: type[StoreError]) -> None:
    async with driving(dsn, dialect) as (driver, _):
        with pytest.raises(kind) as caught:
            await driver.run(saying(Mode.SINGLE, sql))
        assert not isinstance(caught.value, CommitAmbiguousError)


@each_dialect
async def test_a_standby_is_unavailable(dsn: str, dialect: str) -> None:
    async with driving(dsn, dialect) as (driver, _):
        with pytest.raises(StoreUnavailableError, match="25006"):
            await driver.run(saying(Mode.ATOMIC, "SET TRANSACTION READ ONLY", insert("tea")))


@each_dialect
async def test_unreachable_server_is_unavailable(dialect: str) -> None:
    async with driving(NOWHERE.replace("+psycopg", ""), dialect) as (driver, _):
        with pytest.raises(StoreUnavailableError):
            await driver.run(saying(Mode.SINGLE, "SELECT 1"))
        with pytest.raises(StoreUnavailableError):
            await driver.begin()


@each_dialect
async def test_serialization_failures_are_retried(dsn: str, dialect: str) -> None:
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

    async with driving(dsn, dialect) as (driver, _):
        await driver.run(Transaction("test", Mode.ATOMIC, body))
        assert tries == 2
        assert await items(driver) == ["other0", "ours1"]


@each_dialect
async def test_a_conflict_without_end_is_an_outage(dsn: str, dialect: str) -> None:
    async with driving(dsn, dialect) as (driver, _):
        fails = "DO $$ BEGIN RAISE EXCEPTION 'no' USING ERRCODE = '40001'; END $$"
        with pytest.raises(StoreUnavailableError, match="40001"):
            await driver.run(saying(Mode.SINGLE, fails))


@each_dialect
async def test_lost_connection_error_depends_on_the_operation(dsn: str, dialect: str) -> None:
    # P7, F8
    with Proxy.before(dsn) as proxy:
        async with driving(through(dsn, proxy.port), dialect) as (driver, _):
            lost = proxy.lose_reply(b"SELECT item")
            assert await items(driver) == []  # a read is said again
            assert lost.is_set()

            # What is bound is sent when the statement is executed, also by a client that prepares it first.
            proxy.lose_reply(b"single", b"INSERT 0 1")
            with pytest.raises(CommitAmbiguousError):
                await driver.run(saying(Mode.SINGLE, insert("single")))

            lost = proxy.lose_reply(b"atomic", b"INSERT 0 1")
            await driver.run(saying(Mode.ATOMIC, insert("atomic")))  # never committed, so it is said again
            assert lost.is_set()

            proxy.lose_reply(COMMIT[dialect], b"COMMIT")
            with pytest.raises(CommitAmbiguousError):
                await driver.run(saying(Mode.ATOMIC, insert("commit")))
            assert await items(driver) == ["single", "atomic", "commit"]


@each_dialect
async def test_business_transaction_commits_or_rolls_back(dsn: str, dialect: str) -> None:
    async with driving(dsn, dialect) as (driver, engine):
        for item, end in (("tea", SqlalchemyTransaction.commit), ("milk", SqlalchemyTransaction.rollback)):
            tx = await driver.begin()
            await tx.connection.execute(text("INSERT INTO orders (item) VALUES (:item)"), {"item": item})
            assert await tx.run(steps("SELECT count(*) AS n FROM orders")) == [{"n": 1 if item == "tea" else 2}]
            await end(tx)
            await tx.rollback()  # what is over stays as it is
            assert engine.pool.checkedout() == 0
            with pytest.raises(TransactionControlError, match="over"):
                await tx.run(steps("SELECT 1"))
            with pytest.raises(TransactionControlError, match="over"):
                await tx.commit()
        assert await items(driver) == ["tea"]


@each_dialect
async def test_handler_connection_cannot_end_the_transaction(dsn: str, dialect: str) -> None:
    # L5, F16
    async with driving(dsn, dialect) as (driver, _):
        tx = await driver.begin()
        connection = tx.connection
        await connection.execute(text("INSERT INTO orders (item) VALUES ('tea')"))
        for name in ("commit", "rollback", "close", "aclose", "invalidate", "get_raw_connection", "__aenter__"):
            with pytest.raises(TransactionControlError, match="ended by oncekey"):
                await getattr(connection, name)()
        with pytest.raises(TransactionControlError, match=r"begin\(\)"):
            connection.begin()
        with pytest.raises(TransactionControlError, match="isolation_level"):
            await connection.execution_options(isolation_level="AUTOCOMMIT")
        for sql in ("COMMIT", "/* x */ ROLLBACK", "BEGIN", "ABORT", "SET TRANSACTION READ ONLY"):
            with pytest.raises(TransactionControlError):
                await connection.execute(text(sql))
            with pytest.raises(TransactionControlError):
                await connection.exec_driver_sql(sql)
            with pytest.raises(TransactionControlError):
                await tx.session.execute(text(sql))
        await connection.execution_options(stream_results=False)
        async with connection.begin_nested():
            await connection.execute(text("INSERT INTO orders (item) VALUES ('milk')"))
        await tx.commit()
        assert await items(driver) == ["tea", "milk"]


def commit_in(connection: Any) -> None:
    connection.get_transaction().commit()


@each_dialect
@pytest.mark.parametrize("how", ["run_sync", "transaction", "session"])
async def test_commit_that_bypasses_oncekey_is_rolled_back(dsn: str, dialect: str, how: str) -> None:
    # F16: and the connection that goes back has no open transaction
    async with driving(dsn, dialect, pool_size=2, max_overflow=0, pool_reset_on_return=None) as (driver, engine):
        tx = await driver.begin()
        await tx.connection.execute(text("INSERT INTO orders (item) VALUES ('tea')"))
        session = AsyncSession(tx.connection, join_transaction_mode="control_fully")
        await session.execute(text("SELECT 1"))
        doors = {
            "run_sync": lambda: tx.connection.run_sync(commit_in),
            "transaction": lambda: tx.connection.get_transaction().commit(),
            "session": session.commit,
        }
        with pytest.raises(TransactionControlError, match=r"commit\(\)"):
            await doors[how]()
        with pytest.raises(TransactionControlError) as caught:
            await tx.run(steps("SELECT 1"))
        assert str(caught.value) == ENDED
        await tx.rollback()
        async with engine.connect() as one, engine.connect() as two:
            for connection in (one, two):
                assert await connection.scalar(text("SELECT count(*) FROM orders")) == 0


@each_dialect
async def test_application_session_joins_the_transaction(dsn: str, dialect: str) -> None:
    async with driving(dsn, dialect) as (driver, _):
        tx = await driver.begin()
        async with AsyncSession(tx.connection) as session:
            await session.execute(text("INSERT INTO orders (item) VALUES ('tea')"))
            await session.commit()
        await tx.rollback()
        assert await items(driver) == []


@each_dialect
async def test_a_transaction_that_failed_is_not_committed(dsn: str, dialect: str) -> None:
    # F20: PostgreSQL answers ROLLBACK to its COMMIT, and nobody would hear it
    async with driving(dsn, dialect) as (driver, _):
        tx = await driver.begin()
        await tx.connection.execute(text("INSERT INTO orders (item) VALUES ('tea')"))
        with suppress(IntegrityError):
            await tx.connection.execute(text("INSERT INTO orders (item) VALUES ('tea')"))
        with pytest.raises(TransactionControlError) as caught:
            await tx.commit()
        assert str(caught.value) == BROKEN
        assert await items(driver) == []


@each_dialect
async def test_failure_undone_by_a_savepoint_can_commit(dsn: str, dialect: str) -> None:
    async with driving(dsn, dialect) as (driver, _):
        tx = await driver.begin()
        await tx.connection.execute(text("INSERT INTO orders (item) VALUES ('tea')"))
        with suppress(IntegrityError):
            async with tx.connection.begin_nested():
                await tx.connection.execute(text("INSERT INTO orders (item) VALUES ('tea')"))
        await tx.commit()
        assert await items(driver) == ["tea"]


@each_dialect
async def test_an_error_at_the_commit_is_definite(dsn: str, dialect: str) -> None:
    # F20
    async with driving(dsn, dialect) as (driver, _):
        tx = await driver.begin()
        await tx.connection.execute(text("SET CONSTRAINTS ALL DEFERRED"))
        for _ in range(2):
            await tx.connection.execute(text("INSERT INTO orders (item) VALUES ('tea')"))
        with pytest.raises(StoreError, match="23505") as caught:
            await tx.commit()
        assert not isinstance(caught.value, CommitAmbiguousError)
        assert await items(driver) == []


@each_dialect
async def test_a_connection_that_died_under_the_handler_is_unavailable(dsn: str, dialect: str) -> None:
    async with driving(dsn, dialect) as (driver, engine):
        tx = await driver.begin()
        pid = await tx.connection.scalar(text("SELECT pg_backend_pid()"))
        async with engine.connect() as other:
            await other.execute(text("SELECT pg_terminate_backend(:pid)"), {"pid": pid})
        with pytest.raises(StoreUnavailableError):
            await tx.run(steps("SELECT 1"))
        await tx.rollback()

        tx = await driver.begin()
        pid = await tx.connection.scalar(text("SELECT pg_backend_pid()"))
        async with engine.connect() as other:
            await other.execute(text("SELECT pg_terminate_backend(:pid)"), {"pid": pid})
        with suppress(*FAILURES):
            await tx.connection.scalar(text("SELECT 1"))
        with pytest.raises((StoreError, TransactionControlError)):
            await tx.commit()


@each_dialect
async def test_begin_listener_may_execute_statements(dsn: str, dialect: str) -> None:
    async with driving(dsn, dialect) as (driver, engine):

        @event.listens_for(engine.sync_engine, "begin")
        def tenant(connection: Any) -> None:
            connection.exec_driver_sql("SELECT set_config('shop.tenant', 'acme', true)")

        tx = await driver.begin()
        assert await tx.connection.scalar(text("SELECT current_setting('shop.tenant')")) == "acme"
        await tx.commit()


@each_dialect
async def test_a_listener_that_fails_leaves_nothing_behind(dsn: str, dialect: str) -> None:
    async with driving(dsn, dialect) as (driver, engine):

        @event.listens_for(engine.sync_engine, "begin")
        def tenant(connection: Any) -> None:
            connection.exec_driver_sql("SELECT missing")

        with pytest.raises(SchemaError):
            await driver.begin()
        assert engine.pool.checkedout() == 0


@each_dialect
@pytest.mark.parametrize(("size", "overflow", "places"), [(2, 0, 1), (5, 0, 4), (5, 10, 12)])
async def test_a_fifth_of_the_pool_is_kept_free(dsn: str, dialect: str, size: int, overflow: int, places: int) -> None:
    async with driving(dsn, dialect, pool_size=size, max_overflow=overflow, pool_timeout=0.05) as (driver, _):
        open_ones = [await driver.begin() for _ in range(places)]
        with pytest.raises(StoreUnavailableError, match="in use"):
            await driver.begin()
        for tx in open_ones:
            await tx.rollback()


@each_dialect
async def test_a_statement_that_hangs_is_given_up(dsn: str, dialect: str) -> None:
    # P7: whether it happened is then unknown, and a read is told as an outage
    async with driving(dsn, dialect) as (_, engine):
        driver = SqlalchemyDriver(engine, statement_timeout=0.05)
        with pytest.raises(CommitAmbiguousError):
            await driver.run(saying(Mode.SINGLE, "SELECT pg_sleep(60)"))
        with pytest.raises(StoreUnavailableError):
            await driver.run(saying(Mode.READ, "SELECT pg_sleep(60)"))
        await driver.run(saying(Mode.ATOMIC, "SELECT pg_sleep(0.06)"))  # a migration may take its time
        await driver.close()
        assert engine.pool.checkedout() == 0


@each_dialect
async def test_handlers_take_turns(dsn: str, dialect: str) -> None:
    pool = {"pool_size": 2, "max_overflow": 1, "pool_timeout": 0.05}
    async with driving(dsn, dialect, **pool) as (driver, engine):
        first, second = await driver.begin(), await driver.begin()
        with pytest.raises(StoreUnavailableError, match="in use"):
            await driver.begin()
        assert await items(driver) == []  # claims and heartbeats still have theirs
        waiting = asyncio.create_task(driver.begin())
        await first.rollback()
        third = await waiting
        assert engine.pool.checkedout() == 2
        await second.rollback()
        await third.rollback()


@each_dialect
async def test_cancelled_waiting_task_takes_no_slot(dsn: str, dialect: str) -> None:
    async with driving(dsn, dialect, pool_size=2, max_overflow=0) as (driver, engine):
        held = await driver.begin()
        waiting = asyncio.create_task(driver.begin())
        await asyncio.sleep(0)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        await held.rollback()
        await (await driver.begin()).rollback()
        assert engine.pool.checkedout() == 0


@each_dialect
async def test_a_pool_that_others_use_up_is_unavailable(dsn: str, dialect: str) -> None:
    pool = {"pool_size": 2, "max_overflow": 0, "pool_timeout": 0.05}
    async with (
        driving(dsn, dialect, **pool) as (driver, engine),
        engine.connect() as one,
        engine.connect() as two,
    ):
        assert not one.closed
        assert not two.closed
        with pytest.raises(StoreUnavailableError, match="pool"):
            await driver.run(saying(Mode.READ, "SELECT 1"))
        with pytest.raises(StoreUnavailableError, match="pool"):
            await driver.begin()
        await one.close()
        await (await driver.begin()).rollback()


@each_dialect
@pytest.mark.parametrize("pool", [{"poolclass": NullPool}, {"max_overflow": -1}, {"pool_size": 0}])
async def test_unlimited_pool_has_no_slot_limit(dsn: str, dialect: str, pool: dict[str, Any]) -> None:
    async with driving(dsn, dialect, **pool) as (driver, _):
        open_ones = [await driver.begin() for _ in range(17)]
        for tx in open_ones:
            await tx.rollback()


@each_dialect
async def test_cancelled_statement_returns_its_connection(dsn: str, dialect: str) -> None:
    async with driving(dsn, dialect) as (driver, engine):
        for run in (
            lambda: driver.run(saying(Mode.SINGLE, "SELECT pg_sleep(60)")),
            lambda: driver.run(saying(Mode.ATOMIC, insert("tea"), "SELECT pg_sleep(60)")),
        ):
            task = asyncio.create_task(run())
            await until(lambda: sleeping(dsn))
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            await driver.close()
            assert engine.pool.checkedout() == 0
            await until(lambda: not sleeping(dsn))
        assert await items(driver) == []


def sleeping(dsn: str) -> bool:
    with psycopg.connect(dsn, autocommit=True) as connection:
        found = connection.execute(
            "SELECT count(*) FROM pg_stat_activity WHERE wait_event = 'PgSleep' AND datname = current_database()"
        ).fetchone()
    return found is not None and found[0] > 0


@each_dialect
async def test_autocommit_engine_is_rejected(dsn: str, dialect: str) -> None:
    async with driving(dsn, dialect, isolation_level="AUTOCOMMIT") as (driver, engine):
        with pytest.raises(ConfigurationError, match="AUTOCOMMIT"):
            await driver.begin()
        assert engine.pool.checkedout() == 0
        await driver.run(saying(Mode.SINGLE, insert("tea")))
        assert await items(driver) == ["tea"]


@each_dialect
async def test_closing_leaves_the_engine_alone(dsn: str, dialect: str) -> None:
    async with driving(dsn, dialect) as (driver, engine):
        await driver.close()
        async with engine.connect() as connection:
            assert await connection.scalar(text("SELECT 1")) == 1


async def test_driver_session_is_an_ordinary_session(dsn: str) -> None:
    async with driving(dsn, "asyncpg") as (driver, engine):
        session = driver.session()
        assert engine.pool.checkedout() == 0
        await session.execute(text("INSERT INTO orders (item) VALUES ('tea')"))
        await session.commit()
        await session.close()
        assert await items(driver) == ["tea"]


@pytest.mark.parametrize("pool", [{"pool_size": 1, "max_overflow": 0}, {"poolclass": StaticPool}])
def test_a_pool_of_one_is_refused(pool: dict[str, Any]) -> None:
    with pytest.raises(ConfigurationError, match="pool_size=2"):
        SqlalchemyDriver(create_async_engine(NOWHERE, **pool))


class Engine(AsyncEngine):
    """One that somebody derived."""


def test_the_store_is_chosen_by_the_dialect() -> None:
    made = create_async_engine(NOWHERE)
    assert isinstance(aconnect_sqlalchemy(made).store, PostgresStore)
    assert isinstance(aconnect_sqlalchemy(Engine(made.sync_engine)).store, PostgresStore)
    # The asyncio dialect of SQLite is not installed here, and its name is what counts.
    sqlite = create_engine("sqlite:///unused.db")
    sqlite.dialect.is_async = True
    assert isinstance(aconnect_sqlalchemy(AsyncEngine(sqlite)).store, SqliteStore)


def test_other_databases_are_refused() -> None:
    made = create_async_engine(NOWHERE)
    made.sync_engine.dialect.name = "oracle"
    with pytest.raises(ConfigurationError, match="oracle"):
        aconnect_sqlalchemy(made)


async def test_object_that_is_not_an_engine_is_rejected() -> None:
    nothing: Any = object()
    with pytest.raises(ConfigurationError, match="create_async_engine"):
        await Once(nothing).start()


@each_dialect
@pytest.mark.filterwarnings("ignore:Number of columns in textual SQL")  # SQLAlchemy says so, and goes on
async def test_columns_that_a_migration_moved_are_read_by_their_names(dsn: str, dialect: str) -> None:
    look = Transaction("test", Mode.READ, lambda: steps("SELECT * FROM moved"))
    first, turned = {"one": 1, "two": 2}, {"two": 2, "one": 1}
    # Each look has a connection of its own, because one that has prepared a statement would refuse it.
    async with driving(dsn, dialect, poolclass=NullPool) as (driver, _):
        with psycopg.connect(dsn, autocommit=True) as raw:
            for row in (first, turned, first, {"one": 1, "two": 2, "three": 3}, {"three": 3}, turned):
                columns = ", ".join(f"{value} AS {name}" for name, value in row.items())
                raw.execute(f"DROP VIEW IF EXISTS moved; CREATE VIEW moved AS SELECT {columns}".encode())
                for _ in range(3):  # in one way, and from then on in another
                    assert await driver.run(look) == [row]
            raw.execute("DROP VIEW moved")


async def test_connection_closed_in_the_pool_counts_as_lost(dsn: str) -> None:
    async with driving(dsn, "asyncpg") as (driver, engine):
        await driver.run(saying(Mode.SINGLE, "SELECT 1"))
        async with engine.connect() as connection:
            raw: Any = (await connection.get_raw_connection()).driver_connection
        with psycopg.connect(dsn, autocommit=True) as other:
            other.execute("SELECT pg_terminate_backend(%s)", [raw.get_server_pid()])
        await until(raw.is_closed)
        with pytest.raises(CommitAmbiguousError):
            await driver.run(saying(Mode.SINGLE, "SELECT 1"))
        await driver.run(saying(Mode.SINGLE, "SELECT 1"))
