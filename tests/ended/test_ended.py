"""The transaction that is committed is the one that was begun, and nothing else is stored, wherever a handler writes.

Each place is a server process. A transaction ends in the middle of a handler that takes care of every error: what it
answers is not stored as a success, what it wrote before is gone, and what it writes afterwards is never committed.
"""

from __future__ import annotations

import http.client
import json
import os
import sqlite3
import subprocess
import sys
import uuid
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self
from urllib.parse import quote

import psycopg
import pytest

from ended.shop import WAYS, family_of
from harness.databases import DatabaseServer
from harness.mariadb import MariadbServer, MysqlInstallation
from harness.patience import PATIENCE

TESTS = Path(__file__).parents[1]

PLACES = {
    "aiomysql-mariadb": ("aiomysql", "mariadb"),
    "aiomysql-mysql": ("aiomysql", "mysql"),
    "pymysql-mariadb": ("pymysql", "mariadb"),
    "pymysql-mysql": ("pymysql", "mysql"),
    "engine-mariadb": ("engine", "mysql+aiomysql"),
    "engine-mysql": ("engine", "mysql+aiomysql on mysql"),
    "engine-asyncpg": ("engine", "postgresql+asyncpg"),
    "engine-psycopg": ("engine", "postgresql+psycopg"),
    "engine-sqlite": ("engine", "sqlite+aiosqlite"),
    "blocking-engine-psycopg": ("engine def", "postgresql+psycopg"),
    "blocking-engine-sqlite": ("engine def", "sqlite"),
    "flask-postgresql": ("flask", "postgresql+psycopg"),
    "flask-sqlite": ("flask", "sqlite"),
    "django-postgresql": ("django", "postgresql"),
    "django-sqlite": ("django", "sqlite"),
    "sqlite": ("sqlite", "sqlite"),
    "sqlite-def": ("sqlite def", "sqlite"),
    "asyncpg": ("asyncpg", "postgresql+asyncpg"),
    "psycopg": ("psycopg", "postgresql+psycopg"),
    "psycopg-def": ("psycopg def", "postgresql+psycopg"),
}

AWAIT_RIVAL = """
CREATE PROCEDURE await_rival() BEGIN
    DECLARE waiting INT DEFAULT 0;
    WHILE waiting = 0 DO
        DO SLEEP(0.15); -- InnoDB reads its transactions anew only if nobody has asked for a tenth of a second
        SELECT count(*) INTO waiting FROM information_schema.innodb_trx WHERE trx_state = 'LOCK WAIT';
    END WHILE;
END
"""
CROSSING = """
CREATE PROCEDURE crossing() BEGIN
    UPDATE accounts SET n = n + 1 WHERE id = 2;
    CALL await_rival();
    UPDATE accounts SET n = n + 1 WHERE id = 1;
END
"""
CROSSING_QUIETLY = """
CREATE PROCEDURE crossing_quietly() BEGIN
    DECLARE CONTINUE HANDLER FOR SQLEXCEPTION BEGIN END;
    CALL crossing();
    INSERT INTO orders VALUES ('inside');
END
"""
TABLES = {
    "mariadb": (
        "CREATE TABLE orders (item VARCHAR(50))",
        "CREATE TABLE accounts (id INT PRIMARY KEY, n INT)",
        "CREATE TABLE heavy (x INT)",
        "INSERT INTO accounts VALUES (1, 0), (2, 0)",
        AWAIT_RIVAL,
        CROSSING,
        CROSSING_QUIETLY,
        "CREATE PROCEDURE commits() BEGIN COMMIT; END",
        "CREATE PROCEDURE begins() BEGIN COMMIT; START TRANSACTION; SAVEPOINT another; END",
        "CREATE PROCEDURE makes_a_table() BEGIN DROP TABLE IF EXISTS made; CREATE TABLE made (x INT); END",
    ),
    "sqlite": (
        "CREATE TABLE orders (item TEXT)",
        "CREATE TABLE coupons (code TEXT UNIQUE)",
        "CREATE TABLE vouchers (code TEXT UNIQUE ON CONFLICT ROLLBACK)",
        "CREATE TABLE guarded (code TEXT)",
        "CREATE TRIGGER guard BEFORE INSERT ON guarded BEGIN SELECT RAISE(ROLLBACK, 'not today'); END",
        "INSERT INTO coupons VALUES ('taken')",
        "INSERT INTO vouchers VALUES ('taken')",
    ),
    "postgresql": ("CREATE TABLE orders (item TEXT)",),
}

NATIVE = frozenset({"asyncpg", "psycopg", "psycopg def"})
"""Places that send a message of their own with BEGIN."""

COMMITTED = frozenset(
    {"commit below", "another below", "procedure that commits", "procedure that begins", "procedure that makes a table"}
)
"""Where the handler itself has committed its first row, which nobody can take back."""

UNSEEN = frozenset({"another below", "procedure that begins", "deadlock that a procedure hides"})
"""Where another transaction is open already when the handler goes on: it is never committed."""


LOST = frozenset({"connection that is lost", "silence"})


def told(name: str, then: str) -> bool:
    """Whether the server's reason for the end of a session reaches us: psycopg shows it to the next statement."""
    return "psycopg" in PLACES[name][1] and then == "return"


def is_tried(name: str, way: str, effects: str) -> bool:
    """What a place cannot do is no way for it."""
    place, database = PLACES[name]
    if way == "row that changed":
        return name == "engine-mariadb"  # the isolation that it needs is an engine's own, and MySQL has no such error
    if way == "another below" and place in {"sqlite", "sqlite def"}:
        return False  # no method of the connection executes BEGIN, and what is below is not a handler's
    # Engines and Django send BEGIN by themselves, so a phase has no mark of its transaction there (docs: limits).
    return not (way == "another below" and effects == "phased" and database.startswith("postgresql")) or place in NATIVE


def tried(turn: int) -> tuple[tuple[str, tuple[str, ...]], ...]:
    """By which effects a way is tried, and how the handler goes on: pairs of all, in turn, and not all products."""
    return ("local", ("write", ("return", "refuse")[turn % 2])), (("phased", "outbox")[turn // 2 % 2], ("write",))


TRIED = [
    pytest.param(name, way, effects, thens, id=f"{name}-{effects}-{way}".replace(" ", "_"))
    for place, (name, (_, database)) in enumerate(PLACES.items())
    for number, way in enumerate(WAYS[family_of(database)])
    for effects, thens in tried(place + number)
    if is_tried(name, way, effects)
]


@dataclass(frozen=True, slots=True)
class Place:
    """A server, and its tables as anybody else sees them."""

    port: int
    query: Any

    def post(self, path: str, key: str) -> tuple[int, str | None]:
        with closing(http.client.HTTPConnection("127.0.0.1", self.port, timeout=PATIENCE)) as connection:
            connection.request("POST", quote(path), headers={"Idempotency-Key": key})
            reply = connection.getresponse()
            reply.read()
            return reply.status, reply.getheader("Idempotent-Replayed")

    def refused(self, key: str) -> str | None:
        with closing(http.client.HTTPConnection("127.0.0.1", self.port, timeout=PATIENCE)) as connection:
            connection.request("GET", "/refused")
            found: dict[str, str] = json.loads(connection.getresponse().read())
            return found.get(key)

    def rows(self) -> list[str]:
        return sorted(item for (item,) in self.query("SELECT item FROM orders"))


@pytest.fixture(scope="module")
def places(tmp_path_factory: pytest.TempPathFactory, postgres_server: DatabaseServer) -> Iterator[dict[str, Place]]:
    """The places that were asked for, each with a database of its own."""
    with Opening(tmp_path_factory, postgres_server) as opening:
        yield opening


class Opening(dict[str, Place]):
    """Opens a place when it is first asked for, and closes the one before."""

    def __init__(self, folders: pytest.TempPathFactory, postgres: DatabaseServer) -> None:
        super().__init__()
        self._folders, self._postgres = folders, postgres
        self._servers: dict[str, MariadbServer] = {}
        self._place, self._all = ExitStack(), ExitStack()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        with self._all:
            self._place.close()

    def __missing__(self, name: str) -> Place:
        self._place.close()
        self.clear()
        self[name] = place = self._place.enter_context(self._opened(name))
        return place

    @contextmanager
    def _opened(self, name: str) -> Iterator[Place]:
        place, database = PLACES[name]
        family = family_of(database)
        with getattr(self, f"_{family}")(database) as (url, query):
            for sql in TABLES[family]:
                query(sql)
            with serving(place, url, *(["repeatable"] if name == "engine-mariadb" else [])) as port:
                yield Place(port, query)

    @contextmanager
    def _mariadb(self, database: str) -> Iterator[tuple[str, Any]]:
        server = self._server("mysql" if database in {"mysql", "mysql+aiomysql on mysql"} else "mariadb")
        name = f"ended_{uuid.uuid4().hex}"
        url = server.create_database(name)
        if "+" in database:
            url = f"mysql+aiomysql://{url.partition('://')[2]}"
        yield url, lambda sql: server.say(sql, name)
        server.drop_database(name)

    def _server(self, kind: str) -> MariadbServer:
        """One that rolls a whole transaction back after a time-out, and MariaDB also for a row that changed."""
        if kind not in self._servers:
            settings = {"innodb-rollback-on-timeout": "ON"}
            server = (
                MariadbServer(settings, kind=MysqlInstallation)
                if kind == "mysql"
                else MariadbServer({**settings, "innodb-snapshot-isolation": "ON"})
            )
            self._servers[kind] = self._all.enter_context(server)
        return self._servers[kind]

    @contextmanager
    def _postgresql(self, database: str) -> Iterator[tuple[str, Any]]:
        name = f"ended_{uuid.uuid4().hex}"
        dsn = self._postgres.create_database(name)

        def query(sql: str) -> list[Any]:
            with psycopg.connect(dsn, autocommit=True) as connection:
                cursor = connection.execute(sql.encode())
                return cursor.fetchall() if cursor.description else []

        yield dsn.replace("postgresql", database, 1), query
        self._postgres.drop_database(name)

    @contextmanager
    def _sqlite(self, database: str) -> Iterator[tuple[str, Any]]:
        path = self._folders.mktemp("ended") / "shop.db"

        def query(sql: str) -> list[Any]:
            with closing(sqlite3.connect(path, timeout=PATIENCE)) as connection, connection:
                return connection.execute(sql).fetchall()

        yield f"{database}:///{path}", query


@contextmanager
def serving(place: str, url: str, *more: str) -> Iterator[int]:
    """A process of its own; its port."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(TESTS), os.environ.get("PYTHONPATH", "")])}
    command = [sys.executable, "-m", "ended.shop", place, url, *more]
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            yield int(process.stdout.readline())
        finally:
            process.kill()


@pytest.mark.parametrize(("name", "way", "effects", "thens"), TRIED)
def test_only_the_transaction_oncekey_began_is_committed(
    places: dict[str, Place], name: str, way: str, effects: str, thens: tuple[str, ...]
) -> None:
    # L5, L6, F16, F20
    place = places[name]
    for then in thens:
        place.query("DELETE FROM orders")
        key, path = uuid.uuid4().hex, f"/{effects}/{way}/{then}"
        first, replayed = place.post(path, key)
        left = place.rows()
        assert replayed is None
        if then == "refuse":
            assert first == 404
        else:
            assert first in ((500, 503) if way in LOST and not (way == "silence" and told(name, then)) else (500,))
        assert left == (["before 1"] if way in COMMITTED else []), "rows without their key"
        if then != "return" and not (way in UNSEEN or (way == "deadlock in several" and "engine" in name)):
            assert place.refused(key) is not None, "a statement was executed after the end of the transaction"
        again, replayed = place.post(path, key)
        if then == "refuse" and effects != "phased":
            assert (again, replayed) == (404, "true")  # a refusal needs no rows
        else:
            assert (again, replayed) == (202 if effects == "outbox" else 201, None)
            assert place.rows() == [*left, "before 2"]
