"""The documentation as a site: what mkdocs needs beside its settings (`mkdocs.yml` names this file as a hook).

The pages are written to be read in the repository, too. So the order of the site is the order in which the `README.md`
of each folder lists its pages, links to files outside the documentation become their names, and the reference of the
Python interface, which only a site can show, is made here.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from mkdocs.config.defaults import MkDocsConfig
    from mkdocs.structure.files import Files
    from mkdocs.structure.pages import Page

SECTIONS: Final[Mapping[str, str]] = {
    "howto": "How-to guides",
    "explanation": "How it works",
    "reference": "Reference",
    "runbooks": "Runbooks",
    "adr": "Decisions",
    "contributing": "Working on oncekey",
}
"""Folders, in the order of the site, and what they are called."""

MODULES: Final[Mapping[str, str]] = {
    "oncekey": "What an application imports.",
    "oncekey.observe": "Events, and what makes metrics, traces and logs of them.",
    "oncekey.flask": "The database of Flask-SQLAlchemy.",
    "oncekey.console": "The operators' console, to be mounted in an application.",
    "oncekey_client": "The client: what its transports have in common.",
    "oncekey_client.httpx": "The client on httpx.",
    "oncekey_client.requests": "The client on requests.",
    "oncekey_client.aiohttp": "The client on aiohttp.",
    "oncekey_check": "The tester, from Python.",
    "oncekey.django": "Django and Django REST framework.",
    "oncekey.litestar": "The plugin for Litestar.",
    "oncekey.mcp": "Tools of an MCP server.",
    "oncekey.alembic": "Our tables in revisions of yours.",
    "oncekey.sealing": "Encryption of what is stored.",
    "oncekey.cells": "The smallest store.",
    "oncekey.testing": "For tests of applications.",
    "oncekey.testing.contract": "The contract that a store has to keep.",
    "oncekey_demo.checker": "The checker of histories.",
}
"""The public modules, each a page of the reference."""

TEMPLATE: Final = "0000-template.md"
"""For who writes a decision; it is no page."""

_LISTED: Final = re.compile(r"^(?:\| |- \**)\[(?P<title>[^\]]+)\]\((?P<file>[\w-]+\.md)\)", re.MULTILINE)
_LINK: Final = re.compile(r"(?<!!)\[(?P<text>[^\]]*)\]\((?P<target>[^)\s]+)\)")


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Order the site as the folders' own pages do."""
    docs = Path(config.docs_dir)
    nav: list[object] = [{"oncekey": "index.md"}, {"Tutorial": "tutorial.md"}]
    for folder, title in SECTIONS.items():
        pages: list[object] = [f"{folder}/README.md"]
        text = (docs / folder / "README.md").read_text(encoding="utf-8")
        pages += [
            _entry(found["title"].replace("`", ""), f"{folder}/{found['file']}") for found in _LISTED.finditer(text)
        ]
        if folder == "reference":
            pages.append({"Python": [{name: _file(name)} for name in MODULES]})
        nav.append({title: pages})
    nav.append({"Changes": "changes.md"})
    config.nav = nav
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the reference of the Python interface, and the list of changes, which lies beside the documentation."""
    from mkdocs.structure.files import File  # noqa: PLC0415  (only who builds the site has it)

    for name, sentence in MODULES.items():
        page = f"# {name}\n\n{sentence}\n\n::: {name}\n"
        files.append(File.generated(config, _file(name), content=page))
    changes = (Path(config.docs_dir).parent / "CHANGELOG.md").read_text(encoding="utf-8").replace("](docs/", "](")
    files.append(File.generated(config, "changes.md", content=changes))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Turn links that lead out of the documentation into the names of the files."""
    del files
    docs = Path(config.docs_dir).resolve()
    here = (docs / page.file.src_uri).parent

    def kept(found: re.Match[str]) -> str:
        target = found["target"]
        if "://" in target or target.startswith(("#", "mailto:")):
            return found[0]
        path = (here / target.partition("#")[0]).resolve()
        if (path.is_relative_to(docs) and path.name != TEMPLATE) or path == docs.parent / "CHANGELOG.md":
            return found[0].replace("../CHANGELOG.md", "changes.md")
        name = path.relative_to(docs.parent).as_posix()
        return found["text"] if found["text"].strip("`") == name else f"{found['text']} (`{name}`)"

    return _LINK.sub(kept, markdown)


def _entry(title: str, file: str) -> object:
    """A line of the menu; a decision is listed by its number, and called by its own heading."""
    return file if title.isdigit() else {title.replace("`", ""): file}


def _file(module: str) -> str:
    return f"reference/python/{module}.md"
