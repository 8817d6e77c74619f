"""What PostgreSQL's own log contains of a LOCAL request whose last message fails (docs/explanation/security.md)."""

from __future__ import annotations

import asyncio
import contextlib
import uuid
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from frameworks.realshop import PostgresDatabase, RealShop
from harness.pages import ROOT
from harness.postgres import PostgresServer
from local.databases import PACKAGES, rows
from local.test_http import Shop
from oncekey.core.model import PHASED
from oncekey.engine.operation import Operation

QUIET = {"log_min_error_statement": "panic", "log_error_verbosity": "terse"}
"""What the page tells an administrator to set for the application's role."""

TWIN = """
    INSERT INTO oncekey.record
    SELECT (jsonb_populate_record(record, jsonb_build_object('key', '{key}'))).* FROM oncekey.record AS record
"""
"""Another record with the same scope: written past the key's lock, as nothing of oncekey does."""


@pytest.fixture(scope="module")
def server() -> Iterator[PostgresServer]:
    """A server with PostgreSQL's default settings for its log, and its log to read."""
    with PostgresServer() as server:
        yield server


def owned_by_a_role(server: PostgresServer, **settings: str) -> str:
    """The address of a new database for a role that is no superuser and has these settings."""
    name = f"shop_{uuid.uuid4().hex}"
    dsn = server.create_database(name)
    rows(dsn, f"CREATE ROLE {name} LOGIN; ALTER DATABASE {name} OWNER TO {name}")
    for setting, value in settings.items():
        rows(dsn, f"ALTER ROLE {name} SET {setting} = {value}")
    return dsn.replace("postgres@", f"{name}@", 1)


def executing(*statements: str) -> Callable[[Any], Any]:
    """The rest of a handler that executes these and swallows their errors."""

    async def execute(op: Any) -> None:
        for statement in statements:
            with contextlib.suppress(Exception):
                await op.connection.execute(statement)

    return execute


def overtaken(dsn: str, key: str) -> Callable[[Any], Any]:
    """The rest of a handler, during which another program stores a record of the same key."""
    return lambda _: asyncio.to_thread(rows, dsn, TWIN.format(key=key))


FAILURES: dict[str, Callable[[str, str], Callable[[Any], Any]]] = {
    "a swallowed error": lambda *_: executing("SELECT 1 / 0"),
    "a deferred constraint": lambda *_: executing("SET CONSTRAINTS ALL DEFERRED", "INSERT INTO orders VALUES ('tea')"),
    "a taken key": overtaken,
}


async def logged(package: str, failure: str, server: PostgresServer, **settings: str) -> dict[str, bool]:
    """Send a request whose last message fails, and look for its key and its answer in the server's log."""
    dsn, key, item = owned_by_a_role(server, **settings), uuid.uuid4().hex, uuid.uuid4().hex
    async with Shop(package, dsn).open() as shop:
        assert (await shop.send(key=uuid.uuid4().hex)).status == 201
        shop.inside = FAILURES[failure](dsn, key)
        reply = await shop.send(f"/orders?item={item}", key=key)
        assert (item.encode() in reply.body, shop.rows) == (False, ["tea"])
    log = server.log_tail(lines=10_000)
    answer = f'{{"item":"{item}"}}'
    return {"key": key in log, "key, hex": key.encode().hex() in log, "answer, hex": answer.encode().hex() in log}


@pytest.mark.parametrize("package", PACKAGES)
@pytest.mark.parametrize("failure", FAILURES)
async def test_a_message_that_fails_is_in_the_log_with_its_values(
    failure: str, package: str, server: PostgresServer
) -> None:
    # Only a taken key is there in clear, in PostgreSQL's own detail
    found = await logged(package, failure, server)
    assert found == {"key": failure == "a taken key", "key, hex": True, "answer, hex": True}


@pytest.mark.parametrize("package", PACKAGES)
@pytest.mark.parametrize("failure", FAILURES)
async def test_two_settings_of_the_role_keep_them_out(failure: str, package: str, server: PostgresServer) -> None:
    assert not any((await logged(package, failure, server, **QUIET)).values())


@pytest.mark.parametrize("package", PACKAGES)
@pytest.mark.parametrize("settings", [{}, QUIET], ids=["default", "quiet"])
async def test_a_phase_is_in_the_log_in_the_same_way(
    settings: dict[str, str], package: str, server: PostgresServer
) -> None:
    dsn, key, result = owned_by_a_role(server, **settings), uuid.uuid4().hex, uuid.uuid4().hex
    shop = RealShop(PostgresDatabase(dsn, package))

    @shop.app.post("/orders", status_code=201)
    @shop.once.protect(effects=PHASED)
    async def create(op: Operation) -> dict[str, str]:
        async def begin(connection: Any) -> str:
            with contextlib.suppress(Exception):
                await connection.execute("SELECT 1 / 0")
            return result

        return {"result": await op.phase("begun", begin)}

    async with shop.open():
        assert (await shop.send(key=key)).status >= 500
    log = server.log_tail(lines=10_000)
    assert [text.encode().hex() in log for text in (key, result)] == [not settings, not settings]
    assert (key in log, result in log) == (False, False)


@pytest.mark.parametrize("setting", QUIET)
async def test_neither_setting_is_enough(setting: str, server: PostgresServer) -> None:
    settings = {name: value for name, value in QUIET.items() if name != setting}
    assert any((await logged("asyncpg", "a taken key", server, **settings)).values())


@pytest.mark.parametrize("page", ["explanation/security.md", "howto/production-checklist.md"])
def test_the_pages_name_both_settings(page: str) -> None:
    text = (ROOT / "docs" / page).read_text("utf-8")
    assert [name for name, value in QUIET.items() if f"{name} = {value}" not in text] == []
