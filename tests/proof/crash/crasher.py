"""The crasher: a driver that knows everything that is said by its name, and ends the process at any of it.

Nothing of it is in the code that it kills: it stands where a driver stands, and beside every call to the outside. The
places where it can strike are `Point`s, `after:announce:1` and the like; a run without a fault lists them all.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import TYPE_CHECKING, Any, Final, TypeVar, assert_never

from oncekey.core.errors import CommitAmbiguousError
from oncekey.core.flow import Mode

if TYPE_CHECKING:
    from oncekey.core.flow import Body, Rows, Statement, Transaction
    from oncekey.ports.store import AsyncOpenTransaction


T = TypeVar("T")

COMMIT: Final = "commit"
BUSINESS: Final = "business"
_SPEAKING: Final = frozenset({"execute", "executemany", "fetch", "fetchrow", "fetchval"})
_LOOKS: Final = frozenset({"lock", "find"})


class Died(BaseException):
    """The process is dead. Whoever still asks for something in it hears this, and nothing is done."""


class Cut(BaseException):
    """A thread is interrupted, as by Ctrl-C or by a server that ends it."""


class When(StrEnum):
    """On which side of something."""

    BEFORE = "before"
    AFTER = "after"


class Manner(StrEnum):
    """What happens at a point."""

    DIE = "die"
    """The process is gone: what was not committed never happened, and nothing is tidied up."""
    PAUSE = "pause"
    """It stands still while others live on, and then goes on as if nothing had been."""
    OVERTAKE = "overtake"
    """It stands still while somebody else takes its work over and dies of it; then it goes on, as a zombie."""
    INTERRUPT = "interrupt"
    """The request is cancelled, by its client or by a server that stops; what it still has to do is done."""
    LOSE = "lose"
    """The reply is lost: whoever spoke cannot know whether it was heard."""
    KILL = "kill"
    """`kill -9` of the real process, by itself."""
    STOP = "stop"
    """SIGSTOP of the real process, by itself; somebody else has to wake it up."""


_PAUSES: Final = frozenset({Manner.PAUSE, Manner.OVERTAKE})


@dataclass(frozen=True, slots=True)
class Point:
    """A place where a process can end: before or after the n-th time that something is said."""

    when: When
    what: str
    nth: int = 1

    def __str__(self) -> str:
        return f"{self.when}:{self.what}:{self.nth}"

    @classmethod
    def parse(cls, text: str) -> Point:
        """A point as it is written, `after:announce:1`; without a number it is the first."""
        when, _, rest = text.partition(":")
        what, _, nth = rest.partition(":")
        if not what or when not in tuple(When) or not (nth or "1").isdigit():
            raise ValueError(f"{text!r} is no point: write before:NAME:NUMBER or after:NAME:NUMBER")
        return cls(When(when), what, int(nth or 1))


@dataclass(frozen=True, slots=True)
class Fault:
    """What happens, and where."""

    point: Point
    manner: Manner


@dataclass(frozen=True, slots=True)
class Said:
    """One statement that was answered, with its place in the order of events."""

    at: int
    statement: Statement
    rows: Rows
    clock: int | None = None


class Crasher:
    """One process's fate. `ticks` is the order of events that it shares with its clients and its provider."""

    def __init__(
        self,
        *faults: Fault,
        ticks: Callable[[], int] = lambda: 0,
        meanwhile: Callable[[], Awaitable[None]] | None = None,
        clock: Statement | None = None,
    ) -> None:
        self.points: list[Point] = []
        self.pauses: list[Point] = []
        self.said: list[Said] = []
        self.dead = False
        self.struck = False
        self.ticks = ticks
        self.clock = clock
        self.task: asyncio.Task[Any] | None = None
        """Whom an interruption cancels; without it, it is raised in the thread that is at the point."""
        self._faults = faults
        self._meanwhile = meanwhile
        self._times: Counter[tuple[Manner | None, When, str]] = Counter()
        self._open: list[MortalTransaction] = []
        self._inner: list[Any] = []
        self._loop: asyncio.AbstractEventLoop | None = None
        self._death: asyncio.Event | None = None

    # What is wrapped

    def driver(self, inner: Any) -> MortalDriver:
        """The driver, mortal; it goes by its own name, by which applications tell whose connections they are given."""
        self._inner.append(inner)
        named: type[MortalDriver] = type(type(inner).__name__, (MortalDriver,), {})
        return named(self, inner)

    async def outside(self, name: str, call: Callable[[], Awaitable[T]]) -> T:
        """A call to the outside."""
        self.reach(When.BEFORE, name)
        await self.pause(When.BEFORE, name)
        made = await call()
        self.reach(When.AFTER, name)
        await self.pause(When.AFTER, name)
        return made

    # The points

    def reach(self, when: When, what: str) -> None:
        """Something is about to be said, or was."""
        self.alive()
        point = self._counted(None, when, what)
        self.points.append(point)
        for fault in self._faults:
            if fault.point == point and not self.struck:
                self._strike(fault.manner, point)

    async def pause(self, when: When, what: str) -> None:
        """A moment at which nothing is locked, so that others can go on while this process stands still."""
        self.alive()
        if any(tx.wrote for tx in self._open):
            return
        point = self._counted(Manner.PAUSE, when, what)
        self.pauses.append(point)
        for fault in self._faults:
            if fault.manner in _PAUSES and fault.point == point and not self.struck:
                self.struck = True
                assert self._meanwhile is not None
                await self._meanwhile()

    def alive(self) -> None:
        """Nothing is done in a dead process."""
        if self.dead:
            raise Died

    def note(self, statement: Statement, rows: Rows, clock: int | None) -> None:
        """A statement was answered."""
        self.said.append(Said(self.ticks(), statement, rows, clock))

    # The end

    async def until_death(self, life: Awaitable[None]) -> bool:
        """Live until the end of `life`, or until the fault; whether it died."""
        self._loop, self._death = asyncio.get_running_loop(), asyncio.Event()
        self._loop.set_exception_handler(_quietly)
        before = asyncio.all_tasks()
        living, dying = asyncio.ensure_future(life), asyncio.ensure_future(self._death.wait())
        await asyncio.wait({living, dying}, return_when=asyncio.FIRST_COMPLETED)
        if not self.dead:
            await _ended(asyncio.all_tasks() - before - {living, dying})
        if not self.dead:
            dying.cancel()
            living.result()
            return False
        # Tasks of a dead process do not run on; whatever they say while they are cancelled, the driver is dead.
        await _ended({living, dying} | (asyncio.all_tasks() - before), cancel=True)
        await self.bury()
        return True

    async def bury(self) -> None:
        """What a server does with the connections of a dead client: it rolls their transactions back."""
        for tx in [*self._open]:
            await tx.inner.rollback()
        for inner in self._inner:
            await inner.close()
        self._open.clear()
        self._inner.clear()

    @property
    def holds(self) -> bool:
        """Whether a business transaction is open."""
        return bool(self._open)

    def opened(self, tx: MortalTransaction) -> None:
        """A business transaction began."""
        self._open.append(tx)

    def ended(self, tx: MortalTransaction) -> None:
        """A business transaction is over."""
        if tx in self._open:
            self._open.remove(tx)

    def _counted(self, kind: Manner | None, when: When, what: str) -> Point:
        self._times[kind, when, what] += 1
        return Point(when, what, self._times[kind, when, what])

    def _strike(self, manner: Manner, point: Point) -> None:
        match manner:
            case Manner.DIE:
                self.struck = self.dead = True
                if self._loop is not None and self._death is not None:
                    self._loop.call_soon_threadsafe(self._death.set)
                raise Died(str(point))
            case Manner.LOSE:
                self.struck = True
                raise CommitAmbiguousError(f"the reply was lost at {point}")
            case Manner.INTERRUPT:
                self.struck = True
                if self.task is None:
                    raise Cut(str(point))
                # From whatever thread: it arrives when the task waits next.
                self.task.get_loop().call_soon_threadsafe(self.task.cancel)
            case Manner.KILL:
                os.kill(os.getpid(), signal.SIGKILL)
            case Manner.STOP:
                self.struck = True
                os.kill(os.getpid(), signal.SIGSTOP)
            case Manner.PAUSE | Manner.OVERTAKE:
                return
            case _:
                assert_never(manner)


class MortalDriver:
    """An asyncio driver that can be killed at everything it is told to say."""

    def __init__(self, crasher: Crasher, inner: Any) -> None:
        self._crasher = crasher
        self._inner = inner

    async def run(self, transaction: Transaction[T]) -> T:
        """Run one transaction, as far as it gets."""
        crasher = self._crasher
        await crasher.pause(When.BEFORE, transaction.name)
        mortal = replace(transaction, body=lambda: watched(crasher, transaction.body()))
        result: T = await self._inner.run(mortal)
        if transaction.mode is Mode.ATOMIC:
            crasher.reach(When.AFTER, f"{COMMIT}-{transaction.name}")
        await crasher.pause(When.AFTER, transaction.name)
        return result

    async def begin(self) -> MortalTransaction:
        """Open a business transaction."""
        self._crasher.alive()
        tx = MortalTransaction(self._crasher, await self._inner.begin())
        self._crasher.opened(tx)
        return tx

    async def close(self) -> None:
        """Give everything back; a dead process gives nothing back."""
        self._crasher.alive()
        await self._inner.close()


class MortalTransaction:
    """A business transaction that ends with its process."""

    def __init__(self, crasher: Crasher, inner: AsyncOpenTransaction) -> None:
        self.inner = inner
        self.wrote = False
        self._crasher = crasher
        self._connection = MortalConnection(crasher, self, inner.connection)

    @property
    def connection(self) -> Any:
        """What the handler gets."""
        return self._connection

    async def run(self, body: Body[T]) -> T:
        """Run statements inside it."""
        self._crasher.alive()
        result = await self.inner.run(watched(self._crasher, body, self))
        await self._crasher.pause(When.AFTER, "step")
        return result

    async def commit(self) -> None:
        """Commit, unless the process ends first or the word gets lost on its way."""
        try:
            self._crasher.reach(When.BEFORE, COMMIT)
        except CommitAmbiguousError:
            await self.inner.rollback()
            raise
        await self.inner.commit()
        self._crasher.ended(self)
        self._crasher.reach(When.AFTER, COMMIT)
        await self._crasher.pause(When.AFTER, COMMIT)

    async def rollback(self) -> None:
        """Undo everything; a dead process undoes nothing, its server does."""
        self._crasher.alive()
        self._crasher.ended(self)
        await self.inner.rollback()


class MortalConnection:
    """What a handler writes through."""

    def __init__(self, crasher: Crasher, tx: MortalTransaction, inner: Any) -> None:
        self._crasher = crasher
        self._tx = tx
        self._inner = inner

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._inner, name)
        if name not in _SPEAKING:
            return found

        async def say(*args: Any, **kwargs: Any) -> Any:
            self._crasher.reach(When.BEFORE, BUSINESS)
            await self._crasher.pause(When.BEFORE, BUSINESS)
            said = await found(*args, **kwargs)
            self._tx.wrote = True
            self._crasher.reach(When.AFTER, BUSINESS)
            return said

        return say


def watched(crasher: Crasher, steps: Body[T], tx: MortalTransaction | None = None) -> Body[T]:
    """A transaction's body with a point before and after each of its statements."""
    try:
        statement = next(steps)
        while True:
            crasher.reach(When.BEFORE, statement.name)
            clock = None
            if crasher.clock is not None:
                clock = int((yield crasher.clock)[0]["now"])
            rows = yield statement
            if tx is not None and statement.name not in _LOOKS:
                tx.wrote = True
            crasher.note(statement, rows, clock)
            crasher.reach(When.AFTER, statement.name)
            statement = steps.send(rows)
    except StopIteration as stop:
        return stop.value  # type: ignore[no-any-return]  # a generator's return value is untyped here
    finally:
        steps.close()


def _quietly(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    """A dead process's futures have nobody left to read them, which is no news."""
    if not isinstance(context.get("exception"), Died):
        loop.default_exception_handler(context)


async def _ended(tasks: set[asyncio.Task[Any]], *, cancel: bool = False) -> None:
    """Wait for tasks to end; what they raise is nobody's business any more."""
    if cancel:
        for task in tasks:
            task.cancel()
    if tasks:
        await asyncio.gather(*tasks, return_exceptions=True)
