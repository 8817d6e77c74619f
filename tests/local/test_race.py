"""Many processes on few keys: one business row each, and nobody hears "already done"; and processes that are gone."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from contextlib import closing
from pathlib import Path

import pytest

from harness import flows
from local.databases import locks_held, rows, through
from local.racing import PATIENCE, prepared, race
from oncekey import wire
from oncekey.core.model import HOUR, RecordId, Retryable
from oncekey.core.policy import Policy
from oncekey.testing.claims import a_claim, answered

RACERS = 4
NEW, RETRYABLE, EXPIRED = 70, 15, 15
TESTS = Path(__file__).resolve().parents[1]


def left_over(dsn: str, scope: str) -> list[str]:
    """Keys that somebody has used before: failed and retryable, or long expired; with the racers' own fingerprint."""
    ((mark,),) = rows(dsn, "SELECT fingerprint FROM oncekey.record")
    with closing(wire.connect(dsn)) as engine:
        keys = []
        for number in range(RETRYABLE + EXPIRED):
            key = f"left-over-key-{number:06}{'x' * (number % 3)}"
            verdict = flows.begin(engine, a_claim(id=RecordId(scope, key), fingerprint=mark), Policy())
            flows.settle(engine, verdict.lease, Retryable("x") if number < RETRYABLE else answered(b"old"))  # type: ignore[union-attr]
            keys.append(key)
    expired = "', '".join(keys[RETRYABLE:])
    rows(dsn, f"UPDATE oncekey.record SET expires_at = created_at - {HOUR} WHERE key IN ('{expired}')")
    return keys


@pytest.mark.parametrize("way", ["asyncpg", "psycopg", "def"])
def test_every_key_has_one_business_row_and_one_answer(way: str, tables_dsn: str) -> None:
    # F13, F14, R62
    dsn = tables_dsn
    prepared(dsn)
    url, blocking = through("asyncpg" if way == "asyncpg" else "psycopg", dsn), way == "def"
    url = f"{url}?pool_size=6"
    spawn = multiprocessing.get_context("spawn")

    def run(keys: list[str], racers: int) -> list[tuple[Counter[str], dict[str, bytes], list[object]]]:
        line, reports = spawn.Barrier(racers), spawn.Queue()
        crowd = [spawn.Process(target=race, args=(url, keys, blocking, line, reports)) for _ in range(racers)]
        for racer in crowd:
            racer.start()
        seen = [reports.get(timeout=PATIENCE) for _ in crowd]
        for racer in crowd:
            racer.join(PATIENCE)
        return seen

    run(["the-first-key-000000"], 1)  # tells the scope and the fingerprint that requests have here
    ((scope,),) = rows(dsn, "SELECT scope FROM oncekey.record")
    used = left_over(dsn, scope)
    fresh = [f"fresh-key-{number:08}{'x' * (number % 3)}" for number in range(NEW)]
    keys = [*used, *fresh]
    seen = run(keys, RACERS)
    assert [wrong for _, _, wrong in seen] == [[]] * RACERS
    total = sum((counts for counts, _, _ in seen), Counter[str]())
    assert total["won"] == len(keys)
    assert total.total() == RACERS * len(keys) * 3
    assert total["in progress"] > 0
    done = Counter(key for (key,) in rows(dsn, "SELECT key FROM effects"))
    assert done == Counter([*keys, "the-first-key-000000"])
    # Everybody heard the same answer, and it is the one of who did it.
    by = {key: f'{{"by":{pid}}}'.encode() for key, pid in rows(dsn, "SELECT key, pid FROM effects")}
    assert all(heard == {key: by[key] for key in heard} for _, heard, _ in seen)
    assert rows(dsn, "SELECT DISTINCT state FROM oncekey.record") == [("completed",)]
    fences = dict(rows(dsn, "SELECT key, fence FROM oncekey.record"))
    assert {fences[key] for key in used} == {2}
    assert {fences[key] for key in fresh} == {1}


@pytest.mark.parametrize("package", ["asyncpg", "psycopg"])
@pytest.mark.parametrize("fate", ["stopped", "killed"])
def test_dead_process_releases_its_key_without_a_row(package: str, fate: str, tables_dsn: str) -> None:
    # F15: a host that is gone keeps its socket; F12: kill -9 frees the key at once
    dsn = tables_dsn
    prepared(dsn)
    lease = 400 if fate == "stopped" else 60_000
    command = [sys.executable, "-m", "local.racing", through(package, dsn), "a-key-of-somebody", str(lease)]
    environment = {**os.environ, "PYTHONPATH": str(TESTS)}
    with subprocess.Popen(command, cwd=TESTS, env=environment, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            assert process.stdout.readline() == "in\n"
            process.send_signal(signal.SIGSTOP if fate == "stopped" else signal.SIGKILL)
            # Only the server's own time-out can free the key of a process that stands still with its socket open.
            deadline = time.monotonic() + PATIENCE / 4
            while locks_held(dsn):
                assert time.monotonic() < deadline, "the key is never free again"
                time.sleep(0.01)
            assert fate == "killed" or process.poll() is None
            assert rows(dsn, "SELECT key FROM effects UNION ALL SELECT key FROM oncekey.record") == []
        finally:
            process.kill()
