"""The runtime for threads: performs every effect by a blocking call in the thread that asks.

Nothing is cancelled here, but a thread may be interrupted: by Ctrl-C, by a server that ends a worker with `SystemExit`,
by a time-out of gevent. An exception in the middle of an effect that is no `Exception` counts as one interruption: the
runtime throws `Interrupted` into the flow, performs what the flow still does, and then raises the original. A second
one ends the flow.

A forked process has none of its parent's threads and none of their work: each runtime starts anew there.
"""

from __future__ import annotations

import contextvars
import logging
import os
import threading
import time
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any, Final, TypeVar, cast
from weakref import WeakSet

from oncekey.engine.effects import (
    RESTS,
    Aside,
    Beat,
    Begin,
    Call,
    Commit,
    Consult,
    Drop,
    Flush,
    Interrupted,
    Invoke,
    Keep,
    Later,
    Recall,
    ReleaseConnections,
    Rest,
    Rests,
    Rollback,
    Sleep,
    Step,
)
from oncekey.flow import Transaction, drive
from oncekey.runtimes.chores import Chores, Heartbeat, LaterSettlement

if TYPE_CHECKING:
    from collections.abc import Callable

    from oncekey.engine.effects import Effect, Life
    from oncekey.engine.shell import Engine
    from oncekey.flow import Flow, Steps

T = TypeVar("T")
log = logging.getLogger("oncekey")


class ThreadRuntime:
    """Performs effects on one blocking engine, in the calling thread."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.start_anew()
        _ALL.add(self)

    def start_anew(self) -> None:
        """Forget all running work: the threads and locks of a parent process are not ours."""
        self._aside = threading.Lock()
        self._chores = Chores()

    def run(self, flow: Life[T], value: Any = None) -> T | Rests:  # noqa: ANN401  (what the flow waits for)
        """Perform the flow's effects to its end, or until it stops at `Invoke`."""
        self._chores.began(flow)
        rests = False
        try:
            effect = flow.send(value)
            while True:
                try:
                    if type(effect) is Invoke:
                        rests = True
                        return RESTS
                    value = self.perform(effect)
                except Exception as error:  # noqa: BLE001  (every error of an effect is thrown into the flow)
                    effect = flow.throw(error)
                except BaseException:
                    self._rest(flow)
                    raise
                else:
                    effect = flow.send(value)
        except StopIteration as stop:
            return cast("T", stop.value)
        finally:
            if not rests:
                self._chores.ended(flow)

    def drive(self, flow: Life[T]) -> T:
        """`run` for a flow that never stops at `Invoke`."""
        return cast("T", self.run(flow))

    def instead(self, flow: Life[Any], other: Life[Any]) -> None:
        """Perform `other` instead of a stopped flow that will never be resumed, so that no stop waits for it."""
        try:
            self.run(other)
        finally:
            self._chores.ended(flow)

    def shut_down(self, seconds: float) -> bool:
        """Wait for errands and running operations, at most `seconds`; whether all have ended."""
        return self._chores.shut_down(seconds)

    def _rest(self, flow: Life[T]) -> None:
        """Perform what a flow does after its interruption. Its answer is not sent: the caller raises instead."""
        try:
            effect = flow.throw(Interrupted())
            while True:
                try:
                    value = self.perform(effect)
                except Exception as error:  # noqa: BLE001
                    effect = flow.throw(error)
                else:
                    effect = flow.send(value)
        except (StopIteration, Interrupted):
            return
        except Exception as error:  # noqa: BLE001  (the interruption goes first)
            log.warning("oncekey: an interrupted operation could not be brought to its end: %s", type(error).__name__)

    def perform(self, effect: Effect) -> Any:  # noqa: ANN401, C901, PLR0912  (one line for each kind of effect)
        """Perform one effect."""
        match effect:
            case Transaction():
                return self.engine.driver.run(effect)
            case Begin():
                return self.begin(effect.first)
            case Commit():
                return self._commit(effect)
            case Rollback():
                return effect.tx.rollback()
            case Step():
                return effect.tx.step(effect.steps)
            case Flush():
                flush: Callable[[], None] | None = getattr(effect.tx, "flush", None)
                return None if flush is None else flush()
            case Call():
                return _called(effect)
            case Sleep():
                return time.sleep(effect.seconds)
            case Beat():
                return Heartbeat(self._chores, self._transact, effect)
            case Later():
                return LaterSettlement(self._chores, self._transact, effect).begin()
            case Aside():
                with self._aside:
                    return self._transact(effect.flow)
            case Recall():
                return self._transact(self.engine.store.recall(effect.record_id))
            case Consult():
                return effect.line.ask_blocking(effect.commands)
            case Rest() | ReleaseConnections():
                return None
            case Invoke():
                raise AssertionError("a flow that was interrupted does not rest")

    def begin(self, first: Steps[Any] | None) -> tuple[Any, Any]:
        """Open a business transaction and run its first statements: the transaction, and their result."""
        begin_with = getattr(self.engine.driver, "begin_with", None)
        if first is not None and begin_with is not None:
            return cast("tuple[Any, Any]", begin_with(first))
        tx = self.engine.open()
        if first is None:
            return tx, None
        try:
            return tx, tx.step(first)
        except BaseException:
            tx.rollback()  # no flow knows this transaction yet
            raise

    @staticmethod
    def _commit(effect: Commit) -> Keep | Drop:
        tx, fold = effect.tx, effect.fold
        if fold is not None and hasattr(tx, "commit_with"):
            rows = tx.commit_with(fold.statement)
            return Drop() if rows is None else Keep(fold.read(rows))
        ended: Keep | Drop = Keep() if effect.last is None else tx.step(effect.last)
        (tx.commit if type(ended) is Keep else tx.rollback)()
        return ended

    def _transact(self, flow: Flow[T]) -> T:
        return drive(flow, self.engine.driver.run)


def _called(effect: Call) -> Any:  # noqa: ANN401  (what the application returns)
    """Call the application; with a limit in a thread of its own, because a blocking call can be left but not ended."""
    if effect.limit is None:
        return effect.fn(*effect.arguments)
    answer: Future[Any] = Future()

    def make() -> None:
        try:
            answer.set_result(effect.fn(*effect.arguments))
        except BaseException as error:  # noqa: BLE001  (whatever it is, the caller gets it)
            answer.set_exception(error)

    context = contextvars.copy_context()
    threading.Thread(target=context.run, args=(make,), name="oncekey-call", daemon=True).start()
    return answer.result(effect.limit)


_ALL: Final[WeakSet[ThreadRuntime]] = WeakSet()


def _forked() -> None:
    for runtime in _ALL:
        runtime.start_anew()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forked)
