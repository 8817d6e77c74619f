"""Runtimes that are interrupted before or after one of the actions that they perform."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from oncekey.core.errors import CommitAmbiguousError
from oncekey.core.flow import Transaction
from oncekey.engine.actions import Action, Begin, Commit, Rollback
from oncekey.engine.shell import AsyncEngine, Engine
from oncekey.runtimes.aio import AsyncRuntime, RunningWork
from oncekey.runtimes.threads import ThreadRuntime


class Signal(BaseException):
    """What a server raises in the middle of a handler: `SystemExit`, a time-out of gevent, Ctrl-C."""


@dataclass
class Trial:
    """One run, and where it is interrupted."""

    at: int
    when: str
    faults: dict[str, list[BaseException]] = field(default_factory=dict)
    """By an action's name, what it meets the first times: a `CommitAmbiguousError` comes after it was done."""
    names: list[str] = field(default_factory=list)
    open: list[Any] = field(default_factory=list)
    interrupted: str | None = None
    blocking: bool = True

    def begins(self, action: Action) -> BaseException | None:
        """An action is about to be performed; what it meets."""
        name = action.name if isinstance(action, Transaction) else type(action).__name__
        self.names.append(name)
        self._interrupt("before")
        waiting = self.faults.get(name)
        return waiting.pop(0) if waiting else None

    def ended(self, action: Action, result: Any) -> None:
        """It was performed."""
        if isinstance(action, Begin):
            self.open.append(result[0])
        elif isinstance(action, Commit | Rollback) and action.tx in self.open:
            self.open.remove(action.tx)

    @staticmethod
    def keeps_from(fault: BaseException | None) -> bool:
        """Whether the action is not performed at all."""
        return fault is not None and not isinstance(fault, CommitAmbiguousError)

    def goes_on(self) -> None:
        """It is over, well or not."""
        self._interrupt("after")

    def _interrupt(self, when: str) -> None:
        if (len(self.names), when) == (self.at, self.when) and self.interrupted is None:
            self.interrupted = self.names[-1]
            raise Signal if self.blocking else asyncio.CancelledError


class InterruptedThreads(ThreadRuntime):
    def __init__(self, engine: Engine, trial: Trial) -> None:
        super().__init__(engine)
        self.trial = trial

    def perform(self, action: Action) -> Any:
        trial, fault = self.trial, self.trial.begins(action)
        try:
            result = None if trial.keeps_from(fault) else super().perform(action)
        except Exception as error:
            fault = error
        else:
            trial.ended(action, result)
        try:
            trial.goes_on()
        except BaseException:
            if isinstance(action, Begin):  # as a runtime promises: what no flow was told of is not left open
                trial.open.pop().rollback()
            raise
        if fault is not None:
            raise fault
        return result


class InterruptedLoop(AsyncRuntime):
    def __init__(self, engine: AsyncEngine, trial: Trial) -> None:
        super().__init__(engine, RunningWork())
        self.trial = trial
        self._transact = self.transact

    async def transact(self, transaction: Transaction[Any]) -> Any:
        return await self._watched(transaction, lambda: self.engine.driver.run(transaction))

    async def begin(self, action: Begin) -> Any:
        return await self._watched(action, lambda: super(InterruptedLoop, self).begin(action))

    async def commit(self, action: Commit) -> Any:
        return await self._watched(action, lambda: super(InterruptedLoop, self).commit(action))

    async def perform(self, action: Action) -> Any:
        if isinstance(action, Begin | Commit | Transaction):
            return await super().perform(action)  # each is watched on its own way
        return await self._watched(action, lambda: super(InterruptedLoop, self).perform(action))

    async def _watched(self, action: Action, perform: Callable[[], Any]) -> Any:
        trial, fault = self.trial, self.trial.begins(action)
        try:
            result = None if trial.keeps_from(fault) else await perform()
        except Exception as error:
            fault = error
        else:
            trial.ended(action, result)
        try:
            trial.goes_on()
        except BaseException:
            if isinstance(action, Begin):
                await trial.open.pop().rollback()
            raise
        if fault is not None:
            raise fault
        return result
