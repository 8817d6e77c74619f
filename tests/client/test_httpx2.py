"""The same transports under httpx2, whose clients are of another package but of the same shape."""

from __future__ import annotations

import asyncio

import httpx2
import pytest

from client.scripted import DROP, TRUNCATED, ScriptedServer, answer
from oncekey.core.model import Code
from oncekey_client import Backoff, Journal, RequestOutcomeUnknownError, RetryRules
from oncekey_client.httpx import AsyncOncekeyTransport, OncekeyTransport

RULES = RetryRules(backoff=Backoff(base=0.001, cap=0.002, floor=0.001, longest=2.0), attempts=4)
DONE = answer(201, {"id": 1}, Location="/orders/1")
IN_PROGRESS = answer(409, {"code": Code.IN_PROGRESS.value}, Retry_After="1")


def blocking(url: str, **options):
    transport = OncekeyTransport(httpx2.HTTPTransport(), rules=RULES, sleep=lambda _: None, **options)
    with httpx2.Client(transport=transport) as client:
        return client.post(url, json={"a": 1})


def under_asyncio(url: str, **options):
    async def sleep(_: float) -> None:
        pass

    async def send():
        transport = AsyncOncekeyTransport(httpx2.AsyncHTTPTransport(), rules=RULES, sleep=sleep, **options)
        async with httpx2.AsyncClient(transport=transport) as client:
            return await client.post(url, json={"a": 1})

    return asyncio.run(send())


@pytest.fixture(params=[blocking, under_asyncio])
def send(request):
    return request.param


@pytest.mark.parametrize("faults", [[], [DROP], [TRUNCATED], [answer(503), answer(503)], [IN_PROGRESS]], ids=len)
def test_httpx2_retries_send_the_same_key(send, faults):  # R217, R220, R222
    with ScriptedServer(*faults, DONE) as server:
        response = send(f"{server.url}/orders")
    assert type(response) is httpx2.Response
    assert (response.status_code, response.json(), response.headers["Location"]) == (201, {"id": 1}, "/orders/1")
    assert len(server.seen) == len(faults) + 1
    assert len(set(server.keys)) == 1


def test_httpx2_does_not_retry_a_replayed_response(send):  # R227
    with ScriptedServer(answer(500, {"error": "stored"}, Idempotent_Replayed="true")) as server:
        assert send(server.url).status_code == 500
    assert len(server.seen) == 1


def test_httpx2_raises_for_an_unknown_outcome_and_journals_the_key(send, tmp_path):
    journal = Journal(tmp_path / "journal.db")
    with ScriptedServer(*[DROP] * 4) as server, pytest.raises(RequestOutcomeUnknownError):
        send(server.url, journal=journal)
    assert len(server.seen) == 4
    assert len(journal.unfinished()) == 1  # R225: its key is on disk, to be sent again
