"""Who may use the console: tokens with roles, sessions in signed cookies, form tokens, and a limit on failed log-ins.

A session is its cookie, which names the token with which the operator logged in, so the session ends when that token
is removed. It is signed, so a client cannot forge one. A log-out is a line in the store's audit under the session's
nonce: it ends every copy of the cookie, in every process. Failed attempts are counted in the process. Every instant
comes from `clock`.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import json
import secrets
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from oncekey.core.errors import ConfigurationError

SHORTEST_TOKEN: Final = 16
IDLE: Final = 30 * 60.0
"""Seconds without a request after which a session is over."""
LONGEST: Final = 12 * 3600.0
"""Seconds after which an operator has to log in again, however busy the session was."""
ATTEMPTS: Final = 5
"""Wrong tokens from one address within PATIENCE seconds, after which the console refuses log-ins from there."""
PATIENCE: Final = 300.0
ALL_ATTEMPTS: Final = 100
"""The same limit for all addresses together."""
_SOURCES: Final = 1000
_FORM: Final = "write tokens as NAME:ROLE:TOKEN, one per line, where ROLE is read or operate"


class Role(StrEnum):
    """What an operator may do in the console."""

    READ = "read"
    OPERATE = "operate"

    def covers(self, other: Role) -> bool:
        """Whether this role is enough where `other` is required: an operator who may operate may also read."""
        return self is Role.OPERATE or other is Role.READ


@dataclass(frozen=True, slots=True)
class Operator:
    """A person, by the name that the audit records."""

    name: str
    role: Role = Role.READ


class Tokens:
    """Tokens with their operators. Only digests of the tokens are kept."""

    def __init__(self, known: Iterable[tuple[str, Operator]]) -> None:
        self._known: dict[str, Operator] = {}
        for token, operator in known:
            if len(token) < SHORTEST_TOKEN:
                raise ConfigurationError(
                    f"the console's token of {operator.name} is shorter than {SHORTEST_TOKEN} characters: "
                    'generate one with python -c "import secrets; print(secrets.token_urlsafe(24))"'
                )
            if not operator.name.strip():
                raise ConfigurationError(f"a token without a name: {_FORM}")
            self._known[_digest(token)] = operator
        if not self._known:
            raise ConfigurationError(f"the console has no tokens: {_FORM}")

    @classmethod
    def read(cls, text: str, *more: tuple[str, Operator]) -> Tokens:
        """Read tokens from a file or a variable: NAME:ROLE:TOKEN, by lines or commas; # begins a comment."""
        known = list(more)
        for line in text.replace(",", "\n").splitlines():
            if not line.strip() or line.strip().startswith("#"):
                continue
            name, role, token = [*(part.strip() for part in line.split(":", 2)), "", ""][:3]
            if role not in set(Role) or not token:
                raise ConfigurationError(_FORM)
            known.append((token, Operator(name, Role(role))))
        return cls(known)

    def ticket(self, token: str) -> str | None:
        """The digest by which a session names the token; None: no such token. It compares all, in constant time."""
        given = _digest(token)
        found = [digest for digest in self._known if hmac.compare_digest(digest, given)]
        return found[0] if found else None

    def operator(self, ticket: str) -> Operator | None:
        """The operator of the token, unless it was removed."""
        return self._known.get(ticket)


@dataclass(frozen=True, slots=True)
class Session:
    """The session of an operator who is logged in."""

    operator: Operator
    nonce: str
    """The session's own random value: the token in each form is derived from it, and a log-out names it."""
    began: float
    seen: float
    ticket: str = ""
    """The digest of the token; empty where the application authenticates."""


class Sessions:
    """Sessions as signed cookies."""

    def __init__(
        self,
        secret: bytes | None = None,
        *,
        idle: float = IDLE,
        longest: float = LONGEST,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._secret = (
            secrets.token_bytes(32) if secret is None else hashlib.sha256(b"oncekey console" + secret).digest()
        )
        self._idle, self._longest, self._clock = idle, longest, clock

    def begin(self, operator: Operator, ticket: str = "") -> Session:
        """A new session."""
        now = self._clock()
        return Session(operator, secrets.token_urlsafe(24), now, now, ticket)

    def cookie(self, session: Session) -> str:
        """The cookie of the session, with this instant as that of its last request."""
        claims = [session.operator.name, session.nonce, session.began, self._clock(), session.ticket]
        body = base64.urlsafe_b64encode(json.dumps(claims).encode()).decode()
        return f"{body}.{self._sign('session', body)}"

    def read(self, cookie: str, whose: Callable[[str, str], Operator | None]) -> Session | None:
        """The session of a cookie, unless it is over. `whose` finds the operator of a ticket and a name, as of now."""
        body, _, signature = cookie.rpartition(".")
        if not hmac.compare_digest(self._sign("session", body).encode(), signature.encode("utf-8", "replace")):
            return None
        name, nonce, began, seen, ticket = json.loads(base64.urlsafe_b64decode(body))
        now = self._clock()
        if now - seen > self._idle or now - began > self._longest:
            return None
        operator = whose(ticket, name)
        return None if operator is None else Session(operator, nonce, began, seen, ticket)

    def proof(self, session: Session) -> str:
        """The token that each form carries: another site cannot read our pages, so it does not know it."""
        return self._sign("form", f"{session.nonce}.{session.operator.name}")

    def proves(self, session: Session, given: str) -> bool:
        """Whether a form is from one of our pages."""
        return hmac.compare_digest(self.proof(session).encode(), given.encode("utf-8", "replace"))

    def _sign(self, purpose: str, text: str) -> str:
        return hmac.new(self._secret, f"{purpose}\n{text}".encode("utf-8", "replace"), hashlib.sha256).hexdigest()


class Attempts:
    """Recent wrong tokens, by address; the number of addresses is bounded."""

    def __init__(self, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._failed: OrderedDict[str, list[float]] = OrderedDict()
        self._all: list[float] = []

    def wait(self, source: str) -> int:
        """Seconds until a log-in from this address is accepted again; 0: now."""
        since = self._clock() - PATIENCE
        own = [at for at in self._failed.get(source, ()) if at > since]
        self._all = [at for at in self._all if at > since]
        waits = [
            failed[-most] - since
            for failed, most in ((own, ATTEMPTS), (self._all, ALL_ATTEMPTS))
            if len(failed) >= most
        ]
        return max((int(wait) + 1 for wait in waits), default=0)

    def failed(self, source: str) -> None:
        """Remember a wrong token."""
        now = self._clock()
        self._failed[source] = [*self._failed.get(source, ())[-ATTEMPTS:], now]
        self._failed.move_to_end(source)
        if len(self._failed) > _SOURCES:
            self._failed.popitem(last=False)
        self._all.append(now)

    def forget(self, source: str) -> None:
        """An operator has logged in from this address: forget its wrong tokens."""
        self._failed.pop(source, None)


def _digest(token: str) -> str:
    return hashlib.sha256(token.encode("utf-8", "replace")).hexdigest()
