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

PAGES: Final[Mapping[str, Callable[[], str]]] = MappingProxyType(
    {
        "reference/settings.md": settings.page,
        "../src/oncekey/options.py": settings.options,
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
)
"""Files in the folder of the documentation, and what writes them."""
