"""Modules that a process imports when a feature is configured: a feature that no route uses is not loaded.

A module imports such a module in two ways, so that type checkers and import-linter see an ordinary import:

    if TYPE_CHECKING:
        from oncekey.engine import phases
    else:
        phases = Lazy("oncekey.engine.phases")

The first use of one of its names imports it. No request may be that first use: an import blocks the event loop, and
after an upgrade in place it would read a file of another version. So enrolments and installations call `load` for what
their requests may need, and `tests/frameworks/test_request_path.py` fails for an import in a request.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import ModuleType


class Lazy:
    """A module that is imported when one of its names is first used."""

    __slots__ = ("_module", "_name")

    def __init__(self, name: str) -> None:
        self._name = name
        self._module: ModuleType | None = None

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401  (whatever the module has there)
        if self._module is None:
            self._module = import_module(self._name)
        return getattr(self._module, name)


def exports(**places: str) -> Callable[[str], object]:
    """A module's `__getattr__` (PEP 562) for names of other modules below `oncekey`, imported at their first use."""

    def __getattr__(name: str) -> object:  # noqa: N807  (a module takes it by this name)
        if name not in places:
            raise AttributeError(name)
        return getattr(import_module(f"oncekey.{places[name]}"), name)

    return __getattr__


def load(*names: str) -> None:
    """Import modules now, each by its name below `oncekey`."""
    for name in names:
        import_module(f"oncekey.{name}")
