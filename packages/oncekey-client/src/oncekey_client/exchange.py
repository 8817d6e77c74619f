"""Requests and responses as plain values that every adapter can create, and the exceptions without a response."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from enum import StrEnum
from hashlib import sha256
from typing import TYPE_CHECKING, Final, TypeAlias
from urllib.parse import urljoin, urlsplit

if TYPE_CHECKING:
    from collections.abc import Iterable


Fields: TypeAlias = tuple[tuple[str, str], ...]

_PORTS: Final = {"http": 80, "https": 443}
# If the body changes its length, the headers that described the old one are removed.
_ABOUT_LENGTH: Final = frozenset({"content-length", "transfer-encoding"})


@dataclass(frozen=True, slots=True)
class Call:
    """A request whose body is bytes, so that nothing can change it between attempts."""

    method: str
    # A URL and headers may contain credentials, so no repr shows them.
    url: str = field(repr=False)
    headers: Fields = field(default=(), repr=False)
    body: bytes = field(default=b"", repr=False)

    def field(self, name: str) -> str | None:
        """The first value of a header."""
        return _first(self.headers, name)

    def with_field(self, name: str, value: str) -> Call:
        """The same call with this header, and no other of its name."""
        return replace(self, headers=(*self.without(name).headers, (name, value)))

    def without(self, *names: str) -> Call:
        """The same call without these headers."""
        gone = {name.lower() for name in names}
        return replace(self, headers=tuple(pair for pair in self.headers if pair[0].lower() not in gone))

    def with_body(self, body: bytes) -> Call:
        """The same call with another body."""
        shorn = self.without(*_ABOUT_LENGTH)
        return replace(shorn, headers=(*shorn.headers, ("Content-Length", str(len(body)))), body=body)

    def at(self, url: str) -> Call:
        """The same call to another URL; `Host` follows the URL."""
        return replace(self.without("host"), url=url)

    @property
    def digest(self) -> str:
        """The digest that identifies this operation: of method, URL and body."""
        parts = (self.method.upper().encode(), self.url.encode(), self.body)
        return sha256(b"".join(b"%d:%s," % (len(part), part) for part in parts)).hexdigest()


@dataclass(frozen=True, slots=True)
class Reply:
    """A complete response; the content coding of `body` is decoded."""

    status: int
    headers: Fields = ()
    body: bytes = field(default=b"", repr=False)

    def field(self, name: str) -> str | None:
        """The first value of a header."""
        return _first(self.headers, name)


class Loss(StrEnum):
    """How an exchange failed; it decides whether the request may have had its effect."""

    NOT_SENT = "not_sent"
    """No byte of the request reached the server: refused, not resolved, no connection in time."""
    LOST = "lost"
    """The request may have arrived: timeout, reset, end or truncated response after sending began."""
    HOPELESS = "hopeless"
    """Nothing was sent, and a retry would not help: a wrong certificate, a wrong URL."""


@dataclass(frozen=True, slots=True)
class Failure:
    """An exchange without a response, and the adapter's own exception for it."""

    loss: Loss
    error: Exception


def fields(pairs: Iterable[tuple[str, str]]) -> Fields:
    """Headers as a value."""
    return tuple((str(name), str(value)) for name, value in pairs)


def same_origin(call: Call, location: str) -> str | None:
    """The absolute form of `location` if it has the origin of the call, where its credentials may go."""
    try:
        target = urljoin(call.url, location)
        return target if _origin(target) == _origin(call.url) else None
    except ValueError:
        return None


def _origin(url: str) -> tuple[str, str | None, int | None]:
    parts = urlsplit(url)
    return parts.scheme, parts.hostname, parts.port or _PORTS.get(parts.scheme)


def _first(headers: Fields, name: str) -> str | None:
    wanted = name.lower()
    return next((value for field_name, value in headers if field_name.lower() == wanted), None)


class ClientError(Exception):
    """The base class of this package's exceptions."""


class ClientConfigurationError(ClientError):
    """A rule, a key or an option is wrong; the message names it and the fix."""


class RequestKeyReusedError(ClientError):
    """The key belongs to another request: a bug of the calling program that no retry fixes."""

    def __init__(self, message: str, *, key: str, reply: Reply | None = None) -> None:
        super().__init__(message)
        self.key = key
        self.reply = reply


class RequestOutcomeUnknownError(ClientError):
    """The operation may have happened, and no response confirms it. Do not send it with a new key.

    `call` and `key` are needed to retry: pass the error to the transport's `ask_again`. `reply` is the last response,
    if there was one.
    """

    def __init__(self, message: str, *, call: Call, key: str, reply: Reply | None = None) -> None:
        super().__init__(message)
        self.call = call
        self.key = key
        self.reply = reply


class RequestKeyExpiredError(RequestOutcomeUnknownError):
    """The key is too old to be sent: find out by other means whether it happened, and use a new key only if not."""


class JournalError(ClientError):
    """The journal cannot be used, so nothing was sent."""


class PersonalKeyWarning(UserWarning):
    """A key that the caller chose looks like an e-mail address or a telephone number; keys end up in logs."""
