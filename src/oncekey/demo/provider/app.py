"""The provider's API: charges, their look-up, and the switches for faults and webhooks."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from http import HTTPStatus
from typing import Any, Final

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from oncekey.core.errors import ConfigurationError
from oncekey.demo.provider.faults import BEFORE, Fault, Kind, StandingFault, UnknownFaultError
from oncekey.demo.provider.ledger import Booking, Ledger, Order
from oncekey.demo.provider.silence import Dropped, Hung
from oncekey.demo.provider.webhooks import Webhooks

_CURRENCY: Final = re.compile(r"[A-Z]{3}")
_LARGEST: Final = 10**12
_LONGEST_NAME: Final = 100


class RefusedError(Exception):
    """A request that the provider does not take."""

    def __init__(self, status: HTTPStatus, code: str, detail: str) -> None:
        super().__init__(code)
        self.answer = _error(status, code, detail)


class Provider:
    """The endpoints."""

    def __init__(self, ledger: Ledger, webhooks: Webhooks) -> None:
        self._ledger = ledger
        self._webhooks = webhooks
        self._standing = StandingFault()

    async def charge(self, request: Request) -> Response:
        """`POST /charges`: a charge is in the ledger before anything is answered."""
        order = _order(await _data(request))
        key = request.headers.get("idempotency-key")
        fault = self._fault(request)
        if fault is not None and fault.kind is Kind.DELAY:
            await asyncio.sleep(fault.seconds)
        elif fault is not None and fault.kind in BEFORE:
            return _faulty(fault)
        deduplicate = request.headers.get("x-demo-dedup", "on").lower() != "off"
        booking = await self._ledger.book(order, key, deduplicate=deduplicate)
        if not booking.repeated:
            self._webhooks.tell(booking.charge)
        if fault is not None and fault.kind is not Kind.DELAY:
            return _faulty(fault)
        return _booked(order, booking)

    async def charges(self, request: Request) -> Response:
        """`GET /charges`, all or those of `?downstream_key=`."""
        found = await self._ledger.charges(request.query_params.get("downstream_key"))
        return JSONResponse({"charges": [charge.shown() for charge in found]})

    async def faults(self, request: Request) -> Response:
        """`/faults`: the fault that stands, another one, or none."""
        if request.method == "DELETE":
            self._standing.set(None)
        elif request.method == "POST":
            data = await _data(request)
            times = data.get("times")
            if times is not None and (type(times) is not int or times < 1):
                raise _invalid("`times` is a number from 1, or null for every request.")
            self._standing.set(_parsed(str(data.get("fault"))), times)
        return JSONResponse(self._standing.shown())

    async def webhooks(self, request: Request) -> Response:
        """`/webhooks`: where they go, or another address, or null for nowhere."""
        if request.method == "POST":
            url = (await _data(request)).get("url")
            try:
                self._webhooks.switch(None if url is None else str(url))
            except ConfigurationError as error:
                raise _invalid(str(error)) from error
        return JSONResponse({"url": self._webhooks.url})

    async def health(self, request: Request) -> Response:
        """`GET /healthz`."""
        del request
        return JSONResponse({"status": "ok"})

    def _fault(self, request: Request) -> Fault | None:
        """The request's own fault, or else the one that stands."""
        named = request.headers.get("x-demo-fault")
        return _parsed(named) if named else self._standing.strike()


def create_provider(ledger: Ledger, webhook_url: str | None, secret: str) -> Starlette:
    """The application."""
    webhooks = Webhooks(webhook_url, secret)
    provider = Provider(ledger, webhooks)

    @asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        yield
        await webhooks.stop()
        ledger.close()

    return Starlette(
        routes=[
            Route("/charges", provider.charge, methods=["POST"]),
            Route("/charges", provider.charges, methods=["GET"]),
            Route("/faults", provider.faults, methods=["GET", "POST", "DELETE"]),
            Route("/webhooks", provider.webhooks, methods=["GET", "POST"]),
            Route("/healthz", provider.health, methods=["GET"]),
        ],
        exception_handlers={RefusedError: _refused},
        lifespan=lifespan,
    )


def _faulty(fault: Fault) -> Response:
    match fault.kind:
        case Kind.HANG_AFTER:
            return Hung()
        case Kind.DROP_BEFORE | Kind.DROP_AFTER:
            return Dropped()
        case Kind.DECLINE:
            return _error(HTTPStatus.PAYMENT_REQUIRED, "card_declined", "The card was declined; nothing was charged.")
        case Kind.ERROR_BEFORE | Kind.ERROR_AFTER:
            return _error(HTTPStatus.INTERNAL_SERVER_ERROR, "internal_error", "Something went wrong at the provider.")
        case Kind.DELAY:
            raise AssertionError("a delay is no answer")


def _booked(order: Order, booking: Booking) -> Response:
    if booking.charge.order != order:
        detail = "This key belongs to a charge with other parameters."
        return _error(HTTPStatus.CONFLICT, "idempotency_key_reused", detail)
    status = HTTPStatus.OK if booking.repeated else HTTPStatus.CREATED
    return JSONResponse(booking.charge.shown(), status)


def _order(data: dict[str, Any]) -> Order:
    amount, currency, customer = (data.get(name) for name in ("amount_cents", "currency", "customer_id"))
    if type(amount) is not int or not 0 < amount <= _LARGEST:
        raise _invalid(f"`amount_cents` is a number from 1 to {_LARGEST}.")
    if not isinstance(currency, str) or _CURRENCY.fullmatch(currency) is None:
        raise _invalid("`currency` has three capital letters.")
    if not isinstance(customer, str) or not 0 < len(customer) <= _LONGEST_NAME:
        raise _invalid(f"`customer_id` has 1 to {_LONGEST_NAME} characters.")
    return Order(amount, currency, customer)


async def _data(request: Request) -> dict[str, Any]:
    try:
        data = json.loads(await request.body())
    except ValueError:
        data = None
    if not isinstance(data, dict):
        raise _invalid("The body is a JSON object.")
    return data


def _parsed(text: str) -> Fault:
    try:
        return Fault.parse(text)
    except UnknownFaultError as error:
        raise RefusedError(HTTPStatus.BAD_REQUEST, "unknown_fault", str(error)) from error


def _invalid(detail: str) -> RefusedError:
    return RefusedError(HTTPStatus.BAD_REQUEST, "invalid_request", detail)


async def _refused(_: Request, error: Exception) -> Response:
    assert isinstance(error, RefusedError)
    return error.answer


def _error(status: HTTPStatus, code: str, detail: str) -> Response:
    members = {"type": "about:blank", "title": status.phrase, "status": int(status), "detail": detail, "code": code}
    return JSONResponse(members, status, media_type="application/problem+json")
