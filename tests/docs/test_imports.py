"""What the pages import is what the package exports: nobody has to know in which module something lives."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path

import pytest

import oncekey

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "packages").glob("*/README.md")), *sorted((ROOT / "docs").rglob("*.md"))]
BLOCK = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)
OF_THEIR_OWN = (
    "oncekey.alembic",
    "oncekey.console",
    "oncekey.django",
    "oncekey.litestar",
    "oncekey.flask",
    "oncekey.mcp",
    "oncekey.observe",
    "oncekey.sealing",
    "oncekey.testing",
    "oncekey.cells",
    "oncekey.databases.cells",
    "oncekey.databases.dynamodb.driver",
    "oncekey.stores.cells",
)
"""Not every service needs these: what sends requests, observes and operates them, tests them, and makes a store."""


BESIDE = ("oncekey_check", "oncekey_client", "oncekey_contract", "oncekey_demo")
"""The other distributions, whose modules are all for users."""


def imports(page: Path) -> Iterator[tuple[str, str]]:
    """Modules of ours and the names that a page takes from them."""
    for block in BLOCK.findall(page.read_text()):
        for node in ast.walk(ast.parse(block)):
            if isinstance(node, ast.ImportFrom) and node.module is not None:
                yield from ((node.module, alias.name) for alias in node.names)
            elif isinstance(node, ast.Import):
                yield from ((alias.name, "") for alias in node.names)


def ours() -> list[tuple[str, str, str]]:
    return sorted(
        {
            (str(page.relative_to(ROOT)), module, name)
            for page in PAGES
            for module, name in imports(page)
            if module.partition(".")[0] in {"oncekey", *BESIDE}
        }
    )


def test_import_scan_finds_imports_in_the_pages() -> None:
    assert len(ours()) > 40
    assert ("docs/howto/unknown.md", "oncekey", "Sighting") in ours()


@pytest.mark.parametrize(("page", "module", "name"), ours())
def test_pages_import_only_public_names(page: str, module: str, name: str) -> None:
    if module == "oncekey":
        assert name == "" or name in oncekey.__all__
    else:
        assert module.startswith((*OF_THEIR_OWN, *BESIDE)), f"{page} imports from {module}, which is nobody's to know"
    assert name == "" or hasattr(import_module(module), name)


def test_every_name_in_all_exists_once() -> None:
    assert sorted(set(oncekey.__all__)) == sorted(oncekey.__all__)
    assert [name for name in oncekey.__all__ if not hasattr(oncekey, name)] == []
