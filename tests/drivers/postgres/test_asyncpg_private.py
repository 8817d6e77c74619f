"""The private parts of asyncpg that oncekey uses: one module uses them, and every supported version has them.

`make lowest` runs this file with the lowest version, `make test-more` with the newest.
"""

from __future__ import annotations

import ast
import inspect
import re
from importlib.metadata import version
from pathlib import Path

import asyncpg
import pytest
from asyncpg.connresource import ConnectionResource
from asyncpg.protocol.protocol import BaseProtocol
from asyncpg.transaction import Transaction, TransactionState

from oncekey.databases.postgres import asyncpg_connections

ROOT = Path(__file__).parents[3]
SOURCE = ROOT / "src" / "oncekey"
FIELDS = {
    "_protocol": asyncpg.Connection,
    "_top_xact": asyncpg.Connection,
    "_pool_release_ctr": asyncpg.Connection,
    "_listeners": asyncpg.Connection,
    "_log_listeners": asyncpg.Connection,
    "_state": Transaction,
    "_con_release_ctr": ConnectionResource,
}
METHODS = {
    "_cancel": (asyncpg.Connection, 1),
    "_on_release": (asyncpg.Connection, 0),
    "_process_log_message": (asyncpg.Connection, 2),
}
OF_THE_PROTOCOL = {"_is_cancelling"}


@pytest.mark.parametrize(("name", "owner"), FIELDS.items(), ids=FIELDS)
def test_this_version_has_the_field(name, owner):
    assert name in owner.__slots__


@pytest.mark.parametrize(("name", "owner", "arguments"), [(name, *rest) for name, rest in METHODS.items()], ids=METHODS)
def test_this_version_has_the_method(name, owner, arguments):
    inspect.signature(getattr(owner, name)).bind(*range(1 + arguments))


@pytest.mark.parametrize("name", OF_THE_PROTOCOL)
def test_this_versions_protocol_has_the_method(name):
    assert callable(getattr(BaseProtocol, name))


def test_installed_asyncpg_transaction_has_the_expected_signature():
    parameters = ["self", "connection", "isolation", "readonly", "deferrable"]
    assert list(inspect.signature(Transaction.__init__).parameters) == parameters
    assert TransactionState.STARTED.name == "STARTED"


def test_one_module_uses_private_parts_and_this_file_lists_them():
    home = Path(asyncpg_connections.__file__)
    assert _private_names(home) == {*FIELDS, *METHODS, *OF_THE_PROTOCOL}
    others = [path for path in SOURCE.rglob("*.py") if path != home and _imports_asyncpg(path)]
    assert others
    assert {path.name: names for path in others if (names := _private_names(path))} == {}


def test_the_lowest_and_the_newest_version_are_tried():
    lowest, newest = (_pin(f"requirements/{name}.txt") for name in ("lowest", "dev"))
    assert (
        re.search(r'^asyncpg = \["asyncpg>=([0-9.]+)"\]', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)[1]
        in lowest
    )
    assert version("asyncpg") in {lowest, newest}
    assert lowest != newest


def _pin(path: str) -> str:
    return re.search(r"^asyncpg==([0-9.]+)", (ROOT / path).read_text(), re.MULTILINE)[1]


def _imports_asyncpg(path: Path) -> bool:
    return re.search(r"^\s*(import|from) asyncpg\b", path.read_text(), re.MULTILINE) is not None


def _private_names(path: Path) -> set[str]:
    """Private attributes of what is not ours: those that no class of the module sets or defines itself."""
    tree = ast.parse(path.read_text())
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and node.attr.startswith("_") and not node.attr.startswith("__"):
            found.add(node.attr)
    return found - _own_names(tree)


def _own_names(tree: ast.Module) -> set[str]:
    """What the classes of a module define and what their constructors set."""
    own: set[str] = set()
    for made in (node for node in ast.walk(tree) if isinstance(node, ast.ClassDef)):
        methods = [one for one in made.body if isinstance(one, ast.FunctionDef | ast.AsyncFunctionDef)]
        own |= {one.name for one in methods if not hasattr(asyncpg.Connection, one.name)}
        for constructor in (one for one in methods if one.name == "__init__"):
            own |= {
                node.attr
                for node in ast.walk(constructor)
                if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store)
            }
    return own
