"""Adapts Django's requests and responses to the blocking request lifecycle.

A `def` view is called in the thread of its request, under WSGI and ASGI alike. An `async def` view stays in its event
loop, and every database operation runs in the one thread that Django keeps for the request, which its models use too:
so the view's writes are in the transaction of its key.
"""

from __future__ import annotations

import asyncio
import inspect
from functools import partial
from typing import TYPE_CHECKING, Any, Final, TypeVar

from asgiref.sync import async_to_sync, iscoroutinefunction, sync_to_async
from django.db import InterfaceError, OperationalError, connections
from django.http import HttpResponse

from oncekey.core.answers import Answer, marked_lines
from oncekey.core.errors import ConfigurationError, StoreError
from oncekey.core.headers import trace_id_of
from oncekey.core.model import UNAVAILABLE, Claim, Effects, Refuse
from oncekey.django.database import NESTED, Database, DjangoTransaction
from oncekey.engine.actions import Action, Call, Interrupted, Life, Sleep, Tx
from oncekey.engine.claiming import Parts
from oncekey.engine.deciding import rows_of
from oncekey.engine.enrolment import SAFE, Enrolment
from oncekey.engine.operation import Operation, operation_of, unkeyed_operation
from oncekey.engine.serve import NoConnectionError, Unkeyed, serve_unkeyed
from oncekey.engine.steps import Stepping
from oncekey.frameworks import blocking
from oncekey.frameworks.resuming import Resumption
from oncekey.frameworks.shared import ONE_OPERATION, RESUMPTION
from oncekey.frameworks.wsgi import KEY, lines_of
from oncekey.runtimes.threads import ThreadRuntime

if TYPE_CHECKING:
    from collections.abc import Callable


T = TypeVar("T")

_SERVER_ERRORS: Final = 500
OTHER_ONCE: Final = "{operation} is protected by a different Once than the one in settings.ONCEKEY"
READ_BEFORE: Final = (
    "a middleware before oncekey's has consumed the body of the request: let it read request.body, or not read the body"
)


class BufferedRequest:
    """A request whose body is read before the view and can be read again by its form or parser."""

    def __init__(self, request: Any, limit: int | None = None) -> None:  # noqa: ANN401  (Django has no types)
        meta = request.META
        self.shown = request
        self.method: str = request.method
        self.echo: bytes | None = None if limit is None else meta[KEY].encode("latin-1", "replace")
        self.token: str = meta.get("HTTP_AUTHORIZATION", "")
        self.query: str = meta.get("QUERY_STRING", "")
        self.trace_id = trace_id_of(meta.get("HTTP_TRACEPARENT"))
        source = getattr(request, "environ", None) or getattr(request, "scope", {})
        self.resumption: Resumption | None = source.get(RESUMPTION)
        if self.resumption is not None:
            # A worker has no CSRF token, and no browser sent its request. Django's test client sets this, too.
            request._dont_enforce_csrf_checks = True  # noqa: SLF001
        self._request = request
        self._body = b"" if limit is None else read_body(request, limit)

    def parts(self) -> Parts | Refuse:
        """The parts of the request, or a refusal."""
        request, body = self._request, self._body
        if body is None:
            raise ConfigurationError(READ_BEFORE)
        if isinstance(body, Refuse):
            return body
        return Parts(
            method=self.method,
            path=request.path,
            query=request.META.get("QUERY_STRING", "").encode("latin-1", "replace"),
            headers=lines_of(request.META),
            content_type=request.META.get("CONTENT_TYPE", "").encode("latin-1", "replace") or None,
            body=body,
            root_path=request.path.removesuffix(request.path_info),
        )

    @staticmethod
    def instead(answer: Answer, _: tuple[Any, ...]) -> Any:  # noqa: ANN401
        """The response of a view that was not called."""
        return made(answer)


def read_body(request: Any, limit: int) -> bytes | Refuse | None:  # noqa: ANN401
    """The body, or a refusal; None if earlier middleware consumed it."""
    body: bytes | Refuse | None = bytes(request._body) if hasattr(request, "_body") else None  # noqa: SLF001  (the cache of `request.body`)
    size = blocking.length_of(request.META.get("CONTENT_LENGTH") or "")
    if size is None and not body and "wsgi.input" in request.META:
        # Django reads such a body as empty, so all such requests would have the same fingerprint.
        return blocking.NO_LENGTH if "HTTP_TRANSFER_ENCODING" in request.META else b""
    if body is None:
        if request._read_started:  # noqa: SLF001  (there is no public name for it)
            return None
        body, request._stream = blocking.read_up_to(limit, request._stream, size)  # noqa: SLF001  (what parsers read)
    if size is None and isinstance(body, bytes):
        request.META["CONTENT_LENGTH"] = str(len(body))  # REST framework reads nothing without it
    return body


def made(answer: Answer) -> Any:  # noqa: ANN401
    """Convert a response of oncekey's to a Django response."""
    response = HttpResponse(answer.body, status=answer.status)
    del response.headers["Content-Type"]
    for name, value in answer.headers:
        text = value.decode("latin-1")
        before = response.headers.get(name.decode("latin-1"))
        response.headers[name.decode("latin-1")] = text if before is None else f"{before}, {text}"
    return response


class DjangoRuntime(ThreadRuntime):
    """Runs a call with a timeout in its own thread, and closes the Django connection of that thread."""

    def perform(self, action: Action) -> Any:  # noqa: ANN401
        """Perform one action."""
        if type(action) is Call and action.limit is not None:
            action = Call(partial(then_closed, action.fn), action.arguments, limit=action.limit, within=action.within)
        return super().perform(action)


def then_closed(fn: Callable[..., Any], *arguments: Any) -> Any:  # noqa: ANN401
    """Call a function in a thread that ends with it, and close the Django connections of that thread."""
    try:
        return fn(*arguments)
    finally:
        connections.close_all()


class DjangoThreads(blocking.Threads):
    """State shared by all requests of a Django project."""

    performs = DjangoRuntime

    @property
    def database(self) -> Database | None:
        """The project's database that stores the keys; None if keys are stored at a URL."""
        store = self.engines.store  # type: ignore[attr-defined]  # the engines of a project are its `Once`
        return store if isinstance(store, Database) else None


class DjangoExchange(blocking.BlockingExchange):
    """One request to a Django project."""

    threads: DjangoThreads
    asked: BufferedRequest

    def __init__(self, threads: DjangoThreads, asked: BufferedRequest) -> None:
        super().__init__(threads, asked)
        self.uncaught: BaseException | None = None
        """The exception of the view that reached Django's own exception handler."""
        self._opened: DjangoTransaction | None = None

    @property
    def keyed(self) -> bool:
        """Whether a protected view would claim a key."""
        return self.echo is not None and self.asked.method not in SAFE

    def instead_of(self, error: BaseException) -> Any:  # noqa: ANN401
        """The response to a connection that was lost before the view; None for any other exception."""
        database = self.threads.database
        if database is None or not isinstance(error, InterfaceError | OperationalError):
            return None
        connection = connections[database.alias]
        if connection.connection is not None and (not connection.errors_occurred or connection.is_usable()):
            return None
        answer = self.lost_before(error)
        return None if answer is None else made(answer)

    # Called by the view.

    def open(self, enrolment: Enrolment) -> Any:  # noqa: ANN401
        """Open the transaction before `ATOMIC_REQUESTS` does; returns a response if that fails."""
        try:
            # The store is checked first: inside the transaction the check would need a second connection, and if every
            # thread holds one connection of a pool and waits for a second, none is left.
            if self.threads.ready():
                opened = self.threads.engines.blocking().open()
                assert isinstance(opened, DjangoTransaction)
                opened.surrounds, self._opened = True, opened
                return None
        except StoreError as error:
            self.threads.failed("begin", error)
        return made(self.threads.turn_away(UNAVAILABLE, enrolment, trace_id=self.trace_id, echo=self.echo))

    def call(
        self,
        handler: Callable[..., Any],
        enrolment: Enrolment,
        name: str | None,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:  # noqa: ANN401
        """Call a protected `def` view, unless a stored response or a refusal replaces it."""
        self._check_view(enrolment, args)
        return super().call(self._looking(handler), enrolment, name, args, kwargs)

    def _looking(self, handler: Callable[..., Any]) -> Callable[..., Any]:
        def looked(*args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
            try:
                return handler(*args, **kwargs)
            finally:
                self._look()

        return looked

    async def acall(
        self,
        handler: Callable[..., Any],
        enrolment: Enrolment,
        name: str | None,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:  # noqa: ANN401
        """Call a protected `async def` view, unless a stored response or a refusal replaces it."""
        await _in_its_thread(self._check_view, enrolment, args)
        if self._called:
            raise RuntimeError(ONE_OPERATION)
        self._called = True

        def invoke(op: object) -> Any:  # noqa: ANN401
            return handler(*args, **(kwargs if name is None else {**kwargs, name: op}))

        if not self.keyed:
            refusal = None if self.asked.method in SAFE else self.threads.without_key(enrolment, self.trace_id)
            if refusal is not None:
                return made(refusal)
            return await self._aunkeyed(invoke, enrolment, None)
        await _in_its_thread(self._claim, enrolment)
        if self.answer is not None:
            return made(Answer(self.answer.status, (), b""))
        assert self.run is not None
        if self.capture is None:
            return await self._aunkeyed(invoke, enrolment, self.run.claim)
        return await self._arun(invoke)

    async def _arun(self, invoke: Callable[[object], Any]) -> Any:  # noqa: ANN401
        run, ended, stepping = self.run, self.ended, None
        assert run is not None
        try:
            if run.phased_run is not None:
                run.phased_run.check()
                stepping = Stepping(partial(_drive, self.threads.runtime), run.store, run.phased_run, run.parcels)
            op = operation_of(Operation, run, stepping)
            ended.entered = True
            try:
                return await invoke(op)
            finally:
                ended.kept, ended.rolled_back = op.kept, op.rolled_back
                await _in_its_thread(self._look)
        except BaseException as error:
            ended.error = error
            raise

    async def _aunkeyed(self, invoke: Callable[[object], Any], enrolment: Enrolment, claim: Claim | None) -> Any:  # noqa: ANN401
        if enrolment.effects is not Effects.LOCAL:
            return await invoke(unkeyed_operation(Operation, claim, None))
        runtime = await _in_its_thread(lambda: self.threads.ready() and self.threads.runtime)
        try:
            run = await _in_its_thread(self.without_record, claim) if runtime else None
        except NoConnectionError as error:
            self.threads.failed("begin", error.why)
            run = None
        if run is None:
            return made(self.threads.turn_away(UNAVAILABLE, enrolment, trace_id=self.trace_id))
        flow = serve_unkeyed(run)
        await _in_its_thread(runtime.run, flow)
        op = unkeyed_operation(Operation, claim, run)
        try:
            result = await invoke(op)
        except BaseException as error:
            await _in_its_thread(runtime.run, flow, rows_of(enrolment, op, error, raised=True))
            raise
        await _in_its_thread(runtime.run, flow, rows_of(enrolment, op, result, raised=False))
        return result

    def _check_view(self, enrolment: Enrolment, args: tuple[Any, ...]) -> None:
        """Check that the view belongs to this `Once` and can commit, and set the request that `tenant` receives."""
        if enrolment.owner is not self.threads.engines:
            raise RuntimeError(OTHER_ONCE.format(operation=enrolment.operation))
        self.asked.shown = request_in(args) or self.asked.shown
        database = self.threads.database
        if self.keyed and database is not None and self._opened is None:
            blocks = connections[database.alias].atomic_blocks
            if blocks and not blocks[-1]._from_testcase:  # noqa: SLF001  (Django has no public name for it)
                raise ConfigurationError(NESTED.format(alias=database.alias))

    def _look(self) -> None:
        if self.run is not None and isinstance(self.run.tx, DjangoTransaction):
            self.run.tx.look()

    # Called by the lifecycle.

    def transaction_for(self, enrolment: Enrolment) -> Tx:
        """The transaction that was opened before `ATOMIC_REQUESTS`."""
        return self._opened if enrolment.transactional else None

    def without_record(self, claim: Claim | None) -> Unkeyed:
        """The run of a handler without a record; its rows join an open transaction, or get their own."""
        driver = self.threads.engines.blocking().driver
        join = getattr(driver, "join", None)
        try:
            return Unkeyed(self.threads.site, claim, None if join is None else join())
        except StoreError as error:
            raise NoConnectionError(error) from error

    # The response.

    def failing(self, response: Any) -> BaseException | None:  # noqa: ANN401
        """The exception of the view if the response is Django's error page for it, which is never stored."""
        return self.uncaught if response.status_code >= _SERVER_ERRORS else None

    def begin(self, response: Any) -> None:  # noqa: ANN401
        """Record the status and the headers; Django keeps cookies separately."""
        assert self.capture is not None
        lines = [(name.encode("latin-1"), value.encode("latin-1")) for name, value in response.items()]
        lines += [(b"Set-Cookie", one.OutputString().encode("latin-1")) for one in response.cookies.values()]
        self.capture.start(response.status_code, lines)

    def take(self, response: Any) -> None:  # noqa: ANN401
        """Capture a body, and close the generator of a stream so that its resources are released."""
        if not response.streaming:
            self._takes(response.content)
        elif response.is_async:
            async_to_sync(self.atake)(response)
        else:
            try:
                all(map(self._takes, response.streaming_content))
            finally:
                getattr(response._iterator, "close", _nothing)()  # noqa: SLF001  (the view's own, below Django's)

    async def atake(self, response: Any) -> None:  # noqa: ANN401
        """Capture a body in an event loop; see `take`."""
        if not response.streaming:
            self._takes(response.content)
            return
        if not response.is_async:
            await _in_its_thread(self.take, response)
            return
        try:
            async for piece in response.streaming_content:
                if not self._takes(piece):
                    break
        finally:
            await getattr(response._iterator, "aclose", _anothing)()  # noqa: SLF001

    def _takes(self, piece: bytes) -> bool:
        """Capture one chunk; whether more are wanted: not for a body that cannot be stored."""
        assert self.capture is not None
        self.capture.body(piece, more=True)
        return self.capture.refused is None

    def sent(self, response: Any) -> Any:  # noqa: ANN401
        """Return oncekey's own response, or the view's with oncekey's headers added."""
        if self.answer is not None:
            instead = made(self.answer)
            instead._resource_closers.extend(response._resource_closers)  # noqa: SLF001  (files that the view opened)
            return instead
        capture, run = self.capture, self.run
        if capture is None or run is None or capture.status is None:
            return response
        lines = marked_lines(capture.headers, run.policy, echo=self.echo, expires_at=run.expires_at)
        names = {name.decode("latin-1").lower() for name, _ in lines}
        for name in [name for name in response.headers if name.lower() not in names]:
            del response.headers[name]
        for field, value in lines:
            if field != b"Set-Cookie":
                response.headers[field.decode("latin-1")] = value.decode("latin-1")
        if response.streaming:
            kept = capture.kept
            response.streaming_content = capture.pieces() if kept is None else iter([kept])
        return response

    def end(self) -> None:
        """End the transaction and the heartbeat, however the request ended."""
        try:
            self.close()
        finally:
            if self._opened is not None:
                self._opened.close()
            # Clear the traceback: generators in its frames are closed here, in this thread, and not by the garbage
            # collector.
            self.uncaught = self.ended.error = None


def request_in(args: tuple[Any, ...]) -> Any:  # noqa: ANN401
    """The request among a view's arguments: Django's, or REST framework's wrapper of it."""
    return next((one for one in args[:2] if hasattr(one, "META") and hasattr(one, "method")), None)


def _nothing() -> None:
    """Close an iterator that has nothing to close."""


async def _anothing() -> None:
    """Close an asynchronous iterator that has nothing to close."""


async def _in_its_thread(function: Callable[..., Any], *args: Any) -> Any:  # noqa: ANN401
    """Run a function in the thread that Django keeps for the request, which owns its connections."""
    result = await sync_to_async(function, thread_sensitive=True)(*args)
    assert not inspect.isawaitable(result)
    return result


async def _drive(runtime: ThreadRuntime, flow: Life[T]) -> T:
    """Drive a flow without `Invoke` for an `async def` view, with its transactions in the request's thread.

    The first cancellation is thrown into the flow as `Interrupted`, and raised when the flow ends.
    """
    cancelled: asyncio.CancelledError | None = None
    try:
        action = flow.send(None)
        while True:
            try:
                value = await _performed(runtime, action)
            except asyncio.CancelledError as error:
                if cancelled is not None:
                    raise
                cancelled = error
                action = flow.throw(Interrupted())
            except Exception as error:  # noqa: BLE001  (a flow gets every error of its actions)
                action = flow.throw(error)
            else:
                action = flow.send(value)
    except StopIteration as stop:
        if cancelled is not None:
            raise cancelled from None
        result: T = stop.value
        return result
    except Interrupted:
        assert cancelled is not None
        raise cancelled from None


async def _performed(runtime: ThreadRuntime, action: Action) -> Any:  # noqa: ANN401  (the action's result)
    if type(action) is Sleep:
        return await asyncio.sleep(action.seconds)
    if type(action) is not Call:
        return await sync_to_async(runtime.perform, thread_sensitive=True)(action)
    async with asyncio.timeout(action.limit):
        if iscoroutinefunction(action.fn):
            return await action.fn(*action.arguments)
        # A `def` may use models, which is not allowed in an event loop.
        said = await sync_to_async(action.fn, thread_sensitive=True)(*action.arguments)
        return await said if inspect.isawaitable(said) else said
