"""Django and Django REST framework: `"oncekey.django"` in INSTALLED_APPS, its `Middleware` last in MIDDLEWARE.

Names are imported on first use: Django imports this package before models can be loaded.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from oncekey.django.database import Database
    from oncekey.django.middleware import Middleware
    from oncekey.django.once import Once
    from oncekey.django.project import describe_keys

__all__ = ["Database", "Middleware", "Once", "describe_keys"]

_PLACES = {"Database": "database", "Middleware": "middleware", "Once": "once", "describe_keys": "project"}


def __getattr__(name: str) -> object:
    """Import a public name on first use."""
    if name not in _PLACES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module  # noqa: PLC0415  (only here)

    return getattr(import_module(f"{__name__}.{_PLACES[name]}"), name)
