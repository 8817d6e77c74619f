"""The asyncio runtime: performs the actions of a flow, and decides what a cancellation does to it.

asyncio may cancel a request's task at any `await`: the client disconnects, the server stops, or a time-out of the
application expires. The flow has to react according to its progress. So the runtime throws `Interrupted` into the flow
where it was waiting, once, and performs the actions that the flow still yields:

    request's task          task behind the shields (`shielded`)
    ──────────────          ────────────────────────────────────
    action ▶ await
    action ▶ await ◀─ CancelledError
        │
        └─ Interrupted ───▶ before the handler:  roll back, withdraw the claim, raise
                            in a settlement:     read whether a pending COMMIT succeeded, settle, return the response
        ┌─ result ◀────────
        ▼
    Changed(result, cancelled): the caller sends the response if there is one, then raises the CancelledError

* The rest of the flow runs in a separate task, because every further `await` of the request's task may be cancelled
  again. It needs two shields: `asyncio.shield` against `task.cancel()`, and a shielded scope against anyio's.
* The request's task waits for that task. So its connection and its place in the count of operations (`RunningWork`) are
  released only when the flow has ended.
* A flow that stopped at `Invoke` is not affected: the adapter's handler is cancelled, not the flow, and the adapter
  resumes the flow with the corresponding decision.

The flows never see a `CancelledError`. Adapters and drivers clean up after their own `await`s only.

Retries are read together (`Recaller`). Replaying a response takes one short read, and under load most of its cost is
the round trip to the store. So only a few reads run at a time. A retry that arrives meanwhile waits for one of them to
end; then one statement reads for all waiting retries. It is sent after all of them have arrived, so none reads a state
from before its arrival. This shared read is a separate task: if a retry is cancelled, the others still get their
responses. If the store fails, all of them get the error, and each is then processed from the beginning.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import logging
import sys
from contextvars import Context
from typing import TYPE_CHECKING, Any, Final, Generic, TypeVar, cast

from oncekey.core.errors import StoreError
from oncekey.core.flow import Body, Transaction, adrive
from oncekey.engine import actions

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Coroutine

    from oncekey.core.model import Glimpse, RecordId
    from oncekey.engine.shell import AsyncEngine
    from oncekey.ports.store import AsyncOpenTransaction, Recalls


T = TypeVar("T")
log = logging.getLogger("oncekey")

FIRST_PAUSE = 0.1
LONGEST_PAUSE = 5.0


class Changed(BaseException, Generic[T]):
    """Raised when a cancelled flow has ended; has its result, and the cancellation that the caller raises next."""

    def __init__(self, result: T | BaseException, cancelled: BaseException) -> None:
        super().__init__()
        self.result = result
        self.cancelled = cancelled


class AsyncRuntime:
    """Performs actions on the engine of one event loop."""

    def __init__(
        self,
        engine: AsyncEngine,
        running_work: RunningWork,
        open_blocking: Callable[[Body[Any] | None], Awaitable[tuple[actions.Tx, Any]]] | None = None,
    ) -> None:
        self.engine = engine
        self.running_work = running_work
        self._transact = engine.driver.run
        self._recaller: Recaller | None = None
        self.open_blocking = open_blocking
        """Opens the transaction of a `def` handler and runs its first statements; the handler writes in a thread."""

    async def run(self, flow: actions.Life[T], value: Any = None) -> T | actions.StoppedAtHandler:  # noqa: ANN401  (the action's result)
        """Perform the flow's actions to its end, or until it stops at `Invoke`. Raises `Changed` if cancelled."""
        send = flow.send
        try:
            action = send(value)
            while True:
                try:
                    # The most frequent actions are awaited here: each additional frame costs time on every round trip.
                    if type(action) is Transaction:
                        value = await self._transact(action)
                    elif type(action) is actions.Invoke:
                        return actions.STOPPED_AT_HANDLER
                    elif type(action) is actions.Recall:
                        value = await self.recall(action)
                    elif type(action) is actions.Begin:
                        value = await self.begin(action)
                    elif type(action) is actions.Commit:
                        value = await self.commit(action)
                    elif type(action) is actions.Aside:
                        value = await self.aside(action)
                    else:
                        value = await self.perform(action)
                except Exception as error:  # noqa: BLE001  (every error of an action is thrown into the flow)
                    action = flow.throw(error)
                except BaseException as cancelled:  # noqa: BLE001  (also what ends a process)
                    raise Changed(await shielded(self._finish_interrupted(flow)), cancelled) from None
                else:
                    action = send(value)
        except StopIteration as stop:
            return cast("T", stop.value)

    async def drive(self, flow: actions.Life[T]) -> T:
        """`run` for a flow that never stops at `Invoke`, and whose caller has nothing to do after a cancellation."""
        try:
            return cast("T", await self.run(flow))
        except Changed as changed:
            raise changed.cancelled from None

    async def finish(self, flow: actions.Life[T], value: Any) -> tuple[T, BaseException | None]:  # noqa: ANN401
        """`run` to the end; returns the cancellation with the result, because the caller first sends the response."""
        try:
            return cast("T", await self.run(flow, value)), None
        except Changed as changed:
            if isinstance(changed.result, BaseException):
                raise changed.cancelled from changed.result
            return changed.result, changed.cancelled

    async def _finish_interrupted(self, flow: actions.Life[T]) -> T | BaseException:
        """Perform what a flow does after `Interrupted`; no further cancellation arrives here.

        Errors are returned, so that asyncio does not report a task whose error was never retrieved.
        """
        try:
            action = flow.throw(actions.Interrupted())
            while True:
                try:
                    value = await (self._transact(action) if type(action) is Transaction else self.perform(action))
                except BaseException as error:  # noqa: BLE001
                    action = flow.throw(error)
                else:
                    action = flow.send(value)
        except StopIteration as stop:
            return cast("T", stop.value)
        except (actions.Interrupted, Exception) as error:  # noqa: BLE001
            return error

    async def perform(self, action: actions.Action) -> Any:  # noqa: ANN401, C901, PLR0912  (one line for each kind of action)
        """Perform one action. The runtime of a framework with sessions extends this."""
        match action:
            case actions.Begin():
                return await self.begin(action)
            case actions.Commit():
                return await self.commit(action)
            case actions.Rollback(wait=False) if hasattr(action.tx, "leave"):
                return action.tx.leave()
            case actions.Rollback(wait=False):
                return self.running_work.end_later(action.tx.rollback())
            case actions.Rollback():
                return await action.tx.rollback()
            case actions.Execute():
                return await action.tx.run(action.body)
            case actions.Flush():
                return await flush(action.tx)
            case actions.Call():
                return await self.call(action)
            case actions.Sleep():
                return await asyncio.sleep(action.seconds)
            case actions.Beat():
                return Heartbeat(self, action)
            case actions.Later():
                return self.running_work.settle_later(
                    lambda: adrive(action.flow(), self._transact), patience=action.patience
                )
            case actions.Aside():
                return await self.aside(action)
            case actions.Recall():
                return await self.recall(action)
            case actions.Consult(wait=False):
                return action.line.post(action.commands)
            case actions.Consult():
                return await action.line.ask(action.commands)
            case Transaction():
                return await self._transact(action)
            case actions.ReturnReaders() | actions.ReleaseConnections():
                return None
            case actions.Invoke():
                raise AssertionError("a flow that was interrupted does not stop at the handler")

    def recall(self, action: actions.Recall) -> Coroutine[Any, Any, Glimpse | None]:
        """Read a stored response, in one statement with other retries that arrive at the same time."""
        if self._recaller is None:
            self._recaller = Recaller(self.engine.store, self._transact)
        return self._recaller.recall(action.record_id)

    async def aside(self, action: actions.Aside) -> Any:  # noqa: ANN401  (what the flow returns)
        """Run a read while all connections are in use, unless one becomes free first: quick handlers end sooner."""
        if not action.blocking and await self.engine.wait_for_slot():
            action.flow.close()
            return None
        async with self.engine.aside:
            return await adrive(action.flow, self._transact)

    @staticmethod
    async def call(action: actions.Call) -> Any:  # noqa: ANN401  (what the application returns)
        """Call the application."""
        if action.limit is None:
            result = action.fn(*action.arguments)
            return await result if inspect.isawaitable(result) else result
        async with asyncio.timeout(action.limit):
            result = action.fn(*action.arguments)
            return await result if inspect.isawaitable(result) else result

    async def begin(self, action: actions.Begin) -> tuple[actions.Tx, Any]:
        """Open a business transaction."""
        first = action.first
        if action.blocking:
            assert self.open_blocking is not None
            return await self.open_blocking(first)
        if first is not None and self.engine.folds is not None:
            return await self.engine.folds.begin_with(first)
        tx: AsyncOpenTransaction = await self.engine.open()
        if first is None:
            return tx, None
        try:
            return tx, await tx.run(first)
        except BaseException:
            await shielded(tx.rollback())  # no flow has this transaction yet
            raise

    async def commit(self, action: actions.Commit) -> actions.Keep | actions.Drop:
        """Commit a business transaction, or roll it back."""
        tx, last, fold = action.tx, action.last, action.fold
        if fold is not None and hasattr(tx, "commit_with"):
            rows = await tx.commit_with(fold.statement)
            return actions.Drop() if rows is None else actions.Keep(fold.read(rows))
        ended: actions.Keep | actions.Drop = actions.Keep() if last is None else await tx.run(last)
        await (tx.commit() if type(ended) is actions.Keep else tx.rollback())
        return ended


async def flush(tx: actions.Tx) -> None:
    """Write a session's pending changes while the application can still handle an error."""
    if hasattr(tx, "flush"):
        await tx.flush()


async def shielded(work: Coroutine[Any, Any, T]) -> T:
    """Run `work` to its end through any number of cancellations; the caller re-raises its own.

    A task only survives `task.cancel()`, and an anyio scope only anyio's cancellation, so both are needed. That is too
    slow for every request, so it is used only after a cancellation.
    """
    task = asyncio.ensure_future(work)
    with _anyio_shield():
        while not task.done():
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.shield(task)
    return task.result()


def _anyio_shield() -> contextlib.AbstractContextManager[object]:
    # If anyio was never imported, none of its scopes can exist.
    anyio = sys.modules.get("anyio")
    return anyio.CancelScope(shield=True) if anyio is not None else contextlib.nullcontext()


class Heartbeat:
    """Renews a lease. A timer of the event loop, not a task: most requests end before its first beat."""

    __slots__ = ("_action", "_loop", "_runtime", "_stops_at", "_task", "_timer", "lost")

    def __init__(self, runtime: AsyncRuntime, action: actions.Beat) -> None:
        self._runtime = runtime
        self._action = action
        self._loop = asyncio.get_running_loop()
        self._stops_at = self._loop.time() + action.until
        self._task: asyncio.Task[None] | None = None
        self.lost = False
        self._timer: asyncio.TimerHandle | None = self._loop.call_later(action.every, self._beat)

    def stop(self) -> None:
        """Stop beating. A renewal in progress may finish; it can only renew a lease that is still ours."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _beat(self) -> None:
        if self._loop.time() < self._stops_at:
            self._task = self._loop.create_task(self._renew())

    async def _renew(self) -> None:
        wait = self._action.every
        try:
            until = await adrive(self._action.renew(), self._runtime.engine.driver.run)
        except StoreError as error:
            wait /= 3  # retry sooner: two more beats fit into the lease
            log.warning("oncekey: a lease could not be renewed: %s", error.reason)
        else:
            if until is None and self._timer is not None:  # after `stop` the record is settled, not lost
                self.lost = True
                log.warning("oncekey: a lease was lost while its handler was running")
                return
        if self._timer is not None:
            self._timer = self._loop.call_later(wait, self._beat)


class RunningWork:
    """Counts running operations, and retries background settlements: those that could not reach the store yet.

    An operation counts from its claim to its end: a server that stops cancels its handlers and does not wait, so
    their settlements may not have begun when `wait` is called.
    """

    def __init__(self) -> None:
        self._busy = 0
        self._idle: asyncio.Event | None = None  # created by `wait`: an application may have several loops
        self._later: set[asyncio.Task[None]] = set()

    def began(self) -> None:
        """Count an operation that has begun."""
        self._busy += 1

    def ended(self) -> None:
        """Stop counting an operation that has ended."""
        self._busy -= 1
        if self._busy == 0 and self._idle is not None:
            self._idle.set()

    def end_later(self, work: Coroutine[Any, Any, None]) -> None:
        """Run `work` to its end in the background, even if the request is cancelled; a shutdown waits for it."""
        task = asyncio.get_running_loop().create_task(work)
        self._later.add(task)
        task.add_done_callback(self._later.discard)

    def settle_later(self, work: Callable[[], Awaitable[object]], *, patience: float) -> None:
        """Retry `work` until the store replies, for at most `patience` seconds."""
        self.end_later(self._repeat(work, patience))

    async def wait(self, seconds: float) -> bool:
        """Wait at most `seconds` for operations and background settlements; return whether all have ended."""
        try:
            async with asyncio.timeout(seconds):
                while self._busy:
                    self._idle = asyncio.Event()
                    await self._idle.wait()
                while self._later:
                    await asyncio.wait(self._later)
        except TimeoutError:
            log.error("oncekey: stopped with %d settlements not written; their leases will expire", self.pending)
            for task in self._later:
                task.cancel()
            return False
        return True

    @property
    def pending(self) -> int:
        """The number of running operations and background settlements."""
        return self._busy + len(self._later)

    @staticmethod
    async def _repeat(work: Callable[[], Awaitable[object]], patience: float) -> None:
        pause, ends = FIRST_PAUSE, asyncio.get_running_loop().time() + patience
        while asyncio.get_running_loop().time() < ends:
            try:
                await work()
            except StoreError:
                await asyncio.sleep(pause)
                pause = min(pause * 2, LONGEST_PAUSE)
            except Exception as error:  # noqa: BLE001  (no caller would see it: logged here)
                log.error("oncekey: a settlement failed and is not retried: %s", type(error).__name__)
                return
            else:
                return
        log.error("oncekey: a settlement could not be written; its lease will expire")


AT_ONCE: Final = 2
"""How many reads run at a time: while the server executes one, the process decodes the rows of the other."""
MOST: Final = 32
"""How many keys one statement reads: their responses are in memory together, and each may be large."""


class Recaller:
    """Reads the responses of finished records, for all retries on one event loop."""

    __slots__ = ("_reading", "_records", "_run", "_tasks", "_waiting")

    def __init__(self, records: Recalls, run: Callable[[Transaction[Any]], Awaitable[Any]]) -> None:
        self._records = records
        self._run = run
        self._reading = 0
        self._waiting: list[tuple[RecordId, asyncio.Future[Glimpse | None]]] = []
        self._tasks: set[asyncio.Task[None]] = set()

    async def recall(self, record_id: RecordId) -> Glimpse | None:
        """The response of a key's record; None if the record is not completed, or cannot be read."""
        if self._reading >= AT_ONCE:
            answer: asyncio.Future[Glimpse | None] = asyncio.get_running_loop().create_future()
            self._waiting.append((record_id, answer))
            return await answer
        self._reading += 1
        try:
            return await adrive(self._records.recall(record_id), self._run)
        finally:
            self._read_on()

    def _read_on(self) -> None:
        """After a read has ended, begin the next one for the waiting retries."""
        left = [repeat for repeat in self._waiting if not repeat[1].done()]  # the others were cancelled
        waiting, self._waiting = left[:MOST], left[MOST:]
        if not waiting:
            self._reading -= 1
            return
        # The task serves several requests, so it belongs to no request's context or trace.
        task = asyncio.get_running_loop().create_task(self._read(waiting), context=Context())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _read(self, waiting: list[tuple[RecordId, asyncio.Future[Glimpse | None]]]) -> None:
        error: Exception | None = None
        found: dict[RecordId, Glimpse] = {}
        try:
            found = await adrive(self._records.recall_all(tuple([one for one, _ in waiting])), self._run)
        except Exception as raised:  # noqa: BLE001  (raised in each waiting task)
            error = raised
        except BaseException:
            for _, answer in waiting:  # an event loop that ends cancels its tasks, so also the waiting retries
                answer.cancel()
            raise
        finally:
            self._read_on()
        for record_id, answer in waiting:
            if answer.done():
                continue  # the retry was cancelled
            if error is None:
                answer.set_result(found.get(record_id))
            else:
                answer.set_exception(error)
