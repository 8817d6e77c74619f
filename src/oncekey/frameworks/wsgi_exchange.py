"""One request of a WSGI application as its protected handler meets it: claimed when it is called, settled at its end.

The life of its operation is a flow of the engine (`engine/serve.py`), performed in the thread of the request.
"""

from __future__ import annotations

import inspect
import logging
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, Final

from oncekey.core.answers import Answer
from oncekey.core.errors import StoreError
from oncekey.core.model import UNAVAILABLE, Code, Effects, Refuse
from oncekey.engine.answering import refusal
from oncekey.engine.capture import Capture
from oncekey.engine.claiming import Caller, claim_of
from oncekey.engine.deciding import Ended, decided
from oncekey.engine.effects import Rests
from oncekey.engine.enrolment import SAFE
from oncekey.engine.operation import SyncOperation, operation_of
from oncekey.engine.run import Run
from oncekey.engine.serve import Unkeyed, abandon, serve
from oncekey.engine.steps import Stepping
from oncekey.frameworks.asgi.threads import not_awaitable
from oncekey.frameworks.asgi.unkeyed import NoConnectionError, run_blocking, unkeyed_operation
from oncekey.frameworks.wsgi_messages import lines_of, parts_of, read_ahead, told

if TYPE_CHECKING:
    from collections.abc import Callable
    from wsgiref.types import WSGIEnvironment

    from oncekey.core.model import Bypass, Claim
    from oncekey.engine.effects import Life
    from oncekey.engine.enrolment import Enrolment
    from oncekey.frameworks.wsgi_installation import WsgiInstallation

log = logging.getLogger("oncekey")

KEY: Final = "HTTP_IDEMPOTENCY_KEY"
NOT_INSTALLED: Final = "{operation} is protected by a Once whose wsgi(app, tenant=...) does not serve this request"
ONE_OPERATION: Final = "a protected handler was called by another one: one request is one operation"

current: ContextVar[Exchange | None] = ContextVar("oncekey_wsgi", default=None)
"""The request that this thread serves."""


class Exchange:
    """One request, with a key or without."""

    def __init__(self, installation: WsgiInstallation, environ: WSGIEnvironment, *, keyed: bool) -> None:
        self.installation = installation
        self.environ = environ
        self.ended = Ended()
        self.run: Run | None = None
        self.capture: Capture | None = None
        """What the application answers, from the claim on."""
        self.answer: Answer | None = None
        """What is sent instead."""
        self.echo: bytes | None = environ[KEY].encode("latin-1") if keyed else None
        self.status_url: str | None = None
        self._called = False
        self._flow: Life[Answer | Bypass | None] | None = None
        self._body: bytes | Refuse = b""
        if self.echo is not None:
            # Before the application, which may have read it when its handler is called.
            self._body = read_ahead(environ, installation.max_request_bytes)

    # What a handler meets.

    def enter(self, enrolment: Enrolment) -> None:
        """Claim before the application runs: where it starts to execute cannot be seen, so it has from here on."""
        self._called = True
        if self.echo is not None:
            self._claim(enrolment)
            self.ended.entered = True
        elif enrolment.policy.require_key:
            self.answer = refusal(Refuse(Code.KEY_MISSING), enrolment.policy)

    def call(
        self,
        handler: Callable[..., Any],
        enrolment: Enrolment,
        name: str | None,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:  # noqa: ANN401  (what its framework takes for an answer)
        """Call a protected handler, if it is to be called."""
        if enrolment.owner is not self.installation.engines:
            raise RuntimeError(NOT_INSTALLED.format(operation=enrolment.operation))
        if self._called:
            raise RuntimeError(ONE_OPERATION)
        self._called = True

        def invoke(op: object) -> Any:  # noqa: ANN401
            given = kwargs if name is None else {**kwargs, name: op}
            return handler(*args, **given)

        safe = self.environ["REQUEST_METHOD"] in SAFE
        if safe or self.echo is None:
            if not safe and enrolment.policy.require_key:
                return told(refusal(Refuse(Code.KEY_MISSING), enrolment.policy), args)
            return self._unkeyed(invoke, enrolment, None, args)
        run = self._claim(enrolment)
        if run is None or self.answer is not None:
            assert self.answer is not None
            # Inner logs and metrics see the true status; the bytes are ours.
            return told(Answer(self.answer.status, (), b""), args)
        if self.capture is None:
            return self._unkeyed(invoke, enrolment, run.claim, args)
        return self._run(invoke, run)

    def _run(self, invoke: Callable[[object], Any], run: Run) -> Any:  # noqa: ANN401
        ended, stepping = self.ended, None
        try:
            if run.course is not None:
                run.course.check()
                stepping = Stepping(self.installation.runtime.drive, run.store, run.course, run.parcels)
            op = operation_of(SyncOperation, run, stepping)
            ended.entered = True
            try:
                return not_awaitable(invoke(op), run.enrolment)
            finally:
                ended.kept, ended.rolled_back = op.kept, op.rolled_back
        except BaseException as error:
            ended.error = error
            raise

    def _unkeyed(
        self, invoke: Callable[[object], Any], enrolment: Enrolment, claim: Claim | None, args: tuple[Any, ...]
    ) -> Any:  # noqa: ANN401
        if enrolment.effects is not Effects.LOCAL:
            return not_awaitable(invoke(unkeyed_operation(SyncOperation, claim, None)), enrolment)
        try:
            if self._ready():
                run = Unkeyed(self.installation.site, claim)
                return run_blocking(invoke, enrolment, run, self.installation.runtime)
        except NoConnectionError:
            pass
        return told(refusal(UNAVAILABLE, enrolment.policy), args)

    def _ready(self) -> bool:
        """Whether everything was checked in this process; a store that is down is asked again by the next request."""
        try:
            self.installation.start()
        except StoreError as error:
            log.error("oncekey: the store could not be checked: %s", type(error).__name__)
            return False
        return True

    # The life of its operation.

    def _claim(self, enrolment: Enrolment) -> Run | None:
        """Ask for the right to execute. Then there is an answer of ours, or a capture, or the route fails open."""
        installation, policy = self.installation, enrolment.policy
        claim = self._body if isinstance(self._body, Refuse) else self._asked(self._body, enrolment)
        if not isinstance(claim, Refuse) and not self._ready():
            claim = UNAVAILABLE
        if isinstance(claim, Refuse):
            self.answer = refusal(claim, policy, echo=self.echo)
            return None
        limits = installation.limits.of(installation.site.store, {"headers": lines_of(self.environ)}, claim, policy)
        self.run = run = Run(installation.site, claim, enrolment, self, limits=limits)
        self._flow = serve(run)
        came_of_it = installation.runtime.run(self._flow)
        if isinstance(came_of_it, Rests):
            self.capture = Capture(policy)
        elif isinstance(came_of_it, Answer):
            self.answer = came_of_it
        return run

    def _asked(self, body: bytes, enrolment: Enrolment) -> Claim | Refuse:
        environ, installation = self.environ, self.installation
        tenant, principal = installation.tenant(environ), installation.principal(environ)
        caller = Caller(tenant, principal, environ.get("HTTP_AUTHORIZATION"))
        assert self.echo is not None
        return claim_of([self.echo], parts_of(environ, body), enrolment, caller)

    @property
    def unsettled(self) -> bool:
        """Whether it was claimed, and nobody has said what came of it."""
        return self._flow is not None and inspect.getgeneratorstate(self._flow) == inspect.GEN_SUSPENDED

    def finish(self, error: BaseException | None) -> None:
        """Settle; `error` is what came out of the application. Afterwards `answer` is ours to send, if there is one."""
        run, flow, capture = self.run, self._flow, self.capture
        assert run is not None
        assert flow is not None
        assert capture is not None
        raised = self.ended.error or error
        self.ended.cancelled = raised is not None and not isinstance(raised, Exception)
        decision, ours = decided(run, self.ended, capture, error)
        said = self.installation.runtime.run(flow, decision)
        self.answer = said if isinstance(said, Answer) else ours

    def close(self) -> None:
        """Whatever happened: no transaction and no heartbeat stays behind."""
        if self._flow is not None and self.run is not None and self.unsettled:
            life = abandon(self.run, self._flow, entered=self.ended.entered)
            self.installation.runtime.instead(self._flow, life)
