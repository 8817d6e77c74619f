"""The routes of an application, whatever framework it is made with.

A framework's lister is a function that is given an application and returns its routes, or None if the application is
not of its kind. `LISTERS` names it, and it is imported only where the framework is. An application whose skin is not
ours lists its routes itself, as `__oncekey_routes__()`. What `oncekey routes`, `oncekey audit`, `oncekey openapi` and
the line at start-up say of an application is all made of this.
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
"""The package of a framework, and the module of ours whose function `listed` knows its routes."""


@dataclass(frozen=True, slots=True)
class Served:
    """An endpoint, and where it is served; `{name}` stands for a part of the path, as in OpenAPI."""

    path: str
    methods: frozenset[str]
    endpoint: Callable[..., Any]
    patterns: tuple[Patterns, ...] = ()
    """What is enrolled by path on the way to it, from the outside in."""
    dependencies: tuple[Callable[..., Any], ...] = ()
    """What the framework calls to get its arguments, and theirs."""
    wsgi: bool = False
    """Whether a WSGI server may serve it, which does not pass on every body without a Content-Length."""

    def enrolment(self, method: str) -> Enrolment | None:
        """How it is protected: by its decorator, below whatever others, or by its path."""
        found = next((layer.__oncekey__ for layer in layers(self.endpoint) if hasattr(layer, "__oncekey__")), None)
        if found is None:
            by_path = (patterns.find(method, self.path) for patterns in reversed(self.patterns))
            found = next((enrolment for enrolment in by_path if enrolment is not None), None)
        return found

    def serves(self, handler: Callable[..., Any]) -> bool:
        """Whether a handler is called here, below whatever decorators."""
        return any(layer is handler for layer in layers(self.endpoint))

    @property
    def changing(self) -> frozenset[str]:
        """The methods that may change something."""
        return self.methods - SAFE

    @property
    def is_ours(self) -> bool:
        """Webhooks are recognised by their event's name, and need no key."""
        return type(self.endpoint).__module__.startswith("oncekey.")


class Lists(Protocol):
    """What a framework's module has as `listed`."""

    def __call__(self, app: Any, /) -> Iterable[Served] | None:  # noqa: ANN401  (an application of any kind)
        """Every route of an application; None: it is another framework's."""


def listed(app: Any) -> Iterator[Served] | None:  # noqa: ANN401
    """Every route of an application; None: what it serves cannot be seen."""
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


TWICE: Final = "{method} {path} is enrolled twice, by its path and by @once.protect: leave one of them out"
NO_ROUTE: Final = (
    "enrol={{{pattern!r}: ...}} protects nothing: no route of the application matches it; write the path as the route "
    "does, with {{name}} for each parameter and without root_path, and add the routes before the application starts"
)
STRANGER: Final = (
    "{operation} is served at {path}, and the Once that protects it is not installed there: install that Once in this "
    "application, too"
)


def check_served(served: Sequence[Served], patterns: Patterns, owners: Iterable[object]) -> None:
    """Refuse an application whose routes and enrolments do not fit together, or that an owner is not installed in."""
    known = {id(owner) for owner in owners}
    for route in served:
        for enrolment in map(route.enrolment, route.methods):
            if enrolment is not None and id(enrolment.owner) not in known:
                raise ConfigurationError(STRANGER.format(operation=enrolment.operation, path=route.path))
    check_patterns(served, patterns)


def check_patterns(served: Sequence[Served], patterns: Patterns) -> None:
    """Refuse a route that is enrolled by path and by decorator, and a pattern that no route matches."""
    for route in served:
        for method in route.methods:
            enrolment, by_path = route.enrolment(method), patterns.find(method, route.path)
            if enrolment is not None and enrolment is not by_path and by_path is not None:
                raise ConfigurationError(TWICE.format(method=method, path=route.path))
    for pattern in patterns.patterns:
        if not any(pattern.matches(method, route.path) for route in served for method in route.methods):
            raise ConfigurationError(NO_ROUTE.format(pattern=pattern.text))
