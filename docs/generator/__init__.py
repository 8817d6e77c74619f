"""The generated half of the documentation: pages whose facts come from the code, so that they cannot drift.

`python -m docs.generator` in the repository's folder writes them; a test compares them with what is committed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Final

from . import cli, conformance, headers, problems, schema, settings

FOLDER: Final = Path(__file__).resolve().parents[1] / "reference"

PAGES: Final[Mapping[str, Callable[[], str]]] = MappingProxyType(
    {
        "settings.md": settings.page,
        "problems.md": problems.page,
        "headers.md": headers.page,
        "cli.md": cli.page,
        "schema.md": schema.page,
        "conformance.md": conformance.page,
    }
)
"""File names and what writes them."""
