"""The counter of calls counts what it says: entries and resumptions, in the package alone, in every thread."""

from __future__ import annotations

import asyncio
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from harness.calls import counted
from oncekey.canonical.digests import frame, raw
from oncekey.core.headers import field_name

HERE = __file__


def test_entries_are_counted_by_function():
    with counted() as calls:
        frame(b"a", b"b")
        raw("x")
        raw("y")
    # A comprehension is a function of its own where the interpreter makes it one.
    assert {name: count for name, count in calls.first.items() if "comp>" not in name} == {
        "canonical/digests.py:frame": 1,
        "canonical/digests.py:raw": 2,
    }
    assert calls.resumptions == 0
    assert calls.all == calls.entries


def test_only_calls_into_the_package_are_counted():
    with counted() as calls:
        sorted([3, 1, 2], key=lambda one: -one)
        Path("a").joinpath("b")
    assert (calls.entries, calls.resumptions) == (0, 0)


def test_a_cache_hit_is_not_counted_as_a_call():
    field_name("x-counted-once")
    with counted() as calls:
        field_name("x-counted-once")
    assert calls.entries == 0
    with counted() as calls:
        field_name("x-never-asked-before")
    assert calls.first == {"core/headers.py:field_name": 1}


def three() -> Iterator[int]:
    yield 1
    yield 2
    yield 3


async def sleeps(times: int) -> int:
    for _ in range(times):
        await asyncio.sleep(0)
    return times


async def nested(times: int) -> int:
    return await sleeps(times)


async def stream() -> None:
    async for _ in letters():
        pass


async def letters():
    yield "a"
    await asyncio.sleep(0)
    yield "b"


def named(counter):
    return {name.partition(":")[2]: count for name, count in counter.items() if "test_" not in name.partition(":")[2]}


def test_a_generator_counts_one_entry_and_its_resumptions():
    with counted(HERE) as calls:
        list(three())
    assert named(calls.first) == {"three": 1}
    assert named(calls.resumed) == {"three": 3}


def test_an_unstarted_generator_counts_no_entry():
    with counted(HERE) as calls:
        waiting = three()
    assert named(calls.first) == {}
    waiting.close()


def test_throwing_into_a_generator_counts_as_resumption():
    running = three()
    next(running)
    with counted(HERE) as calls, pytest.raises(KeyError):
        running.throw(KeyError)
    assert (named(calls.first), named(calls.resumed)) == ({}, {"three": 1})


def test_every_awaiting_frame_counts_a_resumption():
    with counted(HERE) as calls:
        asyncio.run(nested(2))
    assert named(calls.first) == {"nested": 1, "sleeps": 1}
    assert named(calls.resumed) == {"nested": 2, "sleeps": 2}


def test_an_async_generator_counts_entries_and_resumptions():
    with counted(HERE) as calls:
        asyncio.run(stream())
    assert named(calls.first) == {"stream": 1, "letters": 1}
    assert named(calls.resumed) == {"stream": 1, "letters": 3}


def test_calls_in_a_new_thread_are_counted():
    with counted() as calls:
        thread = threading.Thread(target=raw, args=("x",))
        thread.start()
        thread.join()
    assert calls.first == {"canonical/digests.py:raw": 1}


def test_the_count_ends_with_the_block_and_after_an_error():
    with pytest.raises(KeyError), counted() as calls:
        raise KeyError
    raw("x")
    assert sys.getprofile() is None
    assert calls.entries == 0


def test_two_counts_at_once_are_refused():
    with counted(), pytest.raises(RuntimeError, match="somebody else"), counted():
        pass
    assert sys.getprofile() is None


def test_the_report_lists_the_most_called_function_first():
    with counted() as calls:
        raw("x")
        raw("y")
        frame()
    lines = calls.report().splitlines()
    assert lines[0] == f"{calls.entries} calls and 0 resumptions"
    assert lines[1].split() == ["2", "+0", "canonical/digests.py:raw"]
