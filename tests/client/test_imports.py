"""An optional package is imported only in the module that is named after it; the rest needs none."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import oncekey
import oncekey_client

FOLDER = Path(oncekey_client.__file__).parent
ADAPTERS = {
    "httpx": {"httpx"},
    "requests": {"requests", "urllib3"},
    "aiohttp": {"aiohttp", "yarl"},
    "command": {"typer"},
}
PLAIN = sorted(path.stem for path in FOLDER.glob("*.py") if path.stem not in ADAPTERS)


def _imported(path: Path) -> set[str]:
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        match node:
            case ast.Import(names=found):
                names |= {alias.name for alias in found}
            case ast.ImportFrom(module=str(module)):
                names.add(module)
    return {name.partition(".")[0] for name in names} - set(sys.stdlib_module_names) - {"oncekey_client"}


@pytest.mark.parametrize("path", sorted(FOLDER.glob("*.py")), ids=lambda path: path.stem)
def test_client_module_imports_only_its_own_optional_package(path):
    assert _imported(path) <= ADAPTERS.get(path.stem, set())


def test_the_client_and_its_journal_work_without_any_package():
    blocked = "import sys; sys.modules.update(dict.fromkeys(['httpx', 'requests', 'aiohttp', 'urllib3']))\n"
    imports = "\n".join(f"import oncekey_client.{name}" for name in [*PLAIN, "httpx"] if name != "__init__")
    subprocess.run([sys.executable, "-c", blocked + imports], check=True)


@pytest.mark.parametrize("name", oncekey_client.__all__)
def test_client_exports_no_public_name_of_the_library(name):
    assert name not in oncekey.__all__


def test_every_error_is_an_error_of_the_client():
    errors = [name for name in oncekey_client.__all__ if name.endswith("Error")]
    assert len(errors) > 5
    assert all(issubclass(getattr(oncekey_client, name), oncekey_client.ClientError) for name in errors)
