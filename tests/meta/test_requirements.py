"""Every requirement has a test that cites it, or a page that is the requirement itself."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from harness.pages import ROOT

HIGHEST = 275
CITED = re.compile(r"\bR([1-9][0-9]{0,2})\b(?:(?:-| to )R([1-9][0-9]{0,2})\b)?")
LONGEST_RANGE = 13
"""A range stands for the requirements that one test shows, such as a table of counters."""

PAGES = {
    30: ("howto/tenant-scope.md", "There is no foreign key from a record"),
    94: ("explanation/limits.md", "## Identical answers are our contract"),
    109: ("explanation/limits.md", "## The handler must be right by itself"),
    183: ("howto/redis.md", "## What can be lost"),
    197: ("explanation/security.md", "- TLS in front of the application"),
    234: ("explanation/decision-guide.md", "# Decision guide"),
    235: ("explanation/one-request.md", "# One request, from the first byte to the last"),
    238: ("howto/operators.md", "# Settle things by hand"),
    239: ("explanation/non-goals.md", "# What it is not for"),
    240: ("index.md", "# oncekey"),
}
"""Requirements that ask for a page and nothing else, with the page and words of it."""


def cited_in(text: str) -> set[int]:
    """The numbers that a test's source names; a range names all of its own."""
    found: set[int] = set()
    for first, last in CITED.findall(text):
        found.update(range(int(first), int(last or first) + 1))
    return found


def test_every_requirement_is_cited_by_a_test_or_is_a_page() -> None:
    sources = [path for path in (ROOT / "tests").rglob("*.py") if path != Path(__file__)]
    cited = set().union(*(cited_in(path.read_text("utf-8")) for path in sources))
    assert sorted(set(range(1, HIGHEST + 1)) - cited - set(PAGES)) == []
    assert sorted(number for number in cited if number > HIGHEST) == []
    assert sorted(cited & set(PAGES)) == []  # a page that a test is about needs no line here


@pytest.mark.parametrize("number", sorted(PAGES))
def test_a_requirement_that_is_a_page_has_it(number: int) -> None:
    page, words = PAGES[number]
    assert words in (ROOT / "docs" / page).read_text("utf-8")


def test_no_test_claims_a_whole_area() -> None:
    for path in (ROOT / "tests").rglob("*.py"):
        for first, last in CITED.findall(path.read_text("utf-8")):
            assert int(last or first) - int(first) < LONGEST_RANGE, path


def test_citations_are_read() -> None:
    assert cited_in("# R1, R22 and R199-R201; R3 to R5") == {1, 3, 4, 5, 22, 199, 200, 201}
    assert cited_in("# PR12, R0, R1234, HR7") == set()
