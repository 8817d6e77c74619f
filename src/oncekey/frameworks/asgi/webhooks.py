"""Webhooks: an endpoint that believes nobody without a signature, keeps what it hears, and settles what is unknown.

A webhook moves only UNKNOWN. On a live record it waits as evidence, and what a record says already it never changes.
"""

from __future__ import annotations

import hashlib
import json
import logging
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Final, Protocol, TypeAlias, TypedDict

from oncekey.core import signatures
from oncekey.core.audit import Mover
from oncekey.core.errors import ConfigurationError, ResultNotStorableError, StoreError
from oncekey.core.keys import key_digest
from oncekey.core.resolution import Declined, Executed, Heard
from oncekey.core.transitions import Actor
from oncekey.engine import reconcile
from oncekey.engine.reconcile import Became
from oncekey.flow import adrive
from oncekey.resolvers import Sighting, to_text

if TYPE_CHECKING:
    from oncekey.core.policy import Policy
    from oncekey.engine.reconcile import Received
    from oncekey.engine.shell import AsyncEngine
    from oncekey.frameworks.asgi.types import Receive, Scope, Send
    from oncekey.resolvers import Resolvers

log = logging.getLogger("oncekey")

Secret: TypeAlias = str | bytes
MAX_BODY: Final = 256 * 1024
SHORTEST_SECRET: Final = 16
_LONGEST_NAME: Final = 500


class Host(Protocol):
    """What a webhook needs of `Once`."""

    policy: Policy
    resolvers: Resolvers

    def asynchronous(self) -> AsyncEngine:
        """The engine of the running loop."""

    def policy_of(self, operation: str) -> Policy:
        """The policy of an operation."""


class WebhookOptions(TypedDict, total=False):
    """Settings of one webhook."""

    header: str
    tolerance: float
    max_body: int
    clock: Callable[[], float]


class Webhook:
    """The endpoint, as an ASGI application. It answers 2xx to everything that need not be sent again."""

    def __init__(
        self,
        host: Host,
        path: str,
        *,
        secret: Secret | Sequence[Secret],
        parse: Callable[[Any], Sighting | None],
        name: str = "webhook",
        header: str = signatures.HEADER.decode(),
        tolerance: float = signatures.TOLERANCE,
        max_body: int = MAX_BODY,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._host = host
        self._secrets = _secrets(secret)
        self._parse = parse
        self._name = name
        self._header = header.lower().encode("latin-1")
        self._tolerance = tolerance
        self._max_body = max_body
        self._clock = clock
        self._mover = Mover(Actor.WEBHOOK, f"{name} at {path}")

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        status, detail = await self._answer(scope, receive)
        body = json.dumps({"detail": detail}).encode()
        headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await send({"type": "http.response.body", "body": body})

    async def _answer(self, scope: Scope, receive: Receive) -> tuple[int, str]:
        body = await _read(receive, self._max_body)
        if body is None:
            return 413, "The body is too large."
        lines = [value for name, value in scope["headers"] if name == self._header]
        header = lines[0].decode("latin-1") if len(lines) == 1 else ""
        if not signatures.is_genuine(header, body, self._secrets, self._clock(), self._tolerance):
            log.warning("oncekey: %s refused a message whose signature is missing, wrong or old", self._mover.who)
            return 401, "The signature is missing, wrong or too old."
        try:
            sighting = self._parse(json.loads(body))
        except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
            log.error("oncekey: %s cannot read a signed message: %s", self._mover.who, type(error).__name__)
            return 400, "The message cannot be understood."
        if sighting is None:
            return 200, "Not about a call."
        try:
            return self._told(await self._taken(sighting, body))
        except ResultNotStorableError as error:
            log.error("oncekey: %s brought what cannot be stored: %s", self._mover.who, error)
            return 422, "The message cannot be applied."
        except StoreError as error:
            log.warning("oncekey: %s: the store did not answer (%s)", self._mover.who, type(error).__name__)
            return 503, "Send it again later."

    async def _taken(self, sighting: Sighting, body: bytes) -> Received:
        engine, resolution = self._host.asynchronous(), sighting.resolution
        ours = resolution.provider_id if isinstance(resolution, Executed | Declined) else None
        heard = Heard(
            source=self._name,
            event_id=_short(sighting.event_id) or hashlib.sha256(body).hexdigest(),
            said=to_text(resolution, self._host.policy),
            downstream_key=_short(sighting.downstream_key),
            provider_id=_short(sighting.provider_id or ours),
        )
        if heard.downstream_key is None and heard.provider_id is None:
            raise ResultNotStorableError("a sighting names a downstream_key or a provider_id")
        host = self._host
        receiving = reconcile.receive(engine.store, heard, self._mover, host.policy_of, host.resolvers)
        return await adrive(receiving, engine.driver.run)

    def _told(self, received: Received) -> tuple[int, str]:
        digest = "" if received.target is None else key_digest(received.target.id.key)
        match received.became:
            case Became.CONTRADICTS:
                log.error("oncekey: %s contradicts the record with digest %s; it stays", self._mover.who, digest)
                return 200, "Kept; the record says otherwise."
            case Became.SETTLED:
                log.info("oncekey: %s settled the record with digest %s", self._mover.who, digest)
                return 200, "Settled."
            case Became.AGREES:
                return 200, "Known."
            case Became.KEPT:
                return 200, "Kept."


def _secrets(given: Secret | Sequence[Secret]) -> tuple[bytes, ...]:
    several = (given,) if isinstance(given, str | bytes) else tuple(given)
    secrets = tuple(one.encode() if isinstance(one, str) else one for one in several)
    if not secrets or any(len(one) < SHORTEST_SECRET for one in secrets):
        raise ConfigurationError(f"a webhook's secret has at least {SHORTEST_SECRET} bytes: it is all that it trusts")
    return secrets


def _short(text: str | None) -> str | None:
    """A name that fits into an index; a longer one is none of ours."""
    if text is None:
        return None
    if len(text) > _LONGEST_NAME or "\0" in text:
        raise ResultNotStorableError("a name of a call or an event is text of at most 500 characters")
    return text or None


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
