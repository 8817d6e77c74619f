"""The shipped contract and the walk: PyMySQL on MariaDB, aiomysql on MySQL. Both drivers send the same messages."""

from __future__ import annotations

import pytest

from harness.mariadb import mariadb_with_tables, migrated
from oncekey.databases.mariadb.aiomysql import AiomysqlDriver
from oncekey.databases.mariadb.generated.pymysql import PymysqlDriver
from oncekey.databases.mariadb.store import MariadbStore
from oncekey.stores.rows import COLUMNS
from oncekey_contract import StoreContract, Walk, blocking, under_asyncio


@pytest.fixture(scope="class")
def tables(mariadb_server):
    """A database with the tables, for one driver's whole contract: every scenario has keys of its own."""
    with mariadb_with_tables(mariadb_server, "contract") as url:
        yield url


class TestPymysql(StoreContract):
    matrix = "MariaDB"

    @pytest.fixture
    def world(self, tables):
        with blocking(MariadbStore, PymysqlDriver(tables)) as world:
            yield world


@pytest.fixture(scope="class")
def on_mysql(mysql_server):
    """The same on MySQL."""
    with mariadb_with_tables(mysql_server, "contract") as url:
        yield url


class TestAiomysqlOnMysql(StoreContract):
    matrix = "MySQL"

    @pytest.fixture
    def world(self, on_mysql):
        with under_asyncio(MariadbStore, AiomysqlDriver(on_mysql)) as world:
            yield world


class TestWalk(Walk):
    """On MariaDB: MySQL executes the same statements, and the contract compares both."""

    @pytest.fixture
    def world(self, mariadb_url, mariadb_server):
        tables = migrated(mariadb_url)

        def plant(lines):
            names = ", ".join(f"%({name})s" for name in COLUMNS)
            columns = ", ".join(f"`{name}`" for name in COLUMNS)
            with mariadb_server.connect(tables.rpartition("/")[2]) as connection, connection.cursor() as cursor:
                cursor.executemany(f"INSERT INTO oncekey_record ({columns}) VALUES ({names})", lines)

        with blocking(MariadbStore, PymysqlDriver(tables), plant=plant) as world:
            yield world
