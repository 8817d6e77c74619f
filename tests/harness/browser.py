"""A real Chromium for the tests of pages: the machine's own, driven by Playwright."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from playwright.sync_api import Browser, Playwright, sync_playwright

VARIABLE = "ONCEKEY_TEST_BROWSER"
"""The environment variable that names the program, if it is none of the usual ones."""

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
MISSING = (
    f"no Chromium: set {VARIABLE} to its path, install it (Debian: apt-get install chromium), "
    "or let Playwright fetch one (playwright install chromium)"
)
# Root and containers have no sandbox of their own, and a small /dev/shm; the pages are ours.
_ARGUMENTS = ("--no-sandbox", "--disable-dev-shm-usage", "--disable-gpu")


class BrowserMissingError(Exception):
    """There is no Chromium on this machine; a test that needs one fails, and is not skipped."""


def program(playwrights_own: str | None = None) -> str:
    """The path of a Chromium: the named one, one on PATH, or the one that Playwright has fetched."""
    named = os.environ.get(VARIABLE)
    if named:
        found = shutil.which(named)
        if found is None:
            raise BrowserMissingError(f"{VARIABLE} is {named!r}, and that cannot be run")
        return found
    for name in NAMES:
        found = shutil.which(name)
        if found is not None:
            return found
    if playwrights_own and Path(playwrights_own).exists():
        return playwrights_own
    raise BrowserMissingError(MISSING)


@contextmanager
def chromium() -> Iterator[Browser]:
    """A browser that is closed afterwards."""
    with sync_playwright() as playwright:
        browser = _launch(playwright)
        try:
            yield browser
        finally:
            browser.close()


def _launch(playwright: Playwright) -> Browser:
    return playwright.chromium.launch(
        executable_path=program(playwright.chromium.executable_path), args=list(_ARGUMENTS)
    )
