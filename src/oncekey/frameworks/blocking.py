"""Requests that are served in threads, each in its own from the claim to the answer: what WSGI needs that is not WSGI.

A skin reads a request (`HttpRequest`), hands the answer of the application piece by piece to
`BlockingExchange.capture`, and sends what `BlockingExchange.answer` or the capture says. A protected handler finds its
exchange by a context variable and claims when it is called, so logins, validation and error handlers stay the
framework's own.

Servers of this kind do not report when they start or stop, and may fork after everything was imported. So what has
connections, threads or locks is made with the first request of each process (`Threads.ready`), and what is still to be
written when a process ends is waited for at its exit.
"""

from __future__ import annotations

import atexit
import inspect
import io
import logging
import threading
from typing import TYPE_CHECKING, Any, Final, Protocol, Required, TypedDict, TypeVar

from oncekey.core.answers import Answer
from oncekey.core.errors import StoreError
from oncekey.core.model import UNAVAILABLE, Bypass, Claim, Code, Effects, Refuse
from oncekey.core.scope import BindTo
from oncekey.engine.actions import Flush, Life, StoppedAtHandler, Tx
from oncekey.engine.capture import Capture
from oncekey.engine.claiming import Caller, Parts, claim_of
from oncekey.engine.deciding import HandlerEnded, decided
from oncekey.engine.enrolment import SAFE, Enrolment
from oncekey.engine.operation import Operation, operation_of, unkeyed_operation
from oncekey.engine.run import Run, SettledKeys, Site
from oncekey.engine.serve import NoConnectionError, Unkeyed, end_after_bug, serve
from oncekey.engine.steps import Stepping
from oncekey.engine.sync_operation import SyncOperation
from oncekey.frameworks.consumer_page import documentation
from oncekey.frameworks.resources import answered, status_of
from oncekey.frameworks.resuming import Resumption, wsgi_door
from oncekey.frameworks.shared import ONE_OPERATION, ApplicationShared, Engines, thread_exchange
from oncekey.frameworks.threaded import called, not_awaitable, run_blocking
from oncekey.runtimes.threads import ThreadRuntime

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from oncekey.core.policy import Policy
    from oncekey.frameworks.asgi import App

    Identify = Callable[[Any], str]
T = TypeVar("T")
log = logging.getLogger("oncekey")

DRAIN_SECONDS: Final = 10.0
NOT_INSTALLED: Final = (
    "{operation} is protected by a Once that does not serve this request: call flask(app, tenant=...) or wsgi(app, "
    "tenant=...) of that Once, on the application that serves the handler"
)

TOO_LARGE: Final = Refuse(Code.BODY_TOO_LARGE)
NO_LENGTH: Final = Refuse(Code.BODY_LENGTH_MISSING)
_CUT_OFF: Final = Refuse(Code.BODY_INVALID, detail="The body is shorter than its Content-Length.")
_CHUNK: Final = 64 * 1024
_DIGITS: Final = 18

current: Final = thread_exchange
"""The request that this thread serves; a skin sets it."""


class ThreadOptions(TypedDict, total=False):
    """How an application is protected that is served in threads; `tenant` is handed what its framework has."""

    tenant: Required[Callable[[Any], str]]
    principal: Callable[[Any], str] | None
    status: str | None
    keep_headers: Sequence[str]


class WsgiOptions(ThreadOptions, total=False):
    """The same of a plain one, which may be protected by its paths."""

    enrol: Mapping[str, Enrolment] | None


class HttpRequest(Protocol):
    """A request, as its skin has read it."""

    @property
    def method(self) -> str:
        """Its method."""

    @property
    def echo(self) -> bytes | None:
        """The line of the key as the client wrote it, if it has one that counts."""

    @property
    def resumption(self) -> Resumption | None:
        """What a completer says of it, if one sent it."""

    def parts(self) -> Parts | Refuse:
        """All of it, or why the body cannot be had."""

    @property
    def shown(self) -> Any:  # noqa: ANN401  (what its framework calls a request)
        """What the `tenant` and `principal` functions are handed."""

    @property
    def token(self) -> str:
        """What it authenticates itself with."""

    @property
    def query(self) -> str:
        """Its query string."""

    @property
    def trace_id(self) -> str:
        """The trace that its `traceparent` names; empty without one."""

    def instead(self, answer: Answer, args: tuple[Any, ...]) -> Any:  # noqa: ANN401
        """What a handler returns that was not called, in its framework's own terms."""


class Threads(ApplicationShared):
    """What all requests of an application that is served in threads share; each process has a runtime of its own."""

    in_threads = True
    performs: type[ThreadRuntime] = ThreadRuntime
    """What performs the actions of its operations."""

    def __init__(
        self,
        engines: Engines,
        policy: Policy,
        *,
        tenant: Identify,
        principal: Identify | None = None,
        status_path: str | None = None,
        enrol: Mapping[str, Enrolment] | None = None,
        keep_headers: Sequence[str] = (),
        door: Callable[[Any], App] = wsgi_door,
    ) -> None:
        super().__init__(engines, policy, status_path=status_path, enrol=enrol, keep_headers=keep_headers)
        self.door = door
        """What a completer sends a request through, made of the application."""
        self._tenant = tenant
        self._principal = principal
        self.runtime: ThreadRuntime
        self.site: Site
        self._starting = threading.Lock()
        self._started = False

    @property
    def started(self) -> bool:
        """Whether this process has begun to serve."""
        return self._started

    def ready(self) -> bool:
        """Whether everything was checked in this process; a store that is down is asked again by the next request."""
        try:
            self.start()
        except StoreError as error:
            log.error("oncekey: the store could not be checked: %s", type(error).__name__)
            self.failed("start", error)
            return False
        return True

    def start(self) -> None:
        """Check everything, once in each process."""
        if not self._started:
            with self._starting:
                self._start()

    def _start(self) -> None:
        if self._started:
            return
        self.engines.start_blocking()
        engine = self.engines.blocking()
        self.runtime = self.performs(engine)
        self.site = self.site_of(engine, lambda _: engine.crowded)
        atexit.register(self.stop)
        self._started = True

    def caller_of(self, asked: HttpRequest, policy: Policy, *, named: bool = False) -> Caller:
        """Who calls, as far as keys are bound to it; `named` is whether a completer needs the principal, too."""
        bind_to, principal = policy.bind_to, None
        if self._principal is not None and (named or bind_to is BindTo.PRINCIPAL):
            principal = self._principal(asked.shown)
        return Caller(self._tenant(asked.shown), principal, asked.token if bind_to is BindTo.TOKEN else None)

    def resource(self, asked: HttpRequest, path: str) -> Answer | None:
        """What a GET of this path is answered with, if it is no path of the application's."""
        if path == self.policy.docs_url:
            return documentation(self)
        if self.status_path is None or not path.startswith(f"{self.status_path}/"):
            return None
        return self.status(asked, path.removeprefix(f"{self.status_path}/"))

    def status(self, asked: HttpRequest, key: str) -> Answer:
        """The status of one of the caller's own keys."""
        caller = self.caller_of(asked, self.policy)
        if not self.ready():
            return answered(self, UNAVAILABLE, 0.0, asked.trace_id)
        return self.runtime.drive(
            status_of(self, self.site.store, caller, key, query=asked.query, trace_id=asked.trace_id)
        )

    def stop(self, seconds: float = DRAIN_SECONDS) -> bool:
        """Begin no further step of phased handlers, and wait for what is under way; whether all of it ended."""
        self.stopping = True
        ended = not self._started or self.runtime.shut_down(seconds)
        for line in self.lines:
            line.close_blocking()
        return ended

    def start_anew(self) -> None:
        """Begin as if nothing had been started: connections, threads and locks are those of a parent process."""
        if self._started:
            atexit.unregister(self.stop)
        self._started, self._starting = False, threading.Lock()
        self._settled_keys = SettledKeys()
        if "limits" in vars(self):
            self.limits = self.limits.anew()
        if "fronts" in vars(self):
            self.fronts = self.fronts.anew()


class BlockingExchange:
    """One request, with a key or without."""

    def __init__(self, threads: Threads, asked: HttpRequest) -> None:
        self.threads = threads
        self.asked = asked
        self.echo = asked.echo
        self.trace_id = asked.trace_id
        self.ended = HandlerEnded()
        self.run: Run | None = None
        self.capture: Capture | None = None
        """What the application answers, from the claim on."""
        self.answer: Answer | None = None
        """What is sent instead."""
        self._called = False
        self._life: Life[Answer | Bypass | None] | None = None
        self._root_path = ""

    @property
    def status_url(self) -> str | None:
        """Where the key's state can be read."""
        claim = None if self.run is None else self.run.claim
        return None if claim is None else self.threads.status_url(self._root_path, claim.id.key, claim.operation)

    # What a handler meets.

    def enter(self, enrolment: Enrolment) -> None:
        """Claim before the application runs: where it starts to execute cannot be seen, so it has from here on."""
        self._called = True
        if self.echo is not None:
            self._claim(enrolment)
            self.ended.entered = True
        else:
            self.answer = self.threads.without_key(enrolment, self.trace_id)

    def call(
        self,
        handler: Callable[..., Any],
        enrolment: Enrolment,
        name: str | None,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:  # noqa: ANN401  (what its framework takes for an answer)
        """Call a protected handler, if it is to be called."""
        if enrolment.owner is not self.threads.engines:
            raise RuntimeError(NOT_INSTALLED.format(operation=enrolment.operation))
        if self._called:
            raise RuntimeError(ONE_OPERATION)
        self._called = True

        def invoke(op: object) -> Any:  # noqa: ANN401
            given = kwargs if name is None else {**kwargs, name: op}
            return handler(*args, **given)

        safe = self.asked.method in SAFE
        if safe or self.echo is None:
            refusal = None if safe else self.threads.without_key(enrolment, self.trace_id)
            if refusal is not None:
                return self.asked.instead(refusal, args)
            return self._unkeyed(invoke, enrolment, None, args)
        self._claim(enrolment)
        if self.answer is not None:
            # Inner logs and metrics see the true status; the bytes are ours.
            return self.asked.instead(Answer(self.answer.status, (), b""), args)
        assert self.run is not None
        if self.capture is None:
            return self._unkeyed(invoke, enrolment, self.run.claim, args)
        return self._run(invoke, self.run)

    def _run(self, invoke: Callable[[object], Any], run: Run) -> Any:  # noqa: ANN401
        stepping = None
        try:
            if run.phased_run is not None:
                run.phased_run.check()
                stepping = Stepping(self.threads.runtime.drive, run.store, run.phased_run, run.parcels)
            result = called(invoke, self._operation(run, stepping), self.ended, run.enrolment)
            if run.tx is not None and not self.ended.rolled_back:
                self.threads.runtime.perform(Flush(run.tx))  # while error handlers can still answer
        except BaseException as error:
            self.ended.error = error
            raise
        return result

    @staticmethod
    def _operation(run: Run, stepping: Stepping | None) -> SyncOperation[Any] | Operation[Any]:
        """What the handler is handed; an `async def` one, which its framework runs to its end, expects another type."""
        if run.enrolment.blocking:
            return operation_of(SyncOperation, run, stepping)
        return operation_of(Operation, run, stepping)

    def _unkeyed(
        self, invoke: Callable[[object], Any], enrolment: Enrolment, claim: Claim | None, args: tuple[Any, ...]
    ) -> Any:  # noqa: ANN401
        if enrolment.effects is not Effects.LOCAL:
            return not_awaitable(invoke(unkeyed_operation(SyncOperation, claim, None)), enrolment)
        try:
            if self.threads.ready():
                return run_blocking(invoke, enrolment, self.without_record(claim), self.threads.runtime)
        except NoConnectionError as error:
            self.threads.failed("begin", error.why)
        return self.asked.instead(self.threads.turn_away(UNAVAILABLE, enrolment, trace_id=self.trace_id), args)

    def without_record(self, claim: Claim | None) -> Unkeyed:
        """The run of a LOCAL handler that has no record; a skin may have its transaction open already."""
        return Unkeyed(self.threads.site, claim)

    def transaction_for(self, enrolment: Enrolment) -> Tx:  # noqa: ARG002  (for skins)
        """The transaction that a skin has opened for the handler before its claim; None: it is begun with the claim."""
        return None

    # The life of its operation: a flow of the engine, performed in this thread.

    def _claim(self, enrolment: Enrolment) -> None:
        """Ask for the right to execute. Then there is an answer of ours, or a capture, or the route fails open."""
        threads, policy, resumption = self.threads, enrolment.policy, self.asked.resumption
        parts = self.asked.parts()
        claim: Claim | Refuse = parts if isinstance(parts, Refuse) else self._claim_of(parts, enrolment)
        if isinstance(parts, Refuse) or isinstance(claim, Refuse) or not threads.ready():
            refused = claim if isinstance(claim, Refuse) else UNAVAILABLE
            self.answer = threads.turn_away(refused, enrolment, trace_id=self.trace_id, echo=self.echo)
            return
        self._root_path = parts.root_path
        site, limits = threads.site, None
        if resumption is None and enrolment.limited:
            limits = threads.limits.of(site.store, tuple(parts.headers), claim, policy)
        tx, resumed = self.transaction_for(enrolment), resumption is not None
        self.run = run = Run(site, claim, enrolment, self, resumed=resumed, limits=limits, tx=tx)
        self._life = serve(run)
        result = threads.runtime.run(self._life)
        if isinstance(result, StoppedAtHandler):
            self.capture = Capture(policy)
        elif isinstance(result, Answer):
            self.answer = result

    def _claim_of(self, parts: Parts, enrolment: Enrolment) -> Claim | Refuse:
        resumption = self.asked.resumption
        if resumption is not None:
            return resumption.claim(enrolment.policy)
        caller = self.threads.caller_of(self.asked, enrolment.policy, named=enrolment.completes)
        assert self.echo is not None
        return claim_of([self.echo], parts, enrolment, caller, keep_headers=self.threads.kept_headers)

    @property
    def unsettled(self) -> bool:
        """Whether it was claimed, and has no outcome yet."""
        return self._life is not None and inspect.getgeneratorstate(self._life) == inspect.GEN_SUSPENDED

    def finish(self, error: BaseException | None) -> None:
        """Settle; `error` is what came out of the application. Afterwards `answer` is ours to send, if there is one."""
        run, life, capture = self.run, self._life, self.capture
        assert run is not None
        assert life is not None
        assert capture is not None
        raised = self.ended.error or error
        self.ended.cancelled = raised is not None and not isinstance(raised, Exception)
        decision, ours = decided(run, self.ended, capture, error)
        settled = self.threads.runtime.run(life, decision)
        self.answer = settled if isinstance(settled, Answer) else ours

    def close(self) -> None:
        """Whatever happened: no transaction and no heartbeat stays behind."""
        if self._life is not None and self.run is not None and self.unsettled:
            self.threads.runtime.instead(self._life, end_after_bug(self.run, self._life, entered=self.ended.entered))


# What a skin reads.


class Stream(Protocol):
    """A body that is still to come."""

    def read(self, size: int, /) -> bytes:
        """So many bytes or fewer; none at its end."""


def length_of(text: str) -> int | None:
    """What a `Content-Length` says; None: it says nothing."""
    if not text.isascii() or not text.isdigit():
        return None
    # A number of thousands of digits is too large for every limit, and nothing that int() would take.
    return int(text) if len(text) <= _DIGITS else 10**_DIGITS


def read_up_to(limit: int, stream: Stream, size: int | None) -> tuple[bytes | Refuse, Any]:
    """A body, or why it cannot be had, and what the application reads instead of `stream`, as if anew.

    Never beyond its `size`, where some servers would wait for ever. What is too large is left to the unprotected.
    """
    if size is not None and size > limit:
        return TOO_LARGE, stream
    body, wanted = bytearray(), limit + 1 if size is None else size
    while len(body) < wanted and (chunk := stream.read(min(wanted - len(body), _CHUNK))):
        body += chunk
    again = io.BytesIO(body)
    if len(body) > limit:
        return TOO_LARGE, io.BufferedReader(_Both(again, stream))
    return bytes(body) if size is None or len(body) == size else _CUT_OFF, again


class _Both(io.RawIOBase):
    """What was read already, and then the rest."""

    def __init__(self, *streams: Stream) -> None:
        self._streams = streams

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any, /) -> int:  # noqa: ANN401  (a buffer of any kind)
        chunk = next(filter(None, (stream.read(len(buffer)) for stream in self._streams)), b"")
        buffer[: len(chunk)] = chunk
        return len(chunk)
