"""`op.phase`, `op.call` and `op.value` for a `def` handler, in its thread."""

from __future__ import annotations

import contextvars
import threading
import time
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any, TypeVar

from oncekey.core.errors import CommitAmbiguousError, Rejected, StoreError, StoreUnavailableError
from oncekey.core.memo import decode
from oncekey.core.model import EntryKind
from oncekey.core.policy import micros
from oncekey.engine import testimony
from oncekey.engine.parcels import checkpointing
from oncekey.flow import drive
from oncekey.frameworks.asgi.stepping import FIRST_PAUSE, LONGEST_PAUSE, WRITES

if TYPE_CHECKING:
    from collections.abc import Callable
    from datetime import timedelta

    from oncekey.core.model import Announcement, MemoEntry
    from oncekey.engine.parcels import Parcels
    from oncekey.engine.phases import Course
    from oncekey.engine.shell import Engine
    from oncekey.flow import Flow
    from oncekey.ports import OpenTransaction

T = TypeVar("T")


class SyncStepping:
    """The steps of one phased operation, blocking."""

    __slots__ = ("_course", "_engine", "_parcels")

    def __init__(self, engine: Engine, course: Course, parcels: Parcels) -> None:
        self._engine = engine
        self._course = course
        self._parcels = parcels

    def phase(self, name: str, fn: Callable[[Any], Any]) -> Any:  # noqa: ANN401  (what the phase returns)
        """One local transaction: the rows, the parcels and the recovery point commit together."""
        with self._course.taking(name, EntryKind.PHASE) as stored:
            if stored is not None:
                return decode(stored.result)
            self._parcels.take()  # what a phase that failed has left behind
            tx = self._engine.open()
            try:
                entry = self._in_transaction(tx, name, fn)
            finally:
                tx.rollback()  # what was committed is over
        return decode(entry.result)

    def call(
        self, name: str, fn: Callable[[str], Any], *, repeatable: bool | timedelta, given: object, result: object = None
    ) -> Any:  # noqa: ANN401  (what the call returns)
        """One outside call: announced, made, and its result written down; never inside a transaction (R131)."""
        course = self._course
        with course.taking(name, EntryKind.CALL) as stored:
            if stored is not None:
                return course.recalled(stored, result)
            call = course.announcement(name, repeatable=repeatable, given=given)
            since = course.clock()
            self._announce(call)
            try:
                course.in_time(since)
                entry = course.result(name, self._in_time(fn, call.downstream_key), final_no=False, declared=result)
            except Rejected as no:
                entry = course.result(name, no.value, final_no=True)
            except BaseException as error:
                if course.unsent(error):
                    self._withdraw()
                    if (told := course.not_made(name, error)) is not None:
                        raise told from error
                raise
            self._keep(entry)
        return course.recalled(entry, result)

    def value(self, name: str, fn: Callable[[], Any]) -> Any:  # noqa: ANN401  (what it returns)
        """What may differ from run to run, drawn once: the time, a random number, an id."""
        with self._course.taking(name, EntryKind.VALUE) as stored:
            if stored is not None:
                return decode(stored.result)
            entry = self._course.entry(name, EntryKind.VALUE, fn())
            self._course.remember(entry)
        return decode(entry.result)

    def _in_transaction(self, tx: OpenTransaction, name: str, fn: Callable[[Any], Any]) -> MemoEntry:
        course = self._course
        entry = course.entry(name, EntryKind.PHASE, fn(tx.connection))
        memo = course.with_entry(entry)
        snapshot = tx.step(checkpointing(self._engine.store, course, self._parcels, memo))
        if snapshot is None:
            raise course.lose()
        try:
            tx.commit()
        except CommitAmbiguousError:
            self._after_lost_commit(memo)
        course.written(memo, snapshot)
        return entry

    def _after_lost_commit(self, memo: tuple[MemoEntry, ...]) -> None:
        course = self._course
        phases = self._engine.store.phases
        done = self._run(phases.after_lost_commit(course.lease, memo, micros(course.policy.lease)))
        if done is None:
            raise course.lose()
        if not done:
            raise StoreUnavailableError("the phase was rolled back: its commit was not heard of")

    def _announce(self, call: Announcement) -> None:
        """Say it before it is done. Not knowing whether it was said, take it back: nothing was sent yet."""
        course = self._course
        try:
            flow = self._engine.store.phases.announce(course.lease, course.stored, course.script.memo, call)
            course.announced(self._run(flow))
        except CommitAmbiguousError:
            if call.sends == 1:
                self._withdraw()
            raise

    def _withdraw(self) -> None:
        course = self._course
        course.withdrawn(self._insist(lambda: self._engine.store.phases.withdraw(course.lease)))

    def _in_time(self, fn: Callable[[str], Any], key: str) -> Any:  # noqa: ANN401  (what the call returns)
        """The call in a thread of its own: a blocking call cannot be ended, but it need not be waited for (U1)."""
        answer: Future[Any] = Future()

        def make() -> None:
            try:
                answer.set_result(fn(key))
            except BaseException as error:  # noqa: BLE001  (whatever it is, the handler gets it)
                answer.set_exception(error)

        context = contextvars.copy_context()
        threading.Thread(target=context.run, args=(make,), name="oncekey-call", daemon=True).start()
        return answer.result(self._course.policy.call_timeout.total_seconds())

    def _keep(self, entry: MemoEntry) -> None:
        course, store = self._course, self._engine.store
        memo, span = course.with_entry(entry), micros(course.policy.lease)
        snapshot = self._insist(lambda: store.phases.result(course.lease, course.stored, memo, span))
        if snapshot is None:
            self._run(testimony.of_call(store, course.lease, course.seed, entry, course.policy))
            raise course.lose()
        course.written(memo, snapshot)

    def _insist(self, flow: Callable[[], Flow[T]]) -> T:
        pause = FIRST_PAUSE
        for _ in range(WRITES - 1):
            try:
                return self._run(flow())
            except StoreError:
                time.sleep(pause)
                pause = min(pause * 2, LONGEST_PAUSE)
        return self._run(flow())

    def _run(self, flow: Flow[T]) -> T:
        return drive(flow, self._engine.driver.run)
