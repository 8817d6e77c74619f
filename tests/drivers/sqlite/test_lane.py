"""The writer's lane: jobs go to its thread and back, turns are passed on there, and nobody who is gone keeps one."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import Any

import pytest

from harness.patience import PATIENCE
from oncekey.core.errors import StoreBusyError, StoreUnavailableError, TransactionControlError
from oncekey.databases.sqlite.lane import Lane, Turn, TurnState, WorkerThreads


class Gate:
    """A job that has begun and ends when it is let through."""

    def __init__(self) -> None:
        self.begun, self.let_through = threading.Event(), threading.Event()

    def __call__(self) -> str:
        self.begun.set()
        assert self.let_through.wait(PATIENCE)
        return "through"


def nothing() -> None: ...


async def held(lane: Lane) -> Turn:
    """A turn that has come."""
    turn = Turn(lane)
    await turn.do(nothing, PATIENCE)
    return turn


async def queued(lane: Lane, job: Callable[[], Any], *, last: bool = False) -> tuple[Turn, asyncio.Task[Any]]:
    """A turn that waits."""
    turn, before = Turn(lane), len(lane._waiting)
    task = asyncio.create_task(turn.do(job, PATIENCE, last=last))
    while len(lane._waiting) == before:  # noqa: ASYNC110  (it sets no event)
        await asyncio.sleep(0)
    return turn, task


async def test_worker_threads_return_results_and_exceptions() -> None:
    crew = WorkerThreads(asyncio.get_running_loop(), 2, "crew")
    names = {await crew.do(lambda: threading.current_thread().name) for _ in range(20)}
    assert names <= {"crew_0", "crew_1"}

    def raise_it(error: BaseException) -> None:
        raise error

    with pytest.raises(LookupError, match="lost"):
        await crew.do(lambda: raise_it(LookupError("lost")))
    with pytest.raises(RuntimeError, match="StopIteration"):
        await crew.do(lambda: raise_it(StopIteration()))
    crew.dismiss()


async def test_a_crew_has_a_thread_for_each_job_up_to_its_size() -> None:
    crew, gates = WorkerThreads(asyncio.get_running_loop(), 2, "crew"), [Gate() for _ in range(3)]
    jobs = [crew.do(gate) for gate in gates]
    for gate in gates[:2]:
        assert gate.begun.wait(PATIENCE)
    assert not gates[2].begun.is_set()
    gates[0].let_through.set()
    assert gates[2].begun.wait(PATIENCE)
    for gate in gates:
        gate.let_through.set()
    assert await asyncio.gather(*jobs) == ["through"] * 3


async def test_idle_worker_thread_is_restarted_on_demand(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("oncekey.databases.sqlite.lane.LINGER", 0.001)
    crew = WorkerThreads(asyncio.get_running_loop(), 1, "crew")
    for number in range(5):
        assert await crew.do(lambda number=number: number) == number  # type: ignore[misc]
        while crew._there:  # noqa: ASYNC110  (it sets no event)
            await asyncio.sleep(0)


async def test_job_of_a_cancelled_caller_still_runs() -> None:
    crew, gate = WorkerThreads(asyncio.get_running_loop(), 1, "crew"), Gate()
    crew.do(gate).cancel()
    following = crew.do(lambda: "next")
    gate.let_through.set()
    assert await following == "next"
    assert gate.begun.is_set()


async def test_dismissed_worker_threads_reject_jobs() -> None:
    crew = WorkerThreads(asyncio.get_running_loop(), 1, "crew")
    crew.dismiss()
    with pytest.raises(StoreUnavailableError, match="closed"):
        crew.do(nothing)


async def test_next_turn_starts_before_the_loop_is_notified() -> None:
    lane = Lane(asyncio.get_running_loop())
    first, began = await held(lane), threading.Event()
    second, waiting = await queued(lane, began.set)
    ending = asyncio.create_task(first.do(nothing, PATIENCE, last=True))
    await asyncio.sleep(0)

    assert began.wait(PATIENCE)  # meanwhile the event loop stands still
    assert not ending.done()
    await asyncio.gather(ending, waiting)
    assert second.state is TurnState.HELD
    await second.do(nothing, PATIENCE, last=True)
    assert not lane.taken


async def test_a_turn_is_passed_on_when_its_last_job_fails() -> None:
    lane = Lane(asyncio.get_running_loop())

    def fail() -> None:
        raise LookupError

    first = await held(lane)
    _, waiting = await queued(lane, lambda: "second", last=True)
    with pytest.raises(LookupError):
        await first.do(fail, PATIENCE, last=True)
    assert await waiting == "second"
    assert not lane.taken


async def test_jobs_of_one_turn_run_in_order() -> None:
    lane = Lane(asyncio.get_running_loop())
    first, said = await held(lane), list[int]()
    turn, waiting = await queued(lane, lambda: said.append(0))
    others = [asyncio.create_task(turn.do(lambda number=number: said.append(number), PATIENCE)) for number in (1, 2)]  # type: ignore[misc]
    await asyncio.sleep(0)
    assert len(lane._waiting) == 1
    await first.do(nothing, PATIENCE, last=True)
    await asyncio.gather(waiting, *others)
    assert said == [0, 1, 2]


async def test_timed_out_turn_gets_its_old_position() -> None:
    lane = Lane(asyncio.get_running_loop())
    first, said = await held(lane), list[str]()
    early = Turn(lane)
    with pytest.raises(StoreBusyError, match="too long"):
        await early.do(nothing, 0.001)
    assert (early.state, len(lane._waiting), early.cancelled) == (TurnState.OUTSIDE, 0, False)
    _, late = await queued(lane, lambda: said.append("late"), last=True)
    again = asyncio.create_task(early.do(lambda: said.append("early"), PATIENCE, last=True))
    await asyncio.sleep(0)
    await first.do(nothing, PATIENCE, last=True)
    await asyncio.gather(late, again)
    assert said == ["early", "late"]


async def test_cancelled_waiting_job_is_dropped_and_running_job_is_not() -> None:
    lane = Lane(asyncio.get_running_loop())
    first, said = await held(lane), list[str]()
    turn, gone = await queued(lane, lambda: said.append("gone"))
    other = asyncio.create_task(turn.do(lambda: said.append("other"), PATIENCE))
    await asyncio.sleep(0)
    gone.cancel()
    await asyncio.gather(gone, return_exceptions=True)
    assert (turn.state, turn.cancelled) == (TurnState.WAITING, False)
    await first.do(nothing, PATIENCE, last=True)
    await other
    assert said == ["other"]

    gate = Gate()
    under_way = asyncio.create_task(turn.do(gate, PATIENCE))
    await asyncio.sleep(0)
    under_way.cancel()
    await asyncio.gather(under_way, return_exceptions=True)
    gate.let_through.set()
    assert (turn.state, turn.cancelled) == (TurnState.HELD, True)
    await turn.do(nothing, PATIENCE, last=True)
    assert not lane.taken


async def test_only_a_waiting_turn_can_be_withdrawn() -> None:
    lane = Lane(asyncio.get_running_loop())
    first = await held(lane)
    assert not first.withdraw()
    second, waiting = await queued(lane, nothing)
    assert second.withdraw()
    with pytest.raises(TransactionControlError, match="over"):
        await waiting
    await first.do(nothing, PATIENCE, last=True)
    with pytest.raises(TransactionControlError, match="over"):
        await first.do(nothing, PATIENCE)
    assert (lane.taken, len(lane._waiting)) == (False, 0)
