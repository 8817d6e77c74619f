"""A store under test: blocking methods over any driver, a clock that the test moves, and initial records.

Scenarios start with a record in each state that a request can cause, and try leases that do not match it.
"""

from __future__ import annotations

import asyncio
import inspect
import re
import threading
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias, TypeVar, cast

from oncekey.cells import Swap, Verb
from oncekey.core import model
from oncekey.core.errors import CommitAmbiguousError, StoreError
from oncekey.core.flow import Body, Flow, Mode, Statement, Transaction, drive, run_body
from oncekey.core.policy import Policy
from oncekey.engine import request
from oncekey.ports.store import AsyncDriver, AsyncShares, Driver, Shares, Store
from oncekey.stores.phases import MARGIN
from oncekey.stores.statements import Statements, execute
from oncekey.testing.claims import DEADLINE, LEASE, ManualClock, a_claim, again, answered

if TYPE_CHECKING:
    from oncekey.core.flow import Command

T = TypeVar("T")

Share: TypeAlias = "Callable[[Callable[[], Body[Any]], bool], Any]"
"""Runs statements in a business transaction, and commits it or not."""


Plant: TypeAlias = "Callable[[Sequence[Mapping[str, Any]]], object]"
"""Writes records into the store's tables, by the names of their columns."""


_LEFTOVERS = "diagnostic_rows"


class MakeStore(Protocol):
    """A store's class, or any function that creates one."""

    def __call__(self, *, clock: Callable[[], model.Instant] | None = None) -> Store:
        """A store whose timestamps come from `clock`, or from its own clock if there is none."""


class World:
    """One store behind one driver. Its methods may be called from many threads at once."""

    def __init__(
        self,
        make_store: MakeStore,
        run: Callable[[Transaction[Any]], Any],
        share: Share | None = None,
        plant: Plant | None = None,
        way: str = "blocking",
    ) -> None:
        self.way = way
        """`blocking` or `asyncio`: how the store's driver is used."""
        self.clock = ManualClock()
        self.store = make_store(clock=self.clock)
        self.unclocked = make_store()
        self._run = run
        self._share = share
        self._plant = plant
        self._lose: dict[str, int] = {}
        self._before: dict[str, Callable[[], object]] = {}
        self._between: Callable[[], object] | None = None

    def begin(self, claim: model.Claim, policy: Policy | None = None) -> model.Verdict:
        """Claim the key, as a request does."""
        return self.go(request.begin(self.store, claim, policy or Policy()))

    def owned(self, claim: model.Claim) -> model.Lease:
        """The lease that `begin` returns; fails if it returns none."""
        verdict = self.begin(claim)
        assert isinstance(verdict, model.Proceed), verdict
        return verdict.lease

    def settle(self, lease: model.Lease, settlement: model.Settlement) -> model.Settled:
        """Write the outcome of the operation."""
        return self.go(request.settle(self.store, lease, settlement))

    def renew(self, lease: model.Lease, span: model.Duration) -> model.Instant | None:
        """Renew the lease, as a heartbeat does."""
        return self.go(request.renew(self.store, lease, span))

    def find(self, record_id: model.RecordId) -> model.Snapshot:
        """Read the record, with the store's clock."""
        return self.go(self.store.find(record_id))

    def record(self, record_id: model.RecordId) -> model.Record:
        """The record; fails if there is none."""
        record = self.find(record_id).record
        assert record is not None, f"there is no record of {record_id}"
        return record

    def checkpoint(
        self,
        lease: model.Lease,
        seen: tuple[model.MemoEntry, ...],
        memo: tuple[model.MemoEntry, ...],
        span: model.Duration,
    ) -> model.Snapshot | None:
        """Finish a phase, in a business transaction if the driver shares one."""
        return self._shared("checkpoint", lambda: self.store.phases.checkpointing(lease, seen, memo, span), commit=True)

    def rolled_back(self, body: Callable[[], Body[object]]) -> None:
        """Run this in a business transaction that is then rolled back; do nothing if the driver shares none."""
        if self._share is not None:
            self._share(body, False)  # noqa: FBT003  (not committed)

    def plant(self, lines: Sequence[Mapping[str, Any]]) -> None:
        """Write these records, over any existing ones, whether or not a move would lead to them."""
        assert self._plant is not None, "the walk needs a way to plant records: blocking(..., plant=...)"
        self._plant(lines)

    def leftovers(self) -> Flow[Mapping[str, int]]:
        """The number of rows that violate each invariant, if the store has a statement that finds them."""
        statements = getattr(self.store, "_statements", None)
        if not isinstance(statements, Statements) or not statements.has(_LEFTOVERS):
            return {}

        def body() -> Body[Mapping[str, int]]:
            rows = yield statements.statement(_LEFTOVERS, {})
            return {row["name"]: row["records"] for row in rows}

        return (yield from execute(Transaction(_LEFTOVERS, Mode.READ, body)))

    def undone(self, tries: Sequence[tuple[Flow[T], Sequence[Mapping[str, Any]]]]) -> list[T]:
        """Run flows, each about some planted records, undo their writes, and return their results.

        If the driver shares a business transaction, it is rolled back; otherwise the records of each flow that found
        anything are planted again.
        """
        results: list[T] = []
        if self._share is None:
            for flow, planted in tries:
                result = self.go(flow)
                if result:
                    self.plant(planted)
                results.append(result)
            return results

        def body() -> Body[None]:
            for flow, _ in tries:
                result = yield from _within(flow)
                results.append(result)

        self._share(body, False)  # noqa: FBT003  (not committed)
        return results

    def advance(self, span: model.Duration) -> model.Instant:
        """Move the store's clock."""
        return self.clock.advance(span)

    def go(self, flow: Flow[T]) -> T:
        """Run any flow."""
        return drive(flow, self._once)

    def lose_reply(self, name: str, times: int = 1) -> None:
        """Commit the transactions of this name, and lose their replies (P7)."""
        self._lose[name] = times

    def before(self, name: str, action: Callable[[], object]) -> None:
        """Run an action just before the next transaction of this name, as another process would."""
        self._before[name] = action

    def between(self, action: Callable[[], object]) -> None:
        """Run an action just before the next write, after its transaction has read, as another process would.

        The transaction is split: each of its statements, and each call of a store of cells, runs in a separate one. So
        every write has to prove by itself that it is right, whatever was locked for it.
        """
        self._between = action

    def _shared(self, name: str, body: Callable[[], Body[T]], *, commit: bool) -> T:
        if self._share is None:
            return self.go(execute(Transaction(name, Mode.ATOMIC, body)))
        result: T = self._share(body, commit)
        if self._lose.get(name, 0) > 0:
            self._lose[name] -= 1
            raise CommitAmbiguousError("the reply was lost on purpose")
        return result

    def _once(self, transaction: Transaction[Any]) -> Any:  # noqa: ANN401  (whatever the transaction returns)
        action = self._before.pop(transaction.name, None)
        if action is not None:
            action()
        result = self._run(transaction) if self._between is None else self._parted(transaction)
        if self._lose.get(transaction.name, 0) > 0:
            self._lose[transaction.name] -= 1
            raise CommitAmbiguousError("the reply was lost on purpose")
        return result

    def _parted(self, transaction: Transaction[Any]) -> Any:  # noqa: ANN401  (whatever the transaction returns)
        """Run a transaction statement by statement, with the other writer before the first write."""

        def execute_one(statement: Statement) -> Any:  # noqa: ANN401  (rows, or the reply to a verb)
            def body() -> Body[Any]:
                return (yield statement)

            return self._run(Transaction(transaction.name, transaction.mode, body))

        def ask(verb: Verb) -> Any:  # noqa: ANN401  (the reply to it)
            def asking(**_params: Any) -> Any:  # noqa: ANN401
                return (yield verb)

            if isinstance(verb, Swap):
                self._interrupt()
            return execute_one(Statement(transaction.name, cast("Command", asking)))

        def step(statement: Statement) -> Any:  # noqa: ANN401  (rows)
            if inspect.isgeneratorfunction(statement.command):
                return run_body(statement.command(**statement.params), cast("Any", ask))
            if _writes(statement):
                self._interrupt()
            return execute_one(statement)

        return run_body(transaction.body(), step)

    def _interrupt(self) -> None:
        action, self._between = self._between, None
        if action is not None:
            action()


_WRITE = re.compile(r"(?<!FOR )\b(?:INSERT INTO|UPDATE|DELETE FROM)\b")
_READS = ("find", "hold", "recall", "parcels", "letters")


def _writes(statement: Statement) -> bool:
    """Whether it may write. Functions are not inspected: those that only read are listed by name."""
    if isinstance(statement.command, str):
        return _WRITE.search(statement.command) is not None
    return not statement.name.startswith(_READS)


def _within(flow: Flow[T]) -> Body[T]:
    """The statements of a flow, as one transaction."""
    try:
        transaction = next(flow)
        while True:
            try:
                result = yield from transaction.body()
            except StoreError as error:
                transaction = flow.throw(error)
            else:
                transaction = flow.send(result)
    except StopIteration as stop:
        return stop.value  # type: ignore[no-any-return]  # a generator's return value is untyped here


@contextmanager
def blocking(make_store: MakeStore, driver: Driver, *, plant: Plant | None = None) -> Iterator[World]:
    """The world of a blocking driver; the driver is closed at the end."""

    def share(body: Callable[[], Body[Any]], commit: bool) -> Any:  # noqa: ANN401, FBT001  (what the body returns)
        assert isinstance(driver, Shares)
        transaction = driver.begin()
        try:
            result = transaction.run(body())
        except BaseException:
            transaction.rollback()
            raise
        if commit:
            transaction.commit()
        else:
            transaction.rollback()
        return result

    try:
        yield World(make_store, driver.run, share if isinstance(driver, Shares) else None, plant)
    finally:
        driver.close()


@contextmanager
def under_asyncio(make_store: MakeStore, driver: AsyncDriver, *, plant: Plant | None = None) -> Iterator[World]:
    """The world of an asyncio driver, whose loop runs in a thread; the driver is closed at the end."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, name="contract-loop")
    thread.start()

    def run(transaction: Transaction[T]) -> T:
        return asyncio.run_coroutine_threadsafe(driver.run(transaction), loop).result()

    async def sharing(body: Callable[[], Body[Any]], commit: bool) -> Any:  # noqa: ANN401, FBT001
        assert isinstance(driver, AsyncShares)
        transaction = await driver.begin()
        try:
            result = await transaction.run(body())
        except BaseException:
            await transaction.rollback()
            raise
        await (transaction.commit() if commit else transaction.rollback())
        return result

    def share(body: Callable[[], Body[Any]], commit: bool) -> Any:  # noqa: ANN401, FBT001
        return asyncio.run_coroutine_threadsafe(sharing(body, commit), loop).result()

    try:
        yield World(make_store, run, share if isinstance(driver, AsyncShares) else None, plant, "asyncio")
        asyncio.run_coroutine_threadsafe(driver.close(), loop).result()
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


@dataclass(frozen=True, slots=True)
class Standing:
    """A record in a given state, with the claim and the lease of its owner."""

    claim: model.Claim
    lease: model.Lease
    state: model.State | None


SETTLEMENTS: Mapping[str, model.Settlement] = MappingProxyType(
    {
        "completed": answered(),
        "completed otherwise": answered(b"another answer", status=402),
        "retryable": model.Retryable("provider_refused"),
        "retryable otherwise": model.Retryable("another_error"),
        "doubtful": model.Doubtful("provider_timeout"),
        "doubtful otherwise": model.Doubtful("another_error"),
        "discarded": model.Discarded(),
    }
)

_INTO: Mapping[model.State | None, model.Settlement | None] = MappingProxyType(
    {
        model.State.IN_PROGRESS: None,
        model.State.COMPLETED: SETTLEMENTS["completed"],
        model.State.FAILED_RETRYABLE: SETTLEMENTS["retryable"],
        model.State.UNKNOWN: SETTLEMENTS["doubtful"],
        None: SETTLEMENTS["discarded"],
    }
)
STATES = tuple(_INTO)


def stand(world: World, state: model.State | None, **changes: Any) -> Standing:  # noqa: ANN401  (any field of a claim)
    """A fresh record in this state; for `None` the claim was withdrawn, so there is no record."""
    claim = a_claim(**changes)
    lease = world.owned(claim)
    settlement = _INTO[state]
    if settlement is not None:
        assert world.settle(lease, settlement).ours
    return Standing(claim, lease, state)


def forgeries(lease: model.Lease) -> Iterator[model.Lease]:
    """The lease with one thing wrong at a time (P1, F1)."""
    yield replace(lease, fence=lease.fence - 1)
    yield replace(lease, fence=lease.fence + 1)
    yield replace(lease, incarnation=uuid.uuid4())


ORDER = model.MemoEntry("order", model.EntryKind.PHASE, '{"id":7}')
CHARGE = model.MemoEntry("charge", model.EntryKind.CALL, '"ch_1 \\u0000 é"')
OTHER_CHARGE = replace(CHARGE, result='"ch_2"')
REQUEST = b"a request, sealed \x00\xff"
WINDOW = 60 * model.SECOND

CALL = model.Announcement(
    phase="charge",
    downstream_key="oncekey-7",
    digest="d1",
    sends=1,
    repeatable=None,
    send_window=5 * model.SECOND,
    call_timeout=30 * model.SECOND,
)
REPEATABLE = replace(CALL, repeatable=WINDOW)
BUSY = CALL.send_window + CALL.call_timeout + MARGIN


def begun(world: World, **changes: Any) -> tuple[model.Claim, model.Lease]:  # noqa: ANN401  (any field of a claim)
    """A phased record in progress, and its owner's lease."""
    claim = a_claim(
        **{"effects": model.Effects.PHASED, "recovery": model.Recovery.RESUME, "request": REQUEST, **changes}
    )
    return claim, world.owned(claim)


def announced(world: World, call: model.Announcement = CALL, **changes: Any) -> tuple[model.Claim, model.Lease]:  # noqa: ANN401
    """A phased record in progress, after one finished phase and with an announced call."""
    claim, lease = begun(world, **changes)
    assert world.checkpoint(lease, (), (ORDER,), LEASE) is not None
    assert world.go(world.store.phases.announce(lease, (ORDER,), (ORDER,), call)) is not None
    return claim, lease


def stolen(world: World, claim: model.Claim) -> model.Lease:
    """The lease of the next owner, after ours has expired."""
    world.advance(2 * LEASE + DEADLINE)
    return world.owned(again(claim))


def intent_of(record: model.Record) -> model.Intent:
    """The announced call of a record that has one."""
    assert record.intent is not None
    return record.intent
