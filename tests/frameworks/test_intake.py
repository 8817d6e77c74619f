"""A body has a timer only if it has to be waited for, and a cancellation reaches the server's `receive`."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Generator
from typing import Any

import pytest

from oncekey.frameworks.asgi import requests as intake_module
from oncekey.frameworks.asgi.requests import Intake, TooSlowError

LAST = {"type": "http.request", "body": b"last", "more_body": False}
MORE = {"type": "http.request", "body": b"more", "more_body": True}
LONG = 3600.0


def reading(receive: Callable[[], Awaitable[Any]]) -> Intake:
    return Intake(receive, 1000)


@pytest.fixture
def timers(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """What timers were asked for."""
    asked: list[float] = []

    def timeout(seconds: float) -> asyncio.Timeout:
        asked.append(seconds)
        return asyncio.timeout(seconds)

    class Watched:
        get_running_loop = staticmethod(asyncio.get_running_loop)
        Event = asyncio.Event

    Watched.timeout = staticmethod(timeout)
    monkeypatch.setattr(intake_module, "asyncio", Watched)
    return asked


async def test_an_available_body_sets_no_timer(timers: list[float]) -> None:
    pieces = [MORE, MORE, LAST]

    async def receive() -> Any:
        return pieces.pop(0)

    assert await reading(receive).body(LONG) == b"moremorelast"
    assert timers == []


async def test_waiting_for_a_body_sets_a_timer(timers: list[float]) -> None:
    pieces = [MORE, LAST]

    async def receive() -> Any:
        for _ in range(3):
            await asyncio.sleep(0)
        return pieces.pop(0)

    assert await reading(receive).body(LONG) == b"morelast"
    assert len(timers) == 2
    assert all(0 < seconds <= LONG for seconds in timers)


async def test_receive_may_return_any_awaitable() -> None:
    class Later:
        def __await__(self) -> Generator[Any, Any, Any]:
            yield from asyncio.sleep(0).__await__()
            return MORE

    done = asyncio.get_running_loop().create_future()
    asyncio.get_running_loop().call_soon(done.set_result, LAST)
    sources: list[Awaitable[Any]] = [Later(), done]
    assert await reading(lambda: sources.pop(0)).body(LONG) == b"morelast"


@pytest.mark.parametrize("steps", [1, 3])
async def test_a_slow_body_cancels_receive(steps: int) -> None:
    heard: list[str] = []

    async def receive() -> Any:
        try:
            for _ in range(steps - 1):
                await asyncio.sleep(0)
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            await asyncio.sleep(0)  # a server may have to tidy up
            heard.append("cancelled")
            raise

    intake = reading(receive)
    for _ in range(2):  # once too slow, always too slow
        with pytest.raises(TooSlowError):
            await intake.body(0.0)
    assert heard == ["cancelled"]


async def test_cancelling_the_request_raises_no_timeout() -> None:
    heard: list[str] = []
    waiting = asyncio.Event()

    async def receive() -> Any:
        try:
            waiting.set()
            await asyncio.Event().wait()
        finally:
            heard.append("ended")

    task = asyncio.create_task(reading(receive).body(LONG))
    await waiting.wait()
    task.cancel("by the server")
    with pytest.raises(asyncio.CancelledError, match="by the server"):
        await task
    assert (heard, task.cancelled()) == (["ended"], True)


async def test_a_receive_that_returns_on_cancellation_is_used() -> None:
    waiting = asyncio.Event()

    async def receive() -> Any:
        try:
            waiting.set()
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            return LAST

    task = asyncio.create_task(reading(receive).body(LONG))
    await waiting.wait()
    task.cancel()
    assert await task == b"last"


@pytest.mark.parametrize("suspends", [False, True])
async def test_errors_from_receive_are_raised_unchanged(suspends: bool) -> None:
    async def receive() -> Any:
        if suspends:
            await asyncio.sleep(0)
        raise TimeoutError("of the server")

    with pytest.raises(TimeoutError, match="of the server"):
        await reading(receive).body(LONG)


async def test_dropping_a_request_closes_its_receive() -> None:
    heard: list[str] = []

    async def receive() -> Any:
        try:
            await asyncio.Event().wait()
        finally:
            heard.append("closed")

    body = reading(receive).body(LONG)
    body.send(None)
    body.close()
    assert heard == ["closed"]
