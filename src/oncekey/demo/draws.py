"""What a made-up day draws from its seed: names, amounts, spans, how busy each hour is, and how a request ends.

A request in doubt stays so while a resolver finds nothing, until a webhook or an operator settles it.
"""

from __future__ import annotations

import json
import math
import random
from collections.abc import Generator
from dataclasses import dataclass
from enum import Enum, auto
from functools import partial
from typing import TYPE_CHECKING, Final, TypeAlias, TypeVar
from uuid import UUID

from oncekey.core.model import MINUTE, SECOND, Duration, Instant, Record, RecordId, State
from oncekey.core.resolution import EXHAUSTED, CallReport, Executed, Undecided
from oncekey.core.transitions import Actor, Mover, Note, Trigger
from oncekey.demo.data import Item, Money, Notification, Transfer, datetime_of, ordered_uuid
from oncekey.demo.routes import CALL, CHARGE
from oncekey.engine import operate, reconcile
from oncekey.resolvers import to_text
from oncekey.topics import Reply

if TYPE_CHECKING:
    from oncekey.demo.provider_ledger import Charge
    from oncekey.flow import Body, Flow, Rows, Statement
    from oncekey.once import Once
    from oncekey.ports import Store


PRODUCTS: Final = ("sku_teapot", "sku_kettle", "sku_cup", "sku_sencha", "sku_assam", "sku_strainer")
CURRENCIES: Final = {"EUR": 75, "USD": 17, "GBP": 8}
PROCESSES: Final = (88, 91, 107)


@dataclass(slots=True)
class Clock:
    """The present instant of the made-up day."""

    now: Instant

    def __call__(self) -> Instant:
        """That instant."""
        return self.now


class Draws:
    """All random draws of a day."""

    def __init__(self, seed: int, clock: Clock) -> None:
        self.random = random.Random(seed)  # noqa: S311  (a made-up day needs no secrets)
        self._clock = clock

    def money(self) -> Money:
        """An amount of some customer: many small ones, and a few that are large."""
        amount = round(100 * self.random.lognormvariate(3.4, 0.9)) + 99
        currency = self.random.choices(list(CURRENCIES), list(CURRENCIES.values()))[0]
        return Money(customer_id=self.customer(), amount_cents=amount, currency=currency)

    def customer(self) -> str:
        """One of a few hundred."""
        return f"cus_{self.random.randint(1001, 1400)}"

    def items(self) -> list[Item]:
        """What is ordered."""
        return [
            Item(product_id=self.random.choice(PRODUCTS), quantity=self.random.randint(1, 5))
            for _ in range(self.random.randint(1, 3))
        ]

    def tossed(self) -> bool:
        """True or False, with equal chances."""
        return self.random.getrandbits(1) == 1

    def between(self, least: Duration, most: Duration) -> Duration:
        """A random span between the two."""
        return self.random.randrange(least, most)

    def about(self, usual: Duration) -> Duration:
        """The duration of a program's work: usually about `usual`, and sometimes much longer."""
        return round(self.random.lognormvariate(math.log(usual), 0.55))

    def pause(self, attempts: int) -> Duration:
        """The pause before the next attempt, after so many."""
        envelope: float = SECOND * 2**attempts
        return round(envelope * self.random.uniform(0.5, 1.0))

    def owner(self, process: str) -> str:
        """A name for one claim of a worker, or of one of the processes that serve."""
        if process == "web":
            process = f"web-{self.random.randint(1, 3)}:{self.random.choice(PROCESSES)}"
        return f"{process}:{self.random.getrandbits(64):016x}"

    def uuid(self) -> UUID:
        """A random one."""
        return UUID(int=self.random.getrandbits(128), version=4)

    def new_id(self) -> UUID:
        """One that grows with time, as the shop's rows have them."""
        return ordered_uuid(self._clock.now * 1000, self.random.getrandbits(62))


def busyness(minute: int) -> float:
    """How much is going on in this minute since the epoch (UTC): little at night, most before and after noon."""
    hour = minute % 1440 / 60
    open_at, shut_at = 5.5, 22.5
    day = max(0.0, math.sin((hour - open_at) / (shut_at - open_at) * math.pi)) if open_at <= hour <= shut_at else 0.0
    lunch = 0.25 * math.exp(-((hour - 12.7) ** 2) / 0.8)
    return 0.12 + day - lunch


T = TypeVar("T")
Life: TypeAlias = Generator["Statement | int", "Rows", T]
"""What a request, a worker or a person does: statements, and microseconds to wait."""

WORKERS: Final = ("shop-worker-1:211", "shop-worker-2:340")
PEOPLE: Final = ("ann", "ben")
UNSAID: Final = "the provider does not say what it has charged"


class Fate(Enum):
    """How a request ends."""

    WELL = auto()
    DECLINED = auto()
    UNREACHABLE = auto()
    """The provider cannot be reached at first."""
    ABANDONED = auto()
    """The provider cannot be reached, and the client does not send its request again."""
    SILENT = auto()
    """The provider does not answer at first, and may be asked again."""
    KILLED = auto()
    """Its first owner dies."""
    DOUBT_ENDS = auto()
    """The provider does not answer and may not be asked again; a resolver or a webhook finds it out."""
    BY_HAND = auto()
    """The same, and a person finds it out."""
    GIVEN_UP = auto()
    """The same, and no operator has found it out yet."""
    SLOW = auto()
    """It is not over when the day is."""


def statements_of(flow: Flow[T]) -> Body[T]:
    """The statements of a flow, without its transactions: the caller runs them in one of its own."""
    try:
        transaction = next(flow)
        while True:
            transaction = flow.send((yield from transaction.body()))
    except StopIteration as stop:
        return stop.value  # type: ignore[no-any-return]  # a generator's return value is untyped here


class Doubts:
    """How doubts go on, and end."""

    def __init__(self, store: Store, once: Once, draw: Draws, clock: Clock) -> None:
        assert store.reconcile is not None
        self._store, self._once, self._draw, self._clock = store, once, draw, clock
        self._port, self._policy = store.reconcile, once.policy

    def last(  # noqa: PLR0917  (how, about what, and what is true)
        self,
        fate: Fate,
        record_id: RecordId,
        phase: str,
        name: str,
        charge: Charge | None,
        asked: Transfer | None = None,
    ) -> Life[bool]:
        """Questions to a resolver that finds nothing, until a webhook or an operator settles it; False if none did."""
        most = self._policy.reconcile_max_tries
        for number in range(most if fate is not Fate.DOUBT_ENDS else self._draw.random.randint(1, 4)):
            yield round(30 * SECOND * 1.5**number)
            record = present((yield from statements_of(self._store.find(record_id))).record)
            last = number + 1 == most
            note = Note.of(
                record,
                State.UNKNOWN,
                Trigger.STILL_UNKNOWN,
                Mover(Actor.RESOLVER, WORKERS[0]),
                f"{EXHAUSTED}: {UNSAID}" if last else UNSAID,
            )
            after = None if last else round(30 * SECOND * 1.5 ** (number + 1))
            yield from statements_of(self._port.later(record, after, noting=partial(_noted, note)))
            if number == 2 and fate is not Fate.DOUBT_ENDS:  # noqa: PLR2004  (some time into it)
                resolution = to_text(Undecided("the provider says that it is looking into it"), self._policy)
                report = CallReport("webhook:provider", f"evt_{self._draw.uuid().hex}", resolution, downstream_key=name)
                yield from statements_of(self._port.add(report))
        if fate is Fate.GIVEN_UP or charge is None:
            return False
        record = present((yield from statements_of(self._store.find(record_id))).record)
        yield from self._resolved(fate, record, phase, name, charge, asked)
        return True

    def _resolved(  # noqa: PLR0917  (what, about what, and by whom)
        self, fate: Fate, record: Record, phase: str, name: str, charge: Charge, asked: Transfer | None
    ) -> Life[None]:
        target = reconcile.EvidenceTarget(record.id, record.incarnation, phase, name)
        if fate is Fate.BY_HAND:
            who = self._draw.random.choice(PEOPLE)
            yield self._draw.between(20 * MINUTE, 90 * MINUTE)
            mover, why = Mover(Actor.OPERATOR, who), f"{charge.id} is in the provider's dashboard"
            yield from statements_of(operate.disclose(self._store, record.id, mover, "to compare the amount"))
            yield self._draw.between(MINUTE, 5 * MINUTE)
        elif phase == CHARGE:
            resolution = to_text(Executed(charge.shown()), self._policy)
            report = CallReport("webhook:provider", f"evt_{self._draw.uuid().hex}", resolution, name, charge.id)
            mover = Mover(Actor.WEBHOOK, WORKERS[0])
            yield from statements_of(
                reconcile.receive(self._store, report, mover, self._once.policy_of, self._once.resolvers)
            )
            return
        else:
            mover, why = Mover(Actor.RESOLVER, WORKERS[0]), "the resolver's answer"
        given: object = charge.shown()
        if phase == CALL:
            given = Reply(201, json.loads(self.sent(money_of(charge), charge)))
        elif asked is not None:
            given = self.done(asked, charge)
        settled = reconcile.settle(
            self._store, target, Executed(given), mover, self._once.policy_of, why=why, waited=True
        )
        yield from statements_of(settled)
        for one in (yield from statements_of(self._port.calls_of(name, None))):
            yield from statements_of(self._port.name(one, charge.id))

    def done(self, asked: Transfer, charge: Charge) -> Reply:
        """The answer of a transfer that was charged."""
        done = asked.model_copy(update={"status": "done", "charge_id": charge.id})
        return Reply(201, done.model_dump(mode="json"), provider_id=charge.id)

    def sent(self, money: Money, charge: Charge) -> str:
        """The answer of a notification that was charged, as JSON."""
        at = datetime_of(self._clock.now)
        return Notification(
            id=self._draw.new_id(), status="sent", charge_id=charge.id, created_at=at, **money.model_dump()
        ).model_dump_json()


def money_of(charge: Charge) -> Money:
    """What was asked for."""
    return Money(customer_id=charge.customer_id, amount_cents=charge.amount_cents, currency=charge.currency)


def _noted(note: Note, _: Record) -> Note:
    return note


def present(found: T | None) -> T:
    """The value, which must be there, because no other process writes."""
    assert found is not None, "a made-up day has lost a record of its own"
    return found
