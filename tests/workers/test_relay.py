"""The relay on real stores: what becomes of parcels, whatever their functions do."""

from __future__ import annotations

import asyncio
import json
import logging
import threading
from dataclasses import replace

import pytest

from harness.asgi import until
from oncekey.core.errors import NotExecutedError, RejectedError, StoreUnavailableError
from oncekey.core.model import HOUR, SECOND, Outcome, State
from oncekey.core.policy import Policy
from oncekey.core.topics import Reply
from oncekey.engine.relay import ParcelEnded, answer_of


class Busy(Exception):  # noqa: N818  (a provider's word)
    def __init__(self, retry_after=None):
        super().__init__("card 4111 1111 1111 1111 of key-of-the-client")
        self.retry_after = retry_after


def headers(record):
    return dict(record.response.headers)


async def test_the_result_of_a_deferred_call_becomes_the_response(shop):  # R125, R126, R132, O1
    parcel = shop.deferred(payload='{"amount": 7}')
    got = []

    @shop.topics.topic(shop.topic)
    async def charge(message):
        got.append(message)
        return Reply(201, {"charge": "ch_1", "paid": True}, (("Location", "/charges/1"),), provider_id="ch_1")

    relay = await shop.work()

    (message,) = got
    assert (message.payload, message.attempt, message.incarnation) == ({"amount": 7}, 1, parcel.incarnation)
    assert (message.key, message.scope) == (parcel.record_id.key, parcel.record_id.scope)
    assert message.downstream_key == parcel.downstream_key
    record = shop.record(parcel)
    assert (record.state, record.outcome, record.response.status) == (State.COMPLETED, Outcome.SUCCESS, 201)
    assert json.loads(record.response.body) == {"charge": "ch_1", "paid": True}
    assert headers(record) == {b"content-type": b"application/json", b"location": b"/charges/1"}
    assert answer_of(record.memo[0]).provider_id == "ch_1"  # R127
    assert shop.in_outbox(parcel) is None
    assert relay.ended == {ParcelEnded.DELIVERED: 1}


async def test_plain_functions_run_in_a_thread_and_return_plain_data(shop):
    parcel = shop.deferred()
    threads = []

    @shop.topics.topic(shop.topic)
    def charge(_):
        threads.append(threading.current_thread())
        return {"ok": True}

    await shop.work()

    assert threads[0] is not threading.main_thread()
    record = shop.record(parcel)
    assert (record.response.status, record.response.body) == (200, b'{"ok":true}')


@pytest.mark.parametrize(
    ("value", "status", "body"),
    [({"reason": "no money"}, 422, b'{"reason":"no money"}'), (Reply(402, {"paid": False}), 402, b'{"paid":false}')],
)
async def test_a_rejected_deferred_call_stores_its_response(shop, value, status, body):  # H2
    parcel = shop.deferred()

    @shop.topics.topic(shop.topic)
    async def charge(_):
        raise RejectedError(value)

    await shop.work()

    record = shop.record(parcel)
    assert (record.state, record.outcome) == (State.COMPLETED, Outcome.FAILURE)
    assert (record.response.status, record.response.body) == (status, body)


@pytest.mark.parametrize("status", [429, 500, 503, 408])
async def test_a_retryable_reply_postpones_the_call(shop, status):  # R113: tried again where that is safe
    parcel = shop.deferred()
    replies = [Reply(status, {"why": "busy"}, (("Retry-After", "30"),)), Reply(201, {"ok": True})]

    @shop.topics.topic(shop.topic, repeatable=True)
    async def charge(_):
        return replies.pop(0)

    await shop.work()
    record = shop.record(parcel)
    assert (record.state, record.response, record.last_error) == (State.PENDING, None, f"reply_{status}")
    shop.world.advance(29 * SECOND)
    await shop.work()
    assert len(replies) == 1  # not before the provider wants it
    shop.world.advance(400 * SECOND)
    await shop.work()
    record = shop.record(parcel)
    assert (record.state, record.response.status) == (State.COMPLETED, 201)


async def test_a_retryable_reply_to_a_nonrepeatable_call_is_unknown(shop):
    parcel = shop.deferred()

    @shop.topics.topic(shop.topic)
    async def charge(_):
        return Reply(502)

    await shop.work()
    assert shop.record(parcel).state is State.UNKNOWN


async def test_a_message_with_a_503_reply_is_delivered_again(shop):  # R125
    shop.put(shop.parcel())
    replies = [Reply(503), Reply(204)]

    @shop.topics.topic(shop.topic)
    async def notify(_):
        return replies.pop(0)

    await shop.work()
    shop.world.advance(400 * SECOND)
    await shop.work()
    assert replies == []
    shop.world.advance(400 * SECOND)
    assert shop.claim() == ()


async def test_an_unsent_call_is_retried_after_its_retry_after(shop):  # H2, retry-after
    parcel = shop.deferred()
    calls = []

    @shop.topics.topic(shop.topic)
    async def charge(message):
        calls.append(message.attempt)
        if len(calls) == 1:
            raise NotExecutedError("connection refused", retry_after=30)
        return {}

    await shop.work()
    assert (shop.record(parcel).state, shop.record(parcel).intent) == (State.PENDING, None)
    shop.world.advance(30 * SECOND)
    await shop.work()
    assert calls == [1]
    shop.world.advance(SECOND)
    await shop.work()

    assert calls == [1, 2]
    assert shop.record(parcel).state is State.COMPLETED


async def test_the_policy_hook_marks_a_call_as_not_sent(shop):
    parcel = shop.deferred()

    @shop.topics.topic(shop.topic)
    async def charge(_):
        raise ConnectionRefusedError

    await shop.work(policy=Policy(is_definitely_not_executed=lambda e: isinstance(e, ConnectionRefusedError)))

    assert (shop.record(parcel).state, shop.record(parcel).intent) == (State.PENDING, None)


@pytest.mark.parametrize("error", [Busy(), asyncio.CancelledError(), TimeoutError(), SystemExit(1)])
@pytest.mark.parametrize("blocking", [False, True])
async def test_an_uncertain_nonrepeatable_call_becomes_a_dead_letter(shop, error, blocking):  # H2, F31, row 27
    if isinstance(error, SystemExit) and not blocking:
        error = Busy()  # in the event loop it would end the process, as it should
    parcel = shop.deferred()
    calls = []

    def fails(message):
        calls.append(message)
        raise error

    async def fails_later(message):
        fails(message)

    shop.topics.topic(shop.topic)(fails if blocking else fails_later)

    relay = await shop.work()
    shop.world.advance(10 * HOUR)
    await shop.work()

    assert (len(calls), shop.record(parcel).state) == (1, State.UNKNOWN)
    assert shop.record(parcel).last_error == "call_uncertain"
    assert shop.dead(parcel) is not None
    assert relay.ended == {ParcelEnded.PARKED: 1}


async def test_a_repeatable_call_is_repeated_until_its_window_ends(shop):  # F23, H3
    parcel = shop.deferred()
    keys = []

    @shop.topics.topic(shop.topic, repeatable=True)
    async def charge(message):
        keys.append(message.downstream_key)
        raise Busy(retry_after=1)

    await shop.work()
    assert (shop.record(parcel).state, shop.record(parcel).intent.sends) == (State.PENDING, 1)
    shop.world.advance(HOUR)
    await shop.work()
    assert (shop.record(parcel).state, shop.record(parcel).intent.sends) == (State.PENDING, 2)
    shop.world.advance(20 * HOUR)
    await shop.work()

    assert keys == [parcel.downstream_key] * 2
    assert shop.record(parcel).state is State.UNKNOWN


@pytest.mark.parametrize("blocking", [False, True])
async def test_a_hanging_deferred_call_times_out(shop, blocking):  # U1
    parcel = shop.deferred()
    begun, release = asyncio.Event(), threading.Event()
    loop = asyncio.get_running_loop()

    def hangs(_):
        loop.call_soon_threadsafe(begun.set)
        release.wait()

    async def hangs_later(_):
        begun.set()
        await asyncio.Event().wait()

    shop.topics.topic(shop.topic)(hangs if blocking else hangs_later)
    try:
        async with shop.relay() as relay:
            await relay.run_once()
            await begun.wait()
            assert shop.record(parcel).state is State.IN_PROGRESS
            shop.sleeps.end(30.0)  # the record's call_timeout
            await relay.shut_down()
    finally:
        release.set()

    assert shop.record(parcel).state is State.UNKNOWN
    assert shop.dead(parcel).last_error == "CallTimeoutError"


async def test_a_call_is_not_started_after_the_send_window(shop):  # U1, F34
    parcel = shop.deferred()
    calls = []

    @shop.topics.topic(shop.topic)
    async def charge(message):
        calls.append(message)
        return {}

    async def paused_after_announcing(driver, transaction):
        result = await driver.run(transaction)
        if transaction.name == "take_up":
            shop.boottime += 5.1
        return result

    await shop.work(run=paused_after_announcing)

    assert calls == []
    assert (shop.record(parcel).state, shop.record(parcel).intent) == (State.PENDING, None)


async def test_an_unstorable_deferred_result_is_unknown(shop):  # H1, F26
    parcel = shop.deferred()

    @shop.topics.topic(shop.topic, repeatable=True)
    async def charge(_):
        return object()

    await shop.work()

    assert (shop.record(parcel).state, shop.record(parcel).last_error) == (State.UNKNOWN, "result_not_storable")


async def test_an_outage_does_not_lose_the_providers_reply(shop):  # P7
    parcel = shop.deferred()
    calls, outages = [], ["deferred_result", "deferred_result", "deliver"]
    shop.sleeps.short |= {0.05, 0.1, 0.2}

    @shop.topics.topic(shop.topic)
    async def charge(message):
        calls.append(message)
        return {"ok": 1}

    async def down(driver, transaction):
        if transaction.name in outages:
            outages.remove(transaction.name)
            raise StoreUnavailableError("down on purpose")
        return await driver.run(transaction)

    await shop.work(run=down)

    assert (len(calls), outages, shop.record(parcel).state) == (1, [], State.COMPLETED)


async def test_no_transaction_is_open_while_a_provider_is_called(shop):  # R131
    shop.deferred()
    open_now = []
    running = set()

    async def watched(driver, transaction):
        running.add(transaction.name)
        try:
            return await driver.run(transaction)
        finally:
            running.discard(transaction.name)

    @shop.topics.topic(shop.topic)
    async def charge(_):
        open_now.append(set(running))
        return {}

    await shop.work(run=watched)

    assert open_now == [set()]


class TestMessages:
    async def test_a_delivered_message_is_removed_from_the_outbox(self, shop):
        (parcel,) = shop.put(shop.parcel(payload="[1]"))
        got = []

        @shop.topics.topic(shop.topic)
        async def notify(message):
            got.append(message.payload)
            return object()  # nobody looks at it

        relay = await shop.work()

        assert (got, shop.in_outbox(parcel), relay.ended) == ([[1]], None, {ParcelEnded.DELIVERED: 1})

    async def test_a_poison_message_becomes_a_dead_letter(self, shop, caplog):  # R128, R129, R216
        poison, *rest = shop.put(*(shop.parcel(position=n, payload=f'{{"n": {n}}}') for n in range(5)))
        told = []

        @shop.topics.topic(shop.topic)
        async def notify(message):
            if message.payload["n"] == 0:
                raise Busy
            told.append(message.payload["n"])

        with caplog.at_level(logging.INFO, "oncekey.worker"):
            for _ in range(4):
                await shop.work(policy=Policy(outbox_max_attempts=3))
                shop.world.advance(10 * HOUR)

        assert sorted(told) == [1, 2, 3, 4]
        assert all(shop.in_outbox(parcel) is None for parcel in (poison, *rest))
        dead = shop.dead(poison)
        assert (dead.attempts, dead.first_error, dead.last_error) == (3, "Busy", "Busy")
        warnings = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
        assert [f"parcel {poison.id} of topic {shop.topic} failed with Busy" in one for one in warnings] == [True] * 3
        (line,) = [record.getMessage() for record in caplog.records if record.levelno == logging.ERROR]
        assert line == f"dead letter: parcel {poison.id} of topic {shop.topic} is buried after 3 attempts"
        assert "4111 1111" not in caplog.text
        assert poison.record_id.key not in caplog.text

    async def test_a_message_that_kills_its_workers_becomes_a_dead_letter(self, shop):  # R128
        (parcel,) = shop.put(shop.parcel())
        for _ in range(3):
            shop.claim()
            shop.lease_passes()
        calls = []
        shop.topics.topic(shop.topic)(calls.append)

        await shop.work(policy=Policy(outbox_max_attempts=3))

        assert (calls, shop.dead(parcel).last_error) == ([], "attempts_exhausted")

    async def test_retry_delays_grow_with_jitter_or_follow_retry_after(self, shop):
        shop.put(shop.parcel())
        waits, asks = [], [None] * 11 + [7, "soon", True, float("nan"), -1, 1e9]

        @shop.topics.topic(shop.topic)
        async def notify(message):
            raise Busy(asks[message.attempt - 1])

        async def watched(driver, transaction):
            return await driver.run(replace(transaction, body=lambda: listening(transaction.body(), "again", heard)))

        def heard(params):
            waits.append(params["after"] / SECOND)

        for _ in range(11):
            await shop.work(policy=Policy(outbox_max_attempts=99), chance=lambda: 1.0, run=watched)
            shop.world.advance(HOUR)
        for _ in range(6):
            await shop.work(policy=Policy(outbox_max_attempts=99), chance=lambda: 0.5, run=watched)
            shop.world.advance(2 * HOUR)

        assert waits[:11] == [1, 2, 4, 8, 16, 32, 64, 128, 256, 300, 300]
        assert waits[11:] == [7.5, 150, 150, 150, 0.5, 3600.5]

    async def test_parcels_run_concurrently_up_to_the_limit(self, shop):
        shop.put(*(shop.parcel(position=n) for n in range(7)))
        running, most, gate = set(), [], asyncio.Event()

        @shop.topics.topic(shop.topic)
        async def notify(message):
            running.add(message.incarnation)
            most.append(len(running))
            await gate.wait()
            running.discard(message.incarnation)

        async with shop.relay(concurrency=3) as relay:
            assert await relay.run_once() == 3
            more = asyncio.create_task(relay.run_once())
            await until(lambda: len(running) == 3)
            assert not more.done()
            gate.set()
            await more
            while await relay.run_once():
                pass

        assert max(most) == 3
        assert relay.ended == {ParcelEnded.DELIVERED: 7}

    async def test_acknowledgements_are_sent_in_batches(self, shop):
        shop.put(*(shop.parcel(position=n) for n in range(6)))
        shop.sleeps.short.clear()
        said, gate = [], asyncio.Event()

        async def watched(driver, transaction):
            said.append(transaction.name)
            return await driver.run(transaction)

        @shop.topics.topic(shop.topic)
        async def notify(_):
            if len(told) == 5:
                await gate.wait()
            told.append(1)

        told = []
        async with shop.relay(concurrency=4, run=watched) as relay:
            assert await relay.run_once() == 4
            await relay.shut_down()  # nothing else is on its way
            assert said == ["due", "sent"]
            assert await relay.run_once() == 2
            await until(lambda: relay._acks.waiting == 1)
            assert said == ["due", "sent", "due"]  # another one may be delivered soon
            assert (len(told), len(relay._held)) == (5, 2)
            shop.sleeps.end(0.05)
            await until(lambda: len(said) == 4)
            gate.set()
            await relay.shut_down()

        assert said == ["due", "sent", "due", "sent", "sent"]
        assert relay.ended == {ParcelEnded.DELIVERED: 6}

    async def test_two_relays_share_a_queue(self, shop):
        parcels = shop.put(*(shop.parcel(position=n) for n in range(30)))
        told = []

        @shop.topics.topic(shop.topic)
        async def notify(message):
            told.append(message.incarnation)

        await asyncio.gather(shop.work(concurrency=3), shop.work(concurrency=3))

        assert sorted(map(str, told)) == sorted(str(parcel.incarnation) for parcel in parcels)


class TestStopping:
    """P5, F10: what has not begun is handed back, what has begun is waited for, and then left to its lease."""

    @pytest.mark.parametrize("kind", ["emit", "defer"])
    async def test_a_claimed_parcel_is_released_when_stopping(self, shop, kind):
        parcel = shop.deferred() if kind == "defer" else shop.put(shop.parcel())[0]
        calls = []
        shop.topics.topic(shop.topic)(calls.append)

        async with shop.relay() as relay:
            assert await relay.run_once() == 1
            await relay.stop(3600)

        assert calls == []
        (held,) = shop.claim()
        assert (held.parcel, held.attempts) == (parcel, 1)

    async def test_parcels_claimed_while_stopping_are_released(self, shop):
        parcels = shop.put(shop.parcel(), shop.parcel())
        calls = []
        shop.topics.topic(shop.topic)(calls.append)

        async def stopped_meanwhile(driver, transaction):
            result = await driver.run(transaction)
            if transaction.name == "due":
                await relay.stop(3600)
            return result

        async with shop.relay(run=stopped_meanwhile) as relay:
            assert await relay.run_once() == 0
            held = shop.claim()  # at once, and not after a lease

        assert calls == []
        assert {one.parcel for one in held} == set(parcels)
        assert {one.attempts for one in held} == {1}

    async def test_an_announced_call_is_withdrawn_when_stopping(self, shop):
        parcel = shop.deferred()
        calls, announced, go_on = [], asyncio.Event(), asyncio.Event()
        shop.topics.topic(shop.topic)(calls.append)

        async def held_up(driver, transaction):
            result = await driver.run(transaction)
            if transaction.name == "take_up":
                announced.set()
                await go_on.wait()
            return result

        async with shop.relay(run=held_up) as relay:
            await relay.run_once()
            await announced.wait()
            stopping = asyncio.create_task(relay.stop(3600))
            await asyncio.sleep(0)
            go_on.set()
            await stopping

        assert calls == []
        assert (shop.record(parcel).state, shop.record(parcel).intent) == (State.PENDING, None)
        (held,) = shop.claim()
        assert held.attempts == 1

    async def test_stopping_the_relay_waits_for_an_open_call(self, shop):
        parcel = shop.deferred()
        begun, answer = asyncio.Event(), asyncio.Event()

        @shop.topics.topic(shop.topic)
        async def charge(_):
            begun.set()
            await answer.wait()
            return {}

        async with shop.relay() as relay:
            await relay.run_once()
            await begun.wait()
            stopping = asyncio.create_task(relay.stop(3600))
            await asyncio.sleep(0)
            assert await relay.run_once() == 0
            answer.set()
            await stopping

        assert shop.record(parcel).state is State.COMPLETED

    async def test_a_call_open_after_the_grace_keeps_its_lease(self, shop, caplog):
        parcel = shop.deferred()
        calls, begun = [], asyncio.Event()

        @shop.topics.topic(shop.topic)
        async def charge(message):
            calls.append(message)
            begun.set()
            await asyncio.Event().wait()

        async with shop.relay() as relay:
            await relay.run_once()
            await begun.wait()
            shop.sleeps.end(10)
            await relay.stop(10)

        record = shop.record(parcel)
        assert (record.state, record.intent.sends) == (State.IN_PROGRESS, 1)
        assert shop.claim() == ()  # nobody else calls while it may still run
        shop.lease_passes()
        await shop.work()
        assert (len(calls), shop.record(parcel).state) == (1, State.UNKNOWN)

    async def test_delivered_messages_are_acknowledged_when_stopping(self, shop):
        (parcel,) = shop.put(shop.parcel())
        shop.sleeps.short.clear()
        told = asyncio.Event()

        @shop.topics.topic(shop.topic)
        async def notify(_):
            told.set()

        async with shop.relay() as relay:
            await relay.run_once()
            await told.wait()
            await relay.stop(3600)

        assert shop.in_outbox(parcel) is None


def listening(steps, name, heard):
    try:
        statement = next(steps)
        while True:
            if statement.name == name:
                heard(statement.params)
            rows = yield statement
            statement = steps.send(rows)
    except StopIteration as stop:
        return stop.value
