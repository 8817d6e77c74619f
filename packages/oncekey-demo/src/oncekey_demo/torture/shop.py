"""The application of a run: a route for each kind of side effects, including LOCAL in wait mode, and its tables.

The tables are in the store's database; the run reads them at the end. From a store of cells it reads only the records,
page by page. Such a store shares no transaction, so there are no business rows, no messages and no log of writes: only
the provider's ledger shows the effects.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass
from http import HTTPStatus
from typing import TYPE_CHECKING, Any, Final, Self
from uuid import uuid4

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from oncekey.cells import Asking, Cell, Index, Seen, Swap
from oncekey.core.errors import NotExecutedError, RejectedError
from oncekey.core.flow import Body, Mode, Rows, Statement, Transaction, Value
from oncekey.core.model import INLINE, LOCAL, OUTBOX, PHASED
from oncekey.core.topics import Message, Reply
from oncekey.engine.operation import Operation
from oncekey.once import Once
from oncekey.stores.cells_upkeep import FIRST, gathered
from oncekey.wire import declared, understand
from oncekey_demo.charging import Charging, ProviderFailedError
from oncekey_demo.data import Tables
from oncekey_demo.torture.plan import CALL_TIMEOUT, Settings, policy_for

if TYPE_CHECKING:
    from collections.abc import Callable

    from oncekey.engine.shell import AsyncEngine

CURRENCY = "EUR"


@dataclass(frozen=True, slots=True)
class Wanted:
    """The content of a request. The customer is the key itself, so that the ledger shows the key of a charge."""

    customer: str
    cents: int
    recognises: bool = True
    """Whether the provider recognises a repeated downstream key."""
    declines: bool = False
    """Whether the provider declines the charge."""

    @classmethod
    def of(cls, data: dict[str, Any]) -> Self:
        """Read a body, or a payload."""
        return cls(data["customer"], data["cents"], data["recognises"], data["declines"])

    def data(self) -> dict[str, Any]:
        """The data for JSON."""
        return {
            "customer": self.customer,
            "cents": self.cents,
            "recognises": self.recognises,
            "declines": self.declines,
        }

    @property
    def label(self) -> str:
        """A label for the request: two bodies under one key differ in it."""
        return f"{self.cents} cents"


async def charge(url: str, wanted: Wanted, fault: str | None = None, *, key: str) -> str:
    """Charge, and return the charge's id."""
    order = {"customer_id": wanted.customer, "amount_cents": wanted.cents, "currency": CURRENCY}
    charge = await Charging(url, CALL_TIMEOUT * 2).charge(
        order, key, deduplicate=wanted.recognises, fault="decline" if wanted.declines else fault
    )
    made: str = charge["id"]
    return made


def _new_id() -> str:
    return uuid4().hex


async def _settle(_: Any, op: Operation, customer: str) -> str:  # noqa: ANN401  (the driver's own connection)
    op.emit(RECEIPT, {"customer": customer})
    return "settled"


RECEIPT: Final = "torture.receipt"
TRANSFER: Final = "torture.transfer"
TRANSFER_ONCE: Final = "torture.transfer.once"

WAITS: Final = {"on_in_progress": "wait", "wait_max": 1.0, "replay_cache": 2.0}
"""A duplicate booking waits for the first one, but not as long as its client waits; the response is cached."""

FAULT: Final = "x-torture-fault"
PAUSE: Final = "x-torture-pause"
RAISE: Final = "x-torture-raise"


class TorturedError(Exception):
    """Raised by a handler after it has written its rows, if a header requests it."""


class Shop:
    """The application and its `Once`, for servers and for workers.

    Its operations and topics have unique names, so its workers do not touch other records.
    """

    def __init__(self, settings: Settings) -> None:
        self.once = Once(settings.store, policy=policy_for(settings.store))
        self.books = Books(self.once.asynchronous)
        self._provider = settings.provider
        shares = declared(understand(settings.store).kind).store().outbox is not None
        self.app = Starlette(
            routes=[*(self._all() if shares else self._unshared()), Route("/healthz", _healthz)],
            exception_handlers={
                NotExecutedError: _not_executed,
                ProviderFailedError: _uncertain,
                TimeoutError: _uncertain,
                TorturedError: _raised,
            },
        )
        self.once.install(self.app, tenant=lambda _: settings.tenant)

    def _all(self) -> list[Route]:
        self._add_topics()
        return [
            Route("/orders", self._local("/orders", "torture.order", emits=True), methods=["POST"]),
            Route("/bookings", self._local("/bookings", "torture.booking", emits=False, **WAITS), methods=["POST"]),
            Route("/payments", self._payments(), methods=["POST"]),
            Route("/transfers", self._transfers(), methods=["POST"]),
            Route("/notifications", self._notifications(), methods=["POST"]),
        ]

    def _unshared(self) -> list[Route]:
        """The routes for a store that shares no transaction: with calls, and without phases."""
        return [
            Route("/payments", self._calls(), methods=["POST"]),
            Route("/notifications", self._notifications(), methods=["POST"]),
        ]

    def _calls(self) -> Any:  # noqa: ANN401
        @self.once.protect(effects=PHASED, operation="torture.payment", low_stakes=True)
        async def payment(request: Request, op: Operation) -> Response:
            wanted = Wanted.of(await request.json())
            made = await op.value("made", _new_id)
            await _trouble(request)
            try:
                paid = await op.call(
                    "charged",
                    charge,
                    self._provider,
                    wanted,
                    request.headers.get(FAULT),
                    repeatable=wanted.recognises,
                    parameters=wanted.data(),
                )
            except RejectedError:
                return JSONResponse({"declined": made, "attempt": op.attempt}, HTTPStatus.PAYMENT_REQUIRED)
            return JSONResponse({"id": made, "charge": paid, "attempt": op.attempt}, HTTPStatus.CREATED)

        return payment

    def _local(self, path: str, operation: str, *, emits: bool, **policy: Any) -> Any:  # noqa: ANN401  (an endpoint)
        """A LOCAL route. Without `emits`, a store that can do so commits the rows in the message of the record."""

        @self.once.protect(effects=LOCAL, operation=operation, **policy)
        async def order(request: Request, op: Operation) -> Response:
            wanted = Wanted.of(await request.json())
            made = await self.books.add_row(op.connection, path, wanted.customer, wanted.label)
            if emits:
                op.emit(RECEIPT, {"customer": wanted.customer})
            await _trouble(request)
            return JSONResponse({"id": made, "attempt": op.attempt}, HTTPStatus.CREATED)

        return order

    def _payments(self) -> Any:  # noqa: ANN401
        @self.once.protect(effects=PHASED, operation="torture.payment")
        async def payment(request: Request, op: Operation) -> Response:
            wanted = Wanted.of(await request.json())
            made = await op.phase("created", self.books.add_row, "/payments", wanted.customer, wanted.label)
            await _trouble(request)
            try:
                paid = await op.call(
                    "charged",
                    charge,
                    self._provider,
                    wanted,
                    request.headers.get(FAULT),
                    repeatable=wanted.recognises,
                    parameters=wanted.data(),
                )
            except RejectedError:
                return JSONResponse({"declined": made, "attempt": op.attempt}, HTTPStatus.PAYMENT_REQUIRED)
            await op.phase("settled", _settle, op, wanted.customer)
            return JSONResponse({"id": made, "charge": paid, "attempt": op.attempt}, HTTPStatus.CREATED)

        return payment

    def _transfers(self) -> Any:  # noqa: ANN401
        @self.once.protect(effects=OUTBOX, operation="torture.transfer")
        async def transfer(request: Request, op: Operation) -> Response:
            wanted = Wanted.of(await request.json())
            await self.books.add_row(op.connection, "/transfers", wanted.customer, wanted.label)
            op.defer(TRANSFER if wanted.recognises else TRANSFER_ONCE, wanted.data())
            await _trouble(request)
            return Response(status_code=HTTPStatus.ACCEPTED)

        return transfer

    def _notifications(self) -> Any:  # noqa: ANN401
        @self.once.protect(effects=INLINE, operation="torture.notification", low_stakes=True)
        async def notify(request: Request, op: Operation) -> Response:
            wanted = Wanted.of(await request.json())
            try:
                key = op.downstream_key("notified")
                paid = await charge(self._provider, wanted, request.headers.get(FAULT), key=key)
            except RejectedError:
                return JSONResponse({"declined": wanted.customer}, HTTPStatus.PAYMENT_REQUIRED)
            return JSONResponse({"charge": paid, "attempt": op.attempt}, HTTPStatus.CREATED)

        return notify

    def _add_topics(self) -> None:
        async def transfer(message: Message) -> Reply:
            wanted = Wanted.of(message.payload)
            try:
                paid = await charge(self._provider, wanted, key=message.downstream_key)
            except RejectedError:
                raise RejectedError(Reply(HTTPStatus.PAYMENT_REQUIRED, {"declined": wanted.customer})) from None
            return Reply(HTTPStatus.CREATED, {"charge": paid}, provider_id=paid)

        self.once.topic(TRANSFER, repeatable=True)(transfer)
        self.once.topic(TRANSFER_ONCE, repeatable=False)(transfer)

        @self.once.topic(RECEIPT, repeatable=True)
        async def receipt(message: Message) -> None:
            await self.books.add_delivery(message.payload["customer"], message.downstream_key)


async def _trouble(request: Request) -> None:
    """Perform the faults of the request's headers: a pause in which the process can be killed, or an error."""
    await asyncio.sleep(float(request.headers.get(PAUSE, "0")))
    if RAISE in request.headers:
        raise TorturedError


async def _healthz(_: Request) -> Response:
    return JSONResponse({"status": "ok"})


async def _not_executed(_: Request, __: Exception) -> Response:
    return JSONResponse({"code": "provider_unavailable"}, HTTPStatus.SERVICE_UNAVAILABLE)


async def _uncertain(_: Request, __: Exception) -> Response:
    return JSONResponse({"code": "provider_failed"}, HTTPStatus.BAD_GATEWAY)


async def _raised(_: Request, __: Exception) -> Response:
    return JSONResponse({"code": "raised"}, HTTPStatus.INTERNAL_SERVER_ERROR)


_NEEDS: Final = "torture needs SQLite, PostgreSQL or MariaDB: a store in memory ends with its process"
_CLEARED: Final = ("clear_parcels", "clear_dead_letters", "clear_records")


def now() -> int:
    """Microseconds of this machine's clock, by which all events of a run are ordered."""
    return time.time_ns() // 1000


class Books:
    """Writes rows through a handler's connection, and reads them in separate transactions."""

    def __init__(self, engine: Callable[[], AsyncEngine]) -> None:
        self._tables = Tables(engine, __package__, _NEEDS)

    async def open(self) -> None:
        """Recreate the tables and the log, dropping those of an earlier run."""
        names = [*self._tables.named("drop_"), *self._tables.named("create_")]
        await self._tables.run(Mode.ATOMIC, *((name, {}) for name in names))

    async def close(self, scope: str) -> None:
        """Remove the tables, the triggers and the records of this run."""
        params: dict[str, Value] = {"scope": scope}
        cleared = [(name, params) for name in _CLEARED]
        await self._tables.run(Mode.ATOMIC, *((name, {}) for name in self._tables.named("drop_")), *cleared)

    async def add_row(self, connection: Any, route: str, key: str, wanted: str) -> str:  # noqa: ANN401
        """Write a business row in the open transaction of `connection`."""
        made = uuid4().hex
        params: dict[str, Value] = {"id": made, "route": route, "key": key, "wanted": wanted, "at": now()}
        await self._tables.execute(connection, "add_row", params)
        return made

    async def add_delivery(self, key: str, downstream_key: str) -> None:
        """Record the delivery of a message."""
        await self._tables.write("add_delivery", {"key": key, "downstream_key": downstream_key})

    async def read(self, statement: str, **params: Value) -> Rows:
        """The rows of a statement."""
        return await self._tables.read(statement, params)


_RECORDS: Final = (Index.UNFINISHED, Index.UNKNOWN, Index.EXPIRING, Index.KEPT)
_OPEN: Final = frozenset({"in_progress", "failed_retryable"})


class CellBooks:
    """`Books` for a store of cells, which has only records."""

    def __init__(self, engine: AsyncEngine) -> None:
        self._engine = engine

    async def open(self) -> None:
        """A store of cells needs no tables."""

    async def close(self, scope: str) -> None:
        """Remove the records of this run."""
        await self._run("clear_records", _clearing, scope=scope)

    async def read(self, statement: str, **params: Value) -> Rows:
        """The rows of the statement with this name in `sql/`; none for tables that a store of cells lacks."""
        match statement:
            case "foreign":
                return [{"records": len(await self._run("foreign", _reading)), "parcels": 0}]
            case "records":
                return await self._run("records", _reading, **params)
            case "unfinished":
                lines = await self._run("records", _reading, **params)
                return [{"key": one["key"], "what": f"phased {one['state']}"} for one in lines if _is_left(one)]
            case _:
                return ()

    async def _run(self, name: str, command: Any, **params: Value) -> Rows:  # noqa: ANN401  (a statement of cells)
        statement = Statement(f"torture.{name}", command, dict(params))

        def body() -> Body[Rows]:
            return (yield statement)

        return await self._engine.driver.run(Transaction(f"torture.{name}", Mode.READ, body))


def _reading(scope: str | None = None) -> Asking[Rows]:
    cells: list[Cell] = []
    for index in _RECORDS:
        some, _ = yield from gathered(index, FIRST, 1 << 62, None, lambda cell, _: scope in {None, cell["scope"]})
        cells += some
    return sorted(cells, key=lambda cell: str(cell["key"]))


def _clearing(scope: str) -> Asking[Rows]:
    cells = yield from _reading(scope)
    for cell in cells:
        yield Swap(cell["scope"], cell["key"], Seen(cell["incarnation"], cell["version"]), None, None)
    return cells


def _is_left(cell: Cell) -> bool:
    """Whether the workers have to finish this record without its client: a PHASED request that has begun."""
    return bool(cell["effects"] == "phased" and cell["state"] in _OPEN and cell["recovery_point"] != "started")
