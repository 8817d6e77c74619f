"""Functions of every kind, `def` and `async def`, on a stage: a store, a clock that the test owns, what went wrong.

The functions are those of a module, as workers know them. What happens in a run is the stage's to say, so they name it
by an argument.
"""

from __future__ import annotations

import asyncio
import inspect
import threading
import uuid
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from decimal import Decimal
from typing import Any

from oncekey.core.model import INLINE, LOCAL, MINUTE, OUTBOX, PHASED
from oncekey.core.policy import Policy
from oncekey.core.topics import Message
from oncekey.engine.operation import Operation, SyncOperation
from oncekey.testing.claims import ManualClock
from phased.bank import ClockedOnce

STAGES: dict[str, Stage] = {}


@dataclass(frozen=True)
class Order:
    """What is bought."""

    item: str
    price: Decimal = Decimal("9.90")


@dataclass(frozen=True)
class Bought:
    """What comes of it."""

    item: str
    price: Decimal
    charge: str | None = None


class Stage:
    """A store, and a `Once` for each process that the test needs."""

    def __init__(self, database: Any, *, blocking: bool, policy: Policy | None = None) -> None:
        self.name = uuid.uuid4().hex
        self.database = database
        self.blocking = blocking
        self.clock = ManualClock()
        self.policy = policy or Policy()
        self.runs: list[Any] = []
        self.charges: list[str] = []
        self.faults: dict[str, Any] = {}
        """By place: an exception, raised once, or a function, called each time."""
        self.entered = threading.Semaphore(0)
        self.go_on = threading.Event()
        STAGES[self.name] = self
        self.once = self.process()

    def process(self) -> ClockedOnce:
        """A `Once` of its own, as another process has."""
        return ClockedOnce(self.database.url, self.clock, self.policy)

    @asynccontextmanager
    async def open(self, *others: ClockedOnce) -> AsyncIterator[Stage]:
        """From the start to the stop of its processes."""
        for once in (self.once, *others):
            await once.start()
        try:
            yield self
        finally:
            for once in (self.once, *others):
                threads = once._functions.threads
                assert threads is None or await asyncio.to_thread(threads.stop, 10)
                await once.stop()
                if once._blocking is not None:
                    once._blocking.close()

    def function(self, kind: str, *, once: ClockedOnce | None = None, **options: Any) -> Callable[..., Any]:
        """One of the functions of this module, enrolled and called with the stage."""
        effects, *kinds = FUNCTIONS[kind]
        options = {"effects": effects, "key": "key", "operation": kind, **options}
        enrolled = (once or self.once).function(**options)(kinds[0] if self.blocking else kinds[1])

        async def call(key: str, order: Order, *args: Any, **kwargs: Any) -> Any:
            if self.blocking:
                return await asyncio.to_thread(enrolled, self.name, key, order, *args, **kwargs)
            return await enrolled(self.name, key, order, *args, **kwargs)

        return call

    def act(self, place: str) -> Any:
        """What happens there."""
        fault = self.faults.get(place)
        if isinstance(fault, BaseException) or inspect.isclass(fault):
            del self.faults[place]
            raise fault
        return None if fault is None else fault()

    def wait(self) -> Any:
        """Let the test go on, and go on when it says so: a fault."""
        self.entered.release()
        if self.blocking:
            assert self.go_on.wait(60)
            return None
        return asyncio.to_thread(self.go_on.wait, 60)

    def charge(self, key: str) -> dict[str, str]:
        """Take money."""
        self.act("charge")
        self.charges.append(key)
        self.act("charged")
        return {"id": f"ch_{len(self.charges)}"}

    async def is_entered(self) -> None:
        """Somebody waits."""
        assert await asyncio.to_thread(self.entered.acquire, timeout=60)

    def lease_over(self) -> None:
        """Whoever runs now has been silent for too long."""
        self.clock.advance(6 * MINUTE)

    @property
    def rows(self) -> list[str]:
        return sorted(item for (item,) in self.database.execute("SELECT item FROM orders"))

    @property
    def states(self) -> list[str]:
        return sorted(state for (state,) in self.database.execute(f"SELECT state FROM {self.database.records}"))


# One commit


def local(op: SyncOperation, stage: str, key: str, order: Order, note: str = "") -> Bought:
    here = STAGES[stage]
    here.runs.append(order)
    here.database.insert_blocking(op.connection, order.item)
    here.act("local")
    return Bought(order.item, order.price)


async def alocal(op: Operation, stage: str, key: str, order: Order, note: str = "") -> Bought:
    here = STAGES[stage]
    here.runs.append(order)
    await here.database.insert(op.connection, order.item)
    happens = here.act("local")
    if happens is not None:
        await happens
    return Bought(order.item, order.price)


# The outside


def inline(op: SyncOperation, stage: str, key: str, order: Order, note: str = "") -> Bought:
    here = STAGES[stage]
    here.runs.append(order)
    charge = here.charge(op.downstream_key("charge"))
    here.act("inline")
    return Bought(order.item, order.price, charge["id"])


async def ainline(op: Operation, stage: str, key: str, order: Order, note: str = "") -> Bought:
    here = STAGES[stage]
    here.runs.append(order)
    charge = here.charge(op.downstream_key("charge"))
    happens = here.act("inline")
    if happens is not None:
        await happens
    return Bought(order.item, order.price, charge["id"])


# Phases


def phased(op: SyncOperation, stage: str, key: str, order: Order, note: str = "") -> Bought:
    here = STAGES[stage]
    here.runs.append(order)
    op.phase("ordered", here.database.insert_blocking, order.item)
    here.act("ordered")
    charge = op.call("charge", here.charge, repeatable=False)
    here.act("paid")
    op.phase("paid", here.database.insert_blocking, f"{order.item} paid")
    return Bought(order.item, order.price, charge["id"])


async def aphased(op: Operation, stage: str, key: str, order: Order, note: str = "") -> Bought:
    here = STAGES[stage]
    here.runs.append(order)
    await op.phase("ordered", here.database.insert, order.item)
    happens = here.act("ordered")
    if happens is not None:
        await happens
    charge = await op.call("charge", here.charge, repeatable=False)
    here.act("paid")
    await op.phase("paid", here.database.insert, f"{order.item} paid")
    return Bought(order.item, order.price, charge["id"])


# The outbox


def outbox(op: SyncOperation, stage: str, key: str, order: Order, note: str = "") -> Bought:
    here = STAGES[stage]
    here.runs.append(order)
    here.database.insert_blocking(op.connection, order.item)
    op.defer("charge", {"stage": stage, "item": order.item})
    return Bought(order.item, order.price)


async def aoutbox(op: Operation, stage: str, key: str, order: Order, note: str = "") -> Bought:
    here = STAGES[stage]
    here.runs.append(order)
    await here.database.insert(op.connection, order.item)
    op.defer("charge", {"stage": stage, "item": order.item})
    return Bought(order.item, order.price)


async def deliver(message: Message) -> dict[str, Any]:
    """What a worker does for the outbox."""
    charge = STAGES[message.payload["stage"]].charge(message.downstream_key)
    return {"item": message.payload["item"], "price": "9.90", "charge": charge["id"]}


FUNCTIONS: dict[str, tuple[Any, Callable[..., Any], Callable[..., Any]]] = {
    "local": (LOCAL, local, alocal),
    "inline": (INLINE, inline, ainline),
    "phased": (PHASED, phased, aphased),
    "outbox": (OUTBOX, outbox, aoutbox),
}
