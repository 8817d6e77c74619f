"""The proof at every action: whole lives, killed or interrupted at each of them, then retried.

`MortalThreads` and `MortalLoop` perform actions as `ThreadRuntime` and `AsyncRuntime` do, with a point before and after
each (`before:action-Begin:1`), and one for each statement inside (`after:commit_new:1`, `before:commit:1`). At a point
the crasher kills, interrupts or loses a reply. A process that dies is not told: its frame is kept where it stands, no
`finally` runs, and its connections are ended as a server ends those of a dead client.

Time stands still here. Heartbeats do not beat, no process sleeps, and settlements for later wait for the test.

The proof beside this one (`proof`) kills a whole application at every statement, with workers, zombies and lost replies
around it. This one has no framework: it drives the lifecycle itself, so it also reaches what has no statement (a
heartbeat that is started, a call that is about to be made, a commit that was decided and not begun).
"""

from __future__ import annotations

import asyncio
from collections import Counter
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Final, TypeVar, cast

from oncekey.canonical.digests import Seeds, downstream_key
from oncekey.core.flow import Mode, Transaction, adrive, drive
from oncekey.core.model import MINUTE, Code, Effects, State
from oncekey.core.policy import Policy
from oncekey.engine import steps
from oncekey.engine.actions import Beat, Begin, Call, Commit, Drop, Keep, Later, Life, Rollback, Sleep
from oncekey.engine.enrolment import Enrolment
from oncekey.engine.run import Breaker, Run, Site
from oncekey.runtimes import boottime
from oncekey.runtimes.aio import AsyncRuntime, Changed, RunningWork, shielded
from oncekey.runtimes.threads import ThreadRuntime
from oncekey.testing.claims import a_claim
from proof.crash.crasher import COMMIT, Cut, Died, When, watched
from proof.lives import CallReport, Said, life

if TYPE_CHECKING:
    from collections.abc import Callable

    from oncekey.core.flow import Rows
    from oncekey.engine.actions import Action
    from oncekey.engine.shell import AsyncEngine, Engine
    from oncekey.ports.store import Store
    from oncekey.testing.claims import ManualClock
    from proof.crash.crasher import Crasher


T = TypeVar("T")

_GRAVES: Final[list[object]] = []
"""Frames of dead processes: whoever closed them would run code that a dead process does not run."""


class Still:
    """A heartbeat in a world where no time passes."""

    lost = False

    def stop(self) -> None:
        """It has stopped already."""


def name_of(action: Action) -> str:
    """What an action is called in points."""
    return action.name if isinstance(action, Transaction) else type(action).__name__


class MortalThreads(ThreadRuntime):
    """Blocking actions, and an end at any of them."""

    def __init__(self, engine: Engine, crasher: Crasher, *, folds: bool = False) -> None:
        super().__init__(engine)
        self.crasher = crasher
        self.folds = folds
        """Whether statements travel with BEGIN and COMMIT where the driver can; then no point is between the two."""
        self.open: list[Any] = []
        self.later: list[Later] = []

    def live(self, flow: Life[T]) -> T | None:
        """Perform a flow; None if the process died of it. What it was told up to then is all that it is ever told."""
        try:
            action = next(flow)
            while True:
                try:
                    result = self.perform(action)
                except Exception as error:
                    action = flow.throw(error)
                else:
                    action = flow.send(result)
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

    def settle_in_background(self) -> None:
        """What was left for later, now."""
        while self.later:
            drive(self.later.pop(0).flow(), self.engine.driver.run)

    def perform(self, action: Action) -> Any:
        """Perform one action between its two points."""
        name = f"action-{name_of(action)}"
        self.crasher.reach(When.BEFORE, name)
        result = self._performed(action)
        try:
            self.crasher.reach(When.AFTER, name)
        except (Exception, Cut):
            if isinstance(action, Begin):
                self._end(result[0]).rollback()  # no flow was told of it
            raise
        return result

    def _performed(self, action: Action) -> Any:
        match action:
            case Transaction():
                return self._transacted(action)
            case Begin() if self.folds:
                begun = self.begin(action.first)
                self.open.append(begun[0])
                return begun
            case Commit() if self.folds:
                return self._folded(action)
            case Begin(first=first):
                tx = self.engine.open()
                self.open.append(tx)
                try:
                    return tx, None if first is None else tx.run(watched(self.crasher, first))
                except (Exception, Cut):
                    self._end(tx).rollback()
                    raise
            case Commit():
                return self._committed(action)
            case Rollback(tx=tx):
                return self._end(tx).rollback()
            case Sleep():
                return None
            case Beat():
                return Still()
            case Later():
                return self.later.append(action)
            case _:
                return super().perform(action)

    def _transacted(self, action: Transaction[T]) -> T:
        done = self.engine.driver.run(replace(action, body=lambda: watched(self.crasher, action.body())))
        if action.mode is Mode.ATOMIC:
            self.crasher.reach(When.AFTER, f"{COMMIT}-{action.name}")
        return done

    def _committed(self, action: Commit) -> Keep | Drop:
        tx, last = action.tx, action.last
        ended: Keep | Drop = Keep() if last is None else tx.run(watched(self.crasher, last))
        if isinstance(ended, Drop):
            self._end(tx).rollback()
            return ended
        self.crasher.reach(When.BEFORE, COMMIT)
        self._end(tx).commit()
        self.crasher.reach(When.AFTER, COMMIT)
        return ended

    def _folded(self, action: Commit) -> Keep | Drop:
        name = "commit_with" if action.fold is not None and hasattr(action.tx, "commit_with") else COMMIT
        self.crasher.reach(When.BEFORE, name)
        ended = self._commit(action)
        self._end(action.tx)
        self.crasher.reach(When.AFTER, name)
        return ended

    def _end(self, tx: Any) -> Any:
        if tx in self.open:
            self.open.remove(tx)
        return tx


class MortalLoop(AsyncRuntime):
    """Effects under asyncio, and a cancellation at any of them."""

    def __init__(self, engine: AsyncEngine, crasher: Crasher) -> None:
        super().__init__(engine, RunningWork())
        self.crasher = crasher
        self.later: list[Later] = []
        self._real = self._transact
        self._transact = self._between

    async def live(self, flow: Life[T]) -> T | None:
        """Perform a flow; None if it was cancelled where nothing is to be said."""
        self.crasher.task = asyncio.current_task()
        try:
            return cast("T", await self.run(flow))
        except Changed as changed:
            return None if isinstance(changed.result, BaseException) else changed.result

    async def settle_in_background(self) -> None:
        """What was left for later, now."""
        while self.later:
            await adrive(self.later.pop(0).flow(), self._real)

    async def _between(self, transaction: Transaction[Any]) -> Any:
        await self._reach(When.BEFORE, transaction)
        result = await self._real(transaction)
        await self._reach(When.AFTER, transaction)
        return result

    async def _reach(self, when: When, action: Action) -> None:
        self.crasher.reach(when, f"action-{name_of(action)}")
        await asyncio.sleep(0)  # a cancellation arrives here

    async def begin(self, action: Begin) -> Any:
        """Open a business transaction, between its two points."""
        return await self.perform(action)

    async def commit(self, action: Commit) -> Any:
        """Commit one, between its two points."""
        return await self.perform(action)

    async def perform(self, action: Action) -> Any:
        """Perform one action between its two points."""
        if isinstance(action, Transaction):
            return await self._between(action)
        await self._reach(When.BEFORE, action)
        match action:
            case Sleep():
                result: Any = None
            case Beat():
                result = Still()
            case Later():
                self.later.append(action)
                result = None
            case Begin():
                result = await super().begin(action)
            case Commit():
                result = await super().commit(action)
            case _:
                result = await super().perform(action)
        try:
            await self._reach(When.AFTER, action)
        except asyncio.CancelledError:
            if isinstance(action, Begin):
                await shielded(result[0].rollback())  # no flow was told of it
            raise
        return result


POLICY: Final = Policy()
LATER: Final = 10 * MINUTE
"""Longer than every lease."""
ROWS: Final = {
    Effects.LOCAL: {"order": 1},
    Effects.OUTBOX: {"transfer": 1},
    Effects.INLINE: {},
    Effects.PHASED: {"payment": 1, "settlement": 1},
}
"""What a success has written, by the kind of effects."""
DONE: Final = {Effects.LOCAL: 201, Effects.OUTBOX: 202, Effects.INLINE: 201, Effects.PHASED: 201}
"""What a client hears at last; of an OUTBOX request its worker is still to come."""


@dataclass(slots=True)
class Notifier:
    """Everything outside of the store: the handlers, what they write with, and a provider with a ledger."""

    insert: Callable[..., Any]
    """Writes a row through a connection: a function, or one that is awaited."""
    emits: bool = True
    """Whether a LOCAL handler hands something to the outbox; then its record does not travel with the COMMIT."""
    charges: list[str] = field(default_factory=list)

    def handler(self, run: Run) -> Life[Said]:
        """The handler of the run's kind of effects."""
        key, effects = run.claim.id.key, run.enrolment.effects
        match effects:
            case Effects.LOCAL:
                yield Call(self.insert, (run.tx.connection, "order", key, 1, None))
                if self.emits:
                    run.parcels.emit("receipt", {}, None)
            case Effects.OUTBOX:
                yield Call(self.insert, (run.tx.connection, "transfer", key, 1, None))
                run.parcels.defer("transfer", {})
            case Effects.INLINE:
                yield Call(self.charge, (downstream_key(run.seed, "charge"),))
            case Effects.PHASED:
                yield from self._phased(run, key)
        return Said(202 if effects is Effects.OUTBOX else 201, b'"made"')

    def charge(self, key: str) -> str:
        """A call that arrives."""
        self.charges.append(key)
        return f"ch_{len(self.charges)}"

    def _phased(self, run: Run, key: str) -> Life[None]:
        phased_run, store, parcels = run.phased_run, run.store, run.parcels
        assert phased_run is not None
        yield from steps.phase(store, phased_run, parcels, "one", lambda tx: self.insert(tx, "payment", key, 1, None))
        yield from steps.call(store, phased_run, "charge", self.charge, repeatable=True, parameters=None)
        yield from steps.phase(
            store, phased_run, parcels, "two", lambda tx: self.insert(tx, "settlement", key, 1, None)
        )


class Unasked:
    """A request that has no key line to echo and no page to show its state on."""

    echo: bytes | None = None
    status_url: str | None = None
    trace_id: str = ""


def request(store: Store, teller: Notifier, effects: Effects, key: str) -> Life[CallReport]:
    """One request, from its claim to what its client hears."""
    claim = a_claim(key, effects=effects, recovery=POLICY.recovery_for(effects))
    claim = replace(claim, seed=Seeds(None).of(claim.id, claim.fingerprint))
    site = Site(store, Breaker(), boottime, boottime)
    return life(Run(site, claim, Enrolment("crash", effects, POLICY, None), Unasked()), teller.handler)


def wrong(effects: Effects, report: CallReport | None, left: dict[str, Rows], teller: Notifier) -> list[str]:
    """What is not as it must be once there is an answer. INLINE may end in a doubt, and never in a second call."""
    found = Counter(str(row["kind"]) for row in left["effects"])
    calls, distinct = len(teller.charges), len(set(teller.charges))
    unknown = report is not None and report.code is Code.OUTCOME_UNKNOWN
    said = "nothing" if report is None else f"{report.status} {report.code or ''}".strip()
    told: list[str] = []
    if effects is Effects.INLINE:
        if calls > 1:
            told.append(f"never a second call, and there were {calls}")
        if not unknown and (report is None or report.status != DONE[effects] or calls != 1):
            told.append(f"one call and its answer, or a doubt: {calls} calls, and {said} was heard")
        return told
    if report is None or report.status != DONE[effects] or unknown:
        told.append(f"an answer at last, and {said} was heard")
    if dict(found) != ROWS[effects]:
        told.append(f"each row exactly once, and there are {dict(found)}")
    if effects is Effects.PHASED and distinct != 1:
        told.append(f"one charge for the provider, and there are {distinct}")
    parcels = Counter(str(row["kind"]) for row in left["committed"])
    wanted = {Effects.LOCAL: {"emit": 1} if teller.emits else {}, Effects.OUTBOX: {"defer": 1}}.get(effects, {})
    if dict(parcels) != wanted:
        told.append(f"each parcel exactly once, and there are {dict(parcels)}")
    return told


def owned(left: dict[str, Rows]) -> bool:
    """Whether somebody still owns the record."""
    return any(row["state"] == State.IN_PROGRESS for row in left["records"])


def pass_time(clock: ManualClock) -> None:
    """Leases run out because the clock is moved, and nobody waits."""
    clock.advance(LATER)
