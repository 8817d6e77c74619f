"""The simulator's runtime: one request is one flow, the lifecycle that ships, performed step by step.

Each action becomes steps of the scheduler, one for each statement, so a host can be killed, stopped, refused, left
without a reply or interrupted between any two of them. `Sleep` is the simulated clock; `Beat` and `Later` are processes
of the same host, which die with it.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Final, TypeVar, assert_never

from oncekey.core.errors import StoreError
from oncekey.core.flow import Transaction
from oncekey.core.model import SECOND, Claim, Code, Discarded, Effects
from oncekey.core.policy import InProgress
from oncekey.engine import request
from oncekey.engine.actions import (
    Aside,
    Beat,
    Begin,
    Call,
    Commit,
    Consult,
    Drop,
    Execute,
    Flush,
    Interrupted,
    Invoke,
    Keep,
    Later,
    Recall,
    ReleaseConnections,
    ReturnReaders,
    Rollback,
    Sleep,
)
from oncekey.engine.enrolment import Enrolment
from oncekey.engine.run import Breaker, Run, SettledKeys, Site
from oncekey_demo.history import ClientSaw, Lapse
from proof.lives import FAILED, life
from proof.sim import steps
from proof.sim.scenarios import CALL_TIMEOUT, DEADLINE, LEASE, POLICY, TTL
from proof.sim.shop import HANDLERS, Counter
from proof.sim.steps import Open, Reply, Say, Wait, talk, transact, within

if TYPE_CHECKING:
    from collections.abc import Generator

    from oncekey.core.model import Instant, RecordId
    from oncekey.engine.actions import Action, Life
    from proof.lives import CallReport, Said
    from proof.sim.scenarios import Plan
    from proof.sim.scheduler import Host
    from proof.sim.steps import Mailbox, OpenTransaction, Process
    from proof.sim.world import World


T = TypeVar("T")

PATIENT: Final = POLICY.override(on_in_progress=InProgress.WAIT, wait_max=timedelta(seconds=5))
FIRST_PAUSE: Final = SECOND // 10
LONGEST_PAUSE: Final = 5 * SECOND


@dataclass(frozen=True, slots=True)
class Asked:
    """What a client sent, and whether its route waits for another request under the same key."""

    operation: str
    id: RecordId
    effects: Effects
    fingerprint: str
    waits: bool = False
    echo: bytes | None = None
    status_url: str | None = None
    trace_id: str = ""


@dataclass(frozen=True, slots=True)
class Answer:
    """What it hears. `incarnation`: the life of the key that the answer is from."""

    kind: ClientSaw
    status: int | None = None
    body: bytes | None = None
    replayed: bool = False
    code: Code | None = None
    incarnation: str | None = None

    def __str__(self) -> str:
        return f"{self.kind} {self.code or self.status}{' (replayed)' if self.replayed else ''}"


@dataclass(slots=True, eq=False)
class Pulse:
    """A heartbeat, and how long its owner may trust its lease by its own clock."""

    trusted_until: Instant
    lost: bool = False
    over: bool = False

    def stop(self) -> None:
        """No more beats."""
        self.over = True


class Serving:
    """A host that serves one request."""

    def __init__(self, world: World, host: Host, asked: Asked, plan: Plan, caller: Mailbox) -> None:
        self.world = world
        self.host = host
        self.asked = asked
        self.plan = plan
        self.caller = caller
        self.asked_at: Instant = 0
        self.said: Said | None = None

    def run(self) -> Process[None]:
        """From the request to its reply; one that was interrupted before its handler has none."""
        yield Wait(0)
        self.asked_at = self.world.clock.boot
        run = self.started()
        try:
            report = yield from self.performed(life(run, self.handler))
            late = report.own and self.world.rng.chance(self.world.scheduler.rates.released)
            if late and run.lease is not None:
                yield from self._release_again(run)
            self.host.done = True
            yield Reply(self.caller, self.answer(report, run))
        except Interrupted:
            self.caller.broken = True
        self.host.done = True

    def handler(self, run: Run) -> Life[Said]:
        """The application's code, and what it says."""
        counter = Counter(self.world, self.asked, self.plan)
        self.said = yield from HANDLERS[self.asked.effects](counter, run)
        return self.said

    def started(self) -> Run:
        """The run of the lifecycle, on a host of its own."""
        world, clock = self.world, self.world.clock

        def now() -> float:
            return clock.boot / SECOND

        site = Site(
            world.store_of(self.host),
            Breaker(now),
            now,
            now,
            is_full=lambda _: world.rng.chance(world.crowd),
            settled_keys=world.settled_keys if world.rng.chance(0.5) else SettledKeys(),
        )
        policy = PATIENT if self.asked.waits else POLICY
        return Run(site, self.claim(), Enrolment("pay", self.asked.effects, policy, self), self.asked)

    def claim(self) -> Claim:
        """What the request asks for."""
        incarnation = self.world.rng.uuid()
        return Claim(
            id=self.asked.id,
            incarnation=incarnation,
            operation="pay",
            effects=self.asked.effects,
            recovery=POLICY.recovery_for(self.asked.effects),
            method="POST",
            path="/payments",
            fingerprint=self.asked.fingerprint,
            seed=self.world.parts.seed(self.asked.id, self.asked.fingerprint, incarnation),
            owner=self.host.name,
            lease=LEASE,
            deadline=DEADLINE,
            call_timeout=CALL_TIMEOUT,
            ttl=TTL,
        )

    def answer(self, report: CallReport, run: Run) -> Answer:
        """What the client makes of it. An answer of the key's names the life that it is from."""
        kind, code = report.kind(self.asked.effects), report.code
        let_in = run.lease is not None and self.plan.entered
        undone = code is None and report.status == FAILED and self.asked.effects is Effects.LOCAL
        if (kind is not ClientSaw.OK and not let_in) or (report.own and not let_in) or undone:
            kind = ClientSaw.FAIL  # this request has done nothing, whatever others do
        elif code is Code.IN_PROGRESS:
            kind = ClientSaw.INFO  # its own commit may be what is under way: "come back later" promises nothing
        if kind is not ClientSaw.OK:
            return Answer(kind, report.status, code=code)
        incarnation = report.body.split(b" ")[0].decode()
        return Answer(kind, report.status, report.body, report.replayed, incarnation=incarnation)

    # The runtime

    def performed(self, flow: Life[T]) -> Process[T]:
        """Perform a flow's actions to its end. A host that dies is not told: its frames are dropped."""
        try:
            action = next(flow)
            while True:
                try:
                    result = yield from self.perform(action)
                except (Exception, Interrupted) as error:
                    action = flow.throw(error)
                else:
                    action = flow.send(result)
        except StopIteration as stop:
            return stop.value  # type: ignore[no-any-return]  # a generator's return value is untyped here

    def perform(self, action: Action) -> Process[Any]:  # noqa: PLR0912  (one line for each kind of action)
        """Perform one action."""
        match action:
            case Transaction():
                return (yield from transact(action))
            case Begin(first=first):
                return (yield from _begun(first))
            case Execute(tx=tx, body=said):
                return (yield from within(tx, said))
            case Commit():
                return (yield from self.commit(action))
            case Rollback(tx=tx):
                yield steps.Rollback(tx)
            case Call():
                return (yield from _called(action))
            case Sleep(seconds=seconds):
                if self.world.database.opened_by(self.host.name):
                    self.world.saw(Lapse.HELD, self.asked)
                yield Wait(int(seconds * SECOND))
            case Aside(flow=flow):
                return (yield from talk(flow))
            case Recall(record_id=record_id):
                return (yield from talk(self.world.store_of(self.host).recall(record_id)))
            case Beat():
                return self.beat(action)
            case Later():
                self._spawn("background settlement", _repeated(self.world, action))
            case (
                Flush() | ReturnReaders() | ReleaseConnections() | Consult()
            ):  # what stands in front of the store here is never there
                pass
            case Invoke():
                raise AssertionError("a handler is spliced in at Invoke")
            case _:
                assert_never(action)
        return None

    def commit(self, action: Commit) -> Process[Keep | Drop]:
        """The last statements and the commit; on some hosts the folded one, where there is one."""
        ended: Keep | Drop = Keep()
        fold = action.fold if self.host.folds else None
        if fold is not None:
            rows = yield Say(fold.statement, action.tx)
            ended = Keep(fold.read(rows)) if rows else Drop()
        elif action.last is not None:
            ended = yield from within(action.tx, action.last)
        yield steps.Commit(action.tx) if isinstance(ended, Keep) else steps.Rollback(action.tx)
        return ended

    def beat(self, action: Beat) -> Pulse:
        """A heartbeat beside the handler."""
        # The owner's own view of its lease starts before the claim was sent, so it never ends too late.
        pulse = Pulse(self.asked_at + LEASE)
        self._spawn("heartbeat", _beating(self.world, action, pulse))
        return pulse

    def _spawn(self, what: str, process: Process[None]) -> None:
        self.world.scheduler.spawn(f"{self.host.name}'s {what}", process, self.host)

    def _release_again(self, run: Run) -> Process[None]:
        """Somebody settles once more, as a release: it must not wipe what is stored."""
        assert run.lease is not None
        try:
            yield from talk(request.settle(run.store, run.lease, Discarded()))
        except StoreError:
            return


def _begun(first: Any) -> Process[tuple[OpenTransaction, Any]]:
    tx: OpenTransaction = yield Open()
    if first is None:
        return tx, None
    try:
        return tx, (yield from within(tx, first))
    except (Exception, Interrupted):
        yield steps.Rollback(tx)  # no flow knows of it yet
        raise


def _called(action: Call) -> Process[Any]:
    """The application's code; here it is steps of its own, as a coroutine is elsewhere."""
    made: Generator[Any, Any, Any] = action.fn(*action.arguments)
    return (yield from made)


def _beating(world: World, action: Beat, pulse: Pulse) -> Process[None]:
    """Renew while the handler runs, up to the deadline (P5)."""
    clock, every = world.clock, int(action.every * SECOND)
    ends = clock.boot + int(action.until * SECOND)
    wait = every
    while True:
        yield Wait(wait)
        before = clock.boot
        if pulse.over or before >= ends:
            return
        try:
            until = yield from talk(action.renew())
        except StoreError:
            wait = every // 3
            continue
        if until is None:
            pulse.lost = not pulse.over
            return
        wait, pulse.trusted_until = every, min(before + LEASE, ends)


def _repeated(world: World, action: Later) -> Process[None]:
    """Again and again, until the store answers or the patience is over."""
    ends, pause = world.clock.boot + int(action.patience * SECOND), FIRST_PAUSE
    yield Wait(0)
    while world.clock.boot < ends:
        try:
            yield from talk(action.flow())
        except StoreError:
            yield Wait(pause)
            pause = min(pause * 2, LONGEST_PAUSE)
        else:
            return
