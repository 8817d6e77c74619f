"""A request's story goes over processes: one that is killed, and the worker that goes on with what it left behind."""

from __future__ import annotations

import json
import os
import signal
import sqlite3
import subprocess
import sys
from contextlib import closing
from pathlib import Path
from typing import Any
from uuid import UUID

TESTS = Path(__file__).parents[1]


def test_killed_request_and_its_worker_share_one_trace(tmp_path: Path) -> None:
    """The spans of both processes, put together as a collector would."""
    environment = {**os.environ, "PYTHONPATH": str(TESTS)}
    first = subprocess.run(
        [sys.executable, "-m", "observe.storied"],
        cwd=tmp_path,
        env={**environment, "ONCEKEY_TEST_DYING": "yes"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert first.returncode == -signal.SIGKILL, first.stderr
    with closing(sqlite3.connect(tmp_path / "story.db")) as connection, connection:
        # The worker is there before a lease is over, or a resolver's turn comes.
        connection.execute("UPDATE oncekey_record SET lease_until = created_at - 1 WHERE state = 'in_progress'")
        connection.execute("UPDATE oncekey_record SET reconcile_after = 1 WHERE state = 'unknown'")
        stories = {
            operation: UUID(str(incarnation)).hex
            for operation, incarnation in connection.execute("SELECT operation, incarnation FROM oncekey_record")
        }
    worker = [str(Path(sys.executable).with_name("oncekey")), "worker", "--app", "observe.storied:once", "--once"]
    done = subprocess.run(worker, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr

    spans = [json.loads(line) for one in tmp_path.glob("spans-*.jsonl") for line in one.read_text().splitlines()]
    killed = next(one["pid"] for one in spans if one["name"] == "POST /charges")

    def told(operation: str) -> set[tuple[str, str, tuple[str, ...]]]:
        return {(one["name"], who(one), tuple(one["links"])) for one in spans if one["trace"] == stories[operation]}

    def who(span: Any) -> str:
        return "application" if span["pid"] == killed else "worker"

    charges, transfers, orders = (f"{number:032x}" for number in (1, 2, 3))
    assert told("charge") == {
        ("oncekey attempt charge", "application", (charges,)),
        ("oncekey doubted", "application", (charges,)),
        ("oncekey resolved", "worker", ()),
    }
    assert told("transfer") == {
        ("oncekey attempt transfer", "application", (transfers,)),
        ("at the bank", "worker", ()),
    }
    # The completer repeats the client's own `traceparent`, so both attempts lead to the client's trace.
    assert told("order") == {
        ("oncekey attempt order", "application", (orders,)),
        ("oncekey attempt order", "worker", (orders,)),
    }
    completed = {(one["name"], who(one)) for one in spans if one["trace"] == orders}
    assert {("oncekey value drawn", "worker"), ("oncekey settle", "worker")} <= completed
    (processed,) = [one for one in spans if one["name"] == "process bank"]
    assert processed["links"] == [stories["transfer"]]
