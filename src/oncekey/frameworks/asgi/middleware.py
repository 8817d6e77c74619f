"""The ASGI middleware, and the exchange that it creates for each keyed, state-changing request.

The middleware is the innermost one, and captures only the responses of requests with a key. It creates an exchange,
which the wrapper of the handler finds through a context variable. Both change the same object, so the wrapper need not
pass anything back through the context. The exchange makes the claim, captures the response while the handler runs, and
sends the response that the engine's flow (`engine/serve.py`) returns.

The middleware remembers the routes of keyed requests, so that it can replay a response without the application. A
framework matches a route, reads the body again, validates it and resolves dependencies before a protected handler is
called and claims. A retry whose response is stored needs none of this, unless something on the way could refuse it: a
dependency that authenticates, a check of a header, a decorator above ours that counts. So a route is remembered only if
the framework's adapter finds no such code (`Installation.direct`): then everything between the middleware and the
handler depends only on the method, path, query and body, and an equal fingerprint proves that these are the same.

For a remembered route, the middleware only reads the store, or the cache that the policy allows. Unless the result is a
replay, and after every error, the request goes to the application as usual (`engine.admit.recall`).
"""

from __future__ import annotations

import asyncio
import inspect
import logging
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager, suppress
from typing import TYPE_CHECKING, Any

from oncekey.core.answers import Answer
from oncekey.core.errors import CONTROL_ERRORS, StoreError, is_outage
from oncekey.core.lazy import Lazy
from oncekey.core.model import UNAVAILABLE, Bypass, Code, Deferred, Refuse
from oncekey.engine.actions import Life, StoppedAtHandler
from oncekey.engine.admit import recall
from oncekey.engine.capture import Capture, IncompleteError
from oncekey.engine.claiming import ClaimInput, claim_for
from oncekey.engine.deciding import HandlerEnded, decided, is_inner
from oncekey.engine.enrolment import SAFE, Enrolment
from oncekey.engine.run import Run
from oncekey.engine.serve import end_after_bug, serve
from oncekey.frameworks.asgi.requests import (
    ClientLeftError,
    ExchangeState,
    TooLargeError,
    TooSlowError,
    UnkeyedRequest,
    UnsettledError,
    caller_of,
    check_alone,
    current,
    enclosing,
    enrolment_of,
    passage_of,
    read_claim_input,
    send_answer,
    send_captured,
    trace_of,
)
from oncekey.frameworks.shared import RESUMPTION
from oncekey.runtimes.aio import AsyncRuntime, Changed, shielded

if TYPE_CHECKING:
    from oncekey.core.policy import Policy
    from oncekey.frameworks.asgi import App, Message, Receive, Scope, Send, lifespans, transactions
    from oncekey.frameworks.asgi.installation import Installation, KeyedRoute
    from oncekey.frameworks.asgi.transactions import RequestTransaction
    from oncekey.frameworks.resuming import Resumption
    from oncekey.ports.store import AsyncOpenTransaction
else:
    transactions = Lazy("oncekey.frameworks.asgi.transactions")
    lifespans = Lazy("oncekey.frameworks.asgi.lifespans")


SEND_PATIENCE = 2.0
"""Seconds for which a cancelled request tries to send its response: the server may no longer accept messages."""


class Exchange:
    """One keyed request, from its claim to its response."""

    __slots__ = (
        "_begun",
        "_capture",
        "_counted",
        "_enrolment",
        "_flow",
        "_intake",
        "_key",
        "_lines",
        "_root_path",
        "_send",
        "_task",
        "answer",
        "echo",
        "ended",
        "installation",
        "outer",
        "passage",
        "run",
        "runtime",
        "scope",
        "state",
        "transaction",
        "unkeyed_tx",
    )

    def __init__(
        self, installation: Installation, scope: Scope, receive: Receive, send: Send, lines: list[bytes]
    ) -> None:
        self.installation = installation
        self.scope = scope
        self.passage = passage_of(scope)
        self.outer = enclosing(self.passage)
        self.state = ExchangeState.OPEN
        self.ended = HandlerEnded()
        self.transaction: RequestTransaction | None = None
        self.unkeyed_tx: AsyncOpenTransaction | None = None
        """The transaction of a handler that runs without a record, because its route fails open."""
        self.run: Run | None = None
        self._begun = False
        self._counted = False
        self._lines = lines
        self.echo = lines[0] if len(lines) == 1 else None
        """The line of the key as the client sent it."""
        self._root_path: str = scope.get("root_path", "")  # a mount changes it in place
        self._send = send
        self._intake = self.passage.intake(receive, installation.max_request_bytes)
        self._enrolment: Enrolment | None = None
        self._capture: Capture | None = None
        self._flow: Life[Answer | Bypass | None] | None = None
        self._key: str | None = None
        self.runtime: AsyncRuntime
        """Performs the flows of the operation. `claim` sets it."""
        self.answer: Answer | None = None
        """The response that the exchange sends instead of the application's."""
        self._task: asyncio.Task[Any] | None = None

    # The application gets these instead of the server's `receive` and `send`.

    async def receive(self) -> Message:
        """The next message of the request. If the body takes too long, the exchange responds itself."""
        enrolment = enrolment_of(self.scope, self.installation.engines) if self.state is ExchangeState.OPEN else None
        if enrolment is None:
            return await self._intake.receive()
        try:
            return await self._intake.receive(enrolment.body_patience)
        except TooSlowError:
            if not self._begun:
                self._answered(self._refusal(Refuse(Code.BODY_TOO_SLOW), enrolment))
            raise

    async def read_ahead(self, policy: Policy) -> None:
        """Read the whole body before a dependency gets a connection. If that fails, the claim reports the reason."""
        with suppress(TooLargeError, TooSlowError):
            await self._intake.body(policy.body_timeout.total_seconds())

    async def send(self, message: Message) -> None:
        """Pass on, capture or drop a message of the application, depending on the state."""
        state = self.state
        if state is ExchangeState.RUNNING:
            capture = self._capture
            assert capture is not None
            kind = message["type"]
            if kind == "http.response.start":
                capture.start(message["status"], message.get("headers", ()))
            elif kind == "http.response.body":
                capture.body(message.get("body", b""), more=message.get("more_body", False))
                if capture.refused or capture.complete:
                    await self.finish()
            else:
                await self._send(message)  # early hints and debug information do not belong to the response
        elif state is ExchangeState.OPEN:
            self._begun = True
            await self._send(message)
        elif (
            state is ExchangeState.ANSWERED
            and message["type"] == "http.response.body"
            and not message.get("more_body", False)
        ):
            assert self.answer is not None
            await self._deliver(self.answer)

    # The claim.

    async def claim(self, enrolment: Enrolment) -> None:
        """Claim the right to execute, just before the handler is called.

        Afterwards the state is RUNNING if the handler may run, ANSWERED if the exchange has its own response, or still
        OPEN if the store is down and the route fails open.
        """
        self.passage.claimed = True
        self._enrolment = enrolment
        installation, transaction = self.installation, self.transaction
        resumption: Resumption | None = self.scope.get(RESUMPTION)
        if resumption is not None:
            caller = await caller_of(installation, enrolment.policy, self.scope, named=True)
            resumption.check(caller, names_principals=installation.names_principals)
            claim = resumption.claim(enrolment.policy)
        else:
            claim_input = await read_claim_input(
                installation, enrolment, self.scope, self._lines, self._intake, root_path=self._root_path
            )
            if isinstance(claim_input, Refuse):
                self._answered(self._refusal(claim_input, enrolment))
                if transaction is not None:
                    await transaction.release()
                return
            claim = claim_for(claim_input, enrolment, keep_headers=installation.kept_headers)
        self._key = claim.id.key
        if transaction is not None:
            await transaction.before_claim(enrolment)
        runtime, site = installation.runtime_and_site()
        limits = None
        if resumption is None and enrolment.limited:
            limits = installation.limits.of(site.store, self.scope["headers"], claim, enrolment.policy)
        self.runtime = runtime if transaction is None else transactions.RequestRuntime(runtime, self)
        self.run = run = Run(
            site,
            claim,
            enrolment,
            self,
            resumed=resumption is not None,
            limits=limits,
            tx=None if transaction is None else transaction.business_tx,
            dependencies_hold_connections=transaction is not None,
        )
        self._flow = serve(run)
        try:
            result = await self.runtime.run(self._flow)
        except Changed as changed:
            raise changed.cancelled from None
        if type(result) is Answer:
            self._answered(result)
            self._remember_route(run)
        elif type(result) is StoppedAtHandler:
            installation.running_work.began()
            self._counted = True
            self.state = ExchangeState.RUNNING
            self._intake.hold()
            self._capture = Capture(enrolment.policy)
            if run.phased_run is not None:
                self._task = asyncio.current_task()
                installation.interruptible.add(self)

    async def recall(self, route: KeyedRoute) -> bool:
        """Send a stored response without calling the application. False: the middleware has to call it as usual.

        Errors are dropped here: they occur again inside the application, where its own error handlers apply.
        """
        scope, enrolment, answer = self.scope, route.enrolment, None
        if self.outer is not None or RESUMPTION in scope or not route.matches(scope, self._root_path):
            return False
        if not self.installation.direct(scope, route.endpoint):
            return False
        route.enter(scope)
        with suppress(Exception):
            claim_input = await read_claim_input(
                self.installation, enrolment, scope, self._lines, self._intake, root_path=self._root_path
            )
            if type(claim_input) is ClaimInput:
                self._key, self._enrolment = claim_input.id.key, enrolment
                runtime, site = self.installation.runtime_and_site()
                answer = await runtime.drive(recall(site, claim_input, enrolment.policy, self))
        if answer is None:
            route.leave(scope)
            self._key = self._enrolment = None
            return False
        self.passage.claimed = True
        await self._deliver(answer)
        return True

    def interrupt(self) -> None:
        """Cancel a PHASED handler at shutdown, so that a retry or the completer can resume. An open call continues."""
        phased_run = None if self.run is None else self.run.phased_run
        if self._task is not None and phased_run is not None and phased_run.intent is None:
            phased_run.halted = True
            self._task.cancel()

    def is_early_outage(self, error: BaseException) -> bool:
        """Whether a dependency got no connection to the store, or lost it, before anything was claimed or sent."""
        early = self.state is ExchangeState.OPEN and not self.passage.claimed and not self._begun
        return early and self.transaction is not None and is_outage(error) and not is_inner(error, self.ended.began)

    async def turn_away(self, error: BaseException) -> bool:
        """Respond to an error before the claim: the body took too long, or the store was down. False: another error."""
        if self.state is ExchangeState.ANSWERED and self.answer is not None:
            await self._deliver(self.answer)
            return True
        if not self.is_early_outage(error):
            return False
        log.error("oncekey: a dependency got no connection to the store, or lost it: %s", type(error).__name__)
        if isinstance(error, StoreError):
            self.installation.failed("lend", error)
        await self._deliver(self._refusal(UNAVAILABLE, enrolment_of(self.scope, self.installation.engines)))
        return True

    # Properties.

    @property
    def enrolment(self) -> Enrolment | None:
        """The enrolment of the handler that the request was claimed for, if it was."""
        return self._enrolment

    @property
    def tx(self) -> AsyncOpenTransaction | None:
        """The business transaction of the handler that is running."""
        return self.unkeyed_tx if self.run is None or self.state is not ExchangeState.RUNNING else self.run.tx

    @property
    def status_url(self) -> str | None:
        """The URL of the key's status."""
        if self._key is None or self._enrolment is None:
            return None
        return self.installation.status_url(self._root_path, self._key, self._enrolment.operation)

    @property
    def trace_id(self) -> str:
        """The trace id in the client's `traceparent`."""
        return trace_of(self.scope)

    # The end.

    async def finish(self, error: BaseException | None = None) -> bool:
        """Settle, then respond; True if the response is ours. The state changes before the first await: only once."""
        run, flow = self.run, self._flow
        assert run is not None
        assert flow is not None
        assert self._capture is not None
        self.state = ExchangeState.SETTLING
        self.ended.cancelled = isinstance(self.ended.error or error, asyncio.CancelledError)
        decision, ours = decided(run, self.ended, self._capture, error)
        settled, cancelled = await self.runtime.finish(flow, decision)
        reply = ours if settled is None else settled
        assert not isinstance(reply, Bypass)
        if cancelled is not None:
            await shielded(self._conclude_soon(reply, error))
            raise cancelled
        await self._conclude(reply, error)
        self._leave()  # a background task may still run for a long time
        if reply is None:
            self._remember_route(run)
        if reply is not None and error is None and not isinstance(decision.settlement, Deferred):
            raise UnsettledError
        return reply is not None

    async def close(self) -> None:
        """Release the transactions, timers and spooled file of the request, however it ended."""
        if self.state is not ExchangeState.DONE:
            self._intake.release()
        if self._capture is not None:
            self._capture.close()
        try:
            if self.transaction is not None:
                await self.transaction.release()
            if self._flow is not None and inspect.getgeneratorstate(self._flow) == inspect.GEN_SUSPENDED:
                assert self.run is not None
                ending = end_after_bug(self.run, self._flow, entered=self.ended.entered)
                await shielded(self.runtime.drive(ending))
        finally:
            if self._counted or self._task is not None:
                self._leave()
            # The run refers to the exchange, too. Without this the cycle would stay until the garbage collector runs.
            self.run = None

    async def _conclude(self, reply: Answer | None, error: BaseException | None) -> None:
        """Send oncekey's own response or the captured one. After an exception the application sends its error page."""
        self.state = ExchangeState.DONE
        if reply is not None:
            await send_answer(self._send, reply)
        elif error is None:
            assert self._capture is not None
            assert self.run is not None
            until, policy = self.run.expires_at, self.run.policy
            await send_captured(self._send, self._capture, policy, echo=self.echo, expires_at=until)
        self._intake.release()

    async def _conclude_soon(self, reply: Answer | None, error: BaseException | None) -> None:
        with suppress(TimeoutError, OSError):
            async with asyncio.timeout(SEND_PATIENCE):
                await self._conclude(reply, error)

    async def _deliver(self, answer: Answer) -> None:
        self.state = ExchangeState.DONE
        await send_answer(self._send, answer)
        self._intake.release()

    def _answered(self, answer: Answer) -> None:
        self.answer = answer
        self.state = ExchangeState.ANSWERED

    def _refusal(self, refused: Refuse, enrolment: Enrolment | None) -> Answer:
        return self.installation.turn_away(
            refused, enrolment, trace_id=self.trace_id, echo=self.echo, status_url=self.status_url
        )

    def _remember_route(self, run: Run) -> None:
        """Remember the route of the request, if a retry can be replayed without the application."""
        installation, scope = self.installation, self.scope
        enrolment, known = run.enrolment, run.claim.id in run.site.settled_keys.known
        if not known or self.echo is None or enrolment.limited or not enrolment.whole:
            return
        if installation.direct(scope, scope.get("endpoint")):
            installation.keyed_routes.add(self.echo, scope, self._root_path, enrolment)

    def _leave(self) -> None:
        """Report the end of the operation: a shutdown need not wait for it any more."""
        if self._task is not None:
            self.installation.interruptible.discard(self)
        if self._counted:
            self._counted = False
            self.installation.running_work.ended()


log = logging.getLogger("oncekey")

KEY_FIELD = b"idempotency-key"
# With these extensions the server would get a file instead of bytes, or the end of the response later.
WITHHELD_EXTENSIONS = ("http.response.pathsend", "http.response.zerocopysend", "http.response.trailers")


class OncekeyMiddleware:
    """Captures the responses of keyed requests, and sends them only after the settlement."""

    def __init__(
        self,
        app: App,
        installation: Installation,
        lifespan: Callable[[object], AbstractAsyncContextManager[None]] | None = None,
    ) -> None:
        self.app = app
        self.installation = installation
        self._by_path = bool(installation.patterns.patterns)
        self._keyed_routes = installation.keyed_routes.known
        self._lifespan = lifespan
        """If given, it runs around the application's own lifespan, for an application wrapped by `once.asgi`."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one connection."""
        if scope["type"] == "lifespan":
            await self._live(scope, receive, send)
            return
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        enrolment = self.installation.enrolled(scope) if self._by_path else None
        lines = []
        # On safe methods a key has no effect, even if it is malformed, unless a pattern names them.
        if enrolment is not None or scope["method"] not in SAFE:
            for name, value in scope["headers"]:
                if name == KEY_FIELD:
                    lines.append(bytes(value))
        if not lines:
            await self._visit(scope, receive, send, enrolment)
            return
        if scope.get("extensions"):
            kept = {name: about for name, about in scope["extensions"].items() if name not in WITHHELD_EXTENSIONS}
            scope["extensions"] = kept
        await self._exchange(Exchange(self.installation, scope, receive, send, lines), enrolment)

    async def _live(self, scope: Scope, receive: Receive, send: Send) -> None:
        if self._lifespan is None:
            await checked(self.app, scope, receive, send, self.installation.ready)
        else:
            await lifespans.around(self._lifespan(self), self.app, scope, receive, send)

    async def _visit(self, scope: Scope, receive: Receive, send: Send, enrolment: Enrolment | None) -> None:
        refusal = None if enrolment is None else self.installation.without_key(enrolment, trace_of(scope))
        if refusal is not None:
            await send_answer(send, refusal)
            return
        passage = passage_of(scope)
        unkeyed = UnkeyedRequest(self.installation, scope, receive, passage, enclosing(passage))
        token = current.set(unkeyed)
        try:
            await self.app(scope, unkeyed.receive, send)
        except ClientLeftError:
            pass
        except TooSlowError:
            chosen = enrolment_of(scope, self.installation.engines)
            await send_answer(
                send, self.installation.turn_away(Refuse(Code.BODY_TOO_SLOW), chosen, trace_id=trace_of(scope))
            )
        finally:
            current.reset(token)
            if unkeyed.transaction is not None:
                await unkeyed.transaction.release()
                # It refers to the request, and the cycle would stay until the garbage collector runs.
                unkeyed.transaction = None

    async def _exchange(self, exchange: Exchange, enrolment: Enrolment | None) -> None:
        token = current.set(exchange)
        try:
            route = self._keyed_routes.get(exchange.echo) if enrolment is None else None
            if route is not None and await exchange.recall(route):
                return
            if enrolment is not None and not await self._enter(exchange, enrolment):
                return
            if exchange.state is ExchangeState.ANSWERED:
                await exchange.send({"type": "http.response.body"})
            else:
                await self.app(exchange.scope, exchange.receive, exchange.send)
        except (UnsettledError, ClientLeftError):
            pass
        except BaseException as error:
            if exchange.state is not ExchangeState.RUNNING:
                if await exchange.turn_away(error):
                    return
                raise
            if not await exchange.finish(error) or not isinstance(error, CONTROL_ERRORS):
                raise
        else:
            if exchange.state is ExchangeState.RUNNING:
                await exchange.finish(IncompleteError())
        finally:
            current.reset(token)
            await exchange.close()

    async def _enter(self, exchange: Exchange, enrolment: Enrolment) -> bool:
        """Claim before the application runs: the middleware cannot see when a handler that is enrolled by path begins.

        False if `tenant` raises here, outside the application: then `raised` responds as the application would.
        """
        check_alone()
        try:
            await exchange.claim(enrolment)
        except Exception as error:
            if self.installation.raised is None or exchange.run is not None:
                raise
            await self.installation.raised(error)(exchange.scope, exchange.receive, exchange.send)
            return False
        exchange.ended.entered = True
        return True


async def checked(app: App, scope: Scope, receive: Receive, send: Send, ready: Callable[[], None]) -> None:
    """Pass a lifespan on to the application, and call `ready` when the application reports that it has started."""

    async def say(message: Message) -> None:
        if message["type"] == "lifespan.startup.complete":
            ready()  # if it raises, the start-up fails, and the application still ends its own lifespan
        await send(message)

    await app(scope, receive, say)
