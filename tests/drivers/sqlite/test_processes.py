"""Many processes on one SQLite file: one execution per key, with and without a write-ahead log."""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter

from harness import flows
from oncekey.databases.sqlite.blocking import SqliteDriver
from oncekey.databases.sqlite.store import SqliteStore
from oncekey.engine.shell import Engine
from oncekey.testing.claims import a_claim

PROCESSES, KEYS = 4, 40

CLAIM_ALL = """
import sys
from importlib import import_module
from harness import flows
from oncekey.core.model import Proceed, Refuse, Replay
from oncekey.core.policy import Policy
from oncekey.databases.sqlite.blocking import SqliteDriver
from oncekey.engine.shell import Engine
from oncekey.databases.sqlite.store import SqliteStore
from oncekey.testing.claims import a_claim, answered

engine = Engine(SqliteStore(), SqliteDriver(sys.argv[1], busy_timeout=30, module=import_module(sys.argv[2])))
flows.find(engine, a_claim().id)
print("ready", flush=True)
input()
for number in range(int(sys.argv[3])):
    verdict = flows.begin(engine, a_claim(f"key-{number}"), Policy())
    if isinstance(verdict, Proceed):
        transaction = engine.open()
        transaction.connection.execute("INSERT INTO orders (item) VALUES (?)", (f"key-{number}",))
        assert flows.settle_within(engine, transaction, verdict.lease, answered()).ours
        transaction.commit()
    print(type(verdict).__name__)
engine.close()
"""


def test_each_key_is_executed_once(path, module):  # R62, R63
    crowd = [
        subprocess.Popen(
            [sys.executable, "-c", CLAIM_ALL, str(path), module.__name__, str(KEYS)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(part for part in sys.path if part)},
        )
        for _ in range(PROCESSES)
    ]
    for process in crowd:
        assert process.stdout.readline() == "ready\n"
    for process in crowd:
        process.stdin.write("\n")
        process.stdin.flush()
    answers: Counter[str] = Counter()
    for process in crowd:
        out, err = process.communicate()
        assert (process.returncode, [line for line in err.splitlines() if "can lose commits" not in line]) == (0, [])
        answers.update(out.split())

    assert answers["Proceed"] == KEYS
    assert answers["Replay"] + answers["Refuse"] == KEYS * (PROCESSES - 1)
    engine = Engine(SqliteStore(), SqliteDriver(path, module=module))
    for number in range(KEYS):
        assert flows.find(engine, a_claim(f"key-{number}").id).record.version == 2
    with engine.driver._file.lent() as connection:
        assert connection.execute("SELECT count(*), count(DISTINCT item) FROM orders").fetchone()[:] == (KEYS, KEYS)
    engine.close()
