"""What a Celery worker loads: the tasks of the page about consumers, and one that is killed between its steps."""

from __future__ import annotations

import os
import signal
from typing import Any

import psycopg
from celery import Task
from celery.signals import task_postrun
from tasks import app

from oncekey import PHASED, InProgressError, Once, SyncOperation

bank = Once(os.environ["BANK"])


def note(what: str) -> None:
    """Tell the test, by a commit of its own."""
    with psycopg.connect(os.environ["BANK"], autocommit=True) as connection:
        connection.execute("INSERT INTO happened VALUES (%s)", (what,))


def write(connection: Any, item: str) -> None:
    connection.execute("INSERT INTO orders VALUES (%s)", (item,))


def send(amount: int, *, key: str) -> None:
    note(f"sent {amount}")


@bank.function(key="task_id", effects=PHASED, lease=3)
def transfer(op: SyncOperation, task_id: str, amount: int) -> dict[str, Any]:
    op.phase("taken", write, "taken")
    if op.attempt == 1:
        note(f"killed {os.getpid()}")
        os.kill(os.getpid(), signal.SIGKILL)
    op.call("sent", send, amount, repeatable=False)
    op.phase("given", write, "given")
    return {"amount": amount, "attempt": op.attempt}


@app.task(bind=True, max_retries=None)
def move(self: Task, amount: int) -> None:
    try:
        done = transfer(self.request.id, amount)
    except InProgressError as busy:
        raise self.retry(countdown=busy.retry_after) from busy
    note(f"moved {done['amount']} in {done['attempt']} runs")


@task_postrun.connect
def answered(task_id: str, state: str, retval: object, **_: Any) -> None:
    """One delivery is over: with a result, or with a retry."""
    note(f"{task_id} {state} {retval if state == 'SUCCESS' else ''}")
