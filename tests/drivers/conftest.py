"""SQLite files for the drivers' tests, with either module."""

from __future__ import annotations

import sqlite3

import pysqlite3.dbapi2 as pysqlite3
import pytest

from harness.tables import sqlite_with_tables
from oncekey.databases.sqlite.blocking import SqliteDriver


@pytest.fixture(params=(sqlite3, pysqlite3), ids=("sqlite3", "pysqlite3"))
def module(request):
    """The SQLite module; the two must never meet in one file in one process."""
    return request.param


@pytest.fixture
def path(module, tmp_path):
    """A file with oncekey's tables and one of the application's."""
    path = tmp_path / "shop.db"
    driver = SqliteDriver(sqlite_with_tables(path, module), module=module)
    with driver._file.lent() as connection:
        connection.execute("CREATE TABLE orders (id INTEGER PRIMARY KEY, item TEXT NOT NULL UNIQUE)")
    driver.close()
    return path
