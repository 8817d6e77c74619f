"""Builds the claim of a request from its parts: key, fingerprint, scope and seed, checked in that order.

Nothing here waits or depends on a framework. An adapter that has all parts at once calls `claim_of`. One that has to
wait in between, for the body or for the authentication that names the tenant, calls its steps in the same order:
`key_of` before it reads the body, because a request without a valid key is refused regardless of its body;
`fingerprint_for` before it identifies the caller; and then `claim_input_of`, whose result is enough to find a stored
response, and `claim_for`. A refusal by any of them stores nothing.

Everything that does not depend on the request is computed at enrolment, see `Enrolment`.

The claim of a PHASED request contains the request itself, for the completer: see `engine.kept_request`.
"""

from __future__ import annotations

import logging
import os
import socket
from typing import TYPE_CHECKING, Final, NamedTuple, TypeAlias
from uuid import UUID

from oncekey.canonical.fingerprint import Request
from oncekey.core.errors import BodyInvalidError, ConfigurationError, KeyMalformedError
from oncekey.core.keys import key_digest, looks_guessable, looks_personal, parse_key
from oncekey.core.lazy import Lazy
from oncekey.core.model import Claim, Code, RecordId, Refuse
from oncekey.core.policy import KeyCheck, Policy
from oncekey.core.scope import BindTo, bound_scope, scope_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from oncekey.engine import kept_request
    from oncekey.engine.enrolment import Enrolment
else:
    kept_request = Lazy("oncekey.engine.kept_request")


Chosen: TypeAlias = "Mapping[str, object] | bytes"

log = logging.getLogger("oncekey")
security = logging.getLogger("oncekey.security")
GUESSABLE: Final = "oncekey: a key of %s can be guessed (digest %s): clients should send random keys, such as UUIDs"

PROCESS = f"{socket.gethostname()}:{os.getpid()}"
"""The owner of the claims of this process. Read it from the module each time: it changes in a forked process."""
CREDENTIAL_FIELDS: Final = frozenset(
    {b"authorization", b"proxy-authorization", b"x-api-key", b"api-key", b"x-auth-token", b"x-access-token"}
)
"""Header fields that hold a credential, either alone or after the name of its scheme."""
SHORTEST_CREDENTIAL: Final = 16
"""A shorter value is not a secret: a test may send `Bearer acme` for the tenant `acme`."""
IS_CREDENTIAL: Final = (
    "the {what} function returned the credential of the field {field!r}, but oncekey stores the {what} in clear text: "
    "return the id of the user or account that the credential belongs to; to bind keys to the credential itself, of "
    "which only a digest is stored, set Policy(bind_to=BindTo.TOKEN)"
)
_OPERATION: Final = "operation"
JSON: Final = b"application/json"
_TOO_LARGE: Final = Refuse(Code.BODY_TOO_LARGE)
_VERSION_4: Final = (4 << 76) | (0b10 << 62)
_NOT_RANDOM: Final = (0xF << 76) | (0b11 << 62)
"""The version and variant bits of a UUID (RFC 9562, 4.1 and 4.2)."""


class Parts(NamedTuple):
    """The parts of a request that every server has: lower-case header names, the query without its question mark."""

    method: str
    path: str
    query: bytes
    headers: Iterable[tuple[bytes, bytes]]
    content_type: bytes | None
    body: bytes
    root_path: str = ""
    """The path where the application is mounted; the completer repeats the request there."""


class Caller(NamedTuple):
    """The caller, as the application's own authentication identifies it."""

    tenant: str
    principal: str | None = None
    """The user within the tenant; required if keys are bound to principals, and stored for the completer, if any."""
    token: str | None = None
    """The caller's credential; used only if keys are bound to tokens."""


class ClaimInput(NamedTuple):
    """The key, its scope and the fingerprint of a request, before anything is claimed."""

    id: RecordId
    fingerprint: str
    parts: Parts
    caller: Caller


def claim_of(
    lines: Sequence[bytes],
    parts: Parts,
    enrolment: Enrolment,
    caller: Caller,
    *,
    keep_headers: frozenset[bytes] = frozenset(),
) -> Claim | Refuse:
    """The claim of a request whose `Idempotency-Key` field has these lines, or the refusal."""
    key = key_of(lines, enrolment)
    if isinstance(key, Refuse):
        return key
    fingerprint = fingerprint_for(parts, enrolment)
    if isinstance(fingerprint, Refuse):
        return fingerprint
    return claim_for(claim_input_of(key, fingerprint, parts, enrolment, caller), enrolment, keep_headers=keep_headers)


def key_of(lines: Sequence[bytes], enrolment: Enrolment) -> str | Refuse:
    """The key in the request, or the refusal."""
    policy = enrolment.policy
    try:
        key = parse_key(
            lines,
            syntax=policy.header_syntax,
            key_format=policy.key_format,
            min_length=enrolment.shortest_key,
            max_length=policy.max_key_length,
        )
    except KeyMalformedError as error:
        return Refuse(Code.KEY_MALFORMED, detail=str(error))
    if key is None:
        return Refuse(Code.KEY_MISSING)
    if policy.guessable_check is not KeyCheck.OFF and looks_guessable(key):
        if policy.guessable_check is KeyCheck.REJECT:
            return Refuse(Code.KEY_MALFORMED, detail="The key can be guessed; use a random value, such as a UUID.")
        security.warning(GUESSABLE, enrolment.operation, key_digest(key))
    return personal(key, policy) if policy.pii_check is not KeyCheck.OFF and looks_personal(key) else key


def personal(key: str, policy: Policy) -> str | Refuse:
    """Refuse or log a key that looks like personal data, depending on the policy."""
    if policy.pii_check is KeyCheck.REJECT:
        return Refuse(Code.KEY_MALFORMED, detail="The key looks like personal data; use a random value.")
    log.warning("oncekey: a key looks like personal data (digest %s): use random keys", key_digest(key))
    return key


def fingerprint_for(parts: Parts, enrolment: Enrolment, chosen: Chosen | None = None) -> str | Refuse:
    """The fingerprint, which distinguishes this request from another with the same key, or the refusal.

    `chosen` is what `chosen_of` returned, if it was called before.
    """
    if len(parts.body) > enrolment.policy.max_request_bytes:
        return _TOO_LARGE
    method, path, query, _, content_type, body, _ = parts
    try:
        if enrolment.extract is None:
            return enrolment.fingerprints.of(method, path, query, content_type, body)
        if chosen is None:
            chosen = enrolment.extract(Request(method, path, query, content_type, body))
        return enrolment.fingerprints.of_chosen(chosen, method=method, path=path)
    except BodyInvalidError as error:
        return Refuse(Code.BODY_INVALID, detail=str(error))


def chosen_of(parts: Parts, enrolment: Enrolment) -> Chosen | Refuse | None:
    """The value that the route's own function selects, for an adapter that hashes in another thread."""
    if enrolment.extract is None or len(parts.body) > enrolment.policy.max_request_bytes:
        return None
    try:
        return enrolment.extract(Request(parts.method, parts.path, parts.query, parts.content_type, parts.body))
    except BodyInvalidError as error:
        return Refuse(Code.BODY_INVALID, detail=str(error))


def claim_input_of(key: str, fingerprint: str, parts: Parts, enrolment: Enrolment, caller: Caller) -> ClaimInput:
    """The input of a claim, from the key and fingerprint of a request; it is also used to find a stored response."""
    scope = scope_for(enrolment.policy, enrolment.namespace, caller, enrolment.operation)
    if caller.principal is not None or len(caller.tenant) >= SHORTEST_CREDENTIAL:
        check_names(caller, parts.headers)
    return ClaimInput(RecordId(scope, key), fingerprint, parts, caller)


def scope_for(policy: Policy, namespace: str, caller: Caller, operation: str) -> str:
    """The scope of a key: the caller, and the operation if the policy separates operations."""
    tenant, principal, token = caller
    owned = (namespace, tenant, _OPERATION, operation) if policy.separate_operations else (namespace, tenant)
    if policy.bind_to is BindTo.TENANT:
        return scope_of(*owned)
    return bound_scope(policy.bind_to, *owned, principal=principal, token=token)


def check_names(caller: Caller, headers: Iterable[tuple[bytes, bytes]]) -> None:
    """Refuse a tenant or principal that is the caller's own credential: both are stored in clear text.

    Raises:
        ConfigurationError: One of the functions returned the credential of the request.
    """
    named = {caller.tenant: "tenant", caller.principal: "principal"}
    for field, value in headers:
        if field in CREDENTIAL_FIELDS:
            credential = value.decode("latin-1")
            for one in (credential, *credential.split()):
                if one in named and len(one) >= SHORTEST_CREDENTIAL:
                    raise ConfigurationError(IS_CREDENTIAL.format(what=named[one], field=field.decode("latin-1")))


def claim_for(claim_input: ClaimInput, enrolment: Enrolment, *, keep_headers: frozenset[bytes] = frozenset()) -> Claim:
    """The claim for an input; `keep_headers` are also stored for the completer."""
    policy, spans = enrolment.policy, enrolment.spans
    record_id, fingerprint, parts, caller = claim_input
    kept = None
    if enrolment.completes:
        about = kept_request.about_of(record_id, fingerprint)
        kept = kept_request.to_stored(kept_request.kept_request_of(parts, caller, keep_headers), policy.secret, about)
    # One random draw for both ids. It comes from the kernel, so a forked process gets different bytes.
    drawn = os.urandom(24)
    return Claim(  # by position: passing keyword arguments to a class takes twice as long
        record_id,
        UUID(int=int.from_bytes(drawn[:16], "big") & ~_NOT_RANDOM | _VERSION_4),
        enrolment.operation,
        enrolment.effects,
        enrolment.recovery,
        parts.method,
        parts.path.replace("\0", "%00"),  # PostgreSQL's text has no NUL
        fingerprint,
        enrolment.seeds.of(record_id, fingerprint),
        f"{PROCESS}:{drawn[16:].hex()}",
        spans.lease,
        spans.deadline,
        spans.call_timeout,
        spans.ttl,
        request=kept,
    )


def _forked() -> None:
    global PROCESS  # noqa: PLW0603  (one name per process)
    PROCESS = f"{socket.gethostname()}:{os.getpid()}"


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forked)
