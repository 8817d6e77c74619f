"""The options of an application, and the errors for missing or wrong options."""

from __future__ import annotations

import difflib
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import fields
from typing import TYPE_CHECKING, Any, Required, TypedDict

from oncekey.core.checks import scope_of
from oncekey.core.errors import ConfigurationError
from oncekey.core.policy import Policy

if TYPE_CHECKING:
    from starlette.requests import Request as HttpRequest

    from oncekey.core.model import Effects
    from oncekey.engine.enrolment import Enrolment

NO_THREADS = (
    "effects=LOCAL on a plain `def` handler needs a blocking connection, but Once was given a SQLAlchemy AsyncEngine: "
    "make the handler `async def`"
)
NO_WSGI = (
    "once.webhook_wsgi needs a blocking connection, but Once was given a SQLAlchemy AsyncEngine: pass a URL, or "
    "receive webhooks with once.webhook in the ASGI application"
)
NO_WSGI_APP = (
    "once.{called} needs blocking connections, but Once was given a SQLAlchemy AsyncEngine: pass a URL, "
    "postgresql://... or sqlite:///..., or an engine from create_engine(...)"
)
NO_LIFESPAN = (
    "once.lifespan is not running, so nothing was checked at start-up and a shutdown does not wait for settlements: "
    "let the server run the application's lifespan (uvicorn: without `--lifespan off`); a test without a server enters "
    "app.router.lifespan_context(app), other programs enter once.lifespan(), and the lifespan of a mounted "
    "application's parent enters `async with once.lifespan(api):`"
)
NO_TENANT = (
    "once.{called}(app, tenant=...) is missing its tenant: pass a function that returns the tenant of an "
    "authenticated request, or tenant=oncekey.SINGLE_TENANT if all callers may share responses"
)
STRANGE_ENROLMENT = (
    "enrol={{...}}: {operation} was created by another Once; create it with by_path(...) of the Once that is installed"
)
FOR_ALL = "{name} is a setting of the whole application: pass it as Once(..., policy=Policy({name}=...))"
FOR_OTHERS = "{name} has no effect with effects={effects}: it is for {meant}"


def SINGLE_TENANT(_: object) -> str:  # noqa: N802  (used as a constant: a choice that has to be spelled out)
    """All callers are one tenant: only if every caller may see every response."""
    return "single"


class Installing(TypedDict, total=False):
    """How an application is installed."""

    tenant: Required[Callable[[HttpRequest], str | Awaitable[str]]]
    principal: Callable[[HttpRequest], str | Awaitable[str]] | None
    status: str | None
    status_dependencies: Sequence[Any]
    enrol: Mapping[str, Enrolment] | None
    keep_headers: Sequence[str]


def settings_of(effects: Effects, options: Mapping[str, Any]) -> dict[str, Any]:
    """The settings among a route's options, by name; raises for a setting without effect."""
    for setting in fields(Policy):
        scope = scope_of(setting.metadata)
        if not scope.strict or setting.name not in options or effects in scope.effects:
            continue
        if not scope.effects:
            raise ConfigurationError(FOR_ALL.format(name=setting.name))
        named = " and ".join(sorted(one.name for one in scope.effects))
        raise ConfigurationError(FOR_OTHERS.format(name=setting.name, effects=effects.name, meant=named))
    return dict(options)


def check_installing(options: Mapping[str, Any], kind: type = Installing, called: str = "install") -> None:
    """Raise for an option that the method does not take, and for an installation without a tenant."""
    known = [name for base in kind.__mro__ for name in getattr(base, "__annotations__", ())]
    for name in options:
        if name not in known:
            close = difflib.get_close_matches(name, known, n=1, cutoff=0.0)
            raise ConfigurationError(f"once.{called} takes no {name}; the closest is {close[0]}")
    if options.get("tenant") is None:
        raise ConfigurationError(NO_TENANT.format(called=called))
