"""The routes of a Flask application, blueprints and class-based views included."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, Final

from oncekey.frameworks.listing import Served
from oncekey.frameworks.wsgi import OncekeyWsgi

if TYPE_CHECKING:
    from collections.abc import Iterator

_PART: Final = re.compile(r"<(?:[^<>:]+:)?([^<>]+)>")
_OWN: Final = frozenset({"static", "idempotency_resource"})


def listed(app: Any) -> Iterator[Served] | None:  # noqa: ANN401  (an application of any kind)
    """Every route; None: it is no Flask application."""
    return _walk(app) if hasattr(app, "url_map") and hasattr(app, "view_functions") else None


def _walk(app: Any) -> Iterator[Served]:  # noqa: ANN401
    inner = app.wsgi_app
    patterns = (inner.threads.patterns,) if isinstance(inner, OncekeyWsgi) else ()
    for rule in app.url_map.iter_rules():
        view = app.view_functions.get(rule.endpoint)
        if view is None or rule.endpoint in _OWN:
            continue
        path, methods = _PART.sub(r"{\1}", rule.rule), frozenset(rule.methods or ())
        of_class = getattr(view, "view_class", None)
        if of_class is None:
            yield Served(path, methods, view, patterns)
            continue
        for method in sorted(methods):
            handler = getattr(of_class, method.lower(), None) or getattr(of_class, "dispatch_request", None)
            if handler is not None:
                yield Served(path, frozenset({method}), handler, patterns)
