"""A real Valkey in front of a store whose clock the test moves: what is answered without the store, and until when."""

from __future__ import annotations

import asyncio
import inspect
from collections import Counter
from collections.abc import Awaitable, Callable
from datetime import timedelta
from typing import Any

import pytest
import redis

from frameworks.shop import KEY, Shop
from harness.asgi import Reply, until
from harness.brokers import Valkey
from harness.ledger import down
from harness.proxy import Proxy
from oncekey.core.checks import Front
from oncekey.core.fronts import GET, Command
from oncekey.core.model import INLINE, LOCAL, SECOND, RecordId
from oncekey.core.policy import Policy
from oncekey.engine.fronts import Fronts
from oncekey.engine.operation import Operation, SyncOperation
from oncekey.frameworks.fronting import _line
from oncekey.observe.events import Consulted
from oncekey.testing.claims import ManualClock

SECRET = b"a secret of the shop's"
STORE = ("recall", "find", "claim", "lock", "begin", "holder")
PATIENT = 30
"""Seconds for a question to the front: no test of ours is about how long that takes."""


class Fronted(Shop):
    """A shop with a front, one clock for the store and for the process, and a handler that waits on demand."""

    def __init__(self, effects: Any, clock: ManualClock, *, blocking: bool = False, **policy: Any) -> None:
        super().__init__(policy=Policy(secret=SECRET).override(**policy), clock=clock)
        self.seen: Counter[tuple[str, str]] = Counter()
        self.go_on = asyncio.Event()
        self.go_on.set()
        self.once.observe(self._see)
        (installation,) = self.once._installations
        installation.fronts = Fronts(lambda: clock.now / SECOND, _line)
        self.fronts = installation.fronts

        async def create(op: Operation) -> dict[str, int]:
            self.runs.append(1)
            await self.go_on.wait()
            return {"runs": len(self.runs)}

        def create_in_a_thread(op: SyncOperation) -> dict[str, int]:
            self.runs.append(1)
            return {"runs": len(self.runs)}

        self.post(effects=effects, status_code=201)(create_in_a_thread if blocking else create)

    def _see(self, event: object) -> None:
        if isinstance(event, Consulted):
            self.seen[event.front, event.found.value] += 1

    async def order(self, **request: Any) -> Reply:
        # Which installation it is, a store with tables tells when it is checked.
        self.once.asynchronous().identity = b"the shop's tables"
        return await self.send("/orders", {"item": "tea"}, **request)

    def breaks(self) -> None:
        """From now on the store is gone."""
        for fault in STORE:
            self.ledger.faults[fault].extend([down] * 20)

    async def close(self) -> None:
        for line in self.fronts.lines.values():
            await line.close()
            line.close_blocking()


Opening = Callable[..., Fronted]


def fronted(test: Callable[..., Awaitable[None]]) -> Callable[..., Awaitable[None]]:
    """Hand a test the opening of shops, and close their lines in the event loop that they belong to."""

    async def run(**given: Any) -> None:
        made: list[Fronted] = []

        def opening(*args: Any, **kwargs: Any) -> Fronted:
            made.append(Fronted(*args, **kwargs))
            return made[-1]

        try:
            await test(shops=opening, **given)
        finally:
            for shop in made:
                await shop.close()

    run.__name__, run.__doc__ = test.__name__, test.__doc__
    wanted = inspect.signature(test)
    kept = [one for name, one in wanted.parameters.items() if name != "shops"]
    run.__signature__ = wanted.replace(parameters=kept)  # type: ignore[attr-defined]
    return run


def cached(place: str, life: float = 60) -> Front:
    return Front(place, life=life, timeout=PATIENT)


def values(valkey: Valkey) -> dict[bytes, bytes]:
    with redis.Redis.from_url(valkey.url) as client:
        return {name: client.get(name) for name in client.scan_iter()}  # type: ignore[misc]


def record_id(shop: Shop) -> RecordId:
    return RecordId(shop.ledger.record["scope"], KEY)


# R177, R89: a hit needs no store, and gives the same bytes; what is committed is filled in by who committed it
@pytest.mark.parametrize("effects", [LOCAL, INLINE])
@fronted
async def test_cached_response_is_replayed_without_the_store(effects: Any, valkey: Valkey, shops: Opening) -> None:
    shop = shops(effects, ManualClock(), replay_cache=cached(valkey.url))
    first = await shop.order()
    await until(lambda: values(valkey))  # nobody waits for that
    with redis.Redis.from_url(valkey.url) as client:
        client.flushall()
    read = await shop.order()  # from the store, and filled in again
    shop.breaks()
    kept = [await shop.order() for _ in range(2)]
    assert [reply.status for reply in (first, read, *kept)] == [201] * 4
    assert {reply.body for reply in (first, read, *kept)} == {first.body}
    assert all(reply.replayed for reply in (read, *kept))
    assert kept[0].lines == read.lines
    assert shop.seen == {("replay_cache", "miss"): 1, ("replay_cache", "hit"): 2}
    # R179, R195: nothing in clear
    ((name, value),) = values(valkey).items()
    assert KEY.encode() not in name
    assert b"runs" not in value


@fronted
async def test_first_response_is_cached_for_other_servers(valkey: Valkey, shops: Opening) -> None:
    clock = ManualClock()
    shop, other = (shops(LOCAL, clock, replay_cache=cached(valkey.url)) for _ in range(2))
    await other.order(key="key-that-tells-the-time")
    first = await shop.order()
    await until(lambda: len(values(valkey)) == 2)
    other.breaks()
    again = await other.order()
    assert (again.status, again.body, again.replayed) == (201, first.body, True)


# R182: what is not committed is not filled in
@pytest.mark.parametrize(("effects", "fault"), [(LOCAL, "commit"), (INLINE, "settle")])
@fronted
async def test_uncommitted_response_is_not_cached(effects: Any, fault: str, valkey: Valkey, shops: Opening) -> None:
    shop = shops(effects, ManualClock(), replay_cache=cached(valkey.url))
    await shop.order(key="key-that-tells-the-time")
    await until(lambda: values(valkey))
    shop.ledger.faults[fault].append(down)
    assert (await shop.order()).status == 503
    (line,) = shop.fronts.lines.values()
    await line.ask((Command(GET, b"in one event loop what is told first arrives first"),))
    assert len(values(valkey)) == 1


@fronted
async def test_cached_key_rejects_another_request_or_tenant(valkey: Valkey, shops: Opening) -> None:
    shop = shops(INLINE, ManualClock(), replay_cache=cached(valkey.url))
    for _ in range(2):
        await shop.order()
    shop.breaks()
    assert (await shop.send("/orders", {"item": "milk"})).status == 422
    assert (await shop.order(headers=[("x-tenant", "other")])).status == 503


# R176, R180, R181: whatever becomes of it, the store answers
@pytest.mark.parametrize("fate", ["flushed", "garbage", "another type", "cut", "gone"])
@fronted
async def test_lost_cache_entry_is_read_from_the_store(fate: str, valkey: Valkey, shops: Opening) -> None:
    with Proxy("127.0.0.1", valkey.port) as proxy:
        shop = shops(LOCAL, ManualClock(), replay_cache=cached(f"redis://127.0.0.1:{proxy.port}/0"))
        first, *_ = [await shop.order() for _ in range(3)]
        with redis.Redis.from_url(valkey.url) as client:
            (name,) = values(valkey)
            if fate == "flushed":
                client.flushall()
            elif fate == "garbage":
                client.set(name, b"garbage")
            elif fate == "another type":
                client.delete(name)
                client.lpush(name, b"x")
            else:
                proxy.cut()
                if fate == "gone":
                    proxy.shut()
        again = await shop.order()
        assert (again.body, again.replayed, shop.runs) == (first.body, True, [1])
        found = {"garbage": "refused", "cut": "unavailable", "gone": "unavailable"}.get(fate, "miss")
        assert shop.seen["replay_cache", found] == 1


@fronted
async def test_circuit_breaker_stops_queries_to_an_unreachable_cache(valkey: Valkey, shops: Opening) -> None:
    with Proxy("127.0.0.1", valkey.port) as proxy:
        shop = shops(LOCAL, ManualClock(), replay_cache=cached(f"redis://127.0.0.1:{proxy.port}/0"))
        line = shop.fronts._line(shop.once.policy.replay_cache)
        line._breaker._clock = lambda: shop.clock.now / SECOND
        await shop.order()
        proxy.shut()
        proxy.cut()
        for _ in range(12):
            assert (await shop.order()).status == 201
        assert not line._breaker.closed
        proxy.reopen()
        accepted = proxy.accepted
        await shop.order()
        assert proxy.accepted == accepted
        shop.clock.advance(2 * SECOND)  # a pause later one request is the probe
        await shop.order()
        assert (proxy.accepted, line._breaker.closed) == (accepted + 1, True)


# R180: bounded by the front's life and by the record's, by the store's clock
@pytest.mark.parametrize(("life", "ttl", "ends"), [(60, 3600, 60), (300, 30, 30)])
@fronted
async def test_stale_response_expires_at_its_limit(
    life: int, ttl: int, ends: int, valkey: Valkey, shops: Opening
) -> None:
    clock = ManualClock()
    policy = {"ttl": timedelta(seconds=ttl), "allow_short_ttl": True, "replay_cache": cached(valkey.url, life)}
    shop = shops(INLINE, clock, **policy)
    for _ in range(2):
        await shop.order()
    shop.ledger.memory.table.clear()  # busted by somebody who told nobody
    clock.advance(ends * SECOND - SECOND // 10)
    assert (await shop.order()).replayed
    clock.advance(SECOND // 10)
    assert not (await shop.order()).replayed
    assert len(shop.runs) == 2


@fronted
async def test_forget_removes_the_cached_response(valkey: Valkey, shops: Opening) -> None:
    shop = shops(INLINE, ManualClock(), replay_cache=cached(valkey.url))
    for _ in range(3):
        await shop.order()
    assert await shop.once.forget(record_id(shop)) is True
    assert (await shop.order()).replayed  # it is still in the store, and not filled in again
    assert shop.seen["replay_cache", "hit"] == 2
    shop.ledger.memory.table.clear()
    assert not (await shop.order()).replayed


@fronted
async def test_forget_returns_false_if_the_cache_is_unreachable(shops: Opening) -> None:
    shop = shops(INLINE, ManualClock(), replay_cache=cached("redis://127.0.0.1:1/0"))
    await shop.order()
    assert await shop.once.forget(record_id(shop)) is False
    memory = shops(INLINE, ManualClock(), replay_cache="memory")
    for _ in range(2):
        await memory.order()
    assert await memory.once.forget(record_id(memory)) is True
    memory.ledger.memory.table.clear()
    assert not (await memory.order()).replayed


# Keys in somebody's hands


async def under_way(shop: Fronted) -> Awaitable[Reply]:
    """A request whose handler has begun."""
    shop.go_on.clear()
    ran = len(shop.runs)
    running = asyncio.ensure_future(shop.order())
    await until(lambda: len(shop.runs) > ran)
    return running


# R178, R79: present while it runs, bounded by the lease, removed at the settlement
@pytest.mark.parametrize("effects", [LOCAL, INLINE])
@fronted
async def test_a_duplicate_in_flight_needs_no_store(effects: Any, valkey: Valkey, shops: Opening) -> None:
    shop = shops(effects, ManualClock(), lock_hint=Front(valkey.url, life=90, timeout=PATIENT))
    await shop.order(key="key-that-tells-the-time")
    running = await under_way(shop)
    await until(lambda: values(valkey))
    with redis.Redis.from_url(valkey.url) as client:
        (name,) = values(valkey)
        assert 0 < client.pttl(name) <= 90_000  # type: ignore[operator]
    told = len(shop.ledger.log)
    refused = await shop.order()
    other = len(shop.ledger.log)
    assert (refused.status, refused.code, refused.header("retry-after")) == (409, "idempotency_key_in_progress", "1")
    assert other == told
    assert (await shop.send("/orders", {"item": "milk"})).status == 422  # another request: the store says
    shop.go_on.set()
    first = await running
    assert values(valkey) == {}
    again = await shop.order()
    assert (again.body, again.replayed, len(shop.runs)) == (first.body, True, 2)


# R182: what the store has not granted leaves nothing behind
@fronted
async def test_a_claim_that_failed_leaves_no_hint(valkey: Valkey, shops: Opening) -> None:
    shop = shops(INLINE, ManualClock(), lock_hint=Front(valkey.url, timeout=PATIENT))
    await shop.order(key="key-that-tells-the-time")
    shop.ledger.faults["claim"].append(down)
    assert (await shop.order()).status == 503
    assert values(valkey) == {}
    assert (await shop.order()).status == 201


@fronted
async def test_stale_lock_hint_expires(valkey: Valkey, shops: Opening) -> None:
    # The settlement's removal is lost, as if its process had been cut off: it counts for `life` after the claim only
    clock = ManualClock()
    with Proxy("127.0.0.1", valkey.port) as proxy:
        shop = shops(INLINE, clock, lock_hint=Front(f"redis://127.0.0.1:{proxy.port}/0", life=2, timeout=PATIENT))
        other = shops(INLINE, clock, lock_hint=Front(valkey.url, life=2, timeout=PATIENT))
        other.once._store, other.once.ledger = shop.once._store, shop.once.ledger
        for one in (shop, other):
            await one.order(key="key-that-tells-the-time")
        running = await under_way(shop)
        await until(lambda: values(valkey))
        proxy.shut()
        proxy.cut()
        shop.go_on.set()
        assert (await running).status == 201
    assert len(values(valkey)) == 1
    clock.advance(2 * SECOND - SECOND // 10)
    assert (await other.order()).status == 409
    clock.advance(SECOND // 10)
    reply = await other.order()
    assert (reply.status, reply.replayed) == (201, True)
    assert other.seen["lock_hint", "stale"] == 1


@pytest.mark.parametrize("policy", [{"on_in_progress": "wait"}, {"max_request_age": 3600}], ids=["waits", "limited"])
@fronted
async def test_waiting_or_age_limited_routes_get_no_lock_hint(
    policy: dict[str, Any], valkey: Valkey, shops: Opening
) -> None:
    shop = shops(INLINE, ManualClock(), lock_hint=valkey.url, **policy)
    await shop.order()
    running = await under_way_with(shop, "key-000000000000002")
    assert values(valkey) == {}
    shop.go_on.set()
    assert (await running).status == 201


async def under_way_with(shop: Fronted, key: str) -> Awaitable[Reply]:
    shop.go_on.clear()
    ran = len(shop.runs)
    running = asyncio.ensure_future(shop.order(key=key))
    await until(lambda: len(shop.runs) > ran)
    return running


@fronted
async def test_blocking_handler_uses_the_shared_cache(valkey: Valkey, shops: Opening) -> None:
    front = cached(valkey.url)
    shop = shops(LOCAL, ManualClock(), blocking=True, replay_cache=front, lock_hint=Front(valkey.url, timeout=PATIENT))
    await shop.order(key="key-that-tells-the-time")
    replies = [await shop.order() for _ in range(3)]
    assert [reply.replayed for reply in replies] == [False, True, True]
    assert {name.split(b":")[1] for name in values(valkey)} == {b"a"}  # answers; no key is held any more
    assert shop.seen["replay_cache", "hit"] == 2


@fronted
async def test_a_cancelled_request_leaves_no_hint(valkey: Valkey, shops: Opening) -> None:
    shop = shops(LOCAL, ManualClock(), lock_hint=Front(valkey.url, life=90, timeout=PATIENT))
    await shop.order(key="key-that-tells-the-time")
    running = await under_way(shop)
    await until(lambda: values(valkey))
    running.cancel()  # type: ignore[attr-defined]
    with pytest.raises(asyncio.CancelledError):
        await running
    assert values(valkey) == {}
    shop.go_on.set()
    assert (await shop.order()).status == 201
