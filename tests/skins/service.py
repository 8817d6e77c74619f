"""A small payments service, described once: what its routes do, whatever framework serves them and however it waits.

A route is a generator that yields what it wants done (a row, a phase, a call, ...) and returns what it says. `blocking`
and `waiting` do that with the operation that a `def` or an `async def` handler was handed; `unheld` does it where there
is none, because the application was enrolled by path. So a skin only reads a request and makes a response.

An order may say how its handler is to behave: `hold` names a file that it waits for, `die` the step after which its
process is killed, if it is the first attempt.
"""

from __future__ import annotations

import asyncio
import http.client
import json
import os
import signal
import sqlite3
import time
import uuid
from collections.abc import Callable, Generator, Iterator
from contextlib import closing
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeAlias
from urllib.parse import urlsplit

import psycopg

from harness.asgi import until as arrives
from harness.patience import PATIENCE
from oncekey.core.model import INLINE, LOCAL, OUTBOX, PHASED, Effects
from oncekey.core.topics import Message, Reply
from oncekey.databases.placeholders import numbered, pyformat
from oncekey.once import Once

TABLES = (
    "CREATE TABLE orders (id TEXT PRIMARY KEY, tenant TEXT NOT NULL, item TEXT NOT NULL)",
    "CREATE TABLE payments (id TEXT PRIMARY KEY, tenant TEXT NOT NULL, charge TEXT)",
)
_ORDER = "INSERT INTO orders (id, tenant, item) VALUES (:id, :tenant, :item)"
_PAYMENT = "INSERT INTO payments (id, tenant) VALUES (:id, :tenant)"
_SETTLE = "UPDATE payments SET charge = :charge WHERE id = :id"

WRITER, READER, STRANGER = "token-of-a-writer", "token-of-a-reader", "token-of-another"
ITSELF = "token-that-is-taken-for-its-tenant"
TENANTS = {WRITER: "acme", READER: "acme", STRANGER: "bolt", ITSELF: ITSELF}

STEPS = ("drawn", "payment_created", "sending", "charged", "charge_created", "payment_settled")
"""Where a payment's process may be killed: after each of these, in their order."""


# What a route wants done.


@dataclass(frozen=True)
class Row:
    """A row of the transaction that commits with the key."""

    sql: str
    params: dict[str, Any]


@dataclass(frozen=True)
class Phase:
    """A row in a transaction of its own."""

    name: str
    sql: str
    params: dict[str, Any]


@dataclass(frozen=True)
class Value:
    """Something that is drawn once."""

    name: str


@dataclass(frozen=True)
class Charge:
    """A charge at the provider: announced, where the route is phased."""

    name: str
    announced: bool = True


@dataclass(frozen=True)
class Defer:
    """A message for a worker, which makes the answer."""

    payload: Any


@dataclass(frozen=True)
class Pause:
    """Wait for a file, or for some seconds."""

    until: Callable[[], bool]


@dataclass(frozen=True)
class Asked:
    """A request, as a skin has read it."""

    tenant: str
    order: dict[str, Any]
    delay: float = 0.0

    @property
    def dies_at(self) -> str | None:
        return self.order.get("die")


@dataclass(frozen=True)
class Said:
    """An answer: JSON, or pieces of a stream."""

    status: int
    body: Any = None
    location: str | None = None
    pieces: tuple[bytes, ...] = ()
    media_type: str = "application/json"

    @property
    def content(self) -> bytes:
        return json.dumps(self.body).encode()

    @property
    def headers(self) -> dict[str, str]:
        lines = {"Content-Type": self.media_type}
        return lines if self.location is None else {**lines, "Location": self.location}


Doing: TypeAlias = Generator[Any, Any, Said]


def place_order(asked: Asked) -> Doing:
    number, item = uuid.uuid4().hex, asked.order["item"]
    yield Row(_ORDER, {"id": number, "tenant": asked.tenant, "item": item})
    yield from _behave(asked)
    return Said(201, {"id": number, "item": item}, f"/orders/{number}")


def pay(asked: Asked) -> Doing:
    number = yield Value("drawn")
    yield from _behave(asked)
    yield Phase("payment_created", _PAYMENT, {"id": number, "tenant": asked.tenant})
    charge = yield Charge("charge_created")
    yield Phase("payment_settled", _SETTLE, {"id": number, "charge": charge["id"]})
    return Said(201, {"id": number, "charge": charge["id"]}, f"/payments/{number}")


def transfer(asked: Asked) -> Doing:
    number = uuid.uuid4().hex
    yield Row(_ORDER, {"id": number, "tenant": asked.tenant, "item": "transfer"})
    yield Defer({"id": number})
    return Said(asked.order.get("status", 202), None if asked.order.get("quiet") else {"id": number, "state": "sent"})


def charge_card(asked: Asked) -> Doing:
    yield from _behave(asked)
    charge = yield Charge("charge", announced=False)
    return Said(asked.order.get("status", 201), {"charge": charge["id"]})


def export(asked: Asked) -> Doing:
    """A stream, which is captured and kept."""
    yield from _behave(asked)
    drawn = uuid.uuid4().hex.encode()
    pieces = (b"one ", *(b"two ",) * asked.order.get("pieces", 1), drawn, b" three")
    return Said(201, pieces=pieces, media_type="text/plain")


def events(asked: Asked) -> Doing:
    """A stream that may never end, which is refused."""
    yield from _behave(asked)
    return Said(200, pieces=(b"data: 1\n\n",) * 3, media_type="text/event-stream")


@dataclass(frozen=True)
class Route:
    path: str
    effects: Effects
    does: Callable[[Asked], Doing]
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def operation(self) -> str:
        return self.path.strip("/")


ROUTES = (
    Route("/orders", LOCAL, place_order),
    Route("/payments", PHASED, pay, {"lease": timedelta(seconds=1), "call_timeout": timedelta(seconds=1)}),
    Route("/transfers", OUTBOX, transfer),
    Route("/charges", INLINE, charge_card),
    Route("/waiting", INLINE, charge_card, {"on_in_progress": "wait"}),
    Route("/exports", INLINE, export),
    Route("/events", INLINE, events),
)


def _behave(asked: Asked) -> Iterator[Pause]:
    hold = asked.order.get("hold")
    if hold is not None:
        Path(f"{hold}.entered").touch()
        yield Pause(Path(hold).exists)
    if asked.delay:
        ends = time.monotonic() + asked.delay
        yield Pause(lambda: time.monotonic() > ends)


# Doing it.


class Service:
    """What all routes share: the store, the provider, and who may call."""

    def __init__(self, once: Once, url: str, provider: str) -> None:
        self.once, self.url, self.provider = once, url, urlsplit(provider)

        @once.topic("transfer", repeatable=True)
        async def transfer(message: Message) -> Reply:
            charge = await asyncio.to_thread(self.charge, key=message.downstream_key)
            return Reply(201, {"id": message.payload["id"], "charge": charge["id"]})

    def admits(self, token: str, method: str) -> tuple[str, int]:
        """The tenant of a bearer token, and 200; or why it is not let in."""
        tenant = TENANTS.get(token.removeprefix("Bearer "))
        if tenant is None:
            return "", 401
        return tenant, 403 if method != "GET" and token.endswith(READER) else 200

    @staticmethod
    def takes(path: str, body: bytes) -> bool:
        """Whether a body is an order; skins ask before the key is claimed, so that a mistake does not use it up."""
        try:
            order = json.loads(body)
        except ValueError:
            return False
        return isinstance(order, dict) and (path != "/orders" or isinstance(order.get("item"), str))

    def orders(self, tenant: str) -> Said:
        found = execute(self.url, "SELECT id FROM orders WHERE tenant = :tenant", {"tenant": tenant})
        return Said(200, [number for (number,) in found])

    def charge(self, die: str | None = None, *, key: str) -> dict[str, Any]:
        """Ask the provider; the process may be killed right before and right after."""
        _die("sending", die)
        assert self.provider.hostname is not None
        with closing(http.client.HTTPConnection(self.provider.hostname, self.provider.port, timeout=PATIENCE)) as line:
            body = {"customer_id": "cus_1", "amount_cents": 1999, "currency": "EUR"}
            line.request("POST", "/charges", json.dumps(body), {"Idempotency-Key": key, **_JSON})
            made: dict[str, Any] = json.loads(line.getresponse().read())
        _die("charged", die)
        return made

    async def charge_waiting(self, die: str | None = None, *, key: str) -> dict[str, Any]:
        """The same for an `async def` handler."""
        return await asyncio.to_thread(self.charge, die, key=key)

    def blocking(self, doing: Doing, asked: Asked, op: Any) -> Said:
        """Do what a route wants, in a `def` handler."""
        mortal, surplus = asked.dies_at if op.attempt == 1 else None, asked.order.get("surplus", ())
        result: Any = None
        while True:
            try:
                wanted = doing.send(result)
            except StopIteration as ended:
                return ended.value
            match wanted:
                case Row(sql, params):
                    result = self.say(op.connection, sql, params)
                case Phase(name, sql, params):
                    result = op.phase(name, self.say, sql, params)
                case Value(name):
                    result = op.value(name, lambda: uuid.uuid4().hex)
                case Charge(name, announced=True):
                    result = op.call(name, self.charge, mortal, *surplus, repeatable=True)
                case Charge(name):
                    result = self.charge(mortal, key=op.downstream_key(name))
                case Defer(payload):
                    result = op.defer("transfer", payload)
                case Pause(until):
                    while not until():
                        time.sleep(0.005)
            _die(getattr(wanted, "name", ""), mortal)

    async def waiting(self, doing: Doing, asked: Asked, op: Any) -> Said:
        """The same in an `async def` handler."""
        mortal, surplus = asked.dies_at if op.attempt == 1 else None, asked.order.get("surplus", ())
        say = self.say_waiting
        result: Any = None
        while True:
            try:
                wanted = doing.send(result)
            except StopIteration as ended:
                return ended.value
            match wanted:
                case Row(sql, params):
                    result = await say(op.connection, sql, params)
                case Phase(name, sql, params):
                    result = await op.phase(name, say, sql, params)
                case Value(name):
                    result = await op.value(name, lambda: uuid.uuid4().hex)
                case Charge(name, announced=True):
                    result = await op.call(name, self.charge_waiting, mortal, *surplus, repeatable=True)
                case Charge(name):
                    result = await asyncio.to_thread(self.charge, mortal, key=op.downstream_key(name))
                case Defer(payload):
                    result = op.defer("transfer", payload)
                case Pause(until):
                    await arrives(until)
            _die(getattr(wanted, "name", ""), mortal)

    def unheld(self, doing: Doing, key: str) -> Said:
        """The same where nothing is handed to a handler: rows commit by themselves."""
        result: Any = None
        while True:
            try:
                wanted = doing.send(result)
            except StopIteration as ended:
                return ended.value
            match wanted:
                case Row(sql, params):
                    execute(self.url, sql, params)
                case Charge():
                    result = self.charge(key=key)
                case Pause(until):
                    while not until():
                        time.sleep(0.005)

    def say(self, connection: Any, sql: str, params: dict[str, Any]) -> None:
        """A statement through a blocking connection that a handler was handed."""
        if hasattr(connection, "execute"):
            connection.execute(sql if self.url.startswith("sqlite") else pyformat(sql), params)
            return
        with connection.cursor() as cursor:  # Django's
            cursor.execute(pyformat(sql), params)

    async def say_waiting(self, connection: Any, sql: str, params: dict[str, Any]) -> None:
        """A statement through a connection of SQLite's or asyncpg's."""
        if self.url.startswith("sqlite"):
            await connection.execute(sql, params)
        else:
            statement = numbered(sql)
            await connection.execute(statement.text, *statement.arguments(params))


_JSON = {"Content-Type": "application/json"}


def execute(url: str, sql: str, params: dict[str, Any] | None = None) -> list[Any]:
    """A statement on a connection of its own, as anybody else would say it."""
    if url.startswith("sqlite"):
        with closing(sqlite3.connect(url.removeprefix("sqlite:///"), timeout=PATIENCE)) as connection, connection:
            return connection.execute(sql, params or {}).fetchall()
    with psycopg.connect(url.replace("+psycopg", ""), autocommit=True) as connection:
        cursor = connection.execute(pyformat(sql).encode(), params)
        return cursor.fetchall() if cursor.description else []


def _die(step: str, wanted: str | None) -> None:
    if wanted is not None and step == wanted:
        os.kill(os.getpid(), signal.SIGKILL)
