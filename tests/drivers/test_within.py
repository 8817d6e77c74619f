"""Flows in the caller's own transaction: provisional until the caller commits (L7)."""

from __future__ import annotations

import asyncio
from contextlib import closing

import pytest

from drivers.speaking import saying
from oncekey.core.errors import ConfigurationError, SchemaError, StoreError
from oncekey.core.model import Proceed, State
from oncekey.core.policy import Policy
from oncekey.drivers.sqlite.execute import aiosqlite_execute, sqlite_execute
from oncekey.engine.shell import AsyncEngine, Engine
from oncekey.flow import AsyncWithin, Mode, Within
from oncekey.stores.sqlite import SqliteStore
from oncekey.testing.claims import a_claim, answered


@pytest.fixture
def connection(path, module):
    with closing(module.connect(path, isolation_level=None)) as connection:
        yield connection


def within(connection) -> Engine:
    return Engine(SqliteStore(), Within(sqlite_execute(connection)))


def test_what_was_written_is_there_when_the_caller_commits(connection):
    claim = a_claim()
    connection.execute("BEGIN")
    engine = within(connection)
    verdict = engine.begin(claim, Policy())
    assert isinstance(verdict, Proceed)
    connection.execute("INSERT INTO orders (item) VALUES ('tea')")
    assert engine.settle(verdict.lease, answered()).ours
    engine.close()

    assert connection.in_transaction  # nothing of ours ended it
    connection.execute("COMMIT")

    connection.execute("BEGIN")
    assert within(connection).find(claim.id).record.state is State.COMPLETED


def test_what_was_written_is_gone_when_the_caller_rolls_back(connection):
    claim = a_claim()
    connection.execute("BEGIN")
    engine = within(connection)
    engine.settle(engine.begin(claim, Policy()).lease, answered())
    connection.execute("ROLLBACK")

    connection.execute("BEGIN")
    assert within(connection).find(claim.id).record is None


def test_a_savepoint_that_the_caller_rolls_back_takes_it_along(connection):  # F18
    claim = a_claim()
    connection.execute("BEGIN")
    connection.execute("SAVEPOINT a")
    within(connection).begin(claim, Policy())
    connection.execute("ROLLBACK TO a")
    connection.execute("COMMIT")

    connection.execute("BEGIN")
    assert within(connection).find(claim.id).record is None


def test_a_connection_that_would_commit_at_once_is_refused(connection):
    with pytest.raises(ConfigurationError, match="begin a transaction"):
        sqlite_execute(connection)


def test_a_connection_that_begins_by_itself_will_do(path, module):
    with closing(module.connect(path)) as connection:
        within(connection).begin(a_claim(), Policy())
        assert connection.in_transaction


@pytest.mark.parametrize("factory", [lambda cursor, row: "my own row", None, "Row"])
def test_the_callers_kind_of_rows_does_not_matter(connection, module, factory):
    connection.row_factory = module.Row if factory == "Row" else factory
    connection.execute("BEGIN")

    assert isinstance(within(connection).begin(a_claim(), Policy()), Proceed)
    assert connection.row_factory is (module.Row if factory == "Row" else factory)


def test_errors_are_the_stores(connection):
    connection.execute("BEGIN")
    driver = Within(sqlite_execute(connection))

    with pytest.raises(SchemaError):
        driver.run(saying(Mode.READ, "SELECT * FROM nowhere"))
    with pytest.raises(StoreError) as caught:
        driver.run(saying(Mode.READ, ("SELECT :x", {"x": 10**30})))
    assert str(10**30) not in str(caught.value)
    assert connection.in_transaction


class Awaited:
    """A connection whose methods are awaited, as aiosqlite's are."""

    def __init__(self, connection):
        self._connection = connection
        self.isolation_level = connection.isolation_level

    @property
    def in_transaction(self):
        return self._connection.in_transaction

    async def execute(self, sql, parameters=()):
        return AwaitedCursor(await asyncio.to_thread(self._connection.execute, sql, parameters))


class AwaitedCursor:
    def __init__(self, cursor):
        self._cursor = cursor
        self.description = cursor.description

    async def fetchall(self):
        return await asyncio.to_thread(self._cursor.fetchall)

    async def close(self):
        await asyncio.to_thread(self._cursor.close)


async def test_the_same_under_asyncio(path, module):
    with closing(module.connect(path, isolation_level=None, check_same_thread=False)) as connection:
        claim = a_claim()
        awaited = Awaited(connection)
        with pytest.raises(ConfigurationError, match="begin a transaction"):
            aiosqlite_execute(awaited)
        await awaited.execute("BEGIN")
        engine = AsyncEngine(SqliteStore(), AsyncWithin(aiosqlite_execute(awaited)))
        lease = (await engine.begin(claim, Policy())).lease
        assert (await engine.settle(lease, answered())).ours
        await engine.close()
        assert connection.in_transaction
        with pytest.raises(SchemaError):
            await engine.driver.run(saying(Mode.READ, "SELECT * FROM nowhere"))
        connection.execute("ROLLBACK")
        connection.execute("BEGIN")
        assert within(connection).find(claim.id).record is None
