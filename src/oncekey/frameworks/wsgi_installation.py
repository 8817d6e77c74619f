"""What one WSGI application was installed with, and what its threads share.

A WSGI server tells nobody when it starts or stops. So everything is checked with the first request of each process, and
what is still to be written when a process ends is waited for by `stop`, which runs at its exit.
"""

from __future__ import annotations

import atexit
import os
import threading
import time
from typing import TYPE_CHECKING, Any, Final, Protocol

from oncekey.boottime import boottime
from oncekey.core.errors import ConfigurationError
from oncekey.engine.breaker import Breaker
from oncekey.engine.enrolment import Patterns
from oncekey.engine.recent import Hints
from oncekey.engine.run import Site
from oncekey.frameworks.asgi.limits import Limits
from oncekey.frameworks.wsgi import OncekeyWsgi
from oncekey.runtimes.threads import ThreadRuntime

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from wsgiref.types import WSGIApplication, WSGIEnvironment

    from oncekey.core.model import RecordId
    from oncekey.core.policy import Policy
    from oncekey.engine.enrolment import Enrolment
    from oncekey.engine.shell import Engine
    from oncekey.observe.events import Tell

DRAIN_SECONDS: Final = 10.0
NO_RATE: Final = (
    "{operation}: max_new_keys_per_second is counted in an event loop, which WSGI has not; limit it before oncekey, or "
    "by max_live_keys"
)


class Threads(Protocol):
    """What is asked of a `Once` here."""

    def blocking(self) -> Engine:
        """The engine for threads."""

    def start_blocking(self) -> None:
        """The checks before the first request."""


class WsgiInstallation:
    """Shared by all exchanges of an application."""

    def __init__(
        self,
        engines: Threads,
        policy: Policy,
        *,
        tenant: Callable[[WSGIEnvironment], str],
        principal: Callable[[WSGIEnvironment], str] | None = None,
        enrol: Mapping[str, Enrolment] | None = None,
    ) -> None:
        self.engines = engines
        self.policy = policy
        self.tenant = tenant
        self.patterns = Patterns(enrol or {})
        self.breaker = Breaker()
        self.limits = Limits()
        self.stopping = False
        self.wake: Callable[[], None] = _nobody
        """Tells the workers of this process, if it has such, that parcels were committed."""
        self.inline_calls: Callable[[], Mapping[str, str]] = dict
        """By operation, the call of INLINE handlers whose provider is asked or reports by webhook."""
        self.tell: Tell | None = None
        """Tells those who observe."""
        self.max_request_bytes = policy.max_request_bytes
        self.runtime: ThreadRuntime
        self.site: Site
        self._principal = principal
        self._starting = threading.Lock()
        self._pid: int | None = None

    def admit(self, enrolment: Enrolment) -> None:
        """Make room for an enrolment whose own settings are wider than the installation's."""
        if enrolment.policy.max_new_keys_per_second is not None:
            raise ConfigurationError(NO_RATE.format(operation=enrolment.operation))
        self.max_request_bytes = max(self.max_request_bytes, enrolment.policy.max_request_bytes)

    def principal(self, environ: WSGIEnvironment) -> str | None:
        """Who in the tenant, where keys are bound to principals."""
        return None if self._principal is None else self._principal(environ)

    def start(self) -> None:
        """Check everything, once in each process: what a server forks later has connections of its own."""
        pid = os.getpid()
        if self._pid == pid:
            return
        with self._starting:
            if self._pid == pid:
                return
            self.engines.start_blocking()
            engine = self.engines.blocking()
            self.runtime = ThreadRuntime(engine)
            self.site = Site(
                engine.store,
                self.breaker,
                clock=time.monotonic,
                boot=boottime,
                stopping=lambda: self.stopping,
                crowded=lambda _: engine.crowded,
                wake=lambda: self.wake(),  # noqa: PLW0108  (whoever is told later replaces it)
                inline_calls=lambda: self.inline_calls(),  # noqa: PLW0108
                hints=SharedHints(),
                tell=self.tell,
            )
            if self._pid is None:
                atexit.register(self.stop)
            self._pid = pid

    def stop(self, seconds: float = DRAIN_SECONDS) -> bool:
        """Begin no further step of phased handlers, and wait for what is under way; whether all of it ended."""
        self.stopping = True
        return self._pid != os.getpid() or self.runtime.drain(seconds)


def installed(app: WSGIApplication, installation: WsgiInstallation) -> WSGIApplication:
    """The application in its middleware. Flask's goes into the application, where its own test client meets it, too."""
    inner = getattr(app, "wsgi_app", None)
    if inner is None:
        return OncekeyWsgi(app, installation)
    flask: Any = app
    flask.wsgi_app = OncekeyWsgi(inner, installation)
    ensure_sync = flask.ensure_sync

    def as_it_is(view: Any) -> Any:  # noqa: ANN401  (a view, or any other function of the application)
        # ASGI frameworks await a protected `def`; here it returns its result, and needs no event loop.
        enrolment: Enrolment | None = getattr(view, "__oncekey__", None)
        return view if enrolment is not None and enrolment.blocking else ensure_sync(view)

    flask.ensure_sync = as_it_is
    return app


class SharedHints(Hints):
    """Hints that several threads add to."""

    __slots__ = ("_adding",)

    def __init__(self) -> None:
        super().__init__()
        self._adding = threading.Lock()

    def add(self, record_id: RecordId) -> None:
        """Its answer is stored."""
        with self._adding:
            super().add(record_id)


def _nobody() -> None:
    """There are no workers."""
