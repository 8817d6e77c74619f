"""An application on Redis: replays, status, calls of PHASED handlers, and what workers and operators do there."""

from __future__ import annotations

import json
import time
from asyncio import to_thread

import pytest
from starlette.applications import Starlette
from starlette.responses import JSONResponse
from starlette.routing import Route

from cli.operating import oncekey
from harness.asgi import call
from harness.valkeys import StoringValkey
from oncekey import INLINE, PHASED, SINGLE_TENANT, Once, wire
from oncekey.core.errors import ConfigurationError
from oncekey.core.model import HOUR, Code, State
from oncekey.core.policy import Policy
from oncekey.databases.address import Kind
from oncekey.engine.operation import Operation, SyncOperation
from oncekey.stores.cells_upkeep import keep_until
from oncekey.workers.service import Service
from oncekey.workers.tasks import Wanted, presence_of, tasks_for
from oncekey_contract.walking import cell_of, records

KEY = "0f6c2a64-redis-once-test"


@pytest.fixture(scope="module")
def server():
    with StoringValkey() as server:
        yield server


@pytest.fixture
def url(server):
    server.say("FLUSHALL")
    return server.url


class Shop:
    """Two routes; `calls` counts what reached the outside, `broken` makes the next call fail."""

    def __init__(self, url: str) -> None:
        self.once = Once(url, policy=Policy(secret=b"0123456789abcdef0123456789abcdef"))
        self.calls: list[str] = []
        self.broken = False
        once = self.once

        @once.protect(effects=INLINE, operation="notify", low_stakes=True)
        async def notify(request, op: Operation):
            self.calls.append(op.key)
            return JSONResponse({"sent": len(self.calls)}, 201)

        @once.protect(effects=PHASED, operation="pay", low_stakes=True)
        async def pay(request, op: Operation):
            async def charge(*, key):
                self.calls.append(key)
                return "ch_1"

            number = await op.value("number", lambda: len(self.calls))
            charged = await op.call("charge", charge, repeatable=True, parameters={"cents": 5})
            if self.broken:
                raise RuntimeError("after the call")
            return JSONResponse({"charge": charged, "number": number}, 201)

        @once.protect(effects=PHASED, operation="book", low_stakes=True)
        async def book(request, op: Operation):
            await op.phase("row", lambda tx: None)

        self.app = Starlette(
            routes=[Route(f"/{one.__name__}", one, methods=["POST"]) for one in (notify, pay, book)],
            lifespan=once.lifespan,
        )
        once.install(self.app, tenant=SINGLE_TENANT)

    def post(self, path: str, key: str = KEY):
        return call(self.app, "POST", path, headers={"idempotency-key": f'"{key}"'})


async def test_request_runs_once_and_status_is_available(url):  # R84, R87
    shop = Shop(url)
    async with shop.once.lifespan(shop.app):
        first, second = await shop.post("/notify"), await shop.post("/notify")
        status = await call(shop.app, "GET", f"/idempotency-keys/{KEY}")
    assert (first.status, second.status, second.body, second.replayed) == (201, 201, first.body, True)
    assert shop.calls == [KEY]
    assert (status.status, status.json()["state"]) == (200, "completed")


@pytest.mark.parametrize("store", ["redis", "memory"])
async def test_a_phased_handler_has_calls_and_values_and_no_phase(store, request):
    shop = Shop("memory:" if store == "memory" else request.getfixturevalue("url"))
    async with shop.once.lifespan(shop.app):
        shop.broken = True
        assert (await shop.post("/pay")).status == 500
        shop.broken = False
        done = await shop.post("/pay")
        refused = await call(shop.app, "POST", "/book", headers={"idempotency-key": f'"{KEY}-2"'})
    assert (done.status, done.json()) == (201, {"charge": "ch_1", "number": 0})
    assert len(shop.calls) == 1  # the call was not made again
    assert refused.status == 500


async def test_workers_sweep_stale_keys_and_reap_old_ones(url):
    """The sweeper moves stale keys, the reaper removes old ones, and both are on the roll (R146, R171)."""
    shop = Shop(url)
    ended = time.time_ns() // 1000 - HOUR // 2  # after that of the reaper's grace, and before the server's
    made = [cell_of(one) for one in records(ended) if not one.memo and one.intent is None]
    ends = {}
    async with shop.once.lifespan(shop.app):
        engine = shop.once.asynchronous()
        for line in made:
            if line["effects"] == "outbox":
                continue
            old = {**line, "ttl": 1, "operation": "notify"}
            assert await engine.driver._cells.swap(line["scope"], line["key"], None, old, keep_until(old))
            ends[line["key"]] = old
        tasks = tasks_for(shop.once, Wanted(frozenset({"sweeper", "reaper"})))
        presence = presence_of(shop.once, tasks)
        await presence.run_once()
        done = await Service(tasks).once()
        stats = json.loads((await to_thread(oncekey, "stats", "--store", url, "--json")).stdout)
        doctor = json.loads((await to_thread(oncekey, "doctor", "--store", url, "--json")).stdout)
        left = {}
        for key, line in ends.items():
            there, _ = await engine.driver._cells.look(line["scope"], key)
            left[key] = None if there is None else there["state"]
        await presence.stop(0)
    assert (done.failed, done.done > 0) == (0, True)
    for key, line in ends.items():
        match line["state"]:
            case "in_progress" if line["recovery"] == "unknown" or line["effects"] == "phased":
                resumed = line["effects"] == "phased" and line["recovery"] == "resume"
                assert left[key] in ({"failed_retryable", None} if resumed else {"unknown"}), line
            case "completed" | "expired" | "failed_retryable":
                assert left[key] is None, line
            case "unknown":
                assert left[key] == "unknown", line
    assert State.UNKNOWN.value in {group["state"] for group in stats["items"]}
    workers = [one["seen"] for one in doctor["items"] if one["about"] == "workers"]
    assert any(presence.who in seen for seen in workers)


async def test_operator_settles_an_unknown_outcome(url):
    shop = Shop(url)
    async with shop.once.lifespan(shop.app):
        await shop.post("/notify")
        engine = shop.once.asynchronous()
        (name,) = [one.id for one in (await _all(engine))]
        line, _ = await engine.driver._cells.look(name.scope, name.key)
        doubtful = {**line, "state": "unknown", "version": line["version"] + 1, "last_error": "lost"}
        doubtful |= {one: None for one in line if one.startswith("response_")} | {"outcome": None, "finished_at": None}
        seen = type("Seen", (), {"incarnation": line["incarnation"], "version": line["version"]})
        assert await engine.driver._cells.swap(name.scope, name.key, seen, doubtful, None)
        assert (await shop.post("/notify")).code == Code.OUTCOME_UNKNOWN.value
    listed = json.loads((await to_thread(oncekey, "unknown", "list", "--store", url, "--json")).stdout)
    assert [one["key"] for one in listed["items"]] == [KEY]
    settled = await to_thread(
        oncekey,
        "keys",
        "resolve",
        KEY,
        "--store",
        url,
        "--not-executed",
        "--closed",
        "--reason",
        "looked",
        "--by",
        "ann",
    )
    assert settled.exit_code == 0, settled.output
    async with shop.once.lifespan(shop.app):
        assert (await shop.post("/notify")).status == 201
    assert shop.calls == [KEY, KEY]


async def _all(engine):
    from oncekey.core.flow import adrive
    from oncekey.core.operate import Search

    return (await adrive(engine.store.operate.search(Search(), 10), engine.driver.run)).records


def test_function_runs_once_from_threads(url):
    once = Once(url)

    @once.function(effects=INLINE, key="order", operation="ship", low_stakes=True)
    def ship(op: SyncOperation, order: str) -> str:
        sent.append(order)
        return f"{order} sent"

    sent: list[str] = []
    assert (ship("a"), ship("a"), ship("b")) == ("a sent", "a sent", "b sent")
    assert sent == ["a", "b"]
    once.blocking().close()


def test_the_console_needs_more_than_this_store_has():
    from oncekey.console import Console

    with pytest.raises(ConfigurationError, match="this store does not support operator commands"):
        Console("redis://127.0.0.1:1", tokens="ann:read:0123456789abcdef0123456789abcdef")
    assert wire.declared(Kind.REDIS).store().survey is None
