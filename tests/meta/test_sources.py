"""What every file of the repository promises: no machine's paths, modules of one idea, each explained."""

from __future__ import annotations

import ast
import re
import subprocess
import tomllib
from collections import defaultdict
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
LIBRARY = ROOT / "src" / "oncekey"
MODULES = sorted([*LIBRARY.rglob("*.py"), *(ROOT / "packages").rglob("src/**/*.py")])
LONGEST_MODULE = 600
LARGEST_SHARE_OF_IMPORTS = 0.07
DEEPEST_PACKAGE = 2
STORES_OF_REQUESTS = ("src/oncekey/databases/redis/talk.py", "examples/sqlite_cells.py")
LONGEST_STORE = 400
LAYERS = ("cli", "once", "workers", "frameworks", "engine", "ports", "ops", "core")


FOR_USERS = {"alembic", "cells", "flask", "litestar", "mcp", "options", "reconcile", "sealing"}
"""The modules that users import by their names, besides packages and what `oncekey` itself exports."""


PUBLIC = (
    "oncekey",
    "oncekey.cells",
    "oncekey.observe.events",
    "oncekey.reconcile",
    "oncekey.sealing",
    "oncekey_check",
    "oncekey_client",
    "oncekey_contract",
    "oncekey_demo.checker",
    "oncekey_demo.history",
)
"""The modules whose classes users import by name."""


def _files() -> list[Path]:
    """Return what is tracked or about to be: git's view where there is git, else the folders of a release."""
    if (ROOT / ".git").exists():
        listing = ["ls-files", "-z", "--cached", "--others", "--exclude-standard"]
        # A checkout that another account owns is still a checkout.
        command = ["git", "-c", f"safe.directory={ROOT}", "-C", str(ROOT), *listing]
        shown = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        paths = [ROOT / name for name in shown.split("\0") if name]
    else:
        paths = [path for folder in ("src", "packages", "tests", "docs") for path in (ROOT / folder).rglob("*")]
        paths = [path for path in [*paths, *ROOT.glob("*.*")] if "__pycache__" not in path.parts]
    return [path for path in paths if path.is_file()]


def _private_paths(root: Path) -> re.Pattern[str]:
    """Match absolute paths of a person's or a build's folders; `root` is where the repository lies now."""
    homes = [rf"/{name}/[\w.]" for name in ("root", "home", "Users")]
    here = re.escape(str(root)) + r"(?![\w-])"
    return re.compile(rf"(?<![\w.-])(?:{'|'.join([*homes, here])})")


def _text(path: Path) -> str:
    content = path.read_bytes()
    return "" if b"\0" in content else content.decode("utf-8")


def test_import_lines_stay_below_the_maximum_share() -> None:
    # crumbs import each other: their share of the lines shows them
    lines = imports = 0
    for path in (module for module in MODULES if "generated" not in module.parts):
        text = path.read_text(encoding="utf-8")
        lines += len(text.splitlines())
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.Import | ast.ImportFrom):
                imports += (node.end_lineno or node.lineno) - node.lineno + 1
    assert imports / lines < LARGEST_SHARE_OF_IMPORTS


def test_make_check_lets_dependencies_point_one_way_only() -> None:
    # R58
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    (layers,) = (contract for contract in contracts if contract.get("containers") == ["oncekey"])
    assert layers["exhaustive"]
    order = [layer.split(" ") for layer in layers["layers"]]
    depths = [next(depth for depth, names in enumerate(order) if name in names) for name in LAYERS]
    assert depths == sorted(set(depths))
    assert "lint-imports" in (ROOT / "Makefile").read_text().partition("\ncheck:")[2].partition("\n\n")[0]


def _methods(folder: str, *, of_protocols: bool) -> Iterator[tuple[str, str, str | None]]:
    """Public methods of public classes: where each is, its name, and its docstring."""
    for path in sorted((LIBRARY / folder).rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                protocol = any(ast.unparse(base).startswith("Protocol") for base in node.bases)
                for method in node.body if protocol is of_protocols else ():
                    if not isinstance(method, ast.FunctionDef | ast.AsyncFunctionDef):
                        continue
                    # A body that is only a docstring does nothing, and the sentence is there instead of `pass`.
                    if not method.name.startswith("_") and (of_protocols or len(method.body) > 1):
                        yield f"{path.relative_to(ROOT)}:{method.lineno}", method.name, ast.get_docstring(method)


def test_protocol_methods_are_documented_only_in_the_protocol() -> None:
    described: dict[str, set[str | None]] = defaultdict(set)
    for _, name, text in _methods("", of_protocols=True):
        described[name].add(text)
    for folder in ("stores", "databases"):
        for where, name, text in _methods(folder, of_protocols=False):
            if text is None:
                assert described[name] - {None}, f"{where}: no protocol describes {name}, so it needs a docstring"
            else:
                assert text not in described[name], f"{where}: a protocol describes {name} with the same words"


def test_packages_are_not_nested_too_deeply() -> None:
    # Django looks for its commands at `management/commands`; what is generated stays beside its source
    deep = {path.parent.relative_to(LIBRARY) for path in LIBRARY.rglob("*.py") if path.parent.name != "generated"}
    assert {str(one) for one in deep if len(one.parts) > DEEPEST_PACKAGE} == {"django/management/commands"}


def test_top_level_modules_are_the_public_ones() -> None:
    assert {path.stem for path in LIBRARY.glob("*.py")} == {"__init__", *FOR_USERS}


def test_public_class_names_are_unique() -> None:
    classes: dict[str, set[type]] = defaultdict(set)
    for name in PUBLIC:
        module = import_module(name)
        for one in getattr(module, "__all__", None) or vars(module):
            found = getattr(module, one)
            if (
                isinstance(found, type)
                and not one.startswith("_")
                and found.__module__.split(".")[0].startswith("oncekey")
            ):
                classes[one].add(found)
    assert {name: found for name, found in classes.items() if len(found) > 1} == {}


def test_no_file_names_a_private_folder() -> None:
    pattern = _private_paths(ROOT)
    files = _files()
    assert ROOT / "pyproject.toml" in files
    found = [str(path.relative_to(ROOT)) for path in files if pattern.search(_text(path))]
    assert found == []


@pytest.mark.parametrize(
    ("text", "private"),
    [
        ("see {0}root/.cache", True),
        ("'{0}home/ann/code'", True),
        ("{0}Users/ann", True),
        ("sqlite:{0}{0}{0}{0}root{0}demo.db", True),
        ("{0}builds{0}7/src/oncekey", True),
        ("{0}builds{0}7", True),
        ("{0}builds{0}70/src", False),
        ("https:{0}{0}docs.example{0}home{0}index", False),
        ("docs{0}home{0}index", False),
        ("GET {0}homes", False),
    ],
)
def test_private_path_pattern_matches_only_private_folders(text: str, private: bool) -> None:
    assert bool(_private_paths(Path("/builds/7")).search(text.format("/"))) is private


def test_every_module_is_short_enough_to_hold_one_idea() -> None:
    lengths = {str(path.relative_to(ROOT)): len(path.read_text().splitlines()) for path in MODULES}
    assert lengths
    assert {name: lines for name, lines in lengths.items() if lines > LONGEST_MODULE} == {}


def test_every_request_store_is_shorter_than_its_limit() -> None:
    """What counts is said by `docs/howto/write-a-store.md`."""
    lengths = {name: len((ROOT / name).read_text().splitlines()) for name in STORES_OF_REQUESTS}
    assert {name: lines for name, lines in lengths.items() if lines >= LONGEST_STORE} == {}


def test_every_module_has_a_docstring() -> None:
    mute = [str(path.relative_to(ROOT)) for path in MODULES if not ast.get_docstring(ast.parse(path.read_bytes()))]
    assert mute == []


def test_gitignore_covers_files_of_make_run_and_the_tutorial(tmp_path):
    page = (ROOT / "docs" / "tutorial.md").read_text()
    made = {"oncekey-demo.db", "oncekey-demo.db-wal", "oncekey-demo-provider.db", "oncekey.db"}
    made |= set(re.findall(r"> (\w+\.json)", page)) | set(re.findall(r"^# (\w+\.py)$", page, re.MULTILINE))
    made |= set(re.findall(r"sqlite:///([\w-]+\.db)", page))
    assert {"order.json", "shop.py", "shop.db"} <= made
    subprocess.run(["git", "init", "--quiet", str(tmp_path)], check=True)
    (tmp_path / ".gitignore").write_text((ROOT / ".gitignore").read_text())
    command = ["git", "-C", str(tmp_path), "check-ignore", *sorted(made)]
    ignored = subprocess.run(command, check=False, capture_output=True, text=True).stdout.split()
    assert ignored == sorted(made)
