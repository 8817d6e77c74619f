"""`Once`: the object that an application creates. It composes store, driver, engine and framework."""

from __future__ import annotations

import asyncio
import atexit
import inspect
import os
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping
from contextlib import asynccontextmanager
from functools import cached_property
from threading import Lock
from typing import TYPE_CHECKING, Any, Final, Literal, TypeVar, Unpack, overload
from weakref import WeakKeyDictionary, WeakSet

from oncekey.core.errors import ConfigurationError
from oncekey.core.lazy import Lazy
from oncekey.core.model import Effects, RecordId
from oncekey.core.policy import Policy
from oncekey.engine.enrolment import WHAT_EFFECTS_MEAN, Enrolment, enrol
from oncekey.frameworks.asgi import App, Identify
from oncekey.frameworks.asgi.installation import Installation
from oncekey.frameworks.asgi.middleware import OncekeyMiddleware
from oncekey.frameworks.asgi.protect import protect
from oncekey.frameworks.options import (
    NO_LIFESPAN,
    NO_THREADS,
    NO_WSGI,
    NO_WSGI_APP,
    SINGLE_TENANT,
    STRANGE_ENROLMENT,
    Installing,
    check_installing,
    settings_of,
)
from oncekey.frameworks.shared import ApplicationShared
from oncekey.once import startup
from oncekey.wire import Given, aconnect_to, check_stakes, connect_to, has_threads, sealing, source_of

if TYPE_CHECKING:
    from datetime import timedelta
    from wsgiref.types import WSGIApplication

    from oncekey import sealing as seals
    from oncekey.core import resolvers as resolver_parts
    from oncekey.core import topics as topic_parts
    from oncekey.engine.shell import AsyncEngine, Engine
    from oncekey.frameworks import fronting, starlette, starlette_patterns, wsgi
    from oncekey.frameworks import webhook as webhooks
    from oncekey.frameworks.asgi import transactions
    from oncekey.frameworks.blocking import ThreadOptions, Threads, WsgiOptions
    from oncekey.frameworks.webhook import Parse, Secrets, Webhook, WebhookOptions, WebhookReceiver, WsgiWebhook
    from oncekey.observe import measuring
    from oncekey.observe.events import Notify, Observer
    from oncekey.once import functions as function_parts
    from oncekey.once.functions import FunctionOptions, InboxOptions, Protects, Receives
    from oncekey.options import InlineOptions, Options, PathOptions, PhasedOptions
    from oncekey.workers import service, serving, tasks
else:
    fronting = Lazy("oncekey.frameworks.fronting")
    function_parts = Lazy("oncekey.once.functions")
    measuring = Lazy("oncekey.observe.measuring")
    resolver_parts = Lazy("oncekey.core.resolvers")
    seals = Lazy("oncekey.sealing")
    service = Lazy("oncekey.workers.service")
    serving = Lazy("oncekey.workers.serving")
    starlette = Lazy("oncekey.frameworks.starlette")
    starlette_patterns = Lazy("oncekey.frameworks.starlette_patterns")
    tasks = Lazy("oncekey.workers.tasks")
    topic_parts = Lazy("oncekey.core.topics")
    transactions = Lazy("oncekey.frameworks.asgi.transactions")
    webhooks = Lazy("oncekey.frameworks.webhook")
    wsgi = Lazy("oncekey.frameworks.wsgi")

A = TypeVar("A")
F = TypeVar("F", bound=Callable[..., Any])

__all__ = ["SINGLE_TENANT", "Once"]

DRAIN_SECONDS = 10.0


class Once:
    """Makes the routes of an application safe to retry.

    Protect handlers with `@once.protect(effects=...)`, then attach it with `install`, `flask`, `asgi` or `wsgi`.

    Args:
        store: A URL such as `postgresql://...` (`oncekey stores` lists all), the application's SQLAlchemy engine, or a
            database of its framework (`oncekey.ports.store.Borrowed`).
        policy: The settings of all routes; `@once.protect(...)` overrides them for one.
        migrate: Create oncekey's tables at start-up and run `pre` migrations; `oncekey migrate up` runs all.
        workers: Run the workers of `oncekey worker` inside `lifespan`, or from the first request under WSGI and Django.
        observers: Functions that receive every event (`oncekey.observe`), for metrics, traces and logs.
        seal: Encrypts the responses, results, payloads and requests in the store (`oncekey.sealing`).
        survey: Log how many routes are protected at start-up.
    """

    _wrapped = staticmethod(protect)  # replaced by a framework that has its own wrappers

    def __init__(
        self,
        store: Given,
        *,
        policy: Policy | None = None,
        migrate: bool = False,
        workers: bool = False,
        observers: Iterable[Observer] = (),
        seal: seals.Seal | None = None,
        survey: bool = True,
    ) -> None:
        self.store = source_of(store)
        self.policy = policy or Policy()
        self.seal = None if seal is None else seals.check_seal(seal)
        self.enrolled: dict[str, Callable[..., Any]] = {}
        self.observers: tuple[Observer, ...] = ()
        self.notify: Notify | None = None
        """Calls all observers; None if there are none."""
        self.survey = survey
        self._webhooks: dict[str, frozenset[object]] = {}
        self._migrate = migrate
        self._workers = workers
        self._service: service.Service | None = None
        self._aside: service.WorkerThread | None = None
        self._running: WeakSet[asyncio.AbstractEventLoop] = WeakSet()
        self._lifespans = startup.Lifespans(self)
        self._installed: dict[Any, Installation] = {}
        self._threaded: dict[Any, Threads] = {}
        self._engines: WeakKeyDictionary[asyncio.AbstractEventLoop, AsyncEngine] = WeakKeyDictionary()
        self._blocking: Engine | None = None
        self._connecting = Lock()
        _ALL.add(self)
        self.observe(*observers)

    def observe(self, *observers: Observer) -> None:
        """Add observers. Call it before the application serves requests: running operations keep the earlier ones."""
        self.observers += observers
        self.notify = startup.notify_all(self.observers)
        for installation in self._installations:
            installation.notify = self.notify

    # Enrolling

    @cached_property
    def topics(self) -> topic_parts.Topics:
        """The topics of parcels and their handlers."""
        return topic_parts.Topics()

    @cached_property
    def resolvers(self) -> resolver_parts.Resolvers:
        """The functions that query providers for the outcome of a call."""
        return resolver_parts.Resolvers()

    @cached_property
    def _functions(self) -> function_parts.Functions:
        return function_parts.Functions(self, self)

    def has(self, part: str) -> bool:
        """Whether `topics`, `resolvers` or `_functions` was ever used; reading the attribute would import it."""
        return part in vars(self)

    def topic(self, name: str, *, repeatable: bool | timedelta = False) -> Callable[[F], F]:
        """Register the function that a worker calls for the parcels of a topic; see `Topics.topic`."""
        return self.topics.topic(name, repeatable=repeatable)

    def resolver(
        self,
        operation: str,
        *,
        call: str | None = None,
        answer: Callable[[resolver_parts.Question, Any], Any] | None = None,
    ) -> Callable[[F], F]:
        """Register the function that queries a provider for the outcome of a call; see `Resolvers.resolver`."""
        return self.resolvers.resolver(operation, call=call, answer=answer)

    @overload
    def protect(
        self, *, effects: Literal[Effects.LOCAL, Effects.OUTBOX], **options: Unpack[Options]
    ) -> Callable[[F], F]: ...

    @overload
    def protect(self, *, effects: Literal[Effects.INLINE], **options: Unpack[InlineOptions]) -> Callable[[F], F]: ...

    @overload
    def protect(self, *, effects: Literal[Effects.PHASED], **options: Unpack[PhasedOptions]) -> Callable[[F], F]: ...

    def protect(self, *misused: object, effects: Effects | None = None, **options: Any) -> Callable[[F], F]:
        """Protect a handler: `@once.protect(effects=LOCAL)`, directly above it and below the route decorator.

        It applies to every state-changing method that the route serves.
        """
        if misused or effects not in tuple(Effects):
            given = "" if effects is None else f", not effects={effects!r}"
            raise TypeError(f"write @once.protect(effects=...){given}: {WHAT_EFFECTS_MEAN}")
        options = settings_of(Effects(effects), options)
        name = options.pop("operation", None)
        extract = options.pop("fingerprint", None)
        low_stakes = options.pop("low_stakes", False)
        policy = self.policy.override(**options)

        def decorate(handler: F) -> F:
            startup.check_handler(handler)
            enrolment = Enrolment(
                operation=name or handler.__qualname__,
                effects=Effects(effects),
                policy=policy,
                owner=self,
                extract=extract,
                blocking=not inspect.iscoroutinefunction(handler),
            )
            check_stakes(self.store, enrolment.operation, low_stakes=low_stakes)
            if enrolment.operation in self.enrolled:
                raise ConfigurationError(
                    f"two handlers have the name {enrolment.operation}: name one with @once.protect(operation=...)"
                )
            protected = self._wrapped(handler, enrolment)
            self.enrolled[enrolment.operation] = protected
            for installation in self._installations:
                installation.admit(enrolment)
            return protected

        return decorate

    def by_path(self, *, effects: Effects, operation: str, **options: Unpack[PathOptions]) -> Enrolment:
        """An enrolment for `install(app, enrol={"POST /legacy": once.by_path(...)})`."""
        settings = settings_of(effects, options)
        check_stakes(self.store, operation, low_stakes=settings.pop("low_stakes", False))
        return enrol(operation, effects, self.policy, self, **settings)

    def function(
        self,
        *,
        effects: Effects,
        key: str | Callable[..., str] | None = None,
        **options: Unpack[FunctionOptions],
    ) -> Protects:
        """Protect any `def` or `async def` function: it runs once per key, and every call returns the same result.

        `key` is the name of a parameter, or a function of parameters: `key=lambda order: order.id`. The other arguments
        must be the same on every call. A call that is not run raises; see `oncekey.NotRunError`.
        """
        return self._functions.function(effects, options, key)

    def inbox(self, *, effects: Effects, consumer: str | None = None, **options: Unpack[InboxOptions]) -> Receives:
        """Handle a message once per `consumer`, which is a name: `consumer(message_id, ...)` returns a `Receipt`."""
        return self._functions.inbox(effects, options, consumer)

    # Sessions and connections

    @cached_property
    def _lender(self) -> transactions.TransactionDependency:
        return transactions.TransactionDependency(self)

    @property
    def session(self) -> Callable[[], Awaitable[Any]]:
        """A plain dependency: the request's session, `Annotated[AsyncSession, Depends(once.session)]`.

        On a LOCAL route it commits together with the key. On a PHASED route it commits with the phase, and only reads
        outside a phase. On any other route it is an ordinary session.
        """
        return self._lender.session

    @property
    def connection(self) -> Callable[[], Awaitable[Any]]:
        """A connection as a dependency: `op.connection`, in a phase the phase's, otherwise a read-only one."""
        return self._lender.connection

    # Installing

    def install(self, app: Any, **options: Unpack[Installing]) -> None:  # noqa: ANN401  (not imported here)
        """Put the middleware into a Starlette or FastAPI application, with its lifespan, status resource and OpenAPI.

        `tenant` and `principal` are functions of the request or, in FastAPI, `Depends(...)`. `status` is the path of
        the status resource (`/idempotency-keys`), or None; FastAPI's `status_dependencies` authenticate it. `enrol`
        protects, by path, routes that cannot be decorated. `keep_headers` are request headers that a completer needs in
        addition to those that describe the body: they are stored with the request of a PHASED handler, so never name
        one that authenticates.
        """
        check_installing(options)
        if not hasattr(app, "user_middleware"):
            raise ConfigurationError("once.install takes a Starlette or FastAPI application; wrap others in once.asgi")
        installation = starlette.installed(app, self, self.policy, options)
        app.router.lifespan_context = self._lifespans.around(app.router.lifespan_context)
        installation.ready = lambda: startup.check_running(self, app)
        self.adopt(app, installation)

    def webhook(
        self,
        app: Any,  # noqa: ANN401  (a Starlette or FastAPI application)
        path: str,
        *,
        secret: Secrets = None,
        parse: Parse,
        **options: Unpack[WebhookOptions],
    ) -> None:
        """Receive webhooks at `path`, signed as `Oncekey-Signature: t=...,v1=...` (HMAC-SHA256 of "t.body").

        `parse` receives the event's JSON and returns a `Sighting`, or None if the event is not about a call. Any of
        several secrets is accepted. `header="Stripe-Signature"` accepts Stripe's messages. `verify` replaces `secret`
        for other schemes: it receives the header fields and the body, and returns whether the message is genuine.
        A provider's ids are unique within `name`, because two accounts may use the same ids.
        """
        starlette.add_route(app, path, webhooks.Webhook(self, self._receiver(path, secret, parse, options)))

    def webhook_asgi(self, *, secret: Secrets = None, parse: Parse, **options: Unpack[WebhookOptions]) -> Webhook:
        """`webhook` as an ASGI application, which other frameworks mount at the path that the provider posts to."""
        return webhooks.Webhook(self, self._receiver(None, secret, parse, options))

    def webhook_wsgi(self, *, secret: Secrets = None, parse: Parse, **options: Unpack[WebhookOptions]) -> WsgiWebhook:
        """`webhook` as a WSGI application; run `oncekey migrate up` first."""
        if not has_threads(self.store):
            raise ConfigurationError(NO_WSGI)
        return webhooks.WsgiWebhook(self, self._receiver(None, secret, parse, options))

    def _receiver(self, path: str | None, secret: Secrets, parse: Parse, options: WebhookOptions) -> WebhookReceiver:
        return webhooks.WebhookReceiver(self, path, secret=secret, parse=parse, **options).added_to(self._webhooks)

    def asgi(
        self, app: App, *, tenant: Identify, enrol: Mapping[str, Enrolment], principal: Identify | None = None
    ) -> OncekeyMiddleware:
        """Protect any other ASGI application from outside, by path; `tenant` receives the ASGI scope.

        The returned application runs `once.lifespan` around the lifespan of `app`.
        """
        installation = Installation(self, self.policy, tenant=tenant, principal=principal, enrol=enrol)
        if "starlette" in sys.modules:
            starlette_patterns.enrol_routes(app, installation)
        wrapped = OncekeyMiddleware(app, installation, self.lifespan)
        self.adopt(wrapped, installation)
        return wrapped

    def wsgi(self, app: WSGIApplication, **options: Unpack[WsgiOptions]) -> WSGIApplication:
        """Protect a WSGI application: `def` handlers by `@once.protect`, others by path; `tenant` gets the environ.

        `status` is the path of the status resource, if any; `keep_headers` is as with `install`. WSGI has no lifespan:
        the first request of each process runs the checks of `lifespan`. A Flask application is changed in place and
        returned; prefer `once.flask`, which passes Flask's request to `tenant`.
        """
        threads = startup.threads_for(self, "wsgi", options)
        if hasattr(app, "wsgi_app"):
            startup.place_in_flask(self, app, threads, shows_request=False)
            return app
        wrapped = wsgi.OncekeyWsgi(app, threads)
        self.adopt(wrapped, threads)
        return wrapped

    def flask(self, app: Any, **options: Unpack[ThreadOptions]) -> None:  # noqa: ANN401  (not imported here)
        """Protect the views of a Flask application, in place, as `init_app` of a Flask extension does.

        `tenant` and `principal` receive Flask's `request`, after `before_request`. The status resource is a view at
        `/idempotency-keys`, or at `status`.
        """
        if not hasattr(app, "view_functions"):
            raise ConfigurationError("once.flask takes a Flask application; wrap others in once.wsgi")
        given = {"status": "/idempotency-keys", **options}
        threads = startup.threads_for(self, "flask", given)
        startup.place_in_flask(self, app, threads, shows_request=True)

    # Running

    @asynccontextmanager
    async def lifespan(self, app: Any = None) -> AsyncIterator[None]:  # noqa: ANN401
        """Check everything before the first request, and wait for settlements after the last one.

        `install` and Litestar's plugin enter it. Enter it yourself for functions, consumers, tests and mounted
        applications. It may be nested: only the end of the outermost one stops the `Once`.
        """
        async with self._lifespans.opened(app), self._lifespans.serving():
            yield

    async def start(self, app: Any = None) -> None:  # noqa: ANN401
        """Run the checks of `lifespan`; a second call checks only the application's routes."""
        for installation in self._in_loops:
            installation.stopping = False
        if not self.running:
            await self._check_all()
        if app is not None:
            handlers = [one for name, one in self.enrolled.items() if name not in self.functions]
            startup.check_routes(self, app, self._installed.get(app), handlers)

    async def _check_all(self) -> None:
        loop = asyncio.get_running_loop()
        self._running.add(loop)
        try:
            engine = self.asynchronous()
            if self._migrate:
                await engine.migrate()
            await engine.check()
            startup.check_settings(self, engine)
        except BaseException:
            self._running.discard(loop)
            raise
        startup.warn_of_own_sessions(self)
        startup.log_protection(self)

    @property
    def running(self) -> bool:
        """Whether it was started in the running event loop."""
        return asyncio.get_running_loop() in self._running

    @property
    def apps(self) -> tuple[Any, ...]:
        """The applications that it is installed in."""
        return tuple(self._installed)

    @property
    def served(self) -> Mapping[Any, ApplicationShared]:
        """The applications of any framework that it protects, each with its installation."""
        return {**self._installed, **self._threaded}

    @property
    def functions(self) -> Mapping[str, Callable[..., Any]]:
        """Its protected functions and consumers by operation, without their protection."""
        return {name: one.__wrapped__ for name, one in self._by_operation.items()}

    @property
    def _by_operation(self) -> Mapping[str, Any]:
        return self._functions.by_operation if self.has("_functions") else {}

    @property
    def _installations(self) -> list[ApplicationShared]:
        functions = self._functions.shared if self.has("_functions") else ()
        return [*self._installed.values(), *self._threaded.values(), *functions]

    @property
    def policies(self) -> list[Policy]:
        """The application's policy and those of all enrolments, by decorator or by path."""
        enrolled = [handler.__oncekey__ for handler in self.enrolled.values()]  # type: ignore[attr-defined]
        by_path = [enrolment for one in self._installations for enrolment in one.patterns]
        return [self.policy, *(enrolment.policy for enrolment in (*enrolled, *by_path))]

    @property
    def _in_loops(self) -> list[Installation]:
        loops = self._functions.loops if self.has("_functions") else None
        return [*self._installed.values(), *(() if loops is None else (loops,))]

    @property
    def _in_threads(self) -> list[Threads]:
        threads = self._functions.threads if self.has("_functions") else None
        return [*self._threaded.values(), *(() if threads is None else (threads,))]

    def healthy(self) -> bool:
        """Whether requests reach the store: a process that cannot renew its leases must not treat others as dead."""
        return all(one.breaker.closed for one in self._installations)

    def wake(self) -> None:
        """Wake the workers of this process, if any, after parcels were committed."""
        if self._service is not None:
            self._service.wake()

    @asynccontextmanager
    async def working(self) -> AsyncIterator[None]:
        """Run the workers of this process, if `workers` is set."""
        if not self._workers:
            yield
            return
        work = tasks.tasks_for(self)
        presence = tasks.presence_of(self, work)
        running = self._service = service.Service(work, presence=presence, grace=DRAIN_SECONDS, notify=self.notify)
        for installation in self._installations:
            installation.wake = self.wake
        task = asyncio.create_task(running.run(), name="oncekey-workers")
        try:
            yield
        finally:
            running.stop()
            await task

    def quiesce(self) -> None:
        """Stop PHASED handlers at their next step, so that other processes can resume them at once (P5).

        `stop` does so too, but only after the requests have ended. Call this when the process receives SIGTERM.
        """
        for installation in self._installations:
            installation.stopping = True

    async def forget(self, record_id: RecordId) -> bool:
        """Remove a stored response from all caches, in this process and shared, before an operator removes it.

        False: a cache may still return it until its `life` has passed.
        """
        engine, policies = self.asynchronous(), self.policies
        return all([await fronting.forget(one.fronts, policies, engine, record_id) for one in self._installations])

    async def drain(self) -> None:
        """Wait for operations and settlements of this process to end; PHASED handlers begin no further step."""
        for installation in self._in_loops:
            await installation.stop(DRAIN_SECONDS)

    async def stop(self) -> None:
        """End what `start` began: drain, and close the connections."""
        self._running.discard(asyncio.get_running_loop())
        await self.drain()
        for threads in self._in_threads:
            for line in threads.lines:
                await line.close()  # an operator's command may have used it
        engine = self._engines.pop(asyncio.get_running_loop(), None)
        if engine is not None:
            await engine.close()
        busy = self._threaded or any(threads.started for threads in self._in_threads)
        if self._blocking is not None and not busy:  # threads run until their process ends
            self._blocking.close()
            self._blocking = None

    def asynchronous(self) -> AsyncEngine:
        """The engine of the running event loop."""
        loop = asyncio.get_running_loop()
        engine = self._engines.get(loop)
        if engine is None:
            if not self.running:
                raise ConfigurationError(NO_LIFESPAN)
            connected = aconnect_to(self.store)
            if self.notify is not None:
                measuring.watch(connected.driver, self.notify)
            engine = self._engines[loop] = sealing(connected, self.seal)
        return engine

    @property
    def reconciles(self) -> bool:
        """Whether it has resolvers or webhooks, so that a reconciler has something to do."""
        return bool(self._webhooks or (self.has("resolvers") and self.resolvers.names))

    def policy_of(self, operation: str) -> Policy:
        """The policy of an operation; the application's policy if the operation is not enrolled."""
        enrolment = self.enrolment_of(operation)
        return self.policy if enrolment is None else enrolment.policy

    def enrolment_of(self, operation: str) -> Enrolment | None:
        """The enrolment of an operation, if there is one."""
        handler = self.enrolled.get(operation)
        return None if handler is None else handler.__oncekey__  # type: ignore[attr-defined]

    def app_of(self, operation: str) -> App | None:
        """The application that serves an operation: among several, the one with its route."""
        handler, function = self.enrolled.get(operation), self._by_operation.get(operation)
        return serving.app_of(self, handler, function, self._installed, self._threaded)

    def blocking(self) -> Engine:
        """The engine for plain `def` handlers."""
        if not has_threads(self.store):
            raise ConfigurationError(NO_THREADS)
        with self._connecting:  # the threads of a server may all be the first
            if self._blocking is None:
                self._blocking = sealing(connect_to(self.store), self.seal)
                if self.notify is not None:
                    measuring.watch_blocking(self._blocking.driver, self.notify)
            return self._blocking

    def start_blocking(self) -> None:
        """Run the checks of `start` in a process that serves WSGI."""
        engine = self.blocking()
        if self._migrate:
            engine.migrate()
        engine.check()
        startup.check_settings(self, engine, blocking=True)
        startup.warn_of_own_sessions(self)
        startup.log_protection(self)
        with self._connecting:
            if self._workers and self._aside is None:
                self._aside = service.WorkerThread(self.lifespan)

    def start_anew(self) -> None:
        """Reset a forked process: the connections, threads and locks of its parent are left untouched."""
        _inherited.append((self._blocking, self._aside))
        if self._aside is not None:
            atexit.unregister(self._aside.stop)
        self._blocking = self._aside = self._service = None
        self._connecting = Lock()
        for threads in self._in_threads:
            threads.start_anew()

    def adopt(self, app: A, installation: Installation | Threads) -> A:
        """Register an application and its installation; adapters call it (docs/howto/write-a-framework.md)."""
        if installation.in_threads and not has_threads(self.store):
            raise ConfigurationError(NO_WSGI_APP.format(called="adopt"))
        startup.check_callers(self.policy, installation)
        installation.runs_workers = self._workers
        installation.inline_calls = lambda: self.resolvers.inline_calls if self.has("resolvers") else {}
        installation.notify = self.notify
        installation.routes = lambda: startup.routes_of(app)
        for handler in self.enrolled.values():
            installation.admit(handler.__oncekey__)  # type: ignore[attr-defined]
        for enrolment in installation.patterns:
            if enrolment.owner is not self:
                raise ConfigurationError(STRANGE_ENROLMENT.format(operation=enrolment.operation))
            installation.admit(enrolment)
        among: dict[Any, Any] = self._threaded if installation.in_threads else self._installed
        among[app] = installation
        return app


_ALL: Final[WeakSet[Once]] = WeakSet()
"""Every `Once` of this process."""
_inherited: Final[list[Any]] = []
"""Connections of the parent process. Closing or collecting them here would end the parent's sessions."""


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=lambda: [*map(Once.start_anew, _ALL)])
