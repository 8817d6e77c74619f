"""A world: one seed's keys, clients, hosts, workers, faults and clocks, run to the end and told as a history.

Its parts are the real ones; a mutant replaces one of them. Its clients send, wait, give up and send again with the same
key, as the answer tells them to.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Final, cast

from oncekey.canonical.digests import Seeds
from oncekey.core.model import MINUTE, SECOND, Code, RecordId, State
from oncekey.engine import admit
from oncekey.engine.run import SettledKeys
from oncekey.stores.keystore import KeyStore
from oncekey.stores.memory import COMMANDS
from oncekey.stores.statements import Statements
from oncekey_demo import history
from oncekey_demo.history import ClientOperation, ClientSaw, History, Lapse, LapseSighting
from proof.patching import patched
from proof.sim.database import Database
from proof.sim.onecommit import ONE_COMMIT, Locks, Outbox
from proof.sim.runtime import Asked, Serving
from proof.sim.scenarios import (
    BEATS,
    BIG_JUMP,
    CHAOS,
    DEADLINE,
    DOUBT_WAIT,
    LEASE,
    NO_FAULTS,
    POLICY,
    SKEW,
    SMALL_JUMP,
    TTL,
    Plan,
    Rng,
    draw_plan,
    draw_rates,
)
from proof.sim.scheduler import EPOCH, Clock, Doom, Fate, Host, Scheduler
from proof.sim.shop import PROMISES, Provider
from proof.sim.steps import Mailbox, OpenTransaction, Point, Receive, Wait
from proof.sim.upkeep import UPKEEP
from proof.sim.workers import Operator, Reaper, Relay, Resolver, Sweeper, Watch, Worker

if TYPE_CHECKING:
    from uuid import UUID

    from oncekey.core.flow import Command
    from oncekey.core.model import Duration, Effects, Instant
    from oncekey.engine.run import Run
    from oncekey.ports import store as ports
    from proof.sim.database import Cell
    from proof.sim.runtime import Answer
    from proof.sim.scenarios import Scenario
    from proof.sim.steps import Process


def real_seed(record_id: RecordId, fingerprint: str, incarnation: UUID) -> bytes:
    """The seed of a request's downstream keys (D1)."""
    return Seeds(POLICY.secret).of(record_id, fingerprint)


@dataclass(frozen=True, slots=True)
class Parts:
    """What is under test: statements, the lifecycle, and what a server and its workers do with them."""

    commands: Mapping[str, Command] = field(default_factory=lambda: {**COMMANDS, **ONE_COMMIT, **UPKEEP})
    hosts_clock: bool = False
    """Stamp records with the wall clock of whoever writes, not with the store's."""
    patched: Callable[[], AbstractContextManager[Any]] = nullcontext
    """Functions of the lifecycle itself, replaced while the world runs."""
    seed: Callable[[RecordId, str, UUID], bytes] = real_seed
    serving: type[Serving] = Serving
    workers: tuple[type[Worker], ...] = (Sweeper, Resolver, Reaper, Operator, Relay)


REAL: Parts = Parts()


_PATIENCE: Final = (3 * SECOND, 30 * SECOND, 10 * MINUTE)


@dataclass(frozen=True, slots=True)
class Key:
    """A key that clients use, what its route does, and whether that waits for a request under way."""

    id: RecordId
    effects: Effects
    waits: bool = False


@dataclass(frozen=True, slots=True)
class ClientRequest:
    """What a client wants: one key, one body, and how often it tries."""

    key: Key
    body: str
    start: Duration
    tries: int


def client(world: World, name: str, wanted: ClientRequest) -> Process[None]:
    """One client and all its tries."""
    rng = world.rng
    yield Wait(wanted.start)
    for attempt in range(wanted.tries):
        caller = Mailbox()
        operation = f"{name}.{attempt + 1}"
        world.send(operation, wanted.key, wanted.body, caller)
        answer: Answer | None = yield Receive(caller, rng.pick(_PATIENCE))
        world.heard(operation, answer)
        if answer is not None and answer.code is Code.KEY_REUSED:
            return
        # A client may lose an answer that it was given, so it also asks again after a success.
        satisfied = answer is not None and answer.kind is ClientSaw.OK
        yield Wait(rng.between(0, 90 if not satisfied else 3) * SECOND)


SCOPE: Final = "tenant-1"
BODIES: Final = ("body-a", "body-b")
PATIENCE: Final = DEADLINE + LEASE + BIG_JUMP + 2 * DOUBT_WAIT
"""How long healthy workers may take to bring everything to rest."""
_CROWDS: Final = ((1, 2, 3), (0, 0, 1, 1, 2))
"""How many clients come at first, and at each later beat."""
_AT_REST: Final = frozenset({State.COMPLETED, State.FAILED_RETRYABLE, State.EXPIRED})


class World:
    """Everything of one run."""

    def __init__(self, seed: int, parts: Parts, scenario: Scenario) -> None:
        self.parts = parts
        self.scenario = scenario
        self.rng = Rng(seed)
        self.clock = Clock()
        self.database = Database(self.clock, idle_limit=DEADLINE)
        rates = scenario.rates or draw_rates(self.rng)
        self.scheduler = Scheduler(self.clock, self.rng, self.database, rates, self._nap)
        self.provider = Provider(self.scheduler, self.rng, remembers=scenario.provider_remembers)
        self.watch = Watch(self.clock)
        self.soft = self.rng.chance(0.3)
        self._locks = self.rng.pick(scenario.locks)
        self.crowd = self.rng.pick((0.0, 0.0, 0.2))
        """How often the business transactions leave no place for another one."""
        self.settled_keys = SettledKeys()
        self.notebook: dict[str, Instant] = {}
        self._inside: dict[RecordId, list[OpenTransaction]] = {}
        self._sightings: list[LapseSighting] = []
        self._keys = [
            Key(RecordId(SCOPE, f"key-{number}"), self.rng.pick(scenario.effects), waits=self.rng.chance(0.3))
            for number in range(1, self.rng.pick((2, 2, 3)))
        ]
        self.keys = tuple(key.id for key in self._keys)
        self._operations: dict[str, ClientOperation] = {}
        self._serving: list[Host] = []

    def run(self) -> History:
        """Chaos, then heal, then a last look by healthy clients."""
        chance = patched((admit, "uuid4", self.rng.uuid))
        with self.parts.patched(), chance, _quiet():
            return self._run()

    def _run(self) -> History:
        self._populate()
        self.scheduler.run(EPOCH + CHAOS)
        self._heal()
        self._rest()
        for key in self._keys:
            for body in BODIES:
                self._client(f"auditor-{body[-1]}-{key.id.key}", ClientRequest(key, body, 0, tries=2))
        self.scheduler.run(self.clock.boot + 10 * SECOND)
        self._rest()
        return self._told()

    def store_of(self, host: Host) -> KeyStore:
        """The store as this host speaks to it."""
        clock = self._clock_of(host)
        store = KeyStore(self.parts.commands, clock=clock)
        store.outbox = cast("ports.Outbox", Outbox())
        if host.locks:
            store.locks = Locks(Statements(self.parts.commands, clock), store.outbox)
        return store

    def entered(self, asked: Asked, run: Run) -> None:
        """A handler runs now; in one commit it is the only one as long as its transaction is open."""
        if run.one_commit is None:
            return
        others = self._inside.setdefault(asked.id, [])
        if any(tx.open for tx in others):
            self.saw(Lapse.OVERLAP, asked)
        others.append(run.tx)

    def saw(self, lapse: Lapse, asked: Asked) -> None:
        """Something happened that nothing will tell of afterwards."""
        sighting = LapseSighting(lapse, asked.id.scope, asked.id.key, asked.operation, self.scheduler.turn)
        self._sightings.append(sighting)

    def now_of(self, host: Host) -> Instant | None:
        """What this host says the time is; None leaves that to the store."""
        clock = self._clock_of(host)
        return None if clock is None else clock()

    def send(self, name: str, key: Key, fingerprint: str, caller: Mailbox) -> None:
        """A request arrives at a host of its own."""
        self._operations[name] = ClientOperation(
            name,
            key.id.scope,
            key.id.key,
            fingerprint,
            self.scheduler.turn,
            None,
            ClientSaw.INFO,
            latest=self.clock.store,
            promises=PROMISES[key.effects],
        )
        rates = self.scheduler.rates
        plan = Plan() if rates is NO_FAULTS else draw_plan(self.rng, rates)
        host = Host(name, self._fate(steps=12, cancels=True), self.rng.between(-SKEW, SKEW), callers=(caller,))
        host.locks = self.rng.chance(self._locks)
        host.folds = self.rng.chance(0.5)
        self.scheduler.note(name, f"sends {fingerprint} for {key.id.key}; the handler {plan.course}")
        asked = Asked(name, key.id, key.effects, fingerprint, waits=key.waits)
        self.scheduler.spawn(name, self.parts.serving(self, host, asked, plan, caller).run(), host)
        if not plan.hangs:
            self._serving.append(host)

    def heard(self, name: str, answer: Answer | None) -> None:
        """What its client heard, or that it heard nothing."""
        self._look_at_the_clock()
        sent = replace(self._operations[name], ended=self.scheduler.turn)
        self._operations[name] = (
            sent
            if answer is None
            else replace(
                sent,
                kind=answer.kind,
                status=answer.status,
                body=answer.body,
                replayed=answer.replayed,
                code=answer.code,
                incarnation=answer.incarnation,
            )
        )

    def _populate(self) -> None:
        for key in self._keys:
            for number, beat in enumerate(BEATS):
                crowd = 0 if number in self.scenario.quiet else self.rng.pick(_CROWDS[min(number, 1)])
                late = beat >= TTL
                for who in range(crowd):
                    # While a key lives most requests are honest retries; afterwards it may be anything.
                    body = self.rng.pick(BODIES if late else BODIES[:1] * 4 + BODIES)
                    start = beat + self.rng.between(0, self.rng.pick((1, 20)) * SECOND)
                    name = f"client-{number + 1}{'abc'[who]}-{key.id.key}"
                    self._client(name, ClientRequest(key, body, start, tries=self.rng.between(1, 3)))
        for beat in BEATS:
            for _ in range(self.rng.between(1, 2)):
                self._send_workers(beat, within=30 * SECOND)
        if self.rng.chance(self.scheduler.rates.jumps):
            for _ in range(self.rng.between(1, 3)):
                around = self.rng.pick(BEATS) + self.rng.between(-MINUTE, 20 * SECOND)
                self.scheduler.spawn("nemesis", self._jump(max(0, around)))
        if self.scenario.loses_records:
            self.scheduler.spawn("nemesis", self._lose_records(self.rng.between(0, CHAOS)))

    def _client(self, name: str, wanted: ClientRequest) -> None:
        self.scheduler.spawn(name, client(self, name, wanted))

    def _send_workers(self, start: Duration, within: Duration) -> None:
        for kind in self.parts.workers:
            if not self.rng.chance(kind.diligence):
                continue
            host = Host(kind.name, self._fate(steps=6))
            worker = kind(self, host, self.notebook)
            late = start + self.rng.between(0, within)
            self.scheduler.spawn(kind.name, self._round(worker, late), host)

    def _round(self, worker: Worker, start: Duration) -> Process[None]:
        yield Wait(start)
        yield from worker.round()

    def _jump(self, start: Duration) -> Process[None]:
        yield Wait(start)
        far = self.rng.pick((SMALL_JUMP, BIG_JUMP, BIG_JUMP))
        offset = self.rng.between(-far, far)
        yield Point(f"sets the store's clock to {offset / SECOND:+.1f} s")
        if self.scheduler.rates is not NO_FAULTS:
            self._look_at_the_clock()
            self.clock.offset = offset
            self._look_at_the_clock()
            self.watch.look(self.clock.store)

    def _look_at_the_clock(self) -> None:
        """What the store's clock says now counts for everything under way."""
        now = self.clock.store
        for name, one in self._operations.items():
            if one.ended is None and (one.latest or 0) < now:
                self._operations[name] = replace(one, latest=now)

    def _lose_records(self, start: Duration) -> Process[None]:
        yield Wait(start)
        yield Point("restores an old backup")
        for where in [where for where in self.database.table if where not in self.database.locks]:
            del self.database.table[where]

    def _heal(self) -> None:
        self.scheduler.note("nemesis", "is gone: all is well from here")
        self.watch.look(self.clock.store)
        self._look_at_the_clock()
        self.clock.offset = 0
        self.scheduler.rates = NO_FAULTS
        self.scheduler.wake()

    def _rest(self) -> None:
        end = self.clock.boot + PATIENCE
        while self.clock.boot < end and not self._at_rest():
            self._send_workers(0, within=10 * SECOND)
            self.scheduler.run(self.clock.boot + MINUTE)

    def _at_rest(self) -> bool:
        if any(host.alive and not host.done for host in self._serving):
            return False
        return all(cell["state"] in _AT_REST for cell in self.database.table.values())

    def _fate(self, steps: int, *, cancels: bool = False) -> Fate | None:
        rates, rng = self.scheduler.rates, self.rng
        if cancels and rng.chance(rates.cancelled):
            return Fate(Doom.CANCEL, rng.between(2, rng.pick((steps, 2 * steps))))
        if rng.chance(rates.crash):
            return Fate(Doom.CRASH, rng.between(2, steps))
        if rng.chance(rates.pause):
            return Fate(Doom.PAUSE, rng.between(2, steps))
        return None

    def _nap(self) -> Instant:
        """When a host that stands still goes on: soon, or just when something else is about to change."""
        now = self.clock.boot
        later = [EPOCH + BEATS[beat] for beat in self.scenario.wakes if EPOCH + BEATS[beat] > now]
        around = self.rng.pick((now, *later[:2], *later[-2:]))
        return around + self.rng.between(1, 30) * SECOND

    def _clock_of(self, host: Host) -> Callable[[], Instant] | None:
        return (lambda: self.clock.boot + host.skew) if self.parts.hosts_clock else None

    def _told(self) -> History:
        operations, ledger = tuple(self._operations.values()), tuple(self.provider.ledger)
        if self.scenario.loses_records:
            # Lives ended without a trace: what is left to ask is what was done for each request.
            return History(
                operations=tuple(replace(one, incarnation=one.fingerprint) for one in operations),
                ledger=tuple(replace(one, incarnation=one.fingerprint) for one in ledger),
            )
        return History(
            operations=operations,
            ledger=ledger,
            business=tuple(self.database.business),
            writes=tuple(self.database.log),
            records=tuple(_final(cell) for cell in self.database.table.values()),
            sightings=tuple(self._sightings),
            healed=True,
        )


@contextmanager
def _quiet() -> Iterator[None]:
    """What goes wrong is meant to, and told in the trace."""
    log = logging.getLogger("oncekey")
    level = log.level
    log.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        log.setLevel(level)


def _final(cell: Cell) -> history.Final:
    return history.Final(
        scope=str(cell["scope"]),
        key=str(cell["key"]),
        incarnation=str(cell["incarnation"]),
        state=str(cell["state"]),
        fingerprint=str(cell["fingerprint"]),
        status=cell["response_status"],
        body=cell["response_body"],
        ticket=cell["reconcile_after"] is not None,
        begun=cell["memo"] is not None or cell["intent"] is not None,
    )
