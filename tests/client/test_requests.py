"""The adapter for requests against a real server that answers by script."""

from __future__ import annotations

import io
import ssl
import threading

import pytest
import requests

from client.scripted import DROP, HANG, RESET, TRUNCATED, ScriptedServer, answer
from harness.ports import free_port
from oncekey.core.model import Code
from oncekey_client import Backoff, Journal, RequestKeyReusedError, RequestOutcomeUnknownError, RetryRules
from oncekey_client.exchange import Loss
from oncekey_client.journal import Progress
from oncekey_client.requests import OncekeyAdapter, _loss

RULES = RetryRules(attempts=4, backoff=Backoff(base=0.001, cap=0.002, floor=0.001, longest=2.0))
DONE = answer(201, {"id": 1}, Location="/orders/1")


@pytest.fixture
def waits():
    before = set(threading.enumerate())
    yield []
    assert set(threading.enumerate()) <= before, "a thread was left behind"


@pytest.fixture
def make(waits):
    opened = []

    def make(**options):
        session = requests.Session()
        session.trust_env = False
        adapter = OncekeyAdapter(rules=RULES, sleep=waits.append, **options)
        session.mount("http://", adapter)
        opened.append(session)
        return session, adapter

    yield make
    for session in opened:
        session.close()


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
def test_requests_retries_send_the_same_key_and_request(make, faults):
    # R217, R220, R222
    session, _ = make()
    with ScriptedServer(*faults, DONE) as server:
        response = session.post(f"{server.url}/orders", json={"a": 1}, headers={"X-Own": "1"}, timeout=10)
    assert (response.status_code, response.json(), response.headers["Location"]) == (201, {"id": 1}, "/orders/1")
    assert len(server.seen) == len(faults) + 1
    assert len(set(server.keys)) == 1
    assert {(seen.method, seen.target, seen.body) for seen in server.seen} == {("POST", "/orders", b'{"a": 1}')}


@pytest.mark.parametrize(
    "body", [b"abc", "abc", bytearray(b"abc"), io.BytesIO(b"abc"), io.StringIO("abc"), (part for part in (b"a", b"bc"))]
)
def test_every_kind_of_body_is_sent_whole_each_time(make, body):
    # R224
    session, _ = make()
    with ScriptedServer(DROP, DONE) as server:
        session.post(server.url, data=body, timeout=10)
    assert [(seen.body, seen.headers["content-length"]) for seen in server.seen] == [(b"abc", "3")] * 2
    assert "transfer-encoding" not in server.seen[0].headers


def test_requests_adapter_sends_a_get_unchanged(make, waits):
    session, _ = make()
    with ScriptedServer(answer(503)) as server:
        assert session.get(server.url, timeout=10).status_code == 503
    assert (server.keys, waits) == ([None], [])


def test_requests_adapter_accepts_a_replay_and_raises_for_a_reused_key(make):
    # R224, R227
    session, _ = make()
    stored, mismatch = answer(500, Idempotent_Replayed="true"), answer(422, {"code": Code.KEY_REUSED.value})
    with ScriptedServer(stored, mismatch) as server:
        assert session.post(server.url, timeout=10).status_code == 500
        with pytest.raises(RequestKeyReusedError):
            session.post(server.url, timeout=10)
    assert len(server.seen) == 2


def test_requests_adapter_repeats_an_unknown_request_with_the_same_key(make):
    session, adapter = make()
    with ScriptedServer(*[DROP] * 4, DONE) as server:
        with pytest.raises(RequestOutcomeUnknownError) as caught:
            session.post(server.url, json={"a": 1}, timeout=10)
        assert adapter.ask_again(caught.value, timeout=10).status_code == 201
    assert len(set(server.keys)) == 1


def test_unreachable_server_raises_the_requests_connection_error(make, waits):
    session, _ = make()
    with pytest.raises(requests.exceptions.ConnectionError):
        session.post(f"http://127.0.0.1:{free_port()}", timeout=10)
    assert len(waits) == 3


def test_a_wrong_certificate_is_not_tried_again():
    wrong = requests.exceptions.SSLError(ssl.SSLCertVerificationError("self-signed"))
    assert _loss(wrong) is Loss.HOPELESS
    assert _loss(requests.exceptions.ConnectTimeout()) is Loss.NOT_SENT
    assert _loss(requests.exceptions.ReadTimeout()) is Loss.LOST


def test_requests_adapter_returns_journal_responses_and_resumes_open_ones(make, tmp_path):
    # R218 in part, R225
    journal = Journal(tmp_path / "journal.db")
    session, adapter = make(journal=journal)
    named = {"Oncekey-Operation": "o-1"}
    with ScriptedServer(DONE, *[DROP] * 4, HANG, DONE) as server:
        session.post(server.url, json={"a": 1}, headers=named, timeout=10)
        again = session.post(server.url, json={"a": 1}, headers=named, timeout=10)
        assert (again.status_code, again.json(), again.headers["Location"]) == (201, {"id": 1}, "/orders/1")
        with pytest.raises(RequestOutcomeUnknownError):
            session.post(server.url, json={"a": 2}, timeout=10)
        assert [entry.progress for entry in journal.unfinished()] == [Progress.UNKNOWN]
        ((_, response),) = adapter.resume(lambda _: {"Authorization": "Bearer t"}, timeout=0.2)
    assert isinstance(response, requests.Response)
    assert response.status_code == 201
    assert server.seen[-1].key == server.seen[-2].key
    assert server.seen[-1].headers["authorization"] == "Bearer t"
    assert journal.unfinished() == []


def test_resume_returns_the_error_of_the_header_callback(make, tmp_path):
    journal = Journal(tmp_path / "journal.db")
    session, adapter = make(journal=journal)
    with ScriptedServer(answer(401)) as server:
        session.post(server.url, timeout=10)
        ((_, error),) = adapter.resume(lambda _: {}["missing"])
    assert isinstance(error, KeyError)
