"""The page of the protocol defines every code that source and documentation cite, and names tests that prove it."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from harness.pages import ROOT

PAGE = ROOT / "docs/explanation/protocol.md"
RULE = re.compile(r"^### (?P<code>[PLHOUDA]\d): .+\n(?P<text>(?:(?!^#).*\n)*)", re.MULTILINE)
HOLE = re.compile(r"^\| (?P<code>F\d+) \| S[012] \| .+ \| (?P<rule>\w\d) \| (?P<proof>.+) \|$", re.MULTILINE)
CITED = re.compile(r"(?<![\w#'\"`/-])[PLHOUDAF]\d{1,2}(?![\w'\"`])")
PRIVATE = re.compile(r"\b(?:R\d{1,3}|C\d{1,2}|E\d{1,2})\b(?=[,;:)\] .-]|$)")
FILES = re.compile(r"`((?:tests|src|packages)/[\w/-]+\.py)`")

RULES = {found["code"]: found["text"] for found in RULE.finditer(PAGE.read_text())}
HOLES = {found["code"]: (found["rule"], found["proof"]) for found in HOLE.finditer(PAGE.read_text())}
PROOFS = {code: FILES.findall(text.partition("Proved by")[2]) for code, text in RULES.items()}
PROOFS |= {code: FILES.findall(proof) for code, (_, proof) in HOLES.items()}


def _prose(path: Path) -> Iterator[str]:
    """The lines of a file in which people read: comments and docstrings of programs, all of a page."""
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".md":
        yield from text.splitlines()
    elif path.suffix == ".sql":
        yield from re.findall(r"--.*", text)
    else:
        yield from re.findall(r"#.*", text)
        for found in re.findall(r'"""(?s:.*?)"""', text):
            yield from found.splitlines()


def _sources(*folders: str) -> list[Path]:
    found = [path for folder in folders for end in ("py", "sql", "md") for path in (ROOT / folder).rglob(f"*.{end}")]
    assert found
    return [*found, ROOT / "README.md", ROOT / "CONTRIBUTING.md"]


def test_protocol_page_defines_every_rule_and_failure() -> None:
    counts = {"P": 7, "L": 8, "H": 7, "O": 5, "U": 3, "D": 1, "A": 4}
    assert [*RULES] == [f"{letter}{number}" for letter, last in counts.items() for number in range(1, last + 1)]
    assert [*HOLES] == [f"F{number}" for number in range(1, 43)]
    assert {rule for rule, _ in HOLES.values()} <= RULES.keys()


@pytest.mark.parametrize("code", PROOFS)
def test_proof_file_cites_the_rule_that_it_proves(code: str) -> None:
    assert PROOFS[code]
    for name in PROOFS[code]:
        text = (ROOT / name).read_text()
        ranges = re.findall(rf"\b{code[0]}(\d+)-{code[0]}(\d+)\b", text)
        among = any(int(first) <= int(code[1:]) <= int(last) for first, last in ranges)
        assert among or re.search(rf"\b{code}\b", text), f"{name} does not say {code}"


def test_every_code_in_the_source_is_defined() -> None:
    unknown = {
        (path.relative_to(ROOT).as_posix(), code)
        for path in _sources("src", "packages", "docs", "examples", "bench")
        for line in _prose(path)
        for code in CITED.findall(line)
        if code not in RULES and code not in HOLES
    }
    assert not unknown


def test_requirement_numbers_occur_only_in_tests() -> None:
    found = {
        (path.relative_to(ROOT).as_posix(), code)
        for path in _sources("src", "packages", "docs", "examples", "bench")
        for line in _prose(path)
        for code in PRIVATE.findall(line)
    }
    assert not found
