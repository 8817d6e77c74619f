"""Enrolment by the path of a request, for applications whose router cannot be queried."""

from __future__ import annotations

from typing import TYPE_CHECKING
from urllib.parse import unquote

if TYPE_CHECKING:
    from oncekey.engine.enrolment import Enrolment, Patterns
    from oncekey.frameworks.asgi import Scope


def by_spelling(patterns: Patterns, scope: Scope) -> Enrolment | None:
    """The enrolment of a request by its path, decoded as a whole and segment by segment: `%2F` may separate or not."""
    spellings = [route_path(scope)]
    raw = (scope.get("raw_path") or b"").partition(b"?")[0]
    if b"%" in raw:
        segments = (unquote(segment).replace("/", "_") for segment in raw.decode("latin-1").split("/"))
        spellings.append(route_path({**scope, "path": "/".join(segments)}))
    return patterns.find_spelled(scope["method"], *spellings)


def route_path(scope: Scope) -> str:
    """The path as the application's own routes match it: without the mount path, which some servers leave in front."""
    path, root = str(scope["path"]), str(scope.get("root_path", "")).rstrip("/")
    if root and (path == root or path.startswith(f"{root}/")):
        path = path[len(root) :]
    return path or "/"
