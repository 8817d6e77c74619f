"""aiohttp's server: `install` protects the handlers of a `web.Application`, and the methods of its views.

    once = Once("sqlite:///shop.db", migrate=True)

    @once.protect(effects=LOCAL)
    async def create_order(request: web.Request, op: Operation) -> web.Response: ...

    app = web.Application()
    app.router.add_post("/orders", create_order)
    install(once, app, tenant=lambda request: request[SHOP])

A protected handler lets its request in by itself, so that all middleware comes before the claim, and compression and
`on_response_prepare` after the answer. Where middleware makes answers of domain errors, put `middleware(once)` around
that one.
"""

from __future__ import annotations

import functools
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

from aiohttp import web

from oncekey.core.errors import ConfigurationError
from oncekey.frameworks.aiohttp_exchange import Passing, let_in, refuse_to_stream, request_of, respond, seen
from oncekey.frameworks.aiohttp_routes import INSTALLED, door_of, walk
from oncekey.frameworks.asgi.claiming import by_request, caller_of
from oncekey.frameworks.asgi.installation import Installation
from oncekey.frameworks.asgi.nesting import current, endpoint_of, layers, request_finders
from oncekey.frameworks.listing import check_served
from oncekey.frameworks.resources import documentation, is_served, status_of

if TYPE_CHECKING:
    from oncekey.engine.enrolment import Enrolment
    from oncekey.once import Once

    Named = Callable[[web.Request], str | Awaitable[str]]
    Call = Callable[[], Awaitable[Any]]

__all__ = ["install", "middleware"]

NO_TENANT: Final = (
    "oncekey.aiohttp.install(once, app, tenant=...) needs to know whose key it is: pass a function that names the "
    "tenant of an authenticated request, or tenant=oncekey.SINGLE_TENANT if all callers may share each other's answers"
)
TOO_LATE: Final = "oncekey.aiohttp.install(once, app) must come before the application is started or added to another"
TWICE: Final = "oncekey.aiohttp.install(once, app) was called twice for one application"
BLOCKING: Final = "{operation} is a plain `def`, and handlers of aiohttp are coroutines: make it `async def`"


def install(
    once: Once,
    app: web.Application,
    *,
    tenant: Named,
    principal: Named | None = None,
    status: str | None = "/idempotency-keys",
    enrol: Mapping[str, Enrolment] | None = None,
    keep_headers: Sequence[str] = (),
) -> None:
    """Put a `Once` into an application: the checks at its start, the drain at its end, the status resource.

    `tenant` and `principal` are functions that are handed the request. `status` is the path of the status resource, or
    None. `enrol` enrols by path what cannot be decorated. `keep_headers` are request headers that a completer needs
    besides those that describe the body, so never one that authenticates.
    """
    if not callable(tenant):
        raise ConfigurationError(NO_TENANT)
    if app.frozen:
        raise ConfigurationError(TOO_LATE)
    present = app.setdefault(INSTALLED, [])
    if any(other.engines is once for other in present):
        raise ConfigurationError(TWICE)
    installation = Installation(
        once,
        once.policy,
        tenant=by_request(tenant, "tenant", request_of),
        principal=None if principal is None else by_request(principal, "principal", request_of),
        status_path=status,
        enrol=enrol,
        respond=respond,
        keep_headers=keep_headers,
    )
    installation.answers = (web.HTTPSuccessful, web.HTTPRedirection)
    installation.seen = seen
    installation.check = functools.partial(_check, app, installation)
    installation.door = door_of(app)
    present.append(installation)
    if _entrance not in request_finders:
        request_finders.append(_entrance)
    if installation.patterns.patterns:
        app.middlewares.append(middleware(once))
    app.on_response_prepare.append(refuse_to_stream)
    app.cleanup_ctx.append(functools.partial(_lifespan, once))
    app.on_shutdown.append(functools.partial(_quiesce, once))
    _add_resources(app, installation)
    once.adopt(app, installation)


def middleware(once: Once) -> Any:  # noqa: ANN401  (of a type that aiohttp does not name in all its versions)
    """What answers for protected handlers, put around the middleware that makes answers of their domain errors.

    Without it such an error is no answer to us: it is rolled back, not stored, and a repeat runs again.
    """

    @web.middleware
    async def oncekey(request: web.Request, handler: Callable[[web.Request], Awaitable[Any]]) -> Any:  # noqa: ANN401
        if current.get() is None:
            installation = _installation(once, request)
            if installation is not None and _concerns(once, installation, request):
                return await let_in(installation, request, lambda: handler(request))
        return await handler(request)

    return oncekey


def _entrance(enrolment: Enrolment, args: tuple[Any, ...]) -> Callable[[Call], Awaitable[Any]] | None:
    """Where the request of a handler is let in: its last argument, or what its view has."""
    request = args[-1] if args else None
    if isinstance(request, web.View):
        request = request.request
    if not isinstance(request, web.Request):
        return None
    installation = _installation(enrolment.owner, request)
    return None if installation is None else functools.partial(let_in, installation, request)


def _installation(owner: object, request: web.Request) -> Installation | None:
    """That of the innermost application that a `Once` is installed in."""
    placed = (one for app in reversed(request.match_info.apps) for one in app.get(INSTALLED, ()))
    return next((one for one in placed if one.engines is owner), None)


def _concerns(once: Once, installation: Installation, request: web.Request) -> bool:
    """Whether a request is for a handler that a `Once` protects, by its decorator or by its path."""
    endpoint = endpoint_of({"endpoint": request.match_info.handler, "method": request.method})
    enrolled = (layer.__oncekey__ for layer in layers(endpoint) if hasattr(layer, "__oncekey__"))
    if any(enrolment.owner is once for enrolment in enrolled):
        return True
    return installation.patterns.find(request.method, request.path) is not None


# What an application gets.


async def _lifespan(once: Once, app: web.Application) -> AsyncIterator[None]:
    async with once.lifespan(app):
        yield


async def _quiesce(once: Once, _: web.Application) -> None:
    once.quiesce()


def _check(app: web.Application, installation: Installation) -> None:
    served = list(walk(app))
    check_served(served, installation.patterns, [one.engines for one in app[INSTALLED]])
    for enrolment in (route.enrolment(method) for route in served for method in route.methods):
        if enrolment is not None and enrolment.blocking:
            raise ConfigurationError(BLOCKING.format(operation=enrolment.operation))


def _add_resources(app: web.Application, installation: Installation) -> None:
    """The status of a key, and the page that refusals link to."""

    async def idempotency_key_status(request: web.Request) -> web.Response:
        passing = Passing(request, _nothing)
        caller = await caller_of(installation, installation.policy, passing.scope)
        runtime, site = installation.life()
        return respond(await runtime.drive(status_of(installation, site.store, caller, request.match_info["key"])))

    async def idempotency_documentation(_: web.Request) -> web.Response:
        return respond(documentation(installation.policy))

    if installation.status_path is not None:
        app.router.add_get(f"{installation.status_path}/{{key:.+}}", idempotency_key_status)
    if is_served(installation.policy):
        app.router.add_get(installation.policy.docs_url, idempotency_documentation)


async def _nothing() -> None:
    """No handler is called for the status of a key."""
