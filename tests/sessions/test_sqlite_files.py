"""A SQLite file that was deleted, replaced or read-only: nothing is acknowledged that is in no file.

With a write-ahead log SQLite itself goes on writing to a file that was unlinked.
"""

import os
import shutil
import sqlite3
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pysqlite3.dbapi2 as pysqlite3
import pytest
from sqlalchemy import create_engine

from drivers.speaking import insert, items, saying
from oncekey.core.errors import StoreUnavailableError
from oncekey.core.flow import Mode
from oncekey.databases.sqlalchemy.generated.driver import BlockingSqlalchemyDriver
from oncekey.databases.sqlite.blocking import SqliteDriver
from sessions.ways import ON_SQLITE, Shop

SELL = "INSERT INTO orders VALUES ('tea')"
NOBODY = 65534


class File:
    """The file of a shop, and what happens to it."""

    def __init__(self, way: str, folder: Path) -> None:
        self.path = folder / "shop.db"
        self.module = pysqlite3 if way == "pysqlite3" else sqlite3
        with closing(self.module.connect(self.path)) as connection:
            connection.execute("PRAGMA journal_mode = WAL")
            connection.execute("CREATE TABLE orders (item TEXT)")
            connection.commit()
        self.copy = folder / "copy.db"

    def save(self) -> None:
        """A copy, as a backup makes it."""
        with closing(self.module.connect(self.path)) as source, closing(self.module.connect(self.copy)) as copy:
            source.backup(copy)

    def delete(self) -> None:
        for path in self.path.parent.glob("shop.db*"):
            path.unlink()

    def restore(self) -> None:
        """Replace it by the copy."""
        self.delete()
        shutil.move(self.copy, self.path)

    def rows(self) -> list[str]:
        with closing(self.module.connect(self.path)) as connection:
            return [item for (item,) in connection.execute("SELECT item FROM orders ORDER BY item")]


@pytest.fixture(params=ON_SQLITE)
def way(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def file(way: str, tmp_path: Path) -> File:
    return File(way, tmp_path)


def shop_on(file: File, way: str) -> Shop:
    return Shop(way, f"{'sqlite+aiosqlite' if way == 'sa-sqlite' else 'sqlite'}:///{file.path}")


async def sells_at_last(shop: Shop) -> int:
    """How many requests were turned away until one was served; each connection of a pool may be outdated."""
    turned_away = 0
    while (status := (await shop.send(shop.saying(SELL))).status) != 200:
        assert status == 503
        turned_away += 1
        assert turned_away < 8
    return turned_away


async def test_deleted_file_returns_503_until_it_is_restored(way: str, file: File) -> None:
    shop = shop_on(file, way)
    async with shop.open():
        assert (await shop.send(shop.saying(SELL))).status == 200
        file.save()
        file.delete()
        runs = shop.runs
        assert [(await shop.send(shop.saying(SELL))).status for _ in range(3)] == [503] * 3
        assert shop.runs == runs
        assert not file.path.exists()
        file.restore()
        await sells_at_last(shop)
        assert file.rows() == ["tea", "tea"]


async def test_replaced_file_is_reopened(way: str, file: File) -> None:
    shop = shop_on(file, way)
    async with shop.open():
        assert (await shop.send(shop.saying(SELL))).status == 200
        file.save()
        file.restore()
        await sells_at_last(shop)
        assert file.rows() == ["tea", "tea"]


async def test_a_commit_into_a_replaced_file_is_not_acknowledged(way: str, file: File) -> None:
    shop = shop_on(file, way)

    async def replaces(op: Any) -> None:
        await shop.say(op.connection, "SELECT item FROM orders")
        file.restore()
        await shop.say(op.connection, SELL)

    async with shop.open():
        assert (await shop.send(shop.saying(SELL))).status == 200
        file.save()
        assert (await shop.send(replaces)).status in {500, 503}  # without a write-ahead log SQLite refuses the INSERT
        assert file.rows() == ["tea"]
        await sells_at_last(shop)
        assert file.rows() == ["tea", "tea"]


@contextmanager
def bound_by_permissions() -> Iterator[None]:
    """As a user whom the permissions of files bind; they do not bind root."""
    user = os.geteuid()
    if user == 0:
        os.seteuid(NOBODY)
    try:
        yield
    finally:
        os.seteuid(user)


@pytest.fixture(params=["sqlite3", "pysqlite3", "sqlalchemy"])
def driver(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """A driver on a file that it may not write to, in a folder that everybody may enter."""
    folder = tmp_path_factory.mktemp("open")
    path = folder / "shop.db"
    module: Any = pysqlite3 if request.param == "pysqlite3" else sqlite3
    with closing(module.connect(path)) as connection:
        if module is pysqlite3:
            connection.execute("PRAGMA journal_mode = WAL")
        connection.execute("CREATE TABLE orders (id INTEGER PRIMARY KEY, item TEXT)")
    base = tmp_path_factory.getbasetemp()  # below a folder of the user's own, and of a worker's under pytest-xdist
    for each in (folder, base, *(one for one in base.parents if one.name.startswith("pytest-"))):
        each.chmod(0o777)
    path.chmod(0o444)
    if request.param == "sqlalchemy":
        driver: Any = BlockingSqlalchemyDriver(create_engine(f"sqlite:///{path}"))
        driver.path = str(path)
    else:
        driver = SqliteDriver(path, module=module)
    yield driver
    driver.close()


def test_a_connection_that_was_opened_for_reading_only_is_not_kept(driver: Any) -> None:
    with bound_by_permissions():
        assert items(driver) == []
        for _ in range(2):
            with pytest.raises(StoreUnavailableError, match="read-only"):
                driver.run(saying(Mode.SINGLE, insert("tea")))
        if isinstance(driver, SqliteDriver):
            with pytest.raises(StoreUnavailableError, match="read-only"):
                driver.begin().connection.execute("SELECT 1")
    for path in Path(driver.path).parent.glob("shop.db*"):  # SQLite gives its logs the permissions of the file
        path.chmod(0o666)
    with bound_by_permissions():
        driver.run(saying(Mode.SINGLE, insert("tea")))
        tx = driver.begin()
        tx.run(saying(Mode.ATOMIC, insert("milk")).body())
        tx.commit()
        assert items(driver) == ["tea", "milk"]
