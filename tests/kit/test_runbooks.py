"""The runbooks: a section for each alert, all of one shape; every command works on a store with such trouble."""

from __future__ import annotations

import re
import shlex
import shutil
import sqlite3
import sys
import tomllib
from contextlib import closing
from pathlib import Path
from uuid import UUID

import pytest
import yaml

from cli.operating import oncekey
from harness import flows
from harness.pages import ROOT, Page, pages
from kit.contrib import ALERTS, DASHBOARD, FILES, MANIFESTS, UNITS
from kit.exported import exported, names_in
from oncekey import wire
from oncekey.core.flow import Flow, Mode, Transaction, drive
from oncekey.core.keys import key_digest
from oncekey.core.model import (
    MINUTE,
    Doubtful,
    Effects,
    Lease,
    Parcel,
    ParcelKind,
    RecordId,
    Recovery,
    Retryable,
)
from oncekey.core.policy import Policy
from oncekey.core.scope import scope_of
from oncekey.testing.claims import a_claim, answered

INDEX = ROOT / "docs" / "runbooks" / "README.md"
BOOKS = [page for page in pages("docs/runbooks/*.md") if page.path != INDEX]
HEADINGS = ["Meaning", "Impact", "Diagnose", "Fix", "Resolved when", "Never"]
TENANT = "acme"
REPOSITORY = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["urls"]["Repository"]

UNKNOWN, STALE, LETTER = "unknown-key-0000-0", "stale-key-0000-000", UUID(int=7)
VERDICTS = ("oncekey doctor", "oncekey migrate status", "oncekey reconcile ledger")

SHOP = """
from fastapi import FastAPI
from oncekey import INLINE, PHASED, SINGLE_TENANT, Message, Once, Question, Undecided

once = Once("sqlite:///shop.db")
app = FastAPI(lifespan=once.lifespan)
once.install(app, tenant=SINGLE_TENANT)


@app.post("/payments")
@once.protect(effects=INLINE, operation="pay")
async def pay() -> None: ...


@app.post("/orders")
@once.protect(effects=PHASED)
async def order() -> None: ...


@once.topic("parcel")
def deliver(message: Message) -> None: ...


@once.resolver("pay", call="charge")
def look(question: Question) -> Undecided:
    return Undecided()
"""
"""The application that the pages call shop.main."""


def _alerts() -> dict[str, dict[str, str]]:
    rules = [rule for group in yaml.safe_load(FILES[ALERTS])["groups"] for rule in group["rules"]]
    return {rule["alert"]: rule["annotations"] | rule["labels"] for rule in rules}


def _sections(page: Page) -> dict[str, str]:
    """The part of the page for each alert."""
    _, *parts = re.split(r"^## (.+)$", page.text, flags=re.MULTILINE)
    return dict(zip(parts[::2], parts[1::2], strict=True))


def _place(page: Page, alert: str) -> str:
    return f"{page.path.name}#{alert.lower()}"


def test_every_alert_has_a_section_and_links_to_it() -> None:
    places = {alert: _place(page, alert) for page in BOOKS for alert in _sections(page)}
    assert {alert: said["runbook_url"] for alert, said in _alerts().items()} == {
        alert: f"{REPOSITORY}/blob/main/docs/runbooks/{place}" for alert, place in places.items()
    }
    assert sum(len(_sections(page)) for page in BOOKS) == len(places)


@pytest.mark.parametrize("page", BOOKS, ids=lambda page: page.path.stem)
def test_every_section_has_the_same_parts_in_the_same_order(page: Page) -> None:
    assert len(re.findall(r"^# Runbook: .+$", page.text, re.MULTILINE)) == 1
    for section in _sections(page).values():
        assert re.findall(r"^### (.+)$", section, re.MULTILINE) == HEADINGS
        assert all(part.strip() for part in re.split(r"^### .+$", section, flags=re.MULTILINE)[1:])


def test_the_list_names_the_severity_of_every_alert() -> None:
    listed = re.findall(r"^\| \[(\w+)\]\(([\w-]+\.md#\w+)\) \| (\w+) \|", INDEX.read_text(), re.MULTILINE)
    wakes = {"page": "critical", "ticket": "warning"}
    assert {name: wakes[severity] for name, _, severity in listed} == {
        name: said["severity"] for name, said in _alerts().items()
    }
    assert {place for _, place, _ in listed} == {_place(page, alert) for page in BOOKS for alert in _sections(page)}


@pytest.mark.parametrize("page", [*BOOKS, Page(INDEX)], ids=lambda page: page.path.stem)
def test_runbook_names_only_existing_metrics_units_and_panels(page: Page) -> None:
    # It is read without the rest of the documentation, so it leads to other runbooks only.
    assert all(re.fullmatch(r"([\w-]+\.md)?(#\w+)?", link) for link in page.links())
    assert names_in(page.text) <= set(exported())
    for unit in re.findall(r"(?:-u|restart) (oncekey-[\w-]+)", page.text):
        assert f"systemd/{unit}.service" in UNITS
    for deployment in re.findall(r"deployment/([\w-]+)", page.text):
        assert f"kind: Deployment\nmetadata:\n  name: {deployment}\n" in FILES[MANIFESTS[0]]
    for panel in re.findall(r"dashboard's (?:row )?\"([^\"]+)\"", page.text):
        assert f'"title": "{panel}"' in FILES[DASHBOARD]


def test_runbook_quotes_occur_in_the_source() -> None:
    source = "\n".join(path.read_text() for path in (ROOT / "src").rglob("*.py"))
    quoted = {text for page in BOOKS for text in re.findall(r"`([a-z]+:? [a-z :]+)`", page.text)}
    quoted -= {text for text in quoted if text.startswith("oncekey ")}
    assert len(quoted) > 6
    assert sorted(text for text in quoted if text not in source) == []


# The commands


@pytest.fixture(scope="module")
def troubled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store with an unknown outcome, a dead owner, a failure that can be retried, and a dead letter."""
    folder = tmp_path_factory.mktemp("troubled")
    engine = wire.connect(f"sqlite:///{folder}/shop.db")
    engine.migrate()

    def own(key: str, effects: Effects = Effects.LOCAL, recovery: Recovery = Recovery.RETRY) -> Lease:
        claim = a_claim(id=RecordId(scope_of("-", TENANT), key), effects=effects, recovery=recovery, operation="pay")
        return flows.begin(engine, claim, Policy()).lease

    flows.settle(engine, own(UNKNOWN, Effects.INLINE, Recovery.UNKNOWN), Doubtful("call_uncertain"))
    flows.settle(engine, own("done-key-0000-0000"), answered())
    flows.settle(engine, own("failed-key-0000-00"), Retryable("handler_raised"))
    own(STALE)
    box, parcel = engine.store.outbox, Parcel(LETTER, ParcelKind.EMIT, RecordId("-", "k"), LETTER, "parcel", "{}", "dk")
    put = Transaction("put", Mode.ATOMIC, lambda: box.putting((parcel,)))

    def bury() -> Flow[bool]:
        yield put
        (held,) = yield from box.due("worker", ("parcel",), 10, MINUTE)
        return (yield from box.bury(held, "no such mailbox"))

    assert drive(bury(), engine.driver.run)
    engine.close()
    with closing(sqlite3.connect(folder / "shop.db")) as connection, connection:
        connection.execute("UPDATE oncekey_record SET lease_until = 1 WHERE key = ?", (STALE,))
    (folder / "shop").mkdir()
    (folder / "shop" / "main.py").write_text(SHOP)
    (folder / "answer.json").write_text("{}")
    (folder / "charges.json").write_text("[]")
    return folder


def _typed(line: str) -> list[str]:
    """A command with the names of this store in the places of those that the reader has to fill in."""
    key = STALE if "release" in line else UNKNOWN
    own = {"KEY": key, "ID": str(LETTER), "TENANT": TENANT, "DIGEST": key_digest(key)}
    return [own.get(word, word) for word in shlex.split(line)]


COMMANDS = [
    (page, line) for page in [*BOOKS, Page(INDEX)] for block in page.blocks("sh") for line in block.text.splitlines()
]


def test_the_commands_are_all_ours() -> None:
    assert {line.split()[0] for _, line in COMMANDS} == {"oncekey"}
    assert {page.path.stem for page, _ in COMMANDS} == {page.path.stem for page in [*BOOKS, Page(INDEX)]}
    fenced = {block.language for page in BOOKS for block in page.blocks()}
    assert fenced == {"sh"}, "what stands in another fence is not run"


@pytest.mark.parametrize("line", sorted({line for _, line in COMMANDS}))
def test_every_command_does_what_it_should(
    line: str, troubled: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(troubled, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("ONCEKEY_STORE", "sqlite:///shop.db")
    for name in ("shop", "shop.main"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    try:
        done = oncekey(*_typed(line)[1:])
    finally:
        for name in ("shop", "shop.main"):
            sys.modules.pop(name, None)
    told = line.startswith(VERDICTS)  # whose exit code says what was found
    assert done.exit_code in ({0, 1} if told else {0}), done.output
    assert done.output.strip()
