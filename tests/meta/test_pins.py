"""The requirement files pin by version and hash, and name no place to download from."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FILES = sorted((ROOT / "requirements").glob("*.txt"))

_REQUIREMENT = re.compile(r"[a-z0-9][a-z0-9-]*(\[[a-z0-9,-]+\])?==[A-Za-z0-9.+!]+( ; [\w .'=<>!()]+)? \\")
_HASH = re.compile(r"    --hash=sha256:[0-9a-f]{64}( \\)?")
_ORIGIN = re.compile(
    r"    # +(via ?)?(-c requirements/(run|dev)\.txt|[a-z0-9-]+(\[[a-z0-9,-]+\])?"
    r"( \((packages/[a-z-]+/)?pyproject\.toml(:\w+)?\))?)?"
)


# The demo and the contract need the library, which is installed from its folder.
_LEFT_OUT = "\n# The following packages were excluded from the output:\n# oncekey\n"


def _offences(text: str) -> list[str]:
    """Return the lines that are neither a pinned requirement, nor a hash, nor a note of who wants it."""
    grammar = (_REQUIREMENT, _HASH, _ORIGIN)
    lines = text.removesuffix(_LEFT_OUT).splitlines()
    return [line for line in lines if not any(rule.fullmatch(line) for rule in grammar)]


def test_all_requirement_files_exist() -> None:
    assert [path.name for path in FILES] == ["dev.txt", "failover.txt", "lowest.txt", "run.txt"]


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_every_line_is_a_pin_a_hash_or_its_origin(path: Path) -> None:
    assert _offences(path.read_text()) == []


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_every_requirement_has_a_hash(path: Path) -> None:
    lines = path.read_text().splitlines()
    unhashed = [
        line
        for line, following in zip(lines, [*lines[1:], ""], strict=True)
        if _REQUIREMENT.fullmatch(line) and not _HASH.fullmatch(following)
    ]
    assert unhashed == []


@pytest.mark.parametrize(
    "line",
    [
        "--index-url https://registry.example/simple",
        "--extra-index-url http://10.0.0.1/simple",
        "--find-links wheels.example",
        "    # from https://registry.example/simple",
        "    # via registry.example/simple",
        "package @ https://files.example/package.whl",
        "package>=1",
        "package",
    ],
)
def test_pin_check_rejects_urls_and_loose_pins(line: str) -> None:
    assert _offences(line) == [line]


def _pins(name: str) -> dict[str, set[str]]:
    found: dict[str, set[str]] = {}
    for line in (ROOT / "requirements" / name).read_text().splitlines():
        if _REQUIREMENT.fullmatch(line):
            package, _, rest = line.partition("==")
            found.setdefault(package.partition("[")[0], set()).add(rest.split()[0])
    return found


def test_run_and_dev_requirements_pin_the_same_versions() -> None:
    dev, run = _pins("dev.txt"), _pins("run.txt")
    assert run
    assert {name: dev.get(name) for name in run} == run


def _promised() -> list[tuple[str, str]]:
    """Every package that one of our distributions needs, with the lowest version that it promises to work with."""
    wanted: list[str] = []
    for file in (ROOT / "pyproject.toml", *sorted((ROOT / "packages").glob("*/pyproject.toml"))):
        project = tomllib.loads(file.read_text())["project"]
        wanted += project["dependencies"]
        wanted += [wish for wishes in project.get("optional-dependencies", {}).values() for wish in wishes]
    wanted = [wish for wish in wanted if not re.match(r"oncekey[\[=]", wish)]
    found = [re.match(r"([a-z0-9-]+)(?:\[\w+\])?>=([\d.]+)", wish) for wish in wanted]
    assert all(found), wanted
    return [(one[1], one[2]) for one in found if one is not None]


@pytest.mark.parametrize(("package", "lowest"), sorted(set(_promised())))
def test_lowest_declared_version_is_the_tested_one(package: str, lowest: str) -> None:
    # A version that was withdrawn from its registry cannot be tested, so it cannot be promised either.
    (tested,) = _pins("lowest.txt")[package]
    assert re.sub(r"(\.0)+$", "", tested) == re.sub(r"(\.0)+$", "", lowest), f"say >={tested}, or run make pins"
