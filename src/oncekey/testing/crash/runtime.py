"""The runtimes of the proof at every effect: those that ship, with a crasher beside each effect and each statement.

`MortalThreads` and `MortalLoop` perform effects as `ThreadRuntime` and `AsyncRuntime` do, with a point before and after
each (`before:effect-Begin:1`), and one for each statement inside (`after:commit_new:1`, `before:commit:1`). At a point
the crasher kills, interrupts or loses a reply. A process that dies is not told: its frame is kept where it stands, no
`finally` runs, and its connections are ended as a server ends those of a dead client.

Time stands still here. Heartbeats do not beat, nobody sleeps, and errands are run by whoever asks for that.
"""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final, TypeVar, cast

from oncekey.engine.effects import Beat, Begin, Commit, Drop, Keep, Later, Rollback, Sleep
from oncekey.flow import Mode, Transaction, adrive, drive
from oncekey.runtimes.aio import AsyncRuntime, Changed, Drain, shielded
from oncekey.runtimes.threads import ThreadRuntime
from oncekey.testing.crasher import COMMIT, Cut, Died, When, watched

if TYPE_CHECKING:
    from oncekey.engine.effects import Effect, Life
    from oncekey.engine.shell import AsyncEngine, Engine
    from oncekey.testing.crasher import Crasher

T = TypeVar("T")

_GRAVES: Final[list[object]] = []
"""Frames of dead processes: whoever closed them would run code that a dead process does not run."""


class Still:
    """A heartbeat in a world where no time passes."""

    lost = False

    def stop(self) -> None:
        """It has stopped already."""


def name_of(effect: Effect) -> str:
    """What an effect is called in points."""
    return effect.name if isinstance(effect, Transaction) else type(effect).__name__


class MortalThreads(ThreadRuntime):
    """Blocking effects, and an end at any of them."""

    def __init__(self, engine: Engine, crasher: Crasher, *, folds: bool = False) -> None:
        super().__init__(engine)
        self.crasher = crasher
        self.folds = folds
        """Whether statements travel with BEGIN and COMMIT where the driver can; then no point is between the two."""
        self.open: list[Any] = []
        self.errands: list[Later] = []

    def live(self, flow: Life[T]) -> T | None:
        """Perform a flow; None if the process died of it. What it was told up to then is all that it is ever told."""
        try:
            effect = next(flow)
            while True:
                try:
                    result = self.perform(effect)
                except Exception as error:  # noqa: BLE001  (a flow is told of everything but its death)
                    effect = flow.throw(error)
                else:
                    effect = flow.send(result)
        except StopIteration as stop:
            return cast("T", stop.value)
        except Died:
            _GRAVES.append(flow)
            for tx in self.open:
                tx.rollback()  # the server's doing
            self.open.clear()
            return None

    def live_on(self, flow: Life[T]) -> T | None:
        """Perform a flow as the runtime that ships does; None if it was interrupted: then nobody hears its answer."""
        try:
            return cast("T", self.run(flow))
        except Cut:
            return None

    def run_errands(self) -> None:
        """What was left for later, now."""
        while self.errands:
            drive(self.errands.pop(0).flow(), self.engine.driver.run)

    def perform(self, effect: Effect) -> Any:  # noqa: ANN401  (what the effect promises)
        """Perform one effect between its two points."""
        name = f"effect-{name_of(effect)}"
        self.crasher.reach(When.BEFORE, name)
        result = self._performed(effect)
        try:
            self.crasher.reach(When.AFTER, name)
        except (Exception, Cut):
            if isinstance(effect, Begin):
                self._end(result[0]).rollback()  # no flow was told of it
            raise
        return result

    def _performed(self, effect: Effect) -> Any:  # noqa: ANN401  (what the effect promises)
        match effect:
            case Transaction():
                return self._transacted(effect)
            case Begin() if self.folds:
                begun = self.begin(effect.first)
                self.open.append(begun[0])
                return begun
            case Commit() if self.folds:
                return self._folded(effect)
            case Begin(first=first):
                tx = self.engine.open()
                self.open.append(tx)
                try:
                    return tx, None if first is None else tx.step(watched(self.crasher, first))
                except (Exception, Cut):
                    self._end(tx).rollback()
                    raise
            case Commit():
                return self._committed(effect)
            case Rollback(tx=tx):
                return self._end(tx).rollback()
            case Sleep():
                return None
            case Beat():
                return Still()
            case Later():
                return self.errands.append(effect)
            case _:
                return super().perform(effect)

    def _transacted(self, effect: Transaction[T]) -> T:
        done = self.engine.driver.run(replace(effect, body=lambda: watched(self.crasher, effect.body())))
        if effect.mode is Mode.ATOMIC:
            self.crasher.reach(When.AFTER, f"{COMMIT}-{effect.name}")
        return done

    def _committed(self, effect: Commit) -> Keep | Drop:
        tx, last = effect.tx, effect.last
        ended: Keep | Drop = Keep() if last is None else tx.step(watched(self.crasher, last))
        if isinstance(ended, Drop):
            self._end(tx).rollback()
            return ended
        self.crasher.reach(When.BEFORE, COMMIT)
        self._end(tx).commit()
        self.crasher.reach(When.AFTER, COMMIT)
        return ended

    def _folded(self, effect: Commit) -> Keep | Drop:
        name = "commit_with" if effect.fold is not None and hasattr(effect.tx, "commit_with") else COMMIT
        self.crasher.reach(When.BEFORE, name)
        ended = self._commit(effect)
        self._end(effect.tx)
        self.crasher.reach(When.AFTER, name)
        return ended

    def _end(self, tx: Any) -> Any:  # noqa: ANN401  (the driver's own)
        if tx in self.open:
            self.open.remove(tx)
        return tx


class MortalLoop(AsyncRuntime):
    """Effects under asyncio, and a cancellation at any of them."""

    def __init__(self, engine: AsyncEngine, crasher: Crasher) -> None:
        super().__init__(engine, Drain())
        self.crasher = crasher
        self.errands: list[Later] = []
        self._real = self._transact
        self._transact = self._between

    async def live(self, flow: Life[T]) -> T | None:
        """Perform a flow; None if it was cancelled where nothing is to be said."""
        self.crasher.task = asyncio.current_task()
        try:
            return cast("T", await self.run(flow))
        except Changed as changed:
            return None if isinstance(changed.result, BaseException) else changed.result

    async def run_errands(self) -> None:
        """What was left for later, now."""
        while self.errands:
            await adrive(self.errands.pop(0).flow(), self._real)

    async def _between(self, transaction: Transaction[Any]) -> Any:  # noqa: ANN401  (what it returns)
        await self._reach(When.BEFORE, transaction)
        result = await self._real(transaction)
        await self._reach(When.AFTER, transaction)
        return result

    async def _reach(self, when: When, effect: Effect) -> None:
        self.crasher.reach(when, f"effect-{name_of(effect)}")
        await asyncio.sleep(0)  # a cancellation arrives here

    async def begin(self, effect: Begin) -> Any:  # noqa: ANN401  (what the effect promises)
        """Open a business transaction, between its two points."""
        return await self.perform(effect)

    async def commit(self, effect: Commit) -> Any:  # noqa: ANN401  (what the effect promises)
        """Commit one, between its two points."""
        return await self.perform(effect)

    async def perform(self, effect: Effect) -> Any:  # noqa: ANN401  (what the effect promises)
        """Perform one effect between its two points."""
        if isinstance(effect, Transaction):
            return await self._between(effect)
        await self._reach(When.BEFORE, effect)
        match effect:
            case Sleep():
                result: Any = None
            case Beat():
                result = Still()
            case Later():
                self.errands.append(effect)
                result = None
            case Begin():
                result = await super().begin(effect)
            case Commit():
                result = await super().commit(effect)
            case _:
                result = await super().perform(effect)
        try:
            await self._reach(When.AFTER, effect)
        except asyncio.CancelledError:
            if isinstance(effect, Begin):
                await shielded(result[0].rollback())  # no flow was told of it
            raise
        return result
