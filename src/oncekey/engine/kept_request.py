"""The request as the completer repeats it: kept with the claim, sealed if there is a secret, no credentials (H7)."""

from __future__ import annotations

import json
import os
from base64 import b64decode, b64encode
from dataclasses import dataclass
from hashlib import blake2b
from typing import TYPE_CHECKING, Any, Final

from oncekey.core.envelopes import disclose, said_of
from oncekey.core.errors import ConfigurationError, OncekeyError

if TYPE_CHECKING:
    from collections.abc import Iterable

    from oncekey.core.model import Headers

KEPT_HEADERS: Final = frozenset(
    {
        b"accept",
        b"accept-language",
        b"content-encoding",
        b"content-language",
        b"content-type",
        b"host",
        b"traceparent",
        b"tracestate",
    }
)
"""Fields that describe the body, the wanted response and the trace. Fields that may authenticate are not kept."""

NEEDS_CRYPTOGRAPHY: Final = (
    "a secret is set, so the requests that are kept for completing have to be encrypted: "
    "pip install 'oncekey[encryption]', or say complete=False"
)

_PLAIN: Final = b"0"
_SEALED: Final = b"1"
_NONCE: Final = 12
_PURPOSE: Final = b"oncekey kept request 1"


class UnreadableError(OncekeyError):
    """A kept request cannot be opened, because the secret has changed."""


@dataclass(frozen=True, slots=True)
class KeptRequest:
    """Everything that is needed to call the handler once more."""

    method: str
    path: str
    query: bytes
    root_path: str
    headers: Headers
    body: bytes
    principal: str


def kept_of(headers: Iterable[tuple[bytes, bytes]], extra: frozenset[bytes]) -> Headers:
    """The header lines of a request that are kept; `extra` are names that the route keeps, too."""
    wanted = KEPT_HEADERS | extra
    return tuple((bytes(name), bytes(value)) for name, value in headers if name in wanted)


def seal(kept: KeptRequest, secret: bytes | None, about: str) -> bytes:
    """Its stored form; `about` binds it to its record, so that it cannot be moved to another one."""
    text = json.dumps(_members(kept), separators=(",", ":")).encode()
    if secret is None:
        return _PLAIN + text
    nonce = os.urandom(_NONCE)
    sealed: bytes = _cipher(secret).encrypt(nonce, text, about.encode())
    return _SEALED + nonce + sealed


def unseal(stored: bytes, secret: bytes | None, about: str) -> KeptRequest:
    """The request of a stored form."""
    closed = disclose(stored)
    if closed is not None:
        raise UnreadableError(f"the request is {said_of(closed[0])}, which this process does not have")
    mark, rest = stored[:1], stored[1:]
    if mark == _PLAIN:
        return _request(json.loads(rest))
    if secret is None:
        raise UnreadableError("the request was kept under a secret, and there is none now")
    from cryptography.exceptions import InvalidTag  # noqa: PLC0415  (an optional package)

    try:
        return _request(json.loads(_cipher(secret).decrypt(rest[:_NONCE], rest[_NONCE:], about.encode())))
    except InvalidTag as error:
        raise UnreadableError("the request was kept under another secret") from error


def check_sealing(secret: bytes | None) -> None:
    """Refuse at start-up, and not at the first request, if a package for sealing is not installed."""
    if secret is not None:
        _cipher(secret)


def _cipher(secret: bytes) -> Any:  # noqa: ANN401  (cryptography's, which is optional)
    try:
        from cryptography.hazmat.primitives.ciphers.aead import AESGCM  # noqa: PLC0415  (an optional package)
    except ImportError:
        raise ConfigurationError(NEEDS_CRYPTOGRAPHY) from None
    return AESGCM(blake2b(_PURPOSE + secret, digest_size=32).digest())


def _members(kept: KeptRequest) -> dict[str, Any]:
    return {
        "method": kept.method,
        "path": kept.path,
        "query": kept.query.decode("latin-1"),
        "root_path": kept.root_path,
        "headers": [[name.decode("latin-1"), value.decode("latin-1")] for name, value in kept.headers],
        "body": b64encode(kept.body).decode("ascii"),
        "principal": kept.principal,
    }


def _request(members: dict[str, Any]) -> KeptRequest:
    return KeptRequest(
        method=members["method"],
        path=members["path"],
        query=members["query"].encode("latin-1"),
        root_path=members["root_path"],
        headers=tuple((name.encode("latin-1"), value.encode("latin-1")) for name, value in members["headers"]),
        body=b64decode(members["body"]),
        principal=members["principal"],
    )
