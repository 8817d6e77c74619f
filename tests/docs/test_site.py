"""The documentation as a site: everything is in it, every link leads somewhere, and nobody else is asked."""

from __future__ import annotations

import importlib
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import pytest

import oncekey
from harness.browser import chromium
from harness.pages import ROOT, generator, pages
from harness.patience import PATIENCE

SITE = importlib.import_module(f"{generator().__name__}.site")


class _Quiet(SimpleHTTPRequestHandler):
    def log_message(self, *args: object) -> None:
        del args


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The site, built as `make docs` builds it: strictly."""
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=PATIENCE)
    assert done.returncode == 0, done.stderr
    return folder


@pytest.fixture(scope="module")
def address(site: Path) -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(_Quiet, directory=str(site))) as server:
        thread = Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


def test_site_contains_every_documentation_page(site: Path) -> None:
    for page in pages("docs/*.md", "docs/*/*.md"):
        name = page.name.removeprefix("docs/").replace("README.md", "index.html").replace(".md", ".html")
        assert (site / name).exists() == (page.path.name != "0000-template.md"), name


def test_moved_page_redirects_to_its_new_url(site: Path) -> None:
    for old, new in SITE.MOVED.items():
        page = (site / old).with_suffix(".html")
        (target,) = re.findall(r'url=([^"]+)"', page.read_text())
        file, _, fragment = target.partition("#")
        assert f'id="{fragment}"' in (page.parent / file).read_text(), new


def test_decision_records_are_only_reachable_through_their_index(site: Path) -> None:
    index = json.loads((site / "search" / "search_index.json").read_text())
    pages = {entry["location"].partition("#")[0] for entry in index["docs"]}
    assert {page for page in pages if page.startswith("adr/")} == {"adr/index.html"}
    assert "adr/0001" not in (site / "index.html").read_text()


def test_python_reference_lists_public_names_in_order_without_rule_numbers(site: Path) -> None:
    shown = (site / "reference" / "python" / "oncekey.html").read_text()
    assert re.findall(r'<h2 id="oncekey\.(\w+)"', shown) == list(SITE.ORDER_OF_USE)
    assert set(SITE.ORDER_OF_USE) == set(oncekey.__all__) - {"__version__"}
    for name, members in SITE.METHODS.items():
        assert re.findall(rf'<h3 id="oncekey\.{name}\.(\w+)"', shown) == list(members)
    assert re.findall(r"\([A-Z]\d{1,2}(?:, [A-Z]\d{1,2})*\)", shown) == []


def test_what_pages_import_is_in_the_reference(site: Path) -> None:
    for page in pages("README.md", "docs/howto/*.md", "docs/tutorial.md"):
        for block in page.blocks("python"):
            for module, names in re.findall(r"^from (oncekey[\w.]*) import ([\w, ]+)$", block.text, re.MULTILINE):
                if module.startswith(("oncekey.core", "oncekey.stores", "oncekey.databases")):
                    continue  # for those who write a store; the pages say what they are
                assert module in SITE.MODULES, f"{page.name} imports {module}"
                shown = (site / "reference" / "python" / f"{module}.html").read_text()
                for name in names.split(", "):
                    assert f'id="{module}.{name}"' in shown, f"{page.name} imports {module}.{name}"


def test_the_reference_has_every_method_that_a_page_calls() -> None:
    for page in pages("README.md", "docs/howto/*.md", "docs/tutorial.md"):
        for block in page.blocks("python"):
            for variable, name in (("once", "Once"), ("op", "Operation")):
                called = set(re.findall(rf"\b{variable}\.([a-z_]+)\b", block.text)) & set(dir(getattr(oncekey, name)))
                assert called <= set(SITE.METHODS[name]), f"{page.name} uses {name}"


def test_runbook_contents_list_its_alerts(site: Path) -> None:
    contents = (site / "runbooks" / "workers.html").read_text().partition('aria-label="Table of contents"')[2]
    listed = re.findall(r'href="#([\w-]+)" class="md-nav__link"', contents.partition("</nav>")[0])
    assert listed == ["oncekeynoworker", "oncekeysweeperbehind", "oncekeycompleterbehind", "oncekeyreaperbehind"]


def test_site_search_finds_a_page_without_external_requests(address: str) -> None:
    asked: list[str] = []
    with chromium() as browser:
        page = browser.new_page(color_scheme="dark")
        page.on("request", lambda request: asked.append(request.url))
        errors: list[str] = []
        page.on("pageerror", lambda error: errors.append(str(error)))
        page.goto(f"{address}/explanation/states.html", wait_until="load")
        assert page.locator("img[src='states.svg']").evaluate("image => image.naturalWidth") > 0
        assert page.locator("body").get_attribute("data-md-color-scheme") == "slate"
        page.goto(f"{address}/index.html", wait_until="load")
        page.locator("[data-md-component=search-query]").fill("glossary")
        page.locator(".md-search-result__link", has_text="Glossary").first.click()
        page.wait_for_url(re.compile(r"/explanation/glossary\.html"))
    assert errors == []
    assert [url for url in asked if not url.startswith(address)] == []
