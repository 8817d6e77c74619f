"""Somebody cancels: at every single await, once and for good, by asyncio and by anyio; and a server that stops."""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import anyio
import pytest
from fastapi import BackgroundTasks
from starlette.middleware.base import BaseHTTPMiddleware

from frameworks.shop import Shop
from harness.asgi import cancelled_at, until
from harness.ledger import Gate, down
from harness.patience import PATIENCE
from oncekey.core.model import INLINE, LOCAL, MINUTE, SECOND
from oncekey.databases.threads import ThreadedTransaction
from oncekey.engine.operation import Operation, SyncOperation
from oncekey.frameworks.asgi import middleware
from oncekey.runtimes import aio
from oncekey.testing.claims import ManualClock

MANY = 60


@pytest.fixture(autouse=True)
def hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(aio, "FIRST_PAUSE", 0.001)
    monkeypatch.setattr(aio, "LONGEST_PAUSE", 0.002)
    monkeypatch.setattr(middleware, "SEND_PATIENCE", 0.05)


def ordering(effects: Any, **options: Any) -> Shop:
    shop = Shop(yields=True, clock=ManualClock())

    @shop.post(effects=effects, status_code=201, **options)
    async def create(op: Operation) -> dict[str, int]:
        shop.runs.append(op.attempt)
        await asyncio.sleep(0)
        if effects is LOCAL:
            op.connection.add("row")
        await asyncio.sleep(0)
        return {"attempt": op.attempt}

    return shop


async def background_settlements(shop: Shop) -> None:
    for installation in shop.once._installed.values():
        assert await installation.running_work.wait(PATIENCE)


@pytest.mark.parametrize("effects", [LOCAL, INLINE])
async def test_a_request_may_be_cancelled_at_every_await(effects: Any) -> None:
    # apishape 9, R61, R71, R72, F8, F10: afterwards there is no leak, no double run, and every key has a story
    stories = set()
    for number in range(1, MANY):
        shop = ordering(effects)
        caller = shop.caller("/orders")
        finished = await cancelled_at(number, caller.run())
        await background_settlements(shop)
        assert shop.ledger.open == 0, f"cancelled at await {number}: a connection is left open"
        state, ran, rows = shop.state, len(shop.runs), len(shop.ledger.rows)
        stories.add((state, ran, rows))
        # Whatever a client was told is true.
        if caller.answered and caller.reply.status == 201:
            assert state == "completed"
        again = await shop.send("/orders")
        match effects, state:
            case _, "completed":
                assert (again.status, again.replayed, len(shop.runs)) == (201, True, 1)
            case _, None:
                assert ran == 0, f"cancelled at await {number}: it ran, and its key is forgotten"
                assert (again.status, again.replayed) == (201, False)
            case "local", "failed_retryable":
                assert rows == 0
                assert (again.status, again.json()) == (201, {"attempt": 2})
            case "inline", "unknown":
                assert ran == 1
                assert (again.status, again.code) == (409, "idempotency_outcome_unknown")
                assert len(shop.runs) == 1
            case _:
                pytest.fail(f"cancelled at await {number}: the key is left {state}")
        if effects is LOCAL:
            assert len(shop.ledger.rows) == 1
        if finished is not None:
            break
    else:
        pytest.fail(f"{MANY} awaits were not enough to get through a request")
    assert number > 6  # else the harness cancelled nothing
    failed = ("failed_retryable", 1, 0) if effects is LOCAL else ("unknown", 1, 0)
    done = ("completed", 1, 1 if effects is LOCAL else 0)
    assert stories == {(None, 0, 0), failed, done}


@pytest.mark.parametrize("effects", [LOCAL, INLINE])
@pytest.mark.parametrize("state", ["failed_retryable", "stale"])
async def test_a_retry_may_be_cancelled_at_every_await(effects: Any, state: str) -> None:
    # P1: a take-over that nobody uses must not look like a crash
    if effects is INLINE and state == "stale":
        options = {"on_lease_expired": "retry", "naturally_idempotent": True}
    else:
        options = {}
    for number in range(1, MANY):
        shop = ordering(effects, **options)
        await shop.send("/orders")
        line = shop.ledger.record
        line.update(state="failed_retryable" if state == "failed_retryable" else "in_progress", outcome=None)
        line.update({name: None for name in line if name.startswith("response_")}, finished_at=None)
        if state == "stale":
            line.update(owner="dead", lease_until=shop.clock())  # type: ignore[misc]
        shop.runs.clear()
        shop.ledger.rows.clear()
        finished = await cancelled_at(number, shop.caller("/orders").run())
        await background_settlements(shop)
        assert shop.ledger.open == 0
        if shop.state == "in_progress":
            assert shop.ledger.record["owner"] == "dead", f"cancelled at await {number}: the key is left owned"
        if not shop.runs:
            assert shop.state in (None, "failed_retryable", "in_progress")
            assert (await shop.send("/orders")).status == 201
        if finished is not None:
            break
    else:
        pytest.fail(f"{MANY} awaits were not enough to get through a request")


async def test_a_keyless_local_request_may_be_cancelled_at_every_await() -> None:
    for number in range(1, MANY):
        shop = ordering(LOCAL, require_key=False)
        finished = await cancelled_at(number, shop.caller("/orders", key=None).run())
        assert (shop.ledger.open, shop.ledger.records) == (0, [])
        if finished is not None:
            break
    assert 5 < number < MANY
    assert shop.ledger.rows == ["row"]


async def test_a_waiter_may_be_cancelled_at_every_await() -> None:
    # R82; peers 6: whoever waits never touches the owner's claim
    for number in range(1, 30):
        shop = ordering(INLINE, on_in_progress="wait", wait_max=0.02)
        gate = Gate()
        shop.ledger.faults["settle"].append(gate)
        first = asyncio.create_task(shop.send("/orders"))
        await gate.reached.wait()
        line = dict(shop.ledger.record)
        finished = await cancelled_at(number, shop.caller("/orders").run())
        await asyncio.sleep(0.005)
        assert shop.ledger.record == line
        gate.open()
        assert (await first).status == 201
        assert shop.runs == [1]
        await background_settlements(shop)
        if finished is not None:
            assert (finished.status, finished.code) == (409, "idempotency_key_in_progress")
            break
    else:
        pytest.fail("the waiter never came to its end")


# ------------------------------------------------------------------------------------- in the middle of a settlement


@pytest.mark.parametrize("effects", [LOCAL, INLINE])
@pytest.mark.parametrize("times", [1, 3])
async def test_a_cancelled_settlement_runs_once_and_its_response_is_sent(effects: Any, times: int) -> None:
    # apishape 1 and 9: the second entry would settle "500, release" over the stored success
    shop = ordering(effects)
    gate = Gate()
    shop.ledger.faults["step" if effects is LOCAL else "settle"].append(gate)
    caller = shop.caller("/orders")
    task = asyncio.create_task(caller.run())
    await gate.reached.wait()
    for _ in range(times):
        task.cancel()
        await asyncio.sleep(0)
    gate.open()
    with pytest.raises(asyncio.CancelledError):
        await task
    await background_settlements(shop)
    assert shop.ledger.open == 0
    if effects is INLINE:
        assert (caller.reply.status, caller.reply.json(), shop.state) == (201, {"attempt": 1}, "completed")
    else:
        # The commit was not reached: rolled back, said so, and a retry runs.
        assert (caller.reply.status, shop.ledger.rows, shop.state) == (503, [], "failed_retryable")
    again = await shop.send("/orders")
    assert again.status == 201
    assert len(shop.runs) == (1 if effects is INLINE else 2)


async def test_a_settlement_that_raises_a_driver_bug_is_not_repeated() -> None:
    # apishape 1: a second one would say "crashed" over whatever the first one wrote
    shop = ordering(INLINE)

    async def written_and_broken(do: Any) -> None:
        do()
        raise KeyError("a bug of a driver's")

    shop.ledger.faults["settle"].append(written_and_broken)
    with pytest.raises(KeyError):
        await shop.caller("/orders").run(raising=True)
    assert (shop.ledger.log.count("settle"), shop.state) == (1, "completed")
    assert (await shop.send("/orders")).replayed


async def test_a_cancelled_inline_handler_leaves_an_unknown_outcome() -> None:
    # R105: `on_5xx=store` keeps errors of the handler, and a server that stops is none
    shop = Shop()
    entered = asyncio.Event()

    @shop.post(effects=INLINE, on_5xx="store")
    async def create() -> None:
        entered.set()
        await asyncio.sleep(60)

    task = asyncio.create_task(shop.send("/orders"))
    await entered.wait()
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    assert shop.state == "unknown"


async def test_a_commit_cancelled_halfway_is_verified_in_the_store() -> None:
    # P7: cancelled after COMMIT was sent, so only the record knows
    shop = ordering(LOCAL)
    gate = Gate()
    shop.ledger.faults["commit"].append(committed_behind(gate))
    caller = shop.caller("/orders")
    task = asyncio.create_task(caller.run())
    await gate.reached.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert (caller.reply.status, caller.reply.json()) == (201, {"attempt": 1})
    assert (shop.ledger.rows, shop.state, shop.ledger.open) == (["row"], "completed", 0)


def committed_behind(gate: Gate) -> Any:
    async def fault(do: Any) -> None:
        do()
        await gate(lambda: None)

    return fault


async def test_a_settlement_survives_a_time_out_around_the_application() -> None:
    # apishape 1
    shop = ordering(INLINE)
    gate = Gate()
    shop.ledger.faults["settle"].append(gate)
    caller, limit = shop.caller("/orders"), asyncio.timeout(None)

    async def limited() -> None:
        async with limit:
            await caller.run()

    task = asyncio.create_task(limited())
    await gate.reached.wait()
    limit.reschedule(0)
    with pytest.raises(TimeoutError):
        await task
    assert (shop.state, caller.reply.status) == ("completed", 201)


async def test_a_settlement_survives_repeated_anyio_cancellation() -> None:
    # apishape 1: anyio cancels again at every await, until the scope is left
    shop = ordering(INLINE)
    gate = Gate()
    shop.ledger.faults["settle"].append(gate)
    caller = shop.caller("/orders")
    await cancelled_scope(caller.run(), gate.reached)
    assert (shop.state, caller.reply.status) == ("completed", 201)


async def test_settling_in_a_cancelled_anyio_scope_does_not_busy_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    # apishape 1: without a shield of anyio's own it would be woken up at every turn of the loop
    shop = ordering(INLINE)
    reached, waits = asyncio.Event(), []
    shield_once = asyncio.shield

    def counted(work: Any) -> Any:
        waits.append(work)
        return shield_once(work)

    async def slow(do: Any) -> Any:
        reached.set()
        await asyncio.sleep(0.05)
        return do()

    monkeypatch.setattr(asyncio, "shield", counted)
    shop.ledger.faults["settle"].extend([slow, slow])
    await cancelled_scope(shop.send("/orders"), reached)
    assert shop.state == "completed"
    assert 1 <= len(waits) < 10


async def cancelled_scope(work: Any, reached: asyncio.Event) -> None:
    """Work in an anyio scope that is cancelled when it has come to a certain place."""
    scope = anyio.CancelScope()

    async def scoped() -> None:
        with scope:
            await work

    task = asyncio.create_task(scoped())
    await reached.wait()
    scope.cancel()
    await task
    assert scope.cancelled_caught


@pytest.mark.parametrize("effects", [LOCAL, INLINE])
async def test_a_handler_in_a_cancelled_anyio_scope_is_settled(effects: Any) -> None:
    shop = Shop(yields=True)
    entered = asyncio.Event()

    @shop.post(effects=effects)
    async def create(op: Operation) -> None:
        entered.set()
        if effects is LOCAL:
            op.connection.add("row")
        await asyncio.sleep(60)

    await cancelled_scope(shop.send("/orders"), entered)
    assert (shop.ledger.open, shop.ledger.rows) == (0, [])
    assert shop.state == ("failed_retryable" if effects is LOCAL else "unknown")


async def test_a_keyless_handler_in_a_cancelled_scope_is_rolled_back() -> None:
    shop = Shop(yields=True)
    entered = asyncio.Event()

    @shop.post(effects=LOCAL, require_key=False)
    async def create(op: Operation) -> None:
        entered.set()
        op.connection.add("row")
        await asyncio.sleep(60)

    await cancelled_scope(shop.send("/orders", key=None), entered)
    assert (shop.ledger.open, shop.ledger.rows) == (0, [])


async def test_cancelling_a_wait_for_a_connection_leaves_no_claim() -> None:
    # R72: not entered, so the key was not used
    shop = Shop(yields=True)
    gate = Gate()
    shop.ledger.faults["begin"].append(gate)

    @shop.post(effects=LOCAL)
    async def create(op: Operation) -> None:
        shop.runs.append(1)

    await cancelled_scope(shop.send("/orders"), gate.reached)
    assert (shop.ledger.records, shop.runs) == ([], [])


async def test_a_claim_is_released_even_if_the_release_is_cancelled() -> None:
    shop = Shop(yields=True)
    gate = Gate()
    shop.ledger.faults["begin"].append(down)
    shop.ledger.faults["settle"].append(gate)

    @shop.post(effects=LOCAL)
    async def create(op: Operation) -> None:
        shop.runs.append(1)

    task = asyncio.create_task(shop.send("/orders"))
    await gate.reached.wait()
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    await background_settlements(shop)
    assert (shop.ledger.records, shop.runs) == ([], [])


async def test_cancelling_under_outer_middleware_settles_without_hanging() -> None:
    # BaseHTTPMiddleware takes no message any more when it is cancelled, and waits for us: that would be for ever.
    shop = ordering(INLINE)

    async def dispatch(request: Any, call_next: Any) -> Any:
        return await call_next(request)

    shop.app.add_middleware(BaseHTTPMiddleware, dispatch=dispatch)
    gate = Gate()
    shop.ledger.faults["settle"].append(gate)
    task = asyncio.create_task(shop.send("/orders"))
    await gate.reached.wait()
    task.cancel()
    async with asyncio.timeout(PATIENCE):
        await asyncio.gather(task, return_exceptions=True)
    assert shop.state == "completed"
    assert (await shop.send("/orders")).replayed


# ------------------------------------------------------------------------------------------------ blocking handlers


@pytest.mark.parametrize("effects", [LOCAL, INLINE])
async def test_a_cancelled_blocking_handler_is_settled_after_it_returns(effects: Any) -> None:
    # P4, P5: a thread cannot be cancelled; while it runs, the key is in progress and its connection in use
    shop = Shop()
    entered, go_on, ended = asyncio.Event(), threading.Event(), threading.Event()
    loop = asyncio.get_running_loop()

    @shop.post(effects=effects)
    def create(op: SyncOperation) -> str:
        shop.runs.append(1)
        loop.call_soon_threadsafe(entered.set)
        go_on.wait(PATIENCE)
        if effects is LOCAL:
            op.connection.add("row")
        ended.set()
        return "done"

    task = asyncio.create_task(shop.send("/orders"))
    await entered.wait()
    task.cancel()
    await asyncio.sleep(0.05)
    assert shop.state == "in_progress"
    go_on.set()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert ended.is_set()
    assert (shop.ledger.open, shop.ledger.rows) == (0, [])
    assert shop.state == ("failed_retryable" if effects is LOCAL else "unknown")


async def test_cancelling_a_blocking_begin_closes_its_connection() -> None:
    # A connection that arrives after the settlement would stay checked out for ever.
    shop = Shop()
    arrived, go_on = asyncio.Event(), threading.Event()
    loop = asyncio.get_running_loop()
    begin = shop.once.threads.begin

    def slowly() -> Any:
        loop.call_soon_threadsafe(arrived.set)
        go_on.wait(PATIENCE)
        return begin()

    shop.once.threads.begin = slowly  # type: ignore[method-assign]

    @shop.post(effects=LOCAL)
    def create(op: SyncOperation) -> str:
        shop.runs.append(1)
        return "done"

    task = asyncio.create_task(shop.send("/orders"))
    await arrived.wait()
    task.cancel()
    await asyncio.sleep(0.02)
    go_on.set()
    with pytest.raises(asyncio.CancelledError):
        await task
    await asyncio.sleep(0.02)
    assert shop.ledger.open == 0
    assert shop.state in (None, "failed_retryable")


# ------------------------------------------------------------------------------------------------------ stopping


async def test_a_stop_waits_for_handlers_that_were_just_cancelled() -> None:
    # apishape 1: a server cancels its tasks and runs the lifespan's end without waiting for them
    shop = ordering(INLINE)

    async def dispatch(request: Any, call_next: Any) -> Any:
        return await call_next(request)

    for _ in range(3):  # the deeper, the later the cancellation arrives
        shop.app.add_middleware(BaseHTTPMiddleware, dispatch=dispatch)
    settling = Gate()
    shop.ledger.faults["settle"].append(settling)
    hang = asyncio.Event()

    @shop.post("/slow", effects=INLINE)
    async def slow() -> None:
        shop.runs.append(1)
        await hang.wait()

    task = asyncio.create_task(shop.send("/slow"))
    await until(lambda: shop.runs)
    task.cancel()
    stopping = asyncio.create_task(shop.once.stop())
    await settling.reached.wait()
    assert not stopping.done()
    settling.open()
    await stopping
    await asyncio.gather(task, return_exceptions=True)
    assert shop.state == "unknown"


async def test_a_stop_does_not_wait_for_background_tasks() -> None:
    # what is settled and sent is over for us, whatever the application still does
    shop = Shop()
    hang = asyncio.Event()

    @shop.post(effects=INLINE)
    async def create(tasks: BackgroundTasks) -> str:
        tasks.add_task(hang.wait)
        return "done"

    caller = shop.caller("/orders")
    task = asyncio.create_task(caller.run())
    await until(lambda: caller.answered)
    (installation,) = shop.once._installed.values()
    async with asyncio.timeout(PATIENCE):
        assert await installation.running_work.wait(PATIENCE)
    hang.set()
    await task
    assert installation.running_work.pending == 0


def test_stop_works_again_in_a_second_event_loop() -> None:
    # one application, started and stopped in one loop after the other, as test suites do
    shop = ordering(INLINE)

    async def serve_and_stop(key: str) -> None:
        gate = Gate()
        shop.ledger.faults["settle"].append(gate)
        task = asyncio.create_task(shop.send("/orders", key=key))
        await gate.reached.wait()
        stopping = asyncio.create_task(shop.once.stop())
        await asyncio.sleep(0.01)
        assert not stopping.done()
        gate.open()
        await stopping
        await task

    for key in ("key-of-the-first-loop", "key-of-the-second-loop"):
        asyncio.run(serve_and_stop(key))


async def test_stop_is_bounded_and_logs_unwritten_settlements(caplog: pytest.LogCaptureFixture) -> None:
    shop = ordering(INLINE)
    shop.ledger.faults["settle"].extend([down] * 10_000)
    assert (await shop.send("/orders")).status == 503
    (installation,) = shop.once._installed.values()
    await installation.stop(0.02)
    assert "1 settlements not written" in caplog.text
    asked = len(shop.ledger.log)
    await asyncio.sleep(0.02)
    assert len(shop.ledger.log) == asked  # nobody knocks at a store that was closed


async def test_the_store_clock_decides_if_a_lease_has_expired() -> None:
    # the story of a key whose process died in mid-settlement: its lease runs out
    shop = ordering(LOCAL)
    await shop.send("/orders")
    shop.ledger.record.update(state="in_progress", owner="dead", lease_until=shop.clock() + SECOND)  # type: ignore[misc]
    assert (await shop.send("/orders")).status == 409
    assert shop.clock is not None
    shop.clock.advance(MINUTE)
    assert (await shop.send("/orders")).json() == {"attempt": 2}


class OneAtATime:
    """A blocking transaction that two threads must never be in at once."""

    def __init__(self) -> None:
        self.inside = 0
        self.log: list[str] = []
        self.go_on = threading.Event()

    connection = None

    def run(self, body: Any) -> Any:
        return self._do("step")

    def commit(self) -> None:
        self._do("commit")

    def rollback(self) -> None:
        self._do("rollback")

    def _do(self, what: str) -> None:
        self.inside += 1
        assert self.inside == 1, f"{what} while another thread uses the connection"
        if what != "rollback":
            self.go_on.wait(PATIENCE)
        self.log.append(what)
        self.inside -= 1


@pytest.mark.parametrize("what", ["step", "commit"])
async def test_one_thread_at_a_time_uses_a_blocking_transaction(what: str) -> None:
    # a thread that was cancelled goes on; the roll-back waits for it
    tx = OneAtATime()
    with ThreadPoolExecutor(4) as executor:
        threaded = ThreadedTransaction(tx, executor)
        work = threaded.run(None) if what == "step" else threaded.commit()  # type: ignore[arg-type]
        task = asyncio.create_task(work)  # type: ignore[arg-type]
        await until(lambda: tx.inside)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        undoing = asyncio.create_task(threaded.rollback())
        await asyncio.sleep(0.02)
        tx.go_on.set()
        await undoing
    assert tx.log == [what, "rollback"]


async def test_a_blocking_commit_cancelled_halfway_is_verified_in_the_store() -> None:
    # P7
    shop = Shop()
    reached, go_on = threading.Event(), threading.Event()
    begin = shop.once.threads.begin

    def slowly() -> Any:
        book = begin()
        commit = book.commit

        def committing() -> None:
            reached.set()
            go_on.wait(PATIENCE)
            commit()

        book.commit = committing  # type: ignore[method-assign]
        return book

    shop.once.threads.begin = slowly  # type: ignore[method-assign]

    @shop.post(effects=LOCAL, status_code=201)
    def create(op: SyncOperation) -> str:
        shop.runs.append(1)
        op.connection.add("row")
        return "done"

    caller = shop.caller("/orders")
    task = asyncio.create_task(caller.run())
    await until(reached.is_set)
    task.cancel()
    await asyncio.sleep(0.02)
    go_on.set()
    await asyncio.gather(task, return_exceptions=True)
    assert (shop.ledger.rows, shop.state, shop.ledger.open) == (["row"], "completed", 0)
    assert (caller.reply.status, (await shop.send("/orders")).replayed, shop.runs) == (201, True, [1])
