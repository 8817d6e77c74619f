"""`oncekey.django.Once`: the `Once` of a Django project, named by `settings.ONCEKEY`."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Final, TypeVar, Unpack, cast

from asgiref.sync import sync_to_async
from django.db import connections
from django.http import Http404, HttpResponse, HttpResponseNotAllowed

from oncekey.core.errors import ConfigurationError
from oncekey.core.model import Effects
from oncekey.django.database import Database
from oncekey.django.exchange import (
    BufferedRequest,
    DjangoExchange,
    DjangoThreads,
    made,
    read_body,
    request_in,
    then_closed,
)
from oncekey.django.project import Application, check_order
from oncekey.frameworks.asgi.protect import has_operation, operation_name, shown
from oncekey.frameworks.consumer_page import documentation
from oncekey.frameworks.options import NO_WSGI_APP
from oncekey.frameworks.shared import thread_exchange
from oncekey.frameworks.webhook import Secrets, WebhookOptions, taken
from oncekey.frameworks.wsgi import lines_of
from oncekey.once import Once as Framework
from oncekey.wire import Source, has_threads

if TYPE_CHECKING:
    from datetime import timedelta

    from oncekey.core.resolvers import Question, Sighting
    from oncekey.engine.enrolment import Enrolment

F = TypeVar("F", bound=Callable[..., Any])

NO_MIDDLEWARE: Final = (
    "{operation} is protected, and was called outside of a request, or oncekey's middleware does not serve this "
    "request: put 'oncekey.django.Middleware' last in MIDDLEWARE; in a unit test, pass "
    "op=oncekey.testing.sync_operation(...), or call inspect.unwrap(view) if @api_view did not make it"
)
NO_TENANT: Final = (
    "Once(tenant=...) is missing: pass a function that returns the tenant of an authenticated request, or "
    "tenant=oncekey.SINGLE_TENANT if all callers may share responses"
)


class Once(Framework):
    """Makes the views of a Django project safe to retry.

    `store` is a `Database` (by default, the project's default database) or a URL as for `oncekey.Once`. `tenant` and
    `principal` are functions that take the request; in views of REST framework, its own request. `status` is the path
    under which `status_view` is routed; refusals link there in `Location`.
    """

    def __init__(
        self,
        store: Source | None = None,
        *,
        tenant: Callable[[Any], str] | None = None,
        principal: Callable[[Any], str] | None = None,
        status: str | None = None,
        keep_headers: Sequence[str] = (),
        **options: Any,  # noqa: ANN401
    ) -> None:
        # Only a name is looked up, so that `Once("postgresql://…")` may be created before Django's settings are read.
        if isinstance(store, str) and store.isidentifier() and store in connections.settings:
            raise ConfigurationError(f"{store!r} is an alias of settings.DATABASES: write Once(Database({store!r}))")
        super().__init__(Database() if store is None else store, **options)
        if not has_threads(self.store):
            raise ConfigurationError(NO_WSGI_APP.format(called="django"))
        self.has_tenant = tenant is not None
        codes = (getattr(one, "__code__", None) for one in (tenant, principal))
        self.reads_user = any(code is not None and "user" in code.co_names for code in codes)
        """Whether `tenant` or `principal` reads `request.user`, which REST framework sets in its own views only."""
        self.threads = DjangoThreads(
            self,
            self.policy,
            tenant=tenant or _no_tenant,
            principal=principal,
            status_path=status,
            keep_headers=keep_headers,
        )
        self.adopt(Application(), self.threads)

    def protect(
        self,
        *misused: object,
        effects: Effects | None = None,
        authorise: Callable[[Any], Any] | None = None,
        **options: Any,  # noqa: ANN401
    ) -> Callable[[F], F]:
        """Protect a view, a method of a view class, or an action: directly above the function, below other decorators.

        `authorise` is called before the claim with the view instance (class-based) or the request, and raises what the
        view would raise. A REST framework method whose route names an object calls `get_object()` for this check.
        """
        decorate: Callable[[F], F] = super().protect(*misused, effects=effects, **options)  # type: ignore[call-overload]

        def decorated(handler: F) -> F:
            check_order(handler)
            return _authorised(decorate(handler), authorise)

        return decorated

    def topic(self, name: str, *, repeatable: bool | timedelta = False) -> Callable[[F], F]:
        """Register the function that a worker calls for the parcels of a topic; it may use models."""
        return _registering(super().topic(name, repeatable=repeatable))

    def resolver(
        self,
        operation: str,
        *,
        call: str | None = None,
        answer: Callable[[Question, Any], Any] | None = None,
    ) -> Callable[[F], F]:
        """Register the function that queries a provider for the outcome of a call; it may use models."""
        return _registering(super().resolver(operation, call=call, answer=answer))

    @staticmethod
    def _wrapped(handler: F, enrolment: Enrolment) -> F:
        """The protected view. It stays `def` or `async def`, because Django calls the two differently."""
        name = operation_name(handler, enrolment)

        @functools.wraps(handler)
        def direct(*args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
            if has_operation(name, args, kwargs):
                return handler(*args, **kwargs)
            return _exchange(enrolment).call(handler, enrolment, name, args, kwargs)

        @functools.wraps(handler)
        async def awaited(*args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
            if has_operation(name, args, kwargs):
                return await handler(*args, **kwargs)
            return await _exchange(enrolment).acall(handler, enrolment, name, args, kwargs)

        wrapper = shown(direct if enrolment.blocking else awaited, handler, enrolment, name)
        database = enrolment.owner.threads.database  # type: ignore[attr-defined]  # it is a `Once` of this module
        if database is not None and not (enrolment.blocking and enrolment.transactional and database.one_commit):
            # A view that commits by itself must run outside the transaction of ATOMIC_REQUESTS, where Django rejects an
            # `async def` one.
            wrapper._non_atomic_requests = {  # noqa: SLF001  (what Django's own decorator sets)
                *getattr(handler, "_non_atomic_requests", ()),
                database.alias,
            }
        return cast("F", wrapper)

    def docs_view(self, _: Any) -> Any:  # noqa: ANN401  (Django has no types)
        """The page for API consumers that refusals link to: `path("idempotency", once.docs_view)`."""
        return made(documentation(self.threads))

    def status_view(self, request: Any, key: str) -> Any:  # noqa: ANN401  (Django has no types)
        """Return the status of a key, for `path("idempotency-keys/<path:key>", once.status_view)`.

        It must authenticate its caller as the protected views do: if REST framework authenticates them, call it from a
        view of REST framework.
        """
        return made(self.threads.status(BufferedRequest(request), key))

    def webhook_view(
        self, *, secret: Secrets = None, parse: Callable[[Any], Sighting | None], **options: Unpack[WebhookOptions]
    ) -> Callable[..., Any]:
        """A view that receives a provider's webhooks, like `oncekey.Once.webhook`: `path("webhooks/provider", ...)`.

        It needs no login and no CSRF token: the signature authenticates the sender.
        """
        receiver = self._receiver(None, secret, parse, options)

        def webhook(request: Any) -> Any:  # noqa: ANN401
            if request.method != "POST":
                return HttpResponseNotAllowed(["POST"])
            body = read_body(request, receiver.max_body)
            reply = receiver.answer_blocking(self, lines_of(request.META), taken(b"" if body is None else body))
            return HttpResponse(reply.body, status=reply.status, content_type="application/json")

        webhook.csrf_exempt = True  # type: ignore[attr-defined]  # as Django's own decorator does
        database = self.threads.database
        webhook._non_atomic_requests = set() if database is None else {database.alias}  # type: ignore[attr-defined]  # noqa: SLF001
        return webhook


def _registering(register: Callable[[F], F]) -> Callable[[F], F]:
    """Register a `def` function so that it closes the connections of its thread, which ends with the call."""

    def registered(function: F) -> F:
        if inspect.iscoroutinefunction(function):
            return register(function)
        register(cast("F", functools.wraps(function)(functools.partial(then_closed, function))))
        return function

    return registered


def _no_tenant(_: object) -> str:
    raise ConfigurationError(NO_TENANT)


def _exchange(enrolment: Enrolment) -> DjangoExchange:
    exchange = thread_exchange.get()
    if not isinstance(exchange, DjangoExchange):
        raise RuntimeError(NO_MIDDLEWARE.format(operation=enrolment.operation))  # noqa: TRY004  (it is missing)
    return exchange


def _authorised(protected: F, authorise: Callable[[Any], Any] | None) -> F:
    """The same view, with an authorisation check before the claim: a stored response is as sensitive as the object."""

    @functools.wraps(protected)
    def direct(*args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
        if _claims(args):
            _check(args, authorise)
        return protected(*args, **kwargs)

    @functools.wraps(protected)
    async def awaited(*args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
        if _claims(args):
            returned = await sync_to_async(_check, thread_sensitive=True)(args, authorise)
            if inspect.isawaitable(returned):
                await returned
        return await protected(*args, **kwargs)

    wrapper: Any = awaited if inspect.iscoroutinefunction(protected) else direct
    wrapper.__wrapped__ = inspect.unwrap(protected, stop=lambda one: not hasattr(one, "__oncekey__"))  # the bare view
    return cast("F", wrapper)


def _claims(args: tuple[Any, ...]) -> bool:
    exchange = thread_exchange.get()
    return bool(args) and isinstance(exchange, DjangoExchange) and exchange.keyed


def _check(args: tuple[Any, ...], authorise: Callable[[Any], Any] | None) -> Any:  # noqa: ANN401
    view = args[0]
    if authorise is not None:
        return authorise(view if request_in(args[:1]) is None else args[0])
    if not hasattr(view, "check_object_permissions") or not hasattr(view, "get_object"):
        return None
    if (view.lookup_url_kwarg or view.lookup_field) in view.kwargs:
        try:
            view.get_object()
        except Http404:
            if view.request.method != "DELETE":  # a retry of DELETE finds no object, and is replayed
                raise
    return None
