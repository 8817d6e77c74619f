"""Hearing a webhook: who is believed, and what a message does. One flow, whatever framework brought the request.

A webhook moves only UNKNOWN. On a live record it waits as evidence, and what a record says already it never changes.
"""

from __future__ import annotations

import hashlib
import json
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Protocol, TypeAlias, TypedDict

from oncekey.core import signatures
from oncekey.core.audit import Mover
from oncekey.core.errors import ConfigurationError, ResultNotStorableError, StoreError
from oncekey.core.keys import key_digest
from oncekey.core.resolution import Declined, Executed, Heard
from oncekey.core.transitions import Actor
from oncekey.engine import reconcile
from oncekey.engine.reconcile import Became
from oncekey.engine.telling import tell_failure
from oncekey.observe.events import Messaged
from oncekey.resolvers import Sighting, to_text

if TYPE_CHECKING:
    from oncekey.core.policy import Policy
    from oncekey.engine.reconcile import Received
    from oncekey.flow import Flow
    from oncekey.observe.events import Tell
    from oncekey.ports import Store
    from oncekey.resolvers import Resolvers

log = logging.getLogger("oncekey")

Secret: TypeAlias = str | bytes
MAX_BODY: Final = 256 * 1024
SHORTEST_SECRET: Final = 16
_LONGEST_NAME: Final = 500


class Rules(Protocol):
    """What settling by a message needs of `Once`."""

    policy: Policy
    resolvers: Resolvers

    tell: Tell | None

    def policy_of(self, operation: str) -> Policy:
        """The policy of an operation."""


class WebhookOptions(TypedDict, total=False):
    """Settings of one webhook."""

    name: str
    header: str
    tolerance: float
    max_body: int
    clock: Callable[[], float]


@dataclass(frozen=True, slots=True)
class Told:
    """What the sender is answered: 2xx to everything that need not be sent again."""

    status: int
    detail: str

    @property
    def body(self) -> bytes:
        """The answer's JSON."""
        return json.dumps({"detail": self.detail}).encode()


@dataclass(frozen=True, slots=True)
class Believed:
    """A message that one of our secrets signed just now, and what it tells."""

    sighting: Sighting
    body: bytes


class Hearing:
    """The rules of one webhook; `path` is where it is served, if it is we who know that."""

    def __init__(
        self,
        rules: Rules,
        path: str | None,
        *,
        secret: Secret | Sequence[Secret],
        parse: Callable[[Any], Sighting | None],
        name: str = "webhook",
        header: str = signatures.HEADER.decode(),
        tolerance: float = signatures.TOLERANCE,
        max_body: int = MAX_BODY,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.header = header.lower()
        self.max_body = max_body
        self._rules = rules
        self._secrets = _secrets(secret)
        self._parse = parse
        self._name = name
        self._tolerance = tolerance
        self._clock = clock
        self._mover = Mover(Actor.WEBHOOK, name if path is None else f"{name} at {path}")

    def judge(self, lines: Sequence[str], body: bytes | None) -> Believed | Told:
        """Believe a request or not, before any store is asked; a body of None was too long to be read."""
        judged = self._judged(lines, body)
        return judged if isinstance(judged, Believed) else self._answered(judged)

    def _answered(self, told: Told) -> Told:
        if self._rules.tell is not None:
            self._rules.tell(Messaged(self._name, told.status))
        return told

    def _judged(self, lines: Sequence[str], body: bytes | None) -> Believed | Told:
        if body is None or len(body) > self.max_body:
            return Told(413, "The body is too large.")
        header = lines[0] if len(lines) == 1 else ""
        if not signatures.is_genuine(header, body, self._secrets, self._clock(), self._tolerance):
            log.warning("oncekey: %s refused a message whose signature is missing, wrong or old", self._mover.who)
            return Told(401, "The signature is missing, wrong or too old.")
        try:
            sighting = self._parse(json.loads(body))
        except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
            log.error("oncekey: %s cannot read a signed message: %s", self._mover.who, type(error).__name__)
            return Told(400, "The message cannot be understood.")
        return Told(200, "Not about a call.") if sighting is None else Believed(sighting, body)

    def take(self, store: Store, believed: Believed) -> Flow[Told]:
        """Keep what was believed and apply it; a store that fails is one more answer."""
        return self._answered((yield from self._taken(store, believed)))

    def _taken(self, store: Store, believed: Believed) -> Flow[Told]:
        try:
            heard = self._heard(believed.sighting, believed.body)
            rules = self._rules
            receiving = reconcile.receive(store, heard, self._mover, rules.policy_of, rules.resolvers, tell=rules.tell)
            return self._told((yield from receiving))
        except ResultNotStorableError as error:
            log.error("oncekey: %s brought what cannot be stored: %s", self._mover.who, error)
            return Told(422, "The message cannot be applied.")
        except StoreError as error:
            tell_failure(self._rules.tell, "webhook", error)
            log.warning("oncekey: %s: the store did not answer (%s)", self._mover.who, type(error).__name__)
            return Told(503, "Send it again later.")

    def _heard(self, sighting: Sighting, body: bytes) -> Heard:
        resolution = sighting.resolution
        ours = resolution.provider_id if isinstance(resolution, Executed | Declined) else None
        heard = Heard(
            source=self._name,
            event_id=_short(sighting.event_id) or hashlib.sha256(body).hexdigest(),
            said=to_text(resolution, self._rules.policy),
            downstream_key=_short(sighting.downstream_key),
            provider_id=_short(sighting.provider_id or ours),
        )
        if heard.downstream_key is None and heard.provider_id is None:
            raise ResultNotStorableError("a sighting names a downstream_key or a provider_id")
        return heard

    def _told(self, received: Received) -> Told:
        digest = "" if received.target is None else key_digest(received.target.id.key)
        match received.became:
            case Became.CONTRADICTS:
                log.error("oncekey: %s contradicts the record with digest %s; it stays", self._mover.who, digest)
                return Told(200, "Kept; the record says otherwise.")
            case Became.SETTLED:
                log.info("oncekey: %s settled the record with digest %s", self._mover.who, digest)
                return Told(200, "Settled.")
            case Became.AGREES:
                return Told(200, "Known.")
            case Became.KEPT:
                return Told(200, "Kept.")


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
