"""Commits that no standby has confirmed yet: one request asks, and the others use its result."""

from __future__ import annotations

import asyncio
import itertools
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest

from oncekey.core.errors import StoreUnavailableError
from oncekey.databases.postgres.unconfirmed import AsyncConfirming, Confirming, UnconfirmedCommits

WAITING = 3


class Standby:
    """Asked by several requests, it answers one at a time. `meanwhile` runs before each of its answers."""

    def __init__(self, meanwhile: Callable[[], None], answers: list[bool | BaseException]) -> None:
        self.meanwhile, self.answers = meanwhile, answers

    def answer(self) -> bool:
        self.meanwhile()
        answer = self.answers.pop(0)
        if isinstance(answer, BaseException):
            raise answer
        return answer


async def under_asyncio(unconfirmed: UnconfirmedCommits, standby: Standby) -> list[BaseException | None]:
    """What several requests get that ask while the first one waits for its answer."""

    async def ask() -> bool:
        await asyncio.sleep(0)  # the others come
        return standby.answer()

    confirming = AsyncConfirming(unconfirmed, ask)
    return await asyncio.gather(*(confirming.confirm_all() for _ in range(WAITING)), return_exceptions=True)


class Turn:
    """A lock that tells when all are there: each has read how many failed, and waits for its turn."""

    def __init__(self, all_there: threading.Event) -> None:
        self.lock, self.there, self.all_there = threading.Lock(), itertools.count(1), all_there

    def __enter__(self) -> None:
        if next(self.there) == WAITING:
            self.all_there.set()
        self.lock.acquire()

    def __exit__(self, *_: object) -> None:
        self.lock.release()


async def in_threads(unconfirmed: UnconfirmedCommits, standby: Standby) -> list[BaseException | None]:
    """The same in threads."""
    began, others_came = threading.Event(), threading.Event()

    def ask() -> bool:
        began.set()
        others_came.wait()
        return standby.answer()

    confirming = Confirming(unconfirmed, ask)
    confirming._turn = Turn(others_came)
    with ThreadPoolExecutor(WAITING) as pool:
        first = pool.submit(confirming.confirm_all)
        began.wait()
        others = [pool.submit(confirming.confirm_all) for _ in range(WAITING - 1)]
        return [one.exception() for one in (first, *others)]


@pytest.fixture(params=[under_asyncio, in_threads], ids=["asyncio", "threads"])
def asking(request):
    return request.param


async def test_waiting_tasks_check_again_after_new_commits(asking) -> None:
    unconfirmed = UnconfirmedCommits()
    unconfirmed.add()
    assert await asking(unconfirmed, Standby(unconfirmed.add, [True] * WAITING)) == [None] * WAITING


@pytest.mark.parametrize("failure", [False, OSError()], ids=["refused", "raised"])
async def test_waiting_tasks_share_the_failed_check(asking, failure) -> None:
    unconfirmed = UnconfirmedCommits()
    unconfirmed.add()
    standby = Standby(lambda: None, [failure])
    first, *others = await asking(unconfirmed, standby)
    assert isinstance(first, OSError if failure else StoreUnavailableError)
    assert [type(one) for one in others] == [StoreUnavailableError] * (WAITING - 1)
    assert unconfirmed


async def test_waiting_task_checks_after_the_first_was_cancelled() -> None:
    unconfirmed = UnconfirmedCommits()
    unconfirmed.add()
    first, *others = await under_asyncio(unconfirmed, Standby(lambda: None, [asyncio.CancelledError(), True]))
    assert isinstance(first, asyncio.CancelledError)
    assert others == [None] * (WAITING - 1)
