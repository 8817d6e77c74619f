"""What a reader types works: the commands of README, tutorial and how-to guides, in order, with what they print."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest

from harness.pages import Page, pages
from harness.walkthrough import MissingToolError, Walkthrough, _tool

WALKED = [page for page in pages("README.md", "docs/tutorial.md", "docs/howto/*.md") if page.blocks("sh")]


@pytest.mark.parametrize("page", WALKED, ids=lambda page: page.name)
def test_every_command_works_and_prints_what_the_page_shows(
    page: Page, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    # Only a page that names a server starts it.
    dsn = cache(lambda: str(request.getfixturevalue("postgres_dsn")))
    mariadb = cache(lambda: str(request.getfixturevalue("mariadb_url")))
    with Walkthrough(page, tmp_path, dsn, mariadb=mariadb) as walkthrough:
        walkthrough.walk()


def test_missing_tool_fails_with_its_name() -> None:
    with pytest.raises(MissingToolError, match="need no-such-program: install it"):
        _tool("no-such-program")
