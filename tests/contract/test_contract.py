"""The shipped contract, on every store behind every driver."""

from __future__ import annotations

import sqlite3

import pysqlite3.dbapi2 as pysqlite3
import pytest

from harness.tables import sqlite_with_tables
from oncekey.databases.memory import AsyncMemoryDriver, MemoryDriver
from oncekey.databases.sqlite.asynchronous import AsyncSqliteDriver
from oncekey.databases.sqlite.blocking import SqliteDriver
from oncekey.databases.sqlite.store import SqliteStore
from oncekey.databases.threads import threaded
from oncekey.stores.memory import MemoryStore
from oncekey_contract import StoreContract, blocking, under_asyncio


# R59, R65, R118, R119, R156: threads, a row that vanishes, long names, the time of the last run, expiry
class TestMemory(StoreContract):
    matrix = "memory"

    @pytest.fixture
    def world(self):
        with blocking(MemoryStore, MemoryDriver()) as world:
            yield world


class TestAsyncMemory(StoreContract):
    matrix = "memory"

    @pytest.fixture
    def world(self):
        with under_asyncio(MemoryStore, AsyncMemoryDriver()) as world:
            yield world


@pytest.fixture
def module():
    return sqlite3


@pytest.fixture
def sqlite_file(module, tmp_path):
    """A file with the tables, closed again."""
    return sqlite_with_tables(tmp_path / "keys.db", module)


class TestSqlite(StoreContract):
    matrix = "SQLite"

    @pytest.fixture
    def world(self, sqlite_file, module):
        with blocking(SqliteStore, SqliteDriver(sqlite_file, module=module)) as world:
            yield world


class TestNewestSqlite(TestSqlite):
    """The same on a SQLite of this year: what its statements do is what may change, and not how a driver says them."""

    @pytest.fixture
    def module(self):
        return pysqlite3


class TestAsyncSqlite(StoreContract):
    matrix = "SQLite"

    @pytest.fixture
    def world(self, sqlite_file, module):
        with under_asyncio(SqliteStore, AsyncSqliteDriver(sqlite_file, module=module)) as world:
            yield world


class TestThreadedSqlite(StoreContract):
    matrix = "SQLite"

    @pytest.fixture
    def world(self, sqlite_file, module):
        with under_asyncio(SqliteStore, threaded(SqliteDriver(sqlite_file, module=module))) as world:
            yield world
