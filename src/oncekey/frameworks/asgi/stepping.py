"""`op.phase`, `op.call` and `op.value` under asyncio: each writes what the course says, when it says so."""

from __future__ import annotations

import asyncio
import inspect
from typing import TYPE_CHECKING, Any, Final, TypeVar

from oncekey.core.errors import CommitAmbiguousError, Rejected, StoreError, StoreUnavailableError
from oncekey.core.memo import decode
from oncekey.core.model import EntryKind
from oncekey.core.policy import micros
from oncekey.engine import testimony
from oncekey.engine.parcels import checkpointing
from oncekey.flow import adrive
from oncekey.frameworks.asgi.lending import lend
from oncekey.runtimes.aio import flush, shielded

if TYPE_CHECKING:
    from collections.abc import Callable
    from datetime import timedelta

    from oncekey.core.model import Announcement, MemoEntry
    from oncekey.engine.parcels import Parcels
    from oncekey.engine.phases import Course
    from oncekey.engine.shell import AsyncEngine
    from oncekey.flow import Flow
    from oncekey.frameworks.asgi.lending import Borrower
    from oncekey.ports import AsyncOpenTransaction

T = TypeVar("T")

WRITES: Final = 8
"""How often the result of a call is written before the outage is given up to: it cannot be had a second time."""
FIRST_PAUSE: Final = 0.05
LONGEST_PAUSE: Final = 2.0


class Stepping:
    """The steps of one phased operation."""

    __slots__ = ("_course", "_engine", "_parcels", "_request")

    def __init__(self, request: Borrower, engine: AsyncEngine, course: Course, parcels: Parcels) -> None:
        self._request = request
        self._engine = engine
        self._course = course
        self._parcels = parcels

    async def phase(self, name: str, fn: Callable[[Any], Any]) -> Any:  # noqa: ANN401  (what the phase returns)
        """One local transaction: the rows, the parcels and the recovery point commit together."""
        with self._course.taking(name, EntryKind.PHASE) as stored:
            if stored is not None:
                return decode(stored.result)
            self._parcels.take()  # what a phase that failed has left behind
            await self._rest()
            tx = await self._engine.open()
            try:
                entry = await self._in_transaction(tx, name, fn)
            except BaseException:
                await shielded(tx.rollback())  # what was committed is over
                raise
        return decode(entry.result)

    async def call(
        self, name: str, fn: Callable[[str], Any], *, repeatable: bool | timedelta, given: object, result: object = None
    ) -> Any:  # noqa: ANN401  (what the call returns)
        """One outside call: announced, made, and its result written down; never inside a transaction (R131)."""
        course = self._course
        with course.taking(name, EntryKind.CALL) as stored:
            if stored is not None:
                return course.recalled(stored, result)
            call = course.announcement(name, repeatable=repeatable, given=given)
            await self._rest()
            since = course.clock()
            await self._announce(call)
            try:
                course.in_time(since)
                async with asyncio.timeout(course.policy.call_timeout.total_seconds()):
                    entry = course.result(
                        name, await _awaited(fn(call.downstream_key)), final_no=False, declared=result
                    )
            except Rejected as no:
                entry = course.result(name, no.value, final_no=True)
            except BaseException as error:
                if course.unsent(error):
                    await self._withdraw()
                    if (told := course.not_made(name, error)) is not None:
                        raise told from error
                raise
            await self._to_its_end(entry)
        return course.recalled(entry, result)

    async def value(self, name: str, fn: Callable[[], Any]) -> Any:  # noqa: ANN401  (what it returns)
        """What may differ from run to run, drawn once: the time, a random number, an id."""
        with self._course.taking(name, EntryKind.VALUE) as stored:
            if stored is not None:
                return decode(stored.result)
            entry = self._course.entry(name, EntryKind.VALUE, await _awaited(fn()))
            self._course.remember(entry)
        return decode(entry.result)

    async def _in_transaction(self, tx: AsyncOpenTransaction, name: str, fn: Callable[[Any], Any]) -> MemoEntry:
        with lend(self._request).phase(tx) as loan:
            value = await _awaited(fn(tx.connection))
            await flush(tx)
            loan.done()
            return await self._committed(tx, name, value)

    async def _committed(self, tx: AsyncOpenTransaction, name: str, value: object) -> MemoEntry:
        course = self._course
        entry = course.entry(name, EntryKind.PHASE, value)
        memo = course.with_entry(entry)
        snapshot = await tx.step(checkpointing(self._engine.store, course, self._parcels, memo))
        if snapshot is None:
            raise course.lose()
        try:
            await tx.commit()
        except CommitAmbiguousError:
            await self._after_lost_commit(memo)
        course.written(memo, snapshot)
        return entry

    async def _rest(self) -> None:
        """Nobody holds a connection to read through while it waits for another one, or for the outside."""
        if self._request.lent is not None:
            await self._request.lent.rest()

    async def _after_lost_commit(self, memo: tuple[MemoEntry, ...]) -> None:
        """A phase whose COMMIT got no reply: the record knows, once its row is free (P7)."""
        course = self._course
        phases = self._engine.store.phases
        done = await self._run(phases.after_lost_commit(course.lease, memo, micros(course.policy.lease)))
        if done is None:
            raise course.lose()
        if not done:
            raise StoreUnavailableError("the phase was rolled back: its commit was not heard of")

    async def _announce(self, call: Announcement) -> None:
        """Say it before it is done. Not knowing whether it was said, take it back: nothing was sent yet."""
        course = self._course
        try:
            flow = self._engine.store.phases.announce(course.lease, course.stored, course.script.memo, call)
            course.announced(await self._run(flow))
        except (CommitAmbiguousError, asyncio.CancelledError):
            if call.sends == 1:
                await shielded(self._withdraw())
            raise

    async def _withdraw(self) -> None:
        course = self._course
        course.withdrawn(await self._insist(lambda: self._engine.store.phases.withdraw(course.lease)))

    async def _to_its_end(self, entry: MemoEntry) -> None:
        """Write the result down, also if we are cancelled meanwhile: it was paid for."""
        try:
            await self._keep(entry)
        except asyncio.CancelledError:
            await shielded(self._keep(entry))
            raise

    async def _keep(self, entry: MemoEntry) -> None:
        course, store = self._course, self._engine.store
        memo, span = course.with_entry(entry), micros(course.policy.lease)
        snapshot = await self._insist(lambda: store.phases.result(course.lease, course.stored, memo, span))
        if snapshot is None:
            await self._run(testimony.of_call(store, course.lease, course.seed, entry, course.policy))
            raise course.lose()
        course.written(memo, snapshot)

    async def _insist(self, flow: Callable[[], Flow[T]]) -> T:
        """Ask a store that does not answer again, for some seconds: what is to be written cannot be had again."""
        pause = FIRST_PAUSE
        for _ in range(WRITES - 1):
            try:
                return await self._run(flow())
            except StoreError:
                await asyncio.sleep(pause)
                pause = min(pause * 2, LONGEST_PAUSE)
        return await self._run(flow())

    async def _run(self, flow: Flow[T]) -> T:
        return await adrive(flow, self._engine.driver.run)


async def _awaited(result: Any) -> Any:  # noqa: ANN401  (a `def` or an `async def` may be given)
    return await result if inspect.isawaitable(result) else result
