"""A served application loads what `docs/explanation/request-path.md` lists, and no request imports a module."""

from __future__ import annotations

import asyncio
import re
import uuid
from types import MappingProxyType

import httpx
import pytest
from fastapi import FastAPI

from harness.pages import ROOT, generator
from harness.slices import APPLICATIONS, seen_by
from oncekey import SINGLE_TENANT, Once
from oncekey.databases.mariadb import store as mariadb
from oncekey.databases.postgres import store as postgres
from oncekey.databases.sqlite import store as sqlite
from oncekey.observe.events import Consulted, Event
from oncekey.stores.keystore import STATEMENTS
from oncekey.stores.statements import PART_STATEMENTS

PAGE = generator().request_path
CODE = re.compile(r"\b[ADFHLOPU]\d{1,2}\b")
NEW, REPLAY, MISMATCH, IN_FLIGHT = (201, False), (201, True), (422, False), (409, False)


def test_a_served_application_loads_the_listed_modules(postgres_dsn: str) -> None:
    seen = seen_by("fastapi_local", postgres_dsn)

    assert seen.statuses == (NEW, REPLAY, MISMATCH, IN_FLIGHT, NEW)
    assert sorted(seen.after) == sorted(PAGE.modules())
    assert len(seen.after) <= PAGE.MOST_MODULES
    assert sum(PAGE.lines_of(PAGE.path_of(module)) for module in seen.after) <= PAGE.MOST_LINES
    assert (seen.imports, seen.after - seen.before) == ((), frozenset())


def test_the_page_names_only_existing_functions() -> None:
    """A name that is gone fails the generation of the page, and so its comparison with the committed one."""
    assert PAGE.defined("oncekey.frameworks.asgi.middleware", "Exchange.claim") == PAGE.path_of(
        "oncekey.frameworks.asgi.middleware"
    )
    for module, name in [
        ("oncekey.frameworks.asgi.middleware", "Exchange.gone"),
        ("oncekey.engine.local", "gone"),
        ("oncekey.ports.store", "Locks"),
    ]:
        with pytest.raises(LookupError):
            PAGE.defined(module, name)
    assert "](../../src/oncekey/engine/local.py) decides" in PAGE.page()


def test_protocol_page_explains_every_rule_code() -> None:
    protocol = (ROOT / "docs" / "explanation" / "protocol.md").read_text("utf-8")
    explained = set(re.findall(r"^### ([A-Z]\d+):|^\| (F\d+) ", protocol, re.MULTILINE))
    used = {code for module in PAGE.modules() for code in CODE.findall(PAGE.path_of(module).read_text("utf-8"))}
    assert {"P4", "L6", "A4"} <= used
    assert used - {code for pair in explained for code in pair} == set()


@pytest.mark.parametrize("application", [name for name in APPLICATIONS if name != "fastapi_local"])
def test_no_request_imports_a_module(application: str, postgres_dsn: str) -> None:
    seen = seen_by(application, postgres_dsn)

    accepted = application == "fastapi_outbox"  # its retries get the 202 again, which is not marked as a replay
    first, again = ((202, False), (202, False)) if accepted else (NEW, REPLAY)
    assert seen.statuses == (first, again, MISMATCH, IN_FLIGHT, first)
    assert (seen.imports, seen.after - seen.before) == ((), frozenset())


async def test_a_late_route_gets_its_replay_cache() -> None:
    events: list[Event] = []
    once = Once("memory:", observers=[events.append])
    app = FastAPI(lifespan=once.lifespan)
    once.install(app, tenant=SINGLE_TENANT)

    def enrol(path: str, **options: object) -> None:
        @app.post(path)
        @once.protect(effects="inline", operation=path, **options)  # type: ignore[call-overload]
        async def handler() -> dict[str, str]:
            await asyncio.sleep(0)
            return {"path": path}

    enrol("/early")
    transport = httpx.ASGITransport(app)
    async with app.router.lifespan_context(app), httpx.AsyncClient(transport=transport, base_url="http://shop") as shop:
        await shop.post("/early", headers={"Idempotency-Key": f'"{uuid.uuid4()}"'})
        assert not [event for event in events if isinstance(event, Consulted)]
        enrol("/late", replay_cache=60)
        key = {"Idempotency-Key": f'"{uuid.uuid4()}"'}
        answers = [await shop.post("/late", headers=key) for _ in range(3)]

    assert [answer.status_code for answer in answers] == [200, 200, 200]
    assert {event.front for event in events if isinstance(event, Consulted)} == {"replay_cache"}


@pytest.mark.parametrize(
    ("module", "store"),
    [(postgres, postgres.PostgresStore), (sqlite, sqlite.SqliteStore), (mariadb, mariadb.MariadbStore)],
    ids=["postgres", "sqlite", "mariadb"],
)
def test_a_store_with_a_missing_sql_statement_is_rejected(module, store, monkeypatch) -> None:
    whole = module.load
    needed = {*STATEMENTS, *(name for names in PART_STATEMENTS.values() for name in names), *module.DIAGNOSTICS}
    store()

    for name in sorted(needed):
        monkeypatch.setattr(
            module,
            "load",
            lambda *given, _name=name, **named: MappingProxyType(
                {title: text for title, text in whole(*given, **named).items() if title != _name}
            ),
        )
        with pytest.raises(ValueError, match=rf"needs a statement for {name}$"):
            store()
