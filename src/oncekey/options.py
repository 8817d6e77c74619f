"""The options of a route and of an application, and the errors for options that are missing or wrong."""

from __future__ import annotations

import difflib
from collections.abc import Awaitable, Callable, Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final, Literal, Required, TypedDict

from oncekey.core.errors import ConfigurationError
from oncekey.core.model import Effects, Recovery

if TYPE_CHECKING:
    from datetime import timedelta

    from starlette.requests import Request as HttpRequest

    from oncekey.canonical.fingerprint import Request, Selection
    from oncekey.core.fronts import Front
    from oncekey.core.keys import HeaderSyntax, KeyFormat
    from oncekey.core.policy import InProgress, On5xx
    from oncekey.engine.enrolment import Enrolment

NO_THREADS = (
    "effects=LOCAL on a plain `def` handler needs a blocking connection, and Once was given a SQLAlchemy AsyncEngine: "
    "make the handler `async def`"
)
NO_WSGI = (
    "once.webhook_wsgi needs a blocking connection, and Once was given a SQLAlchemy AsyncEngine: give it a URL, or "
    "take webhooks by once.webhook in the ASGI application"
)
NO_WSGI_APP = (
    "once.{called} needs blocking connections, and Once was given a SQLAlchemy AsyncEngine: give it a URL, "
    "postgresql://... or sqlite:///..., or an engine made by create_engine(...)"
)
NO_LIFESPAN = (
    "once.lifespan is not running, so nothing was checked at start-up and nothing waits for settlements at a stop: "
    "give the application lifespan=once.lifespan, or once.lifespan_with(its_own); a test that has no server enters "
    "app.router.lifespan_context(app), and an application that is mounted in another starts in that one's lifespan"
)
NO_TENANT = (
    "once.{called}(app, tenant=...) needs to know whose key it is: pass a function that names the tenant of an "
    "authenticated request, or tenant=oncekey.SINGLE_TENANT if all callers may share each other's answers"
)
STRANGE_ENROLMENT = (
    "enrol={{...}}: {operation} was made by another Once; make it with by_path(...) of the one that is installed"
)
FOR_ALL = "{name} is a setting of the whole application: give it to Once(..., policy=Policy({name}=...))"
FOR_OTHERS = "{name} has no effect with effects={effects}: it is for {meant}"


def SINGLE_TENANT(_: object) -> str:  # noqa: N802  (used as a constant: a choice that has to be spelled out)
    """All callers are one tenant: right only where every caller may see every answer."""
    return "single"


class Shared(TypedDict, total=False):
    """Settings of everything that is enrolled; each overrides the policy of the whole application."""

    require_key: bool
    low_stakes: bool
    """A second execution would do little harm: only then its keys may lie in a store that can forget them."""
    on_in_progress: InProgress | Literal["conflict", "accepted", "wait"]
    wait_max: timedelta | float
    replay_cache: Front | str | timedelta | float | None
    lock_hint: Front | str | None
    lease: timedelta | float
    deadline: timedelta | float
    ttl: timedelta | float
    allow_short_ttl: bool
    selection: Selection
    header_syntax: HeaderSyntax | Literal["strict", "compat", "bare"]
    key_format: KeyFormat | Literal["opaque", "uuid"]
    max_request_bytes: int
    body_timeout: timedelta | float
    max_response_bytes: int
    replay_headers: Sequence[str]
    on_lease_expired: Recovery | Literal["unknown", "resume", "retry", "fail"]
    on_unknown: Literal[409, 202, 503]


class Options(Shared, total=False):
    """Settings of one decorated handler."""

    operation: str
    fingerprint: Callable[[Request], Mapping[str, object] | bytes]


class Outside(TypedDict, total=False):
    """What only a handler has that talks to the outside directly."""

    on_5xx: On5xx | Literal["classify", "retry_fresh", "store"]
    is_definitely_not_executed: Callable[[BaseException], bool]
    not_executed_statuses: set[int] | frozenset[int]
    naturally_idempotent: bool
    on_store_error: Literal["fail_closed", "fail_open"]


class InlineOptions(Options, Outside, total=False):
    """Settings of a handler with effects=INLINE."""


class PathOptions(Shared, Outside, total=False):
    """Settings of what is enrolled by its path, which is INLINE."""


class PhasedOptions(Options, total=False):
    """Settings of a handler with effects=PHASED."""

    complete: bool
    is_definitely_not_executed: Callable[[BaseException], bool]
    call_timeout: timedelta | float
    send_window: timedelta | float
    max_attempts: int
    max_result_bytes: int


class CallOptions(TypedDict, total=False):
    """Settings of a protected function or consumer; what is for one kind of effects only is refused with others."""

    tenant: str | Callable[..., str]
    """Whose call it is: a parameter's name, or a function of parameters. Without it all calls are one tenant's."""
    result: Any
    """What the result is read as, where the annotation does not say: a type, a model, a function."""
    ignore: Sequence[str]
    """Parameters that do not count, such as a client or a session."""
    low_stakes: bool
    """A second execution would do little harm: only then its keys may lie in a store that can forget them."""
    on_in_progress: InProgress | Literal["conflict", "wait"]
    wait_max: timedelta | float
    replay_cache: Front | str | timedelta | float | None
    lock_hint: Front | str | None
    lease: timedelta | float
    deadline: timedelta | float
    ttl: timedelta | float
    allow_short_ttl: bool
    max_request_bytes: int
    max_response_bytes: int
    on_lease_expired: Recovery | Literal["unknown", "resume", "retry", "fail"]
    on_5xx: On5xx | Literal["classify", "retry_fresh", "store"]
    is_definitely_not_executed: Callable[[BaseException], bool]
    naturally_idempotent: bool
    on_store_error: Literal["fail_closed", "fail_open"]
    complete: bool
    call_timeout: timedelta | float
    send_window: timedelta | float
    max_attempts: int
    max_result_bytes: int


class InboxOptions(CallOptions, total=False):
    """Settings of a consumer, whose name is that of its operation."""


class FunctionOptions(CallOptions, total=False):
    """Settings of a protected function."""

    operation: str


class Installing(TypedDict, total=False):
    """How an application is installed."""

    tenant: Required[Callable[[HttpRequest], str | Awaitable[str]]]
    principal: Callable[[HttpRequest], str | Awaitable[str]] | None
    status: str | None
    status_dependencies: Sequence[Any]
    enrol: Mapping[str, Enrolment] | None
    keep_headers: Sequence[str]


class ThreadOptions(TypedDict, total=False):
    """How an application is protected that is served in threads; `tenant` is handed what its framework has."""

    tenant: Required[Callable[[Any], str]]
    principal: Callable[[Any], str] | None
    status: str | None
    keep_headers: Sequence[str]


class WsgiOptions(ThreadOptions, total=False):
    """The same of a plain one, which may be protected by its paths."""

    enrol: Mapping[str, Enrolment] | None


OFFERED: Final[Mapping[Effects, type]] = MappingProxyType(
    {
        Effects.LOCAL: Options,
        Effects.OUTBOX: Options,
        Effects.INLINE: InlineOptions,
        Effects.PHASED: PhasedOptions,
    }
)
"""What a type checker knows of the options of a decorated handler."""

_WHOLE: Final = frozenset(
    {
        "abandoned_status",
        "audit_ttl",
        "expiry_mode",
        "max_lookups_per_second",
        "outbox_lease",
        "outbox_max_attempts",
        "reap_batch",
        "reap_interval",
        "reconcile_max_tries",
        "separate_operations",
        "sweep_interval",
        "abandoned_ttl",
    }
)
"""Settings that workers and the status resource read from the application's policy and never from a route's."""

_MEANT: Final[Mapping[str, frozenset[Effects]]] = MappingProxyType(
    {
        "complete": frozenset({Effects.PHASED}),
        "send_window": frozenset({Effects.PHASED}),
        "not_executed_statuses": frozenset({Effects.INLINE}),
        "is_definitely_not_executed": frozenset({Effects.INLINE, Effects.PHASED}),
    }
)


def settings_of(effects: Effects, options: Mapping[str, Any]) -> dict[str, Any]:
    """The settings among a route's options, by their own names; one that nothing would read is refused."""
    settings = dict(options)
    for name in settings:
        if name in _WHOLE:
            raise ConfigurationError(FOR_ALL.format(name=name))
        meant = _MEANT.get(name)
        if meant is not None and effects not in meant:
            named = " and ".join(sorted(one.name for one in meant))
            raise ConfigurationError(FOR_OTHERS.format(name=name, effects=effects.name, meant=named))
    return settings


def check_installing(options: Mapping[str, Any], kind: type = Installing, called: str = "install") -> None:
    """Refuse what a method of this name does not take, and an installation without a tenant."""
    known = [name for base in kind.__mro__ for name in getattr(base, "__annotations__", ())]
    for name in options:
        if name not in known:
            close = difflib.get_close_matches(name, known, n=1, cutoff=0.0)
            raise ConfigurationError(f"once.{called} takes no {name}; the closest is {close[0]}")
    if options.get("tenant") is None:
        raise ConfigurationError(NO_TENANT.format(called=called))
