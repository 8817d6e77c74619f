"""kill -9 at every step of an OUTBOX request: what was accepted is committed, and what was committed is done (O5).

Over HTTP and through the inbox, on every store that has an outbox and by every way to it.
"""

from __future__ import annotations

import json
import os
import sqlite3
import subprocess
import sys
import uuid
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psycopg
import pytest

from harness.mariadb import MariadbServer, mariadb_with_tables
from harness.patience import wait_until
from harness.tables import database_with_tables, leases_run_out
from outbox.accepting import BOOKED, EARLY, KINDS, SENT, STEPS

ACCEPTED, BUSY, DONE = ("accepted", "busy", "done")
MEANS = {202: ACCEPTED, 409: BUSY, 503: BUSY, 201: DONE, "handled": ACCEPTED, "busy": BUSY, "duplicate": DONE}


@dataclass
class Told:
    """What a client or a consumer was told."""

    means: str
    body: Any


class Bookings:
    """A database with a table of bookings, and processes that book."""

    def __init__(self, kind: str, address: str, calls: Path, server: MariadbServer | None) -> None:
        self.kind, self.calls, self._server = kind, calls, server
        self._url = f"sqlite:///{address}" if "sqlite" in kind else f"postgresql://{address}"
        self._database = address.rpartition("/")[2]
        self.sql("CREATE TABLE IF NOT EXISTS bookings (x INTEGER)")
        command = (sys.executable, "-c", "from outbox.accepting import main; main()", kind, address, str(calls))
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        )

    def close(self) -> None:
        self._process.communicate()

    def sql(self, text: str) -> list[Any]:
        """A statement as anybody else would say it."""
        if self._server is not None:
            return list(self._server.say(text, self._database))
        if self._url.startswith("sqlite"):
            with closing(sqlite3.connect(self._url.removeprefix("sqlite:///"), timeout=60)) as file, file:
                return file.execute(text).fetchall()
        with psycopg.connect(self._url, autocommit=True) as connection:
            cursor = connection.execute(text.encode())
            return cursor.fetchall() if cursor.description else []

    def _say(self, do: str, key: str, die: str | None) -> dict[str, Any]:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps({"do": do, "key": key, "die": die}) + "\n")
        self._process.stdin.flush()
        said: dict[str, Any] = json.loads(self._process.stdout.readline())
        assert said["killed"] is (die is not None), said
        return said

    def send(self, way: str, key: str) -> Told:
        said = self._say(way, key, None)
        return Told(MEANS[said["said"]], said["body"])

    def dies(self, way: str, key: str, step: str) -> None:
        """The request, or a worker that has its parcel, is killed at the step."""
        if step in {"called", "delivered"}:
            assert self.send(way, key).means == ACCEPTED
            self._say("worker", key, step)
        else:
            self._say(way, key, step)

    def work(self) -> None:
        self._say("worker", "", None)

    def pass_time(self) -> None:
        """Every lease is over."""
        if self._server is None:
            leases_run_out(self._url)
            return
        self.sql("UPDATE oncekey_record SET lease_until = 1 WHERE lease_until IS NOT NULL")
        self.sql("UPDATE oncekey_outbox SET due_at = 1")

    @property
    def rows(self) -> int:
        return len(self.sql("SELECT x FROM bookings"))

    def is_claimed(self, key: str) -> bool:
        table = "oncekey.record" if self._server is None and "sqlite" not in self.kind else "oncekey_record"
        (found,) = self.sql(f"SELECT count(*) FROM {table} WHERE state = 'in_progress' AND owner IS NOT NULL")[0]
        return bool(found)


@pytest.fixture(scope="module")
def shared(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bookings]:
    """One database and one process for the tests of a kind."""
    kind, folder = request.param, tmp_path_factory.mktemp("accepted")

    def bookings(address: str, server: MariadbServer | None = None) -> Bookings:
        return Bookings(kind, address, folder / "calls", server)

    if "mysql" in kind:
        server = request.getfixturevalue("mysql_server" if kind == "mysql" else "mariadb_server")
        with mariadb_with_tables(server, "accepted") as url, closing(bookings(url.partition("//")[2], server)) as made:
            yield made
    elif "sqlite" in kind:
        from oncekey import wire

        with closing(wire.connect(f"sqlite:///{folder}/shop.db")) as engine:
            engine.migrate()
        with closing(bookings(f"{folder}/shop.db")) as made:
            yield made
    else:
        server = request.getfixturevalue("postgres_server")
        with database_with_tables(server, "accepted") as dsn, closing(bookings(dsn.partition("//")[2])) as made:
            yield made


@pytest.fixture
def bookings(shared: Bookings) -> Bookings:
    shared.sql("DELETE FROM bookings")
    shared.calls.unlink(missing_ok=True)
    return shared


def way_of(kind: str, step: str) -> str:
    """Both ways, with every kind and with every step."""
    return ("http", "inbox")[([*KINDS].index(kind) + STEPS.index(step)) % 2]


# Two decorators: in one, pytest would give `shared` the scope of `step`, so a process and a database for each test.
@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("shared", KINDS, indirect=True)
def test_every_accepted_request_is_committed_and_delivered(bookings: Bookings, step: str) -> None:
    key, way = uuid.uuid4().hex, way_of(bookings.kind, step)
    bookings.dies(way, key, step)
    claimed = bookings.is_claimed(key)

    # At once, while the dead one's lease stands: accepted exactly if its rows are committed.
    again = bookings.send(way, key)
    assert bookings.rows == (0 if again.means == BUSY else 1)
    if step in EARLY:
        assert again.means == BUSY or not claimed
    else:
        assert again.means == (DONE if step == "delivered" else ACCEPTED)
    assert again.body == {ACCEPTED: BOOKED, DONE: SENT}.get(again.means, again.body)

    # When the lease is over, a retry executes it, once.
    bookings.pass_time()
    tries = [again]

    def is_accepted() -> bool:
        tries.append(bookings.send(way, key))
        return tries[-1].means != BUSY

    wait_until(is_accepted, lambda: str(tries[-1]))
    assert bookings.rows == 1

    # A worker does the rest, and every later retry gets its result.
    bookings.pass_time()
    bookings.work()
    assert bookings.send(way, key) == Told(DONE, SENT)
    calls = bookings.calls.read_text().split()
    assert (len(calls), len(set(calls))) == (2 if step == "called" else 1, 1)
    assert bookings.rows == 1
