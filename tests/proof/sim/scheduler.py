"""The scheduler: picks who goes next, lets time pass, and makes things go wrong, all by the dice.

No threads, no event loop and no sleeping: an actor is a generator, and a turn does exactly one step of one
actor. So a run is a sequence of turns, and one seed is one sequence. Time is a parameter: a clock that nothing can set,
and the store's clock, which a fault does set. Hosts are the processes that crash, stand still and wake up.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Any, Final, TypeAlias, assert_never

from oncekey.core.errors import CommitAmbiguousError, StoreError, StoreUnavailableError
from oncekey.engine.actions import Interrupted
from proof.sim.steps import Commit, Insert, Open, Point, Receive, Reply, Rollback, Say, Wait

if TYPE_CHECKING:
    from oncekey.core.model import Duration, Instant
    from proof.sim.database import Database
    from proof.sim.scenarios import FaultRates, Rng
    from proof.sim.steps import Mailbox, OpenTransaction, Process, Step


EPOCH: Instant = 1_700_000_000_000_000


@dataclass(slots=True)
class Clock:
    """`boot` only ever goes forward and is what timers run on; `store` is what records are stamped with."""

    boot: Instant = EPOCH
    offset: Duration = 0

    @property
    def store(self) -> Instant:
        """The store's clock now."""
        return self.boot + self.offset

    @property
    def elapsed(self) -> Duration:
        """Since the run began."""
        return self.boot - EPOCH


class Doom(StrEnum):
    """What a fate does."""

    CRASH = "crash"
    PAUSE = "pause"
    CANCEL = "cancel"


@dataclass(frozen=True, slots=True)
class Fate:
    """At its n-th step, this happens to a host."""

    doom: Doom
    step: int


@dataclass(slots=True, eq=False)
class Host:
    """A process that serves one request, or a worker: what it runs dies, stands still and forgets together."""

    name: str
    fate: Fate | None = None
    skew: Duration = 0
    steps: int = 0
    alive: bool = True
    paused_until: Instant = 0
    cut_off: bool = False
    """Interrupted, and not told yet."""
    done: bool = False
    locks: bool = False
    """Whether it knows the store's locks: an older version claims first."""
    folds: bool = False
    """Whether its driver sends the last statement with the COMMIT."""
    callers: tuple[Mailbox, ...] = ()


MILLISECOND: Final = 1_000
NEVER: Final = 1 << 62


@dataclass(slots=True, eq=False)
class Task:
    """One actor: its generator and the step that it waits for."""

    name: str
    process: Process[None]
    host: Host | None
    step: Step
    due: Instant
    blocked: tuple[str, str] | None = None


Event: TypeAlias = tuple[int, "Duration", "Duration", str, str]
"""Turn, time, the store clock's offset, who, what."""


class Scheduler:
    """Turns, one at a time."""

    def __init__(
        self, clock: Clock, rng: Rng, database: Database, rates: FaultRates, nap: Callable[[], Instant]
    ) -> None:
        self.clock = clock
        self.turn = 0
        self.trace: list[Event] = []
        self.rates = rates
        self._rng = rng
        self._database = database
        self._nap = nap
        self._tasks: list[Task] = []
        self._dead: list[Task] = []

    def spawn(self, name: str, process: Process[None], host: Host | None = None) -> None:
        """Let an actor take part."""
        step = next(process, None)
        if step is not None:
            self._tasks.append(Task(name, process, host, step, self._due(step)))

    def note(self, who: str, what: str) -> None:
        """A line for the trace."""
        self.trace.append((self.turn, self.clock.elapsed, self.clock.offset, who, what))

    def run(self, until: Instant) -> None:
        """Take turns up to an instant."""
        clock, database = self.clock, self._database
        while True:
            database.drop_idle()
            # Most tasks only let time pass, and are asked at every turn.
            dues = [
                task.due
                if type(task.step) is Wait and (task.host is None or task.host.paused_until <= task.due)
                else self._when(task)
                for task in self._tasks
            ]
            first = min(dues, default=NEVER)
            if max(first, clock.boot) >= until:
                clock.boot = max(clock.boot, until)
                return
            clock.boot = max(clock.boot, first)
            ready = [task for task, due in zip(self._tasks, dues, strict=True) if due <= clock.boot]
            self._take(self._rng.pick(ready))
            clock.boot += self._rng.between(1, 20) * MILLISECOND

    def wake(self) -> None:
        """Everybody who stands still goes on."""
        for task in self._tasks:
            if task.host is not None:
                task.host.paused_until = 0
                task.host.fate = None

    def busy(self, hosts: list[Host]) -> bool:
        """Whether any of them still has a step to do."""
        return any(task.host in hosts for task in self._tasks)

    def _when(self, task: Task) -> Instant:
        host = task.host
        due = task.due
        if host is not None and host.paused_until > due:
            due = host.paused_until
        if task.blocked is not None:
            holder = self._database.locks.get(task.blocked)
            if holder is not None:
                return max(due, self._database.dropped_at(holder))
        step = task.step
        if isinstance(step, Receive) and (step.mailbox.full or step.mailbox.broken):
            return 0 if host is None else host.paused_until
        return due

    def _due(self, step: Step) -> Instant:
        match step:
            case Wait(span):
                return self.clock.boot + span
            case Receive(_, patience):
                return self.clock.boot + patience
            case _:
                return self.clock.boot

    def _take(self, task: Task) -> None:
        self.turn += 1
        if task.host is not None and self._doomed(task, task.host):
            return
        task.blocked = None
        try:
            result = self._do(task, task.step)
        except StoreError as error:
            self.note(task.name, f"{_label(task.step)}: {type(error).__name__}")
            self._resume(task, error)
        else:
            if task.blocked is None:
                self._resume(task, result)

    def _resume(self, task: Task, result: object) -> None:
        host = task.host
        if host is not None and host.cut_off and task.name == host.name:
            # What was done was done: only its result does not reach the one who is interrupted.
            host.cut_off, result = False, Interrupted()
        try:
            if isinstance(result, StoreError | Interrupted):
                task.step = task.process.throw(result)
            else:
                task.step = task.process.send(result)
        except StopIteration:
            self._tasks.remove(task)
        else:
            task.due = self._due(task.step)

    def _doomed(self, task: Task, host: Host) -> bool:
        """Whether the step is not done now."""
        step = task.step
        host.steps += 1
        doom = self._doom(host, step)
        if doom is None or (doom is Doom.CANCEL and task.name != host.name):
            return False
        host.fate = None
        match doom:
            case Doom.CRASH:
                self.note(host.name, f"crashes before {_label(step)}")
                self._kill(host)
            case Doom.CANCEL:
                return self._cancel(task, host)
            case Doom.PAUSE:
                self._pause(host, step)
            case _:
                assert_never(doom)
        return True

    def _cancel(self, task: Task, host: Host) -> bool:
        """The request is interrupted, once: before its step is done, or after, when its result is on its way."""
        # Of a transaction that nobody was told of a runtime leaves nothing open.
        before = isinstance(task.step, Open) or self._rng.chance(0.5)
        self.note(host.name, f"is interrupted {'before' if before else 'after'} {_label(task.step)}")
        host.cut_off = True
        if before:
            task.blocked = None
            self._resume(task, None)
        return before

    def _pause(self, host: Host, step: Step) -> None:
        until = self._nap()
        if isinstance(step, Point) and step.slack is not None:
            until = min(until, self.clock.boot + step.slack)
        host.paused_until = until
        self.note(host.name, f"stands still before {_label(step)} for {_seconds(until - self.clock.boot)}")

    def _doom(self, host: Host, step: Step) -> Doom | None:
        if host.fate is not None and host.steps >= host.fate.step:
            return host.fate.doom
        if isinstance(step, Point) and step.critical and host.paused_until == 0:
            if self._rng.chance(self.rates.crash / 4):
                return Doom.CRASH
            if self._rng.chance(self.rates.pause / 2):
                return Doom.PAUSE
        return None

    def _kill(self, host: Host) -> None:
        host.alive = False
        # Kept, not closed: a process that died runs no `finally`.
        self._dead += [task for task in self._tasks if task.host is host]
        self._tasks = [task for task in self._tasks if task.host is not host]
        self._database.abandon(host.name)
        for mailbox in host.callers:
            mailbox.broken = True

    def _do(self, task: Task, step: Step) -> Any:
        match step:
            case Say():
                return self._say(task, step)
            case Open():
                return self._open(task)
            case Insert(tx, effect):
                self.note(task.name, f"inserts {effect.id}")
                return self._database.insert(tx, effect)
            case Commit():
                return self._commit(task, step)
            case Rollback(tx):
                if task.host is not None and not tx.host:
                    return None  # its connection is gone, and the server goes on with what it heard last
                self.note(task.name, "rolls back")
                return self._database.rollback(tx)
            case Receive(mailbox):
                return mailbox.content if mailbox.full else None
            case Reply(mailbox, content):
                self.note(task.name, f"answers {content}")
                return mailbox.put(content)
            case Wait():
                return None
            case Point(label):
                self.note(task.name, label)
                return None
            case _:
                assert_never(step)

    def _open(self, task: Task) -> OpenTransaction:
        if task.host is not None and self._rng.chance(self.rates.unavailable):
            raise StoreUnavailableError("simulated outage")
        return self._database.begin(_author(task))

    def _say(self, task: Task, step: Say) -> Any:
        statement, tx = step.statement, step.tx
        faulty = task.host is not None
        if faulty and self._rng.chance(self.rates.unavailable):
            raise StoreUnavailableError("simulated outage")
        if faulty and step.writes and tx is None and self._rng.chance(self.rates.lost_reply):
            self._lose(task, step)
            raise CommitAmbiguousError("simulated loss of a reply")
        writes = len(self._database.log)
        rows = self._database.execute(statement, _author(task), self.turn, tx)
        if rows is None:
            task.blocked = (str(statement.params["scope"]), str(statement.params["key"]))
            self.note(task.name, f"{statement.name} waits for a lock")
            return None
        wrote = " (written)" if len(self._database.log) > writes else ""
        self.note(task.name, f"{statement.name}: {_seen(rows)}{wrote}")
        return rows

    def _lose(self, task: Task, step: Say) -> None:
        """The reply is lost: the statement was executed, or never arrives, or is still on its way."""
        arrives = self._rng.pick(("now", "now", "never", "later"))
        late = f"{task.name}'s lost {step.statement.name}"
        if arrives == "later":
            self.spawn(late, _deliver(step, self._rng.between(1, 5000) * MILLISECOND))
        elif arrives == "now":
            rows = self._database.execute(step.statement, _author(task), self.turn)
            if rows is None:
                self.spawn(late, _deliver(step, 0))

    def _commit(self, task: Task, step: Commit) -> None:
        tx = step.tx
        if task.host is not None and tx.open and self._rng.chance(self.rates.lost_commit):
            outcome = Rollback(tx) if self._rng.chance(0.4) else step
            if self._rng.chance(0.5):
                self._end(tx, outcome)
            else:
                tx.host = ""  # the server goes on with it, whatever becomes of the host
                late = self._rng.between(1, 5000) * MILLISECOND
                self.spawn(f"{task.name}'s lost commit", _deliver(outcome, late))
            raise CommitAmbiguousError("simulated loss of the reply to COMMIT")
        self._end(tx, step)
        self.note(task.name, "commits")

    def _end(self, tx: OpenTransaction, how: Commit | Rollback) -> None:
        if isinstance(how, Commit):
            self._database.commit(tx, self.turn)
        else:
            self._database.rollback(tx)


def _deliver(step: Step, late: Duration) -> Process[None]:
    yield Wait(late)
    yield step


def _author(task: Task) -> str:
    return task.host.name if task.host is not None else task.name.split("'")[0]


def _label(step: Step) -> str:
    match step:
        case Say(statement):
            return statement.name
        case Point(label):
            return label
        case _:
            return type(step).__name__.lower()


def _seen(rows: Any) -> str:
    if not rows:
        return "no row"
    row = rows[0]
    if "state" not in row:
        return ", ".join(f"{name} {value}" for name, value in row.items())
    return f"{row['state'] or 'absent'} fence {row['fence']} version {row['version']}"


def _seconds(span: Duration) -> str:
    return f"{span / 1_000_000:.3f} s"
