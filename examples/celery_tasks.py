"""A Celery task that charges once, however often it is delivered; README.md has the command to start it."""

from __future__ import annotations

import os
import sys

from celery import Celery, Task
from celery.exceptions import Reject
from provider import charge, charges

from oncekey import PHASED, Handling, Once, SyncOperation

app = Celery("celery_tasks", broker=os.environ.get("BROKER", "redis://127.0.0.1:6379/0"))
app.conf.task_acks_late = True  # acknowledge after the task has run, not when it arrives
app.conf.task_reject_on_worker_lost = True  # redeliver it if its process dies

once = Once("sqlite:///tasks.db", migrate=True)


@once.inbox(consumer="payments", effects=PHASED)
def pay(op: SyncOperation, cents: int) -> str:
    """The message's id is the key: the charge is made once, and its result is stored."""
    charged = op.call("charged", charge, cents, repeatable=True)
    return str(charged["id"])


@app.task(bind=True, max_retries=None)
def payment(self: Task, cents: int) -> str:
    """Handle one delivery of a task; `self.request.id` is the same in every delivery."""
    receipt = pay(self.request.id, cents)
    if receipt.handling is Handling.BUSY:
        raise self.retry(countdown=receipt.retry_after)
    if receipt.handling in {Handling.UNKNOWN, Handling.DEAD}:
        raise Reject(receipt.reason, requeue=False)
    print(f"{receipt.handling.name} {receipt.result}", flush=True)  # noqa: T201  (an example may print)
    return str(receipt.result)


if __name__ == "__main__":
    for _ in range(3):  # like a broker that did not receive the acknowledgements
        payment.apply_async((1999,), task_id=sys.argv[1])
    print(charges())  # noqa: T201
