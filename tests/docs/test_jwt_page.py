"""The guide for JWT: who gets in, whose key it is, and a worker that finishes without a token."""

from __future__ import annotations

import logging
import sqlite3
import time
from contextlib import closing
from pathlib import Path
from types import ModuleType
from typing import Any

import httpx
import jwt
import pytest

from harness.pages import ROOT, Page, load
from oncekey.workers.service import Done, Service
from oncekey.workers.tasks import tasks_for

PAGE = Page(ROOT / "docs/howto/tenant-scope.md")
KEY = "4c1d9a3e-6d0b-4f53-8f0e-5f1f3f7f0402"
RESUMED = "UPDATE oncekey_record SET reconcile_after = 1"  # the pause after a failure is over


@pytest.fixture
def program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> ModuleType:
    """The page's program, or what a test makes of it."""
    monkeypatch.chdir(tmp_path)
    text = PAGE.program("tokens.py")
    old, new = getattr(request, "param", ("", ""))
    assert old in text
    return load(text.replace(old, new) if old else text, "tokens.py", tmp_path, monkeypatch)


def _token(secret: str, algorithm: str = "HS256", **claims: Any) -> str:
    good = {"sub": "ann", "tenant": "acme", "aud": "shop", "exp": int(time.time()) + 3600}
    wanted = {name: value for name, value in {**good, **claims}.items() if value is not None}
    return jwt.encode(wanted, None if algorithm == "none" else secret, algorithm)


def _client(module: ModuleType) -> httpx.AsyncClient:
    transport = httpx.ASGITransport(module.app, raise_app_exceptions=False)
    return httpx.AsyncClient(transport=transport, base_url="http://shop.example")


def _headers(token: str, key: str = KEY) -> dict[str, str]:
    return {"Authorization": f"Bearer {token}", "Idempotency-Key": key}


def _say(statement: str) -> None:
    with closing(sqlite3.connect("tokens.db")) as connection, connection:
        connection.execute(statement)


async def test_jwt_guide_accepts_only_verified_tokens(program: ModuleType) -> None:
    secret = program.SECRET
    refused = [
        _token(secret, exp=int(time.time()) - 1),
        _token("another secret, also of thirty-two bytes"),
        _token(secret, algorithm="none"),
        _token(secret, aud="bank"),
        _token(secret, tenant=None),
        _token(secret, exp=None),
        "nonsense",
    ]
    async with program.once.lifespan(program.app), _client(program) as client:
        for token in refused:
            answer = await client.post("/refunds", headers=_headers(token))
            assert (answer.status_code, answer.headers["WWW-Authenticate"]) == (401, "Bearer")
        assert (await client.post("/refunds", headers={"Idempotency-Key": KEY})).status_code == 401
        assert (await client.get(f"/idempotency-keys/{KEY}")).status_code == 401
        answer = await client.post("/refunds", headers=_headers(_token(secret)))
        assert (answer.status_code, answer.json()) == (201, {"refund": "re_1", "by": "ann"})


async def test_renewed_jwt_replays_and_another_tenant_executes(program: ModuleType) -> None:
    secret = program.SECRET
    async with program.once.lifespan(program.app), _client(program) as client:
        first = await client.post("/refunds", headers=_headers(_token(secret)))
        renewed = await client.post("/refunds", headers=_headers(_token(secret, exp=int(time.time()) + 9999)))
        stranger = await client.post("/refunds", headers=_headers(_token(secret, sub="eve", tenant="other")))
        assert renewed.content == first.content
        assert renewed.headers["Idempotent-Replayed"] == "true"
        assert (stranger.json()["by"], stranger.headers.get("Idempotent-Replayed")) == ("eve", None)


def _lost_once(module: ModuleType) -> None:
    """The provider's first answer does not come."""
    refund, calls = module.refund, []

    async def lost(*, key: str) -> dict[str, str]:
        calls.append(key)
        if len(calls) == 1:
            raise ConnectionError
        return await refund(key=key)

    module.refund = lost


async def test_worker_completes_a_jwt_request_as_its_user(program: ModuleType) -> None:
    _lost_once(program)
    headers = _headers(_token(program.SECRET))
    async with program.once.lifespan(program.app), _client(program) as client:
        assert (await client.post("/refunds", headers=headers)).status_code == 500
        _say(RESUMED)
        assert await Service(tasks_for(program.once)).once() == Done(1, 0)
        shown = (await client.get(f"/idempotency-keys/{KEY}", headers=headers)).json()
        assert shown["state"] == "completed"
        answer = await client.post("/refunds", headers=headers)
    assert answer.json() == {"refund": "re_1", "by": "ann"}
    assert answer.headers["Idempotent-Replayed"] == "true"


@pytest.mark.parametrize("program", [("HTTPBearer(auto_error=False)", "HTTPBearer()")], indirect=True)
async def test_auto_error_rejects_the_worker_and_logs_a_hint(
    program: ModuleType, caplog: pytest.LogCaptureFixture
) -> None:
    # The reason for the guide's first rule: without it nothing but the client's own retry goes on.
    _lost_once(program)
    headers = _headers(_token(program.SECRET))
    async with program.once.lifespan(program.app), _client(program) as client:
        assert (await client.post("/refunds", headers=headers)).status_code == 500
        _say(RESUMED)
        with caplog.at_level(logging.WARNING):
            await Service(tasks_for(program.once)).once()
        assert "resumed_as" in caplog.text
        shown = (await client.get(f"/idempotency-keys/{KEY}", headers=headers)).json()
        assert shown["state"] == "failed_retryable"
