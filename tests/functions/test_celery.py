"""A real Celery on a real Valkey: a task that is delivered three times, and one whose process is killed."""

from __future__ import annotations

import os
import signal
import sqlite3
import subprocess
import sys
import time
import uuid
from contextlib import closing
from pathlib import Path
from typing import Any

import psycopg
from celery import Celery

from harness.brokers import Valkey
from harness.pages import ROOT, Page
from harness.processes import is_alive

BROKER = "redis://127.0.0.1:6379/0"
PATIENCE = 120.0


class Worker:
    """A worker of Celery with a pool of two processes, and what it was told to do."""

    def __init__(self, folder: Path, broker: str, dsn: str) -> None:
        self.folder, self.broker, self.dsn = folder, broker, dsn
        (page,) = [one for one in Page(ROOT / "docs/howto/functions.md").blocks("python") if one.file == "tasks.py"]
        assert BROKER in page.text
        (folder / "tasks.py").write_text(page.text.replace(BROKER, broker))
        with closing(sqlite3.connect(folder / "shop.db")) as connection:
            connection.execute("CREATE TABLE orders (id INTEGER PRIMARY KEY, product TEXT)")
        with psycopg.connect(dsn, autocommit=True) as connection:
            connection.execute("TRUNCATE oncekey.record, oncekey.work, oncekey.outbox, oncekey.dead_letter")
            connection.execute("DROP TABLE IF EXISTS orders")
            connection.execute("CREATE TABLE orders (item TEXT)")
            connection.execute("DROP TABLE IF EXISTS happened")
            connection.execute("CREATE TABLE happened (what TEXT)")
        places = [str(folder), str(Path(__file__).parent), str(ROOT / "tests")]
        self.environ = {**os.environ, "BANK": dsn, "PYTHONPATH": os.pathsep.join(places)}
        quiet = ("--without-gossip", "--without-mingle", "--without-heartbeat", "--loglevel", "warning")
        self.log = (folder / "worker.log").open("wb")
        self.process = subprocess.Popen(
            [sys.executable, "-m", "celery", "-A", "bank_tasks", "worker", "--concurrency", "2", *quiet],
            cwd=folder,
            env=self.environ,
            stdin=subprocess.DEVNULL,
            stdout=self.log,
            stderr=self.log,
            start_new_session=True,
        )

    def send(self, task: str, given: Any, *, times: int = 1) -> str:
        """Publish a task, as often under one id as it is to be delivered."""
        task_id = str(uuid.uuid4())
        with Celery(broker=self.broker) as producer:
            for _ in range(times):
                producer.send_task(task, (given,), task_id=task_id)
        return task_id

    @property
    def happened(self) -> list[str]:
        with psycopg.connect(self.dsn) as connection:
            return sorted(what for (what,) in connection.execute("SELECT what FROM happened").fetchall())

    def until(self, what: str, *, times: int = 1) -> list[str]:
        """Wait until lines that begin so have been written so often."""
        ends = time.monotonic() + PATIENCE
        while len(found := [line for line in self.happened if line.startswith(what)]) < times:
            said = (self.folder / "worker.log").read_text()
            assert self.process.poll() is None, said
            assert time.monotonic() < ends, (what, self.happened, said)
            time.sleep(0.05)
        return found

    def stop(self) -> None:
        self.process.terminate()
        try:
            self.process.wait(60)
        finally:
            if self.process.poll() is None:
                os.killpg(self.process.pid, signal.SIGKILL)
                self.process.wait()
            self.log.close()


def test_celery_tasks_run_once_despite_redelivery_and_crashes(functions_dsn: str, tmp_path: Path) -> None:
    """One test, because a worker takes seconds to start."""
    with Valkey() as broker:
        worker = Worker(tmp_path, broker.url, functions_dsn)
        try:
            delivered_three_times(worker)
            killed_between_two_steps(worker)
        finally:
            worker.stop()


def delivered_three_times(worker: Worker) -> None:
    task, other = worker.send("tasks.order", "tea", times=3), worker.send("tasks.order", "coffee")
    results = worker.until(f"{task} SUCCESS", times=3)
    worker.until(f"{other} SUCCESS")
    assert len(set(results)) == 1, "every delivery has the first one's result"
    with closing(sqlite3.connect(worker.folder / "shop.db")) as connection:
        sold = connection.execute("SELECT product, count(*) FROM orders GROUP BY product ORDER BY product").fetchall()
    assert sold == [("coffee", 1), ("tea", 1)]


def killed_between_two_steps(worker: Worker) -> None:
    worker.send("bank_tasks.move", 7)
    assert worker.until("moved") == ["moved 7 in 2 runs"]
    (killed,) = worker.until("killed")
    assert not is_alive(int(killed.split()[1]))
    assert worker.until("sent") == ["sent 7"]
    with psycopg.connect(worker.dsn) as connection:
        rows = connection.execute("SELECT item FROM orders ORDER BY item").fetchall()
    assert rows == [("given",), ("taken",)]
