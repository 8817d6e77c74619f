"""Operations without a server, for unit tests: `await create_order(order, op=operation(connection=tx))`.

Steps run as they would with a store: one at a time, each name once, results in their stored form. What was called,
emitted and deferred is there to be looked at.
"""

from __future__ import annotations

import inspect
import json
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final
from uuid import UUID

from oncekey.boottime import boottime
from oncekey.core.errors import ConfigurationError, NotExecuted, Rejected
from oncekey.core.memo import Script, decode, digest_of
from oncekey.core.model import Effects, EntryKind, Intent, Lease, MemoEntry, Parcel, RecordId
from oncekey.core.policy import Policy
from oncekey.core.seed import downstream_key
from oncekey.engine.parcels import Parcels
from oncekey.engine.phases import Course
from oncekey.frameworks.asgi.operation import NO_OUTBOX, Conn, Operation, SyncOperation

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from datetime import timedelta

KEY: Final = "test-key-0000000001"
SCOPE: Final = "test"
SEED: Final = bytes(32)
"""With the same seed `op.downstream_key` gives the same keys in every test; give another one for others."""

_INCARNATION: Final = UUID(int=1)


@dataclass(frozen=True, slots=True)
class Called:
    """One outside call that a handler made."""

    name: str
    downstream_key: str
    repeatable: bool | timedelta
    given: object


@dataclass(frozen=True, slots=True)
class Sent:
    """One parcel that a handler emitted or deferred."""

    topic: str
    payload: Any
    order_by: str | None = None


@dataclass(slots=True)
class Notes:
    """What an operation did."""

    steps: dict[str, Any] = field(default_factory=dict)
    """The results of all steps by their names, in order."""
    calls: list[Called] = field(default_factory=list)


class _Steps:
    """What both kinds of steps share: a course over nothing but what the test says was done before."""

    def __init__(self, connection: Any, seed: bytes, parcels: Parcels, course: Course) -> None:  # noqa: ANN401
        self.connection = connection
        self.seed = seed
        self.parcels = parcels
        self.course = course
        self.notes = Notes()

    @contextmanager
    def emitting(self) -> Iterator[None]:
        """What a phase that failed has emitted is gone with it."""
        before = self.parcels.emitted
        try:
            yield
        except BaseException:
            self.parcels.emitted = before
            raise

    def announce(self, name: str, repeatable: bool | timedelta, given: object) -> str:  # noqa: FBT001
        """What a store would be told before the call is made: with it the call is open."""
        key = downstream_key(self.seed, name)
        self.notes.calls.append(Called(name, key, repeatable, given))
        digest = digest_of(given, self.course.policy.max_result_bytes)
        self.course.intent = Intent(name, key, digest, 1, 0, 0, None)
        return key

    def failed(self, name: str, error: BaseException) -> NotExecuted | None:
        """A call that was not made leaves nothing open; any other stays so. What is raised instead of the error."""
        if not self.course.unsent(error):
            return None
        self.course.intent = None
        self.course.failed, self.course.unsent_call = self.course.script.asked.pop(), True
        return self.course.not_made(name, error)

    def done(self, entry: MemoEntry, declared: Any = None) -> Any:  # noqa: ANN401  (whatever was returned)
        """Note a finished step, and give its stored form back, or raise it."""
        self.course.written(self.course.with_entry(entry), None)
        return self.again(entry, declared)

    def again(self, entry: MemoEntry, declared: Any = None) -> Any:  # noqa: ANN401  (whatever was stored)
        self.notes.steps[entry.name] = decode(entry.result)
        return self.course.recalled(entry, declared)


class _AsyncSteps(_Steps):
    async def phase(self, name: str, fn: Callable[[Any], Any]) -> Any:  # noqa: ANN401  (what the phase returns)
        with self.course.taking(name, EntryKind.PHASE) as stored, self.emitting():
            value = None if stored else await _awaited(fn(self.connection))
            entry = stored or self.course.entry(name, EntryKind.PHASE, value)
        return self.again(entry) if stored else self.done(entry)

    async def call(
        self, name: str, fn: Callable[[str], Any], *, repeatable: bool | timedelta, given: object, result: object = None
    ) -> Any:  # noqa: ANN401  (what the call returns)
        with self.course.taking(name, EntryKind.CALL) as stored:
            if stored is not None:
                return self.again(stored, result)
            key = self.announce(name, repeatable, given)
            try:
                entry = self.course.result(name, await _awaited(fn(key)), final_no=False, declared=result)
            except Rejected as no:
                entry = self.course.result(name, no.value, final_no=True)
            except BaseException as error:
                if (told := self.failed(name, error)) is not None:
                    raise told from error
                raise
        return self.done(entry, result)

    async def value(self, name: str, fn: Callable[[], Any]) -> Any:  # noqa: ANN401  (what it returns)
        with self.course.taking(name, EntryKind.VALUE) as stored:
            entry = stored or self.course.entry(name, EntryKind.VALUE, await _awaited(fn()))
        return self.again(entry) if stored else self.done(entry)


class _SyncSteps(_Steps):
    def phase(self, name: str, fn: Callable[[Any], Any]) -> Any:  # noqa: ANN401  (what the phase returns)
        with self.course.taking(name, EntryKind.PHASE) as stored, self.emitting():
            entry = stored or self.course.entry(name, EntryKind.PHASE, fn(self.connection))
        return self.again(entry) if stored else self.done(entry)

    def call(
        self, name: str, fn: Callable[[str], Any], *, repeatable: bool | timedelta, given: object, result: object = None
    ) -> Any:  # noqa: ANN401  (what the call returns)
        with self.course.taking(name, EntryKind.CALL) as stored:
            if stored is not None:
                return self.again(stored, result)
            key = self.announce(name, repeatable, given)
            try:
                entry = self.course.result(name, fn(key), final_no=False, declared=result)
            except Rejected as no:
                entry = self.course.result(name, no.value, final_no=True)
            except BaseException as error:
                if (told := self.failed(name, error)) is not None:
                    raise told from error
                raise
        return self.done(entry, result)

    def value(self, name: str, fn: Callable[[], Any]) -> Any:  # noqa: ANN401  (what it returns)
        with self.course.taking(name, EntryKind.VALUE) as stored:
            entry = stored or self.course.entry(name, EntryKind.VALUE, fn())
        return self.again(entry) if stored else self.done(entry)


class _Looked:
    """What a test may ask an operation afterwards."""

    _stepping: Any
    _parcels: Any
    _course: Any

    @property
    def steps(self) -> dict[str, Any]:
        """The results of all steps by their names, in order and in their stored form."""
        steps: dict[str, Any] = self._stepping.notes.steps
        return steps

    @property
    def calls(self) -> list[Called]:
        """The outside calls that were made, or tried."""
        calls: list[Called] = self._stepping.notes.calls
        return calls

    @property
    def emitted(self) -> list[Sent]:
        """The messages to others."""
        return [_sent(parcel) for parcel in self._parcels.emitted]

    @property
    def deferred(self) -> Sent | None:
        """What was left to a worker."""
        return _sent(self._parcels.deferred[0]) if self._parcels.deferred else None

    def _emits(self) -> None:
        # Without a step it is a handler that is handed one transaction for everything.
        if self._course.script.asked and not self._course.in_phase:
            raise ConfigurationError(NO_OUTBOX)


class UnitOperation(_Looked, Operation[Conn]):
    """An operation for an `async def` handler that can be looked at."""

    def emit(self, topic: str, payload: object, *, order_by: str | None = None) -> None:
        """As `Operation.emit`; it is kept in `emitted`."""
        self._emits()
        self._parcels.emit(topic, payload, order_by, self._course.step or "")

    def resumed(self) -> UnitOperation[Conn]:
        """The operation as the next run of the handler gets it: what was stored is not done again."""
        return UnitOperation(**_held(self, _AsyncSteps))


class UnitSyncOperation(_Looked, SyncOperation[Conn]):
    """The same for a `def` handler."""

    def emit(self, topic: str, payload: object, *, order_by: str | None = None) -> None:
        """As `SyncOperation.emit`; it is kept in `emitted`."""
        self._emits()
        self._parcels.emit(topic, payload, order_by, self._course.step or "")

    def resumed(self) -> UnitSyncOperation[Conn]:
        """The operation as the next run of the handler gets it: what was stored is not done again."""
        return UnitSyncOperation(**_held(self, _SyncSteps))


def operation(
    *,
    key: str | None = KEY,
    scope: str = SCOPE,
    attempt: int = 1,
    connection: Conn | None = None,
    seed: bytes = SEED,
) -> UnitOperation[Conn]:
    """What an `async def` handler is handed. Nothing is claimed and nothing is stored.

    `connection` is whatever the handler writes through; whether its rows are kept is the test's business. Phases are
    handed it, too.
    """
    return UnitOperation(**_made(_AsyncSteps, key, scope, attempt, connection, seed))


def sync_operation(
    *,
    key: str | None = KEY,
    scope: str = SCOPE,
    attempt: int = 1,
    connection: Conn | None = None,
    seed: bytes = SEED,
) -> UnitSyncOperation[Conn]:
    """The same for a `def` handler."""
    return UnitSyncOperation(**_made(_SyncSteps, key, scope, attempt, connection, seed))


def _held(op: Any, kind: type[_Steps]) -> dict[str, Any]:  # noqa: ANN401  (either kind of operation)
    memo = op._course.stored  # noqa: SLF001
    return _made(kind, op.key, op.scope, op.attempt + 1, op._connection, op._seed, memo)  # noqa: SLF001


def _made(  # noqa: PLR0917  (in the order of the functions above)
    kind: type[_Steps],
    key: str | None,
    scope: str,
    attempt: int,
    connection: object,
    seed: bytes,
    memo: tuple[MemoEntry, ...] = (),
) -> dict[str, Any]:
    lease = Lease(RecordId(scope, key or ""), _INCARNATION, attempt, attempt, Effects.PHASED, 0, 0, 0)
    parcels = Parcels(lease, seed)
    course = Course(lease, Policy(), seed, memo, None, exhausted=False, now=0, clock=boottime, script=Script(memo))
    return {
        "key": key,
        "scope": scope,
        "attempt": attempt,
        "connection": connection,
        "seed": seed,
        "parcels": parcels,
        "course": course,
        "deferring": True,
        "stepping": kind(connection, seed, parcels, course),
    }


def _sent(parcel: Parcel) -> Sent:
    return Sent(parcel.topic, json.loads(parcel.payload), parcel.order_by)


async def _awaited(result: Any) -> Any:  # noqa: ANN401  (a `def` or an `async def` may be given)
    return await result if inspect.isawaitable(result) else result
