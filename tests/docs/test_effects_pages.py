"""The programs of the guides to phased handlers and workers do what their pages say, also where no command shows it."""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from types import ModuleType

import httpx
import pytest

from harness.pages import ROOT, Page, load
from harness.patience import PATIENCE
from harness.provider import Provider
from oncekey.workers.service import Service
from oncekey.workers.tasks import tasks_for

KEY = {"Idempotency-Key": "4c1d9a3e-6d0b-4f53-8f0e-5f1f3f7f9999"}

Program = Callable[[str, str], ModuleType]


def _text(page: str, file: str) -> str:
    return Page(ROOT / "docs" / "howto" / page).program(file)


@pytest.fixture
def program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Program:
    """Imports a program by its name and text, in a folder of its own."""
    monkeypatch.chdir(tmp_path)
    return lambda file, text: load(text, file, tmp_path, monkeypatch)


def _say(database: str, *statements: str) -> list[tuple[object, ...]]:
    with closing(sqlite3.connect(database)) as connection, connection:
        return [row for statement in statements for row in connection.execute(statement)]


def _client(module: ModuleType) -> httpx.AsyncClient:
    transport = httpx.ASGITransport(module.app, raise_app_exceptions=False)
    return httpx.AsyncClient(transport=transport, base_url="http://shop.example")


async def test_worker_completes_a_request_as_its_absent_client(program: Program) -> None:
    # R116, R120, H7: without its credentials, with the header that the application asked to keep
    module = program("completed.py", _text("phased.md", "completed.py"))
    _say("completed.db", "CREATE TABLE refunds (id INTEGER PRIMARY KEY, region TEXT)")
    sent = {**KEY, "Authorization": "Bearer s3cret", "X-Region": "eu"}
    async with module.once.lifespan(module.app), _client(module) as client:
        assert (await client.post("/refunds", headers={**sent, "Authorization": "Bearer none"})).status_code == 401
        assert (await client.post("/refunds", headers=sent)).status_code == 500  # there is no table for bookings
        _say("completed.db", "CREATE TABLE bookings (refund INTEGER)")
        _say("completed.db", "UPDATE oncekey_record SET reconcile_after = 1")  # the pause after a failure is over
        assert (await Service(tasks_for(module.once)).once()).done == 1
        assert _say("completed.db", "SELECT * FROM refunds", "SELECT * FROM bookings") == [(1, "eu"), (1,)]
        answer = await client.post("/refunds", headers=sent)
    assert (answer.status_code, answer.json()) == (201, {"id": 1, "region": "eu"})
    assert answer.headers["Idempotent-Replayed"] == "true"


async def test_resolver_settles_a_call_without_a_webhook(program: Program, tmp_path: Path) -> None:
    # R135, H5: without workers, so that the question comes when the test says so
    with Provider(tmp_path) as provider:
        text = _text("unknown.md", "found.py").replace("http://127.0.0.1:2525", provider.url)
        module = program("found.py", text.replace(", workers=True", ""))
        async with module.once.lifespan(module.app), _client(module) as client:
            provider.fault("drop-after", 1)
            lost = await client.post("/charges", headers=KEY)
            assert (lost.status_code, lost.json()["code"]) == (409, "idempotency_outcome_unknown")
            _say("found.db", "UPDATE oncekey_record SET reconcile_after = 1")  # the pause before a question is over
            await Service(tasks_for(module.once)).once()
            answer = await client.post("/charges", headers=KEY)
        (charge,) = provider.charges()
        assert (answer.status_code, answer.json()) == (201, {"charge": charge["id"]})


async def test_application_with_workers_true_delivers_messages_in_process(
    program: Program, capsys: pytest.CaptureFixture[str]
) -> None:
    # With the one word that the page adds.
    text = _text("workers.md", "jobs.py")
    module = program("jobs.py", text.replace("migrate=True", "migrate=True, workers=True"))
    delivered = asyncio.Event()
    loop = asyncio.get_running_loop()
    function = module.once.topics["order_created"].function

    def told(message: object) -> None:
        function(message)
        loop.call_soon_threadsafe(delivered.set)

    object.__setattr__(module.once.topics["order_created"], "function", told)
    async with module.once.lifespan(module.app), _client(module) as client:
        assert (await client.post("/orders", headers=KEY)).status_code == 201
        await asyncio.wait_for(delivered.wait(), timeout=PATIENCE)
    assert capsys.readouterr().out == "an order: 1\n"
