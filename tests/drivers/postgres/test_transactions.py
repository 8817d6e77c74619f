"""Business transactions: what a handler may do with its connection, and how they end (L4, L5, F16, F20)."""

from __future__ import annotations

import asyncio
import inspect
import uuid
from functools import partial

import asyncpg
import psycopg
import pytest
from psycopg import sql
from psycopg.rows import dict_row, tuple_row

from drivers.postgres.drivers import (
    ASYNC_PSYCOPG,
    ASYNCPG,
    PSYCOPG,
    ask,
    engine,
    notify,
    opened,
    raw_of,
    saying,
)
from harness import flows
from harness.asgi import until
from harness.patience import wait_until
from oncekey.core.errors import (
    CommitAmbiguousError,
    RolledBackError,
    StoreError,
    StoreUnavailableError,
    TransactionControlError,
)
from oncekey.core.flow import Mode
from oncekey.core.model import MINUTE, Effects, EntryKind, MemoEntry, Proceed, Recovery, State
from oncekey.core.policy import Policy
from oncekey.testing.claims import a_claim, answered

CONTROL = (
    "COMMIT",
    "commit work;",
    "-- nothing to see\nCOMMIT",
    "/* x */ RollBack",
    "SELECT 1; COMMIT",
    "END",
    "ABORT",
    "BEGIN",
    "START TRANSACTION",
    "PREPARE TRANSACTION 'x'",
    "SET TRANSACTION ISOLATION LEVEL SERIALIZABLE",
    "SET SESSION CHARACTERISTICS AS TRANSACTION READ ONLY",
)


def order() -> str:
    """An item that nobody else orders."""
    return uuid.uuid4().hex


def insert(item: str) -> str:
    return f"INSERT INTO orders (item) VALUES ('{item}')"


@pytest.fixture
def ordered(raw):
    """Whether an order is there."""
    return lambda item: raw.execute("SELECT count(*) FROM orders WHERE item = %s", [item]).fetchone() == (1,)


async def claimed(driver):
    verdict = await flows.abegin(engine(driver), a_claim(), Policy())
    assert isinstance(verdict, Proceed)
    return verdict.lease


async def state_of(driver, lease):
    record = (await engine(driver).find(lease.id)).record
    return None if record is None else record.state


class TestEnds:
    async def test_rows_and_record_commit_together(self, kind, dsn, ordered):
        item = order()
        async with opened(kind, dsn) as driver:
            lease, transaction = await claimed(driver), await driver.begin()
            await ask(transaction, insert(item))
            assert (await flows.asettle_within(engine(driver), transaction, lease, answered())).ours
            assert not ordered(item)
            assert await state_of(driver, lease) is State.IN_PROGRESS
            await transaction.commit()
            assert ordered(item)
            assert await state_of(driver, lease) is State.COMPLETED

    async def test_rows_and_record_are_rolled_back_together(self, kind, dsn, ordered):
        item = order()
        async with opened(kind, dsn) as driver:
            lease, transaction = await claimed(driver), await driver.begin()
            await ask(transaction, insert(item))
            assert (await flows.asettle_within(engine(driver), transaction, lease, answered())).ours
            await transaction.rollback()
            assert not ordered(item)
            assert await state_of(driver, lease) is State.IN_PROGRESS

    async def test_finished_transaction_rejects_further_statements(self, kind, dsn, ordered):
        item = order()
        async with opened(kind, dsn, pool_size=1) as driver:
            for first in ("commit", "rollback"):
                transaction = await driver.begin()
                if first == "commit":
                    await ask(transaction, insert(item))
                await getattr(transaction, first)()
                # Saying it again does nothing, and above all gives no connection back twice.
                await transaction.rollback()
                await transaction.commit()
                with pytest.raises(TransactionControlError, match="over"):
                    await transaction.run(saying(Mode.READ, "SELECT 1").body())
                with pytest.raises(TransactionControlError, match="over"):
                    await ask(transaction, "SELECT 1")
            assert ordered(item)
            await (await driver.begin()).rollback()

    async def test_another_task_may_commit(self, kind, dsn, ordered):
        item = order()
        async with opened(kind, dsn) as driver:
            transaction = await asyncio.create_task(driver.begin())
            await asyncio.create_task(ask(transaction, insert(item)))
            await asyncio.create_task(transaction.commit())
        assert ordered(item)

    async def test_an_aborted_transaction_is_not_committed(self, kind, dsn, ordered):  # F20
        item = order()
        async with opened(kind, dsn, pool_size=1) as driver:
            transaction = await driver.begin()
            await ask(transaction, insert(item))
            with pytest.raises((psycopg.Error, asyncpg.PostgresError)):
                await ask(transaction, "SELECT 1 / 0")
            # The handler swallowed the error. COMMIT alone would be answered with ROLLBACK, and no error.
            with pytest.raises(RolledBackError, match="a statement had failed before"):
                await transaction.commit()
            assert not ordered(item)
            assert await driver.run(saying(Mode.READ, "SELECT 1")) == [(1,)]

    @pytest.mark.parametrize("large", [False, True], ids=["a record", "a large record"])
    async def test_commit_of_another_transaction_is_rejected(self, kind, dsn, ordered, large):
        # L5: past the guard, on the connection below; a large memo is not sent with the COMMIT
        first, second = order(), order()
        async with opened(kind, dsn, pool_size=2) as driver:
            verdict = await flows.abegin(
                engine(driver), a_claim(effects=Effects.PHASED, recovery=Recovery.RESUME), Policy()
            )
            transaction = await driver.begin()
            await ask(transaction, insert(first))
            for text in ("COMMIT", "BEGIN"):
                await notify(raw_of(transaction), text, getattr(transaction, "transaction", transaction))
            await ask(transaction, insert(second))
            phases, memo = engine(driver).store.phases, (MemoEntry("sell", EntryKind.PHASE, "7"),)
            if large:
                assert await transaction.run(phases.checkpointing(verdict.lease, (), memo, MINUTE)) is not None
                commit = transaction.commit
            else:
                commit = partial(transaction.commit_with, phases.keeping(verdict.lease, (), memo, MINUTE).statement)
            with pytest.raises(RolledBackError, match="the handler ended its transaction"):
                await commit()
            assert (ordered(first), ordered(second)) == (True, False)
            assert (await engine(driver).find(verdict.lease.id)).record.memo == ()

    async def test_record_is_not_written_in_an_aborted_transaction(self, kind, dsn):  # F20
        async with opened(kind, dsn) as driver:
            lease, transaction = await claimed(driver), await driver.begin()
            with pytest.raises((psycopg.Error, asyncpg.PostgresError)):
                await ask(transaction, "SELECT 1 / 0")
            with pytest.raises(StoreUnavailableError, match="25P02"):
                await flows.asettle_within(engine(driver), transaction, lease, answered())
            await transaction.rollback()
            assert await state_of(driver, lease) is State.IN_PROGRESS

    async def test_an_error_at_the_commit_is_definite(self, kind, dsn, ordered):  # F20
        item, other = order(), order()
        async with opened(kind, dsn, pool_size=2) as driver:
            lease, transaction = await claimed(driver), await driver.begin()
            await ask(transaction, "SET CONSTRAINTS ALL DEFERRED")
            for one in (item, item, other):
                await ask(transaction, insert(one))
            assert (await flows.asettle_within(engine(driver), transaction, lease, answered())).ours
            with pytest.raises(StoreError) as refused:
                await transaction.commit()
            assert not isinstance(refused.value, CommitAmbiguousError)
            assert not ordered(other)
            assert await state_of(driver, lease) is State.IN_PROGRESS
            await (await driver.begin()).rollback()

    async def test_a_transaction_that_falls_silent_is_ended_by_the_server(self, kind, dsn, raw, ordered):  # F15, L4
        item = order()
        async with opened(kind, dsn) as driver:
            lease, transaction = await claimed(driver), await driver.begin()
            await ask(transaction, insert(item))
            assert (await flows.asettle_within(engine(driver), transaction, lease, answered())).ours
            # From here on: before, a busy machine is silent for longer between two statements.
            await ask(transaction, "SET LOCAL idle_in_transaction_session_timeout = 50")
            idle = "SELECT count(*) FROM pg_stat_activity WHERE state = 'idle in transaction'"
            wait_until(lambda: raw.execute(idle).fetchone() == (0,))
            with pytest.raises(StoreError):
                await transaction.commit()
            await transaction.rollback()
            assert not ordered(item)
            settled = await flows.asettle_lost_commit(engine(driver), lease)
            assert settled.ours
            assert await state_of(driver, lease) is State.FAILED_RETRYABLE

    async def test_timeouts_apply_only_to_the_business_transaction(self, kind, dsn):  # L4
        shown = "SELECT current_setting('idle_in_transaction_session_timeout')"
        async with opened(kind, dsn, pool_size=1, idle_timeout=90) as driver:
            transaction = await driver.begin()
            assert await ask(transaction, shown) == [("90s",)]
            await transaction.rollback()
            assert await driver.run(saying(Mode.READ, shown)) == [("0",)]


class TestGuard:
    """L5, F16: a handler that commits by itself would leave its rows without a record."""

    @pytest.mark.parametrize("text", CONTROL)
    async def test_no_text_ends_the_transaction(self, kind, dsn, text):
        async with opened(kind, dsn) as driver:
            transaction = await driver.begin()
            with pytest.raises(TransactionControlError):
                await ask(transaction, text)
            assert await ask(transaction, "SELECT 1") == [(1,)]
            await transaction.rollback()

    async def test_handler_can_use_savepoints(self, kind, dsn, ordered):
        kept, undone = order(), order()
        async with opened(kind, dsn) as driver:
            transaction = await driver.begin()
            await ask(transaction, insert(kept))
            await ask(transaction, "SAVEPOINT one")
            await ask(transaction, insert(undone))
            await ask(transaction, "ROLLBACK TO SAVEPOINT one")
            await ask(transaction, "RELEASE one")
            await transaction.commit()
        assert ordered(kept)
        assert not ordered(undone)

    @pytest.mark.parametrize(
        ("kind", "name", "arguments"),
        [
            *(
                (kind, name, arguments)
                for kind in (PSYCOPG, ASYNC_PSYCOPG)
                for name, arguments in [
                    ("commit", ()),
                    ("rollback", ()),
                    ("close", ()),
                    ("set_autocommit", (False,)),
                    ("set_isolation_level", (None,)),
                    ("set_read_only", (True,)),
                    ("set_deferrable", (True,)),
                    ("tpc_begin", ("x",)),
                    ("tpc_prepare", ()),
                    ("tpc_commit", ()),
                    ("tpc_rollback", ()),
                ]
            ),
            (ASYNCPG, "close", ()),
            (ASYNCPG, "terminate", ()),
            (ASYNCPG, "reset", ()),
        ],
    )
    async def test_no_method_ends_the_transaction(self, dsn, kind, name, arguments):
        async with opened(kind, dsn) as driver:
            transaction = await driver.begin()
            with pytest.raises(TransactionControlError, match="ended by oncekey"):
                getattr(transaction.connection, name)(*arguments)
            assert await ask(transaction, "SELECT 1") == [(1,)]
            await transaction.rollback()

    @pytest.mark.parametrize("kind", [PSYCOPG, ASYNC_PSYCOPG])
    @pytest.mark.parametrize("name", ["autocommit", "isolation_level", "read_only", "deferrable"])
    async def test_no_attribute_changes_the_transaction(self, dsn, kind, name):
        async with opened(kind, dsn) as driver:
            transaction = await driver.begin()
            with pytest.raises(TransactionControlError, match=name):
                setattr(transaction.connection, name, True)
            await transaction.rollback()

    async def test_connection_rejects_statements_after_the_end(self, kind, dsn):
        # A task that the handler left behind would write into somebody else's transaction.
        async with opened(kind, dsn, pool_size=1) as driver:
            transaction = await driver.begin()
            leftover = transaction.connection
            cursor = leftover.cursor() if kind != ASYNCPG else None
            await transaction.commit()
            other = await driver.begin()
            with pytest.raises(TransactionControlError, match="over"):
                await notify(leftover, "SELECT 1", other)
            if cursor is not None:
                with pytest.raises(TransactionControlError, match="over"):
                    await _now(cursor.execute("SELECT 1"))
            await other.rollback()


async def _now(said):
    return await said if inspect.isawaitable(said) else said


class TestPsycopgHandlers:
    """A blocking handler finds psycopg as it knows it."""

    def test_everything_else_passes(self, dsn):
        from oncekey.databases.postgres.generated.psycopg import PsycopgDriver

        driver = PsycopgDriver(dsn, pool_size=1)
        transaction, items = driver.begin(), [order() for _ in range(3)]
        connection = transaction.connection
        assert isinstance(connection, psycopg.Connection)
        with connection.cursor(row_factory=dict_row) as cursor:
            assert isinstance(cursor, psycopg.Cursor)
            assert cursor.connection is connection
            assert cursor.execute("SELECT 1 AS one").fetchone() == {"one": 1}
            cursor.executemany("INSERT INTO orders (item) VALUES (%s)", [(item,) for item in items])
            query = sql.SQL("SELECT {} FROM orders WHERE item = ANY(%s) ORDER BY id").format(sql.Identifier("item"))
            assert [row["item"] for row in cursor.execute(query, [items])] == items
            assert [row["item"] for row in cursor.stream(query, [items])] == items
            cursor.execute(b"SELECT 2 AS two")
            assert next(iter(cursor)) == {"two": 2}
            with cursor.copy("COPY (SELECT 7) TO STDOUT") as copy:
                assert b"".join(bytes(block) for block in copy) == b"7\n"
        with pytest.raises(psycopg.errors.DivisionByZero), connection.transaction():
            connection.execute("DELETE FROM orders; SELECT 1 / 0")
        with connection.cursor("server_side") as cursor:
            assert [row[0] for row in cursor.execute(query, [items])] == items
        assert psycopg.types.TypeInfo.fetch(connection, "int4").oid == 23
        with connection.pipeline():
            connection.execute("SELECT 1")
        connection.row_factory = dict_row
        assert connection.execute("SELECT 1 AS one").fetchone() == {"one": 1}
        for say in (connection.cursor().execute, connection.cursor().executemany, connection.cursor().stream):
            with pytest.raises(TransactionControlError):
                say("COMMIT", ())
        for text in (b"COMMIT", sql.SQL("{}").format(sql.SQL("COMMIT"))):
            with pytest.raises(TransactionControlError):
                connection.execute(text)
        with pytest.raises(TransactionControlError), connection.cursor().copy("COMMIT"):
            pass
        with pytest.raises(TransactionControlError), connection:
            pass
        transaction.commit()
        # What one handler set is not the next one's.
        following = driver.begin()
        assert following.connection.row_factory is tuple_row
        following.rollback()
        driver.close()
        with psycopg.connect(dsn) as other:
            assert [row[0] for row in other.execute(query, [items])] == items

    async def test_other_operations_are_allowed_under_asyncio(self, dsn):
        async with opened(ASYNC_PSYCOPG, dsn, pool_size=1) as driver:
            transaction, items = await driver.begin(), [order() for _ in range(3)]
            connection = transaction.connection
            assert isinstance(connection, psycopg.AsyncConnection)
            async with connection.cursor(row_factory=dict_row) as cursor:
                assert isinstance(cursor, psycopg.AsyncCursor)
                await cursor.executemany("INSERT INTO orders (item) VALUES (%s)", [(item,) for item in items])
                query = sql.SQL("SELECT item FROM orders WHERE item = ANY(%s) ORDER BY id")
                await cursor.execute(query, [items])
                assert [row["item"] async for row in cursor] == items
                assert [row["item"] async for row in cursor.stream(query, [items])] == items
                async with cursor.copy("COPY (SELECT 7) TO STDOUT") as copy:
                    assert b"".join([bytes(block) async for block in copy]) == b"7\n"
            with pytest.raises(psycopg.errors.DivisionByZero):
                async with connection.transaction():
                    await connection.execute("DELETE FROM orders; SELECT 1 / 0")
            assert (await psycopg.types.TypeInfo.fetch(connection, "int4")).oid == 23
            with pytest.raises(TransactionControlError):
                await connection.cursor().executemany("COMMIT", [])
            for say in (connection.cursor().stream, connection.cursor().copy):
                with pytest.raises(TransactionControlError):
                    say("COMMIT")
            with pytest.raises(TransactionControlError):
                async with connection:
                    pass
            await transaction.commit()
            count = "SELECT count(*) FROM orders WHERE item IN (:a, :b, :c)"
            assert await driver.run(saying(Mode.READ, count, **dict(zip("abc", items, strict=True)))) == [(3,)]


class TestAsyncpgHandlers:
    """A handler finds asyncpg as it knows it."""

    async def test_everything_else_passes(self, dsn):
        async with opened(ASYNCPG, dsn, pool_size=1) as driver:
            transaction, items = await driver.begin(), [order() for _ in range(3)]
            connection = transaction.connection
            query = "SELECT item FROM orders WHERE item = ANY($1::text[]) ORDER BY id"
            await connection.executemany("INSERT INTO orders (item) VALUES ($1)", [(item,) for item in items])
            assert [row["item"] for row in await connection.fetch(query, items)] == items
            assert await connection.fetchval(query, items) == items[0]
            assert (await connection.fetchrow(query, items))["item"] == items[0]
            assert await connection.execute("UPDATE orders SET item = item WHERE item = $1", items[0]) == "UPDATE 1"
            assert [row["item"] async for row in connection.cursor(query, items)] == items
            prepared = await connection.prepare(query)
            assert await prepared.fetchval(items) == items[0]
            with pytest.raises(asyncpg.DivisionByZeroError):
                async with connection.transaction():
                    await connection.execute("DELETE FROM orders; SELECT 1 / 0")
            await connection.copy_records_to_table("orders", records=[(items[0] + "x",)], columns=["item"])
            assert connection.is_in_transaction()
            for say in (
                connection.execute,
                connection.fetch,
                connection.fetchrow,
                connection.fetchval,
                connection.prepare,
            ):
                with pytest.raises(TransactionControlError):
                    await say("COMMIT")
            for say in (connection.executemany, connection.fetchmany):
                with pytest.raises(TransactionControlError):
                    await say("COMMIT", [()])
            with pytest.raises(TransactionControlError):
                await connection.copy_from_query("COMMIT", output="nowhere")
            with pytest.raises(TransactionControlError):
                connection.cursor("COMMIT")
            await transaction.commit()


class TestCancellation:
    """A statement that was cancelled half-way leaves nothing half-way behind."""

    BUSY = "SELECT count(*) FROM pg_stat_activity WHERE query LIKE 'SELECT pg_sleep%' AND state = 'active'"

    async def reached(self, raw, count):
        await until(lambda: raw.execute(self.BUSY).fetchone() == (count,))

    @pytest.mark.parametrize("kind", [ASYNC_PSYCOPG, ASYNCPG])
    @pytest.mark.parametrize("mode", Mode)
    async def test_cancelled_store_statement_frees_its_connection(self, dsn, raw, kind, mode):
        async with opened(kind, dsn, pool_size=1) as driver:
            running = asyncio.create_task(driver.run(saying(mode, "SELECT pg_sleep(60)")))
            await self.reached(raw, 1)
            running.cancel()
            with pytest.raises(asyncio.CancelledError):
                await running
            assert await driver.run(saying(Mode.ATOMIC, "SELECT 1")) == [(1,)]
            await self.reached(raw, 0)

    @pytest.mark.parametrize("kind", [ASYNC_PSYCOPG, ASYNCPG])
    async def test_cancelled_handler_statement_rolls_back(self, dsn, raw, ordered, kind):
        item = order()
        async with opened(kind, dsn, pool_size=1) as driver:
            transaction = await driver.begin()
            await ask(transaction, insert(item))
            running = asyncio.create_task(ask(transaction, "SELECT pg_sleep(60)"))
            await self.reached(raw, 1)
            running.cancel()
            with pytest.raises(asyncio.CancelledError):
                await running
            await transaction.rollback()
            await self.reached(raw, 0)
            assert not ordered(item)
            await (await driver.begin()).rollback()

    @pytest.mark.parametrize("kind", [ASYNC_PSYCOPG, ASYNCPG])
    async def test_cancelled_wait_for_a_connection_frees_its_slot(self, dsn, kind):
        async with opened(kind, dsn, pool_size=1, timeout=30) as driver:
            held = await driver.begin()
            waiting = [asyncio.create_task(one) for one in (driver.begin(), driver.run(saying(Mode.READ, "SELECT 1")))]
            for _ in range(3):
                await asyncio.sleep(0)
            for one in waiting:
                one.cancel()
            await asyncio.gather(*waiting, return_exceptions=True)
            await held.rollback()
            await (await driver.begin()).rollback()
            assert await driver.run(saying(Mode.READ, "SELECT 1")) == [(1,)]
