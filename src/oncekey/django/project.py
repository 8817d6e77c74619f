"""A Django project: its oncekey settings, and its views, listed without calling them."""

from __future__ import annotations

import inspect
import re
from typing import TYPE_CHECKING, Any, Final

from django.conf import settings
from django.core.handlers.base import BaseHandler
from django.urls import URLPattern, get_resolver
from django.utils.module_loading import import_string
from django.views.generic import RedirectView

from oncekey.core.errors import ConfigurationError
from oncekey.frameworks.asgi.requests import layers
from oncekey.frameworks.listing import Served
from oncekey.frameworks.openapi import describe

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from oncekey.django.once import Once
    from oncekey.engine.enrolment import Enrolment

SETTING: Final = "ONCEKEY"
NOT_SET: Final = (
    'settings.ONCEKEY is missing: set it to the import path of the project\'s Once, such as ONCEKEY = "shop.once.once"'
)
NOT_THERE: Final = "settings.ONCEKEY = {place!r}: {why}"
NOT_DJANGOS: Final = "it is a {kind}, not an oncekey.django.Once"
ORDER: Final = (
    "{view}: @once.protect(...) is above a decorator of django.contrib.auth, so a client that has the key would get a "
    "stored response without a login: put @once.protect directly above the function, below {decorator}"
)
MADE: Final = (
    "{view}: @once.protect(...) is above a whole view, which authenticates its callers inside: put it directly above "
    "the function and below @api_view, or above the method of the class"
)
_AUTH: Final = frozenset({"django.contrib.auth.decorators", "django.contrib.admin.views.decorators"})
_REST: Final = "rest_framework.decorators"
METHODS: Final = ("GET", "POST", "PUT", "PATCH", "DELETE")
_ROUTE: Final = re.compile(r"<(?:[^<>:]+:)?([^<>]+)>")
_GROUP: Final = re.compile(r"\(\?P<(\w+)>(?:[^()]|\([^()]*\))*\)")
_FORMAT: Final = re.compile(r"\{format\}|\.\{format\}")
_OWN: Final = ("oncekey.django", "django.views.static")
_ADMIN: Final = "admin"


def alias_of_project() -> str:
    """The alias of the database that stores the keys: `settings.ONCEKEY_DATABASE`."""
    alias: str = getattr(settings, "ONCEKEY_DATABASE", "default")
    return alias


def place_of_once() -> str:
    """The import path in `settings.ONCEKEY`."""
    place = getattr(settings, SETTING, None)
    if not isinstance(place, str) or "." not in place:
        raise ConfigurationError(NOT_SET)
    return place


def once_of_project() -> Once:
    """The project's `Once`; raises ConfigurationError if the setting is wrong."""
    from oncekey.django.once import Once  # noqa: PLC0415  (it imports this module)

    place = place_of_once()
    try:
        found = import_string(place)
    except ImportError as error:
        raise ConfigurationError(NOT_THERE.format(place=place, why=error)) from error
    if not isinstance(found, Once):
        raise ConfigurationError(NOT_THERE.format(place=place, why=NOT_DJANGOS.format(kind=type(found).__name__)))
    return found


class Application:
    """The project as a WSGI application: workers resume requests through it, and commands list its routes."""

    def __init__(self) -> None:
        self._handler: Any = None

    def __call__(self, environ: Any, start_response: Any) -> Any:  # noqa: ANN401  (WSGI)
        """Serve one request."""
        if self._handler is None:
            from django.core.handlers.wsgi import WSGIHandler  # noqa: PLC0415  (it loads the middleware)

            self._handler = WSGIHandler()
        return self._handler(environ, start_response)


def handler_of(view: Any, method: str) -> Any:  # noqa: ANN401  (a view of any kind)
    """The function that a view calls for a method: the view itself, or a method of its class."""
    for layer in layers(view):
        of_class = getattr(layer, "cls", None) or getattr(layer, "view_class", None)
        if of_class is not None:
            actions = getattr(layer, "actions", None)  # of a view set, by method
            name = actions.get(method.lower()) if actions else method.lower()
            return None if name is None else getattr(of_class, name, None)
    return view


def enrolment_of(view: Any, method: str) -> Enrolment | None:  # noqa: ANN401
    """The enrolment of a view for a method, below any decorators."""
    for layer in inner(handler_of(view, method)):
        enrolment: Enrolment | None = getattr(layer, "__oncekey__", None)
        if enrolment is not None:
            return enrolment
    return None


def inner(handler: Any) -> Iterator[Any]:  # noqa: ANN401
    """A handler and the functions that its decorators wrap; `@api_view` keeps its function only in a closure."""
    for layer in layers(handler):
        yield layer
        if _globals(layer) == _REST:
            for cell in getattr(layer, "__closure__", None) or ():
                if inspect.isfunction(cell.cell_contents):
                    yield from layers(cell.cell_contents)


def check_order(handler: Callable[..., Any]) -> None:
    """Raise ConfigurationError if the protection would send a stored response before the caller is authenticated."""
    if hasattr(handler, "cls") or hasattr(handler, "view_class"):
        raise ConfigurationError(MADE.format(view=handler.__qualname__))
    for layer in layers(handler):
        named = _decorators(layer)
        if named is not None:
            raise ConfigurationError(ORDER.format(view=handler.__qualname__, decorator=named))


def _decorators(layer: Any) -> str | None:  # noqa: ANN401
    """The login decorator that made a layer, directly or inside `method_decorator`; None if there is none."""
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


def listed(app: Any) -> Iterator[Served] | None:  # noqa: ANN401  (an application of any kind)
    """Every route; None if the application is not a Django project."""
    return served() if isinstance(app, Application | BaseHandler) else None


def views() -> Iterator[Any]:
    """Every view of the project."""
    return (view for _, view in _walk(get_resolver().url_patterns, "/"))


def served() -> Iterator[Served]:
    """Every route of the project."""
    for path, view in _walk(get_resolver().url_patterns, "/"):
        if getattr(view, "__module__", "").startswith(_OWN) or class_of(view) is RedirectView:
            continue
        for methods, handler in _handlers(view):
            endpoint = next((layer for layer in inner(handler) if hasattr(layer, "__oncekey__")), handler)
            yield Served(path, methods, endpoint, wsgi=True)


def _walk(found: Any, before: str) -> Iterator[tuple[str, Any]]:  # noqa: ANN401
    for one in found:
        path = before + _readable(str(one.pattern))
        if isinstance(one, URLPattern):
            if not _FORMAT.search(path):  # REST framework also serves each route with a format suffix
                yield path, one.callback
        elif one.app_name != _ADMIN:  # forms of the admin site send no keys
            yield from _walk(one.url_patterns, path)


def _readable(pattern: str) -> str:
    """A URL pattern in OpenAPI's syntax; regular expressions are converted too."""
    text = _GROUP.sub(r"{\1}", pattern)
    text = _ROUTE.sub(r"{\1}", text)
    return text.removeprefix("^").removesuffix("$").removesuffix(r"\Z").replace("\\", "")


def class_of(view: Any) -> Any:  # noqa: ANN401
    """The class of a view, below any decorators; None for a function."""
    for layer in layers(view):
        of_class = getattr(layer, "cls", None) or getattr(layer, "view_class", None)
        if of_class is not None:
            return of_class
    return None


def has_login(view: Any) -> bool:  # noqa: ANN401
    """Whether a Django decorator checks the login before a view."""
    return any(_decorators(layer) is not None for layer in layers(view))


def _handlers(view: Any) -> Iterator[tuple[frozenset[str], Any]]:  # noqa: ANN401
    if class_of(view) is None:
        yield _methods_of(view), view
        return
    for method in METHODS:
        handler = handler_of(view, method)
        if handler is not None:
            yield frozenset({method}), handler


def _methods_of(view: Any) -> frozenset[str]:  # noqa: ANN401
    """The methods that a function accepts, from `require_http_methods`, which keeps its list in a closure."""
    for layer in inner(view):
        if getattr(layer, "__globals__", {}).get("__name__") != "django.views.decorators.http":
            continue
        for cell in getattr(layer, "__closure__", None) or ():
            found = cell.cell_contents
            if isinstance(found, list | tuple) and all(isinstance(one, str) for one in found):
                return frozenset(found)
    return frozenset({"GET", "POST"})


def describe_keys(result: dict[str, Any], generator: Any, request: Any, public: bool) -> dict[str, Any]:  # noqa: ANN401, ARG001, FBT001  (drf-spectacular's signature)
    """Add the header and the responses of each protected operation to a drf-spectacular document."""
    describe(result, served())  # drf-spectacular may rename path parameters: `{pk}` becomes `{id}`
    return result
