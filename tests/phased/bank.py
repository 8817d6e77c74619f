"""A bank that pays in phases: one script of steps for `async def` and `def`, processes that can be frozen anywhere.

A process is an application with a `Once` of its own. One that is frozen stands for one that died or was paused: the
test moves the clock past its lease and lets another process go on; thawed at the end, the old one must write nothing.
"""

from __future__ import annotations

import asyncio
import json
import threading
from collections import deque
from collections.abc import AsyncIterator, Callable, Generator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from datetime import timedelta
from decimal import Decimal
from typing import Any

from fastapi import FastAPI
from fastapi.responses import JSONResponse

from frameworks.realshop import MariadbDatabase, PostgresDatabase, SqliteFile
from frameworks.shop import tenant_of
from harness.asgi import Caller, Reply, until
from oncekey.core.errors import RejectedError
from oncekey.core.model import MINUTE, PHASED, Record, RecordId
from oncekey.core.policy import Policy
from oncekey.engine.operation import Operation, SyncOperation
from oncekey.engine.shell import AsyncEngine, Engine
from oncekey.once import Once
from oncekey.testing.claims import ManualClock
from oncekey.wire import aconnect, connect

KEY = "key-000000000000001"
LEASE = timedelta(minutes=5)


class Thawed(BaseException):
    """What a frozen thread wakes up to: whatever it does now, it does too late."""


@dataclass
class Provider:
    """A payment provider with a ledger of its own, which recognises keys or does not."""

    dedup: bool = True
    faults: deque[Any] = field(default_factory=deque)
    keys: list[str] = field(default_factory=list)
    ledger: dict[str, int] = field(default_factory=dict)
    charges: int = 0

    def charge(self, key: str, amount: int = 7) -> dict[str, Any]:
        """Take money; a fault says what goes wrong, before or after it was taken."""
        fault = self.faults.popleft() if self.faults else None
        if isinstance(fault, tuple):
            raise fault[0]  # before anything was sent
        self.keys.append(key)
        if isinstance(fault, RejectedError):
            raise fault
        if not self.dedup or key not in self.ledger:
            self.charges += 1
            self.ledger[key] = amount
        if isinstance(fault, BaseException):
            raise fault
        return {"id": f"ch_{key[:8]}", "amount": Decimal(amount), "parts": (1, 2)} if fault is None else fault


# Steps


@dataclass(frozen=True)
class Phase:
    """A transaction that writes a row."""

    name: str
    result: Any = None
    fails: BaseException | None = None
    inside: Callable[[Any], Any] | None = None
    """What else is done while it is open, handed the operation."""


@dataclass(frozen=True)
class Call:
    """A call to the provider."""

    name: str = "charge"
    repeatable: bool | timedelta = True
    given: Any = None
    amount: int = 7
    result: Any = None


@dataclass(frozen=True)
class Value:
    """Something drawn."""

    name: str
    draw: Callable[[], Any]


@dataclass(frozen=True)
class Here:
    """A place between steps."""

    name: str


Script = Callable[[Any], Generator[Any, Any, Any]]


def paying(**call: Any) -> Script:
    """Order, draw a number, charge, mark as paid."""

    def script(op: Any) -> Generator[Any, Any, Any]:
        yield Here("entered")
        order = yield Phase("order", {"number": 1, "items": ("tea",)})
        yield Here("order")
        drawn = yield Value("drawn", lambda: {"at": Decimal("1.5")})
        charge = yield Call(**call)
        yield Here("charge")
        paid = yield Phase("paid", {"by": charge["id"]})
        yield Here("paid")
        return {"order": order, "drawn": str(drawn["at"]), "charge": charge["id"], "paid": paid}

    return script


POINTS = ("entered", "order", "before charge", "after charge", "charge", "paid")
"""Where `paying` can be frozen, in order."""


class ClockedOnce(Once):
    """`Once` in a world whose time the test owns."""

    def __init__(self, url: str, clock: ManualClock, policy: Policy) -> None:
        super().__init__(url, policy=policy, migrate=True)
        self.clock = clock

    def asynchronous(self) -> AsyncEngine:
        loop = asyncio.get_running_loop()
        engine = self._engines.get(loop)
        if engine is None:
            engine = self._engines[loop] = aconnect(str(self.store), clock=self.clock)
        return engine

    def blocking(self) -> Engine:
        if self._blocking is None:
            self._blocking = connect(str(self.store), clock=self.clock)
        return self._blocking


class Process:
    """One application."""

    def __init__(self, bank: Bank, script: Script, policy: Policy, options: dict[str, Any]) -> None:
        self.bank = bank
        self.script = script
        self.runs = 0
        self.seen: list[Any] = []
        """What the script was given by its steps, in order."""
        self.freezes_at: str | None = None
        self.frozen = False
        self._dead = False
        self._woken = asyncio.Event()
        self._thaw = threading.Event()
        self._callers: list[asyncio.Task[Reply]] = []
        self.once = ClockedOnce(bank.database.url, bank.clock, policy)
        self.app = FastAPI()
        installing = {"tenant": tenant_of, **options.pop("install", {})}
        self.once.install(self.app, **installing)
        route = self.app.post("/payments", status_code=201, **options.pop("route", {}))
        effects = options.pop("effects", PHASED)
        name = options.pop("operation", "pay")
        route(
            self.once.protect(effects=effects, operation=name, **options)(
                self._sync() if bank.blocking else self._async()
            )
        )

    def _async(self) -> Any:
        async def pay(op: Operation) -> Any:
            self.runs += 1
            script = self.script(op)
            try:
                step = next(script)
                while True:
                    try:
                        result = await self._step(op, step)
                    except BaseException as error:
                        step = script.throw(error)
                    else:
                        self.seen.append(result)
                        step = script.send(result)
            except StopIteration as stop:
                return answer(stop.value)

        return pay

    def _sync(self) -> Any:
        def pay(op: SyncOperation) -> Any:
            self.runs += 1
            script = self.script(op)
            try:
                step = next(script)
                while True:
                    try:
                        result = self._step_blocking(op, step)
                    except BaseException as error:
                        step = script.throw(error)
                    else:
                        self.seen.append(result)
                        step = script.send(result)
            except StopIteration as stop:
                return answer(stop.value)

        return pay

    async def _step(self, op: Any, step: Any) -> Any:
        match step:
            case Phase():

                async def write(connection: Any) -> Any:
                    await self.bank.write(connection, step.name)
                    if step.inside is not None:
                        inside = step.inside(op)
                        if isinstance(inside, Call | Phase):
                            await self._step(op, inside)
                    if step.fails is not None:
                        raise step.fails
                    return step.result

                return await op.phase(step.name, write)
            case Call():

                async def charge(*, key: str) -> Any:
                    await self.reach(f"before {step.name}")
                    charged = self.bank.provider.charge(key, step.amount)
                    await self.reach(f"after {step.name}")
                    return charged

                return await op.call(
                    step.name, charge, repeatable=step.repeatable, parameters=step.given, result=step.result
                )
            case Value():
                return await op.value(step.name, step.draw)
            case Here():
                return await self.reach(step.name)

    def _step_blocking(self, op: Any, step: Any) -> Any:
        match step:
            case Phase():

                def write(connection: Any) -> Any:
                    self.bank.write_blocking(connection, step.name)
                    if step.inside is not None:
                        inside = step.inside(op)
                        if isinstance(inside, Call | Phase):
                            self._step_blocking(op, inside)
                    if step.fails is not None:
                        raise step.fails
                    return step.result

                return op.phase(step.name, write)
            case Call():

                def charge(*, key: str) -> Any:
                    self.reach_blocking(f"before {step.name}")
                    charged = self.bank.provider.charge(key, step.amount)
                    self.reach_blocking(f"after {step.name}")
                    return charged

                return op.call(step.name, charge, repeatable=step.repeatable, parameters=step.given, result=step.result)
            case Value():
                return op.value(step.name, step.draw)
            case Here():
                return self.reach_blocking(step.name)

    async def reach(self, place: str) -> None:
        """Freeze here, if this is where the process stops."""
        if place == self.freezes_at:
            self.frozen = True
            await self._woken.wait()

    def reach_blocking(self, place: str) -> None:
        if place == self.freezes_at:
            self.frozen = True
            self._thaw.wait()
            if self._dead:
                raise Thawed

    def caller(self, *, key: str = KEY, body: Any = None, headers: Any = ()) -> Caller:
        """A request that can be watched."""
        lines = [("Idempotency-Key", key), ("Content-Type", "application/json"), *headers]
        return Caller(self.app, "POST", "/payments", headers=lines, body=json.dumps(body or {}).encode())

    async def send(self, **request: Any) -> Reply:
        """A request and its answer."""
        return await self.caller(**request).run()

    async def send_and_freeze(self, place: str, **request: Any) -> None:
        """A request during which the process stops."""
        self.freezes_at = place
        self._callers.append(asyncio.create_task(self.send(**request)))
        await until(lambda: self.frozen)

    async def wake(self) -> Reply:
        """The frozen request goes on as if no time had passed; what it is answered."""
        self._woken.set()
        self._thaw.set()
        return await self._callers.pop()

    async def thaw(self) -> None:
        """Whatever was frozen comes to its end."""
        self._dead = True
        self._thaw.set()
        for caller in self._callers:
            caller.cancel()
            with suppress(BaseException):
                await caller
        self._callers.clear()


class Bank:
    """A database, a clock and a provider, and the processes that share them."""

    def __init__(self, database: Any, *, blocking: bool = False) -> None:
        self.database = database
        self.blocking = blocking
        self.clock = ManualClock()
        self.provider = Provider()

    @asynccontextmanager
    async def process(
        self, script: Script | None = None, *, policy: Policy | None = None, **options: Any
    ) -> AsyncIterator[Process]:
        """Serve, and stop."""
        process = Process(self, script or paying(), policy or Policy(lease=LEASE), options)
        async with process.once.lifespan(process.app):
            try:
                yield process
            finally:
                await process.thaw()

    async def write(self, connection: Any, item: str) -> None:
        if isinstance(self.database, PostgresDatabase) and self.database.package == "asyncpg":
            await connection.execute("INSERT INTO effect VALUES ($1)", item)
        elif isinstance(self.database, MariadbDatabase):
            async with connection.cursor() as cursor:
                await cursor.execute(self._insert, (item,))
        else:
            await connection.execute(self._insert, (item,))

    def write_blocking(self, connection: Any, item: str) -> None:
        connection.execute(self._insert, (item,))

    @property
    def _insert(self) -> str:
        return f"INSERT INTO effect VALUES ({'?' if isinstance(self.database, SqliteFile) else '%s'})"

    def lease_over(self) -> None:
        """Whoever runs now has been silent for too long."""
        self.clock.advance(6 * MINUTE)

    @property
    def effects(self) -> list[str]:
        """The rows that phases wrote."""
        return sorted(item for (item,) in self.database.execute("SELECT item FROM effect"))

    def execute(self, sql: str) -> list[Any]:
        """What anybody could ask or change; `{record}` and `{outbox}` are the tables."""
        names = {"record": "oncekey_record", "outbox": "oncekey_outbox"}
        if isinstance(self.database, PostgresDatabase):
            names = {"record": "oncekey.record", "outbox": "oncekey.outbox"}
        rows: list[Any] = self.database.execute(sql.format(**names))
        return rows

    async def record(self, key: str = KEY, tenant: str = "acme") -> Record:
        """The record as it stands."""
        engine = aconnect(self.database.url, clock=self.clock)
        try:
            scopes = {scope for (scope,) in self.execute("SELECT scope FROM {record}")}
            for scope in scopes:
                found = (await engine.find(RecordId(scope, key))).record
                if found is not None:
                    return found
        finally:
            await engine.close()
        raise AssertionError(f"there is no record of {key} of {tenant}")

    @property
    def state(self) -> str | None:
        """Where the only record stands."""
        rows = self.execute("SELECT state FROM {record}")
        return rows[0][0] if rows else None


def answer(value: Any) -> Any:
    """A script returns a status, a status and a body, or the body of a 201."""
    if isinstance(value, int):
        return JSONResponse({"status": value}, status_code=value)
    if isinstance(value, tuple):
        return JSONResponse(value[1], status_code=value[0])
    return value
