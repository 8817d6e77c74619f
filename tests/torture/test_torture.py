"""`oncekey torture` as a person runs it: on real processes, for a few seconds, and what it says afterwards."""

from __future__ import annotations

import json
import os
import re
import signal
import sqlite3
import subprocess
import sys
import time
from contextlib import closing
from pathlib import Path
from typing import Any

import psycopg
import pytest

from harness import flows
from harness.mariadb import MariadbServer
from harness.processes import children, is_alive
from harness.valkeys import StoringValkey
from oncekey.core.errors import ConfigurationError
from oncekey.core.model import Proceed
from oncekey.core.policy import Policy
from oncekey.testing.claims import a_claim
from oncekey.wire import connect
from oncekey_demo.torture.plan import Plan

COMMAND = (sys.executable, "-c", "from oncekey.cli import main; main()", "torture")
HERE = Path(__file__).parent
PATIENCE = 240


def run(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*COMMAND, *words],
        cwd=folder,
        env=surroundings(folder),
        capture_output=True,
        text=True,
        timeout=PATIENCE,
    )


def surroundings(folder: Path) -> dict[str, str]:
    path = os.pathsep.join([str(HERE), str(HERE.parent), os.environ.get("PYTHONPATH", "")])
    return {**os.environ, "TMPDIR": str(folder), "PYTHONPATH": path, "COLUMNS": "200"}


def test_torture_on_sqlite_reports_json(tmp_path: Path) -> None:
    # R116, R117, R125, R130, R246: S1-S4, S7-S10, S14-S16; processes that die, and a provider that fails
    done = run(tmp_path, "--store", "sqlite:///torture.db", "--seconds", "3", "--seed", "5", "--json")
    assert done.returncode == 0, done.stdout + done.stderr
    told = json.loads(done.stdout)
    assert (told["ok"], told["duplicates"], told["lost"], told["violations"], told["seed"]) == (True, 0, 0, [], 5)
    assert told["keys"] > 8
    assert told["requests"] == sum(told["answers"].values()) > told["keys"]
    assert told["crashes"] + told["pauses"] > 0
    assert told["answers"]["201 replayed"] > 0
    assert set(told["states"]) <= {"completed", "failed_retryable", "unknown"}
    assert told["unknown"] == told["states"].get("unknown", 0)
    assert told["command"] == (
        "oncekey torture --store sqlite:///torture.db --seconds 3 --seed 5 --servers 2 --workers 2 --clients 8"
    )
    assert set(told) == {
        *("ok", "seed", "store", "seconds", "keys", "requests", "answers", "faults", "crashes", "pauses"),
        *("ambiguous_commits", "resumed", "delivered_again", "states", "unknown", "charges", "duplicates", "lost"),
        *("violations", "command"),
    }
    assert list(tmp_path.iterdir()) == []  # neither the store that it made nor a temporary file


def test_torture_on_mariadb_and_mysql_finds_no_violation(
    tmp_path: Path, either_url: str, either_server: MariadbServer
) -> None:
    # R75: the same shop, and a proxy that loses replies of COMMITs
    done = run(tmp_path, "--store", either_url, "--seconds", "5", "--seed", "7", "--json")
    assert done.returncode == 0, done.stdout + done.stderr
    told = json.loads(done.stdout)
    assert (told["ok"], told["duplicates"], told["lost"], told["violations"]) == (True, 0, 0, [])
    assert told["crashes"] > 0
    name = either_url.rpartition("/")[2]
    assert either_server.say("SELECT count(*) FROM oncekey_record", name) == ((0,),)
    assert either_server.say("SHOW TABLES LIKE '%torture%'", name) == ()


def test_torture_on_postgresql_prints_a_table(tmp_path: Path, postgres_dsn: str) -> None:
    done = run(tmp_path, "--store", postgres_dsn, "--seconds", "5", "--seed", "7")
    assert done.returncode == 0, done.stdout + done.stderr
    for name in ("duplicates", "lost", "violations"):
        assert re.search(rf"{name} +│ +0 │", done.stdout), done.stdout
    assert re.search(r"crashes \(kill -9\) +│ +[1-9]", done.stdout)
    assert "Repeat: oncekey torture --store postgresql://" in done.stdout
    assert "seed 7: injecting faults" in done.stderr
    with psycopg.connect(postgres_dsn) as connection:  # nothing of the run is left but oncekey's own empty tables
        assert connection.execute("SELECT count(*) FROM oncekey.record").fetchone() == (0,)
        assert connection.execute("SELECT to_regnamespace('oncekey_torture')").fetchone() == (None,)


def test_torture_on_redis_finds_no_violation(tmp_path: Path) -> None:
    """Calls of PHASED handlers and INLINE ones; on a server that lives nothing is lost (docs/howto/redis.md)."""
    with StoringValkey() as server:
        done = run(tmp_path, "--store", server.url, "--seconds", "3", "--seed", "5", "--json")
        assert done.returncode == 0, done.stdout + done.stderr
        told = json.loads(done.stdout)
        assert (told["ok"], told["duplicates"], told["lost"], told["violations"]) == (True, 0, 0, [])
        assert told["charges"] > 0
        assert told["crashes"] + told["pauses"] > 0
        assert told["answers"]["201 replayed"] > 0
        assert set(told["states"]) <= {"completed", "failed_retryable", "unknown"}
        # Nothing of the run is left; of members of the pages neither.
        assert [name for name in server.say("KEYS", "oncekey:*") if not name.endswith(b":barrier")] == []


def test_torture_on_emulated_dynamodb_finds_no_violation(tmp_path: Path, dynalite: Any) -> None:
    """Calls of PHASED handlers and INLINE ones, with leases of ten seconds: its clock goes by seconds."""
    few = ("--servers", "2", "--workers", "1", "--clients", "4")
    done = run(tmp_path, "--store", dynalite.url("tortured"), "--seconds", "2", "--seed", "5", *few, "--json")
    assert done.returncode == 0, done.stdout + done.stderr
    told = json.loads(done.stdout)
    assert (told["ok"], told["duplicates"], told["lost"], told["violations"]) == (True, 0, 0, [])
    assert told["charges"] > 0
    assert told["crashes"] + told["pauses"] > 0


def test_torture_refuses_a_real_dynamodb_table(tmp_path: Path) -> None:
    done = run(tmp_path, "--store", "dynamodb://eu-central-1/keys", "--seconds", "2")
    assert done.returncode == 2
    assert "an emulator on this machine" in done.stderr


def test_torture_finds_double_effects_of_a_broken_application(tmp_path: Path) -> None:
    words = ("--store", "sqlite:///torture.db", "--seconds", "3", "--seed", "2", "--shop", "broken_shop")
    done = run(tmp_path, *words)
    assert done.returncode == 1, done.stdout + done.stderr
    found = re.findall(r"S1 at most one effect: key (torture-2-\d\d-\d{6}): .*executed (\d+) times", done.stdout)
    assert found, done.stdout
    key = found[0][0]
    story = done.stdout.partition("History of ")[2]
    assert key in story
    assert story.count("charged at the provider") >= 2
    with closing(sqlite3.connect(tmp_path / "torture.db")) as connection:  # the evidence stays
        assert connection.execute("SELECT count(*) FROM oncekey_torture_log").fetchone() != (0,)


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"store": "memory:"}, "memory: ends with its process"),
        ({"store": "postgresql://u:p@db.example:5432/x"}, "a PostgreSQL on this machine"),
        ({"store": "postgresql:///x?host=/tmp"}, "a PostgreSQL on this machine"),
        ({"store": "postgresql://127.0.0.1/x?host=db.example"}, "a PostgreSQL on this machine"),
        ({"seconds": 0.0}, "--seconds 0: a run takes 1 to 86400 seconds"),
        ({"workers": 0}, "--workers 0: must be 1 to 64"),
    ],
)
def test_torture_plan_rejects_invalid_settings(settings: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ConfigurationError, match=re.escape(sentence)):
        Plan(**{"store": "sqlite:///x.db", "seconds": 5.0, "seed": 1, **settings})


def test_torture_plan_uses_the_proxy_and_hides_the_password() -> None:
    plan = Plan("postgresql+asyncpg://u:secret@localhost:5433/x?pool_size=3&sslmode=require", 5, 1)
    assert plan.databases == (("localhost", 5433),)
    assert plan.url_through(99) == "postgresql+asyncpg://u:secret@127.0.0.1:99/x?pool_size=3&sslmode=disable"
    assert "secret" not in plan.command + plan.shown


def test_torture_reports_why_an_application_did_not_start(tmp_path: Path) -> None:
    done = run(tmp_path, "--store", "sqlite:///x.db", "--shop", "no_such_shop")
    assert done.returncode == 2
    assert re.search(r"server-[12] did not start", done.stderr)
    assert "No module named 'no_such_shop'" in done.stderr


def test_torture_refuses_a_store_with_records(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/shop.db"
    engine = connect(url)
    engine.migrate()
    assert isinstance(flows.begin(engine, a_claim(), Policy()), Proceed)
    engine.close()
    done = run(tmp_path, "--store", url, "--seconds", "1")
    assert (done.returncode, "holds 1 records" in done.stderr) == (2, True)
    few = ("--seed", "1", "--servers", "1", "--workers", "1", "--clients", "2")
    done = run(tmp_path, "--store", url, "--seconds", "1", "--allow-existing", *few)
    assert done.returncode == 0, done.stdout + done.stderr
    with closing(sqlite3.connect(tmp_path / "shop.db")) as connection:
        assert connection.execute("SELECT count(*) FROM oncekey_record").fetchone() == (1,)
        assert connection.execute("SELECT name FROM sqlite_master WHERE name LIKE '%torture%'").fetchall() == []


@pytest.mark.parametrize("sign", [signal.SIGTERM, signal.SIGKILL])
def test_torture_processes_end_with_their_parent(tmp_path: Path, sign: signal.Signals) -> None:
    words = ("--store", "sqlite:///torture.db", "--seconds", "60", "--seed", "1", "--servers", "1", "--workers", "1")
    process = subprocess.Popen(
        [*COMMAND, *words], cwd=tmp_path, env=surroundings(tmp_path), stderr=subprocess.PIPE, text=True
    )
    try:
        assert process.stderr is not None
        for line in process.stderr:
            if "injecting faults" in line:
                break
        started = children(process.pid)
        assert len(started) >= 3
        process.send_signal(sign)
        process.stderr.read()
        assert process.wait(PATIENCE) != 0
    finally:
        process.kill()
        process.wait()
        assert process.stderr is not None
        process.stderr.close()
    deadline = time.monotonic() + 30
    while (left := [pid for pid in started if is_alive(pid)]) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert left == []
    if sign is not signal.SIGKILL:
        assert list(tmp_path.glob("oncekey-torture-*")) == []
