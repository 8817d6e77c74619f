"""The ASGI middleware. It is the innermost one, and captures only the answers of requests that have a key.

It remembers where keyed requests were routed, so that it can replay an answer without the application. A framework
finds a route, reads the body once more, checks it and resolves dependencies before a protected handler is called and
claims. A repeat whose answer is stored needs none of this, unless something on the way could refuse it: a dependency
that authenticates, a check of a header, a decorator above ours that counts. So a way is remembered only where the
framework's adapter says that there is no such thing (`Installation.direct`): then what lies between the middleware and
the handler depends on the method, the path, the query and the body alone, and an equal fingerprint proves that these
are the same as before.

With a way the middleware only asks: the store, or the cache that the policy allows. On any answer but a replay, and
after every error, the request goes to the application as usual (`engine.admit.recall`).
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from oncekey.core.errors import SAID_TO_US
from oncekey.core.model import Code, Refuse
from oncekey.engine.capture import IncompleteError
from oncekey.engine.enrolment import SAFE
from oncekey.frameworks.asgi.delivery import send_answer
from oncekey.frameworks.asgi.exchange import Exchange, ExchangeState, UnkeyedRequest, UnsettledError
from oncekey.frameworks.asgi.intake import ClientLeftError, TooSlowError
from oncekey.frameworks.asgi.lifespans import around, checked
from oncekey.frameworks.asgi.nesting import check_alone, current, enclosing, enrolment_of, passage_of
from oncekey.frameworks.asgi.transactions import release

if TYPE_CHECKING:
    from oncekey.engine.enrolment import Enrolment
    from oncekey.frameworks.asgi.installation import Installation
    from oncekey.frameworks.asgi.types import App, Receive, Scope, Send


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
        self._patterns = installation.patterns
        self._ways = installation.ways.known
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
        enrolment = self._patterns.find(scope["method"], route_path(scope)) if self._patterns.patterns else None
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
            await around(self._lifespan(self), self.app, scope, receive, send)

    async def _visit(self, scope: Scope, receive: Receive, send: Send, enrolment: Enrolment | None) -> None:
        if enrolment is not None and enrolment.policy.require_key:
            await send_answer(send, self.installation.turn_away(Refuse(Code.KEY_MISSING), enrolment))
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
            await send_answer(send, self.installation.turn_away(Refuse(Code.BODY_TOO_SLOW), chosen))
        finally:
            current.reset(token)
            if unkeyed.transaction is not None:
                await release(unkeyed)
                unkeyed.transaction = (
                    None  # it refers to the visit, and the cycle would stay until the garbage collector runs
                )

    async def _exchange(self, exchange: Exchange, enrolment: Enrolment | None) -> None:
        token = current.set(exchange)
        try:
            way = self._ways.get(exchange.echo) if enrolment is None else None
            if way is not None and await exchange.recall(way):
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

        If a resolver raises here, outside of the application, `raised` answers as the application would; then: False.
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


def route_path(scope: Scope) -> str:
    """The path as the application's own routes know it: without the mount path, which some servers leave in front."""
    path, root = str(scope["path"]), str(scope.get("root_path", "")).rstrip("/")
    if root and (path == root or path.startswith(f"{root}/")):
        path = path[len(root) :]
    return path or "/"


MOST_WAYS: Final = 10_000
_ROUTED: Final = ("endpoint", "path_params", "route")
"""What a framework's router writes into the scope. Outer middleware may read it there afterwards."""


class KeyedRoute(NamedTuple):
    """The route that a request with a key took."""

    method: str
    path: str
    root_path: str
    enrolment: Enrolment
    routed: dict[str, Any]

    @property
    def endpoint(self) -> object:
        """The function to which the request was routed."""
        return self.routed["endpoint"]

    def leads(self, scope: Scope, root_path: str) -> bool:
        """Whether a request has the same method and path."""
        return self.path == scope["path"] and self.method == scope["method"] and self.root_path == root_path

    def enter(self, scope: Scope) -> None:
        """Write into the scope what the router would write."""
        scope.update(self.routed)
        if "path_params" in self.routed:
            scope["path_params"] = dict(self.routed["path_params"])

    def leave(self, scope: Scope) -> None:
        """Undo `enter`, because the application's router will run after all."""
        for name in self.routed:
            scope.pop(name, None)


class KeyedRoutes:
    """The ways of recently answered keys, by the header line that the client sent. The oldest is dropped first."""

    __slots__ = ("_last", "_most", "known")

    def __init__(self, most: int = MOST_WAYS) -> None:
        self.known: dict[bytes | None, KeyedRoute] = {}
        self._last: tuple[object, KeyedRoute | None] = (None, None)
        """The way that was added last: requests with many keys share one route, and so one `KeyedRoute`."""
        self._most = most

    def add(self, line: bytes, scope: Scope, root_path: str, enrolment: Enrolment) -> None:
        """Remember the route of a request."""
        known = self.known
        if len(known) >= self._most and line not in known:
            del known[next(iter(known))]
        at, way = self._last
        here = (scope["method"], scope["path"], root_path, scope["endpoint"])
        if way is None or at != here:
            routed = {name: scope[name] for name in _ROUTED if name in scope}
            way = KeyedRoute(*here[:3], enrolment, routed)
            self._last = here, way
        known[line] = way
