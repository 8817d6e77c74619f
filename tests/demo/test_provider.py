"""The simulated provider: what is charged is in its ledger, and every fault does what its name says."""

from __future__ import annotations

import hashlib
import hmac
import json
import queue
import sqlite3
import subprocess
import threading
import time
import uuid
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Self

import httpx
import pytest

from harness.provider import COMMAND, Provider
from oncekey.core.errors import ConfigurationError
from oncekey_demo.charging import AnswerLostError, NothingSentError, ask, http_url
from oncekey_demo.provider_ledger import NAMES, Fault, FaultKind, StandingFault, UnknownFaultError

ORDER: dict[str, object] = {"amount_cents": 1999, "currency": "EUR", "customer_id": "cus_1"}
IMPATIENT = 0.3


@pytest.fixture(scope="module")
def provider(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Provider]:
    with Provider(tmp_path_factory.mktemp("provider")) as running:
        yield running


def _key() -> str:
    return str(uuid.uuid4())


def test_a_charge_is_in_the_ledger_once(provider: Provider) -> None:
    key = _key()
    first, second = provider.charge(key, ORDER), provider.charge(key, ORDER)
    assert (first.status_code, second.status_code) == (201, 200)
    assert first.content == second.content
    (charge,) = provider.charges(key)
    assert charge == first.json()
    assert set(charge) == {"id", "downstream_key", "amount_cents", "currency", "customer_id", "at"}
    assert charge["id"].startswith("ch_")
    assert charge["downstream_key"] == key
    assert charge in provider.charges()


def test_concurrent_charges_with_one_key_create_one_charge(provider: Provider) -> None:
    key = _key()
    with ThreadPoolExecutor(8) as threads:
        answers = list(threads.map(lambda _: provider.charge(key, ORDER), range(16)))
    assert len({answer.json()["id"] for answer in answers}) == 1
    assert sorted(answer.status_code for answer in answers) == [200] * 15 + [201]


def test_a_key_with_other_parameters_is_refused(provider: Provider) -> None:
    key = _key()
    provider.charge(key, ORDER)
    refused = provider.charge(key, {**ORDER, "amount_cents": 1})
    assert (refused.status_code, refused.json()["code"]) == (409, "idempotency_key_reused")
    assert len(provider.charges(key)) == 1


def test_without_deduplication_each_request_is_a_charge(provider: Provider) -> None:
    key = _key()
    ids = {provider.charge(key, ORDER, x_demo_dedup="off").json()["id"] for _ in range(3)}
    assert {charge["id"] for charge in provider.charges(key)} == ids
    assert len(ids) == 3
    assert provider.charge(None, ORDER).json()["id"] != provider.charge(None, ORDER).json()["id"]


@pytest.mark.parametrize(
    ("fault", "answer", "charged"),
    [
        ("delay:0.05", 201, 1),
        ("hang-after", httpx.ReadTimeout, 1),
        ("error-before", 500, 0),
        ("error-after", 500, 1),
        ("drop-before", httpx.RemoteProtocolError, 0),
        ("drop-after", httpx.RemoteProtocolError, 1),
        ("decline", 402, 0),
    ],
)
@pytest.mark.parametrize("standing", [False, True], ids=["header", "standing"])
def test_a_fault_does_what_its_name_says(
    provider: Provider, fault: str, answer: int | type[Exception], charged: int, standing: bool
) -> None:
    key = _key()
    headers = {} if standing else {"x_demo_fault": fault}
    if standing:
        provider.fault(fault, times=1)
    patience = IMPATIENT if fault == "hang-after" else 30
    if isinstance(answer, int):
        assert provider.charge(key, ORDER, timeout=patience, **headers).status_code == answer
    else:
        with pytest.raises(answer):
            provider.charge(key, ORDER, timeout=patience, **headers)
    assert len(provider.charges(key)) == charged
    # The next request meets no fault, and a key that counted still does.
    assert provider.charge(key, ORDER).status_code == (200 if charged else 201)
    assert len(provider.charges(key)) == 1


def test_a_fault_stands_until_it_is_taken_away(provider: Provider) -> None:
    provider.fault("error-before")
    assert [provider.charge(_key(), ORDER).status_code for _ in range(3)] == [500] * 3
    assert provider.client.get(f"{provider.url}/faults").json() == {
        "fault": "error-before",
        "times": None,
        "faults": list(NAMES),
    }
    assert provider.charge(_key(), ORDER, x_demo_fault="decline").status_code == 402
    provider.fault(None)
    assert provider.charge(_key(), ORDER).status_code == 201


@pytest.mark.parametrize("fault", ["", "nonsense", "delay", "delay:soon", "delay:-1", "delay:1e9", "decline:1"])
def test_provider_rejects_an_unknown_fault_and_lists_valid_ones(provider: Provider, fault: str) -> None:
    refused = provider.client.post(f"{provider.url}/faults", json={"fault": fault})
    assert (refused.status_code, refused.json()["code"]) == (400, "unknown_fault")
    assert all(name in refused.json()["detail"] for name in NAMES)
    assert provider.client.get(f"{provider.url}/faults").json()["fault"] is None


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"[]",
        b"\xff",
        json.dumps({**ORDER, "amount_cents": 0}).encode(),
        json.dumps({**ORDER, "amount_cents": True}).encode(),
        json.dumps({**ORDER, "amount_cents": 10**13}).encode(),
        json.dumps({**ORDER, "currency": "euro"}).encode(),
        json.dumps({**ORDER, "customer_id": ""}).encode(),
    ],
)
def test_a_bad_charge_is_refused(provider: Provider, body: bytes) -> None:
    before = provider.charges()
    refused = provider.client.post(f"{provider.url}/charges", content=body)
    assert (refused.status_code, refused.json()["code"]) == (400, "invalid_request")
    assert provider.charges() == before


@pytest.mark.parametrize("times", [0, -1, "1", 1.5, True])
def test_a_fault_strikes_a_whole_number_of_times(provider: Provider, times: object) -> None:
    refused = provider.client.post(f"{provider.url}/faults", json={"fault": "decline", "times": times})
    assert refused.status_code == 400


def test_fault_names_round_trip_and_counts_run_out() -> None:
    for name in ("delay:2.5", *NAMES[1:]):
        assert str(Fault.parse(name)) == name
    with pytest.raises(UnknownFaultError):
        Fault.parse("delay:nan")
    standing = StandingFault()
    standing.set(Fault(FaultKind.DECLINE), 2)
    assert [standing.take() for _ in range(3)] == [Fault(FaultKind.DECLINE), Fault(FaultKind.DECLINE), None]


def test_the_ledger_outlives_kill_9_and_keeps_its_keys(tmp_path: Path) -> None:
    key = _key()
    with Provider(tmp_path) as provider:
        first = provider.charge(key, ORDER)
        provider.kill()
        provider.start()
        assert provider.charge(key, ORDER).content == first.content
        # Others may read the file while it is served.
        with closing(sqlite3.connect(provider.ledger)) as reader:
            assert reader.execute("SELECT id FROM charge").fetchall() == [(first.json()["id"],)]
        assert provider.stop() in {0, -15}


def test_a_provider_ends_with_the_one_who_started_it(tmp_path: Path) -> None:
    command = [*COMMAND, "--port", "0", "--until-eof"]
    with subprocess.Popen(command, cwd=tmp_path, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdin is not None
        assert b"http://127.0.0.1:" in process.stdout.readline()
        process.stdin.close()
        assert process.wait(30) == 0


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (["--ledger", "no/such/folder/x.db"], "cannot be used"),
        (["--ledger", "list.txt"], "cannot be used"),
        (["--host", "no such host"], "is not an address to listen on"),
        (["--webhooks", "https://somewhere"], "is not a URL like http"),
    ],
)
def test_provider_start_error_is_one_line(tmp_path: Path, options: list[str], sentence: str) -> None:
    (tmp_path / "list.txt").write_text("a shopping list, and no database at all " * 100)
    done = subprocess.run(
        [*COMMAND, "--port", "0", *options], cwd=tmp_path, capture_output=True, text=True, check=False, timeout=60
    )
    (line,) = done.stderr.splitlines()
    assert (done.returncode, done.stdout) == (1, "")
    assert line.startswith("oncekey provider: ")
    assert sentence in line


class Inbox:
    """Takes webhooks; the first `refusals` of them are answered 503."""

    def __init__(self, refusals: int) -> None:
        self.received: queue.Queue[tuple[dict[str, str], bytes]] = queue.Queue()
        received, left = self.received, iter([503] * refusals)

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["content-length"]))
                received.put((dict(self.headers), body))
                self.send_response(next(left, 204))
                self.end_headers()

            def log_message(self, *_: object) -> None:
                pass

        self._server = HTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}/webhooks"

    def __enter__(self) -> Self:
        threading.Thread(target=self._server.serve_forever, args=(0.01,)).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()


def test_provider_sends_a_signed_webhook_for_each_charge(tmp_path: Path) -> None:
    with Inbox(refusals=2) as inbox, Provider(tmp_path, "--webhooks", inbox.url, "--secret", "s3cret") as provider:
        with pytest.raises(httpx.RemoteProtocolError):
            provider.charge(_key(), ORDER, x_demo_fault="drop-after")
        told = [inbox.received.get(timeout=30) for _ in range(3)]
        assert len({body for _, body in told}) == 1
        headers, body = told[-1]
        event = json.loads(body)
        assert event["type"] == "charge.succeeded"
        assert event["id"].startswith("evt_")
        assert [event["charge"]] == provider.charges()
        fields = dict(part.split("=") for part in headers["Oncekey-Signature"].split(","))
        assert abs(int(fields["t"]) - time.time()) < 60
        expected = hmac.new(b"s3cret", f"{fields['t']}.".encode() + body, hashlib.sha256).hexdigest()
        assert fields["v1"] == expected
        # A repeated key is no new charge, and nothing is told of it; the next word is of the next charge.
        key = str(provider.charges()[0]["downstream_key"])
        provider.charge(key, ORDER)
        provider.client.post(f"{provider.url}/webhooks", json={"url": None}).raise_for_status()
        provider.charge(_key(), ORDER)
        provider.client.post(f"{provider.url}/webhooks", json={"url": inbox.url}).raise_for_status()
        last = provider.charge(_key(), ORDER).json()
        assert json.loads(inbox.received.get(timeout=30)[1])["charge"] == last
        assert provider.client.get(f"{provider.url}/webhooks").json() == {"url": inbox.url}
        assert provider.client.post(f"{provider.url}/webhooks", json={"url": "nowhere"}).status_code == 400


async def test_provider_client_distinguishes_unsent_from_lost_requests(provider: Provider, tmp_path: Path) -> None:
    # R102: only a connection that was never made is proof.
    content = json.dumps(ORDER).encode()
    with pytest.raises(AnswerLostError):
        await ask("POST", f"{provider.url}/charges", content=content, headers={"X-Demo-Fault": "drop-before"})
    hung = {"X-Demo-Fault": "hang-after"}
    with pytest.raises(AnswerLostError):
        await ask("POST", f"{provider.url}/charges", content=content, headers=hung, patience=IMPATIENT)
    reply = await ask("POST", f"{provider.url}/charges", content=content)
    assert (reply.status, reply.ok) == (201, True)
    assert reply.json() in provider.charges()
    with Provider(tmp_path) as gone:
        pass
    with pytest.raises(NothingSentError):
        await ask("GET", f"{gone.url}/charges")


@pytest.mark.parametrize("url", ["https://x", "nonsense", "http://", "http://x:port", "http://x:70000"])
def test_provider_client_rejects_an_invalid_url(url: str) -> None:
    with pytest.raises(ConfigurationError, match="is not a URL"):
        http_url(url)
