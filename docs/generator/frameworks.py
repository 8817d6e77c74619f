"""`frameworks.md`: every skin from its line of `frameworks.json`, which the acceptance suite also reads."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Final

from .markdown import page as put_together
from .markdown import table, title

LINES: Final = Path(__file__).with_name("frameworks.json")
MEANS: Final = {
    "LOCAL": "rows that commit with the key, through `op.connection`",
    "PHASED": "`op.phase`, `op.call` and `op.value`",
    "OUTBOX": "`op.defer`, and a worker that stores the response",
    "INLINE": "calls to providers in the handler",
    "wait": '`on_in_progress="wait"`: a duplicate waits for the first response instead of receiving 409',
    "stream": "a streamed response is captured before its first byte is sent; event streams are refused",
    "chunks": "a chunked body (`Transfer-Encoding: chunked`) is compared like any other",
    "resume": "a retry or `oncekey worker` resumes a PHASED request whose process was killed",
    "OpenAPI": "`oncekey openapi` describes the key: in the application's own document, or in a file that you pass",
    "audit": "`oncekey audit` and `oncekey routes` list the routes",
}


def page() -> str:
    """The whole page."""
    lines: list[dict[str, Any]] = json.loads(LINES.read_text("utf-8"))
    return put_together(
        title("Frameworks"),
        "This page shows how to protect routes in each framework, and which features are available. One acceptance "
        "suite (`tests/skins`) runs the same payment "
        "service in all of them, over real sockets, with `kill -9`, store outages and `oncekey-check`. It tests every "
        "feature in the second table, and checks that oncekey rejects the missing ones.",
        table(
            ("Framework", "Protected by", "Guide", "Tested on"),
            [(one["skin"], one["by"], _guide(one["guide"]), ", ".join(one["servers"])) for one in lines],
        ),
        table(
            ("Framework", *MEANS),
            [(one["skin"], *(_cell(one["can"][ability]) for ability in MEANS)) for one in lines],
        ),
        table(("Feature", "Meaning"), list(MEANS.items())),
        "An application that is protected by path receives no transaction and no operation, so it is INLINE in every "
        "framework. Plain WSGI has no list of routes, so oncekey cannot list them. Under WSGI, Django reads a chunked "
        "body as empty, so oncekey rejects such a request with 411 if it has a key.",
    )


def _cell(said: object) -> str:
    return said if isinstance(said, str) else "yes" if said else ""


def _guide(name: str) -> str:
    shown = name.partition("#")[0].removesuffix(".md").replace("-", " ")
    return f"[{shown}](../howto/{name})"
