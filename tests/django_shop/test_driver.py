"""The driver on Django's connections: the shipped contract, whose connection is used, and what its errors mean."""

from __future__ import annotations

import asyncio
import os
import shutil
import sqlite3
import threading
from contextlib import closing
from pathlib import Path

import pytest
from django.db import connections, transaction

from django_shop.asking import new_key, post, replayed, sold, stored
from django_shop.conftest import empty
from harness.dsn import address
from harness.patience import wait_until
from harness.proxy import Proxy
from oncekey import LOCAL, SINGLE_TENANT
from oncekey.core.errors import ConfigurationError, RolledBackError, SchemaError, StoreBusyError, StoreUnavailableError
from oncekey.core.flow import Body, Mode, Rows, Statement, Transaction
from oncekey.databases.postgres.store import PostgresStore
from oncekey.databases.sqlite.store import SqliteStore
from oncekey.databases.threads import ThreadedDriver
from oncekey.django import Database
from oncekey.django.database import Spares
from oncekey.frameworks.blocking import current
from oncekey.ports.store import Borrowed
from oncekey_contract import StoreContract, blocking, under_asyncio
from oncekey_contract.claiming import Racing
from oncekey_contract.expiring import Sweeping
from oncekey_contract.owning import Renewing, TakingOver
from oncekey_contract.resuming import HandingBack


@pytest.fixture(scope="class")
def emptied(project):
    """No records, for one driver's whole contract: every scenario has keys of its own."""
    for alias in ("default", "lite"):
        for _ in empty(alias):
            pass


class InARequest(StoreContract):
    """All of it on the connection of a thread that serves a request."""

    alias = "default"
    store = PostgresStore

    @pytest.fixture
    def world(self, emptied):
        token = current.set(object())
        try:
            with blocking(self.store, Database(self.alias).driver()) as world:
                yield world
        finally:
            current.reset(token)
            connections.close_all()


class TestPostgresInARequest(InARequest):
    pass


class TestSqliteInARequest(InARequest):
    alias = "lite"
    store = SqliteStore


class TestPostgresOutsideRequests(TakingOver, Renewing, HandingBack, Sweeping, Racing):
    """On connections of its own, from the threads of an event loop: what workers do, and races."""

    @pytest.fixture
    def world(self, emptied):
        with under_asyncio(PostgresStore, ThreadedDriver(Database("default").driver())) as world:
            yield world


COMMIT = b"COMMIT\0"  # and not READ COMMITTED


def asked(sql: str, mode: Mode = Mode.READ) -> Transaction[list[dict]]:
    def body():
        return (yield Statement("asked", sql))

    return Transaction("asked", mode, body)


def pid_of(driver) -> int:
    return driver.run(asked("SELECT pg_backend_pid() AS pid"))[0]["pid"]


def test_a_django_database_is_a_borrowed_engine(project: None) -> None:
    for alias, dialect in (("default", "postgresql"), ("lite", "sqlite")):
        database = Database(alias)
        assert isinstance(database, Borrowed)
        assert (database.dialect, database.title) == (dialect, f"Django's database '{alias}'")


def test_the_driver_uses_djangos_connection_only_in_a_request(postgres: str) -> None:
    driver = Database().driver()
    with connections["default"].cursor() as cursor:
        cursor.execute("SELECT pg_backend_pid()")
        own = cursor.fetchone()[0]
    token = current.set(object())
    try:
        assert pid_of(driver) == own
        with transaction.atomic():
            assert pid_of(driver) != own  # it commits by itself
    finally:
        current.reset(token)
    assert pid_of(driver) != own  # no request is served here
    driver.close()


@pytest.mark.parametrize("atomic_requests", [False, True])
def test_the_first_request_of_a_process_needs_one_connection(
    postgres: str, monkeypatch: pytest.MonkeyPatch, *, atomic_requests: bool
) -> None:
    # In a small pool every thread may hold one: a second one for the check of the store would never come.
    from django_shop import on_default

    connections.settings[postgres]["ATOMIC_REQUESTS"] = atomic_requests
    monkeypatch.setattr(on_default.once.threads, "_started", False)  # as in a process that has just begun
    monkeypatch.setattr(Spares, "lent", lambda _: pytest.fail("a second connection"))
    assert post("/orders").status_code == 201


def test_conn_max_age_closes_connections_of_other_threads(postgres: str) -> None:
    driver, seen = Database().driver(), []
    threads = [threading.Thread(target=lambda: seen.append(pid_of(driver))) for _ in range(3)]
    for thread in threads:
        thread.start()
        thread.join()
    driver.close()

    def gone() -> bool:
        with connections["default"].cursor() as cursor:
            cursor.execute("SELECT count(*) FROM pg_stat_activity WHERE pid = ANY(%s)", [seen])
            return bool(cursor.fetchone() == (0,))

    wait_until(gone, "a connection stayed open although CONN_MAX_AGE is 0")


def test_a_forked_django_process_opens_its_own_connections(postgres: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(connections.settings["default"], "CONN_MAX_AGE", None)
    driver = Database().driver()
    own = pid_of(driver)
    assert pid_of(driver) == own  # it is kept
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.write(writing, str(pid_of(driver)).encode())
        finally:
            os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as said:
        assert int(said.read()) != own
    os.waitpid(child, 0)
    assert pid_of(driver) == own  # nobody has said goodbye in its name
    driver.close()


def test_missing_tables_raise_schema_error(alias: str) -> None:
    driver = Database(alias).driver()
    with pytest.raises(SchemaError, match="oncekey migrate up"):
        driver.run(asked("SELECT * FROM oncekey_nothing"))
    with pytest.raises(SchemaError):
        driver.run(asked("SELECT * FROM oncekey_nothing", Mode.ATOMIC))
    assert driver.run(asked("SELECT 1 AS one"))[0]["one"] == 1
    driver.close()


def test_an_unreachable_server_raises_store_unavailable(postgres: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(connections.settings["default"], "PORT", "1")
    connections.close_all()
    driver = Database().driver()
    with pytest.raises(StoreUnavailableError, match="no connection to PostgreSQL"):
        driver.run(asked("SELECT 1"))
    with pytest.raises(StoreUnavailableError, match="no connection to PostgreSQL"):
        driver.begin()
    assert not connections["default"].in_atomic_block


def test_a_locked_sqlite_database_returns_503_after_its_timeout(lite: str, monkeypatch: pytest.MonkeyPatch) -> None:
    # Pitfall 15: IMMEDIATE waits at its BEGIN
    options = {"transaction_mode": "IMMEDIATE", "timeout": 0.05}
    monkeypatch.setitem(connections.settings["lite"], "OPTIONS", options)
    connections.close_all()
    with closing(sqlite3.connect(connections.settings["lite"]["NAME"], isolation_level=None)) as other:
        other.execute("BEGIN IMMEDIATE")
        with pytest.raises(StoreBusyError):
            Database("lite").driver().begin()
        assert post("/orders").status_code == 503
        other.execute("ROLLBACK")
    assert post("/orders").status_code == 201
    connections.close_all()


def test_a_replaced_sqlite_file_returns_503_until_reopened(lite: str, tmp_path: Path) -> None:
    path = Path(connections.settings["lite"]["NAME"])
    with closing(sqlite3.connect(path)) as file:
        file.execute("PRAGMA journal_mode = WAL")
    connections.close_all()
    assert post("/orders").status_code == 201
    copy, kept = tmp_path / "copy.db", sold()
    with closing(sqlite3.connect(path)) as source, closing(sqlite3.connect(copy)) as backup:
        source.backup(backup)
    for each in path.parent.glob(f"{path.name}*"):
        each.unlink()
    assert [post("/orders").status_code for _ in range(3)] == [503] * 3
    assert not path.exists()
    shutil.move(copy, path)
    assert post("/orders").status_code == 201
    connections.close_all()
    assert sold() == [*kept, "tea"]
    connections.close_all()
    with closing(sqlite3.connect(path)) as file:  # other tests use the file with another copy of SQLite
        assert file.execute("PRAGMA journal_mode = DELETE").fetchone() == ("delete",)


def test_the_record_is_written_with_the_session_role(postgres: str) -> None:
    """A view that acts as another role for its transaction, which may not write the key's record."""
    token = current.set(object())
    driver = Database("default").driver()
    with connections["default"].cursor() as cursor:
        cursor.execute("CREATE ROLE django_tenant")
    try:
        tx = driver.begin()
        with tx.connection.cursor() as cursor:
            cursor.execute("SET LOCAL ROLE django_tenant")
        assert tx.run(answers("SELECT current_user::text AS who")) == [{"who": "postgres"}]
        with tx.connection.cursor() as cursor:
            cursor.execute("SELECT current_user::text")
            assert cursor.fetchone() == ("django_tenant",)
        tx.commit()
        tx = driver.begin()
        with tx.connection.cursor() as cursor:
            cursor.execute("SET LOCAL transaction_read_only = on")
        with pytest.raises(RolledBackError, match="read-only"):
            tx.run(answers("DELETE FROM oncekey.record"))
        tx.rollback()
    finally:
        current.reset(token)
        with connections["default"].cursor() as cursor:
            cursor.execute("DROP ROLE django_tenant")
        connections.close_all()


def answers(sql: str) -> Body[Rows]:
    return (yield Statement("test", sql))


def test_a_database_of_another_kind_is_refused(project: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections["lite"], "vendor", "oracle", raising=False)
    with pytest.raises(
        ConfigurationError, match=r"is Oracle; Django databases that store keys must be PostgreSQL or SQLite"
    ):
        Database("lite").dialect  # noqa: B018  (it is asked)


def test_async_local_functions_are_rejected_in_django(postgres: str) -> None:
    from oncekey.django import Once

    once = Once(tenant=SINGLE_TENANT, survey=False)

    @once.function(effects=LOCAL, key="number", operation="sell")
    async def sell(number: str) -> None: ...

    async def work() -> None:
        async with once.lifespan():
            await sell("a-number-of-an-order")

    with pytest.raises(ConfigurationError, match="make it `def`, or set effects=INLINE"):
        asyncio.run(work())


def test_django_functions_commit_rows_with_their_key(postgres: str) -> None:
    from django_shop.models import Order
    from oncekey.django import Once

    once = Once(tenant=SINGLE_TENANT, survey=False)

    @once.function(effects=LOCAL, key="number", operation="sell")
    def sell(number: str, item: str) -> str:
        Order.objects.create(item=item)
        if item == "lost":
            raise ZeroDivisionError
        return item

    assert [sell("a-number-of-an-order", "tea") for _ in range(2)] == ["tea", "tea"]
    with pytest.raises(ZeroDivisionError):
        sell("another-number", "lost")
    assert (sold(), stored("default")) == (["tea"], 1)
    once.blocking().close()


@pytest.fixture
def proxy(postgres: str, monkeypatch: pytest.MonkeyPatch):
    """A proxy between the site and its database."""
    host, port = address(_dsn())
    with Proxy(host, port) as proxy:
        assert post("/orders", {"item": "warm"}).status_code == 201
        connections.close_all()
        monkeypatch.setitem(connections.settings["default"], "PORT", str(proxy.port))
        monkeypatch.setitem(connections.settings["default"], "HOST", "127.0.0.1")
        yield proxy
        connections.close_all()
    monkeypatch.undo()


def _dsn() -> str:
    return os.environ["SHOP_DATABASE"]


@pytest.mark.parametrize("atomic_requests", [False, True])
def test_a_django_commit_with_a_lost_reply_is_verified(proxy: Proxy, *, atomic_requests: bool) -> None:
    # P7: committed it is, and so the client is told
    connections.settings["default"]["ATOMIC_REQUESTS"] = atomic_requests
    key = new_key()
    lost = proxy.lose_reply(COMMIT, COMMIT)
    response = post("/orders", key=key)
    assert lost.wait(60)
    assert (response.status_code, replayed(response)) == (201, True)
    assert (sold(), stored("default")) == (["tea", "warm"], 2)


def test_a_lost_django_commit_returns_503_and_rolls_back(proxy: Proxy) -> None:
    key = new_key()
    lost = proxy.lose_request(COMMIT)
    response = post("/orders", key=key)
    assert lost.wait(60)
    assert response.status_code == 503
    assert (sold(), stored("default")) == (["warm"], 1)
    assert post("/orders", key=key).status_code == 201
