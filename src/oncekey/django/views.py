"""The views of a Django project: how each is protected, found without calling any of them."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any, Final

from oncekey.core.errors import ConfigurationError
from oncekey.frameworks.asgi.nesting import layers

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from oncekey.engine.enrolment import Enrolment

ORDER: Final = (
    "{view}: @once.protect(...) is above a decorator of django.contrib.auth, so a stored answer would be given to "
    "whoever has the key, without a login: put @once.protect directly above the function, below {decorator}"
)
MADE: Final = (
    "{view}: @once.protect(...) is above a whole view, which authenticates inside: put it directly above the function "
    "and below @api_view, or above the method of the class"
)
_AUTH: Final = frozenset({"django.contrib.auth.decorators", "django.contrib.admin.views.decorators"})
_REST: Final = "rest_framework.decorators"


def handler_of(view: Any, method: str) -> Any:  # noqa: ANN401  (a view of any kind)
    """What a view calls for a method: itself, or a method of its class."""
    for layer in layers(view):
        of_class = getattr(layer, "cls", None) or getattr(layer, "view_class", None)
        if of_class is not None:
            actions = getattr(layer, "actions", None)  # of a view set, by method
            name = actions.get(method.lower()) if actions else method.lower()
            return None if name is None else getattr(of_class, name, None)
    return view


def enrolment_of(view: Any, method: str) -> Enrolment | None:  # noqa: ANN401
    """How a view is protected for a method, below whatever decorators."""
    for layer in inner(handler_of(view, method)):
        enrolment: Enrolment | None = getattr(layer, "__oncekey__", None)
        if enrolment is not None:
            return enrolment
    return None


def inner(handler: Any) -> Iterator[Any]:  # noqa: ANN401
    """A handler and what its decorators wrapped; `@api_view` keeps its function in a closure only."""
    for layer in layers(handler):
        yield layer
        if _globals(layer) == _REST:
            for cell in getattr(layer, "__closure__", None) or ():
                if inspect.isfunction(cell.cell_contents):
                    yield from layers(cell.cell_contents)


def check_order(handler: Callable[..., Any]) -> None:
    """Refuse a protection that would answer before the caller is known."""
    if hasattr(handler, "cls") or hasattr(handler, "view_class"):
        raise ConfigurationError(MADE.format(view=handler.__qualname__))
    for layer in layers(handler):
        named = _decorators(layer)
        if named is not None:
            raise ConfigurationError(ORDER.format(view=handler.__qualname__, decorator=named))


def _decorators(layer: Any) -> str | None:  # noqa: ANN401
    """What of Django's logins a layer comes from, by itself or inside of `method_decorator`."""
    where = _globals(layer)
    if where in _AUTH:
        return "the decorator that checks the login"
    if where != "django.utils.decorators":
        return None
    for cell in getattr(layer, "__closure__", None) or ():
        found = cell.cell_contents
        for one in found if isinstance(found, list | tuple) else [found]:
            if _globals(one) in _AUTH:
                return "@method_decorator(...)"
    return None


def _globals(function: Any) -> str | None:  # noqa: ANN401
    name: str | None = getattr(function, "__globals__", {}).get("__name__")
    return name
