"""The requirement files pin by version and hash, and name no place to download from."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FILES = sorted((ROOT / "requirements").glob("*.txt"))

_REQUIREMENT = re.compile(r"[a-z0-9][a-z0-9-]*(\[[a-z0-9,-]+\])?==[A-Za-z0-9.+!]+( ; [\w .'=<>!()]+)? \\")
_HASH = re.compile(r"    --hash=sha256:[0-9a-f]{64}( \\)?")
_ORIGIN = re.compile(
    r"    # +(via ?)?(-c requirements/run\.txt|[a-z0-9-]+(\[[a-z0-9,-]+\])?( \(pyproject\.toml(:\w+)?\))?)?"
)


def _offences(text: str) -> list[str]:
    """Return the lines that are neither a pinned requirement, nor a hash, nor a note of who wants it."""
    grammar = (_REQUIREMENT, _HASH, _ORIGIN)
    return [line for line in text.splitlines() if not any(rule.fullmatch(line) for rule in grammar)]


def test_both_files_are_there() -> None:
    assert [path.name for path in FILES] == ["dev.txt", "run.txt"]


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
def test_the_grammar_has_no_room_for_an_address_or_a_loose_pin(line: str) -> None:
    assert _offences(line) == [line]


def test_both_files_agree_on_every_version() -> None:
    def pins(path: Path) -> dict[str, set[str]]:
        found: dict[str, set[str]] = {}
        for line in path.read_text().splitlines():
            if _REQUIREMENT.fullmatch(line):
                name, _, rest = line.partition("==")
                found.setdefault(name, set()).add(rest.split()[0])
        return found

    dev, run = (pins(path) for path in FILES)
    assert run
    assert {name: dev.get(name) for name in run} == run
