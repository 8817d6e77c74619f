"""Operations without a server, for unit tests: `await create_order(order, op=operation(connection=tx))`.

Steps work as on a server, with a store in memory: one at a time, each name once, results in their stored form. The test
can then read the handler's calls, and the messages that it emitted and deferred.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from functools import wraps
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
"""The same seed gives the same downstream keys in every test; pass another seed for other keys."""

_INCARNATION: Final = UUID(int=1)
_POLICY: Final = Policy(max_attempts=1_000_000)
_RESUMED: Final = "resumed_by_a_test"
_OPEN: Final = "this operation cannot be resumed: the outcome of its call is unknown, and the call is not repeatable"


@dataclass(frozen=True, slots=True)
class MadeCall:
    """An external call that the handler made."""

    name: str
    downstream_key: str
    args: tuple[Any, ...]
    repeatable: bool | timedelta
    parameters: object


@dataclass(frozen=True, slots=True)
class SentMessage:
    """A message that the handler emitted, or a call that it deferred."""

    topic: str
    payload: Any
    order_by: str | None = None


class _Driver(MemoryDriver):
    """The in-memory store of one test, with transactions for its phases."""

    def __init__(self, connection: Any) -> None:  # noqa: ANN401  (the test's own)
        super().__init__()
        self.connection = connection

    def begin(self) -> _Opened:
        """A transaction that writes through the test's connection."""
        return _Opened(self)


class _Opened:
    """The transaction of a phase. The test commits or rolls back the rows; this class runs the last statement."""

    def __init__(self, driver: _Driver) -> None:
        self._driver = driver
        self.connection = driver.connection

    def run(self, body: Body[T]) -> T:
        """Write the recovery point."""
        return self._driver.run(Transaction("phase", Mode.ATOMIC, lambda: body))

    def commit(self) -> None:
        """No-op: the test commits its own connection."""

    def rollback(self) -> None:
        """No-op: the recovery point, the last statement, was not written."""


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
    """Stores the parcels of finished phases."""

    def __init__(self) -> None:
        self.parcels: tuple[Parcel, ...] = ()

    def putting(self, parcels: tuple[Parcel, ...]) -> Body[None]:
        """Write parcels in an open transaction."""
        self.parcels += parcels
        yield from ()


class _World:
    """The store and the driver of one unit test's operation, shared by the operations that resume it."""

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
        """End a run without a response."""
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
    """Steps that record the handler's calls."""

    __slots__ = ("calls",)

    def __init__(
        self, drive: Callable[[Life[Any]], Any], store: MemoryStore, phased_run: PhasedRun, parcels: Parcels
    ) -> None:
        super().__init__(drive, store, phased_run, parcels)
        self.calls: list[MadeCall] = []

    def call(
        self,
        name: str,
        fn: Callable[..., Any],
        args: tuple[Any, ...],
        *,
        repeatable: bool | timedelta,
        parameters: object,
        result: object = None,
    ) -> Any:  # noqa: ANN401  (what the call returns)
        """Make an external call, and record it."""

        @wraps(fn)
        def recorded(*args: Any, key: str) -> Any:  # noqa: ANN401
            self.calls.append(MadeCall(name, key, args, repeatable, parameters))
            return fn(*args, key=key)

        return super().call(name, recorded, args, repeatable=repeatable, parameters=parameters, result=result)


class _Inspection:
    """The properties by which a test inspects an operation."""

    _stepping: Any
    _parcels: Any
    _phased_run: Any

    def __init__(self, *, world: _World, **held: Any) -> None:  # noqa: ANN401  (the arguments of an operation)
        super().__init__(**held)
        self._world = world
        self._outbox = world.outbox

    @property
    def steps(self) -> dict[str, Any]:
        """The results of all steps by their names, in order and in their stored form."""
        script = self._phased_run.script
        return {entry.name: decode(entry.result) for entry in script.memo if entry.name in script.asked}

    @property
    def calls(self) -> list[MadeCall]:
        """The external calls that the handler made, or tried to make."""
        calls: list[MadeCall] = self._stepping.calls
        return calls

    @property
    def emitted(self) -> list[SentMessage]:
        """The messages that the handler emitted."""
        undone = self._phased_run.failed is not None  # the messages of a failed phase are rolled back
        loose = () if undone else self._parcels.emitted
        return [_message(parcel) for parcel in (*self._outbox.parcels, *loose)]

    @property
    def deferred(self) -> SentMessage | None:
        """The call that the handler deferred to a worker, if any."""
        return _message(self._parcels.deferred[0]) if self._parcels.deferred else None

    def _emits(self) -> None:
        # A handler without steps has one transaction for everything.
        if self._phased_run.script.asked and not self._phased_run.in_phase:
            raise ConfigurationError(NO_OUTBOX)


class UnitOperation(_Inspection, Operation[Conn]):
    """An operation for an `async def` handler that the test can inspect."""

    def emit(self, topic: str, payload: object, *, order_by: str | None = None) -> None:
        """As `Operation.emit`; the message is added to `emitted`."""
        self._emits()
        self._parcels.emit(topic, payload, order_by, self._phased_run.step or "")

    def resumed(self) -> UnitOperation[Conn]:
        """The operation for the next run of the handler: stored steps are not executed again."""
        return UnitOperation(**_resumed(self))


class UnitSyncOperation(_Inspection, SyncOperation[Conn]):
    """An operation for a `def` handler that the test can inspect."""

    def emit(self, topic: str, payload: object, *, order_by: str | None = None) -> None:
        """As `SyncOperation.emit`; the message is added to `emitted`."""
        self._emits()
        self._parcels.emit(topic, payload, order_by, self._phased_run.step or "")

    def resumed(self) -> UnitSyncOperation[Conn]:
        """The operation for the next run of the handler: stored steps are not executed again."""
        return UnitSyncOperation(**_resumed(self))


def operation(
    *,
    key: str | None = KEY,
    scope: str = SCOPE,
    attempt: int = 1,
    connection: Conn | None = None,
    seed: bytes = SEED,
) -> UnitOperation[Conn]:
    """An operation for an `async def` handler. Everything is stored in memory.

    The handler and its phases write through `connection`; the test commits or rolls it back.
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
    """An operation for a `def` handler; see `operation`."""
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


def _message(parcel: Parcel) -> SentMessage:
    return SentMessage(parcel.topic, json.loads(parcel.payload), parcel.order_by)
