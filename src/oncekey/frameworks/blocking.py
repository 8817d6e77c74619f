"""The blocking request lifecycle: each request has its own thread from the claim to the response. WSGI builds on it.

An adapter reads a request (`HttpRequest`), passes the application's response piece by piece to
`BlockingExchange.capture`, and sends `BlockingExchange.answer` or the captured response. A protected handler finds its
exchange in a context variable and claims when it is called, so logins, validation and error handlers are the
framework's own.

WSGI servers do not report when they start or stop, and may fork after all imports. So connections, threads and locks
are created with the first request of each process (`Threads.ready`), and pending writes are awaited when a process
exits.
"""

from __future__ import annotations

import atexit
import inspect
import io
import logging
import threading
from typing import TYPE_CHECKING, Any, Final, Protocol, Required, TypedDict, TypeVar

from oncekey.core.answers import Answer
from oncekey.core.errors import SchemaError, StoreError
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
    "tenant=...) of that Once on the application that serves the handler"
)

TOO_LARGE: Final = Refuse(Code.BODY_TOO_LARGE)
NO_LENGTH: Final = Refuse(Code.BODY_LENGTH_MISSING)
_CUT_OFF: Final = Refuse(Code.BODY_INVALID, detail="The body is shorter than its Content-Length.")
_CHUNK: Final = 64 * 1024
_DIGITS: Final = 18

current: Final = thread_exchange
"""The request that this thread serves; set by the adapter."""


class ThreadOptions(TypedDict, total=False):
    """How to protect an application that is served in threads; `tenant` takes the framework's request."""

    tenant: Required[Callable[[Any], str]]
    principal: Callable[[Any], str] | None
    status: str | None
    keep_headers: Sequence[str]


class WsgiOptions(ThreadOptions, total=False):
    """How to protect a plain WSGI application, whose handlers can also be protected by path."""

    enrol: Mapping[str, Enrolment] | None


class HttpRequest(Protocol):
    """A request, as its adapter has read it."""

    @property
    def method(self) -> str:
        """Its method."""

    @property
    def echo(self) -> bytes | None:
        """The key header as the client sent it, if the request may have a key."""

    @property
    def resumption(self) -> Resumption | None:
        """The completer's note, if a completer sent the request."""

    def parts(self) -> Parts | Refuse:
        """The parts of the request, or a refusal."""

    @property
    def shown(self) -> Any:  # noqa: ANN401  (what its framework calls a request)
        """The argument of the `tenant` and `principal` functions."""

    @property
    def token(self) -> str:
        """The credentials of the request."""

    @property
    def query(self) -> str:
        """Its query string."""

    @property
    def trace_id(self) -> str:
        """The trace id of its `traceparent`; empty without one."""

    def instead(self, answer: Answer, args: tuple[Any, ...]) -> Any:  # noqa: ANN401
        """The return value of a handler that was not called, in its framework's own type."""


class Threads(ApplicationShared):
    """State shared by all requests of an application that is served in threads; each process has its own runtime."""

    in_threads = True
    performs: type[ThreadRuntime] = ThreadRuntime
    """Performs the actions of its operations."""

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
        super().__init__(
            engines,
            policy,
            tenant=tenant,
            principal=principal,
            status_path=status_path,
            enrol=enrol,
            keep_headers=keep_headers,
        )
        self.door = door
        """Creates the function through which a completer sends a request to the application."""
        self._tenant = tenant
        self._principal = principal
        self.runtime: ThreadRuntime
        self.site: Site
        self._starting = threading.Lock()
        self._started = False
        self._waking = threading.Lock()

    @property
    def started(self) -> bool:
        """Whether this process has started to serve."""
        return self._started

    def ready(self) -> bool:
        """Whether everything was checked in this process; a store that is down is checked again by the next request."""
        try:
            self.start()
        except StoreError as error:
            reason = error if isinstance(error, SchemaError) else error.reason
            log.error("oncekey: the store could not be checked: %s", reason)
            self.failed("start", error)
            return False
        return True

    def begin(self, start: Callable[[], object]) -> None:
        """Called for a request without a key: starts the workers of this process, and does not wait for the store."""
        if self.runs_workers and not self._started and self._waking.acquire(blocking=False):
            threading.Thread(target=self._begin, args=(start, self._waking), name="oncekey-start", daemon=True).start()

    @staticmethod
    def _begin(start: Callable[[], object], waking: threading.Lock) -> None:
        try:
            start()
        except Exception as error:  # noqa: BLE001  (no caller would see it: logged here)
            log.error("oncekey: the workers of this process did not start: %s", error)
        finally:
            waking.release()  # the next request tries again

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
        self.site = self.site_of(engine, lambda _: engine.is_full)
        atexit.register(self.stop)
        self._started = True

    def caller_of(self, asked: HttpRequest, policy: Policy, *, named: bool = False) -> Caller:
        """The caller, as far as keys are bound to it; `named`: whether a completer also needs the principal."""
        bind_to, principal = policy.bind_to, None
        if named or bind_to is BindTo.PRINCIPAL:
            principal = self.principal_of(asked)
        return Caller(self.tenant_of(asked), principal, asked.token if bind_to is BindTo.TOKEN else None)

    def tenant_of(self, asked: HttpRequest) -> str:
        """The tenant, as the application's function identifies it."""
        return self._tenant(asked.shown)

    def principal_of(self, asked: HttpRequest) -> str | None:
        """The user within the tenant; None if the application does not name users."""
        return None if self._principal is None else self._principal(asked.shown)

    def resource(self, asked: HttpRequest, path: str) -> Answer | None:
        """The response to a GET of one of oncekey's own paths; None for other paths."""
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
        """Start no further step of phased handlers, and wait for running ones; returns whether all of them ended."""
        self.stopping = True
        ended = not self._started or self.runtime.shut_down(seconds)
        for line in self.lines:
            line.close_blocking()
        return ended

    def start_anew(self) -> None:
        """Reset after a fork: connections, threads and locks belong to the parent process."""
        if self._started:
            atexit.unregister(self.stop)
        self._started, self._starting, self._waking = False, threading.Lock(), threading.Lock()
        self._settled_keys = SettledKeys()
        if "limits" in vars(self):
            self.limits = self.limits.anew()
        if "fronts" in vars(self):
            self.fronts = self.fronts.anew()


class BlockingExchange:
    """One request, with or without a key."""

    def __init__(self, threads: Threads, asked: HttpRequest) -> None:
        self.threads = threads
        self.asked = asked
        self.echo = asked.echo
        self.trace_id = asked.trace_id
        self.ended = HandlerEnded()
        self.run: Run | None = None
        self.capture: Capture | None = None
        """The response of the application, from the claim on."""
        self.answer: Answer | None = None
        """The response that replaces it."""
        self._called = False
        self._life: Life[Answer | Bypass | None] | None = None
        self._root_path = ""

    @property
    def status_url(self) -> str | None:
        """The URL of the key's status."""
        claim = None if self.run is None else self.run.claim
        return None if claim is None else self.threads.status_url(self._root_path, claim.id.key, claim.operation)

    # Called by the handler.

    def enter(self, enrolment: Enrolment) -> None:
        """Claim before the application runs: the handler's start is not visible, so it counts as called from now on."""
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
    ) -> Any:  # noqa: ANN401  (a response of its framework)
        """Call a protected handler, unless a stored response or a refusal replaces it."""
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
            # Inner logs and metrics see the true status; the bytes are oncekey's.
            return self.asked.instead(Answer(self.answer.status, (), b""), args)
        assert self.run is not None
        if self.capture is None:
            return self._unkeyed(invoke, enrolment, self.run.claim, args)
        return self._run(invoke, self.run)

    def lost_before(self, error: BaseException) -> Answer | None:
        """The response to a lost connection of the store, unless a protected handler was called or there is no key."""
        if self.echo is None or self._called or self.asked.method in SAFE:
            return None
        log.error("oncekey: a connection to the store was lost before the handler: %s", type(error).__name__)
        return self.threads.turn_away(UNAVAILABLE, None, trace_id=self.trace_id, echo=self.echo)

    def _run(self, invoke: Callable[[object], Any], run: Run) -> Any:  # noqa: ANN401
        stepping = None
        try:
            if run.phased_run is not None:
                run.phased_run.check()
                stepping = Stepping(self.threads.runtime.drive, run.store, run.phased_run, run.parcels)
            result = called(invoke, self._operation(run, stepping), self.ended, run.enrolment)
            if run.tx is not None and not self.ended.rolled_back:
                self.threads.runtime.perform(Flush(run.tx))  # while error handlers can still respond
        except BaseException as error:
            self.ended.error = error
            raise
        return result

    @staticmethod
    def _operation(run: Run, stepping: Stepping | None) -> SyncOperation[Any] | Operation[Any]:
        """The handler's operation; an `async def` handler, which its framework runs to its end, needs another type."""
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
        """The run of a LOCAL handler without a record; an adapter may have opened its transaction already."""
        return Unkeyed(self.threads.site, claim)

    def transaction_for(self, enrolment: Enrolment) -> Tx:  # noqa: ARG002  (for skins)
        """The transaction that an adapter has opened before the claim; None: it is begun with the claim."""
        return None

    # The lifecycle of the operation: a flow of the engine, performed in this thread.

    def _claim(self, enrolment: Enrolment) -> None:
        """Claim. The result is a response of oncekey's, or a capture, or the route fails open."""
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
        named = resumption is not None or enrolment.completes
        caller = self.threads.caller_of(self.asked, enrolment.policy, named=named)
        if resumption is not None:
            resumption.check(caller, names_principals=self.threads.names_principals)
            return resumption.claim(enrolment.policy)
        assert self.echo is not None
        return claim_of([self.echo], parts, enrolment, caller, keep_headers=self.threads.kept_headers)

    @property
    def unsettled(self) -> bool:
        """Whether it is claimed and not yet settled."""
        return self._life is not None and inspect.getgeneratorstate(self._life) == inspect.GEN_SUSPENDED

    def finish(self, error: BaseException | None) -> None:
        """Settle; `error` is the application's exception. Afterwards `answer` is oncekey's response, if any."""
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
        """End the transaction and the heartbeat, however the request ended."""
        if self._life is not None and self.run is not None and self.unsettled:
            self.threads.runtime.instead(self._life, end_after_bug(self.run, self._life, entered=self.ended.entered))


# Reading requests.


class Stream(Protocol):
    """A body that is yet to be read."""

    def read(self, size: int, /) -> bytes:
        """Up to that many bytes; none at its end."""


def length_of(text: str) -> int | None:
    """The value of `Content-Length`; None if it is absent."""
    if not text.isascii() or not text.isdigit():
        return None
    # A number of thousands of digits exceeds every limit, and int() would reject it.
    return int(text) if len(text) <= _DIGITS else 10**_DIGITS


def read_up_to(limit: int, stream: Stream, size: int | None) -> tuple[bytes | Refuse, Any]:
    """A body, or a refusal; and a stream from which the application reads the same body in place of `stream`.

    Reads never go beyond `size`, where some servers would block forever. A body that is too large is left to
    unprotected handlers.
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
    """The bytes that were read, and then the rest."""

    def __init__(self, *streams: Stream) -> None:
        self._streams = streams

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any, /) -> int:  # noqa: ANN401  (a buffer of any kind)
        chunk = next(filter(None, (stream.read(len(buffer)) for stream in self._streams)), b"")
        buffer[: len(chunk)] = chunk
        return len(chunk)
