"""The provider's API: make and list charges, set faults and the address for webhooks. It runs until a signal arrives.

Some faults send no response: the provider closes the connection, or leaves it open. It sends a signed webhook for each
charge, and repeats it a few times if the receiver does not accept it. It binds its socket first, and
reports a failure in one line.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import json
import logging
import re
import socket
import sys
import threading
import time
import uuid
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from http import HTTPStatus
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from oncekey.core.errors import ConfigurationError, OncekeyError
from oncekey_demo.charging import AnswerLostError, NothingSentError, ask, http_url
from oncekey_demo.provider_ledger import (
    BEFORE,
    Booking,
    ChargeOrder,
    Fault,
    FaultKind,
    Ledger,
    StandingFault,
    UnknownFaultError,
)

if TYPE_CHECKING:
    from starlette.types import Receive, Scope, Send

    from oncekey_demo.provider_ledger import Charge


BACKLOG = 2048


class CannotServeError(OncekeyError):
    """A server cannot start; the message has the reason."""


def listen(host: str, port: int) -> socket.socket:
    """A listening socket; raises `CannotServeError` with the reason if there is none."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listener = socket.socket(family, kind, protocol)
    except OSError as error:
        raise CannotServeError(f"{host} is not an address to listen on ({error.strerror})") from error
    try:
        # Connections of a server that just ended may linger; on Windows the option has another meaning.
        if hasattr(socket, "SO_REUSEPORT"):
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(BACKLOG)
    except (OSError, OverflowError) as error:
        listener.close()
        why = getattr(error, "strerror", None) or str(error)
        raise CannotServeError(f"cannot listen on {host}, port {port} ({why}): choose another one") from error
    return listener


def address_of(host: str, listener: socket.socket) -> str:
    """The URL of a listener."""
    shown = f"[{host}]" if ":" in host else host
    return f"http://{shown}:{listener.getsockname()[1]}"


DROP: Final = "oncekey.drop"


class DroppingProtocol(HttpToolsProtocol):
    """uvicorn's HTTP protocol, extended so that the application can close the connection."""

    def on_message_begin(self) -> None:
        """Begin a request."""
        super().on_message_begin()
        self.scope["extensions"] = {DROP: {"hang_up": self.transport.abort}}


class Hung(Response):
    """No response, for as long as the client waits."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Wait until the client disconnects."""
        del scope, send
        while (await receive())["type"] != "http.disconnect":
            pass


class Dropped(Hung):
    """No response: the connection is closed."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Close the connection."""
        scope["extensions"][DROP]["hang_up"]()
        await super().__call__(scope, receive, send)


SIGNATURE: Final = "Oncekey-Signature"
TRIES: Final = 6
_FIRST_PAUSE: Final = 0.2
_PATIENCE: Final = 10.0
_AT_ONCE: Final = 16

log = logging.getLogger("oncekey.provider")


def sign(body: bytes, secret: str, at: int) -> str:
    """The value of the signature header: the time, and an HMAC of the time and the body."""
    digest = hmac.new(secret.encode(), b"%d.%b" % (at, body), hashlib.sha256).hexdigest()
    return f"t={at},v1={digest}"


class Webhooks:
    """Sends webhooks in separate tasks, so that no request waits for one."""

    def __init__(self, url: str | None, secret: str) -> None:
        self._secret = secret
        self._slots = asyncio.Semaphore(_AT_ONCE)
        self._sending: set[asyncio.Task[None]] = set()
        self.url: str | None = None
        self.switch(url)

    def switch(self, url: str | None) -> None:
        """Send to this address from now on; None: send no webhooks."""
        if url is not None:
            http_url(url)
        self.url = url

    def notify(self, charge: Charge) -> None:
        """Start to send the webhook of a charge."""
        if self.url is None:
            return
        event = {"id": f"evt_{uuid.uuid4().hex}", "type": "charge.succeeded", "charge": charge.shown()}
        task = asyncio.get_running_loop().create_task(self._deliver(json.dumps(event).encode()))
        self._sending.add(task)
        task.add_done_callback(self._sending.discard)

    async def stop(self) -> None:
        """Drop undelivered webhooks."""
        for task in self._sending:
            task.cancel()
        await asyncio.gather(*self._sending, return_exceptions=True)

    async def _deliver(self, body: bytes) -> None:
        async with self._slots:
            for number in range(TRIES):
                if number:
                    await asyncio.sleep(_FIRST_PAUSE * 2 ** (number - 1))
                if self.url is None or await self._accepted(self.url, body):
                    return
        log.warning("oncekey provider: a webhook was not accepted after %d attempts", TRIES)

    async def _accepted(self, url: str, body: bytes) -> bool:
        # Signed for each attempt: a receiver rejects an old signature.
        headers = {"Content-Type": "application/json", SIGNATURE: sign(body, self._secret, int(time.time()))}
        try:
            reply = await ask("POST", url, content=body, headers=headers, patience=_PATIENCE)
        except (NothingSentError, AnswerLostError):
            return False
        return reply.ok


_CURRENCY: Final = re.compile(r"[A-Z]{3}")
_LARGEST: Final = 10**12
_LONGEST_NAME: Final = 100


class RefusedError(Exception):
    """The provider refuses the request."""

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
        """`POST /charges`: the charge is in the ledger before a response is sent."""
        order = _order(await _data(request))
        key = request.headers.get("idempotency-key")
        fault = self._fault(request)
        if fault is not None and fault.kind is FaultKind.DELAY:
            await asyncio.sleep(fault.seconds)
        elif fault is not None and fault.kind in BEFORE:
            return _faulty(fault)
        deduplicate = request.headers.get("x-demo-dedup", "on").lower() != "off"
        booking = await self._ledger.book(order, key, deduplicate=deduplicate)
        if not booking.repeated:
            self._webhooks.notify(booking.charge)
        if fault is not None and fault.kind is not FaultKind.DELAY:
            return _faulty(fault)
        return _booked(order, booking)

    async def charges(self, request: Request) -> Response:
        """`GET /charges`: all charges, or those with `?downstream_key=`."""
        found = await self._ledger.charges(request.query_params.get("downstream_key"))
        return JSONResponse({"charges": [charge.shown() for charge in found]})

    async def faults(self, request: Request) -> Response:
        """`/faults`: read, set or remove the standing fault."""
        if request.method == "DELETE":
            self._standing.set(None)
        elif request.method == "POST":
            data = await _data(request)
            times = data.get("times")
            if times is not None and (type(times) is not int or times < 1):
                raise _invalid("`times` must be at least 1, or null for every request.")
            self._standing.set(_parsed(str(data.get("fault"))), times)
        return JSONResponse(self._standing.shown())

    async def webhooks(self, request: Request) -> Response:
        """`/webhooks`: read or set the address for webhooks; null sends none."""
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
        """The fault that the request names, or the standing fault."""
        named = request.headers.get("x-demo-fault")
        return _parsed(named) if named else self._standing.take()


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
        case FaultKind.HANG_AFTER:
            return Hung()
        case FaultKind.DROP_BEFORE | FaultKind.DROP_AFTER:
            return Dropped()
        case FaultKind.DECLINE:
            return _error(HTTPStatus.PAYMENT_REQUIRED, "card_declined", "The card was declined; nothing was charged.")
        case FaultKind.ERROR_BEFORE | FaultKind.ERROR_AFTER:
            return _error(HTTPStatus.INTERNAL_SERVER_ERROR, "internal_error", "Something went wrong at the provider.")
        case FaultKind.DELAY:
            raise AssertionError("a delay has no response of its own")


def _booked(order: ChargeOrder, booking: Booking) -> Response:
    if booking.charge.order != order:
        detail = "This key belongs to a charge with other parameters."
        return _error(HTTPStatus.CONFLICT, "idempotency_key_reused", detail)
    status = HTTPStatus.OK if booking.repeated else HTTPStatus.CREATED
    return JSONResponse(booking.charge.shown(), status)


def _order(data: dict[str, Any]) -> ChargeOrder:
    amount, currency, customer = (data.get(name) for name in ("amount_cents", "currency", "customer_id"))
    if type(amount) is not int or not 0 < amount <= _LARGEST:
        raise _invalid(f"`amount_cents` must be a number from 1 to {_LARGEST}.")
    if not isinstance(currency, str) or _CURRENCY.fullmatch(currency) is None:
        raise _invalid("`currency` must be three capital letters.")
    if not isinstance(customer, str) or not 0 < len(customer) <= _LONGEST_NAME:
        raise _invalid(f"`customer_id` must have 1 to {_LONGEST_NAME} characters.")
    return ChargeOrder(amount, currency, customer)


async def _data(request: Request) -> dict[str, Any]:
    try:
        data = json.loads(await request.body())
    except ValueError:
        data = None
    if not isinstance(data, dict):
        raise _invalid("The body must be a JSON object.")
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


GRACE_SECONDS = 1


def serve(
    ledger: Path,
    *,
    host: str,
    port: int,
    webhooks: str | None,
    secret: str,
    until_eof: bool,
    announce: Callable[[str], None],
) -> None:
    """Serve until a signal arrives. Before the first request it calls `announce` with the provider's URL."""
    if webhooks is not None:
        http_url(webhooks)
    with listen(host, port) as listener:
        config = uvicorn.Config(
            create_provider(Ledger(ledger), webhooks, secret),
            http=DroppingProtocol,
            log_level="critical",  # uvicorn would warn about requests that hang on purpose
            access_log=False,
            lifespan="on",
            proxy_headers=False,
            timeout_graceful_shutdown=GRACE_SECONDS,
        )
        server = uvicorn.Server(config)
        if until_eof:
            threading.Thread(target=_end_with_parent, args=(server,), daemon=True).start()
        announce(address_of(host, listener))
        server.run(sockets=[listener])
        if not server.started:
            raise CannotServeError("the provider did not start")


def _end_with_parent(server: uvicorn.Server) -> None:
    """End the server at the end of standard input, a pipe that the parent holds open until it ends, even by kill -9."""
    while sys.stdin.buffer.read(1):
        pass
    server.should_exit = server.force_exit = True
