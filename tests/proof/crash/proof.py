"""The proof: a request is killed at a point, somebody comes back for it, and what is left is judged.

`Stage.trail` lists the points of a case by running it without a fault, `prove` runs it with one. Time is a parameter:
leases run out because the clock is moved, and nothing here waits.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from enum import StrEnum
from itertools import count
from typing import TYPE_CHECKING, Any, Final, Self, cast

from oncekey.core.flow import Statement
from oncekey.core.model import HOUR, MINUTE, Code, Effects, State
from oncekey.databases.address import Kind as Store
from oncekey.testing.claims import ManualClock
from oncekey_demo.checker import Rule, check
from oncekey_demo.history import ClientOperation, ClientSaw
from proof.crash.crasher import Crasher, Fault, Manner, Point, When
from proof.crash.reading import CHARGE, history_of
from proof.crash.shop import ACCEPTED, Inbox, Ledger, Process, World

if TYPE_CHECKING:
    from oncekey.engine.shell import AsyncEngine
    from proof.crash.places import Place
    from proof.crash.shop import CallReport


LATER: Final = 10 * MINUTE
"""Longer than every lease, and than every pause before another attempt."""
ROUNDS: Final = 6
CREATED: Final = 201

PROMISES: Final = {
    Effects.LOCAL: ("order",),
    Effects.PHASED: ("payment", CHARGE, "settlement"),
    Effects.OUTBOX: ("transfer", CHARGE),
    Effects.INLINE: (CHARGE,),
}
"""What a 201 means, by the kind of effects."""

ONE_RUNNER: Final = "one runner"
"""The lock's own promise, which no record can tell of: while its holder runs, nobody else does."""

ACCEPTED_IS_COMMITTED: Final = "accepted is committed"
"""What a 202 of an OUTBOX route promises: the parcel is committed, whatever happens next (O5)."""

NOW: Final = Statement("clock", "SELECT (extract(epoch FROM clock_timestamp()) * 1000000)::bigint AS now")


TAKE_OVERS: Final = (Point(When.AFTER, "commit-take_over"), Point(When.AFTER, "commit-take_up"))
"""Where somebody has just become the next owner."""


class Rescue(StrEnum):
    """Who comes back for a request that was cut off."""

    CLIENT = "client"
    """Its client sends it again."""
    WORKER = "worker"
    """Nobody but the workers; the client asks when all is over."""
    RESTORED = "restored"
    """A backup from before the request is restored, and then its client sends it again."""


@dataclass(frozen=True, slots=True)
class Case:
    """What is proven: a kind of effects, what the provider promises, and who comes back."""

    effects: Effects
    deduplicates: bool = True
    repeatable: bool = True
    rescue: Rescue = Rescue.CLIENT
    claims_first: bool = False
    """Whether the record is claimed before the handler's transaction begins, as SQLAlchemy's and Django's stores do."""

    @property
    def thorough(self) -> bool:
        """Whether zombies and lost replies are tried, too: they meet the same code whoever comes back."""
        return self.rescue is Rescue.CLIENT and (self.effects is Effects.INLINE or self.deduplicates == self.repeatable)

    def __str__(self) -> str:
        kind = "" if self.effects is Effects.LOCAL else "-dedup" if self.deduplicates else "-no-dedup"
        again = "" if self.effects in {Effects.LOCAL, Effects.INLINE} or self.repeatable else "-not-repeatable"
        first = "-claims-first" if self.claims_first else ""
        return f"{self.effects}{kind}{again}-{self.rescue}{first}"


CASES: Final = (
    Case(Effects.LOCAL),
    Case(Effects.PHASED),
    Case(Effects.PHASED, rescue=Rescue.WORKER),
    Case(Effects.PHASED, rescue=Rescue.RESTORED),
    Case(Effects.PHASED, repeatable=False),
    Case(Effects.PHASED, deduplicates=False, repeatable=False),
    Case(Effects.PHASED, deduplicates=False, repeatable=False, rescue=Rescue.WORKER),
    Case(Effects.OUTBOX),
    Case(Effects.OUTBOX, rescue=Rescue.WORKER),
    Case(Effects.OUTBOX, deduplicates=False, repeatable=False),
    Case(Effects.OUTBOX, claims_first=True),
    Case(Effects.OUTBOX, rescue=Rescue.WORKER, claims_first=True),
    Case(Effects.OUTBOX, deduplicates=False, repeatable=False, claims_first=True),
    Case(Effects.INLINE, deduplicates=False),
)
"""Without deduplication a call is not repeatable: whoever says it is has broken the contract, not oncekey."""


@dataclass(frozen=True, slots=True)
class Variant:
    """The code that is proven: as it is, or with one rule broken."""

    patched: Callable[[], AbstractContextManager[Any]] = nullcontext
    amend: Callable[[AsyncEngine], None] = lambda _: None
    own_clock: bool = False
    """Whether the store's own clock is used, because it is the clock that is broken."""


@dataclass(slots=True)
class Verdict:
    """What came of one run."""

    case: Case
    fault: Fault | None
    broken: list[str] = field(default_factory=list)
    story: tuple[str, ...] = ()
    points: list[Point] = field(default_factory=list)
    pauses: list[Point] = field(default_factory=list)
    struck: bool = False
    overtaken: bool = False
    ended: str = ""

    def __str__(self) -> str:
        where = "no fault" if self.fault is None else f"{self.fault.manner} {self.fault.point}"
        told = "\n".join(f"    {line}" for line in self.story)
        return "\n".join([f"{self.case} at {where}, ended {self.ended}:", *self.broken, told])


async def prove(place: Place, case: Case, key: str, fault: Fault | None, variant: Variant | None = None) -> Verdict:
    """One run with a fault, or without, and its verdict."""
    async with Stage(place, variant) as stage:
        return await stage.prove(case, key, fault)


class Stage:
    """A database, its clock, and a server that lives through run after run beside those that die."""

    def __init__(self, place: Place, variant: Variant | None = None) -> None:
        ticks = count(1)
        self.place = place
        self.variant = variant or Variant()
        self.tick: Callable[[], int] = lambda: next(ticks)
        self.clock = None if self.variant.own_clock else ManualClock()
        self._survivors: dict[tuple[bool, bool], Process] = {}

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        for process in self._survivors.values():
            await process.end()

    async def trail(self, case: Case, key: str) -> Verdict:
        """A run without a fault: its points are where the others die."""
        return await self.prove(case, key, None)

    async def prove(self, case: Case, key: str, fault: Fault | None) -> Verdict:
        """One run with a fault, and its verdict."""
        with self.variant.patched():
            return await _Run(self, case, key, fault).play()

    def process(self, case: Case, world: World, crasher: Crasher) -> Process:
        """A process that may die."""

        def amend(engine: AsyncEngine) -> None:
            self.variant.amend(engine)
            if case.claims_first:
                cast("Any", engine.store).locks = None

        return Process(
            self.place,
            crasher,
            world,
            clock=self.clock,
            repeatable=case.repeatable,
            amend=amend,
        )

    def healthy_server(self, case: Case, world: World) -> Process:
        """The one that lives on, with an eye for what is said from now on only."""
        kind = (case.repeatable, case.claims_first)
        found = self._survivors.get(kind)
        if found is None:
            found = self._survivors[kind] = self.process(case, world, self.crasher())
        found.shop.world = world
        return found

    def crasher(self, *faults: Fault, meanwhile: Callable[[], Awaitable[None]] | None = None) -> Crasher:
        """Somebody's fate."""
        server_clock = self.variant.own_clock and self.place.kind is Store.POSTGRES
        return Crasher(*faults, ticks=self.tick, meanwhile=meanwhile, clock=NOW if server_clock else None)


def faults(seen: Verdict) -> Iterator[Fault]:
    """Everything that can happen in a run: death at every point, a pause or a lost reply wherever there can be one."""
    for point in seen.points:
        yield Fault(point, Manner.DIE)
    if not seen.case.thorough:
        return
    for point in seen.pauses:
        yield Fault(point, Manner.PAUSE)
        yield Fault(point, Manner.OVERTAKE)
    for point in seen.points:
        if _is_write(point):
            yield Fault(point, Manner.LOSE)


def _is_write(point: Point) -> bool:
    """Only what writes has an outcome that can be in doubt."""
    said = point.what.partition("-")[0]
    return said not in _READS and (said != "commit" or point.what == "commit" or point.when == "after")


_READS: Final = frozenset(
    {
        "business", "charge", "receive", "find", "recall", "lock", "lock_file", "resumable", "held_by", "find_parcel",
        "remaining", "hold_record", "hold_parcel", "find_dead_letter", "put_parcels", "checkpoint", "extend_parcel",
        "take_up", "deferred_result", "drop_parcel", "commit_new", "defer_new", "settle_deferred",
    }
)  # fmt: skip
"""What is read, made outside, or said inside a transaction: of these the COMMIT is in doubt, if anything."""


class _Run:
    """One request, one fault, and everybody who comes after."""

    def __init__(self, stage: Stage, case: Case, key: str, fault: Fault | None) -> None:
        self._stage, self._case, self._key, self._fault = stage, case, key, fault
        self._tick, self._place = stage.tick, stage.place
        self._ledger = Ledger(self._tick, deduplicates=case.deduplicates)
        self._inbox = Inbox()
        self._world = World(self._ledger, self._inbox)
        self._operations: list[ClientOperation] = []
        self._crashers: list[Crasher] = []
        self._broken: list[str] = []
        self._open: Any = None
        self._overtook = False
        self._others = stage.healthy_server(case, self._world)
        self._others.crasher.said.clear()
        self._others.shop.entered.clear()
        self._crashers.append(self._others.crasher)
        self._victim = self._process(*(() if fault is None else (fault,)))

    async def play(self) -> Verdict:
        """The request, the fault, the rescue and the verdict."""
        died = await self._victim.crasher.until_death(self._life())
        if not died:
            await self._victim.end()
        at_death = self._place.look(self._key)["records"]
        self._open = at_death[0] if at_death else None
        if self._case.rescue is Rescue.RESTORED:
            self._place.lose(self._key)
        last = await self._rescued()
        return self._verdict(last, died=died)

    async def _life(self) -> None:
        await self._ask(self._victim)
        await self._victim.relay()

    async def _meanwhile(self) -> None:
        """While the victim stands still: a duplicate at once, and others when its lease is over."""
        assert self._fault is not None
        if self._fault.manner is Manner.OVERTAKE:
            await self._overtaken()
            return
        others = self._others
        before = len(others.shop.entered)
        report = await self._ask(others)
        held = report.code in {Code.IN_PROGRESS, Code.STORE_UNAVAILABLE}
        if self._victim.shop.entered and len(others.shop.entered) > before and not held:
            self._broken.append(f"{ONE_RUNNER}: a duplicate ran while the owner's lease stood")
        self._pass_time()
        await others.relay()
        await self._ask(others)

    async def _overtaken(self) -> None:
        """Somebody takes the work over when the lease is over, and dies of it before anything came of it."""
        self._pass_time()
        taker = self._process(*(Fault(point, Manner.DIE) for point in TAKE_OVERS))

        async def take() -> None:
            await self._ask(taker)
            await taker.relay()

        self._overtook = await taker.crasher.until_death(take())
        if not self._overtook:
            await taker.end()

    async def _rescued(self) -> CallReport:
        """Another process, and whoever comes back; time passes until there is an answer."""
        others = self._others
        for _ in range(2 if self._case.rescue is Rescue.WORKER else 0):
            self._pass_time()
            await others.complete()
            await others.relay()
        report = await self._ask(others)
        for _ in range(ROUNDS):
            if report.status == CREATED or report.code == Code.OUTCOME_UNKNOWN:
                break
            self._pass_time()
            await others.relay()
            report = await self._ask(others)
        self._pass_time()
        await others.relay()
        return await self._ask(others)

    async def _ask(self, process: Process) -> CallReport:
        """Send the request, and write down what came of it, also if nothing did."""
        name = f"op-{len(self._operations) + 1}"
        op = ClientOperation(
            name, "", self._key, "", self._tick(), None, ClientSaw.INFO, promises=PROMISES[self._case.effects]
        )
        place = len(self._operations)
        self._operations.append(op)
        report = await process.ask(self._case.effects, self._key, name)
        self._operations[place] = replace(
            op,
            ended=self._tick(),
            kind=report.kind(self._case.effects),
            status=report.status,
            body=report.body,
            replayed=report.replayed,
            code=report.code,
        )
        if report.status == ACCEPTED and not self._place.has_parcel(self._key):
            self._broken.append(f"{ACCEPTED_IS_COMMITTED}: {name} got 202, and no parcel is committed")
        return report

    def _process(self, *faults: Fault) -> Process:
        crasher = self._stage.crasher(*faults, meanwhile=self._meanwhile)
        self._crashers.append(crasher)
        return self._stage.process(self._case, self._world, crasher)

    def _pass_time(self) -> None:
        if self._stage.clock is not None:
            self._stage.clock.advance(LATER)

    def _verdict(self, last: CallReport, *, died: bool) -> Verdict:
        said = [one for crasher in self._crashers for one in crasher.said]
        said.sort(key=lambda one: one.at)
        left = self._place.look(self._key)
        history = history_of(
            left, self._operations, self._ledger.charges, self._inbox, said, key=self._key, now=self._tick()
        )
        restored = self._case.rescue is Rescue.RESTORED
        violations = check(history, RULES - BY_THE_RECORD if restored else RULES)
        crasher = self._victim.crasher
        verdict = Verdict(self._case, self._fault, points=crasher.points, pauses=crasher.pauses, struck=crasher.struck)
        verdict.broken = [*self._broken, *(f"{one.rule}: {one.sentence}" for one in violations)]
        verdict.broken += [f"expected: {one}" for one in self._unexpected(last, left["records"], died=died)]
        verdict.overtaken = self._overtook
        verdict.story = next((one.story for one in violations), ())
        verdict.ended = f"{last.status} {last.code or ''}".strip()
        return verdict

    def _unexpected(self, last: CallReport, records: Any, *, died: bool) -> Iterator[str]:
        """What the case promises beyond the rules: where somebody can know, there is an answer; else nobody guesses."""
        case, charges, calls = self._case, self._charges(), self._ledger.calls[self._key]
        unknown = last.code == Code.OUTCOME_UNKNOWN
        if last.status != CREATED and not unknown:
            yield f"an answer at last, and it was {last.status} {last.code}"
        if unknown and not (records and records[0]["state"] == State.UNKNOWN):
            yield "the client heard that nobody knows, and the record says something else"
        if case.effects is Effects.LOCAL or (case.deduplicates and case.repeatable):
            if unknown:
                yield "the outcome can be known, and it is called unknown"
            if charges != (CHARGE in PROMISES[case.effects]):
                yield f"one charge, and there are {charges}"
            return
        if calls > 1:
            yield f"never a second call, and there were {calls}"
        if died and case.rescue is not Rescue.RESTORED and unknown != self._in_doubt():
            yield f"unknown exactly if a call was announced without a result, and the answer is {last.status}"

    def _charges(self) -> int:
        return sum(charge.reference == self._key for charge in self._ledger.charges)

    def _in_doubt(self) -> bool:
        """Whether nobody can know, by what the dead process left behind."""
        row = self._open
        if row is None:
            return False
        if self._case.effects is Effects.INLINE:
            return bool(row["state"] == State.IN_PROGRESS)
        return row["intent"] is not None


RULES: Final = frozenset(Rule) - {Rule.KEPT, Rule.MISMATCH, Rule.ONE_RUNNER, Rule.EMPTY_HANDS}
"""All that a crash can break; keys are reused and reaped elsewhere."""

BY_THE_RECORD: Final = frozenset({Rule.ONE_ANSWER, Rule.REAL_TIME})
"""What nobody can keep who has lost the record: the provider's deduplication is all there is then (D1, F38)."""

assert LATER * (ROUNDS + 4) < 20 * HOUR, "a repeatable call must stay repeatable while it is rescued"
