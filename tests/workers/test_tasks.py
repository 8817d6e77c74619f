"""The list of tasks: the schedule, the help, the metrics and the doctor show the same ones."""

from __future__ import annotations

from pathlib import Path
from typing import Any, TypedDict

import pytest

from oncekey import PHASED, Once, Operation
from oncekey.cli.worker import HELP
from oncekey.core.model import SECOND, ParcelKind
from oncekey.observe.measuring import look
from oncekey.ops import doctor
from oncekey.ops.stats import Queue, Roll, StoreStats, Waiting, Worker
from oncekey.ops.tasks import NAMES, RECONCILER, TASKS
from oncekey.workers.tasks import declared_by, tasks_for


async def test_every_task_with_work_is_scheduled_and_measured(tmp_path: Path) -> None:
    once = Once(store=f"sqlite:///{tmp_path / 'shop.db'}", migrate=True)

    @once.topic("charge")
    async def charge(message: object) -> None: ...

    @once.protect(effects=PHASED)
    async def order(op: Operation) -> None: ...

    @once.resolver("order", call="charge")
    async def resolve(question: object) -> None: ...

    await once.start()
    try:
        assert tuple(task.name for task in tasks_for(once)) == NAMES
        gauges = await look(once)
        assert gauges is not None
        assert tuple(gauges.workers) == NAMES
    finally:
        await once.stop()


def test_the_help_describes_every_task() -> None:
    assert all(f"{task.name} {task.does}" in HELP for task in TASKS)


def test_the_doctor_reports_missing_tasks_with_pending_work() -> None:
    stats = StoreStats(0, (), (Queue("charge", ParcelKind.DEFER, 1, 0, 0),), (), (Waiting("resumable", 1, 0),))
    roll = Roll(0, (Worker("host:1:aa", (), 0, 0, SECOND),))
    (_, missing) = doctor.workers(roll, stats)
    needed = [task for task in TASKS if task is not RECONCILER]
    assert missing.seen == f"no live worker runs {' or '.join(task.name for task in needed)}"
    assert missing.means == "; ".join(task.undone for task in needed)


class Charge(TypedDict):
    id: str


async def declaring(op: Any) -> None:
    await op.call("model", None, result=Charge)
    await op.call("list", None, result=list[Charge])
    await op.call("mapping", None, result=dict[str, list[int]])
    await op.call("optional", None, result=Charge | None)
    await op.call("nothing", None, result=None)
    computed: Any = type(op)
    await op.call("computed", None, result=list[computed])


@pytest.mark.parametrize(
    ("phase", "declared"),
    [
        ("model", Charge),
        ("list", list[Charge]),
        ("mapping", dict[str, list[int]]),
        ("optional", Charge | None),
        ("nothing", None),
        ("computed", None),
        ("absent", None),
    ],
)
def test_the_declared_result_of_a_call_is_read_from_the_handler(phase: str, declared: Any) -> None:
    assert declared_by(declaring, phase) == declared
