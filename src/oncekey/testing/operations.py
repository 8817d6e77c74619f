"""Operations without a server, for unit tests: `await create_order(order, op=operation(connection=tx))`.

Steps work as on a server, with a store in memory: one at a time, each name once, results in their stored form. A test
can read afterwards what the handler called, emitted and deferred.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final, TypeVar, cast
from uuid import UUID

from oncekey.core.errors import CallUncertainError, ConfigurationError
from oncekey.core.flow import Body, Mode, Transaction, drive
from oncekey.core.memo import decode
from oncekey.core.model import Claim, Effects, HandedBack, Parcel, Proceed, RecordId, Recovery, Retryable
from oncekey.core.policy import Policy
from oncekey.databases.memory import AsyncMemoryDriver, MemoryDriver
from oncekey.engine import request
from oncekey.engine.operation import NO_OUTBOX, Conn, Operation
from oncekey.engine.phases import PhasedRun
from oncekey.engine.run import Parcels
from oncekey.engine.shell import AsyncEngine, Engine
from oncekey.engine.steps import Stepping
from oncekey.engine.sync_operation import SyncOperation
from oncekey.runtimes import boottime
from oncekey.runtimes.aio import AsyncRuntime, RunningWork
from oncekey.runtimes.threads import ThreadRuntime
from oncekey.stores.memory import MemoryStore
from oncekey.testing.claims import a_claim, again

if TYPE_CHECKING:
    from collections.abc import Callable
    from datetime import timedelta

    from oncekey.engine.actions import Life
    from oncekey.ports.store import Outbox

T = TypeVar("T")

KEY: Final = "test-key-0000000001"
SCOPE: Final = "test"
SEED: Final = bytes(32)
"""With the same seed `op.downstream_key` gives the same keys in every test; give another one for others."""

_INCARNATION: Final = UUID(int=1)
_POLICY: Final = Policy(max_attempts=1_000_000)
_RESUMED: Final = "resumed_by_a_test"
_OPEN: Final = "this operation cannot go on: the outcome of its call is unknown, and it is not repeated"


@dataclass(frozen=True, slots=True)
class Called:
    """One outside call that a handler made."""

    name: str
    downstream_key: str
    repeatable: bool | timedelta
    parameters: object


@dataclass(frozen=True, slots=True)
class Sent:
    """One parcel that a handler emitted or deferred."""

    topic: str
    payload: Any
    order_by: str | None = None


class _Driver(MemoryDriver):
    """The store in memory of one test, with transactions for its phases."""

    def __init__(self, connection: Any) -> None:  # noqa: ANN401  (the test's own)
        super().__init__()
        self.connection = connection

    def begin(self) -> _Opened:
        """A transaction that writes through the test's connection."""
        return _Opened(self)


class _Opened:
    """The transaction of a phase. The test decides whether its rows are kept; this class runs the last statement."""

    def __init__(self, driver: _Driver) -> None:
        self._driver = driver
        self.connection = driver.connection

    def run(self, body: Body[T]) -> T:
        """Write the recovery point."""
        return self._driver.run(Transaction("phase", Mode.ATOMIC, lambda: body))

    def commit(self) -> None:
        """Do nothing: the test commits its own connection."""

    def rollback(self) -> None:
        """Do nothing: the recovery point, which comes last, was not written."""


class _AsyncDriver(AsyncMemoryDriver):
    def __init__(self, driver: _Driver) -> None:
        super().__init__(driver)
        self._opens = driver

    async def begin(self) -> _AsyncOpened:
        return _AsyncOpened(self._opens.begin())


class _AsyncOpened:
    def __init__(self, inner: _Opened) -> None:
        self._inner = inner
        self.connection = inner.connection

    async def run(self, body: Body[T]) -> T:
        return self._inner.run(body)

    async def commit(self) -> None:
        self._inner.commit()

    async def rollback(self) -> None:
        self._inner.rollback()


class _Outbox:
    """Keeps the parcels of finished phases."""

    def __init__(self) -> None:
        self.parcels: tuple[Parcel, ...] = ()

    def putting(self, parcels: tuple[Parcel, ...]) -> Body[None]:
        """Write parcels as part of an open transaction."""
        self.parcels += parcels
        yield from ()


class _World:
    """The parts of one unit test's operation; the operations that resume it share its store."""

    def __init__(self, claim: Claim, connection: Any) -> None:  # noqa: ANN401  (the test's own)
        self.claim = claim
        self.driver = _Driver(connection)
        self.store = MemoryStore()
        self.engine = Engine(self.store, self.driver)

    def begin(self) -> PhasedRun:
        """Begin a run of the handler."""
        self.outbox = _Outbox()
        self.store.outbox = cast("Outbox", self.outbox)  # a unit test relays nothing
        self.claim = again(self.claim, incarnation=_INCARNATION)
        verdict = drive(request.begin(self.store, self.claim, _POLICY), self.driver.run)
        if not isinstance(verdict, Proceed):
            raise CallUncertainError(_OPEN)
        assert verdict.record is not None  # it claims first
        return PhasedRun.of(verdict.record, verdict.lease, _POLICY, verdict.now, boottime)

    def leave(self, phased_run: PhasedRun) -> None:
        """End a run without an answer."""
        begun = phased_run.progress().begun
        settlement = HandedBack(_RESUMED) if begun else Retryable(_RESUMED)
        drive(request.settle(self.store, phased_run.lease, settlement), self.driver.run)

    def drive(self, flow: Life[T]) -> T:
        """Perform a step of a `def` handler."""
        return ThreadRuntime(self.engine).drive(flow)

    async def adrive(self, flow: Life[T]) -> T:
        """Perform a step of an `async def` handler."""
        return await AsyncRuntime(AsyncEngine(self.store, _AsyncDriver(self.driver)), RunningWork()).drive(flow)


class _Steps(Stepping):
    """Steps that keep which calls the handler made."""

    __slots__ = ("calls",)

    def __init__(
        self, drive: Callable[[Life[Any]], Any], store: MemoryStore, phased_run: PhasedRun, parcels: Parcels
    ) -> None:
        super().__init__(drive, store, phased_run, parcels)
        self.calls: list[Called] = []

    def call(
        self,
        name: str,
        fn: Callable[[str], Any],
        *,
        repeatable: bool | timedelta,
        parameters: object,
        result: object = None,
    ) -> Any:  # noqa: ANN401  (what the call returns)
        """One outside call."""

        def noted(key: str) -> Any:  # noqa: ANN401
            self.calls.append(Called(name, key, repeatable, parameters))
            return fn(key)

        return super().call(name, noted, repeatable=repeatable, parameters=parameters, result=result)


class _Looked:
    """What a test may read from an operation afterwards."""

    _stepping: Any
    _parcels: Any
    _phased_run: Any

    def __init__(self, *, world: _World, **held: Any) -> None:  # noqa: ANN401  (what an operation is handed)
        super().__init__(**held)
        self._world = world
        self._outbox = world.outbox

    @property
    def steps(self) -> dict[str, Any]:
        """The results of all steps by their names, in order and in their stored form."""
        script = self._phased_run.script
        return {entry.name: decode(entry.result) for entry in script.memo if entry.name in script.asked}

    @property
    def calls(self) -> list[Called]:
        """The outside calls that the handler made, or tried to make."""
        calls: list[Called] = self._stepping.calls
        return calls

    @property
    def emitted(self) -> list[Sent]:
        """The messages that the handler emitted."""
        undone = self._phased_run.failed is not None  # what a phase that failed has emitted is gone with it
        loose = () if undone else self._parcels.emitted
        return [_sent(parcel) for parcel in (*self._outbox.parcels, *loose)]

    @property
    def deferred(self) -> Sent | None:
        """The call that the handler deferred to a worker, if any."""
        return _sent(self._parcels.deferred[0]) if self._parcels.deferred else None

    def _emits(self) -> None:
        # Without a step it is a handler with one transaction for everything.
        if self._phased_run.script.asked and not self._phased_run.in_phase:
            raise ConfigurationError(NO_OUTBOX)


class UnitOperation(_Looked, Operation[Conn]):
    """An operation for an `async def` handler that can be looked at."""

    def emit(self, topic: str, payload: object, *, order_by: str | None = None) -> None:
        """As `Operation.emit`; it is kept in `emitted`."""
        self._emits()
        self._parcels.emit(topic, payload, order_by, self._phased_run.step or "")

    def resumed(self) -> UnitOperation[Conn]:
        """The operation as the next run of the handler gets it: what was stored is not done again."""
        return UnitOperation(**_resumed(self))


class UnitSyncOperation(_Looked, SyncOperation[Conn]):
    """The same for a `def` handler."""

    def emit(self, topic: str, payload: object, *, order_by: str | None = None) -> None:
        """As `SyncOperation.emit`; it is kept in `emitted`."""
        self._emits()
        self._parcels.emit(topic, payload, order_by, self._phased_run.step or "")

    def resumed(self) -> UnitSyncOperation[Conn]:
        """The operation as the next run of the handler gets it: what was stored is not done again."""
        return UnitSyncOperation(**_resumed(self))


def operation(
    *,
    key: str | None = KEY,
    scope: str = SCOPE,
    attempt: int = 1,
    connection: Conn | None = None,
    seed: bytes = SEED,
) -> UnitOperation[Conn]:
    """An operation for an `async def` handler. It claims nothing, and stores nothing outside of memory.

    `connection` is the connection through which the handler and its phases write; the test decides whether their rows
    are kept.
    """
    return UnitOperation(**_made(key, scope, attempt, connection, seed, blocking=False))


def sync_operation(
    *,
    key: str | None = KEY,
    scope: str = SCOPE,
    attempt: int = 1,
    connection: Conn | None = None,
    seed: bytes = SEED,
) -> UnitSyncOperation[Conn]:
    """The same for a `def` handler."""
    return UnitSyncOperation(**_made(key, scope, attempt, connection, seed, blocking=True))


def _made(
    key: str | None, scope: str, attempt: int, connection: object, seed: bytes, *, blocking: bool
) -> dict[str, Any]:
    record_id = RecordId(scope, key or "")
    claim = replace(a_claim(), id=record_id, effects=Effects.PHASED, recovery=Recovery.RESUME, seed=seed)
    held = {"key": key, "scope": scope, "attempt": attempt, "seed": seed, "connection": connection}
    return _running(_World(claim, connection), held, blocking=blocking)


def _resumed(op: Any) -> dict[str, Any]:  # noqa: ANN401  (either kind of operation)
    world: _World = op._world  # noqa: SLF001
    world.leave(op._phased_run)  # noqa: SLF001
    held = {"key": op.key, "scope": op.scope, "attempt": op.attempt + 1, "seed": op._seed}  # noqa: SLF001
    held["connection"] = world.driver.connection
    return _running(world, held, blocking=isinstance(op, SyncOperation))


def _running(world: _World, held: dict[str, Any], *, blocking: bool) -> dict[str, Any]:
    phased_run = world.begin()
    parcels = Parcels(phased_run.lease, held["seed"])
    drive: Callable[[Life[Any]], Any] = world.drive if blocking else world.adrive
    stepping = _Steps(drive, world.store, phased_run, parcels)
    return {
        **held,
        "world": world,
        "parcels": parcels,
        "phased_run": phased_run,
        "deferring": True,
        "stepping": stepping,
    }


def _sent(parcel: Parcel) -> Sent:
    return Sent(parcel.topic, json.loads(parcel.payload), parcel.order_by)
