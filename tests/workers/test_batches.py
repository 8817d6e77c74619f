"""Batches of parcels: they grow and shrink, one parcel does not disturb the others, and nobody ends what is not his."""

from __future__ import annotations

import asyncio
import contextvars
import functools
import threading
import uuid
from collections import defaultdict
from dataclasses import replace

import pytest

from harness.asgi import until
from oncekey.core.errors import StoreUnavailableError
from oncekey.core.model import SECOND
from oncekey.core.policy import Policy
from oncekey.core.topics import Message, Topic
from oncekey.engine.relay import ParcelEnded, lease_of
from oncekey.workers.calling import CallBrokenError, awaits_nothing, call_at_once
from oncekey.workers.relay import SHARE

TENTH = lease_of(Policy()) / SECOND / SHARE


class Busy(Exception):  # noqa: N818  (a provider's word)
    pass


def many(shop, count, **changes):
    return shop.put(*(shop.parcel(position=n, payload=f'{{"n": {n}}}', **changes) for n in range(count)))


class Claims:
    """What a relay asked for, and got, with each claim."""

    def __init__(self):
        self.asked, self.careful, self.got = [], [], []

    async def __call__(self, driver, transaction):
        if transaction.name != "due":
            return await driver.run(transaction)
        rows = await driver.run(replace(transaction, body=lambda: self._report(transaction.body())))
        self.got.append(len(rows))
        return rows

    def _report(self, steps):
        statement = next(steps)
        self.asked.append(statement.params["limit"])
        self.careful.append(statement.params["careful"])
        rows = yield statement
        try:
            steps.send(rows)
        except StopIteration as stop:
            return stop.value


class TestBatchSizes:
    async def test_batches_of_quick_calls_grow(self, shop):
        parcels, claims, told = many(shop, 60), Claims(), []

        @shop.topics.topic(shop.topic)
        async def notify(message):
            told.append(message.payload["n"])

        relay = await shop.work(concurrency=2, batch=16, run=claims)

        assert claims.asked[:5] == [2, 4, 8, 16, 16]
        assert (sorted(told), relay.ended) == (list(range(60)), {ParcelEnded.DELIVERED: 60})
        assert not any(map(shop.in_outbox, parcels))

    async def test_slow_calls_are_claimed_up_to_the_concurrency(self, shop):
        many(shop, 12)
        claims = Claims()

        @shop.topics.topic(shop.topic)
        async def notify(_):
            shop.boottime += TENTH

        relay = await shop.work(concurrency=3, run=claims)

        assert set(claims.asked) == {3}
        assert relay.size == 3

    async def test_the_batch_size_shrinks_when_calls_slow_down(self, shop):
        many(shop, 40)
        claims, told = Claims(), []

        @shop.topics.topic(shop.topic)
        async def notify(_):
            told.append(1)
            if len(told) > 14:
                shop.boottime += TENTH

        await shop.work(concurrency=2, batch=8, run=claims)

        assert claims.asked[:4] == [2, 4, 8, 8]
        assert claims.asked[-2:] == [2, 2]

    async def test_retried_parcels_are_claimed_in_small_batches(self, shop):
        """A parcel that kills its worker each time must not take a whole batch to the dead letters with it."""
        tried = many(shop, 12)
        assert len(shop.claim(12)) == 12  # by a worker that dies
        shop.lease_passes()
        shop.put(*(shop.parcel(payload='{"n": 99}') for _ in range(12)))
        claims, told = Claims(), []

        @shop.topics.topic(shop.topic)
        async def notify(message):
            told.append((message.attempt, message.payload["n"]))

        await shop.work(concurrency=2, batch=100, run=claims)

        assert max(claims.careful) == 2
        assert claims.asked[1] > 2
        assert sorted(told) == sorted([(2, n) for n in range(len(tried))] + [(1, 99)] * 12)
        # Two of those that were tried in each claim, whatever else there was.
        assert len([got for got in claims.got if got]) >= 6

    async def test_the_next_retried_parcel_is_claimed_when_one_ends(self, shop):
        """And not after a look in vain, and the pause that follows it."""
        many(shop, 5)
        assert len(shop.claim(5)) == 5
        shop.lease_passes()
        claims, gates, told = Claims(), [asyncio.Event() for _ in range(5)], []

        @shop.topics.topic(shop.topic)
        async def notify(message):
            told.append(message.payload["n"])
            await gates[message.payload["n"]].wait()

        async with shop.relay(concurrency=2, run=claims) as relay:
            relay._size = 100
            assert await relay.run_once() == 2
            looking = asyncio.create_task(relay.run_once())
            await until(lambda: told == [0, 1])
            assert (looking.done(), claims.asked) == (False, [100])
            gates[0].set()
            shop.sleeps.end(0.05)
            assert await looking == 1
            for gate in gates:
                gate.set()
            while await relay.run_once():
                pass
        assert claims.careful[:2] == [2, 1]
        assert sorted(told) == [0, 1, 2, 3, 4]

    async def test_the_next_batch_is_claimed_while_the_current_one_runs(self, shop):
        many(shop, 30)
        claims, running, gate = Claims(), [], asyncio.Event()

        @shop.topics.topic(shop.topic)
        async def notify(message):
            if len(running) >= 20:
                await gate.wait()
            running.append(message.payload["n"])

        async with shop.relay(concurrency=2, batch=8, run=claims) as relay:
            while relay.size < 8:
                await relay.run_once()
                await relay.shut_down()
            looking = asyncio.create_task(keep_looking(relay))
            await until(lambda: len(running) == 20)
            # Two are called, and others were claimed meanwhile: as soon as there was room for half a batch.
            await until(lambda: len(relay._held) > relay.size // 2)
            looking.cancel()
            gate.set()
            while await relay.run_once():
                pass
        assert sorted(running) == list(range(30))

    async def test_a_parcel_claimed_as_the_last_task_ends_is_delivered(self, shop):
        slow, last = f"{shop.topic}-slow", f"{shop.topic}-last"
        shop.put(shop.parcel(topic=slow), shop.parcel(topic=last, position=1))
        claimed, go_on, told = asyncio.Event(), asyncio.Event(), []

        @shop.topics.topic(slow)
        async def waits(_):
            await claimed.wait()

        @shop.topics.topic(last)
        async def lets_the_claim_return(_):
            go_on.set()  # and ends in the same step of the event loop, with nothing left to do

        @shop.topics.topic(shop.topic)
        async def notify(message):
            told.append(message.payload)

        async def held_up(driver, transaction):
            result = await driver.run(transaction)
            if transaction.name == "due" and len(relay._held):
                claimed.set()
                await go_on.wait()
            return result

        async with shop.relay(concurrency=1, run=held_up) as relay:
            relay._size = 4
            assert await relay.run_once() == 2
            shop.put(shop.parcel(payload="3"))
            assert await relay.run_once() == 1
            await until(lambda: told)
        assert relay.ended == {ParcelEnded.DELIVERED: 3}


class TestIsolatedFailures:
    async def test_a_failure_concerns_its_parcel_only(self, shop):
        parcels = many(shop, 20)

        @shop.topics.topic(shop.topic)
        async def notify(message):
            if message.payload["n"] % 5 == 0:
                raise Busy

        async with shop.relay(concurrency=20) as relay:
            assert await relay.run_once() == 20
            await relay.shut_down()

        assert relay.ended == {ParcelEnded.DELIVERED: 16, ParcelEnded.POSTPONED: 4}
        left = [parcel for parcel in parcels if shop.in_outbox(parcel) is not None]
        assert left == list(parcels[::5])
        assert {shop.in_outbox(parcel).last_error for parcel in left} == {"Busy"}

    @pytest.mark.parametrize("blocking", [False, True])
    async def test_a_hanging_call_times_out_and_others_are_delivered(self, shop, blocking):  # U1
        parcels = many(shop, 6)
        told, release = [], threading.Event()

        async def waits(message):
            if message.payload["n"] == 0:
                await asyncio.Event().wait()
            told.append(message.payload["n"])

        def blocks(message):
            if message.payload["n"] == 0:
                release.wait()
            told.append(message.payload["n"])

        shop.topics.topic(shop.topic)(blocks if blocking else waits)
        try:
            async with shop.relay(concurrency=2) as relay:
                while await relay.run_once():
                    await until(lambda: len(relay._held) == 1)
                await until(lambda: len(told) == 5)
                shop.sleeps.end(30.0)
                await relay.shut_down()
        finally:
            release.set()

        assert relay.ended == {ParcelEnded.DELIVERED: 5, ParcelEnded.POSTPONED: 1}
        assert shop.in_outbox(parcels[0]).last_error == "CallTimeoutError"

    async def test_a_batch_waits_for_its_leases_after_an_outage(self, shop, caplog):
        parcels = many(shop, 5)

        @shop.topics.topic(shop.topic)
        async def notify(_):
            pass

        async def down(driver, transaction):
            if transaction.name == "sent":
                raise StoreUnavailableError("down on purpose")
            return await driver.run(transaction)

        async with shop.relay(run=down) as relay:
            await relay.run_once()
            await relay.shut_down()

        assert (relay.failed, relay.ended, len(relay._held)) == (5, {}, 0)
        assert "5 parcels are left to their leases because of a StoreUnavailableError" in caplog.text
        assert shop.claim() == ()
        shop.lease_passes()
        assert {held.parcel for held in shop.claim()} == set(parcels)


class TestLostLeases:
    async def test_parcels_claimed_by_another_worker_are_not_acknowledged(self, shop):  # S8
        parcels = many(shop, 8)
        delivered, go_on = asyncio.Event(), asyncio.Event()

        @shop.topics.topic(shop.topic)
        async def notify(_):
            pass

        async def held_up(driver, transaction):
            if transaction.name == "sent":
                delivered.set()
                await go_on.wait()
            return await driver.run(transaction)

        async with shop.relay(run=held_up) as relay:
            await relay.run_once()
            await delivered.wait()
            shop.lease_passes()
            stolen = shop.claim(5)
            go_on.set()
            await relay.shut_down()

        assert relay.ended == {ParcelEnded.DELIVERED: 3, ParcelEnded.LOST: 5}
        assert [shop.in_outbox(held.parcel) for held in stolen] == list(stolen)
        gone = {parcel for parcel in parcels if shop.in_outbox(parcel) is None}
        assert gone == set(parcels) - {held.parcel for held in stolen}

    async def test_parcels_that_waited_too_long_are_released(self, shop, caplog):
        """Its call could outlast its lease: a second worker would call beside it."""
        parcels, told = many(shop, 6), []
        policy = Policy(outbox_lease=100)  # a call has 30 s, and 5 s to be written: it may begin for 65 s

        @shop.topics.topic(shop.topic)
        async def notify(message):
            told.append(message.payload["n"])
            shop.boottime += 33

        async with shop.relay(concurrency=1, policy=policy) as relay:
            relay._size = 6
            assert await relay.run_once() == 6
            await relay.shut_down()
            assert told == [0, 1]
            assert "4 parcels waited too long for their turn, and are released" in caplog.text
            assert relay.size == 3
            held = shop.claim()
            assert {one.parcel for one in held} == set(parcels[2:])
            assert {one.attempts for one in held} == {1}

    async def test_a_suspended_relay_starts_and_releases_nothing(self, shop):
        many(shop, 4)
        told, calling, gate = [], asyncio.Event(), asyncio.Event()

        @shop.topics.topic(shop.topic)
        async def notify(message):
            told.append(message.payload["n"])
            calling.set()
            await gate.wait()

        async with shop.relay(concurrency=1) as relay:
            relay._size = 4
            assert await relay.run_once() == 4
            await calling.wait()
            shop.boottime += lease_of(Policy()) / SECOND  # the process is stopped for that long
            shop.lease_passes()
            stolen = shop.claim()
            gate.set()
            await relay.shut_down()

        assert (told, relay.ended) == ([0], {ParcelEnded.LOST: 1})
        assert [shop.in_outbox(held.parcel) for held in stolen] == list(stolen)


class TestStopping:
    async def test_unstarted_parcels_are_released_when_stopping(self, shop):  # P5, F10
        parcels = many(shop, 9)
        begun, gate, said = [], asyncio.Event(), []

        @shop.topics.topic(shop.topic)
        async def notify(message):
            begun.append(message.payload["n"])
            await gate.wait()

        async def watched(driver, transaction):
            said.append(transaction.name)
            return await driver.run(transaction)

        async with shop.relay(concurrency=2, run=watched) as relay:
            relay._size = 9
            assert await relay.run_once() == 9
            await until(lambda: len(begun) == 2)
            stopping = asyncio.create_task(relay.stop(3600))
            await until(lambda: len(relay._held) == 2)
            held = shop.claim()  # at once, and not after a lease
            gate.set()
            await stopping

        assert {one.parcel for one in held} == set(parcels[2:])
        assert {one.attempts for one in held} == {1}
        assert said == ["due", "hand_back", "sent"]
        assert relay.ended == {ParcelEnded.DELIVERED: 2}


class TestOrder:
    async def test_two_relays_keep_the_order_of_each_line(self, shop):
        lines = {shop.line(name): [f"{name}{n}" for n in range(12)] for name in "abcde"}
        for n in range(12):
            for line, words in lines.items():
                shop.put(shop.parcel(order_by=line, payload=f'"{words[n]}"'))
        running, told, failed = defaultdict(int), defaultdict(list), set()

        @shop.topics.topic(shop.topic)
        async def notify(message):
            running[message.order_by] += 1
            assert running[message.order_by] == 1
            await asyncio.sleep(0)
            running[message.order_by] -= 1
            if message.payload not in failed and message.payload[-1] in "037":
                failed.add(message.payload)
                raise Busy
            told[message.order_by].append(message.payload)

        for _ in range(30):
            await asyncio.gather(shop.work(concurrency=3), shop.work(concurrency=3))
            shop.world.advance(400 * SECOND)  # the longest pause before another attempt
        assert told == lines

    async def test_a_line_advances_once_its_first_parcel_is_acknowledged(self, shop):
        """What stands behind a parcel in hand is looked for when that one is over, and not after a pause."""
        for n in range(5):
            shop.put(shop.parcel(order_by=shop.line("a"), payload=str(n)))
        shop.sleeps.short.clear()  # no pause ever ends
        told = []

        @shop.topics.topic(shop.topic)
        async def notify(message):
            told.append(message.payload)

        async with shop.relay() as relay:
            for _ in range(5):
                assert await relay.run_once() == 1
            await relay.shut_down()
        assert told == [0, 1, 2, 3, 4]


class TestCallsWithoutAwait:
    """A function that awaits nothing is called without a task of its own."""

    @staticmethod
    def topic(function):
        return Topic("t", function, None, blocking=False)

    MESSAGE = Message("t", None, "k", "d", 1, uuid.uuid4(), "s")

    def test_awaits_nothing_detects_coroutines_without_await(self):
        async def plain(_):
            return [n * n for n in range(3)]

        async def waits(_):
            await asyncio.sleep(0)

        async def enters(lock):
            async with lock:
                pass

        async def loops(messages):
            async for _ in messages:
                pass

        async def gathers(messages):
            return [one async for one in messages]

        def blocks(_):
            pass

        class Called:
            async def __call__(self, _):
                pass

        assert awaits_nothing(plain)
        others = (waits, enters, loops, gathers, blocks, Called(), functools.partial(plain))
        assert not [one for one in others if awaits_nothing(one)]

    def test_a_call_runs_in_its_own_context(self):
        seen = contextvars.ContextVar("seen", default=0)

        async def notify(_):
            seen.set(seen.get() + 1)
            return seen.get()

        assert [call_at_once(self.topic(notify), self.MESSAGE) for _ in range(2)] == [1, 1]
        assert seen.get() == 0

    def test_a_cancelled_error_raised_by_a_call_is_a_failure(self):
        async def notify(_):
            raise asyncio.CancelledError

        with pytest.raises(CallBrokenError):
            call_at_once(self.topic(notify), self.MESSAGE)

    async def test_calls_without_await_yield_to_the_event_loop(self, shop):
        many(shop, 30)
        turns, told = [0], []

        @shop.topics.topic(shop.topic)
        async def notify(_):
            shop.boottime += 0.01  # it computes
            told.append(turns[0])

        async def other():
            while True:
                turns[0] += 1
                await asyncio.sleep(0)

        async with shop.relay(concurrency=30) as relay:
            await relay.run_once()
            beside = asyncio.create_task(other())
            await relay.shut_down()
            beside.cancel()
        assert len(set(told)) >= 29


async def keep_looking(relay):
    while True:
        await relay.run_once()
