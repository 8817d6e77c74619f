"""The shipped contract, on every store behind every driver."""

from __future__ import annotations

import sqlite3

import pysqlite3.dbapi2 as pysqlite3
import pytest

pytest.register_assert_rewrite("oncekey.testing.contract")

from oncekey.drivers.memory import AsyncMemoryDriver, MemoryDriver  # noqa: E402  (asserts are rewritten first)
from oncekey.drivers.sqlite import SqliteDriver  # noqa: E402
from oncekey.engine import migrate  # noqa: E402
from oncekey.flow import drive  # noqa: E402
from oncekey.stores.memory import MemoryStore  # noqa: E402
from oncekey.stores.sqlite import SqliteStore  # noqa: E402
from oncekey.testing.contract import StoreContract, blocking, under_asyncio  # noqa: E402


class TestMemory(StoreContract):
    @pytest.fixture
    def world(self):
        with blocking(MemoryStore, MemoryDriver()) as world:
            yield world


class TestAsyncMemory(StoreContract):
    @pytest.fixture
    def world(self):
        with under_asyncio(MemoryStore, AsyncMemoryDriver()) as world:
            yield world


@pytest.fixture(params=(sqlite3, pysqlite3), ids=("sqlite3", "pysqlite3"))
def module(request):
    return request.param


@pytest.fixture
def sqlite_file(module, tmp_path):
    """A file with the tables, closed again."""
    path = tmp_path / "keys.db"
    driver = SqliteDriver(path, module=module)
    drive(migrate.up(SqliteStore().schema), driver.run)
    driver.close()
    return path


class TestSqlite(StoreContract):
    @pytest.fixture
    def world(self, sqlite_file, module):
        with blocking(SqliteStore, SqliteDriver(sqlite_file, module=module)) as world:
            yield world
