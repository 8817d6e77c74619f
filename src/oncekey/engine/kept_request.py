"""The request of a PHASED operation, stored with its claim, so that the completer can resume it without the client.

It contains everything that the handler needs, and the principal as whom it is resumed, but no credentials: only header
fields that cannot authenticate are stored, and those that the route names. If the policy has a secret, the stored form
is sealed and bound to its record; otherwise it is plain JSON. The first byte distinguishes the two.
"""

from __future__ import annotations

import json
import os
from base64 import b64decode, b64encode
from dataclasses import dataclass
from hashlib import blake2b
from typing import TYPE_CHECKING, Any, Final

from oncekey.core.envelopes import described, disclose
from oncekey.core.errors import ConfigurationError, OncekeyError

if TYPE_CHECKING:
    from collections.abc import Iterable

    from oncekey.core.model import Headers, RecordId
    from oncekey.engine.claiming import Caller, Parts

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
"""Fields that describe the body, the wanted response and the trace. Fields that may authenticate are not stored."""

NEEDS_CRYPTOGRAPHY: Final = (
    "a secret is set, so the requests that are stored for the completer must be encrypted: "
    "pip install 'oncekey[encryption]', or set complete=False"
)

_PLAIN: Final = b"0"
_SEALED: Final = b"1"
_NONCE: Final = 12
_PURPOSE: Final = b"oncekey kept request 1"


class UnreadableError(OncekeyError):
    """A stored request cannot be decrypted: its secret or key is missing, or has changed."""


@dataclass(frozen=True, slots=True)
class KeptRequest:
    """Everything that is needed to call the handler again."""

    method: str
    path: str
    query: bytes
    root_path: str
    headers: Headers
    body: bytes
    principal: str


def kept_request_of(parts: Parts, caller: Caller, keep_headers: frozenset[bytes]) -> KeptRequest:
    """The request as the completer sends it, as its principal, or else as its tenant."""
    return KeptRequest(
        method=parts.method,
        path=parts.path,
        query=parts.query,
        root_path=parts.root_path,
        headers=kept_of(parts.headers, keep_headers),
        body=parts.body,
        principal=caller.principal or caller.tenant,
    )


def kept_of(headers: Iterable[tuple[bytes, bytes]], extra: frozenset[bytes]) -> Headers:
    """The header lines to store; `extra` are further names that the route keeps."""
    wanted = KEPT_HEADERS | extra
    return tuple((bytes(name), bytes(value)) for name, value in headers if name in wanted)


def about_of(record_id: RecordId, fingerprint: str) -> str:
    """The identity that the seal is bound to, without the incarnation, which changes when a claim's reply is lost."""
    return f"{record_id.scope}/{record_id.key}/{fingerprint}"


def to_stored(kept: KeptRequest, secret: bytes | None, about: str) -> bytes:
    """The stored form, sealed if there is a secret; `about` binds it to its record, so it cannot be moved."""
    text = json.dumps(_members(kept), separators=(",", ":")).encode()
    if secret is None:
        return _PLAIN + text
    nonce = os.urandom(_NONCE)
    sealed: bytes = _cipher(secret).encrypt(nonce, text, about.encode())
    return _SEALED + nonce + sealed


def from_stored(stored: bytes, secret: bytes | None, about: str) -> KeptRequest:
    """Restore the request from its stored form."""
    closed = disclose(stored)
    if closed is not None:
        raise UnreadableError(f"the request is {described(closed[0])}, which this process does not have")
    form, rest = stored[:1], stored[1:]
    if form == _PLAIN:
        return _request(json.loads(rest))
    if secret is None:
        raise UnreadableError("the request was encrypted with a secret, and none is set now")
    from cryptography.exceptions import InvalidTag  # noqa: PLC0415  (an optional package)

    try:
        return _request(json.loads(_cipher(secret).decrypt(rest[:_NONCE], rest[_NONCE:], about.encode())))
    except InvalidTag as error:
        raise UnreadableError("the request was encrypted with another secret") from error


def check_sealing(secret: bytes | None) -> None:
    """Raise at start-up, and not at the first request, if the package for sealing is not installed."""
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
