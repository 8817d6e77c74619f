"""The routes of a Django project: every pattern of its URLs, with class-based views, view sets and actions."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, Final

from django.core.handlers.base import BaseHandler
from django.urls import URLPattern, get_resolver
from django.views.generic import RedirectView

from oncekey.django.once import Application
from oncekey.django.settings import once_of_project
from oncekey.django.views import handler_of, inner
from oncekey.frameworks.listing import Served

if TYPE_CHECKING:
    from collections.abc import Iterator

METHODS: Final = ("GET", "POST", "PUT", "PATCH", "DELETE")
_ROUTE: Final = re.compile(r"<(?:[^<>:]+:)?([^<>]+)>")
_GROUP: Final = re.compile(r"\(\?P<(\w+)>(?:[^()]|\([^()]*\))*\)")
_FORMAT: Final = re.compile(r"\{format\}|\.\{format\}")
_OWN: Final = ("oncekey.django", "django.views.static")
_ADMIN: Final = "admin"


def listed(app: Any) -> Iterator[Served] | None:  # noqa: ANN401  (an application of any kind)
    """Every route; None: it is no project of Django's."""
    return served() if isinstance(app, Application | BaseHandler) else None


def views() -> Iterator[Any]:
    """Every view of the project."""
    return (view for _, view in _walk(get_resolver().url_patterns, "/"))


def served() -> Iterator[Served]:
    """Every route of the project."""
    patterns = (once_of_project().threads.patterns,)
    for path, view in _walk(get_resolver().url_patterns, "/"):
        if getattr(view, "__module__", "").startswith(_OWN) or _class_of(view) is RedirectView:
            continue
        for methods, handler in _handlers(view):
            endpoint = next((layer for layer in inner(handler) if hasattr(layer, "__oncekey__")), handler)
            yield Served(path, methods, endpoint, patterns)


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


def _class_of(view: Any) -> Any:  # noqa: ANN401
    return getattr(view, "cls", None) or getattr(view, "view_class", None)


def _handlers(view: Any) -> Iterator[tuple[frozenset[str], Any]]:  # noqa: ANN401
    if _class_of(view) is None:
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
