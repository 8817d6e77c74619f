"""Places in a pool, for tasks: in order, without overtaking, and none is lost to a cancellation."""

from __future__ import annotations

import asyncio
import time

import pytest

from oncekey.core.errors import StoreBusyError
from oncekey.databases.slots import AsyncSlots

LATE = 60.0


def soon() -> float:
    return time.monotonic() + LATE


async def queued(slots: AsyncSlots, names: list[str], name: str) -> asyncio.Task[None]:
    async def wait() -> None:
        await slots.acquire(soon())
        names.append(name)

    task = asyncio.create_task(wait())
    await asyncio.sleep(0)
    return task


async def test_slots_are_granted_in_order_of_waiting() -> None:
    slots, names = AsyncSlots(1, LATE), list[str]()
    assert slots.taken()
    first, second = await queued(slots, names, "first"), await queued(slots, names, "second")
    slots.release()
    assert slots.full  # the place is handed over, also before its new owner goes on
    assert not slots.taken()
    await first
    slots.release()
    await second
    assert names == ["first", "second"]
    slots.release()
    assert not slots.full
    with pytest.raises(ValueError, match="twice"):
        slots.release()


async def test_a_place_is_not_waited_for_past_the_deadline() -> None:
    # R110
    slots = AsyncSlots(1, LATE)
    await slots.acquire(soon())
    with pytest.raises(StoreBusyError):
        await slots.acquire(time.monotonic())
    slots.release()
    assert slots.taken()


@pytest.mark.parametrize("told", [False, True], ids=["waiting", "told"])
async def test_a_cancelled_one_leaves_its_place_to_the_next(told: bool) -> None:
    slots, names = AsyncSlots(1, LATE), list[str]()
    await slots.acquire(soon())
    first, second = await queued(slots, names, "first"), await queued(slots, names, "second")
    if told:
        slots.release()
    first.cancel()
    if not told:
        slots.release()
    await second
    assert (names, first.cancelled(), slots.full) == (["second"], True, True)
    slots.release()
    assert not slots.full


async def test_wait_for_slot_takes_none_and_has_lowest_priority() -> None:
    slots, names = AsyncSlots(1, LATE), list[str]()
    assert await slots.wait_for_slot(0)
    await slots.acquire(soon())
    assert not await slots.wait_for_slot(0)
    hoping = asyncio.create_task(slots.wait_for_slot(LATE))
    waiting = await queued(slots, names, "waiting")
    slots.release()
    await waiting
    assert not hoping.done()
    slots.release()
    assert await hoping
    assert not slots.full


async def test_wait_for_slot_keeps_its_place_before_newcomers() -> None:
    # Else it asks the store who is at work, at the price of its own execution, whenever a pool is busy.
    slots = AsyncSlots(1, LATE)
    await slots.acquire(soon())
    first, second = asyncio.create_task(slots.wait_for_slot(LATE)), asyncio.create_task(slots.wait_for_slot(LATE))
    await asyncio.sleep(0)
    slots.release()
    assert slots.full  # whoever comes now comes after the second one
    assert slots.taken()  # by one who does not ask, before the first goes on
    await asyncio.sleep(0)
    assert not first.done()
    slots.release()
    assert await first
    assert slots.taken()
    assert not second.done()
    slots.release()
    assert await second


async def test_cancelled_or_late_wait_for_slot_loses_no_slot() -> None:
    slots = AsyncSlots(1, LATE)
    await slots.acquire(soon())
    given_up, next_one = asyncio.create_task(slots.wait_for_slot(LATE)), asyncio.create_task(slots.wait_for_slot(LATE))
    late = asyncio.create_task(slots.wait_for_slot(0))
    await asyncio.sleep(0)
    slots.release()
    given_up.cancel()  # it was told, and tells the next one
    assert await next_one
    assert slots.taken()
    assert not await late
    slots.release()
    assert not slots.full


async def test_waiting_tasks_share_one_timer(monkeypatch: pytest.MonkeyPatch) -> None:
    slots, timers = AsyncSlots(1, LATE), list[float]()
    loop = asyncio.get_running_loop()
    made = loop.call_at
    monkeypatch.setattr(loop, "call_at", lambda at, *rest, **named: timers.append(at) or made(at, *rest, **named))
    assert slots.taken()
    for _ in range(3):
        waiting = [asyncio.create_task(slots.wait_for_slot(LATE)) for _ in range(3)]
        for each in waiting:
            await asyncio.sleep(0)
            slots.release()
            assert await each
            assert slots.taken()
    assert len(timers) == 1
    assert not await slots.wait_for_slot(0)  # whose deadline is earlier, though it came later
    assert len(timers) == 2
