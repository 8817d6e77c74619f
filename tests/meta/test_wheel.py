"""The wheel holds what the code reads, and its base works with nothing but the standard library."""

from __future__ import annotations

import email
import email.message
import re
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

from harness.alone import ROOT, built

SOURCE = ROOT / "src"


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return built("oncekey", tmp_path_factory.mktemp("wheel"))


def _names(wheel: Path) -> set[str]:
    with zipfile.ZipFile(wheel) as archive:
        return set(archive.namelist())


def test_every_file_of_the_package_is_in_the_wheel(wheel: Path) -> None:
    source = {
        path.relative_to(SOURCE).as_posix()
        for path in (SOURCE / "oncekey").rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    packed = {name for name in _names(wheel) if not name.startswith("oncekey-")}
    assert packed == source
    assert "oncekey/py.typed" in packed
    for store in ("sqlite", "postgres"):
        assert f"oncekey/databases/{store}/queries.sql" in packed
        assert any(name.startswith(f"oncekey/databases/{store}/migrations/0001_") for name in packed)


def _metadata(wheel: Path) -> email.message.Message:
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        return email.message_from_bytes(archive.read(name))


def test_links_of_the_description_work_without_the_repository_beside_it(wheel: Path) -> None:
    metadata = _metadata(wheel)
    description = metadata.get_payload(decode=True).decode()
    targets = re.findall(r"\]\(([^)\s]+)\)", description)
    assert [target for target in targets if not target.startswith("https://")] == []
    named = dict(line.split(", ", 1) for line in metadata.get_all("Project-URL", []))
    files = [target.removeprefix(f"{named['Repository']}/blob/main/") for target in targets]
    ours = [file.partition("#")[0] for file, target in zip(files, targets, strict=True) if file != target]
    assert len(ours) > 20
    assert [file for file in ours if not (ROOT / file).is_file()] == []


def test_the_base_depends_on_nothing(wheel: Path) -> None:
    required = _metadata(wheel).get_all("Requires-Dist", [])
    assert required
    assert [line for line in required if "extra ==" not in line] == []


def test_the_base_imports_without_any_third_party_package(wheel: Path) -> None:
    modules = sorted(
        name.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
        for name in _names(wheel)
        if name.endswith(".py") and name.startswith(("oncekey/__init__", "oncekey/core/", "oncekey/flow"))
    )
    assert {"oncekey", "oncekey.core.model", "oncekey.core.flow"} <= set(modules)
    # Isolated and without site, so that only the standard library and the wheel can be seen.
    program = (
        "import importlib, sys; sys.path.insert(0, sys.argv[1])\n"
        "for name in sys.argv[2:]: importlib.import_module(name)\n"
        "print(sys.modules['oncekey'].__file__)\n"
    )
    command = [sys.executable, "-I", "-S", "-W", "error", "-c", program, str(wheel), *modules]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(str(wheel))


def test_the_source_distribution_holds_the_files_for_operators(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "hatchling", "build", "-t", "sdist", "-d", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    (built,) = tmp_path.glob("*.tar.gz")
    with tarfile.open(built) as archive:
        packed = {name.partition("/")[2] for name in archive.getnames()}
    for folder in ("contrib", "docs/runbooks"):
        ours = {path.relative_to(ROOT).as_posix() for path in (ROOT / folder).rglob("*") if path.is_file()}
        assert ours
        assert ours <= packed
