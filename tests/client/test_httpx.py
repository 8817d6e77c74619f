"""The httpx transports against a real server that answers by script."""

from __future__ import annotations

import asyncio
import json
import ssl
import threading
from types import ModuleType, SimpleNamespace

import httpx
import pytest

from client.scripted import DROP, HANG, RESET, TRUNCATED, ScriptedServer, answer
from harness.ports import free_port
from oncekey.core.model import Code
from oncekey_client import Backoff, Journal, RequestKeyReusedError, RequestOutcomeUnknownError, RetryRules
from oncekey_client import httpx as adapter
from oncekey_client.httpx import AsyncOncekeyTransport, OncekeyTransport
from oncekey_client.journal import Progress
from oncekey_client.profiles import SQUARE, STRIPE

FAST = Backoff(base=0.001, cap=0.002, floor=0.001, longest=2.0)
RULES = RetryRules(backoff=FAST, attempts=4)
DONE = answer(201, {"id": 1}, Location="/orders/1")


class Sync:
    """Blocking clients."""

    Transport = OncekeyTransport
    waits: list[float]

    def __init__(self) -> None:
        self.waits = []

    def transport(self, inner=None, **options):
        options.setdefault("rules", RULES)
        return OncekeyTransport(inner, sleep=self.waits.append, **options)

    def send(self, transport, method, url, **options):
        with httpx.Client(transport=transport) as client:
            return client.request(method, url, **options)

    def ask(self, transport, name, *arguments):
        with transport:
            return getattr(transport, name)(*arguments)


class Async(Sync):
    """The same tests for async clients."""

    def transport(self, inner=None, **options):
        async def sleep(seconds):
            self.waits.append(seconds)

        options.setdefault("rules", RULES)
        return AsyncOncekeyTransport(inner, sleep=sleep, **options)

    def send(self, transport, method, url, **options):
        async def send():
            async with httpx.AsyncClient(transport=transport) as client:
                return await client.request(method, url, **options)

        return asyncio.run(send())

    def ask(self, transport, name, *arguments):
        async def ask():
            async with transport:
                return await getattr(transport, name)(*arguments)

        return asyncio.run(ask())


@pytest.fixture(params=[Sync, Async])
def way(request):
    before = set(threading.enumerate())
    yield request.param()
    assert set(threading.enumerate()) <= before, "a thread was left behind"


FAULTS = {
    "dropped": [DROP],
    "reset": [RESET],
    "truncated": [TRUNCATED],
    "503 twice": [answer(503), answer(503)],
    "429": [answer(429, Retry_After="1")],
    "in progress": [answer(409, {"code": Code.IN_PROGRESS.value}, Retry_After="1")],
    "everything": [DROP, answer(500), TRUNCATED],
}


@pytest.mark.parametrize("faults", FAULTS.values(), ids=FAULTS)
def test_httpx_retries_send_the_same_key_and_request(way, faults):
    # R217, R220, R222
    with ScriptedServer(*faults, DONE) as server:
        response = way.send(way.transport(), "POST", f"{server.url}/orders?x=1", json={"a": 1}, headers={"X-Own": "1"})
    assert (response.status_code, response.json(), response.headers["Location"]) == (201, {"id": 1}, "/orders/1")
    assert len(server.seen) == len(faults) + 1 == len(way.waits) + 1
    assert len(set(server.keys)) == 1
    assert {(seen.method, seen.target, seen.body) for seen in server.seen} == {("POST", "/orders?x=1", b'{"a":1}')}
    assert {seen.headers["x-own"] for seen in server.seen} == {"1"}
    assert response.elapsed.total_seconds() >= 0


def test_each_operation_has_its_own_key_and_others_have_none(way):
    # R217
    with ScriptedServer(DONE, DONE, answer(200), answer(503)) as server:
        for method in ("POST", "PATCH", "GET", "PUT"):
            way.send(way.transport(), method, server.url)
    assert [key is not None for key in server.keys] == [True, True, False, False]
    assert server.keys[0] != server.keys[1]


def test_the_callers_key_is_sent_as_it_is(way):
    # R226
    with ScriptedServer(answer(503), DONE) as server:
        way.send(way.transport(), "POST", server.url, headers={"Idempotency-Key": "my-own-key-of-16"})
    assert server.keys == ["my-own-key-of-16"] * 2


def test_a_body_that_changes_after_the_first_send_changes_no_retry(way):
    # R224
    body = {"amount": 1}

    class Changing(list):
        def append(self, seconds):
            body["amount"] += 1
            super().append(seconds)

    way.waits = Changing()
    with ScriptedServer(DROP, DROP, DONE) as server:
        way.send(way.transport(), "POST", server.url, json=body)
    assert body["amount"] == 3
    assert {seen.body for seen in server.seen} == {b'{"amount":1}'}


def test_a_body_that_can_be_read_only_once_is_sent_whole_each_time():
    # R224
    def parts():
        yield b'{"a":'
        yield b" 1}"

    way = Sync()
    with ScriptedServer(DROP, DONE) as server:
        way.send(way.transport(), "POST", server.url, content=parts())
    assert [seen.body for seen in server.seen] == [b'{"a": 1}'] * 2


@pytest.mark.parametrize("status", [408, 500])
def test_httpx_does_not_retry_a_replayed_error_response(way, status):
    # R227
    with ScriptedServer(answer(status, {"stored": True}, Idempotent_Replayed="true")) as server:
        response = way.send(way.transport(), "POST", server.url)
    assert (response.status_code, len(server.seen)) == (status, 1)


def test_httpx_raises_for_a_reused_key_response(way):
    # R224
    with (
        ScriptedServer(answer(422, {"code": Code.KEY_REUSED.value})) as server,
        pytest.raises(RequestKeyReusedError) as caught,
    ):
        way.send(way.transport(), "POST", server.url)
    assert len(server.seen) == 1
    assert caught.value.reply is not None
    assert caught.value.reply.status == 422


def test_httpx_repeats_an_unknown_request_with_the_same_key(way):
    with ScriptedServer(DROP, DROP, DROP, DROP, DONE) as server:
        with pytest.raises(RequestOutcomeUnknownError) as caught:
            way.send(way.transport(), "POST", server.url, json={"a": 1}, headers={"Authorization": "Bearer t"})
        response = way.ask(way.transport(), "ask_again", caught.value)
    assert response.status_code == 201
    assert isinstance(caught.value.__cause__, httpx.TransportError)
    assert len({(seen.key, seen.body, seen.headers["authorization"]) for seen in server.seen}) == 1
    assert len(server.seen) == 5


def test_unreachable_server_raises_the_httpx_connect_error(way):
    with pytest.raises(httpx.ConnectError):
        way.send(way.transport(), "POST", f"http://127.0.0.1:{free_port()}")
    assert len(way.waits) == RULES.attempts - 1


def test_a_wrong_certificate_is_not_tried_again():
    class Wrong(httpx.BaseTransport):
        def handle_request(self, request):
            raise httpx.ConnectError("certificate") from ssl.SSLCertVerificationError("self-signed")

    way = Sync()
    with pytest.raises(httpx.ConnectError):
        way.send(way.transport(Wrong()), "POST", "https://shop.example")
    assert way.waits == []


def test_httpx_reads_and_returns_compressed_responses(way):
    import gzip

    content = gzip.compress(json.dumps({"code": Code.IN_PROGRESS.value}).encode())
    head = b"HTTP/1.1 409 X\r\nContent-Encoding: gzip\r\nContent-Length: %d\r\n\r\n" % len(content)
    final = gzip.compress(b'{"id": 1}')
    done = b"HTTP/1.1 201 X\r\nContent-Encoding: gzip\r\nContent-Length: %d\r\n\r\n" % len(final)
    with ScriptedServer(head + content, done + final) as server:
        assert way.send(way.transport(), "POST", server.url).json() == {"id": 1}


def test_a_redirect_keeps_everything(way):
    with ScriptedServer(answer(307, Location="/v2"), DONE) as server:
        assert way.send(way.transport(), "POST", server.url, content=b"x").status_code == 201
    assert [(seen.method, seen.target, seen.body) for seen in server.seen] == [
        ("POST", "/", b"x"),
        ("POST", "/v2", b"x"),
    ]
    assert len(set(server.keys)) == 1


def test_accepted_work_is_polled_to_its_end(way):
    accepted = answer(202, {"code": Code.IN_PROGRESS.value}, Location="/keys/1", Retry_After="1")
    with ScriptedServer(accepted, answer(200, Retry_After="1"), answer(200, {"state": "completed"}), DONE) as server:
        assert way.send(way.transport(), "POST", server.url, json={}).status_code == 201
    assert [(seen.method, seen.target) for seen in server.seen] == [
        ("POST", "/"),
        ("GET", "/keys/1"),
        ("GET", "/keys/1"),
        ("POST", "/"),
    ]
    assert [seen.key is not None for seen in server.seen] == [True, False, False, True]


def test_profiles_place_the_key(way):
    with ScriptedServer(DONE, answer(503), DONE) as server:
        way.send(way.transport(rules=RetryRules(STRIPE, backoff=FAST)), "POST", server.url)
        way.send(way.transport(rules=RetryRules(SQUARE, backoff=FAST)), "POST", server.url, json={"amount": 1})
    assert not (server.keys[0] or '"').startswith('"')
    assert json.loads(server.seen[1].body)["amount"] == 1
    assert server.seen[1].body == server.seen[2].body
    assert "idempotency_key" in json.loads(server.seen[1].body)


# With a journal


def test_journal_returns_the_stored_response_for_a_named_operation(way, tmp_path):
    # R218 in part, R225
    journal = Journal(tmp_path / "journal.db")
    with ScriptedServer(answer(503), DONE) as server:
        way.send(
            way.transport(journal=journal), "POST", server.url, json={"a": 1}, headers={"Oncekey-Operation": "o-1"}
        )
        again = way.send(
            way.transport(journal=journal), "POST", server.url, json={"a": 1}, headers={"Oncekey-Operation": "o-1"}
        )
    assert (again.status_code, again.json(), again.headers["Location"]) == (201, {"id": 1}, "/orders/1")
    assert len(server.seen) == 2, "the second time the journal answers"
    assert "oncekey-operation" not in server.seen[0].headers
    assert journal.unfinished() == []


def test_httpx_resume_sends_open_requests_with_same_keys_and_new_headers(way, tmp_path):
    # R225
    journal = Journal(tmp_path / "journal.db")
    with ScriptedServer(DROP, DROP, DROP, DROP, answer(401), DONE, DONE) as server:
        with pytest.raises(RequestOutcomeUnknownError):
            way.send(way.transport(journal=journal), "POST", server.url, json={"a": 1})
        way.send(way.transport(journal=journal), "POST", server.url, json={"a": 2})
        assert [entry.progress for entry in journal.unfinished()] == [Progress.UNKNOWN, Progress.OPEN]
        transport = way.transport(journal=journal)
        done = way.ask(transport, "resume", lambda entry: {"Authorization": f"Bearer {entry.call.method}"})
    assert [outcome.status_code for _, outcome in done] == [201, 201]
    assert [seen.key for seen in server.seen[-2:]] == [server.keys[0], server.keys[4]]
    assert [seen.body for seen in server.seen[-2:]] == [b'{"a":1}', b'{"a":2}']
    assert {seen.headers["authorization"] for seen in server.seen[-2:]} == {"Bearer POST"}
    assert journal.unfinished() == []


def test_httpx_resume_retries_a_silent_server_after_the_timeout(way, tmp_path):
    journal = Journal(tmp_path / "journal.db")
    with ScriptedServer(answer(401), HANG, DONE) as server:
        way.send(way.transport(journal=journal), "POST", server.url)
        ((_, response),) = way.ask(way.transport(journal=journal, timeout=0.05), "resume")
    assert response.status_code == 201
    assert len(set(server.keys)) == 1


def test_httpx_resume_continues_after_a_failed_request(way, tmp_path):
    journal = Journal(tmp_path / "journal.db")
    with ScriptedServer(answer(401), answer(401), answer(422, {"code": Code.KEY_REUSED.value}), DONE) as server:
        for number in range(2):
            way.send(way.transport(journal=journal), "POST", server.url, json={"a": number})
        done = way.ask(way.transport(journal=journal), "resume")
    assert isinstance(done[0][1], RequestKeyReusedError)
    assert done[1][1].status_code == 201


def test_a_cancelled_request_stays_open_in_the_journal(tmp_path):
    journal = Journal(tmp_path / "journal.db")

    async def exercise(url, arrived):
        async with httpx.AsyncClient(transport=AsyncOncekeyTransport(journal=journal, rules=RULES)) as client:
            task = asyncio.create_task(client.post(url, json={"a": 1}))
            await asyncio.to_thread(arrived.wait, 10)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task

    with ScriptedServer(HANG) as server:
        asyncio.run(exercise(server.url, server.arrived))
    assert len(server.seen) == 1
    assert [entry.progress for entry in journal.entries()] == [Progress.OPEN]


def test_cancelling_a_retry_wait_stops_the_attempts():
    async def exercise(url):
        slept = asyncio.Event()

        async def sleep(_):
            slept.set()
            await asyncio.Event().wait()

        async with httpx.AsyncClient(transport=AsyncOncekeyTransport(sleep=sleep)) as client:
            task = asyncio.create_task(client.post(url))
            await slept.wait()
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task

    with ScriptedServer(answer(503)) as server:
        asyncio.run(exercise(server.url))
    assert len(server.seen) == 1


def test_transport_recognises_httpx2_by_the_module_of_its_classes(monkeypatch):
    """What httpx2 is to us: classes whose module has that name."""
    package = ModuleType("httpx2")
    for name in ("Request", "Response", "ByteStream", "TransportError", "DecodingError"):
        setattr(package, name, type(name, (getattr(httpx, name),), {"__module__": "httpx2"}))

    class ReadError(package.TransportError):
        pass

    class Inner:
        calls = 0

        def handle_request(self, request):
            assert type(request) is package.Request
            self.calls += 1
            if self.calls == 1:
                raise ReadError("reset")
            return package.Response(201, content=b"{}")

    monkeypatch.setitem(adapter.sys.modules, "httpx2", package)
    inner = Inner()
    response = Sync().transport(inner).handle_request(package.Request("POST", "http://shop.example/"))
    assert (type(response), response.status_code, inner.calls) == (package.Response, 201, 2)


def test_transport_without_httpx_names_the_package_to_install(monkeypatch):
    from oncekey_client import ClientConfigurationError

    monkeypatch.setattr(adapter, "find_spec", lambda _: None)
    with pytest.raises(ClientConfigurationError, match=r"oncekey\[client\]"):
        OncekeyTransport()
    with pytest.raises(ClientConfigurationError, match="resume needs a journal"):
        OncekeyTransport(SimpleNamespace()).resume()
