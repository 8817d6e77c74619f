"""The ASGI middleware. It is the innermost one, and captures only the answers of requests that have a key.

It remembers where keyed requests were routed, so that it can replay an answer without the application. A framework
finds a route, reads the body once more, checks it and resolves dependencies before a protected handler is called and
claims. A repeat whose answer is stored needs none of this, unless something on the way could refuse it: a dependency
that authenticates, a check of a header, a decorator above ours that counts. So a route is remembered only where the
framework's adapter says that there is no such thing (`Installation.direct`): then what lies between the middleware and
the handler depends on the method, the path, the query and the body alone, and an equal fingerprint proves that these
are the same as before.

For a remembered route the middleware only asks: the store, or the cache that the policy allows. On any answer but a
replay, and after every error, the request goes to the application as usual (`engine.admit.recall`).
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from typing import TYPE_CHECKING

from oncekey.core.errors import SAID_TO_US
from oncekey.core.lazy import Lazy
from oncekey.core.model import Code, Refuse
from oncekey.engine.capture import IncompleteError
from oncekey.engine.enrolment import SAFE
from oncekey.frameworks.asgi.exchange import Exchange
from oncekey.frameworks.asgi.messages import ClientLeftError, TooSlowError, send_answer, trace_of
from oncekey.frameworks.asgi.nesting import (
    ExchangeState,
    UnkeyedRequest,
    UnsettledError,
    check_alone,
    current,
    enclosing,
    enrolment_of,
    passage_of,
)

if TYPE_CHECKING:
    from oncekey.engine.enrolment import Enrolment
    from oncekey.frameworks.asgi import App, Message, Receive, Scope, Send, lifespans
    from oncekey.frameworks.asgi.installation import Installation
else:
    lifespans = Lazy("oncekey.frameworks.asgi.lifespans")

log = logging.getLogger("oncekey")

KEY_FIELD = b"idempotency-key"
# With these a server would get the name of a file or the end of a response later, so there were no bytes to store.
WITHHELD_EXTENSIONS = ("http.response.pathsend", "http.response.zerocopysend", "http.response.trailers")


class OncekeyMiddleware:
    """Captures the answers of keyed requests, settles them, and only then sends them."""

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
        """If given, it runs around the application's own lifespan: an application in `once.asgi` need not start us."""

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
        # On safe methods a key has no effect, whatever it looks like, unless a pattern names them.
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
                unkeyed.transaction = (
                    None  # it refers to the visit, and the cycle would stay until the garbage collector runs
                )

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
            if not await exchange.finish(error) or not isinstance(error, SAID_TO_US):
                raise
        else:
            if exchange.state is ExchangeState.RUNNING:
                await exchange.finish(IncompleteError())
        finally:
            current.reset(token)
            await exchange.close()

    async def _enter(self, exchange: Exchange, enrolment: Enrolment) -> bool:
        """Claim before the application runs: the middleware cannot see later where a route by path begins to execute.

        If `tenant` raises here, outside of the application, `raised` answers as the application would; then: False.
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
