"""The generated half of the documentation: pages whose facts come from the code, so that they cannot drift.

`python -m docs.generator` in the repository's folder writes them; a test compares them with what is committed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Final

from . import cli, conformance, drawing, frameworks, headers, problems, request_path, schema, settings, states, stores

FOLDER: Final = Path(__file__).resolve().parents[1]

_NEXT: Final[Mapping[str, str]] = MappingProxyType(
    {
        "reference/settings.md": "[Protect a route](../howto/enrol-a-route.md), or [Problems](problems.md).",
        "reference/problems.md": "[Client](../howto/client.md), or [Headers](headers.md).",
        "reference/headers.md": "[Problems](problems.md), or [Settings](settings.md).",
        "reference/cli.md": "[Operator commands](../howto/operators.md), or [Workers](../howto/workers.md).",
        "reference/schema.md": "[PostgreSQL](../howto/postgresql.md), or [States](../explanation/states.md).",
        "reference/conformance.md": "[Check an API](../howto/check-an-api.md), or [Problems](problems.md).",
        "reference/stores.md": "[PostgreSQL](../howto/postgresql.md), or [Sizing](../howto/sizing.md).",
        "reference/frameworks.md": "[FastAPI](../howto/fastapi.md), or [all guides](../howto/README.md).",
        "explanation/states.md": "[Crashes](crashes.md), or the [protocol](protocol.md).",
        "explanation/request-path.md": "[Protocol](protocol.md), or [Security](security.md).",
    }
)
"""The last line of each generated page: where its readers go next."""


def _leading_on(name: str, page: Callable[[], str]) -> Callable[[], str]:
    return lambda: f"{page().rstrip()}\n\n**Next:** {_NEXT[name]}\n" if name in _NEXT else page()


_WRITERS: Final[Mapping[str, Callable[[], str]]] = {
    "reference/settings.md": settings.page,
    "../src/oncekey/options.py": settings.options,
    "../src/oncekey/core/settings.py": settings.settings,
    "reference/problems.md": problems.page,
    "reference/headers.md": headers.page,
    "reference/cli.md": cli.page,
    "reference/schema.md": schema.page,
    "reference/conformance.md": conformance.page,
    "reference/stores.md": stores.page,
    "reference/frameworks.md": frameworks.page,
    "explanation/states.md": states.page,
    "explanation/request-path.md": request_path.page,
    "explanation/states.svg": drawing.states,
    "explanation/architecture.svg": drawing.layers,
}

PAGES: Final[Mapping[str, Callable[[], str]]] = MappingProxyType(
    {name: _leading_on(name, page) for name, page in _WRITERS.items()}
)
"""Files in the folder of the documentation, and the functions that write them."""
