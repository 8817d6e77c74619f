"""Ways that are known: where a repeat leads, so that a stored answer can be given without going there again.

A framework finds a route, reads the body once more, checks it and resolves dependencies before a protected handler is
called and claims. A repeat whose answer is stored needs none of it, if nobody on the way may say no: a dependency
authenticates, a header is checked, a decorator above ours counts. So a way is remembered only where the framework's
adapter says that there is nobody (`Installation.direct`): then what lies between us and the handler depends on the
method, the path, the query and the body alone, and the fingerprint says that these are the same as before.

A way only leads to a question. The store, or the cache that the policy allows, answers it; any answer but a replay,
and every error, leaves the request to the application as if nobody had asked (`engine.admit.recall`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, NamedTuple

if TYPE_CHECKING:
    from oncekey.engine.enrolment import Enrolment
    from oncekey.frameworks.asgi.types import Scope

MOST_WAYS: Final = 10_000
_ROUTED: Final = ("endpoint", "path_params", "route")
"""What a framework's router writes into the scope, and middleware farther out may read there afterwards."""


class Way(NamedTuple):
    """Where a request with a key was routed to."""

    method: str
    path: str
    root_path: str
    enrolment: Enrolment
    routed: dict[str, Any]

    @property
    def endpoint(self) -> object:
        """The function that was routed to."""
        return self.routed["endpoint"]

    def leads(self, scope: Scope, root_path: str) -> bool:
        """Whether a request is for the same place."""
        return self.path == scope["path"] and self.method == scope["method"] and self.root_path == root_path

    def enter(self, scope: Scope) -> None:
        """Write into the scope what the router would have."""
        scope.update(self.routed)
        if "path_params" in self.routed:
            scope["path_params"] = dict(self.routed["path_params"])

    def leave(self, scope: Scope) -> None:
        """The router will be asked after all."""
        for name in self.routed:
            scope.pop(name, None)


class Ways:
    """Those of the keys that were answered lately, by the line that the client wrote. The oldest makes room."""

    __slots__ = ("_last", "_most", "known")

    def __init__(self, most: int = MOST_WAYS) -> None:
        self.known: dict[bytes | None, Way] = {}
        self._last: tuple[object, Way | None] = (None, None)
        """The way that was added last: one place is asked for by many keys."""
        self._most = most

    def add(self, line: bytes, scope: Scope, root_path: str, enrolment: Enrolment) -> None:
        """Remember where a request was routed to."""
        known = self.known
        if len(known) >= self._most and line not in known:
            del known[next(iter(known))]
        at, way = self._last
        here = (scope["method"], scope["path"], root_path, scope["endpoint"])
        if way is None or at != here:
            routed = {name: scope[name] for name in _ROUTED if name in scope}
            way = Way(*here[:3], enrolment, routed)
            self._last = here, way
        known[line] = way
