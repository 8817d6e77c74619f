"""A shop on a real database: `Once` by its URL, rows in a table of the application's own, read from outside."""

from __future__ import annotations

import sqlite3
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, closing
from pathlib import Path
from typing import Any

import psycopg
import pymysql
from fastapi import FastAPI

from frameworks.shop import KEY, tenant_of
from harness.asgi import Caller, Reply
from oncekey.core.policy import Policy
from oncekey.databases.mariadb.address import MariadbAddress
from oncekey.once import Once

ORDERS = "CREATE TABLE orders (item TEXT NOT NULL, UNIQUE (item) {deferred})"


class SqliteFile:
    """A file, and how a handler writes into it.

    It is read with the library that the driver uses: two copies of SQLite in one process do not see each other's
    locks, and the one that closes last by its own count removes the other one's write-ahead log.
    """

    records = "oncekey_record"
    left_by_a_rollback = ()  # LOCAL in one commit: what is rolled back was never there

    def __init__(self, path: Path) -> None:
        self.path = path
        self.url = f"sqlite:///{path}"
        self.execute(ORDERS.format(deferred=""))

    def execute(self, sql: str) -> list[Any]:
        with closing(sqlite3.connect(self.path)) as connection, connection:
            rows: list[Any] = connection.execute(sql).fetchall()
            return rows

    async def insert(self, connection: Any, item: str) -> None:
        await connection.execute("INSERT INTO orders VALUES (?)", (item,))

    def insert_blocking(self, connection: Any, item: str) -> None:
        connection.execute("INSERT INTO orders VALUES (?)", (item,))


class PostgresDatabase:
    """A database, and how a handler writes into it through one of two packages."""

    records = "oncekey.record"
    left_by_a_rollback = ()  # LOCAL in one commit: what is rolled back was never there

    def __init__(self, dsn: str, package: str, *, pool_size: int = 10) -> None:
        self.dsn = dsn
        self.package = package
        mark = "&" if "?" in dsn else "?"
        self.url = f"{dsn.replace('postgresql://', f'postgresql+{package}://')}{mark}pool_size={pool_size}"
        self.execute(ORDERS.format(deferred="DEFERRABLE INITIALLY IMMEDIATE"))

    def execute(self, sql: str) -> list[Any]:
        with psycopg.connect(self.dsn, autocommit=True) as connection:
            cursor = connection.execute(sql.encode())
            return cursor.fetchall() if cursor.description else []

    async def insert(self, connection: Any, item: str) -> None:
        if self.package == "asyncpg":
            await connection.execute("INSERT INTO orders VALUES ($1)", item)
        else:
            await connection.execute("INSERT INTO orders VALUES (%s)", (item,))

    def insert_blocking(self, connection: Any, item: str) -> None:
        connection.execute("INSERT INTO orders VALUES (%s)", (item,))


class MariadbDatabase:
    """A database of MariaDB's, and how a handler writes into it through one of two packages."""

    records = "oncekey_record"
    left_by_a_rollback = ()  # LOCAL in one commit: what is rolled back was never there

    def __init__(self, url: str, package: str, *, pool_size: int = 10) -> None:
        self.address = MariadbAddress.parse(url)
        self.package = package
        self.url = f"{url}?pool_size={pool_size}"  # aiomysql brings PyMySQL along, for handlers that are `def`
        self.execute(ORDERS.replace("TEXT", "VARCHAR(255)").format(deferred=""))

    def execute(self, sql: str) -> list[Any]:
        with (
            pymysql.connect(**self.address.options(), database=self.address.database, autocommit=True) as connection,
            connection.cursor() as cursor,
        ):
            cursor.execute(sql)
            return [tuple(_text(value) for value in row) for row in cursor.fetchall()]

    async def insert(self, connection: Any, item: str) -> None:
        async with connection.cursor() as cursor:
            await cursor.execute("INSERT INTO orders VALUES (%s)", (item,))

    def insert_blocking(self, connection: Any, item: str) -> None:
        with connection.cursor() as cursor:
            cursor.execute("INSERT INTO orders VALUES (%s)", (item,))


def _text(value: Any) -> Any:
    return value.decode() if isinstance(value, bytes) else value


class RealShop:
    """An application on a database."""

    def __init__(self, database: Any, *, policy: Policy | None = None) -> None:
        self.database = database
        self.once = Once(database.url, policy=policy, migrate=True)
        self.app = FastAPI(lifespan=self.once.lifespan)
        self.once.install(self.app, tenant=tenant_of)
        self.runs: list[Any] = []

    @asynccontextmanager
    async def open(self) -> AsyncIterator[RealShop]:
        """Serve, and stop."""
        async with self.once.lifespan(self.app):
            yield self

    def caller(self, target: str = "/orders", *, key: str | None = KEY, **request: Any) -> Caller:
        headers = [] if key is None else [("Idempotency-Key", key)]
        return Caller(self.app, "POST", target, headers=headers, **request)

    async def send(self, target: str = "/orders", **request: Any) -> Reply:
        return await self.caller(target, **request).run()

    @property
    def rows(self) -> list[str]:
        """What is committed, as anybody else sees it."""
        return sorted(item for (item,) in self.database.execute("SELECT item FROM orders"))

    @property
    def states(self) -> list[str]:
        """Where the records stand."""
        return sorted(state for (state,) in self.database.execute(f"SELECT state FROM {self.database.records}"))
