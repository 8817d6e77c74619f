"""Reads from an ASGI request what the engine needs for a claim: key, body, fingerprint and caller."""

from __future__ import annotations

import asyncio
import inspect
from typing import TYPE_CHECKING, Any, Final

from oncekey.core.errors import ConfigurationError
from oncekey.core.model import Code, Refuse
from oncekey.core.scope import BindTo
from oncekey.engine.claiming import Caller, Parts, chosen_of, claim_input_of, fingerprint_for, key_of
from oncekey.frameworks.asgi.messages import TooLargeError, TooSlowError

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from oncekey.core.policy import Policy
    from oncekey.engine.claiming import ClaimInput
    from oncekey.engine.enrolment import Enrolment
    from oncekey.frameworks.asgi import Identify, Scope
    from oncekey.frameworks.asgi.installation import Installation
    from oncekey.frameworks.asgi.messages import Intake

READ_BEFORE: Final = (
    "middleware around oncekey has consumed the body of a request with a key, so it cannot be compared with that of a "
    "repeat: let the middleware pass on what it reads, as `await request.body()` does in BaseHTTPMiddleware"
)
SMALL_BODY: Final = 32 * 1024
"""Bodies above this are compared in a thread: a megabyte of short numbers takes a second of Python."""


async def read_claim_input(
    installation: Installation,
    enrolment: Enrolment,
    scope: Scope,
    lines: list[bytes],
    intake: Intake,
    *,
    root_path: str,
) -> ClaimInput | Refuse:
    """The input of the claim, or the refusal of a request that cannot claim; a refusal stores nothing.

    `root_path` is that of the application itself: a mount inside of it has changed the scope's by now.
    """
    key = key_of(lines, enrolment)
    if isinstance(key, Refuse):
        return key
    try:
        body = await intake.body(enrolment.body_patience)
    except TooLargeError:
        return Refuse(Code.BODY_TOO_LARGE)
    except TooSlowError:
        return Refuse(Code.BODY_TOO_SLOW)
    headers = scope["headers"]
    if not body:
        for name, value in headers:
            if name == b"content-length" and value.lstrip(b"0"):
                raise ConfigurationError(READ_BEFORE)
    content_type = _field(headers, b"content-type") or None
    parts = Parts(
        scope["method"], scope["path"], scope.get("query_string", b""), headers, content_type, body, root_path
    )
    small = len(body) <= SMALL_BODY
    fingerprint = fingerprint_for(parts, enrolment) if small else await _fingerprint_aside(parts, enrolment)
    if isinstance(fingerprint, Refuse):
        return fingerprint
    if enrolment.completes or enrolment.policy.bind_to is not BindTo.TENANT:
        caller = await caller_of(installation, enrolment.policy, scope, named=enrolment.completes)
    else:
        tenant = installation.tenant(scope)
        caller = Caller(tenant if type(tenant) is str else await identified(tenant))
    return claim_input_of(key, fingerprint, parts, enrolment, caller)


async def caller_of(installation: Installation, policy: Policy, scope: Scope, *, named: bool = False) -> Caller:
    """The caller, as far as keys are bound to it. `named`: with the principal too, because the completer needs it."""
    tenant = await identified(installation.tenant(scope))
    bind_to = policy.bind_to
    if bind_to is BindTo.TENANT and not named:
        return Caller(tenant)
    token = _field(scope["headers"], b"authorization").decode("latin-1") if bind_to is BindTo.TOKEN else None
    principal = None
    if installation.principal is not None and (named or bind_to is BindTo.PRINCIPAL):
        principal = await identified(installation.principal(scope))
    return Caller(tenant, principal, token)


async def _fingerprint_aside(parts: Parts, enrolment: Enrolment) -> str | Refuse:
    """The fingerprint of a large body, in a thread; the route's own function runs in the loop, like its handler."""
    chosen = chosen_of(parts, enrolment)
    if isinstance(chosen, Refuse):
        return chosen
    return await asyncio.to_thread(fingerprint_for, parts, enrolment, chosen)


async def identified(named: str | Awaitable[str]) -> str:
    """The result of an `Identify`, awaited if it has to be."""
    return await named if inspect.isawaitable(named) else named


def by_request(
    identify: Callable[[Any], str | Awaitable[str]], what: str, request_of: Callable[[Scope], Any]
) -> Identify:
    """Turn a function that identifies by the framework's request into one that does by the scope.

    If the function finds an attribute missing on the request, the error names it.
    """

    def by_scope(scope: Scope) -> str | Awaitable[str]:
        try:
            value = identify(request_of(scope))
        except AttributeError as error:
            raise _not_there(error, what) from error
        return value if type(value) is str else later(value)

    async def later(value: str | Awaitable[str]) -> str:
        try:
            return await identified(value)
        except AttributeError as error:
            raise _not_there(error, what) from error

    return by_scope


def _not_there(error: AttributeError, what: str) -> ConfigurationError:
    return ConfigurationError(
        f"the {what} function found no {error.name!r} on the request: the route's authentication has to set it "
        "before the handler is called, for example as a dependency of the route"
    )


def _field(headers: list[tuple[bytes, bytes]], name: bytes) -> bytes:
    for found, value in headers:
        if found == name:
            return bytes(value)
    return b""
