"""`oncekey worker`, as it is typed and as it is stopped."""

from __future__ import annotations

import os
import signal
import sqlite3
import subprocess
import sys
import uuid
from contextlib import closing
from pathlib import Path

import pytest
from sqlalchemy.ext.asyncio import create_async_engine

from harness import flows
from harness.demo import get
from harness.patience import PATIENCE, wait_until
from oncekey import Once
from oncekey.cli.applications import load
from oncekey.cli.worker import NOTHING_TO_DO, _place
from oncekey.core.errors import ConfigurationError
from oncekey.core.flow import drive
from oncekey.core.model import SECOND, Deferred, Effects, Parcel, ParcelKind, Proceed, State
from oncekey.core.policy import Policy
from oncekey.testing.claims import a_claim
from oncekey.wire import connect
from oncekey.workers.tasks import NAMES

NO_POSTMAN = f"no task 'postman'; the tasks are {', '.join(NAMES)}"
ONCEKEY = Path(sys.executable).with_name("oncekey")
SHOP = """
import pathlib, sys
from oncekey import Once

once = Once("sqlite:///shop.db")
other = 7

@once.topic("charge")
def charge(message):
    pathlib.Path("called").write_text(message.downstream_key)
    print("called", flush=True)
    if pathlib.Path("wait").exists():
        sys.stdin.readline()
    return {"paid": message.payload["amount"]}
"""

FAILING = """
from oncekey import Once

once = Once("sqlite:///shop.db")

@once.topic("charge")
def charge(message):
    raise TimeoutError("away")
"""


STUBBORN = """
import asyncio
from oncekey import Once, Policy

once = Once("sqlite:///shop.db", policy=Policy(call_timeout=600))

@once.topic("charge")
async def charge(message):
    print("called", flush=True)
    while True:
        try:
            await asyncio.sleep(3600)
        except BaseException:
            pass
"""


def environment():
    return {**os.environ, "NO_COLOR": "1", "COLUMNS": "200", "PYTHONDONTWRITEBYTECODE": "1"}


def oncekey(*arguments: str, cwd: Path) -> subprocess.CompletedProcess:
    command = [ONCEKEY, *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False, cwd=cwd, env=environment())


@pytest.fixture
def shop(tmp_path):
    (tmp_path / "shop.py").write_text(SHOP)
    engine = connect(f"sqlite:///{tmp_path}/shop.db")
    engine.migrate()
    yield tmp_path, engine
    engine.close()


def deferred(engine, topic="charge"):
    verdict = flows.begin(engine, a_claim(effects=Effects.OUTBOX), Policy())
    assert isinstance(verdict, Proceed)
    lease = verdict.lease
    parcel = Parcel(uuid.uuid4(), ParcelKind.DEFER, lease.id, lease.incarnation, topic, '{"amount": 7}', "k-1")
    assert flows.settle(engine, lease, Deferred(parcel)).ours
    return parcel


def test_once_does_what_is_due_and_exits(shop):
    folder, engine = shop
    parcels = [deferred(engine) for _ in range(3)]

    result = oncekey("worker", "--app", "shop:once", "--once", "--concurrency", "2", cwd=folder)

    assert (result.returncode, result.stdout.splitlines()[-1]) == (0, "3 done"), result.stderr
    records = [flows.find(engine, parcel.record_id).record for parcel in parcels]
    assert [(record.state, record.response.body) for record in records] == [(State.COMPLETED, b'{"paid":7}')] * 3


def test_only_the_topics_that_were_asked_for(shop):
    folder, engine = shop
    parcel = deferred(engine, topic="another")

    result = oncekey("worker", "--app", "shop:once", "--once", "--topics", "charge", cwd=folder)

    assert (result.returncode, result.stdout.splitlines()[-1]) == (0, "0 done")
    assert flows.find(engine, parcel.record_id).record.state is State.PENDING


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_worker_finishes_an_open_call_after_a_signal(shop, number):  # P5, F10: one call, and its answer is stored
    folder, engine = shop
    (folder / "wait").touch()
    parcel = deferred(engine)
    command = [ONCEKEY, "worker", "--app", "shop:once"]
    pipe = subprocess.PIPE
    with subprocess.Popen(
        command, cwd=folder, env=environment(), stdin=pipe, stdout=pipe, stderr=pipe, text=True
    ) as worker:
        while worker.stdout.readline() != "called\n":
            assert worker.poll() is None
        assert flows.find(engine, parcel.record_id).record.state is State.IN_PROGRESS
        worker.send_signal(number)
        _, told = worker.communicate("go on\n", timeout=60)

    assert worker.returncode == 0, told
    assert flows.find(engine, parcel.record_id).record.state is State.COMPLETED
    assert "k-1" not in told


@pytest.mark.parametrize(
    ("app", "line"),
    [
        ("shop", "--app shop is not module:name: write it like --app shop.main:once"),
        ("shop:", "--app shop: is not module:name: write it like --app shop.main:once"),
        ("nowhere:once", "--app: the module nowhere does not exist here or among the installed ones"),
        ("nowhere.at.all:once", "--app: the module nowhere.at.all does not exist here or among the installed ones"),
        ("shop:twice", "--app shop:twice: shop has no twice"),
        ("shop:other", "--app shop:other is a int, not a Once"),
        ("broken:once", "--app: broken cannot be imported: No module named 'no_such_package'"),
    ],
)
def test_loading_an_invalid_app_raises_a_configuration_error(shop, monkeypatch, app, line):
    folder, _ = shop
    (folder / "broken.py").write_text("import no_such_package\n")
    monkeypatch.chdir(folder)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(sys, "modules", dict(sys.modules))

    with pytest.raises(ConfigurationError) as told:
        load(app)

    assert str(told.value) == line


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["--app", "shop:twice"], "--app shop:twice: shop has no twice"),
        (["--app", "empty:once", "--only", "relay"], NOTHING_TO_DO),
        (
            ["--app", "shop:once", "--only", "relay,postman"],
            NO_POSTMAN,
        ),
        (["--app", "shop:once", "--without", "reapers"], f"no task 'reapers'; the tasks are {', '.join(NAMES)}"),
        (["--app", "forgetful:once"], "topics need a store with an outbox: run `oncekey stores` to list them"),
        (["--app", "shop:once", "--topics", "charge,refund"], "no topic 'refund'; the topics are charge"),
    ],
)
def test_worker_usage_error_is_one_line_without_traceback(shop, arguments, line):
    folder, _ = shop
    (folder / "empty.py").write_text('from oncekey import Once\nonce = Once("sqlite:///shop.db")\n')
    (folder / "forgetful.py").write_text('from oncekey import Once\nonce = Once("memory:")\nonce.topic("a")(print)\n')

    result = oncekey("worker", *arguments, "--once", cwd=folder)

    assert (result.returncode, result.stdout, result.stderr.splitlines()[-1]) == (2, "", f"oncekey: {line}")
    assert "Traceback" not in result.stderr


def test_worker_on_a_store_without_tables_names_migrate_up(tmp_path):
    (tmp_path / "shop.py").write_text(SHOP)

    result = oncekey("worker", "--app", "shop:once", "--once", cwd=tmp_path)

    assert result.returncode == 2
    assert "oncekey migrate up" in result.stderr
    with closing(sqlite3.connect(tmp_path / "shop.db")) as connection:
        assert connection.execute("SELECT count(*) FROM sqlite_master").fetchone() == (0,)


def test_a_worker_without_topics_still_sweeps_and_reaps(shop):
    folder, _ = shop
    (folder / "empty.py").write_text('from oncekey import Once\nonce = Once("sqlite:///shop.db")\n')

    result = oncekey("worker", "--app", "empty:once", "--once", cwd=folder)

    assert (result.returncode, result.stdout.splitlines()[-1]) == (0, "0 done"), result.stderr


# R146, R169: each task of the worker can be left out, and says how it is
def test_worker_health_endpoint_reports_its_tasks(shop):
    folder, _ = shop
    command = [str(ONCEKEY), "worker", "--app", "shop:once", "--without", "reaper"]
    with subprocess.Popen(
        [*command, "--health", "127.0.0.1:0"], cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as worker:
        port = _health_port(worker)
        alive = get(f"http://127.0.0.1:{port}/healthz")
        ready = _until_ready(port)
        nowhere = get(f"http://127.0.0.1:{port}/metrics")
        worker.send_signal(signal.SIGTERM)
        _, told = worker.communicate(timeout=60)

    assert (alive.status_code, alive.json()) == (200, {"alive": True})
    assert sorted(ready["tasks"]) == ["heartbeat", "relay", "sweeper"]
    assert all(task["wrong"] is None for task in ready["tasks"].values())
    assert nowhere.status_code == 404
    assert worker.returncode == 0, told


def test_worker_exits_after_the_grace_if_a_function_ignores_cancellation(shop):
    folder, engine = shop
    (folder / "stubborn.py").write_text(STUBBORN)
    parcel = deferred(engine)
    with subprocess.Popen(
        [str(ONCEKEY), "worker", "--grace", "0.1", "--app", "stubborn:once"],
        cwd=folder,
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as worker:
        assert any(line == "called\n" for line in worker.stdout)
        worker.send_signal(signal.SIGTERM)
        _, told = worker.communicate(timeout=PATIENCE)

    assert worker.returncode == 0, told
    assert "1 functions ignore their cancellation" in told
    assert flows.find(engine, parcel.record_id).record.state is State.IN_PROGRESS  # left to its lease


def _health_port(worker: subprocess.Popen) -> int:
    for line in worker.stdout:
        if line.startswith("health on port "):
            return int(line.rpartition(" ")[2])
    raise AssertionError("the worker ended")


def _until_ready(port: int) -> dict:
    answers = []

    def is_ready() -> bool:
        answers.append(get(f"http://127.0.0.1:{port}/readyz"))
        assert answers[-1].status_code in (200, 503)
        return answers[-1].status_code == 200

    wait_until(is_ready, "the worker was never ready", every=0.05)
    return answers[-1].json()


def test_worker_prints_its_tasks_and_registers_until_it_stops(shop):
    folder, engine = shop
    command = [str(ONCEKEY), "worker", "--app", "shop:once", "--without", "reaper", "--health", "127.0.0.1:0"]
    pipe = subprocess.PIPE
    with subprocess.Popen(
        command, cwd=folder, env=environment(), stdin=pipe, stdout=pipe, stderr=pipe, text=True
    ) as worker:
        lines = [worker.stdout.readline() for _ in range(3)]
        _until_ready(_health_port(worker))
        (seen,) = drive(engine.store.upkeep.workers(), engine.driver.run).workers
        worker.send_signal(signal.SIGTERM)
        worker.communicate(timeout=60)

    assert lines[0] == f"oncekey worker {seen.name}: shop:once on sqlite:///shop.db\n"
    assert lines[1].split() == ["relay", "every", "0.05", "to", "2", "s;", "topics", "charge"]
    assert lines[2].split() == ["sweeper", "every", "60", "s"]
    assert (seen.tasks, seen.every) == (("relay", "sweeper"), 15 * SECOND)
    assert drive(engine.store.upkeep.workers(), engine.driver.run).workers == ()  # it left


def test_worker_once_exits_with_code_1_if_a_call_failed(shop):
    folder, engine = shop
    (folder / "failing.py").write_text(FAILING)
    parcel = deferred(engine)

    result = oncekey("worker", "--app", "failing:once", "--once", cwd=folder)

    assert result.returncode == 1
    assert result.stdout.splitlines()[-1] == "0 done, 1 failed: see the log"
    assert flows.find(engine, parcel.record_id).record.state is State.UNKNOWN
    assert "k-1" not in result.stdout + result.stderr


@pytest.mark.parametrize(
    ("store", "shown"),
    [
        ("postgresql://ann:s3cret@db.example/shop?password=s3cret", "postgresql://db.example/shop"),
        ("sqlite:///shop.db", "sqlite:///shop.db"),
        (
            create_async_engine("postgresql+asyncpg://ann:s3cret@db.example/shop"),
            "postgresql+asyncpg://db.example/shop",
        ),
    ],
)
def test_a_password_is_not_shown(store, shown):
    assert _place(Once(store)) == shown
