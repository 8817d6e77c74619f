"""The lists that people print: anti-patterns, threats, and the checklist for production, each line with its proof."""

from __future__ import annotations

import re

import pytest

from harness.pages import ROOT
from oncekey_check.catalogue import CLAUSES

CHECKLIST = (ROOT / "docs" / "howto" / "production-checklist.md").read_text("utf-8")
ANTI_PATTERNS = (ROOT / "docs" / "explanation" / "decision-guide.md").read_text("utf-8")
THREATS = (ROOT / "docs" / "explanation" / "security.md").read_text("utf-8")

OF_THE_PATTERN = (
    "Of two simultaneous identical `POST` requests",
    "The same key with another body",
    "Two tenants send the same key",
    "The same key and payload with another authentication",
    "Tenant and key are the unique constraint",
    "Of concurrent requests on different nodes",
    "409 has `Retry-After`",
    "A `POST` without `Idempotency-Key` returns 400",
    "A worker that dies after the external effect",
    "With the key store down",
    "After a first 500",
    "Every state-changing endpoint of a flow",
    "A retry after the `ttl` is a new request",
    "The reaper deletes expired keys without locking",
    "Metrics and alerts for duplicates and replays",
    "The rate of duplicates is tracked per tenant",
    "Keys that are stuck are resolved",
    "Tenant B cannot read the cached response of tenant A",
)
"""The eighteen lines of the published checklist, in their order."""


def lines_of(page: str) -> list[str]:
    """The lines to tick off, each as one line of text."""
    found = re.findall(r"^- \[ \] (.*(?:\n      .*)*)", page, re.MULTILINE)
    return [" ".join(one.split()) for one in found]


def test_every_checklist_line_names_its_verification() -> None:
    for line in lines_of(CHECKLIST):
        assert " → " in line, line


def test_published_checklist_contains_every_line_of_the_pattern() -> None:
    # R273
    section = CHECKLIST.partition("## Published verification checklist")[2]
    found = lines_of(section)
    assert len(found) == len(OF_THE_PATTERN)
    for line, words in zip(found, OF_THE_PATTERN, strict=True):
        assert line.startswith(words)


def test_the_clauses_that_the_checklist_names_exist() -> None:
    section = CHECKLIST.partition("## Published verification checklist")[2]
    named = set(
        re.findall(
            r"`((?:races|replays|mismatches|tenants|instances|keys|crashes|outages|failures)\.[a-z0-9-]+)`", section
        )
    )
    assert len(named) > 9
    assert named <= {clause.id for clause in CLAUSES}


@pytest.mark.parametrize(
    "words",
    ["Two side effects in one phase", "No schema version is stored with the response", "| Storage |", "| Cleanup |"],
)
def test_the_anti_patterns_have_these_lines(words: str) -> None:
    # R272
    assert words in ANTI_PATTERNS


@pytest.mark.parametrize(("page", "heading"), [(ANTI_PATTERNS, "| Mistake |"), (THREATS, "| Threat |")])
def test_every_row_leads_to_a_test_that_exists(page: str, heading: str) -> None:
    # R193, R236, R265
    rows = page.partition(heading)[2].partition("\n\n")[0].splitlines()[2:]
    assert len(rows) > 12
    for row in rows:
        name, path = re.findall(r"\[`(test_\w+)`\]\(\.\./\.\./([\w/.]+)\)", row)[-1]
        assert re.search(rf"def {name}\(", (ROOT / path).read_text("utf-8")), row


def test_diagrams_are_shipped() -> None:
    # R265
    for name in ("architecture.svg", "states.svg"):
        assert (ROOT / "docs" / "explanation" / name).read_text("utf-8").startswith("<svg")
