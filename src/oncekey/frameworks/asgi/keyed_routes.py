"""Remembers where keyed requests were routed, so that the middleware can replay an answer without the application.

A framework finds a route, reads the body once more, checks it and resolves dependencies before a protected handler is
called and claims. A repeat whose answer is stored needs none of this, unless something on the way could refuse it: a
dependency that authenticates, a check of a header, a decorator above ours that counts. So a way is remembered only
where the framework's adapter says that there is no such thing (`Installation.direct`): then what lies between the
middleware and the handler depends on the method, the path, the query and the body alone, and an equal fingerprint
proves that these are the same as before.

With a way the middleware only asks: the store, or the cache that the policy allows. On any answer but a replay, and
after every error, the request goes to the application as usual (`engine.admit.recall`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, NamedTuple

if TYPE_CHECKING:
    from oncekey.engine.enrolment import Enrolment
    from oncekey.frameworks.asgi.types import Scope

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
