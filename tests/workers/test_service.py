"""The service: when it looks, what wakes it, and how it ends."""

from __future__ import annotations

import asyncio
import itertools
import logging

import pytest

from harness.patience import PATIENCE
from oncekey.core.errors import StoreUnavailableError
from oncekey.workers.health import report
from oncekey.workers.service import RESTART, Done, Pace, Service

NUMBERS = itertools.count()


class Task:
    """A task that finds what the test says."""

    done = failed = 0

    def __init__(self, finds=(), pace=Pace()):  # noqa: B008  (frozen)
        self.name = f"test-{next(NUMBERS)}"
        self.pace = pace
        self.finds = list(finds)
        self.looks = 0
        self.looked = asyncio.Event()
        self.stopped = []

    async def run_once(self):
        self.looks += 1
        self.looked.set()
        found = self.finds.pop(0) if self.finds else 0
        if isinstance(found, BaseException):
            raise found
        self.done += found
        return found

    async def shut_down(self):
        pass

    async def stop(self, grace):
        self.stopped.append(grace)


class Pauses:
    """Sleeps that end when the test takes them."""

    def __init__(self):
        self.asked = asyncio.Queue()

    async def __call__(self, seconds):
        over = asyncio.Event()
        await self.asked.put((seconds, over))
        await over.wait()

    async def next(self):
        return await self.asked.get()


async def running(tasks, test, **options):
    pauses = Pauses()
    service = Service(tasks, sleep=pauses, chance=lambda: 1.0, **options)
    run = asyncio.create_task(service.run())
    try:
        await test(service, pauses)
    finally:
        service.stop()
        await run


async def test_idle_polls_slow_down_and_work_resets_the_pause():
    task = Task([0, 0, 3, 2, 0])

    async def test(_, pauses):
        lengths = []
        for _ in range(10):
            seconds, over = await pauses.next()
            lengths.append((round(seconds, 3), task.looks))
            over.set()
        # Two looks in vain, then work at once, work again, and from the shortest pause on.
        assert lengths[:3] == [(0.05, 1), (0.1, 2), (0.05, 5)]
        assert [seconds for seconds, _ in lengths[-3:]] == [1.6, 2.0, 2.0]

    await running([task], test)


@pytest.mark.parametrize(("chance", "pause"), [(0.0, 1.0), (0.5, 1.5), (1.0, 2.0)])
def test_poll_pauses_have_jitter_between_bounds(chance, pause):
    assert Pace().pause(40, chance) == pause


async def test_a_commit_in_the_same_process_wakes_the_service():
    task = Task()

    async def test(service, pauses):
        await pauses.next()
        task.looked.clear()
        await asyncio.to_thread(service.wake)  # also from a thread
        await task.looked.wait()
        seconds, _ = await pauses.next()
        assert (task.looks, seconds) == (2, 0.05)

    await running([task], test)


async def test_a_wake_during_a_poll_is_not_lost():
    task = Task()
    inside, go_on = asyncio.Event(), asyncio.Event()
    look = task.run_once

    async def slow():
        inside.set()
        await go_on.wait()
        return await look()

    task.run_once = slow

    async def test(service, _):
        await inside.wait()
        service.wake()
        await asyncio.sleep(0)
        inside.clear()
        go_on.set()
        await inside.wait()  # looks again though nobody ended its pause

    await running([task], test)


async def test_errors_in_a_task_are_logged_without_their_text(caplog):
    task = Task([StoreUnavailableError("secret dsn"), ValueError("secret card"), 1])

    async def test(_, pauses):
        for _ in range(3):
            _, over = await pauses.next()
            over.set()
        assert task.looks >= 4

    with caplog.at_level(logging.WARNING, "oncekey.worker"):
        await running([task], test)

    assert [record.levelname for record in caplog.records] == ["WARNING", "ERROR"]
    assert "secret" not in caplog.text


class PanicException(BaseException):
    pass


class Beats(Task):
    """A task that is handed the troubles of the others, as the heartbeat is."""

    troubles = None


@pytest.mark.parametrize("error", [PanicException("secret card"), asyncio.CancelledError("secret"), SystemExit(1)])
async def test_a_crashed_task_is_logged_and_restarted(caplog, error):
    task, well, beats = Task([error, 1]), Task(), Beats()

    async def test(service, pauses):
        restart = None
        while restart is None:
            seconds, over = await pauses.next()
            restart = over if seconds == RESTART else None
        await until(lambda: well.looks)
        assert (task.looks, service.ready) == (1, False)
        assert report(service)["tasks"][task.name]["wrong"] == f"ended with {type(error).__name__}"
        assert list(beats.troubles()) == [task.name]
        restart.set()
        await until(lambda: service.ready)
        assert task.looks >= 2
        assert beats.troubles() == {}

    with caplog.at_level(logging.WARNING, "oncekey.worker"):
        await running([task, well], test, presence=beats)

    assert [record.levelname for record in caplog.records] == ["ERROR"]
    assert f"ended with {type(error).__name__}" in caplog.text
    assert "secret" not in caplog.text


async def test_a_slow_poll_makes_the_service_not_ready():
    task = Task(pace=Pace(patience=0.0))
    inside, go_on = asyncio.Event(), asyncio.Event()

    async def stuck():
        inside.set()
        await go_on.wait()
        return 0

    task.run_once = stuck

    async def test(service, _):
        await inside.wait()
        assert not service.ready
        assert report(service)["tasks"][task.name]["wrong"].startswith("a round has taken")
        go_on.set()
        await until(lambda: service.ready)

    await running([task], test)


async def test_stopping_does_not_wait_for_a_task_that_ignores_cancellation(caplog):
    task, inside, let_go = Task(), asyncio.Event(), asyncio.Event()

    async def stubborn():
        while not let_go.is_set():
            inside.set()
            try:
                await let_go.wait()
            except asyncio.CancelledError:
                continue
        return 0

    task.run_once = stubborn
    sleeps = []

    async def sleep(seconds):
        sleeps.append(seconds)  # the grace is over at once

    service = Service([task], sleep=sleep, grace=7.0)
    run = asyncio.create_task(service.run())
    await inside.wait()
    loop = next(one for one in asyncio.all_tasks() if one.get_name() == f"oncekey-{task.name}")
    service.stop()
    await run

    assert sleeps[0] > 7.0
    assert f"oncekey-{task.name}" in caplog.text
    assert loop not in asyncio.all_tasks()  # so `asyncio.run` does not wait for it either
    let_go.set()
    await loop


async def test_stopping_passes_the_grace_to_every_task():
    tasks = [Task(), Task()]

    async def test(_, pauses):
        await pauses.next()

    await running(tasks, test, grace=7)

    assert [task.stopped for task in tasks] == [[7], [7]]


async def test_stopping_before_the_start_ends_the_run():
    task = Task()
    service = Service([task])
    service.wake()
    service.stop()

    await service.run()

    assert task.stopped == [30.0]


async def test_once_runs_all_pending_work_and_ends():
    tasks = [Task([2, 1]), Task([4])]

    assert await Service(tasks).once() == Done(7, 0)

    # Once more round: what the second did may be work for the first.
    assert [(task.looks, len(task.stopped)) for task in tasks] == [(4, 1), (3, 1)]


async def test_once_repeats_tasks_that_have_new_work():
    first, second = Task([1]), Task([1])
    look = second.run_once

    async def makes_work():
        did = await look()
        first.finds += [5] * did
        return did

    second.run_once = makes_work

    assert await Service([first, second]).once() == Done(7, 0)


async def test_once_counts_failures_and_outages(caplog):
    failing, away, well = Task([2]), Task([StoreUnavailableError("gone"), 3]), Task([1])
    failing.done, failing.failed = -2, 2  # it finds two, and none succeeds

    assert await Service([failing, away, well]).once() == Done(1, 3)

    assert [len(task.stopped) for task in (failing, away, well)] == [1, 1, 1]
    assert "StoreUnavailableError" in caplog.text


async def test_a_commit_does_not_wake_scheduled_tasks() -> None:
    """What a request has just committed is no business of a sweeper, and a resolver has its time."""
    assert Pace(30.0, 30.0).fixed
    assert not Pace().fixed
    service = Service([Looking("relay", Pace(60.0, 61.0)), Looking("sweeper", Pace(60.0, 60.0))])
    relay, sweeper = service.tasks
    running = asyncio.create_task(service.run())
    await until(lambda: relay.looks == sweeper.looks == 1)

    service.wake()
    await until(lambda: relay.looks == 2)
    assert sweeper.looks == 1

    service.stop()
    await running


class Looking:
    """A task that finds nothing, and counts its looks."""

    def __init__(self, name: str, pace: Pace) -> None:
        self.name, self.pace, self.looks = name, pace, 0

    async def run_once(self) -> int:
        self.looks += 1
        return 0

    async def shut_down(self) -> None: ...

    async def stop(self, grace: float) -> None: ...


async def until(holds) -> None:
    async with asyncio.timeout(PATIENCE):
        while not holds():  # noqa: ASYNC110  (what it waits for is a count)
            await asyncio.sleep(0)
