"""What a type checker sees of the API. A line that ends in `# error: code` is one that it must refuse with that code.

The test beside it compares; nobody imports this module.
"""

from __future__ import annotations

import sqlite3
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Any, assert_type

from fastapi import Depends, FastAPI, Request

from oncekey import (
    INLINE,
    LOCAL,
    OUTBOX,
    PHASED,
    SINGLE_TENANT,
    Enrolment,
    Once,
    Operation,
    Policy,
    Receipt,
    RejectedError,
    Reply,
    Sighting,
    SyncOperation,
)
from oncekey.testing import operation, sync_operation

app = FastAPI()
once = Once("sqlite:///shop.db", policy=Policy(lease=timedelta(seconds=30)), migrate=True)
Policy(flavor="stripe", bind_to="principal", lease=60)
Policy(flavor="strip")  # error: arg-type
Policy(leases=60)  # error: call-arg
once.install(app, tenant=SINGLE_TENANT)


# The handler keeps its type.


@app.post("/orders", status_code=201)
@once.protect(effects=LOCAL)
async def create_order(amount: int, op: Operation[sqlite3.Connection]) -> str:
    assert_type(op.connection, sqlite3.Connection)
    assert_type(op.key, str | None)
    assert_type(op.scope, str)
    assert_type(op.attempt, int)
    assert_type(op.downstream_key("charge"), str)
    op.connection.no_such_method()  # error: attr-defined
    return "done"


@once.protect(effects=INLINE)
def charge(amount: int, op: SyncOperation) -> int:
    assert_type(op.connection, Any)
    return amount


async def unit_test(connection: sqlite3.Connection) -> None:
    assert_type(await create_order(7, op=operation(connection=connection)), str)
    await create_order(7, operation(connection=connection))
    await create_order("seven", operation(connection=connection))  # error: arg-type
    await create_order(7)  # error: call-arg
    await create_order(7, op=operation(connection="not a connection"))  # error: arg-type
    await create_order(7, op=sync_operation(connection=connection))  # error: arg-type
    assert_type(charge(7, op=sync_operation()), int)


# Steps infer what they return, of coroutines and of plain functions, and check the arguments of their functions.


async def written(connection: sqlite3.Connection, amount: int, note: str = "") -> int:
    return amount


async def charged(amount: int, *, key: str) -> dict[str, str]:
    return {"id": key}


def charged_blocking(amount: int, currency: str = "EUR", *, key: str) -> str:
    return key


async def charged_by_name(amount: int, *, currency: str, key: str) -> int:
    return amount


async def charged_for_many(shop: str, customer: str, amount: int, currency: str, *, key: str) -> int:
    return amount


async def keyless(amount: int) -> int:
    return amount


def number_written(connection: sqlite3.Connection, amount: int) -> int:
    return amount


@dataclass
class Charge:
    """What the provider answers."""

    id: str


def made(value: Any) -> Charge:
    """The same from plain data."""
    return Charge(value["id"])


@once.protect(effects=PHASED, complete=False, call_timeout=10, send_window=3, max_attempts=5, max_result_bytes=1000)
async def pay(op: Operation) -> dict[str, str]:
    assert_type(await op.phase("written", written, 7), int)
    assert_type(await op.phase("written by name", written, amount=7, note="tea"), int)
    assert_type(await op.phase("plain", lambda connection: "text"), str)
    await op.phase("written", written, "seven")  # error: call-overload
    await op.phase("written", written)  # error: call-overload
    await op.phase("written", written, 7, amuont=7)  # error: call-arg
    await op.phase("charge", lambda: 7)  # error: call-overload
    charge = await op.call("charge", charged, 7, repeatable=True, parameters={"amount": 7})
    assert_type(charge, dict[str, str])
    assert_type(await op.call("plain call", charged_blocking, 7, repeatable=timedelta(hours=1)), str)
    assert_type(await op.call("two arguments", charged_blocking, 7, "EUR", repeatable=False), str)
    assert_type(await op.call("four", charged_for_many, "s", "c", 7, "EUR", repeatable=True), int)
    assert_type(await op.call("bound", partial(charged_by_name, currency="EUR"), 7, repeatable=True), int)
    assert_type(await op.value("drawn", lambda: 1.5), float)
    assert_type(await op.value("rounded", round, 1.5), int)
    await op.value("rounded", round, "1.5")  # error: call-overload
    assert_type(await op.call("typed", charged, 7, repeatable=True, result=Charge), Charge)
    assert_type(await op.call("typed by a function", charged, 7, repeatable=True, result=made), Charge)
    await op.call("typed", charged, 7, repeatable=True, result=7)  # error: call-overload
    await op.call("typed", charged, "seven", repeatable=True, result=Charge)  # error: misc
    await op.call("charge", charged, 7)  # error: call-overload
    await op.call("charge", charged, 7, repeatable="yes")  # error: call-overload
    await op.call("charge", charged, "seven", repeatable=True)  # error: misc
    await op.call("charge", charged, repeatable=True)  # error: arg-type
    await op.call("charge", charged, 7, 8, repeatable=True)  # error: arg-type
    await op.call("charge", charged_by_name, 7, repeatable=True)  # error: arg-type
    await op.call("charge", keyless, 7, repeatable=True)  # error: arg-type
    return charge


@once.protect(effects=PHASED)
def pay_blocking(op: SyncOperation[sqlite3.Connection]) -> int:
    assert_type(op.phase("written", number_written, 7), int)
    assert_type(op.phase("plain", lambda connection: connection), sqlite3.Connection)
    op.phase("written", number_written, "seven")  # error: arg-type
    op.phase("written", str.upper)  # error: arg-type
    assert_type(op.call("charge", charged_blocking, 7, repeatable=False), str)
    assert_type(op.value("drawn", lambda: "text"), str)
    assert_type(op.call("typed", charged_blocking, 7, repeatable=True, result=Charge), Charge)
    op.call("charge", charged_blocking, 7)  # error: call-overload
    op.call("charge", charged_blocking, "seven", repeatable=True)  # error: misc
    return 7


@once.protect(effects=OUTBOX)
async def deferring(op: Operation[sqlite3.Connection]) -> None:
    op.defer("ship", {"item": "tea"})
    op.emit("tell", [1, 2], order_by="orders")
    op.defer("ship")  # error: call-arg


async def unit_test_of_steps() -> None:
    op = operation(connection=None)
    assert_type(await pay(op=op), dict[str, str])
    assert_type(op.steps, dict[str, Any])
    assert_type(await pay(op=op.resumed()), dict[str, str])
    assert_type(pay_blocking(op=sync_operation()), int)


# Every option has its type, and belongs to its effects.


@once.protect(
    effects=LOCAL,
    operation="everything",
    require_key=False,
    on_in_progress="wait",
    wait_max=3,
    lease=timedelta(seconds=30),
    deadline=600,
    ttl=86400,
    max_request_bytes=10,
    body_timeout=30,
    replay_headers=["etag"],
    fingerprint=lambda request: {"size": len(request.body)},
    header_syntax="strict",
    key_format="uuid",
    on_unknown=503,
)
async def everything() -> None: ...


@once.protect(
    effects=INLINE,
    on_5xx="store",
    naturally_idempotent=True,
    on_store_error="fail_open",
    is_definitely_not_executed=lambda error: isinstance(error, ConnectionRefusedError),
)
async def everything_inline() -> None: ...


@once.protect  # error: call-overload
async def bare() -> None: ...


@once.protect()  # error: call-overload
async def without_effects() -> None: ...


@once.protect(LOCAL)  # error: call-overload
async def positional() -> None: ...


@once.protect(effects="local")  # error: call-overload
async def by_name() -> None: ...


@once.protect(effects=LOCAL, leese=3)  # error: call-overload
async def misspelt() -> None: ...


@once.protect(effects=LOCAL, on_5xx="store")  # error: call-overload
async def stored_local() -> None: ...


@once.protect(effects=LOCAL, on_store_error="fail_open")  # error: call-overload
async def open_local() -> None: ...


@once.protect(effects=INLINE, key="maybe")  # error: call-overload
async def maybe() -> None: ...


@once.protect(effects=PHASED, on_5xx="store")  # error: call-overload
async def stored_phased() -> None: ...


@once.protect(effects=OUTBOX, is_definitely_not_executed=lambda error: True)  # error: call-overload
async def hooked_outbox() -> None: ...


@once.protect(effects=OUTBOX, complete=False)  # error: call-overload
async def completed_outbox() -> None: ...


# What is installed, and by path.


def tenant_of(request: Request) -> str:
    return request.url.path


async def slow_tenant_of(request: Request) -> str:
    return request.url.path


def number_of(request: Request) -> int:
    return 7


by_path = once.by_path(effects=INLINE, operation="old", require_key=False, not_executed_statuses={401}, lease=30)
assert_type(by_path, Enrolment)
once.by_path(effects=INLINE, operation="old", leese=3)  # error: call-arg
once.by_path(effects=INLINE, operation="old", lease="long")  # error: arg-type
once.by_path(effects=INLINE, operation="old", complete=False)  # error: call-arg

once.install(app, tenant=tenant_of, principal=slow_tenant_of, status=None, enrol={"POST /old": by_path})
once.install(app, tenant=Depends(tenant_of), status_dependencies=[Depends(tenant_of)], keep_headers=["x-region"])
once.install(app, tennant=SINGLE_TENANT)  # error: call-arg
once.install(app)  # error: call-arg
once.install(app, tenant=number_of)  # error: arg-type
once.install(app, tenant=tenant_of, status=7)  # error: arg-type
once.install(app, tenant=tenant_of, enrol={"POST /old": "old"})  # error: dict-item


# A provider's no carries what it said.


def declined(no: RejectedError[dict[str, str]]) -> str:
    assert_type(no.value, dict[str, str])
    return no.value["code"]


assert_type(RejectedError({"code": "expired"}), RejectedError[dict[str, str]])
assert_type(RejectedError(), RejectedError[None])
declined(RejectedError(7))  # error: arg-type
declined(RejectedError({"code": "expired"}))


async def told() -> None:
    try:
        await charged(7, key="key")
    except RejectedError as no:
        assert_type(no.value, Any)


assert_type(Reply(201, {"id": 7}).status, int)
Sighting("charged")  # error: arg-type


# A function is called without its operation.


@once.function(key="number", effects=LOCAL)
def book(op: SyncOperation[sqlite3.Connection], number: str, amount: int = 0) -> str:
    return number


@once.function(key=lambda number: f"n-{number}", effects=PHASED, call_timeout=3)
async def pay_number(op: Operation, number: int) -> int:
    return number


@once.function(key="name", effects=INLINE, on_store_error="fail_open", naturally_idempotent=True)
def ping(op: SyncOperation, name: str, note: Any = None) -> None: ...


@once.inbox(consumer="stock", effects=LOCAL)
def take(op: SyncOperation, event: dict[str, str]) -> None: ...


@once.inbox(consumer="mail", effects=LOCAL)
async def mail(op: Operation, event: str) -> None: ...


async def calls() -> None:
    assert_type(book("7", amount=3), str)
    book(7)  # error: arg-type
    assert_type(await pay_number(7), int)
    ping("host", 1, 2)  # error: call-arg
    assert_type(take("m-1", {"product": "tea"}), Receipt)
    take("m-1")  # error: call-arg
    assert_type(await mail("m-1", "hello"), Receipt)


once.function(key="number", effects=LOCAL, header_syntax="bare")  # error: call-arg
once.function(key="number", effects=LOCAL)(len)  # error: arg-type
