"""The routes of an application, for any framework.

A framework's lister is a function that takes an application and returns its routes, or None if the application is of
another kind. `LISTERS` names it, and it is imported only if the framework is. An application with a custom adapter
lists its routes itself, as `__oncekey_routes__()`. `oncekey routes`, `oncekey audit`, `oncekey openapi` and the
start-up log line all use it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from types import MappingProxyType
from typing import Any, Final, Protocol

from oncekey.core.errors import ConfigurationError
from oncekey.engine.enrolment import SAFE, Enrolment, Patterns
from oncekey.frameworks.asgi.requests import layers

LISTERS: Final[Mapping[str, str]] = MappingProxyType(
    {
        "litestar": "oncekey.litestar",
        "starlette": "oncekey.frameworks.starlette",
        "flask": "oncekey.flask",
        "django": "oncekey.django.project",
    }
)
"""The package of a framework, and oncekey's module whose function `listed` lists its routes."""


@dataclass(frozen=True, slots=True)
class Served:
    """An endpoint, and its path; `{name}` is a path parameter, as in OpenAPI."""

    path: str
    methods: frozenset[str]
    endpoint: Callable[..., Any]
    patterns: tuple[Patterns, ...] = ()
    """The enrolments by path on the way to it, from the outside in."""
    dependencies: tuple[Callable[..., Any], ...] = ()
    """The functions that the framework calls for its arguments, including nested ones."""
    wsgi: bool = False
    """Whether a WSGI server may serve it: such a server may drop a body without Content-Length."""

    def enrolment(self, method: str) -> Enrolment | None:
        """Its enrolment: by its decorator, below any others, or by its path."""
        found = next((layer.__oncekey__ for layer in layers(self.endpoint) if hasattr(layer, "__oncekey__")), None)
        if found is None:
            by_path = (patterns.find(method, self.path) for patterns in reversed(self.patterns))
            found = next((enrolment for enrolment in by_path if enrolment is not None), None)
        return found

    def serves(self, handler: Callable[..., Any]) -> bool:
        """Whether a handler is called here, below any decorators."""
        return any(layer is handler for layer in layers(self.endpoint))

    @property
    def changing(self) -> frozenset[str]:
        """The state-changing methods."""
        return self.methods - SAFE

    @property
    def is_ours(self) -> bool:
        """Whether it is a webhook: those are deduplicated by event id, and need no key."""
        return type(self.endpoint).__module__.startswith("oncekey.")


class Lists(Protocol):
    """The type of a framework module's `listed`."""

    def __call__(self, app: Any, /) -> Iterable[Served] | None:  # noqa: ANN401  (an application of any kind)
        """Every route of an application; None if it belongs to another framework."""


def listed(app: Any) -> Iterator[Served] | None:  # noqa: ANN401
    """Every route of an application; None if its routes cannot be listed."""
    own: Callable[[], Iterable[Served]] | None = getattr(app, "__oncekey_routes__", None)
    if own is not None:
        return iter(own())
    for package, module in LISTERS.items():
        if package in sys.modules:
            lister: Lists = import_module(module).listed
            found = lister(app)
            if found is not None:
                return iter(found)
    return None


TWICE: Final = "{method} {path} is enrolled twice, by path and by @once.protect: remove one of them"
NO_ROUTE: Final = (
    "enrol={{{pattern!r}: ...}} protects nothing: no route of the application matches it; write the path as the route "
    "does, with {{name}} for each parameter and without root_path, and add the routes before the application starts"
)
STRANGER: Final = (
    "{operation} is served at {path}, but the Once that protects it is not installed there: install that Once in this "
    "application, too"
)


def check_served(served: Sequence[Served], patterns: Patterns, owners: Iterable[object]) -> None:
    """Raise if routes and enrolments do not match, or an enrolment's Once is not installed in the application."""
    known = {id(owner) for owner in owners}
    for route in served:
        for enrolment in map(route.enrolment, route.methods):
            if enrolment is not None and id(enrolment.owner) not in known:
                raise ConfigurationError(STRANGER.format(operation=enrolment.operation, path=route.path))
    check_patterns(served, patterns)


def check_patterns(served: Sequence[Served], patterns: Patterns) -> None:
    """Raise for a route that is enrolled by path and by decorator, and for a pattern that no route matches."""
    for route in served:
        for method in route.methods:
            enrolment, by_path = route.enrolment(method), patterns.find(method, route.path)
            if enrolment is not None and enrolment is not by_path and by_path is not None:
                raise ConfigurationError(TWICE.format(method=method, path=route.path))
    for pattern in patterns.patterns:
        if not any(pattern.matches(method, route.path) for route in served for method in route.methods):
            raise ConfigurationError(NO_ROUTE.format(pattern=pattern.text))
