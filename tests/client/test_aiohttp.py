"""The middleware for aiohttp against a real server that answers by script."""

from __future__ import annotations

import asyncio

import aiohttp
import pytest

from client.scripted import DROP, HANG, RESET, TRUNCATED, ScriptedServer, answer
from harness.ports import free_port
from oncekey.core.model import Code
from oncekey_client import (
    Backoff,
    ClientConfigurationError,
    Journal,
    RequestKeyReusedError,
    RequestOutcomeUnknownError,
    RetryRules,
)
from oncekey_client.aiohttp import OncekeyClientMiddleware
from oncekey_client.attempts import RetrySession
from oncekey_client.profiles import SQUARE

FAST = Backoff(base=0.001, cap=0.002, floor=0.001, longest=2.0)
RULES = RetryRules(attempts=4, backoff=FAST)
DONE = answer(201, {"id": 1}, Location="/orders/1")


async def no_sleep(_: float) -> None:
    pass


def send(url, *, method="POST", rules=RULES, **options):
    async def run():
        middleware = OncekeyClientMiddleware(rules=rules, sleep=no_sleep)
        async with (
            aiohttp.ClientSession(middlewares=[middleware]) as session,
            session.request(method, url, **options) as response,
        ):
            return response.status, await response.read(), dict(response.headers)

    return asyncio.run(run())


@pytest.mark.parametrize(
    "faults",
    [
        [DROP],
        [RESET],
        [TRUNCATED],
        [answer(503), answer(503)],
        [answer(409, {"code": Code.IN_PROGRESS.value}, Retry_After="1")],
        [answer(307, Location="/orders")],
        [DROP, answer(500), TRUNCATED],
    ],
)
def test_aiohttp_retries_send_the_same_key_and_request(faults):
    # R217, R220, R222
    with ScriptedServer(*faults, DONE) as server:
        status, body, headers = send(f"{server.url}/orders", json={"a": 1}, headers={"X-Own": "1"})
    assert (status, body, headers["Location"]) == (201, b'{"id": 1}', "/orders/1")
    assert len(server.seen) == len(faults) + 1
    assert len(set(server.keys)) == 1
    seen = {(seen.method, seen.target, seen.body, seen.headers["x-own"]) for seen in server.seen}
    assert seen == {("POST", "/orders", b'{"a": 1}', "1")}
    assert {seen.headers["content-type"] for seen in server.seen} == {"application/json"}


def test_a_stream_is_sent_whole_each_time():
    # R224
    async def parts():
        yield b"a"
        yield b"bc"

    with ScriptedServer(DROP, DONE) as server:
        send(server.url, data=parts())
    assert [(seen.body, seen.headers.get("content-length")) for seen in server.seen] == [(b"abc", "3")] * 2


def test_aiohttp_status_polls_omit_key_and_body():
    accepted = answer(202, {"code": Code.IN_PROGRESS.value}, Location="/keys/1", Retry_After="1")
    with ScriptedServer(accepted, answer(200, {"state": "completed"}), DONE) as server:
        assert send(server.url, json={})[0] == 201
    assert [(seen.method, seen.target) for seen in server.seen] == [("POST", "/"), ("GET", "/keys/1"), ("POST", "/")]
    assert [seen.key is not None for seen in server.seen] == [True, False, True]


def test_aiohttp_leaves_get_unchanged_and_supports_body_keys():
    with ScriptedServer(answer(503), answer(503), DONE) as server:
        assert send(server.url, method="GET")[0] == 503
        assert send(server.url, rules=RetryRules(SQUARE, backoff=FAST), json={"a": 1})[0] == 201
    assert server.keys == [None] * 3
    assert b'"idempotency_key"' in server.seen[1].body
    assert server.seen[1].body == server.seen[2].body


def test_aiohttp_accepts_a_replay_and_raises_for_a_reused_key():
    # R224, R227
    with ScriptedServer(
        answer(500, Idempotent_Replayed="true"), answer(422, {"code": Code.KEY_REUSED.value})
    ) as server:
        assert send(server.url)[0] == 500
        with pytest.raises(RequestKeyReusedError):
            send(server.url)
    assert len(server.seen) == 2


def test_aiohttp_repeats_an_unknown_request_with_the_same_key():
    async def run(url):
        middleware = OncekeyClientMiddleware(rules=RULES, sleep=no_sleep)
        async with aiohttp.ClientSession(middlewares=[middleware]) as session:
            with pytest.raises(RequestOutcomeUnknownError) as caught:
                await session.post(url, json={"a": 1})
            response = await middleware.ask_again(caught.value, session)
            return response.status

    with ScriptedServer(*[DROP] * 4, DONE) as server:
        assert asyncio.run(run(server.url)) == 201
    assert len({(seen.key, seen.body) for seen in server.seen}) == 1


def test_unreachable_server_raises_the_aiohttp_connector_error():
    with pytest.raises(aiohttp.ClientConnectorError):
        send(f"http://127.0.0.1:{free_port()}")


def test_a_cancelled_request_is_not_sent_again():
    async def run(url, arrived):
        async with aiohttp.ClientSession(middlewares=[OncekeyClientMiddleware(rules=RULES)]) as session:
            task = asyncio.create_task(session.post(url))
            await asyncio.to_thread(arrived.wait, 10)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task

    with ScriptedServer(HANG) as server:
        asyncio.run(run(server.url, server.arrived))
    assert len(server.seen) == 1


def test_a_journal_is_refused(tmp_path):
    with pytest.raises(ClientConfigurationError, match="has no journal"):
        OncekeyClientMiddleware(session=RetrySession(journal=Journal(tmp_path / "journal.db")))
