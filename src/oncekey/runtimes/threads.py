"""The runtime for threads: performs every action by a blocking call in the calling thread.

Nothing is cancelled here, but a thread may be interrupted: by Ctrl-C, by a server that ends a worker with `SystemExit`,
or by a gevent time-out. A `BaseException` that is not an `Exception`, raised during an action, counts as an
interruption: the runtime throws `Interrupted` into the flow, performs the actions that the flow still yields, and then
re-raises the original. A second interruption ends the flow.

A forked process has none of its parent's threads and none of their work: each runtime is reset there.

A few threads of the process (`Chores`) send the heartbeats and retry background settlements until the store replies.
They start when there is a chore and end when none is left: an idle process has none, and no lease or background
settlement has a separate thread.
"""

from __future__ import annotations

import contextvars
import heapq
import logging
import os
import threading
import time
from concurrent.futures import Future
from itertools import count
from typing import TYPE_CHECKING, Any, Final, TypeVar, cast
from weakref import WeakSet

from oncekey.core.errors import StoreError
from oncekey.core.flow import Body, Flow, Transaction, drive
from oncekey.engine import actions

if TYPE_CHECKING:
    from collections.abc import Callable

    from oncekey.engine.shell import Engine


T = TypeVar("T")
log = logging.getLogger("oncekey")


class ThreadRuntime:
    """Performs actions on one blocking engine, in the calling thread."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.start_anew()
        _ALL.add(self)

    def start_anew(self) -> None:
        """Reset after a fork: running work, threads and locks belong to the parent process."""
        self._aside = threading.Lock()
        self._chores = Chores()

    def run(self, flow: actions.Life[T], value: Any = None) -> T | actions.StoppedAtHandler:  # noqa: ANN401  (the action's result)
        """Perform the flow's actions to its end, or until it stops at `Invoke`."""
        self._chores.began(flow)
        stopped = False
        try:
            action = flow.send(value)
            while True:
                try:
                    if type(action) is actions.Invoke:
                        stopped = True
                        return actions.STOPPED_AT_HANDLER
                    value = self.perform(action)
                except Exception as error:  # noqa: BLE001  (every error of an action is thrown into the flow)
                    action = flow.throw(error)
                except BaseException:
                    self._finish_interrupted(flow)
                    raise
                else:
                    action = flow.send(value)
        except StopIteration as stop:
            return cast("T", stop.value)
        finally:
            if not stopped:
                self._chores.ended(flow)

    def drive(self, flow: actions.Life[T]) -> T:
        """`run` for a flow that never stops at `Invoke`."""
        return cast("T", self.run(flow))

    def instead(self, flow: actions.Life[Any], other: actions.Life[Any]) -> None:
        """Perform `other` instead of a flow that will never be resumed, so that no shutdown waits for that flow."""
        try:
            self.run(other)
        finally:
            self._chores.ended(flow)

    def shut_down(self, seconds: float) -> bool:
        """Wait at most `seconds` for operations and background settlements; return whether all have ended."""
        return self._chores.shut_down(seconds)

    def _finish_interrupted(self, flow: actions.Life[T]) -> None:
        """Perform what a flow does after its interruption. Its response is not sent: the caller raises instead."""
        try:
            action = flow.throw(actions.Interrupted())
            while True:
                try:
                    value = self.perform(action)
                except Exception as error:  # noqa: BLE001
                    action = flow.throw(error)
                else:
                    action = flow.send(value)
        except (StopIteration, actions.Interrupted):
            return
        except Exception as error:  # noqa: BLE001  (the interruption takes precedence)
            log.warning("oncekey: an interrupted operation could not be finished: %s", type(error).__name__)

    def perform(self, action: actions.Action) -> Any:  # noqa: ANN401, C901, PLR0912  (one line for each kind of action)
        """Perform one action."""
        match action:
            case Transaction():
                return self.engine.driver.run(action)
            case actions.Begin():
                return self.begin(action.first)
            case actions.Commit():
                return self._commit(action)
            case actions.Rollback(wait=False) if hasattr(action.tx, "leave"):
                return action.tx.leave()
            case actions.Rollback():
                return action.tx.rollback()
            case actions.Execute():
                return action.tx.run(action.body)
            case actions.Flush():
                flush: Callable[[], None] | None = getattr(action.tx, "flush", None)
                return None if flush is None else flush()
            case actions.Call():
                return _called(action)
            case actions.Sleep():
                return time.sleep(action.seconds)
            case actions.Beat():
                return Heartbeat(self._chores, self._transact, action)
            case actions.Later():
                return LaterSettlement(self._chores, self._transact, action).begin()
            case actions.Aside():
                with self._aside:
                    return self._transact(action.flow)
            case actions.Recall():
                return self._transact(self.engine.store.recall(action.record_id))
            case actions.Consult():
                return action.line.ask_blocking(action.commands)
            case actions.ReturnReaders() | actions.ReleaseConnections():
                return None
            case actions.Invoke():
                raise AssertionError("a flow that was interrupted does not stop at the handler")

    def begin(self, first: Body[Any] | None) -> tuple[Any, Any]:
        """Open a business transaction and run its first statements; return the transaction and their result."""
        begin_with = getattr(self.engine.driver, "begin_with", None)
        if first is not None and begin_with is not None:
            return cast("tuple[Any, Any]", begin_with(first))
        tx = self.engine.open()
        if first is None:
            return tx, None
        try:
            return tx, tx.run(first)
        except BaseException:
            tx.rollback()  # no flow has this transaction yet
            raise

    @staticmethod
    def _commit(action: actions.Commit) -> actions.Keep | actions.Drop:
        tx, fold = action.tx, action.fold
        if fold is not None and hasattr(tx, "commit_with"):
            rows = tx.commit_with(fold.statement)
            return actions.Drop() if rows is None else actions.Keep(fold.read(rows))
        ended: actions.Keep | actions.Drop = actions.Keep() if action.last is None else tx.run(action.last)
        (tx.commit if type(ended) is actions.Keep else tx.rollback)()
        return ended

    def _transact(self, flow: Flow[T]) -> T:
        return drive(flow, self.engine.driver.run)


def _called(action: actions.Call) -> Any:  # noqa: ANN401  (what the application returns)
    """Call the application; with a time limit in a separate thread: a blocking call can be abandoned, but not ended."""
    if action.limit is None:
        return action.fn(*action.arguments)
    answer: Future[Any] = Future()

    def make() -> None:
        try:
            answer.set_result(action.fn(*action.arguments))
        except BaseException as error:  # noqa: BLE001  (raised to the caller)
            answer.set_exception(error)

    context = contextvars.copy_context()
    threading.Thread(target=context.run, args=(make,), name="oncekey-call", daemon=True).start()
    return answer.result(action.limit)


_ALL: Final[WeakSet[ThreadRuntime]] = WeakSet()


def _forked() -> None:
    for runtime in _ALL:
        runtime.start_anew()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forked)


THREADS: Final = 4
"""How many chores run at once, so that one that waits for the store does not delay the others."""
FIRST_PAUSE = 0.1
LONGEST_PAUSE = 5.0


class Chores:
    """Chores in order of their due times, the threads that run them, and the work that a shutdown waits for."""

    def __init__(self) -> None:
        lock = threading.Lock()
        self._added = threading.Condition(lock)
        self._done = threading.Condition(lock)
        self._due: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = count()
        self._threads = 0
        self._waiting = 0
        self._under_way: set[object] = set()

    def began(self, work: object) -> None:
        """Note that a run or a background settlement has begun, unless it was noted before."""
        with self._done:
            self._under_way.add(work)

    def ended(self, work: object) -> None:
        """Note that a run or a background settlement has ended."""
        with self._done:
            self._under_way.discard(work)
            if not self._under_way:
                self._done.notify_all()

    def shut_down(self, seconds: float) -> bool:
        """Wait at most `seconds` for all runs and background settlements; return whether they have ended."""
        with self._done:
            if self._done.wait_for(lambda: not self._under_way, seconds):
                return True
            left = len(self._under_way)
        log.error("oncekey: stopped with %d settlements not written; their leases will expire", left)
        return False

    def add(self, seconds: float, chore: Callable[[], None]) -> None:
        """Run a chore after `seconds`."""
        line = (time.monotonic() + seconds, next(self._numbers), chore)
        with self._added:
            heapq.heappush(self._due, line)
            if not self._waiting:
                self._call_for_one_more()
            elif self._due[0] is line:  # the waiting thread waits for a later chore
                self._added.notify()

    def _call_for_one_more(self) -> None:
        if self._threads < THREADS:
            self._threads += 1
            threading.Thread(target=self._work, name="oncekey-chores", daemon=True).start()

    def _work(self) -> None:
        while (chore := self._next()) is not None:
            try:
                chore()
            except Exception as error:  # noqa: BLE001  (no caller would see it: logged here)
                log.error("oncekey: a chore failed and is not retried: %s", type(error).__name__)

    def _next(self) -> Callable[[], None] | None:
        """The next chore, once it is due; None if none is left and this thread should end."""
        with self._added:
            self._waiting += 1
            while self._due and (wait := self._due[0][0] - time.monotonic()) > 0:
                self._added.wait(wait)
            self._waiting -= 1
            if not self._due:
                self._threads -= 1
                return None
            chore = heapq.heappop(self._due)[2]
            if self._due and not self._waiting:
                self._call_for_one_more()  # another thread takes the other chores while this one works
            return chore


class Heartbeat:
    """Renews a lease. A chore, not a thread: most requests end before its first beat."""

    __slots__ = ("_chores", "_every", "_renew", "_stops_at", "_transact", "lost")

    def __init__(self, chores: Chores, transact: Callable[[Flow[Any]], Any], action: actions.Beat) -> None:
        self.lost = False
        self._chores = chores
        self._transact = transact
        self._every = action.every
        self._renew: Callable[[], Flow[Any]] | None = action.renew
        self._stops_at = time.monotonic() + action.until
        chores.add(action.every, self._beat)

    def stop(self) -> None:
        """Stop beating, and drop the renewal, so that nothing of the request stays in memory until the next beat."""
        self._renew = None

    def _beat(self) -> None:
        renew, wait = self._renew, self._every
        if renew is None or time.monotonic() >= self._stops_at:
            return
        try:
            until = self._transact(renew())
        except StoreError as error:
            wait /= 3  # retry sooner: two more beats fit into the lease
            log.warning("oncekey: a lease could not be renewed: %s", error.reason)
        else:
            if until is None and self._renew is not None:  # after `stop` the record is settled, not lost
                self.lost = True
                log.warning("oncekey: a lease was lost while its handler was running")
                return
        self._chores.add(wait, self._beat)


class LaterSettlement:
    """A background settlement: one that could not reach the store yet. It occupies no thread between two attempts."""

    __slots__ = ("_chores", "_ends", "_flow", "_pause", "_transact")

    def __init__(self, chores: Chores, transact: Callable[[Flow[Any]], Any], action: actions.Later) -> None:
        self._chores = chores
        self._transact = transact
        self._flow = action.flow
        self._pause = FIRST_PAUSE
        self._ends = time.monotonic() + action.patience

    def begin(self) -> None:
        """Begin to retry; a shutdown waits for it from now on."""
        self._chores.began(self)
        self._chores.add(0, self._try)

    def _try(self) -> None:
        try:
            self._transact(self._flow())
        except StoreError:
            pause, self._pause = self._pause, min(self._pause * 2, LONGEST_PAUSE)
            if time.monotonic() + pause < self._ends:
                self._chores.add(pause, self._try)
                return
            log.error("oncekey: a settlement could not be written; its lease will expire")
        except Exception as error:  # noqa: BLE001  (no caller would see it: logged here)
            log.error("oncekey: a settlement failed and is not retried: %s", type(error).__name__)
        self._chores.ended(self)
