"""The skins that the suite runs on: a row for each, and what it can do is read from the table of the documentation.

To add a skin, write a module with `make(service)`, which returns an application, name it in `SKINS` with a server, and
give it a line in docs/generator/frameworks.json. A framework that has a `Once` of its own makes it in `once(url)`.
"""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from functools import cached_property
from importlib import import_module
from typing import Any

from harness.pages import ROOT
from oncekey.once import Once

ABILITIES = ("LOCAL", "PHASED", "OUTBOX", "INLINE", "wait", "stream", "chunks", "resume", "OpenAPI", "audit")
TABLE: dict[str, Any] = {
    row["skin"]: row for row in json.loads((ROOT / "docs" / "generator" / "frameworks.json").read_text("utf-8"))
}
"""What the documentation says of each skin."""
sys.path.append(str(ROOT / "examples"))  # one of the skins is an example

UVICORN, WAITRESS, STANDARD = ("uvicorn",), ("waitress",), ("http.server",)
SYNC = ("gunicorn", "--worker-class", "sync", "--workers", "4")
GTHREAD = ("gunicorn", "--worker-class", "gthread", "--workers", "2", "--threads", "8")


@dataclass(frozen=True)
class Skin:
    """A framework, as an application and a server that it runs on."""

    name: str
    row: str
    """Its line of the table."""
    module: str
    server: tuple[str, ...]

    @cached_property
    def can(self) -> frozenset[str]:
        return frozenset(ability for ability, said in TABLE[self.row]["can"].items() if said)

    @property
    def blocking(self) -> bool:
        """Whether it is served in threads, by WSGI."""
        return self.server != UVICORN

    def once(self, url: str, **options: Any) -> Once:
        once: Once = getattr(import_module(self.module), "once", Once)(url, **options)
        return once

    def make(self, service: Any) -> Any:
        return import_module(self.module).make(service)


SKINS = {
    skin.name: skin
    for skin in (
        Skin("fastapi", "FastAPI", "skins.on_fastapi", UVICORN),
        Skin("starlette", "Starlette", "skins.on_starlette", UVICORN),
        Skin("asgi", "ASGI by path", "skins.on_asgi", UVICORN),
        Skin("flask-sync", "Flask", "skins.on_flask", SYNC),
        Skin("flask-gthread", "Flask", "skins.on_flask", GTHREAD),
        Skin("flask-preload", "Flask", "skins.on_flask", (*GTHREAD, "--preload")),
        Skin("django", "Django and REST framework", "skins.on_django", GTHREAD),
        Skin("wsgi", "WSGI", "skins.on_wsgi", WAITRESS),
        Skin("example", "your own (the guide's example)", "skins.on_example", STANDARD),
        Skin("litestar", "Litestar", "skins.on_litestar", UVICORN),
    )
}

ON_SQLITE = frozenset(SKINS) - {"flask-sync", "flask-preload"}
"""One of each line of the table: what is quick runs on SQLite, too."""
KILLED_ON_SQLITE = frozenset({"fastapi", "flask-gthread"})
"""One that waits and one that blocks: what a crash leaves in a store is the engine's and the driver's."""
