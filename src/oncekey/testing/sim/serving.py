"""One request on one host: the real flows from begin to settle, and the answer that its client gets."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, assert_never

from oncekey.core.errors import StoreError
from oncekey.core.model import Bypass, Claim, Code, Effects, Proceed, Refuse, Replay
from oncekey.testing.history import Kind
from oncekey.testing.sim.steps import Reply, Wait, talk
from oncekey.testing.sim.timing import CALL_TIMEOUT, DEADLINE, LEASE, POLICY, TTL

if TYPE_CHECKING:
    from uuid import UUID

    from oncekey.core.model import Instant, Lease, Record, RecordId, Settled, Settlement, StoredResponse
    from oncekey.stores.keystore import KeyStore
    from oncekey.testing.sim.hosts import Host
    from oncekey.testing.sim.plan import Plan
    from oncekey.testing.sim.steps import Mailbox, Process
    from oncekey.testing.sim.world import World

PATIENCE: Final = 5
"""How often a settlement that cannot reach the store is tried again before its record is left to the workers."""


@dataclass(frozen=True, slots=True)
class Asked:
    """What a client sent."""

    operation: str
    id: RecordId
    effects: Effects
    fingerprint: str


@dataclass(frozen=True, slots=True)
class Answer:
    """What it hears. `incarnation`: the life of the key that the answer is from."""

    kind: Kind
    status: int | None = None
    body: bytes | None = None
    replayed: bool = False
    code: Code | None = None
    incarnation: str | None = None

    def __str__(self) -> str:
        return f"{self.kind} {self.code or self.status}{' (replayed)' if self.replayed else ''}"


class Serving:
    """A host that serves one request."""

    def __init__(self, world: World, host: Host, asked: Asked, plan: Plan, caller: Mailbox) -> None:
        self.world = world
        self.parts = world.parts
        self.host = host
        self.asked = asked
        self.plan = plan
        self.caller = caller
        self.store: KeyStore = world.store_of(host)
        self.claim = self._claim()

    def run(self) -> Process[None]:
        """From the request to its reply."""
        yield Wait(0)
        answer = yield from self.answer()
        self.host.done = True
        yield Reply(self.caller, answer)

    def settle(self, lease: Lease, settlement: Settlement) -> Process[Settled | None]:
        """Settle in a transaction of its own, and do not give up at the first outage (P7)."""
        for attempt in range(PATIENCE):
            try:
                return (yield from talk(self.parts.settle(self.store, lease, settlement)))
            except StoreError:
                yield Wait(LEASE // 4 * (attempt + 1))
        return None

    def answer(self) -> Process[Answer]:
        """Ask for the right to execute, and answer by what came of it."""
        before = self.world.clock.boot
        try:
            verdict = yield from talk(self.parts.begin(self.store, self.claim, POLICY))
        except StoreError:
            return Answer(Kind.FAIL, code=Code.STORE_UNAVAILABLE)
        match verdict:
            case Replay(record):
                return replay(record)
            case Refuse(code):
                return Answer(Kind.FAIL, code=code)
            case Proceed(lease, record):
                return (yield from self._proceed(lease, record, before))
            case Bypass():
                raise AssertionError(verdict)
            case _:
                assert_never(verdict)

    def _proceed(self, lease: Lease, record: Record, before: Instant) -> Process[Answer]:
        # The owner's own view of its lease starts before the claim was sent, so it never ends too late.
        self.host.trusted_until = before + LEASE
        if not self.plan.entered:
            with suppress(StoreError):
                yield from talk(self.parts.release(self.store, lease))
            return Answer(Kind.FAIL, status=401)
        beating = self.parts.heartbeat(self, lease, before + DEADLINE)
        self.world.scheduler.spawn(f"{self.host.name}'s heartbeat", beating, self.host)
        run = self.parts.local if record.effects is Effects.LOCAL else self.parts.inline
        answer = yield from run(self, lease, record).run()
        late_cancel = self.world.dice.chance(self.world.scheduler.weather.cancelled)
        if answer.kind is Kind.OK and late_cancel:
            yield from self._release_again(lease)
        return answer

    def _release_again(self, lease: Lease) -> Process[None]:
        """A cancellation that arrives after the settlement makes a middleware settle once more, as a release."""
        with suppress(StoreError):
            yield from talk(self.parts.release(self.store, lease))

    def _claim(self) -> Claim:
        incarnation = self.world.dice.uuid()
        return Claim(
            id=self.asked.id,
            incarnation=incarnation,
            operation="pay",
            effects=self.asked.effects,
            recovery=POLICY.recovery_for(self.asked.effects),
            method="POST",
            path="/payments",
            fingerprint=self.asked.fingerprint,
            seed=self.parts.seed(self.asked.id, self.asked.fingerprint, incarnation),
            owner=self.host.name,
            lease=LEASE,
            deadline=DEADLINE,
            call_timeout=CALL_TIMEOUT,
            ttl=TTL,
        )


def replay(record: Record) -> Answer:
    """The stored answer."""
    return stored(record.response, record.incarnation, replayed=True)


def stored(response: StoredResponse | None, incarnation: UUID, *, replayed: bool) -> Answer:
    """An answer that is in the record."""
    assert response is not None
    return Answer(Kind.OK, response.status, response.body, replayed, incarnation=str(incarnation))


def heartbeat(serving: Serving, lease: Lease, deadline: Instant) -> Process[None]:
    """Renew while the handler runs, up to the deadline (P5)."""
    host, clock = serving.host, serving.world.clock
    while True:
        yield Wait(LEASE // 3)
        before = clock.boot
        if host.done or before >= deadline:
            return
        try:
            end = yield from talk(serving.parts.renew(serving.store, lease, LEASE))
        except StoreError:
            continue
        if end is None:
            host.lost = True
            return
        host.trusted_until = min(before + LEASE, deadline)
