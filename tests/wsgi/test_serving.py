"""WSGI applications over real sockets, where they differ from the skins: races, refusals, resumptions, streams."""

from __future__ import annotations

import http.client
import io
import threading
import uuid
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy.ext.asyncio import create_async_engine

from harness.patience import PATIENCE
from oncekey.core.errors import ConfigurationError
from oncekey.core.model import INLINE, LOCAL
from oncekey.engine.capture import IncompleteError
from oncekey.frameworks.blocking import current
from oncekey.once import Once
from wsgi.shop import Reply, Shop, send, served

TESTS = Path(__file__).parents[1]


def new_key() -> str:
    return uuid.uuid4().hex


def test_twelve_wsgi_threads_with_one_key_run_once(shop: Shop, kind: str) -> None:
    # P1: one runs, and all others are told at once
    replies: list[Reply] = []
    key = new_key()

    def ask(port: int) -> None:
        replies.append(send(port, "/local", {"item": "tea", "does": "wait"}, key=key))

    with served(shop.application(kind)) as port:
        threads = [threading.Thread(target=ask, args=(port,)) for _ in range(12)]
        threads[0].start()
        assert shop.entered.acquire(timeout=PATIENCE)
        for thread in threads[1:]:
            thread.start()
        for thread in threads[1:]:
            thread.join()
        shop.go_on.set()
        threads[0].join()
        after = send(port, "/local", {"item": "tea", "does": "wait"}, key=key)
    assert sorted(reply.status for reply in replies) == [201, *[409] * 11]
    assert (after.status, after.replayed) == (201, True)
    assert (shop.sold, shop.runs) == (["tea"], ["local"])


def test_a_failed_wsgi_request_rolls_back_and_can_be_retried(shop: Shop, kind: str) -> None:
    # L6
    with served(shop.application(kind)) as port:
        key, order = new_key(), {"item": "tea", "does": "stumble"}
        assert send(port, "/local", order, key=key).status == 500
        assert shop.sold == []
        again = send(port, "/local", order, key=key)
        assert (again.status, again.replayed) == (201, False)
        assert send(port, "/local", order, key=key).replayed
    assert shop.sold == ["tea"]


def test_a_409_under_wsgi_is_stored_with_its_rows(shop: Shop, kind: str) -> None:
    with served(shop.application(kind)) as port:
        key, order = new_key(), {"item": "tea", "status": 409}
        assert send(port, "/local", order, key=key).status == 409
        again = send(port, "/local", order, key=key)
    assert (again.status, again.replayed, shop.sold) == (409, True, ["tea"])


def test_an_inline_wsgi_handler_runs_once(shop: Shop, kind: str) -> None:
    # F5: what may have been sent is not sent again
    with served(shop.application(kind)) as port:
        key = new_key()
        first = send(port, "/inline", {"item": "a"}, key=key)
        assert (first.status, send(port, "/inline", {"item": "a"}, key=key).body) == (201, first.body)
        key, order = new_key(), {"item": "b", "does": "stumble"}
        assert send(port, "/inline", order, key=key).status == 500
        unknown = send(port, "/inline", order, key=key)
    assert (unknown.status, unknown.json()["code"]) == (409, "idempotency_outcome_unknown")
    assert len(shop.charges) == 2


def test_a_retry_resumes_a_phased_wsgi_handler(shop: Shop, kind: str) -> None:
    # H1, R116
    with served(shop.application(kind)) as port:
        key, order = new_key(), {"item": "tea", "does": "stumble"}
        assert send(port, "/phased", order, key=key).status == 500
        assert (shop.sold, len(shop.charges)) == (["tea"], 1)
        again = send(port, "/phased", order, key=key)
        replayed = send(port, "/phased", order, key=key)
    assert (again.status, again.json()["attempt"], again.json()["charge"]) == (201, 2, shop.charges[0])
    assert (replayed.body, replayed.replayed) == (again.body, True)
    assert (shop.sold, len(shop.charges), len(shop.runs)) == (["tea", "tea paid"], 1, 2)


def test_optional_key_wsgi_routes_accept_keyless_requests(shop: Shop, kind: str) -> None:
    with served(shop.application(kind)) as port:
        order = {"item": "tea"}
        assert [send(port, "/optional", order, key=None).status for _ in range(2)] == [201, 201]
        assert send(port, "/optional", {"item": "undone", "does": "stumble"}, key=None).status == 500
    assert shop.sold == ["tea", "tea"]


def test_unprotected_wsgi_routes_pass_through(small_shop: Shop, kind: str) -> None:
    limit = small_shop.once.policy.max_request_bytes
    with served(small_shop.application(kind)) as port:
        for key in (None, new_key()):
            reply = send(port, "/stream", "x" * (limit + 10), key=key)
            assert (reply.status, reply.body) == (200, f"read {limit + 12}".encode())
            assert "idempotency-key" not in reply.headers


def test_the_link_of_a_wsgi_refusal_points_to_the_page(small_shop: Shop, kind: str) -> None:
    # R11, R230
    with served(small_shop.application(kind)) as port:
        refused = send(port, "/local", {"item": "tea"}, key=None)
        path, _, slug = refused.headers["link"].partition(">")[0].lstrip("<").partition("#")
        with closing(http.client.HTTPConnection("127.0.0.1", port, timeout=PATIENCE)) as connection:
            connection.request("GET", path)
            page = connection.getresponse()
            assert (page.status, page.getheader("Content-Type")) == (200, "text/html; charset=utf-8")
            assert f'<h3 id="{slug}">' in page.read().decode()


def test_oversized_and_chunked_wsgi_bodies_are_rejected(small_shop: Shop) -> None:
    limit = small_shop.once.policy.max_request_bytes
    with served(small_shop.application("plain")) as port:
        with closing(http.client.HTTPConnection("127.0.0.1", port, timeout=PATIENCE)) as connection:
            connection.putrequest("POST", "/local")
            connection.putheader("Idempotency-Key", new_key())
            connection.putheader("Content-Length", str(limit + 1))
            connection.endheaders()  # refused for what it says, before it is sent
            large = connection.getresponse()
            assert (large.status, b"idempotency_body_too_large" in large.read()) == (413, True)
        with closing(http.client.HTTPConnection("127.0.0.1", port, timeout=PATIENCE)) as connection:
            connection.putrequest("POST", "/local")
            connection.putheader("Idempotency-Key", new_key())
            connection.putheader("Transfer-Encoding", "chunked")
            connection.endheaders()  # the server answers and closes: a chunk sent now may be met by a reset
            chunked = connection.getresponse()
            assert (chunked.status, b"idempotency_body_length_missing" in chunked.read()) == (411, True)
    assert small_shop.runs == []


def test_a_wsgi_store_outage_returns_503(kind: str) -> None:
    # R110: 503 also for the first request of a process, and nothing is executed
    shop = Shop("postgresql+psycopg://nobody@127.0.0.1:1/none")
    with served(shop.application(kind)) as port:
        for path in ("/local", "/optional"):
            reply = send(port, path, {"item": "tea"}, key=None if path == "/optional" else new_key())
            assert (reply.status, reply.json()["code"]) == (503, "idempotency_store_unavailable")
    assert shop.runs == []


def test_system_exit_in_a_wsgi_handler_rolls_back(small_shop: Shop) -> None:
    # gunicorn raises SystemExit in a handler that takes too long: it is settled, and the server hears of it
    app = small_shop.application("plain")
    environ = {
        "REQUEST_METHOD": "POST",
        "PATH_INFO": "/local",
        "CONTENT_TYPE": "application/json",
        "HTTP_IDEMPOTENCY_KEY": new_key(),
    }

    def ask(body: bytes) -> tuple[list[str], bytes]:
        said: list[str] = []
        full = {**environ, "wsgi.input": io.BytesIO(body), "CONTENT_LENGTH": str(len(body))}
        return said, b"".join(app(full, lambda status, headers: said.append(status)))

    for _ in range(2):  # the key is free again at once
        with pytest.raises(SystemExit, match="too long"):
            ask(b'{"item": "tea", "does": "exit"}')
        assert current.get() is None
        assert small_shop.sold == []
    environ["HTTP_IDEMPOTENCY_KEY"] = new_key()
    assert ask(b'{"item": "tea"}')[0] == ["201 Created"]
    assert small_shop.sold == ["tea"]


def test_an_internal_error_leaves_no_running_work(small_shop: Shop, monkeypatch: pytest.MonkeyPatch) -> None:
    def breaks(*_: object) -> Any:
        raise ArithmeticError("a fault of ours")

    app = small_shop.application("flask")
    client = app.test_client()
    monkeypatch.setattr("oncekey.frameworks.blocking.decided", breaks)
    with pytest.raises(ArithmeticError):
        client.post("/local", json={"item": "tea"}, headers={"Idempotency-Key": new_key()})
    monkeypatch.undo()
    (installation,) = small_shop.once._threaded.values()
    assert installation.runtime.shut_down(0.0)
    assert client.post("/local", json={"item": "milk"}, headers={"Idempotency-Key": new_key()}).status_code == 201
    assert small_shop.sold == ["milk"]


def test_a_wsgi_application_can_be_enrolled_by_path(small_shop: Shop) -> None:
    calls: list[bytes] = []

    def legacy(environ: Any, start_response: Any) -> Iterator[bytes]:
        calls.append(environ["wsgi.input"].read())
        start_response("201 Created", [("Content-Type", "text/plain"), ("Set-Cookie", "a=b")])
        yield b"one "
        yield b"two"

    once = small_shop.once
    enrol = {"POST /legacy": once.by_path(effects=INLINE, operation="legacy")}
    with served(once.wsgi(legacy, tenant=lambda _: "acme", enrol=enrol)) as port:
        key = new_key()
        first = send(port, "/legacy", {}, key=key)
        again = send(port, "/legacy", {}, key=key)
        assert send(port, "/legacy", {}, key=None).status == 400
    assert (first.body, again.body, again.replayed, calls) == (b"one two", b"one two", True, [b"{}"])
    assert ("set-cookie" in first.headers, "set-cookie" in again.headers) == (True, False)


def test_an_unstorable_wsgi_stream_is_not_read_further(small_shop: Shop) -> None:
    def events(environ: Any, start_response: Any) -> Iterator[bytes]:
        start_response("200 OK", [("Content-Type", "text/event-stream")])
        yield b"data: 1"
        raise AssertionError("the next event may never come")

    once = small_shop.once
    enrol = {"POST /events": once.by_path(effects=INLINE, operation="events")}
    with served(once.wsgi(events, tenant=lambda _: "acme", enrol=enrol)) as port:
        reply = send(port, "/events", {}, key=new_key())
    assert (reply.status, reply.json()["code"]) == (500, "idempotency_execution_failed")


def test_a_wsgi_application_without_a_response_is_unknown(small_shop: Shop) -> None:
    once, environ = small_shop.once, {"REQUEST_METHOD": "POST", "PATH_INFO": "/legacy", "wsgi.input": io.BytesIO()}
    enrol = {"POST /legacy": once.by_path(effects=INLINE, operation="silent")}
    app = once.wsgi(lambda environ, start_response: [], tenant=lambda _: "acme", enrol=enrol)
    key = {"HTTP_IDEMPOTENCY_KEY": new_key()}
    with pytest.raises(IncompleteError):
        app({**environ, **key}, lambda *_: None)  # type: ignore[arg-type,return-value]
    said: list[str] = []
    app({**environ, **key}, lambda status, _: said.append(status))  # type: ignore[arg-type,return-value,misc]
    assert said == ["409 Conflict"]  # it was called, and nobody knows what it did


def test_wsgi_rejects_an_async_engine() -> None:
    with pytest.raises(ConfigurationError, match="blocking connections"):
        Once(create_async_engine("sqlite+aiosqlite://")).wsgi(lambda environ, start: [], tenant=lambda _: "acme")


def test_a_handler_of_another_once_is_not_run(tmp_path: Path) -> None:
    def handler() -> None:
        raise AssertionError("nobody protects it here")

    elsewhere = Once(f"sqlite:///{tmp_path}/shop.db").protect(effects=LOCAL, operation="elsewhere")(handler)
    refused: list[str] = []

    def app(environ: Any, start_response: Any) -> list[bytes]:
        try:
            elsewhere()
        except RuntimeError as error:
            refused.append(str(error))
        start_response("500 As it should be", [])
        return []

    with served(Once(f"sqlite:///{tmp_path}/other.db").wsgi(app, tenant=lambda _: "acme")) as port:
        assert send(port, "/", {}, key=new_key()).status == 500
    assert "does not serve this request" in refused[0]
