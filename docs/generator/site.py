"""Hooks that turn the pages into a site; `mkdocs.yml` names this file.

The pages can also be read in the repository. The `README.md` of each folder therefore defines the navigation: its
second-level headings are groups, and its tables list the pages. Links to files outside the documentation become plain
file names. This file also adds the Python reference, the changelog and a redirect for every page that was merged into
another.
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
    "howto": "Guides",
    "explanation": "How it works",
    "reference": "Reference",
    "runbooks": "Runbooks",
    "contributing": "Contributing",
}
"""The folders in the order of the navigation, with their titles."""

DECISIONS: Final = "adr/README.md"
"""The page that lists all decisions. The decisions themselves are in neither the navigation nor the search."""

MOVED: Final[Mapping[str, str]] = {
    "contributing/releasing.md": "contributing/README.md#releasing",
    "contributing/settings.md": "contributing/migrations.md#adding-a-setting",
    "explanation/anti-patterns.md": "explanation/decision-guide.md#anti-patterns",
    "explanation/judged-packages.md": "explanation/comparison.md#other-packages-checked",
    "explanation/non-goals.md": "explanation/limits.md#non-goals",
    "explanation/one-request.md": "explanation/request-flow.md#one-payment-step-by-step",
    "explanation/proofs-and-leases.md": "explanation/request-flow.md#leases-and-fencing",
    "howto/alembic.md": "howto/sqlalchemy.md#alembic",
    "howto/console.md": "howto/operators.md#console",
    "howto/consumers.md": "howto/functions.md#message-consumers",
    "howto/def-handlers.md": "howto/fastapi.md#handlers-without-async",
    "howto/downstream-keys.md": "howto/phased.md#downstream-keys",
    "howto/enrol-by-path.md": "howto/enrol-a-route.md#protect-routes-by-path",
    "howto/error-formats.md": "howto/enrol-a-route.md#error-formats",
    "howto/inline-timeouts.md": "howto/unknown.md#timeouts-of-inline-handlers",
    "howto/jwt.md": "howto/tenant-scope.md#jwt",
    "howto/operate-kit.md": "howto/metrics.md#alert-rules-dashboard-systemd-and-kubernetes",
    "howto/orm-in-phases.md": "howto/sqlalchemy.md#sqlalchemy-in-phased-handlers",
    "howto/postgres-in-production.md": "howto/postgresql.md#poolers-several-hosts-and-failover",
    "howto/replay-cache.md": "howto/redis.md#redis-as-a-cache-in-front-of-another-store",
    "howto/several-applications.md": "howto/enrol-a-route.md#several-applications",
    "howto/torture.md": "howto/unit-tests.md#torture-test",
    "howto/ttl-and-lease.md": "howto/limits.md#ttl-and-lease",
    "runbooks/completer-behind.md": "runbooks/workers.md#oncekeycompleterbehind",
    "runbooks/dead-letters.md": "runbooks/outbox.md#oncekeydeadletters",
    "runbooks/duplicate-spike.md": "runbooks/clients.md#oncekeyduplicatespike",
    "runbooks/given-up.md": "runbooks/unknown.md#oncekeygivenup",
    "runbooks/lease-too-short.md": "runbooks/processes.md#oncekeyleasetooshort",
    "runbooks/metrics-missing.md": "runbooks/metrics.md#oncekeymetricsmissing",
    "runbooks/misuse-spike.md": "runbooks/clients.md#oncekeymisusespike",
    "runbooks/no-worker.md": "runbooks/workers.md#oncekeynoworker",
    "runbooks/outbox-lag.md": "runbooks/outbox.md#oncekeyoutboxlag",
    "runbooks/reaper-behind.md": "runbooks/workers.md#oncekeyreaperbehind",
    "runbooks/reservations-fail.md": "runbooks/store.md#oncekeyreservationsfail",
    "runbooks/store-down.md": "runbooks/store.md#oncekeystoredown",
    "runbooks/store-errors.md": "runbooks/store.md#oncekeystoreerrors",
    "runbooks/sweeper-behind.md": "runbooks/workers.md#oncekeysweeperbehind",
    "runbooks/unknown-old.md": "runbooks/unknown.md#oncekeyunknownold",
    "runbooks/unprotected-runs.md": "runbooks/store.md#oncekeyunprotectedruns",
    "runbooks/zombies.md": "runbooks/processes.md#oncekeyzombies",
}
"""Pages that were merged into others, and where their content is now."""

MODULES: Final[Mapping[str, str]] = {
    "oncekey": "The main module, in the order in which an application uses it.",
    "oncekey.django": "Django and Django REST framework.",
    "oncekey.flask": "Flask-SQLAlchemy as the store.",
    "oncekey.litestar": "The plugin for Litestar.",
    "oncekey.mcp": "Protected tools of an MCP server.",
    "oncekey.alembic": "oncekey's tables in your Alembic revisions.",
    "oncekey.observe": "Events, and the observers that turn them into metrics, traces and logs.",
    "oncekey.console": "The operators' console, to mount in an application.",
    "oncekey.sealing": "Encryption of stored content.",
    "oncekey.testing": "Helpers for tests of applications.",
    "oncekey_client": "The client: common parts of all transports.",
    "oncekey_client.httpx": "The client for httpx.",
    "oncekey_client.requests": "The client for requests.",
    "oncekey_client.aiohttp": "The client for aiohttp.",
    "oncekey_check": "The tester, called from Python.",
    "oncekey.cells": "The smallest interface of a store.",
    "oncekey_contract": "The contract tests of a store.",
    "oncekey_demo.checker": "The checker of recorded histories.",
}
"""The public modules, each a page of the reference."""

ORDER_OF_USE: Final = (
    "Once",
    *("Operation", "SyncOperation", "LOCAL", "PHASED", "OUTBOX", "INLINE", "Effects", "SINGLE_TENANT", "resumed_as"),
    *("Policy", "Selection", "Enrolment", "lifetime", "Front"),
    *("Message", "Handling", "Reply", "Receipt", "Executed", "NotExecuted", "Rejected", "Undecided"),
    *("Sighting", "Question", "Record", "State", "StoredResponse"),
    *("NotExecutedError", "RejectedError", "OncekeyError", "ConfigurationError", "SchemaError"),
    *("StoreError", "StoreUnavailableError", "LeaseLostError", "NotRunError", "InProgressError", "KeyReusedError"),
    *("KeyExpiredError", "OutcomeUnknownError", "ExecutionFailedError", "LimitedError", "ResultNotKeptError"),
    "repaired_module",
)
"""The names of the main module: what an application uses first comes first."""

_OPERATION: Final = (
    *("connection", "key", "scope", "attempt", "phase", "call", "value"),
    *("emit", "defer", "downstream_key", "keep", "rollback"),
)

METHODS: Final[Mapping[str, tuple[str, ...]]] = {
    "Once": (
        *("install", "lifespan", "protect", "by_path", "session", "connection", "topic", "resolver"),
        *("webhook", "webhook_asgi", "webhook_wsgi", "function", "inbox", "observe", "asgi", "wsgi", "flask"),
        *("start", "stop", "quiesce", "healthy", "adopt"),
    ),
    "Operation": _OPERATION,
    "SyncOperation": _OPERATION,
}
"""The members for applications, in the same order. The others are for workers, commands and adapters."""

TEMPLATE: Final = "0000-template.md"
"""For authors of a decision; it is not a page."""

_LISTED: Final = re.compile(r"^(?:\| |- \**)\[(?P<title>[^\]]+)\]\((?P<file>[\w-]+\.md)\)", re.MULTILINE)
_GROUP: Final = re.compile(r"^## (?P<title>.+)$", re.MULTILINE)
_RULES: Final = re.compile(r"\s*\((?:[A-Z]\d{1,2})(?:, [A-Z]\d{1,2})*\)")
"""Numbers of the protocol's rules in a docstring: for readers of the source, not of the reference."""
_LINK: Final = re.compile(r"(?<!!)\[(?P<text>[^\]]*)\]\((?P<target>[^)\s]+)\)")


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Build the navigation from the `README.md` of each folder."""
    docs = Path(config.docs_dir)
    nav: list[object] = [{"Home": "index.md"}, {"Tutorial": "tutorial.md"}]
    for folder, title in SECTIONS.items():
        pages: list[object] = [f"{folder}/README.md"]
        pages += _grouped(folder, (docs / folder / "README.md").read_text(encoding="utf-8"))
        if folder == "reference":
            pages.insert(1, {"Python API": [{name: _file(name)} for name in MODULES]})
        if folder == "contributing":
            pages.append({"Decisions": DECISIONS})
        nav.append({title: pages})
    nav.append({"Changes": "changes.md"})
    config.nav = nav
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the Python reference and the changelog, which is outside of the documentation's folder."""
    from mkdocs.structure.files import File  # noqa: PLC0415  (installed only where the site is built)

    for name, sentence in MODULES.items():
        shown = "".join(map(_main, ORDER_OF_USE)) if name == "oncekey" else f"::: {name}\n"
        files.append(File.generated(config, _file(name), content=f"# {name}\n\n{sentence}\n\n{shown}"))
    changes = (Path(config.docs_dir).parent / "CHANGELOG.md").read_text(encoding="utf-8").replace("](docs/", "](")
    files.append(File.generated(config, "changes.md", content=_LINK.sub(_followed, changes)))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Turn links out of the documentation into file names, and keep decisions out of the search."""
    del files
    if page.file.src_uri.startswith("adr/") and page.file.src_uri != DECISIONS:
        page.meta["search"] = {"exclude": True}
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


def on_page_content(html: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Remove the numbers of rules from the Python reference, and list only the alerts in the contents of a runbook."""
    del config, files
    if page.file.src_uri.startswith("runbooks/"):
        for alert in (alert for heading in page.toc for alert in heading.children):
            alert.children.clear()
    return _RULES.sub("", html) if page.file.src_uri.startswith("reference/python/") else html


def on_post_build(config: MkDocsConfig) -> None:
    """Write a redirect for every page that was merged into another."""
    for old, new in MOVED.items():
        target = _relative(old, new).replace("README.md", "index.html").replace(".md", ".html")
        (Path(config.site_dir) / old).with_suffix(".html").write_text(
            f'<!doctype html><meta charset="utf-8"><title>Moved</title><link rel="canonical" href="{target}">'
            f'<meta http-equiv="refresh" content="0; url={target}"><a href="{target}">This page has moved.</a>\n',
            encoding="utf-8",
        )


def _followed(found: re.Match[str]) -> str:
    """A link of the changelog, to the page that has the content today."""
    path, _, _ = found["target"].partition("#")
    return f"[{found['text']}]({MOVED[path]})" if path in MOVED else found[0]


def _relative(old: str, new: str) -> str:
    folder, _, name = new.partition("/")
    return name if old.startswith(f"{folder}/") else f"../{new}"


def _grouped(folder: str, text: str) -> list[object]:
    """The pages that a folder's `README.md` lists; those below a second-level heading are a group."""
    first, *rest = _GROUP.split(text)
    pages = _listed(folder, first)
    for title, part in zip(rest[::2], rest[1::2], strict=True):
        pages += [{title: found}] if (found := _listed(folder, part)) else []
    return pages


def _listed(folder: str, text: str) -> list[object]:
    return [{found["title"].replace("`", ""): f"{folder}/{found['file']}"} for found in _LISTED.finditer(text)]


def _main(name: str) -> str:
    """A name of the main module, with its own heading."""
    options = dict.fromkeys(("show_root_heading", "show_root_toc_entry"), "true")
    options |= dict.fromkeys(("show_root_full_path", "group_by_category"), "false")
    if name in METHODS:
        options |= {"members": f"[{', '.join(METHODS[name])}]", "inherited_members": "true"}
    return f"::: oncekey.{name}\n    options:\n" + "".join(f"      {key}: {options[key]}\n" for key in options) + "\n"


def _file(module: str) -> str:
    return f"reference/python/{module}.md"
