"""A Django project: what its settings say of oncekey, and its views, found and listed without calling any of them."""

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
NOT_SET: Final = 'settings.ONCEKEY is missing: say where the project\'s Once is, as in ONCEKEY = "shop.once.once"'
NOT_THERE: Final = "settings.ONCEKEY = {place!r}: {why}"
NOT_DJANGOS: Final = "that is a {kind}, and an oncekey.django.Once is needed"
ORDER: Final = (
    "{view}: @once.protect(...) is above a decorator of django.contrib.auth, so a client that has the key would get a "
    "stored answer without a login: put @once.protect directly above the function, below {decorator}"
)
MADE: Final = (
    "{view}: @once.protect(...) is above a whole view, which authenticates inside: put it directly above the function "
    "and below @api_view, or above the method of the class"
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
    """The database that keys are kept in, as `settings.ONCEKEY_DATABASE` says."""
    alias: str = getattr(settings, "ONCEKEY_DATABASE", "default")
    return alias


def place_of_once() -> str:
    """What the setting says."""
    place = getattr(settings, SETTING, None)
    if not isinstance(place, str) or "." not in place:
        raise ConfigurationError(NOT_SET)
    return place


def once_of_project() -> Once:
    """The project's `Once`, or one line about what is wrong with the setting."""
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
    """The project as a WSGI application: a worker goes on with requests through it, and commands list its routes."""

    def __init__(self) -> None:
        self._handler: Any = None

    def __call__(self, environ: Any, start_response: Any) -> Any:  # noqa: ANN401  (WSGI)
        """Serve one request."""
        if self._handler is None:
            from django.core.handlers.wsgi import WSGIHandler  # noqa: PLC0415  (it loads the middleware)

            self._handler = WSGIHandler()
        return self._handler(environ, start_response)


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


def listed(app: Any) -> Iterator[Served] | None:  # noqa: ANN401  (an application of any kind)
    """Every route; None: it is no project of Django's."""
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
            if not _FORMAT.search(path):  # REST framework serves each route once more, with a suffix
                yield path, one.callback
        elif one.app_name != _ADMIN:  # its forms are Django's, which take no keys
            yield from _walk(one.url_patterns, path)


def _readable(pattern: str) -> str:
    """A pattern as OpenAPI writes it, also one that is a regular expression."""
    text = _GROUP.sub(r"{\1}", pattern)
    text = _ROUTE.sub(r"{\1}", text)
    return text.removeprefix("^").removesuffix("$").removesuffix(r"\Z").replace("\\", "")


def class_of(view: Any) -> Any:  # noqa: ANN401
    """The class of a view, below whatever decorators; None for a function."""
    for layer in layers(view):
        of_class = getattr(layer, "cls", None) or getattr(layer, "view_class", None)
        if of_class is not None:
            return of_class
    return None


def has_login(view: Any) -> bool:  # noqa: ANN401
    """Whether a decorator of Django's checks the login before a view."""
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
    """What a function takes: `require_http_methods` keeps its list in a closure, and others take any method."""
    for layer in inner(view):
        if getattr(layer, "__globals__", {}).get("__name__") != "django.views.decorators.http":
            continue
        for cell in getattr(layer, "__closure__", None) or ():
            found = cell.cell_contents
            if isinstance(found, list | tuple) and all(isinstance(one, str) for one in found):
                return frozenset(found)
    return frozenset({"GET", "POST"})


def describe_keys(result: dict[str, Any], generator: Any, request: Any, public: bool) -> dict[str, Any]:  # noqa: ANN401, ARG001, FBT001  (drf-spectacular's signature)
    """Write into a document of drf-spectacular what each protected operation takes and answers."""
    describe(result, served())  # parts of paths may be called otherwise there: `{pk}` is `{id}` of its model
    return result
