"""Webhooks: how messages are verified and applied. One flow, with endpoints for ASGI and WSGI.

A webhook changes only UNKNOWN records: for a record in progress it is stored as evidence, and a settled record stays.
"""

from __future__ import annotations

import hashlib
import json
import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from http import HTTPStatus
from typing import TYPE_CHECKING, Any, Final, Protocol, TypeAlias, TypedDict

from oncekey.core.errors import ConfigurationError, ResultNotStorableError, StoreError
from oncekey.core.flow import Flow, adrive, drive
from oncekey.core.keys import key_digest
from oncekey.core.resolution import SIGNATURE_HEADER, SIGNATURE_TOLERANCE, CallReport, Executed, Rejected, is_genuine
from oncekey.core.resolvers import Resolvers, Sighting, to_text
from oncekey.core.transitions import Actor, Mover
from oncekey.engine import reconcile
from oncekey.engine.notifying import notify_failure
from oncekey.engine.reconcile import EvidenceEffect, Received
from oncekey.frameworks.blocking import TOO_LARGE
from oncekey.frameworks.wsgi import lines_of, read
from oncekey.observe.events import Messaged, Notify

if TYPE_CHECKING:
    from wsgiref.types import StartResponse, WSGIEnvironment

    from oncekey.core.model import Refuse
    from oncekey.core.policy import Policy
    from oncekey.engine.shell import AsyncEngine, Engine
    from oncekey.frameworks.asgi import Receive, Scope, Send
    from oncekey.ports.store import Store


log = logging.getLogger("oncekey")

Secret: TypeAlias = str | bytes
Secrets: TypeAlias = "Secret | Sequence[Secret] | None"
Verify: TypeAlias = "Callable[[Mapping[str, str], bytes], bool]"
Parse: TypeAlias = "Callable[[Any], Sighting | None]"
MAX_BODY: Final = 256 * 1024
SHORTEST_SECRET: Final = 16
_LONGEST_NAME: Final = 500
Headers: TypeAlias = "Iterable[tuple[bytes, bytes]]"
"""The header lines of a request, with names in lower case."""


class WebhookRules(Protocol):
    """The interface of `Once` that settling a message needs."""

    policy: Policy
    notify: Notify | None

    @property
    def resolvers(self) -> Resolvers:
        """Its resolvers."""

    def policy_of(self, operation: str) -> Policy:
        """The policy of an operation."""


class WebhookOptions(TypedDict, total=False):
    """Settings of one webhook. `verify` replaces `secret` for a provider with another signature scheme."""

    verify: Verify
    name: str
    header: str
    tolerance: float
    max_body: int
    clock: Callable[[], float]


@dataclass(frozen=True, slots=True)
class WebhookReply:
    """The response to the sender: 2xx for every message that need not be sent again."""

    status: int
    detail: str

    @property
    def body(self) -> bytes:
        """The JSON body of the response."""
        return json.dumps({"detail": self.detail}).encode()


@dataclass(frozen=True, slots=True)
class VerifiedEvent:
    """A message with a fresh signature of one of the secrets, and its content."""

    sighting: Sighting
    body: bytes


class WebhookReceiver:
    """The rules of one webhook; `path` is where it is served, if oncekey routes it."""

    def __init__(
        self,
        rules: WebhookRules,
        path: str | None,
        *,
        secret: Secrets,
        parse: Parse,
        verify: Verify | None = None,
        name: str = "webhook",
        header: str = SIGNATURE_HEADER.decode(),
        tolerance: float = SIGNATURE_TOLERANCE,
        max_body: int = MAX_BODY,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.header = header.lower()
        self.max_body = max_body
        self._rules = rules
        self._is_genuine = self._signed_by(secret) if verify is None else _verified_by(verify, secret)
        self._trusts: frozenset[object] = frozenset(_secrets(secret) if verify is None else (verify,))
        self._parse = parse
        self._name = name
        self._tolerance = tolerance
        self._clock = clock
        self._mover = Mover(Actor.WEBHOOK, name if path is None else f"{name} at {path}")

    def added_to(self, known: dict[str, frozenset[object]]) -> WebhookReceiver:
        """Register the name with its secrets. A name belongs to one account: it scopes the provider's ids."""
        there = known.setdefault(self._name, self._trusts)
        if not there & self._trusts:
            raise ConfigurationError(
                f"two webhooks with different secrets are both named {self._name!r}: give each account its own name, "
                f'as in once.webhook(..., name="account-2"), because two accounts may use the same ids'
            )
        return self

    def verify(self, headers: Headers, body: bytes | None) -> VerifiedEvent | WebhookReply:
        """Verify a request before the store is used; a body of None was too long to be read."""
        verified = self._verified(headers, body)
        return verified if isinstance(verified, VerifiedEvent) else self._counted(verified)

    def answer_blocking(self, host: BlockingHost, headers: Headers, body: bytes | None) -> WebhookReply:
        """Verify a request and apply it, in the thread that serves it."""
        verified = self.verify(headers, body)
        if isinstance(verified, WebhookReply):
            return verified
        engine = host.blocking()
        return drive(self.apply(engine.store, verified), engine.driver.run)

    def _signed_by(self, secret: Secrets) -> Callable[[Headers, bytes], bool]:
        secrets, field = _secrets(secret), self.header.encode("latin-1")

        def signed(headers: Headers, body: bytes) -> bool:
            lines = [value.decode("latin-1") for name, value in headers if name == field]
            header = lines[0] if len(lines) == 1 else ""
            return is_genuine(header, body, secrets, self._clock(), self._tolerance)

        return signed

    def _counted(self, reply: WebhookReply) -> WebhookReply:
        if self._rules.notify is not None:
            self._rules.notify(Messaged(self._name, reply.status))
        return reply

    def _verified(self, headers: Headers, body: bytes | None) -> VerifiedEvent | WebhookReply:
        if body is None or len(body) > self.max_body:
            return WebhookReply(413, "The body is too large.")
        if not self._is_genuine(headers, body):
            log.warning("oncekey: %s refused a message whose signature is missing, wrong or old", self._mover.who)
            return WebhookReply(401, "The signature is missing, wrong or too old.")
        try:
            sighting = self._parse(json.loads(body))
        except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
            log.error("oncekey: %s cannot read a signed message: %s", self._mover.who, type(error).__name__)
            return WebhookReply(400, "The message cannot be understood.")
        return WebhookReply(200, "Not about a call.") if sighting is None else VerifiedEvent(sighting, body)

    def apply(self, store: Store, event: VerifiedEvent) -> Flow[WebhookReply]:
        """Store a verified message and apply it; a failure of the store becomes a response, too."""
        return self._counted((yield from self._applied(store, event)))

    def _applied(self, store: Store, event: VerifiedEvent) -> Flow[WebhookReply]:
        try:
            report = self._report_of(event.sighting, event.body)
            rules = self._rules
            receiving = reconcile.receive(
                store, report, self._mover, rules.policy_of, rules.resolvers, notify=rules.notify
            )
            return self._reply_to(report, (yield from receiving))
        except ResultNotStorableError as error:
            log.error("oncekey: %s sent a message that cannot be stored: %s", self._mover.who, error)
            return WebhookReply(422, "The message cannot be applied.")
        except StoreError as error:
            notify_failure(self._rules.notify, "webhook", error)
            log.warning("oncekey: %s: the store did not respond (%s)", self._mover.who, error.reason)
            return WebhookReply(503, "Send it again later.")

    def _report_of(self, sighting: Sighting, body: bytes) -> CallReport:
        resolution = sighting.resolution
        ours = resolution.provider_id if isinstance(resolution, Executed | Rejected) else None
        report = CallReport(
            source=self._name,
            event_id=_name(sighting.event_id, "event_id") or hashlib.sha256(body).hexdigest(),
            resolution=to_text(resolution, self._rules.policy),
            downstream_key=_name(sighting.downstream_key, "downstream_key"),
            provider_id=_name(sighting.provider_id, "provider_id") or _name(ours, "provider_id"),
        )
        if report.downstream_key is None and report.provider_id is None:
            raise ResultNotStorableError("a sighting needs a downstream_key or a provider_id")
        return report

    def _reply_to(self, report: CallReport, received: Received) -> WebhookReply:
        who = self._mover.who
        digest = "" if received.target is None else key_digest(received.target.id.key)
        if received.conflict and not received.repeated:
            log.error("oncekey: %s used event id %r for two different messages; both are kept", who, report.event_id)
        match received.became:
            case EvidenceEffect.CONTRADICTS:
                log.error("oncekey: %s contradicts the record with digest %s; the record is not changed", who, digest)
                return WebhookReply(200, "Stored; it contradicts the record.")
            case EvidenceEffect.SETTLED:
                log.info("oncekey: %s settled the record with digest %s", who, digest)
                return WebhookReply(200, "Settled.")
            case EvidenceEffect.AGREES:
                return WebhookReply(200, "Known.")
            case EvidenceEffect.UNCLEAR:
                log.error(
                    "oncekey: %s: event %r may be about several calls; an operator must decide", who, report.event_id
                )
                return WebhookReply(200, "Stored; it may be about several calls.")
            case EvidenceEffect.KEPT:
                return WebhookReply(200, "Kept.")


def _verified_by(verify: Verify, secret: Secrets) -> Callable[[Headers, bytes], bool]:
    """The application's own verification, with header names in lower case; if it raises, the message is refused."""
    if secret is not None:
        raise ConfigurationError("a webhook takes either secret= or verify=, not both")

    def verified(headers: Headers, body: bytes) -> bool:
        fields: dict[str, str] = {}
        for name, value in headers:
            field, text = name.decode("latin-1").lower(), value.decode("latin-1")
            fields[field] = f"{fields[field]}, {text}" if field in fields else text
        try:
            return verify(fields, body) is True
        except Exception as error:  # noqa: BLE001  (a provider's package may raise anything for a wrong signature)
            log.warning("oncekey: the verify function of a webhook raised %s", type(error).__name__)
            return False

    return verified


def _secrets(given: Secrets) -> tuple[bytes, ...]:
    several = () if given is None else (given,) if isinstance(given, str | bytes) else tuple(given)
    secrets = tuple(one.encode() if isinstance(one, str) else one for one in several)
    if not secrets or any(len(one) < SHORTEST_SECRET for one in secrets):
        raise ConfigurationError(
            f"a webhook's secret needs at least {SHORTEST_SECRET} bytes: it is the only authentication"
        )
    return secrets


def _name(given: object, what: str) -> str | None:
    """A name that fits into an index; raises for any other value."""
    if given is None:
        return None
    if not isinstance(given, str):
        raise ResultNotStorableError(f"{what} is a {type(given).__name__}, not a string")
    try:
        size = len(given.encode())
    except UnicodeEncodeError:
        raise ResultNotStorableError(f"{what} is not valid Unicode: it has half of a surrogate pair") from None
    if size > _LONGEST_NAME or "\0" in given:
        raise ResultNotStorableError(f"{what} contains a NUL, or has more than {_LONGEST_NAME} bytes")
    return given or None


class BlockingHost(WebhookRules, Protocol):
    """The interface of `Once` that a webhook needs."""

    def blocking(self) -> Engine:
        """The engine of all threads."""


class WsgiWebhook:
    """The endpoint, as a WSGI application. It accepts only POST, because no router does that for it."""

    def __init__(self, host: BlockingHost, receiver: WebhookReceiver) -> None:
        self._host = host
        self._receiver = receiver

    def __call__(self, environ: WSGIEnvironment, start_response: StartResponse) -> Iterable[bytes]:
        """Serve one request."""
        posted = environ["REQUEST_METHOD"] == "POST"
        reply = self._answer(environ) if posted else WebhookReply(405, "Send webhooks with POST.")
        body = reply.body
        headers = [("Content-Type", "application/json"), ("Content-Length", str(len(body)))]
        if not posted:
            headers.append(("Allow", "POST"))
        start_response(f"{reply.status} {HTTPStatus(reply.status).phrase}", headers)
        return [] if environ["REQUEST_METHOD"] == "HEAD" else [body]

    def _answer(self, environ: WSGIEnvironment) -> WebhookReply:
        # A server joins several headers of one name with commas, and two timestamps in one signature are refused.
        return self._receiver.answer_blocking(
            self._host, lines_of(environ), taken(read(environ, self._receiver.max_body))
        )


def taken(body: bytes | Refuse) -> bytes | None:
    """The body of a webhook as `verify` takes it: None if it is too large, empty if it cannot be read."""
    return None if body is TOO_LARGE else body if isinstance(body, bytes) else b""


class AsyncHost(WebhookRules, Protocol):
    """The interface of `Once` that a webhook needs."""

    def asynchronous(self) -> AsyncEngine:
        """The engine of the running loop."""


class Webhook:
    """The endpoint, as an ASGI application."""

    def __init__(self, host: AsyncHost, receiver: WebhookReceiver) -> None:
        self._host = host
        self._receiver = receiver

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        reply = await self._answer(scope, receive)
        body = reply.body
        headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
        await send({"type": "http.response.start", "status": reply.status, "headers": headers})
        await send({"type": "http.response.body", "body": body})

    async def _answer(self, scope: Scope, receive: Receive) -> WebhookReply:
        body = await _read(receive, self._receiver.max_body)
        verified = self._receiver.verify(scope["headers"], body)
        if isinstance(verified, WebhookReply):
            return verified
        engine = self._host.asynchronous()
        return await adrive(self._receiver.apply(engine.store, verified), engine.driver.run)


async def _read(receive: Receive, limit: int) -> bytes | None:
    """The body, or None as soon as it is too long."""
    body: bytes = b""
    while True:
        message = await receive()
        body += message.get("body", b"")
        if len(body) > limit:
            return None
        if not message.get("more_body", False):
            return body
