"""Where metrics are served: the demo and a worker of its own; and what a look at the gauges costs the store."""

from __future__ import annotations

import sqlite3
import subprocess
import sys
import uuid
from contextlib import closing
from pathlib import Path

import psycopg
import pytest

from console.trouble import fill, opened
from harness.demo import ALPHA, Demo, get
from harness.filling import fill_postgres
from harness.patience import wait_until
from observe.shop import read
from oncekey.core.flow import drive
from oncekey.databases.postgres.generated.psycopg import PsycopgDriver
from oncekey.databases.postgres.store import PostgresStore
from oncekey.databases.sqlite.blocking import SqliteDriver
from oncekey.databases.sqlite.store import SqliteStore
from oncekey.engine import migrating
from oncekey.observe.measuring import gauges_of
from upkeep.test_plans import nodes

WORKER = """
from oncekey import Message, Once
from oncekey.observe import Prometheus

once = Once("sqlite:///worker.db", migrate=True, observers=[Prometheus()])


@once.topic("parcel")
def deliver(message: Message) -> None: ...
"""


def test_the_demo_shows_its_metrics(tmp_path: Path) -> None:
    # R199, R200
    with Demo(tmp_path) as demo:
        before = read(get(f"{demo.url}/metrics").text)
        assert set(before.values()) == {0}
        key = str(uuid.uuid4())
        assert demo.order(key, token=ALPHA).status_code == demo.order(key, token=ALPHA).status_code == 201
        answer = get(f"{demo.url}/metrics")
        assert answer.headers["content-type"].startswith("text/plain; version=0.0.4")
        moved = {name: value for name, value in read(answer.text).items() if value}
        assert moved == {"api.idempotency.reserve.created.count": 1, "api.idempotency.reserve.replay.count": 1}
        assert key not in answer.text
        seen = 'api_idempotency_workers{task="relay"} 1.0'  # its workers have only just begun
        wait_until(lambda: seen in get(f"{demo.url}/metrics").text, "no worker was seen", every=0.05)


def test_a_worker_shows_its_metrics(tmp_path: Path) -> None:
    # R212, R213
    (tmp_path / "observed.py").write_text(WORKER)
    command = [
        str(Path(sys.executable).with_name("oncekey")),
        "worker",
        "--app",
        "observed:once",
        "--health",
        "127.0.0.1:0",
    ]
    with subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, text=True) as worker:
        try:
            assert worker.stdout is not None
            port = next(line for line in worker.stdout if line.startswith("health on port ")).split()[-1]
            page = get(f"http://127.0.0.1:{port}/metrics").text
            assert set(read(page).values()) == {0}
            assert "api_idempotency_dlq_depth 0.0" in page
            assert get(f"http://127.0.0.1:{port}/healthz").json() == {"alive": True}
        finally:
            worker.terminate()


@pytest.fixture
def full(tables_dsn: str) -> str:
    """100,000 records of today, nearly all of them finished."""
    driver = PsycopgDriver(tables_dsn, pool_size=1)
    drive(migrating.up(PostgresStore().schema), driver.run)
    driver.close()
    with psycopg.connect(tables_dsn, autocommit=True) as connection:
        fill_postgres(connection, 1, 100_000)
        # What a session counted itself is added to what it counts now, unless it was told before.
        connection.execute("SELECT pg_stat_force_next_flush()")
        connection.execute("VACUUM ANALYZE oncekey.record")
    return tables_dsn


def test_postgresql_gauges_read_only_unfinished_records(full: str) -> None:
    # R135, R213
    said = PostgresStore()._statements._commands["standing"].replace(":now::bigint", "NULL::bigint")
    with psycopg.connect(full, autocommit=True) as connection:
        [[[plan]]] = connection.execute(f"EXPLAIN (FORMAT JSON) {said}".encode()).fetchall()
    found_by = {node.get("Index Name") for node in nodes(plan["Plan"])}
    assert {"record_key", "record_expiring"} <= found_by
    scanned = {node["Relation Name"] for node in nodes(plan["Plan"]) if node["Node Type"] == "Seq Scan"}
    assert scanned <= {"outbox", "dead_letter"}  # which are empty
    driver = PsycopgDriver(full, pool_size=1)
    found = drive(gauges_of(PostgresStore()), driver.run)
    driver.close()
    assert found is not None
    assert (found.records["in_progress"], found.records["unknown"], found.records["failed_retryable"]) == (
        200,
        200,
        1000,
    )
    assert found.records["finished"] == pytest.approx(100_000 - 1400, rel=0.05)  # by the server's statistics
    assert found.oldest["unknown"] > 0


MADE = {"clock", "unfinished", "record", "few", "due", "dead", "expired", "oncekey_clock", "CONSTANT", "counted"}
"""What the statement makes itself."""


def test_sqlite_gauges_use_indexes(tmp_path: Path) -> None:
    # R135, R213
    driver = SqliteDriver(tmp_path / "plans.db")
    drive(migrating.up(SqliteStore().schema), driver.run)
    driver.close()
    said = SqliteStore()._statements._commands["standing"]
    with closing(sqlite3.connect(tmp_path / "plans.db")) as connection:
        plan = [row[3] for row in connection.execute(f"EXPLAIN QUERY PLAN {said}", {"now": None})]
    lines = [line.partition(" USING ") for line in plan if line.startswith(("SCAN", "SEARCH"))]
    read_by = {what.split()[1]: how.removeprefix("COVERING ").split()[1] for what, _, how in lines if how}
    covered = {what.split()[1] for what, _, how in lines if how.startswith("COVERING")}
    whole = {what.split()[1] for what, _, how in lines if not how}
    assert whole <= MADE, plan
    assert {"entry", "parcel", "letter"} <= covered  # of which there may be many
    assert read_by == {
        "waiting": "oncekey_record_waiting",
        "running": "oncekey_record_running",
        "past": "oncekey_record_expiring",
        "entry": "sqlite_autoindex_oncekey_record_1",
        "parcel": "oncekey_outbox_due",
        "letter": "oncekey_dead_letter_died",
    }, plan


def test_gauges_of_sqlite_count_what_is_there(tmp_path: Path) -> None:
    with opened(f"sqlite:///{tmp_path}/shop.db") as world:
        fill(world, finished=40)
        found = world.go(gauges_of(world.store))
    assert found.records == {"pending": 1, "in_progress": 2, "failed_retryable": 7, "unknown": 3, "finished": 43}
