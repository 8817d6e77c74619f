"""What a function of the application raises concerns its own parcel or record, even if it is no `Exception`."""

from __future__ import annotations

import asyncio
import signal
import sys
from contextlib import contextmanager

import pytest

from oncekey.core.model import State
from oncekey.core.topics import CallBrokenError, contained
from oncekey.engine.relay import ParcelEnded


class PanicException(BaseException):
    """It is no `Exception`, so that `except Exception` does not catch it."""


def panic():
    raise PanicException("index out of bounds")


def cancelled():
    raise asyncio.CancelledError


def group():
    raise BaseExceptionGroup("several", [PanicException("one")])


RAISED = {"PanicException": panic, "SystemExit": sys.exit, "CancelledError": cancelled, "BaseExceptionGroup": group}


def in_thread(broken):
    def function(message):
        return broken() if message.payload == "poison" else None

    return function


def at_once(broken):
    async def function(message):
        return broken() if message.payload == "poison" else None

    return function


def with_await(broken):
    async def function(message):
        await asyncio.sleep(0)
        return broken() if message.payload == "poison" else None

    return function


FORMS = {"thread": in_thread, "at once": at_once, "task": with_await}


@pytest.mark.parametrize("raised", RAISED)
@pytest.mark.parametrize("form", FORMS)
async def test_a_message_with_a_broken_function_is_postponed(shop, form, raised):
    poison, others = shop.parcel(payload='"poison"'), [shop.parcel() for _ in range(5)]
    shop.put(poison, *others)
    shop.topics.topic(shop.topic)(FORMS[form](RAISED[raised]))

    relay = await shop.work(concurrency=1)

    assert relay.ended == {ParcelEnded.POSTPONED: 1, ParcelEnded.DELIVERED: 5}
    assert not relay._held
    assert shop.in_outbox(poison).last_error == raised
    assert [shop.in_outbox(one) for one in others] == [None] * 5


@pytest.mark.parametrize("raised", RAISED)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(("repeatable", "state"), [(True, State.PENDING), (False, State.UNKNOWN)])
async def test_a_deferred_call_with_a_broken_function_is_uncertain(shop, form, raised, repeatable, state):
    poison, other = shop.deferred(payload='"poison"'), shop.deferred()
    shop.topics.topic(shop.topic, repeatable=repeatable)(FORMS[form](RAISED[raised]))

    relay = await shop.work(concurrency=1)

    assert (shop.record(poison).state, shop.record(other).state) == (state, State.COMPLETED)
    assert not relay._held


async def test_a_leaked_slot_is_detected_and_freed(shop, caplog):
    for _ in range(6):
        shop.put(shop.parcel())
    delivered = []

    @shop.topics.topic(shop.topic)
    async def deliver(message):
        delivered.append(message.key)

    async with shop.relay(concurrency=1, batch=1) as relay:
        acknowledge, forgotten = relay._acks.add, []
        relay._acks.add = forgotten.append  # a parcel that nobody holds any more, and that keeps its place
        assert await relay.run_once() == 1
        await relay.shut_down()
        relay._acks.add = acknowledge
        while await relay.run_once():
            await relay.shut_down()

    assert (len(forgotten), len(delivered)) == (1, 6)
    assert "1 slots were leaked" in caplog.text
    assert relay.failed == 1


@contextmanager
def handled_by(handler):
    before = signal.signal(signal.SIGUSR1, handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGUSR1, before)


def raised_by(function, *arguments):
    """The error of a call, with its traceback."""
    with pytest.raises(SystemExit) as caught:
        function(*arguments)
    return caught.value


def test_process_exit_signals_are_raised_again():
    def end(*_):
        sys.exit(3)

    with handled_by(end):
        by_signal = raised_by(signal.raise_signal, signal.SIGUSR1)
        with pytest.raises(SystemExit):
            contained(by_signal)
        assert isinstance(contained(raised_by(sys.exit, 3)), CallBrokenError)
    with pytest.raises(KeyboardInterrupt):
        contained(KeyboardInterrupt())


async def test_cancelling_the_caller_is_raised_again():
    begun = asyncio.Event()

    async def work():
        try:
            begun.set()
            await asyncio.Event().wait()
        except BaseException as error:
            contained(error)

    task = asyncio.create_task(work())
    await begun.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
