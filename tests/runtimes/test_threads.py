"""Flows in threads: interruptions, what is left open, heartbeats and settlements beside the requests, and forks."""

from __future__ import annotations

import contextvars
import os
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from harness import flows
from harness.patience import PATIENCE
from oncekey.core.errors import StoreUnavailableError
from oncekey.core.flow import Body, Flow, Fold, Mode, Statement, Transaction
from oncekey.core.model import Proceed, Settled
from oncekey.core.policy import Policy
from oncekey.databases.memory import MemoryDriver
from oncekey.engine import request
from oncekey.engine.actions import (
    INVOKE,
    RELEASE_CONNECTIONS,
    RETURN_READERS,
    STOPPED_AT_HANDLER,
    Aside,
    Beat,
    Begin,
    Call,
    Commit,
    Drop,
    Execute,
    Flush,
    Interrupted,
    Keep,
    Later,
    Life,
    Rollback,
    Sleep,
)
from oncekey.engine.shell import Engine
from oncekey.ports.store import Pulse
from oncekey.runtimes import threads
from oncekey.runtimes.threads import ThreadRuntime
from oncekey.stores.memory import MemoryStore
from oncekey.testing.claims import a_claim, answered

"""Seconds that a test waits for another thread before it fails."""


class Opened:
    """A transaction that notes what is done with it."""

    def __init__(self, log: list[str]) -> None:
        self.log = log
        self.connection = self

    def run(self, body: Body[Any]) -> Any:
        self.log.append("step")
        try:
            next(body)
        except StopIteration as stop:
            return stop.value
        raise AssertionError("nothing is said here")

    def commit(self) -> None:
        self.log.append("commit")

    def rollback(self) -> None:
        self.log.append("rollback")


class Folding(Opened):
    def commit_with(self, last: Statement) -> Any:
        self.log.append(f"commit with {last.name}")
        return None if last.name == "taken" else [{"n": 7}]

    def flush(self) -> None:
        self.log.append("flush")


class Shared(MemoryDriver):
    """Memory with transactions, and a store that may be away."""

    def __init__(self) -> None:
        super().__init__()
        self.log: list[str] = []
        self.away = 0
        self.asked = threading.Semaphore(0)
        """Released with every transaction that was tried."""

    def begin(self) -> Any:
        self.log.append("begin")
        return Opened(self.log)

    def run(self, transaction: Transaction[Any]) -> Any:
        try:
            if self.away:
                self.away -= 1
                raise StoreUnavailableError("away")
            return super().run(transaction)
        finally:
            self.asked.release()


@pytest.fixture
def driver() -> Shared:
    return Shared()


@pytest.fixture
def runtime(driver: Shared) -> Iterator[ThreadRuntime]:
    runtime = ThreadRuntime(Engine(MemoryStore(), driver))
    yield runtime
    assert runtime.shut_down(PATIENCE)


def saying(answer: object) -> Body[Any]:
    return answer
    yield


def failing(error: BaseException) -> Callable[..., Any]:
    def fails(*_: object) -> Any:
        raise error

    return fails


def test_effects_are_performed_in_order(runtime: ThreadRuntime, driver: Shared) -> None:
    def life() -> Life[Any]:
        yield RETURN_READERS
        yield RELEASE_CONNECTIONS
        yield Sleep(0)
        tx, first = yield Begin(saying("first"))
        said = yield Execute(tx, saying("second"))
        returned = yield Call(lambda connection, word: (connection, word), (tx.connection, "word"), within=tx)
        yield Flush(tx)
        kept = yield Commit(tx, saying(Keep("kept")))
        return [first, said, returned == (tx, "word"), kept.value]

    assert runtime.drive(life()) == ["first", "second", True, "kept"]
    assert driver.log == ["begin", "step", "step", "step", "commit"]


def test_dropped_commit_rolls_back(runtime: ThreadRuntime, driver: Shared) -> None:
    def life() -> Life[Any]:
        tx, _ = yield Begin()
        dropped = yield Commit(tx, saying(Drop("why")))
        return type(dropped), dropped.value

    assert runtime.drive(life()) == (Drop, "why")
    assert driver.log == ["begin", "step", "rollback"]


def test_rollback_without_wait_leaves_the_transaction(runtime: ThreadRuntime, driver: Shared) -> None:
    class Left(Opened):
        def leave(self) -> None:
            self.log.append("left")

    def life() -> Life[None]:
        for tx in (Left(driver.log), Opened(driver.log)):
            yield Rollback(tx)
            yield Rollback(tx, wait=False)

    runtime.drive(life())
    assert driver.log == ["rollback", "left", "rollback", "rollback"]


def test_statements_are_folded_into_begin_and_commit_if_supported(runtime: ThreadRuntime, driver: Shared) -> None:
    def begin_with(first: Body[Any]) -> Any:
        driver.log.append("begin with")
        tx = Folding(driver.log)
        return tx, tx.run(first)

    driver.begin_with = begin_with  # type: ignore[attr-defined]

    def life(name: str) -> Life[Any]:
        tx, first = yield Begin(saying("first"))
        yield Flush(tx)
        fold = Fold(Statement(name, "INSERT"), lambda rows: rows[0]["n"])
        ended = yield Commit(tx, saying(Keep("not asked")), fold)
        return first, type(ended), ended.value

    assert runtime.drive(life("sealed")) == ("first", Keep, 7)
    assert runtime.drive(life("taken")) == ("first", Drop, None)
    assert driver.log == [
        *("begin with", "step", "flush", "commit with sealed"),
        *("begin with", "step", "flush", "commit with taken"),
    ]


def test_a_begin_that_fails_leaves_nothing_open(runtime: ThreadRuntime, driver: Shared) -> None:
    def breaks(error: BaseException) -> Body[Any]:
        raise error
        yield

    def life(error: BaseException) -> Life[Any]:
        yield Begin(breaks(error))

    for error in (ValueError(), KeyboardInterrupt()):
        with pytest.raises(type(error)):
            runtime.drive(life(error))
    assert driver.log == ["begin", "step", "rollback"] * 2


def test_flow_stopped_at_the_handler_resumes_in_another_thread(runtime: ThreadRuntime) -> None:
    def life() -> Life[Any]:
        here = threading.current_thread()
        decision = yield INVOKE
        return decision, threading.current_thread() is here

    flow = life()
    assert runtime.run(flow) is STOPPED_AT_HANDLER
    assert not runtime.shut_down(0)  # a run that stopped at its handler is under way
    answers: list[Any] = []
    thread = threading.Thread(target=lambda: answers.append(runtime.run(flow, "decision")))
    thread.start()
    thread.join()
    assert answers == [("decision", False)]


INTERRUPTIONS = [KeyboardInterrupt, SystemExit, type("GreenletExit", (BaseException,), {})]


@pytest.mark.parametrize("interruption", INTERRUPTIONS)
def test_interruption_is_raised_after_the_flow_ends(
    runtime: ThreadRuntime, driver: Shared, interruption: type[BaseException]
) -> None:
    def life() -> Life[str]:
        tx, _ = yield Begin()
        try:
            yield Call(failing(interruption("now")), within=tx)
        except Interrupted:
            yield Rollback(tx)
            yield Sleep(0)
            driver.log.append("tidied up")
        return "answered all the same"

    flow = life()
    with pytest.raises(interruption, match="now"):
        runtime.run(flow)
    assert flow.gi_frame is None
    assert driver.log == ["begin", "rollback", "tidied up"]


def test_error_after_an_interruption_does_not_hide_it(
    runtime: ThreadRuntime, driver: Shared, caplog: pytest.LogCaptureFixture
) -> None:
    driver.away = 1

    def life() -> Life[None]:
        try:
            yield Call(failing(SystemExit()))
        except Interrupted:
            yield Transaction("settle", Mode.SINGLE, lambda: saying(None))

    with pytest.raises(SystemExit):
        runtime.run(life())
    assert "could not be finished: StoreUnavailableError" in caplog.text


def test_call_with_a_time_limit_is_abandoned_after_it(runtime: ThreadRuntime) -> None:
    word: contextvars.ContextVar[str] = contextvars.ContextVar("word")
    word.set("of the caller")
    gone_on = threading.Event()

    def life(fn: Callable[..., Any], limit: float) -> Life[Any]:
        return (yield Call(fn, limit=limit))

    assert runtime.drive(life(word.get, PATIENCE)) == "of the caller"
    with pytest.raises(ValueError, match="its own"):
        runtime.drive(life(failing(ValueError("its own")), PATIENCE))
    release = threading.Event()

    def waits() -> None:
        release.wait(PATIENCE)
        gone_on.set()

    with pytest.raises(TimeoutError):
        runtime.drive(life(waits, 0.001))
    release.set()
    assert gone_on.wait(PATIENCE)


def test_aside_flows_run_one_at_a_time(runtime: ThreadRuntime) -> None:
    inside, most, lock = 0, 0, threading.Lock()

    def look() -> Flow[None]:
        nonlocal inside, most
        with lock:
            inside += 1
            most = max(most, inside)
        yield Transaction("look", Mode.READ, lambda: saying(None))
        with lock:
            inside -= 1

    def life() -> Life[None]:
        yield Aside(look())

    threads = [threading.Thread(target=lambda: runtime.drive(life())) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert most == 1


# Next to the requests


@contextmanager
def beating(runtime: ThreadRuntime, renew: Callable[[], Flow[Any]], *, until: float = 60.0) -> Iterator[Pulse]:
    def life() -> Life[Pulse]:
        pulse: Pulse = yield Beat(renew, 0.002, until)
        return pulse

    pulse = runtime.drive(life())
    try:
        yield pulse
    finally:
        pulse.stop()


def claimed(runtime: ThreadRuntime) -> Proceed:
    verdict = flows.begin(runtime.engine, a_claim(), Policy())
    assert isinstance(verdict, Proceed)
    return verdict


def test_a_heartbeat_renews_until_it_is_stopped(runtime: ThreadRuntime, driver: Shared) -> None:
    verdict = claimed(runtime)
    lease, before = verdict.lease, verdict.record.lease_until
    assert before is not None
    with beating(runtime, lambda: request.renew(runtime.engine.store, lease, 10**9)) as pulse:
        driver.away = 1  # an outage does not end it
        for _ in range(5):
            assert driver.asked.acquire(timeout=PATIENCE)
    record = flows.find(runtime.engine, lease.id).record
    assert record is not None
    assert record.lease_until is not None
    assert record.lease_until > before
    assert not pulse.lost


def test_failed_renewal_marks_the_lease_as_lost(runtime: ThreadRuntime) -> None:
    lost = threading.Event()

    def renew() -> Flow[None]:
        yield Transaction("renew", Mode.SINGLE, lambda: saying(None))
        lost.set()

    with beating(runtime, renew) as pulse:
        assert lost.wait(PATIENCE)
        until(lambda: pulse.lost)


def test_all_leases_share_a_few_threads(runtime: ThreadRuntime) -> None:
    seen: set[threading.Thread] = set()
    beats = threading.Semaphore(0)

    def renew() -> Flow[int]:
        seen.add(threading.current_thread())
        yield Transaction("renew", Mode.SINGLE, lambda: saying(None))
        beats.release()
        return 1

    pulses = [beating(runtime, renew) for _ in range(50)]
    for pulse in pulses:
        pulse.__enter__()
    for _ in range(200):
        assert beats.acquire(timeout=PATIENCE)
    assert 1 <= len(seen) <= threads.THREADS
    for pulse in pulses:
        pulse.__exit__(None, None, None)
    until(lambda: not any(thread.is_alive() for thread in seen))  # an idle process has no thread of ours


def test_slow_renewal_does_not_delay_others(runtime: ThreadRuntime) -> None:
    hangs, reached, beats = threading.Event(), threading.Event(), threading.Semaphore(0)

    def slow() -> Flow[int]:
        reached.set()
        hangs.wait(PATIENCE)
        yield Transaction("renew", Mode.SINGLE, lambda: saying(None))
        return 1

    def quick() -> Flow[int]:
        yield Transaction("renew", Mode.SINGLE, lambda: saying(None))
        beats.release()
        return 1

    with beating(runtime, slow):
        assert reached.wait(PATIENCE)
        with beating(runtime, quick):
            for _ in range(3):
                assert beats.acquire(timeout=PATIENCE)
        hangs.set()


def test_background_settlement_retries_until_the_store_responds(
    runtime: ThreadRuntime, driver: Shared, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(threads, "FIRST_PAUSE", 0.001)
    lease, store = claimed(runtime).lease, runtime.engine.store
    driver.away = 3

    def life() -> Life[None]:
        yield Later(lambda: request.settle(store, lease, answered()), PATIENCE)

    runtime.drive(life())
    assert runtime.shut_down(PATIENCE)
    record = flows.find(runtime.engine, lease.id).record
    assert record is not None
    assert record.state.value == "completed"


def test_background_settlement_that_gives_up_is_logged(
    runtime: ThreadRuntime, driver: Shared, caplog: pytest.LogCaptureFixture
) -> None:
    lease, store = claimed(runtime).lease, runtime.engine.store
    driver.away = 1

    def life() -> Life[None]:
        yield Later(lambda: request.settle(store, lease, answered()), 0.0)
        yield Later(failing(ValueError("a fault of ours")), PATIENCE)

    runtime.drive(life())
    assert runtime.shut_down(PATIENCE)
    assert "its lease will expire" in caplog.text
    assert "is not retried: ValueError" in caplog.text


def test_shutdown_does_not_wait_beyond_its_timeout(runtime: ThreadRuntime, caplog: pytest.LogCaptureFixture) -> None:
    release = threading.Event()

    def slow() -> Flow[Settled]:
        release.wait(PATIENCE)
        return (yield Transaction("settle", Mode.SINGLE, lambda: saying(None)))

    def life() -> Life[None]:
        yield Later(slow, PATIENCE)

    runtime.drive(life())
    assert not runtime.shut_down(0.0)
    assert "1 settlements not written" in caplog.text
    release.set()


def test_forked_process_starts_with_fresh_state(runtime: ThreadRuntime, driver: Shared) -> None:
    # A server with --preload starts a runtime in the parent, whose threads and locks are not the child's
    def life() -> Life[Any]:
        yield INVOKE

    resting = life()
    runtime.run(resting)
    beats = threading.Semaphore(0)

    def renew() -> Flow[int]:
        yield Transaction("renew", Mode.SINGLE, lambda: saying(None))
        beats.release()
        return 1

    with beating(runtime, renew):
        assert beats.acquire(timeout=PATIENCE)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # that there are threads is what is tested
            child = os.fork()
        if child == 0:
            os._exit(_in_the_child(runtime))
        _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 0
    runtime.run(resting, None)


def _in_the_child(runtime: ThreadRuntime) -> int:
    """Nothing of the parent's is under way here, and a heartbeat of our own beats."""
    if not runtime.shut_down(0.0):
        return 1
    beaten = threading.Event()

    def renew() -> Flow[int]:
        beaten.set()
        yield Transaction("renew", Mode.SINGLE, lambda: saying(None))
        return 1

    with beating(runtime, renew):
        return 0 if beaten.wait(PATIENCE) else 2


def until(condition: Callable[[], object]) -> None:
    """Wait for what nobody announces."""
    pause = threading.Event()
    for _ in range(int(PATIENCE / 0.002)):
        if condition():
            return
        pause.wait(0.002)
    raise AssertionError("it never came")
