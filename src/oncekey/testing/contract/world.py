"""A store under test: blocking verbs over whatever driver there is, and the hands of its clock."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from oncekey.core.errors import CommitAmbiguousError
from oncekey.core.model import Proceed
from oncekey.core.policy import Policy
from oncekey.engine import request
from oncekey.flow import drive
from oncekey.testing.clock import ManualClock

if TYPE_CHECKING:
    from oncekey.core.model import (
        Claim,
        Duration,
        Instant,
        Lease,
        Record,
        RecordId,
        Settled,
        Settlement,
        Snapshot,
        Verdict,
    )
    from oncekey.flow import Flow, Transaction
    from oncekey.ports import AsyncDriver, Driver, Store

T = TypeVar("T")


class MakeStore(Protocol):
    """A store's class, or whatever else makes one."""

    def __call__(self, *, clock: Callable[[], Instant] | None = None) -> Store:
        """A store whose instants come from `clock`, or from its own when there is none."""


class World:
    """One store behind one driver. Its verbs may be called from many threads at once."""

    def __init__(self, make_store: MakeStore, run: Callable[[Transaction[Any]], Any]) -> None:
        self.clock = ManualClock()
        self.store = make_store(clock=self.clock)
        self.unclocked = make_store()
        self._run = run
        self._lose: dict[str, int] = {}
        self._before: dict[str, Callable[[], object]] = {}

    def begin(self, claim: Claim, policy: Policy | None = None) -> Verdict:
        """Ask for the right to execute, as a request does."""
        return self.go(request.begin(self.store, claim, policy or Policy()))

    def owned(self, claim: Claim) -> Lease:
        """The lease that `begin` gives; it must."""
        verdict = self.begin(claim)
        assert isinstance(verdict, Proceed), verdict
        return verdict.lease

    def settle(self, lease: Lease, settlement: Settlement) -> Settled:
        """Write what became of the operation."""
        return self.go(request.settle(self.store, lease, settlement))

    def renew(self, lease: Lease, span: Duration) -> Instant | None:
        """The heartbeat."""
        return self.go(request.renew(self.store, lease, span))

    def find(self, record_id: RecordId) -> Snapshot:
        """Read."""
        return self.go(self.store.find(record_id))

    def record(self, record_id: RecordId) -> Record:
        """The record that is there; it must be."""
        record = self.find(record_id).record
        assert record is not None, f"there is no record of {record_id}"
        return record

    def advance(self, span: Duration) -> Instant:
        """Move the store's clock."""
        return self.clock.advance(span)

    def go(self, flow: Flow[T]) -> T:
        """Run any flow."""
        return drive(flow, self._once)

    def lose_reply(self, name: str, times: int = 1) -> None:
        """Let the transactions of this name happen, and lose what they answered (P7)."""
        self._lose[name] = times

    def before(self, name: str, action: Callable[[], object]) -> None:
        """Do this just before the next transaction of this name, as a stranger would."""
        self._before[name] = action

    def _once(self, transaction: Transaction[Any]) -> Any:  # noqa: ANN401  (whatever the transaction returns)
        action = self._before.pop(transaction.name, None)
        if action is not None:
            action()
        result = self._run(transaction)
        if self._lose.get(transaction.name, 0) > 0:
            self._lose[transaction.name] -= 1
            raise CommitAmbiguousError("the reply was lost on purpose")
        return result


@contextmanager
def blocking(make_store: MakeStore, driver: Driver) -> Iterator[World]:
    """The world of a blocking driver; the driver is closed at the end."""
    try:
        yield World(make_store, driver.run)
    finally:
        driver.close()


@contextmanager
def under_asyncio(make_store: MakeStore, driver: AsyncDriver) -> Iterator[World]:
    """The world of an asyncio driver, whose loop runs in a thread; the driver is closed at the end."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, name="contract-loop")
    thread.start()

    def run(transaction: Transaction[T]) -> T:
        return asyncio.run_coroutine_threadsafe(driver.run(transaction), loop).result()

    try:
        yield World(make_store, run)
        asyncio.run_coroutine_threadsafe(driver.close(), loop).result()
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()
