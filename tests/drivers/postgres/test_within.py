"""Flows in the caller's own transaction on PostgreSQL: never begun, committed or tried again by us (L7, F18)."""

from __future__ import annotations

import asyncpg
import psycopg
import pytest

from oncekey.core.errors import ConfigurationError, SchemaError, StoreUnavailableError
from oncekey.core.model import Code, Proceed, Refuse, Replay
from oncekey.core.policy import Policy
from oncekey.drivers.postgres.asyncpg import AsyncpgWithin
from oncekey.drivers.postgres.psycopg import PsycopgDriver, PsycopgWithin
from oncekey.drivers.postgres.psycopg_async import AsyncPsycopgWithin
from oncekey.drivers.retries import ConflictError
from oncekey.engine import request
from oncekey.flow import NOT_BEGUN, Mode, Statement, Transaction, adrive, drive
from oncekey.stores.postgres import PostgresStore
from oncekey.testing.claims import a_claim, again, answered

STORE = PostgresStore()


def begin(claim):
    return request.begin(STORE, claim, Policy())


def look(dsn, claim):
    driver = PsycopgDriver(dsn, pool_size=1)
    try:
        return drive(STORE.find(claim.id), driver.run).record
    finally:
        driver.close()


@pytest.fixture
def connection(dsn):
    with psycopg.connect(dsn) as connection:
        yield connection


def test_nothing_happens_until_the_caller_commits(dsn, connection):
    claim, run = a_claim(), PsycopgWithin(connection).run
    verdict = drive(begin(claim), run)
    assert isinstance(verdict, Proceed)
    connection.execute("INSERT INTO orders (item) VALUES ('with the key')")
    assert drive(request.settle(STORE, verdict.lease, answered()), run).ours
    assert look(dsn, claim) is None
    connection.commit()
    assert look(dsn, claim).response == answered().response
    assert isinstance(drive(begin(again(claim)), run), Replay)


def test_what_the_caller_rolls_back_never_was(dsn, connection):
    claim, run = a_claim(), PsycopgWithin(connection).run
    assert isinstance(drive(begin(claim), run), Proceed)
    connection.rollback()
    assert look(dsn, claim) is None
    assert isinstance(drive(begin(again(claim)), run), Proceed)


def test_the_callers_savepoint_takes_the_claim_with_it(dsn, connection):  # F18
    claim, run = a_claim(), PsycopgWithin(connection).run
    with connection.transaction(force_rollback=True):
        assert isinstance(drive(begin(claim), run), Proceed)
    other = again(claim)
    assert isinstance(drive(begin(other), run), Proceed)
    connection.commit()
    assert look(dsn, claim).incarnation == other.incarnation


def test_the_same_key_inside_itself_is_in_progress(connection):  # F18
    claim, run = a_claim(), PsycopgWithin(connection).run
    assert isinstance(drive(begin(claim), run), Proceed)
    inner = drive(begin(again(claim)), run)
    assert isinstance(inner, Refuse)
    assert inner.code is Code.IN_PROGRESS
    assert isinstance(drive(begin(a_claim()), run), Proceed)


def test_a_conflict_is_the_callers_to_repeat(dsn, connection):
    # Within a snapshot that is older than the row there is no answer, and no second try either.
    claim = a_claim()
    connection.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ")
    connection.execute("SELECT 1")
    driver = PsycopgDriver(dsn)
    assert isinstance(drive(begin(claim), driver.run), Proceed)
    driver.close()
    with pytest.raises(ConflictError):
        drive(begin(again(claim)), PsycopgWithin(connection).run)
    with pytest.raises(StoreUnavailableError, match="25P02"):
        drive(begin(again(claim)), PsycopgWithin(connection).run)
    connection.rollback()


def test_rows_answer_to_names_whatever_the_callers_rows_look_like(connection):
    connection.row_factory = psycopg.rows.scalar_row
    connection.cursor_factory = psycopg.RawCursor
    assert isinstance(drive(begin(a_claim()), PsycopgWithin(connection).run), Proceed)


async def test_a_transaction_must_be_open(dsn):
    with (
        psycopg.connect(dsn, autocommit=True) as connection,
        pytest.raises(ConfigurationError, match=NOT_BEGUN),
    ):
        PsycopgWithin(connection)
    async with await psycopg.AsyncConnection.connect(dsn, autocommit=True) as connection:
        with pytest.raises(ConfigurationError, match=NOT_BEGUN):
            AsyncPsycopgWithin(connection)
        async with connection.transaction():
            assert isinstance(await adrive(begin(a_claim()), AsyncPsycopgWithin(connection).run), Proceed)
    connection = await asyncpg.connect(dsn)
    with pytest.raises(ConfigurationError, match=NOT_BEGUN):
        AsyncpgWithin(connection)
    async with connection.transaction():
        assert isinstance(await adrive(begin(a_claim()), AsyncpgWithin(connection).run), Proceed)
    await connection.close()


async def test_under_asyncio_too_nothing_happens_until_the_caller_commits(dsn):
    for kept in (True, False):
        claim = a_claim()
        async with await psycopg.AsyncConnection.connect(dsn) as connection:
            assert isinstance(await adrive(begin(claim), AsyncPsycopgWithin(connection).run), Proceed)
            assert look(dsn, claim) is None
            await (connection.commit() if kept else connection.rollback())
        assert (look(dsn, claim) is not None) == kept

        claim, connection = a_claim(), await asyncpg.connect(dsn)
        transaction = connection.transaction()
        await transaction.start()
        assert isinstance(await adrive(begin(claim), AsyncpgWithin(connection).run), Proceed)
        assert look(dsn, claim) is None
        await (transaction.commit() if kept else transaction.rollback())
        await connection.close()
        assert (look(dsn, claim) is not None) == kept


async def test_errors_mean_what_they_mean_elsewhere(dsn):
    def saying(text):
        def body():
            yield Statement("test", text)

        return Transaction("test", Mode.SINGLE, body)

    connection = await asyncpg.connect(dsn)
    await connection.transaction().start()
    with psycopg.connect(dsn) as other:
        one, two = AsyncpgWithin(connection), PsycopgWithin(other)
        with pytest.raises(SchemaError):
            await one.run(saying("SELECT * FROM nothing"))
        with pytest.raises(SchemaError):
            two.run(saying("SELECT * FROM nothing"))
        # A connection that ends takes the caller's transaction along: nothing is ambiguous about that.
        kill = "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = current_database()"
        with psycopg.connect(dsn, autocommit=True) as killer:
            killer.execute(f"{kill} AND pid <> pg_backend_pid()")
        with pytest.raises(StoreUnavailableError):
            await one.run(saying("SELECT 1"))
        with pytest.raises(StoreUnavailableError):
            two.run(saying("SELECT 1"))
    connection.terminate()


async def test_a_callers_connection_that_only_reads_or_is_closed_stays_the_callers(dsn):
    connection = await asyncpg.connect(dsn)
    await connection.execute("BEGIN READ ONLY")
    within = AsyncpgWithin(connection)
    with pytest.raises(StoreUnavailableError, match="only reads"):
        await adrive(begin(a_claim()), within.run)
    await connection.close()
    with pytest.raises(StoreUnavailableError, match="lost"):
        await adrive(begin(a_claim()), within.run)
