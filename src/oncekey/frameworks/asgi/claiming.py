"""From a request to a claim: key, scope, fingerprint and seed, in the order in which a request is judged (R77)."""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import socket
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING
from uuid import uuid4

from oncekey.core.choices import PiiCheck
from oncekey.core.errors import BodyInvalidError, KeyMalformedError
from oncekey.core.fingerprint import Request, fingerprint, fingerprint_of
from oncekey.core.keys import key_digest, looks_personal, parse_key
from oncekey.core.model import Claim, Code, RecordId, Refuse
from oncekey.core.policy import micros
from oncekey.core.scope import BindTo, bound_scope
from oncekey.core.seed import seed_of
from oncekey.engine.kept_request import KeptRequest, kept_of, seal
from oncekey.frameworks.asgi.intake import TooLargeError, TooSlowError

if TYPE_CHECKING:
    from oncekey.core.policy import Policy
    from oncekey.engine.enrolment import Enrolment
    from oncekey.frameworks.asgi.installation import Installation
    from oncekey.frameworks.asgi.intake import Intake
    from oncekey.frameworks.asgi.types import Scope

log = logging.getLogger("oncekey")

PROCESS = f"{socket.gethostname()}:{os.getpid()}"
NO_NAMESPACE = "-"
SMALL_BODY = 32 * 1024
"""Bodies above this are compared in a thread: a megabyte of short numbers takes a second of Python."""


@dataclass(frozen=True, slots=True)
class Asked:
    """A claim, ready to be made, and the key as the client wrote it."""

    claim: Claim
    key: str


def read_key(lines: list[bytes], policy: Policy) -> str | Refuse:
    """The key that the request names, or why it is none."""
    try:
        key = parse_key(
            lines,
            syntax=policy.header_syntax,
            key_format=policy.key_format,
            min_length=policy.shortest_key,
            max_length=policy.max_key_length,
        )
    except KeyMalformedError as error:
        return Refuse(Code.KEY_MALFORMED, detail=str(error))
    if key is None:
        return Refuse(Code.KEY_MISSING)
    if policy.pii_check is not PiiCheck.OFF and looks_personal(key):
        if policy.pii_check is PiiCheck.REJECT:
            return Refuse(Code.KEY_MALFORMED, detail="The key looks like personal data; use a random value.")
        log.warning("oncekey: a key looks like personal data (digest %s): use random keys", key_digest(key))
    return key


async def make_claim(
    installation: Installation,
    enrolment: Enrolment,
    scope: Scope,
    lines: list[bytes],
    intake: Intake,
    *,
    root_path: str,
) -> Asked | Refuse:
    """Everything that is decided before the store is asked; a refusal here stores nothing."""
    policy = enrolment.policy
    key = read_key(lines, policy)
    if isinstance(key, Refuse):
        return key
    try:
        body = await intake.body(policy.body_timeout.total_seconds())
        if len(body) > policy.max_request_bytes:
            return Refuse(Code.BODY_TOO_LARGE)
        request = _request(scope, body)
        mark = await _fingerprint(request, enrolment)
    except TooLargeError:
        return Refuse(Code.BODY_TOO_LARGE)
    except TooSlowError:
        return Refuse(Code.BODY_TOO_SLOW)
    except BodyInvalidError as error:
        return Refuse(Code.BODY_INVALID, detail=str(error))
    record_id = RecordId(await scope_for(installation, policy, scope), key)
    incarnation = uuid4()
    kept = None
    if enrolment.completes:
        kept = seal(await _kept(installation, scope, body, root_path), policy.secret, about_of(record_id, mark))
    return Asked(
        Claim(
            id=record_id,
            incarnation=incarnation,
            operation=enrolment.operation,
            effects=enrolment.effects,
            recovery=enrolment.recovery,
            method=request.method,
            path=request.path.replace("\0", "%00"),  # PostgreSQL's text has no NUL
            fingerprint=mark,
            seed=seed_of(record_id, mark, policy.secret),
            owner=f"{PROCESS}:{secrets.token_hex(8)}",
            lease=micros(policy.lease),
            deadline=micros(policy.deadline),
            call_timeout=micros(policy.call_timeout),
            ttl=micros(policy.ttl),
            request=kept,
        ),
        key,
    )


def about_of(record_id: RecordId, fingerprint: str) -> str:
    """What a kept request is tied to. Not the incarnation: a claim whose reply was lost gets another one."""
    return f"{record_id.scope}/{record_id.key}/{fingerprint}"


async def _kept(installation: Installation, scope: Scope, body: bytes, root_path: str) -> KeptRequest:
    """The request as a completer repeats it, in the name of its principal or, without such, of its tenant (H7).

    `root_path` is that of the application's own: a mount inside of it has changed the scope's by now.
    """
    principal = await installation.principal_of(scope) or await installation.tenant_of(scope)
    headers = kept_of(scope["headers"], installation.kept_headers)
    query = scope.get("query_string", b"")
    return KeptRequest(scope["method"], scope["path"], query, root_path, headers, body, principal)


async def scope_for(installation: Installation, policy: Policy, scope: Scope) -> str:
    """The scope that the caller's keys live in: namespace and tenant, and what `bind_to` adds."""
    tenant = await installation.tenant_of(scope)
    principal = token = None
    match policy.bind_to:
        case BindTo.TENANT:
            pass
        case BindTo.PRINCIPAL:
            principal = await installation.principal_of(scope)
        case BindTo.TOKEN:
            token = _header(scope, b"authorization").decode("latin-1")
    return bound_scope(policy.bind_to, policy.namespace or NO_NAMESPACE, tenant, principal=principal, token=token)


def _request(scope: Scope, body: bytes) -> Request:
    content_type = _header(scope, b"content-type")
    return Request(scope["method"], scope["path"], scope.get("query_string", b""), content_type or None, body)


async def _fingerprint(request: Request, enrolment: Enrolment) -> str:
    policy, extract = enrolment.policy, enrolment.extract
    if extract is None:
        compute = partial(
            fingerprint,
            request,
            selection=policy.selection,
            secret=policy.secret,
            big_ints=policy.big_ints,
            max_depth=policy.max_json_depth,
        )
    else:
        compute = partial(
            fingerprint_of,
            extract(request),  # the route's own function runs in the loop, like its handler
            method=request.method,
            path=request.path,
            secret=policy.secret,
            big_ints=policy.big_ints,
            max_depth=policy.max_json_depth,
        )
    return compute() if len(request.body) <= SMALL_BODY else await asyncio.to_thread(compute)


def _header(scope: Scope, name: bytes) -> bytes:
    for found, value in scope["headers"]:
        if found == name:
            return bytes(value)
    return b""
