"""What a route and an application may be told, and what is said to those who forgot something."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Literal, TypedDict

if TYPE_CHECKING:
    from datetime import timedelta

    from oncekey.core.choices import InProgress
    from oncekey.core.fingerprint import Request, Selection
    from oncekey.core.keys import HeaderSyntax, KeyFormat
    from oncekey.core.model import Recovery

NO_THREADS = (
    "effects=LOCAL on a plain `def` handler needs a blocking connection, and Once was given a SQLAlchemy AsyncEngine: "
    "make the handler `async def`"
)
NO_WSGI = (
    "once.webhook_wsgi needs a blocking connection, and Once was given a SQLAlchemy AsyncEngine: give it a URL, or "
    "take webhooks by once.webhook in the ASGI application"
)
NO_LIFESPAN = (
    "once.lifespan is not running, so nothing was checked at start-up and nothing waits for settlements at a stop: "
    "give the application lifespan=once.lifespan, or once.lifespan_with(its_own)"
)
NO_TENANT = (
    "once.install(app, tenant=...) needs to know whose key it is: pass a function that names the tenant of an "
    "authenticated request, or tenant=oncekey.SINGLE_TENANT if all callers may share each other's answers"
)


def SINGLE_TENANT(_: object) -> str:  # noqa: N802  (used as a constant: a choice that has to be spelled out)
    """All callers are one tenant: right only where every caller may see every answer."""
    return "single"


class Options(TypedDict, total=False):
    """Settings of one route; each overrides the policy of the whole application."""

    operation: str
    key: Literal["required", "optional"]
    in_progress: InProgress | Literal["conflict", "accepted", "wait"]
    wait_max: timedelta | float
    lease: timedelta | float
    deadline: timedelta | float
    ttl: timedelta | float
    allow_short_ttl: bool
    selection: Selection
    fingerprint: Callable[[Request], Mapping[str, object] | bytes]
    header_syntax: HeaderSyntax | Literal["strict", "compat", "bare"]
    key_format: KeyFormat | Literal["opaque", "uuid"]
    max_request_bytes: int
    body_timeout: timedelta | float
    max_response_bytes: int
    replay_headers: Sequence[str]
    on_lease_expired: Recovery | Literal["unknown", "resume", "retry", "fail"]
    on_unknown: Literal[409, 202, 503]
