"""Steps that are interrupted before and after every action, on real stores: by a signal in a thread, by a cancellation.

The clock stands still, so nothing is helped by a lease that runs out: whoever goes on goes on at once.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from itertools import count
from typing import Any

import pytest

from harness import flows
from harness.interrupting import InterruptedLoop, InterruptedThreads, Signal, Trial
from oncekey.core.endings import Ending, decide
from oncekey.core.errors import CommitAmbiguousError, NotExecutedError, RejectedError, StoreUnavailableError
from oncekey.core.model import Effects, Lease, Proceed, Record, Recovery, Refuse
from oncekey.core.policy import Policy
from oncekey.engine import steps
from oncekey.engine.actions import Life
from oncekey.engine.phases import PhasedRun
from oncekey.engine.run import Parcels
from oncekey.engine.shell import AsyncEngine, Engine
from oncekey.runtimes import boottime
from oncekey.testing.claims import a_claim, again
from oncekey.wire import aconnect, connect
from phased.bank import Bank

POLICY = Policy(max_attempts=100)


class Handler:
    """A handler in its own flow: what it does with its steps is the test's script."""

    def __init__(self, place: Place, record: Record, lease: Lease, now: int, store: Any) -> None:
        self.place = place
        self.store = store
        self.phased_run = PhasedRun.of(record, lease, POLICY, now, boottime)
        self.parcels = Parcels(lease, record.seed)

    def phase(self, name: str, *, fails: Exception | None = None) -> Life[Any]:
        bank = self.place.bank

        async def write(connection: Any) -> Any:
            await bank.write(connection, name)
            return self._left(name, fails)

        def write_blocking(connection: Any) -> Any:
            bank.write_blocking(connection, name)
            return self._left(name, fails)

        fn = write_blocking if bank.blocking else write
        return steps.phase(self.store, self.phased_run, self.parcels, name, fn)

    def _left(self, name: str, fails: Exception | None) -> str:
        self.parcels.emit("done", {"phase": name}, None, name)
        if fails is not None:
            raise fails
        return f"{name} is done"

    def call(self, name: str = "charge") -> Life[Any]:
        charge = self.place.bank.provider.charge
        return steps.call(self.store, self.phased_run, name, charge, repeatable=False, parameters=None)

    def value(self, name: str) -> Life[Any]:
        return steps.value(self.phased_run, name, lambda: 7)


Script = Callable[[Handler], Life[Any]]


def paying(handler: Handler) -> Life[Any]:
    """Order, draw, charge, mark as paid."""
    order = yield from handler.phase("order")
    drawn = yield from handler.value("drawn")
    charge = yield from handler.call()
    paid = yield from handler.phase("paid")
    return [order, drawn, charge["amount"], paid]


def stumbling(handler: Handler) -> Life[Any]:
    """A phase that fails and is tried again, a call that is not made at first."""
    first = handler.place.once("a phase failed")
    try:
        order = yield from handler.phase("order", fails=ValueError() if first else None)
    except ValueError:
        order = yield from handler.phase("order")
    if handler.place.once("nothing was sent"):
        handler.place.bank.provider.faults.append((NotExecutedError(),))
    try:
        charge = yield from handler.call()
    except NotExecutedError:
        charge = yield from handler.call()
    paid = yield from handler.phase("paid")
    return [order, charge["amount"], paid]


def declined(handler: Handler) -> Life[Any]:
    """The provider's final no is a result, too."""
    order = yield from handler.phase("order")
    handler.place.bank.provider.faults.append(RejectedError("no"))
    try:
        yield from handler.call()
    except RejectedError as no:
        handler.place.bank.provider.faults.clear()
        paid = yield from handler.phase("paid")
        return [order, no.value, paid]
    raise AssertionError("the provider says no")


class Place:
    """A bank without a server: handlers are run, interrupted, settled and gone on with."""

    def __init__(self, bank: Bank, engine: Engine, asynchronous: AsyncEngine) -> None:
        self.bank = bank
        self.engine = engine
        self.asynchronous = asynchronous
        self._said: set[str] = set()

    def once(self, what: str) -> bool:
        """Whether this is the first time that anybody asks."""
        first, _ = what not in self._said, self._said.add(what)
        return first

    def clear(self) -> None:
        self._said.clear()
        self.bank.provider.__init__()  # type: ignore[misc]
        for table in ("{record}", "{outbox}", "effect"):
            self.bank.execute(f"DELETE FROM {table}")

    async def run(self, script: Script, verdict: Proceed, trial: Trial) -> tuple[Handler, Any]:
        """One run of the handler; what it returned, or that it was interrupted."""
        store = self.engine.store if self.bank.blocking else self.asynchronous.store
        handler = Handler(self, verdict.record, verdict.lease, verdict.now, store)
        flow = script(handler)
        trial.blocking = self.bank.blocking
        try:
            if self.bank.blocking:
                result = InterruptedThreads(self.engine, trial).drive(flow)
            else:
                result = await InterruptedLoop(self.asynchronous, trial).drive(flow)
        except (Signal, asyncio.CancelledError) as interruption:
            result = interruption
        assert inspect.getgeneratorstate(flow) == inspect.GEN_CLOSED
        assert trial.open == [], trial.names
        return handler, result

    def leave(self, handler: Handler) -> None:
        """What a server does after an interrupted handler: what it hands back follows from what its course knows."""
        phased_run = handler.phased_run
        record = flows.find(self.engine, phased_run.lease.id).record
        assert record is not None
        assert phased_run.stored == record.memo
        assert (phased_run.intent is None) == (record.intent is None)
        ending = Ending(None, (), None, entered=True, raised=True, not_executed=False, progress=phased_run.progress())
        assert flows.settle(self.engine, phased_run.lease, decide(Effects.PHASED, POLICY, ending).settlement).ours


@asynccontextmanager
async def opened(bank: Bank) -> AsyncIterator[Place]:
    url = bank.database.url
    engine = connect(url.replace("+asyncpg", "+psycopg"), clock=bank.clock)
    asynchronous = aconnect(url, clock=bank.clock)
    try:
        await asynchronous.migrate()
        yield Place(bank, engine, asynchronous)
    finally:
        await asynchronous.close()
        engine.close()


def faults(name: str) -> dict[str, list[BaseException]]:
    return {
        "no fault": {},
        "a lost commit": {"Commit": [CommitAmbiguousError()]},
        "an outage at the result": {"result": [StoreUnavailableError(), StoreUnavailableError()]},
        "an outage at the withdrawal": {"withdraw": [StoreUnavailableError()]},
    }[name]


async def interrupted_everywhere(bank: Bank, script: Script, fault: str, when: str) -> None:
    # P4, P7, H1, F24: nothing stays open, nothing is done twice, and what was paid for is written down
    uncertain, interrupted = set(), set()
    async with opened(bank) as place:
        for at in count(1):
            place.clear()
            claim = a_claim(effects=Effects.PHASED, recovery=Recovery.RESUME)
            verdict = flows.begin(place.engine, claim, POLICY)
            assert isinstance(verdict, Proceed)
            trial = Trial(at, when, faults(fault))
            handler, result = await place.run(script, verdict, trial)
            if trial.interrupted is None:
                break
            assert isinstance(result, BaseException), trial.names
            interrupted.add(trial.interrupted)
            sent = len(bank.provider.keys)
            place.leave(handler)
            verdict = flows.begin(place.engine, again(claim), POLICY)
            if isinstance(verdict, Refuse):
                # Only who was interrupted while the call was being made does not know what became of it.
                uncertain.add(trial.interrupted)
                assert trial.names[-2:] == ["announce", "Call"]
                assert sent <= 1
                continue
            assert isinstance(verdict, Proceed), trial.names
            resumed, told = await place.run(script, verdict, Trial(0, ""))
            assert told[0] == "order is done", trial.names
            assert told[-1] == "paid is done"
            assert bank.effects == ["order", "paid"], trial.names
            assert len(bank.execute("SELECT 1 FROM {outbox}")) == 2, trial.names
            assert len(bank.provider.keys) == 1, trial.names
            assert [entry.name for entry in resumed.phased_run.stored if entry.kind.value != "value"] == STEPS
    assert uncertain == {"Call"}
    assert {"Begin", "Call", "Flush", "Commit", "announce", "result"} <= interrupted
    assert bank.effects == ["order", "paid"]


STEPS = ["order", "charge", "paid"]
CASES = [
    (paying, "a lost commit"),
    (paying, "an outage at the result"),
    (stumbling, "no fault"),
    (stumbling, "an outage at the withdrawal"),
    (declined, "no fault"),
]


@pytest.mark.parametrize("when", ["before", "after"])
async def test_a_step_may_be_interrupted_at_every_action(bank: Bank, when: str) -> None:
    await interrupted_everywhere(bank, paying, "no fault", when)


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize(("script", "fault"), CASES, ids=[f"{script.__name__}-{fault}" for script, fault in CASES])
async def test_a_failing_step_may_be_interrupted_at_every_action(
    small_bank: Bank, script: Script, fault: str, when: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(steps, "FIRST_PAUSE", 0.0)
    await interrupted_everywhere(small_bank, script, fault, when)
