"""kill -9 of a worker that has a batch in its hands: nothing is lost, and every line keeps its order."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections import defaultdict
from pathlib import Path

import psycopg

from harness.patience import PATIENCE
from oncekey.databases.postgres.generated.psycopg import PsycopgDriver
from oncekey.databases.postgres.store import PostgresStore
from oncekey_contract.world import blocking
from outbox.sending import Post

WORKER = Path(__file__).with_name("killed_worker.py")
LINES, LONG, FREE = 40, 12, 300


def lines_of(book):
    return book.read_text().splitlines() if book.exists() else []


def worker(dsn, post, book, rest):
    command = [sys.executable, str(WORKER), dsn, post.topic, str(book), str(rest)]
    return subprocess.Popen(command, env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)})


def test_a_killed_worker_loses_no_parcel_and_keeps_order(outbox_dsn, tmp_path):  # R125, R130, E11
    with blocking(PostgresStore, PsycopgDriver(outbox_dsn)) as world:
        post = Post(world)
        world.clock.now = time.time_ns() // 1000 - 60_000_000  # all are due by the server's own clock
        for n in range(LONG):
            post.put(*(post.parcel(order_by=post.line(str(m)), payload=str(n), position=m) for m in range(LINES)))
        post.put(*(post.parcel(payload=str(n), position=n) for n in range(FREE)))
        book = tmp_path / "deliveries"
        kills = 0
        for _ in range(3):
            before = len(lines_of(book))
            process = worker(outbox_dsn, post, book, 0.02)
            deadline = time.monotonic() + PATIENCE
            while len(lines_of(book)) < before + 60 and process.poll() is None and time.monotonic() < deadline:
                time.sleep(0.002)
            os.kill(process.pid, signal.SIGKILL)
            kills += process.wait() == -signal.SIGKILL
            held = leases_are_over(outbox_dsn, post)
            assert held  # it died with parcels in its hands
        assert kills == 3
        healthy_server = worker(outbox_dsn, post, book, 0)
        assert healthy_server.wait(PATIENCE) == 0

        with psycopg.connect(outbox_dsn) as connection:
            where = "WHERE aggregatetype = %s"
            assert connection.execute(f"SELECT count(*) FROM oncekey.outbox {where}", [post.topic]).fetchone() == (0,)
            assert connection.execute(f"SELECT count(*) FROM oncekey.dead_letter {where}", [post.topic]).fetchone() == (
                0,
            )

    told = defaultdict(list)
    for delivery in lines_of(book):
        line, _, n = delivery.rpartition(" ")
        told[line].append(int(n))
    assert set(told.pop("None")) == set(range(FREE))
    assert set(told) == {post.line(str(m)) for m in range(LINES)}
    for line in told.values():
        assert set(line) == set(range(LONG))
        # A message whose acknowledgement died with its worker comes again, and none before it does.
        assert line == sorted(line)
        assert max(line.count(n) for n in line) <= 1 + kills


def leases_are_over(dsn, post):
    """How many parcels somebody held; nobody waits a minute for it."""
    with psycopg.connect(dsn, autocommit=True) as connection:
        return connection.execute(
            "UPDATE oncekey.outbox SET due_at = 0, lease_until = 0 WHERE aggregatetype = %s AND state = 'held'",
            [post.topic],
        ).rowcount
