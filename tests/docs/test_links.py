"""Every link between pages leads somewhere, and every page can be found."""

from __future__ import annotations

import importlib
import re
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest

from harness.pages import ROOT, Page, generator, pages

EVERY = pages("*.md", "contrib/*.md", "docs/**/*.md")
MOVED = importlib.import_module(f"{generator().__name__}.site").MOVED
"""Pages that were merged into others: the changelog, which is history, may name them still."""
ENTRANCES = ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "docs/adr/0000-template.md")


def _targets(page: Page) -> Iterator[tuple[str, Path, str]]:
    """Return the links that stay in the repository: as written, the file, the fragment."""
    for link in page.links():
        parts = urlsplit(link)
        if not parts.scheme and not parts.netloc:
            path = (page.path.parent / unquote(parts.path)).resolve() if parts.path else page.path
            if page.name == "CHANGELOG.md" and (new := MOVED.get(parts.path.removeprefix("docs/"))):
                name, _, fragment = new.partition("#")
                yield link, ROOT / "docs" / name, fragment
            else:
                yield link, path, parts.fragment


@pytest.mark.parametrize("page", EVERY, ids=lambda page: page.name)
def test_every_link_leads_to_a_file_and_a_heading(page: Page) -> None:
    broken = [
        link
        for link, path, fragment in _targets(page)
        if not path.exists()
        or not path.is_relative_to(ROOT)
        or (fragment and path.suffix == ".md" and fragment not in Page(path).anchors())
    ]
    assert broken == []


@pytest.mark.parametrize("page", EVERY, ids=lambda page: page.name)
def test_every_test_that_a_page_names_exists(page: Page) -> None:
    # R193, R236: a control without a test is a hope.
    named = re.findall(r"\[`(test_\w+)`\]\(([^)]+)\)", page.text)
    missing = [
        f"{name} in {file}"
        for name, file in named
        if not re.search(rf"^ *(?:async )?def {name}\(", (page.path.parent / file).read_text(), re.MULTILINE)
    ]
    assert missing == []


def test_every_page_is_linked_from_another_one() -> None:
    linked = {path for page in EVERY for _, path, _ in _targets(page) if path != page.path}
    assert [page.name for page in EVERY if page.path not in linked and page.name not in ENTRANCES] == []


@pytest.mark.parametrize("page", EVERY, ids=lambda page: page.name)
def test_external_links_use_https(page: Page) -> None:
    # The demo's own address is no site.
    plain = [link for link in page.links() if urlsplit(link).scheme == "http"]
    assert [link for link in plain if not re.match(r"http://(127\.0\.0\.1|localhost)[:/]", link)] == []


@pytest.mark.parametrize(("old", "new"), MOVED.items())
def test_moved_page_redirects_to_an_existing_heading(old: str, new: str) -> None:
    name, _, fragment = new.partition("#")
    assert not (ROOT / "docs" / old).exists()
    assert fragment in Page(ROOT / "docs" / name).anchors()


GUIDED = pages(
    "docs/index.md",
    "docs/tutorial.md",
    *(f"docs/{name}/*.md" for name in ("howto", "explanation", "reference", "runbooks", "contributing")),
)


@pytest.mark.parametrize("page", GUIDED, ids=lambda page: page.name)
def test_a_page_ends_with_a_next_step(page: Page) -> None:
    _, found, end = page.text.rpartition("\n\n**Next:**")
    assert found, "the last paragraph begins with **Next:**"
    assert 1 <= len(re.findall(r"\]\([^)]+\)", end)) <= 12
    assert "\n\n#" not in end, "the next step is the end of the page"
