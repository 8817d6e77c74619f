"""The routes of an application, whatever framework it is made with.

A framework's lister is a function that is given an application and returns its routes, or None if the application is
not of its kind. `LISTERS` names it, and it is imported only where the framework is. An application whose skin is not
ours lists its routes itself, as `__oncekey_routes__()`. What `oncekey routes`, `oncekey audit`, `oncekey openapi` and
the line at start-up say of an application is all made of this.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from importlib import import_module
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final, Protocol

from oncekey.engine.enrolment import SAFE
from oncekey.frameworks.asgi.nesting import layers

if TYPE_CHECKING:
    from collections.abc import Iterator

    from oncekey.engine.enrolment import Enrolment, Patterns

LISTERS: Final[Mapping[str, str]] = MappingProxyType(
    {
        "starlette": "oncekey.frameworks.routes",
        "flask": "oncekey.frameworks.flask_routes",
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

    def enrolment(self, method: str) -> Enrolment | None:
        """How it is protected: by its decorator, below whatever others, or by its path."""
        found = next((layer.__oncekey__ for layer in layers(self.endpoint) if hasattr(layer, "__oncekey__")), None)
        if found is None:
            by_path = (patterns.find(method, self.path) for patterns in reversed(self.patterns))
            found = next((enrolment for enrolment in by_path if enrolment is not None), None)
        return found

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
