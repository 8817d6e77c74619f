"""Functions happen once: results, refusals, endings, steps and workers, in threads and in event loops."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from decimal import Decimal
from pathlib import Path
from typing import Any

import celery.exceptions
import flask
import httpx
import pytest
from fastapi import FastAPI

from frameworks.realshop import SqliteFile
from functions.stage import Bought, Order, Stage, deliver
from oncekey import (
    INLINE,
    LOCAL,
    PHASED,
    SINGLE_TENANT,
    ConfigurationError,
    Executed,
    ExecutionFailedError,
    InProgressError,
    KeyReusedError,
    NotExecutedError,
    Once,
    Operation,
    OutcomeUnknownError,
    Question,
    Rejected,
    RejectedError,
    Reply,
    ResultNotKeptError,
    StoreUnavailableError,
    SyncOperation,
)
from oncekey.core.errors import BodyInvalidError, KeyMalformedError, ResultInvalidError, ResultNotStorableError
from oncekey.core.model import MINUTE
from oncekey.core.policy import Policy
from oncekey.frameworks.functions import running
from oncekey.observe.events import Replayed, Reserved, Settled
from oncekey.testing import operation, sync_operation
from oncekey.workers.completer import Completer
from oncekey.workers.tasks import reconciler_of, tasks_for

TEA = Order("tea")


async def test_a_function_runs_once_and_replays_its_result(stage: Stage) -> None:
    buy = stage.function("local")
    async with stage.open():
        bought = [await buy("o-1", TEA) for _ in range(3)]
        assert bought == [Bought("tea", Decimal("9.90"))] * 3
        assert (stage.rows, len(stage.runs), stage.states) == (["tea"], 1, ["completed"])
        await buy("o-2", Order("coffee"))
    assert stage.rows == ["coffee", "tea"]


async def test_reusing_a_key_with_other_arguments_raises(small_stage: Stage) -> None:
    buy = small_stage.function("local")
    async with small_stage.open():
        await buy("o-1", TEA)
        await buy("o-1", order=Order("tea", Decimal("9.90")), note="")  # spelled otherwise, and the same
        for other in (buy("o-1", Order("coffee")), buy("o-1", TEA, "wrapped"), buy("o-1", TEA, note="wrapped")):
            with pytest.raises(KeyReusedError, match="local: its key belongs to a call with other arguments"):
                await other
    assert len(small_stage.runs) == 1


async def test_keys_are_separate_per_tenant_and_function(small_stage: Stage) -> None:
    one = small_stage.function("local", tenant="note")
    other = small_stage.function("local", operation="buy again")
    async with small_stage.open():
        await one("o-1", Order("a"), note="ann")
        await one("o-1", Order("b"), note="bob")
        await other("o-1", Order("c"))
    assert small_stage.rows == ["a", "b", "c"]


async def test_an_exception_rolls_back_and_a_retry_runs(stage: Stage) -> None:
    buy = stage.function("local")
    stage.faults["local"] = ValueError("no tea")
    async with stage.open():
        with pytest.raises(ValueError, match="no tea"):
            await buy("o-1", TEA)
        assert (stage.rows, stage.states) == ([], [])
        assert await buy("o-1", TEA) == Bought("tea", Decimal("9.90"))
    assert len(stage.runs) == 2


@pytest.mark.parametrize("signal", [celery.exceptions.Retry, celery.exceptions.Ignore, celery.exceptions.Reject])
async def test_celery_control_exceptions_are_never_stored(small_stage: Stage, signal: type[Exception]) -> None:
    # apishape 7: each is raised
    buy = small_stage.function("local")
    small_stage.faults["local"] = signal()
    async with small_stage.open():
        with pytest.raises(signal):
            await buy("o-1", TEA)
        assert (small_stage.rows, small_stage.states) == ([], [])
        assert (await buy("o-1", TEA)).item == "tea"


async def test_rejected_error_is_stored_without_rows(stage: Stage) -> None:
    buy = stage.function("local")
    stage.faults["local"] = RejectedError({"why": "sold out", "left": Decimal("0.5"), "of": (1, 2)})
    async with stage.open():
        for _ in range(2):
            with pytest.raises(RejectedError) as no:
                await buy("o-1", TEA)
            assert no.value.value == {"why": "sold out", "left": Decimal("0.5"), "of": [1, 2]}
    assert (stage.rows, len(stage.runs), stage.states) == ([], 1, ["completed"])


async def test_a_failed_inline_function_is_unknown(stage: Stage) -> None:
    buy = stage.function("inline")
    stage.faults["inline"] = ConnectionError("reset")
    async with stage.open():
        with pytest.raises(ConnectionError):
            await buy("o-1", TEA)
        with pytest.raises(OutcomeUnknownError) as unknown:
            await buy("o-1", TEA)
        assert (unknown.value.retry_after or 0) >= 1
    assert (len(stage.charges), stage.states) == (1, ["unknown"])


async def test_a_not_executed_function_can_be_retried(small_stage: Stage) -> None:
    buy = small_stage.function("inline")
    small_stage.faults["charge"] = NotExecutedError("no route")
    async with small_stage.open():
        with pytest.raises(NotExecutedError):
            await buy("o-1", TEA)
        assert (await buy("o-1", TEA)).charge == "ch_1"


@pytest.mark.parametrize("declined", [False, True])
async def test_a_resolver_settles_an_unknown_function(small_stage: Stage, declined: bool) -> None:
    buy = small_stage.function("inline")
    small_stage.faults["inline"] = ConnectionError("reset")
    found = {"item": "tea", "price": "9.90", "charge": "ch_of_the_provider"}

    @small_stage.once.resolver("inline", call="charge")
    async def ask(question: Question) -> Any:
        assert question.downstream_key == small_stage.charges[0]
        return Rejected(Reply(402, {"why": "no money"})) if declined else Executed(found)

    async with small_stage.open():
        with pytest.raises(ConnectionError):
            await buy("o-1", TEA)
        small_stage.clock.advance(MINUTE)
        assert await reconciler_of(small_stage.once).run_once() == 1
        if declined:
            with pytest.raises(RejectedError) as no:
                await buy("o-1", TEA)
            assert no.value.value == {"why": "no money"}
        else:
            assert await buy("o-1", TEA) == Bought("tea", Decimal("9.90"), "ch_of_the_provider")
    assert len(small_stage.charges) == 1


async def test_a_concurrent_call_raises_in_progress_or_waits(stage: Stage) -> None:
    buy = stage.function("local")
    patient = stage.function("local", once=(other := stage.process()), on_in_progress="wait", wait_max=60)
    stage.faults["local"] = stage.wait
    async with stage.open(other):
        first = asyncio.create_task(buy("o-1", TEA))
        await stage.is_entered()
        with pytest.raises(InProgressError) as busy:
            await buy("o-1", TEA)
        assert (busy.value.retry_after or 0) >= 1
        assert not busy.value.accepted
        waiting = asyncio.create_task(patient("o-1", TEA))
        await asyncio.sleep(0)
        stage.go_on.set()
        assert await first == await waiting == Bought("tea", Decimal("9.90"))
    assert (len(stage.runs), stage.rows) == (1, ["tea"])


async def test_steps_run_once_over_all_attempts(stage: Stage) -> None:
    pay = stage.function("phased")
    stage.faults |= {"ordered": ValueError("stumbled"), "paid": ValueError("stumbled again")}
    async with stage.open():
        for _ in range(2):
            with pytest.raises(ValueError, match="stumbled"):
                await pay("o-1", TEA)
        assert await pay("o-1", TEA) == Bought("tea", Decimal("9.90"), "ch_1")
        assert await pay("o-1", TEA) == Bought("tea", Decimal("9.90"), "ch_1")
    assert (stage.rows, len(stage.charges), len(stage.runs)) == (["tea", "tea paid"], 1, 3)


async def test_a_worker_resumes_with_the_stored_arguments(stage: Stage) -> None:
    pay = stage.function("phased")
    again = stage.function("phased", once=(worker := stage.process()))
    stage.faults["ordered"] = stage.wait
    async with stage.open(worker):
        stranded = asyncio.create_task(pay("o-1", TEA, "gift"))
        await stage.is_entered()
        stage.lease_over()
        del stage.faults["ordered"]
        assert "completer" in [task.name for task in tasks_for(worker)]
        assert await Completer(worker).run_once() == 1
        assert stage.runs == [TEA, TEA]  # an Order, made anew from what was stored
        assert await again("o-1", TEA, "gift") == Bought("tea", Decimal("9.90"), "ch_1")
        stage.go_on.set()
        assert await stranded == Bought("tea", Decimal("9.90"), "ch_1")  # what the record says, not what it did
    assert (stage.rows, len(stage.charges)) == (["tea", "tea paid"], 1)


async def test_a_worker_stores_a_rejected_call(small_stage: Stage) -> None:
    pay = small_stage.function("phased")
    small_stage.faults |= {"ordered": ValueError("stumbled"), "charge": RejectedError("no money")}
    async with small_stage.open():
        with pytest.raises(ValueError, match="stumbled"):
            await pay("o-1", TEA)
        small_stage.lease_over()
        completer = Completer(small_stage.once)
        assert (await completer.run_once(), completer.failed) == (1, 0)
        with pytest.raises(RejectedError) as no:
            await pay("o-1", TEA)
        assert no.value.value == "no money"


async def test_an_uncertain_call_in_a_function_is_not_repeated(small_stage: Stage) -> None:
    pay = small_stage.function("phased")
    small_stage.faults["charged"] = ConnectionError("reset")
    async with small_stage.open():
        with pytest.raises(OutcomeUnknownError) as first:
            await pay("o-1", TEA)
        assert isinstance(first.value.__cause__, Exception)
        with pytest.raises(OutcomeUnknownError):
            await pay("o-1", TEA)
    assert len(small_stage.charges) == 1


async def test_a_worker_completes_an_outbox_function(stage: Stage) -> None:
    pay = stage.function("outbox")
    stage.once.topic("charge")(deliver)
    async with stage.open():
        for _ in range(2):
            with pytest.raises(InProgressError) as accepted:
                await pay("o-1", TEA)
            assert accepted.value.accepted
        (relay,) = [task for task in tasks_for(stage.once) if task.name == "relay"]
        await relay.run_once()
        await relay.shut_down()
        assert await pay("o-1", TEA) == Bought("tea", Decimal("9.90"), "ch_1")
    assert (stage.rows, len(stage.charges), len(stage.runs)) == (["tea"], 1, 1)


async def test_a_late_owner_settles_its_unknown_outcome(stage: Stage) -> None:
    buy = stage.function("inline")
    stage.faults["inline"] = stage.wait
    async with stage.open():
        silent = asyncio.create_task(buy("o-1", TEA))
        await stage.is_entered()
        stage.lease_over()
        with pytest.raises(OutcomeUnknownError):
            await buy("o-1", TEA)
        stage.go_on.set()
        # Its own word comes late, and is the best there is: nobody else has said anything yet.
        assert await silent == await buy("o-1", TEA) == Bought("tea", Decimal("9.90"), "ch_1")
    assert len(stage.charges) == 1


async def test_effects_decide_how_a_cancelled_function_settles(tmp_path: Path) -> None:
    stage = Stage(SqliteFile(tmp_path / "shop.db"), blocking=False)
    local, inline = stage.function("local"), stage.function("inline")
    stage.faults |= {"local": stage.wait, "inline": stage.wait}
    async with stage.open():
        for call in (local("o-1", TEA), inline("o-2", TEA)):
            task = asyncio.create_task(call)
            await stage.is_entered()
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
        stage.go_on.set()
        assert (stage.rows, stage.states) == ([], ["unknown"])
        assert (await local("o-1", TEA)).item == "tea"
        with pytest.raises(OutcomeUnknownError):
            await inline("o-2", TEA)


async def test_system_exit_in_a_function_is_settled_first(small_stage: Stage) -> None:
    buy = small_stage.function("inline")
    small_stage.faults["inline"] = SystemExit("the worker took too long") if small_stage.blocking else GeneratorExit()
    async with small_stage.open():
        with pytest.raises((SystemExit, GeneratorExit)):
            await buy("o-1", TEA)
        assert small_stage.states == ["unknown"]


async def test_an_oversized_function_result_is_not_stored(small_stage: Stage) -> None:
    buy = small_stage.function("local", max_response_bytes=4)
    async with small_stage.open():
        assert (await buy("o-1", TEA)).item == "tea"
        with pytest.raises(ResultNotKeptError, match="its result was too large to store"):
            await buy("o-1", TEA)


async def test_on_5xx_store_raises_execution_failed_on_retry(small_stage: Stage) -> None:
    buy = small_stage.function("inline", on_5xx="store")
    small_stage.faults["inline"] = ValueError("oops")
    async with small_stage.open():
        with pytest.raises(ValueError, match="oops"):
            await buy("o-1", TEA)
        with pytest.raises(ExecutionFailedError):
            await buy("o-1", TEA)
    assert len(small_stage.charges) == 1


async def test_oversized_arguments_and_invalid_keys_raise(small_stage: Stage) -> None:
    buy = small_stage.function("local", max_request_bytes=200)
    async with small_stage.open():
        with pytest.raises(BodyInvalidError, match="larger than max_request_bytes"):
            await buy("o-1", TEA, "x" * 200)
        for key, why in (
            ("", "not be empty"),
            ("x" * 256, "at most 255"),
            ("öl", "ASCII"),
            (7, "be text, .* type int"),
        ):
            with pytest.raises(KeyMalformedError, match=f"local: key='key' must .*{why}"):
                await buy(key, TEA)
    assert small_stage.runs == []


# Where there is one kind of function and one store.


@pytest.fixture
def once(tmp_path: Path) -> Any:
    once = Once(f"sqlite:///{tmp_path}/shop.db", migrate=True, policy=Policy(lease=60))
    yield once
    if once._blocking is not None:
        once._blocking.close()


def test_the_error_of_an_invalid_key_names_its_source(once: Once) -> None:
    @once.function(key="number", effects=LOCAL, operation="book")
    def book(op: SyncOperation, number: str) -> None: ...

    def of(order: dict[str, str]) -> str:
        return order["number"]

    @once.function(key=of, effects=LOCAL, operation="ship")
    def ship(op: SyncOperation, order: dict[str, str]) -> None: ...

    strict = Once(once.store, policy=Policy(min_key_length=16))

    @strict.function(key="number", effects=LOCAL, operation="pay")
    def pay(op: SyncOperation, number: str) -> None: ...

    for call, said in (
        (lambda: book(" "), "book: key='number' must not be empty"),
        (lambda: ship({"number": "ö"}), "ship: the result of key=of must have printable ASCII characters only"),
        (lambda: pay("7"), "pay: key='number' must have at least 16 characters"),
    ):
        with pytest.raises(KeyMalformedError, match=said):
            call()
    strict.blocking().close()


def test_an_unstorable_function_result_rolls_back(once: Once) -> None:
    runs = []

    @once.function(key="key", effects=LOCAL, operation="odd")
    def odd(key: str, kind: str) -> Any:
        runs.append(kind)
        return {"set": {1, 2}, "nan": float("nan"), "object": object(), "names": {1: 2}, "fine": [1]}[kind]

    for kind in ("set", "nan", "object", "names"):
        with pytest.raises(ResultNotStorableError, match="the result of odd cannot be stored"):
            odd("k", kind)
    assert odd("k", "fine") == [1]  # nothing was there before

    @once.function(key="key", effects=LOCAL, operation="declared")
    def declared(key: str) -> int:
        return "seven"  # type: ignore[return-value]

    with pytest.raises(ResultInvalidError, match="a whole number was declared"):
        declared("k")

    @once.function(key="key", effects=LOCAL, operation="refusing")
    def refusing(key: str) -> None:
        raise RejectedError(object())

    with pytest.raises(ResultNotStorableError):
        refusing("k")


def test_observers_receive_events_of_functions(tmp_path: Path) -> None:
    heard: list[Any] = []
    once = Once(f"sqlite:///{tmp_path}/shop.db", migrate=True, observers=[heard.append])

    @once.function(key="key", effects=INLINE, operation="ping")
    def ping(key: str, fails: bool = False) -> None:
        assert running.get() is not None
        if fails:
            raise NotExecutedError

    ping("k")
    ping("k")
    with pytest.raises(NotExecutedError):
        ping("other", fails=True)
    assert running.get() is None
    told = [type(event).__name__ for event in heard if isinstance(event, Reserved | Replayed | Settled)]
    assert told == ["Reserved", "Settled", "Replayed", "Reserved", "Settled"]
    assert once.healthy()
    once.blocking().close()


def test_a_store_outage_raises_without_running_the_function(tmp_path: Path) -> None:
    away = Once(f"sqlite:///{tmp_path}/nowhere/shop.db", migrate=True)
    runs = []

    @away.function(key="key", effects=LOCAL, operation="buy")
    def buy(key: str) -> None:
        runs.append(key)

    with pytest.raises(StoreUnavailableError, match="buy: the store is unavailable"):
        buy("k")
    assert runs == []


def test_a_function_that_fails_open_runs_without_a_record(once: Once, monkeypatch: pytest.MonkeyPatch) -> None:
    @once.function(key="key", effects=INLINE, operation="ping", on_store_error="fail_open", naturally_idempotent=True)
    def ping(op: SyncOperation, key: str) -> str:
        return op.downstream_key("ping")

    first = ping("k-1")
    threads = once._functions.threads
    assert threads is not None
    while threads.breaker.allows():
        threads.breaker.failed()
    assert ping("k-1") == first  # the provider sees the same key
    assert ping("k-2") != first


def test_a_protected_function_inside_of_a_transaction_is_refused(once: Once) -> None:
    @once.function(key="key", effects=LOCAL, operation="inner")
    def inner(key: str) -> str:
        return "inner"

    @once.function(key="key", effects=LOCAL, operation="outer")
    def outer(op: SyncOperation, key: str) -> str:
        return inner(key)

    with pytest.raises(RuntimeError, match="inner was called while outer holds a transaction"):
        outer("k")

    @once.function(key="key", effects=PHASED, operation="steps", complete=False)
    def steps(op: SyncOperation, key: str, where: str) -> str:
        if where == "phase":
            return op.phase("phase", lambda _: inner(key))
        return op.call("call", inner, repeatable=True)

    with pytest.raises(RuntimeError, match="inner was called while steps holds a transaction"):
        steps("a", "phase")
    assert steps("b", "call") == "inner"  # outside of one it is an operation like any other


def test_self_and_ignored_parameters_are_not_fingerprinted(once: Once) -> None:
    class Till:
        def __init__(self) -> None:
            self.sold: list[str] = []

        @once.function(key="key", effects=LOCAL, operation="sell", ignore=("client",))
        def sell(self, key: str, client: object) -> int:
            self.sold.append(key)
            return len(self.sold)

    till = Till()
    assert [till.sell("k", object()), till.sell("k", object()), Till().sell("k", None)] == [1, 1, 1]
    assert till.sold == ["k"]


async def test_a_unit_test_may_pass_an_operation_to_a_function(once: Once) -> None:
    @once.function(key="key", effects=LOCAL, operation="plain")
    def plain(op: SyncOperation, key: str) -> Any:
        return op.connection

    @once.function(key="key", effects=LOCAL, operation="awaited")
    async def awaited(op: Operation, key: str) -> Any:
        return op.connection

    assert plain(sync_operation(connection="mine"), "k") == "mine"  # type: ignore[call-arg, arg-type]
    assert await awaited(operation(connection="mine"), "k") == "mine"  # type: ignore[call-arg, arg-type]


async def test_an_async_function_outside_a_lifespan_raises(once: Once) -> None:
    @once.function(key="key", effects=LOCAL, operation="early")
    async def early(key: str) -> None: ...

    with pytest.raises(ConfigurationError, match=r"once\.lifespan is not running"):
        await early("k")
    async with once.lifespan():
        await early("k")


async def test_stopping_releases_a_phased_function_for_retry(tmp_path: Path) -> None:
    stage = Stage(SqliteFile(tmp_path / "shop.db"), blocking=False)
    pay = stage.function("phased")
    stage.faults["ordered"] = stage.wait
    async with stage.open():
        task = asyncio.create_task(pay("o-1", TEA))
        await stage.is_entered()
        loops = stage.once._functions.loops
        assert loops is not None
        stage.once.quiesce()
        loops._interrupt()  # what a stop does when its patience is over
        with pytest.raises(asyncio.CancelledError):
            await task
        assert (stage.states, stage.rows) == (["failed_retryable"], ["tea"])
        stage.go_on.set()
        stage.faults.clear()
        loops.stopping = False
        assert (await pay("o-1", TEA)).charge == "ch_1"
    assert stage.rows == ["tea", "tea paid"]


FORKS = """
import os, sys
from oncekey import LOCAL, Once, SyncOperation

once = Once(sys.argv[1])

@once.function(key="key", effects=LOCAL)
def backend(op: SyncOperation, key: str) -> list[int]:
    return [os.getpid(), *op.connection.execute("SELECT pg_backend_pid()").fetchone()]

first = backend("parent")
child = os.fork()
if not child:
    mine = backend("child")
    os._exit(0 if mine[0] == os.getpid() and mine[1] != first[1] and backend("parent") == first else 1)
assert os.waitpid(child, 0)[1] == 0, "the child used its parent's connection"
assert backend("parent") == first and backend("parent again")[1] == first[1]
"""


def test_a_forked_process_opens_its_own_connections(functions_dsn: str) -> None:
    program = [sys.executable, "-c", FORKS, functions_dsn.replace("postgresql://", "postgresql+psycopg://")]
    subprocess.run(program, check=True, timeout=120)


@pytest.mark.parametrize("kind", ["asgi", "wsgi"])
async def test_a_protected_function_inside_of_a_handlers_transaction_is_refused(once: Once, kind: str) -> None:
    @once.function(key="key", effects=LOCAL, operation="inner")
    def inner(key: str) -> str:
        return "inner"

    @once.function(key="key", effects=LOCAL, operation="ainner")
    async def ainner(key: str) -> str:
        return "inner"

    if kind == "wsgi":
        web = flask.Flask("shop")
        web.testing = True
        web.post("/orders")(once.protect(effects=LOCAL, operation="order")(lambda: inner("k")))
        web.post("/unprotected", endpoint="unprotected")(lambda: inner("k"))
        once.wsgi(web, tenant=SINGLE_TENANT)
        with pytest.raises(RuntimeError, match="inner was called while order holds a transaction"):
            web.test_client().post("/orders", headers={"Idempotency-Key": "a-key-of-the-test"})
        assert web.test_client().post("/unprotected").data == b"inner"
        return
    app = FastAPI()
    once.install(app, tenant=SINGLE_TENANT)

    @app.post("/orders")
    @once.protect(effects=LOCAL, operation="order")
    async def order() -> str:
        return await ainner("k")

    @app.post("/unprotected")
    async def unprotected() -> str:
        return await ainner("k")

    async with once.lifespan(app), httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://s") as client:
        with pytest.raises(RuntimeError, match="ainner was called while order holds a transaction"):
            await client.post("/orders", headers={"Idempotency-Key": "a-key-of-the-test"})
        assert (await client.post("/unprotected")).json() == "inner"
