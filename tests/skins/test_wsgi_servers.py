"""What servers of WSGI do to a handler: they end it by an exception, ask it to stop, and lose its client."""

from __future__ import annotations

import http.client
import os
import signal
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path

import pytest

from harness.patience import PATIENCE
from harness.provider import Provider
from skins.rows import SKINS
from skins.service import WRITER
from skins.stage import Stage, new_key

ONE = ("--workers", "1", "--graceful-timeout", "90")
IMPATIENT = ("--preload", "--workers", "1", "--timeout", "3")


@contextmanager
def staged(name: str, folder: Path, provider: Provider, *options: str) -> Iterator[Stage]:
    with Stage(SKINS[name], f"sqlite:///{folder}/shop.db", folder, provider, options=options) as stage:
        yield stage


def lost(stage: Stage, path: str) -> tuple[dict[str, str], str]:
    """A request whose handler is ended by its server; nobody lets it go on."""
    gate, key = stage.folder / new_key(), new_key()
    order = {"item": gate.name, "hold": str(gate)}
    with suppress(http.client.HTTPException, OSError):  # gunicorn sends a page of its own, or nothing
        assert stage.send(path, order, key=key).status == 500
    gate.touch()
    return order, key


def test_a_gunicorn_worker_timeout_settles_its_request(tmp_path: Path, provider: Provider) -> None:
    # Over --timeout a sync worker raises SystemExit in the handler: it is settled by its effects, and goes on
    with staged("flask-sync", tmp_path, provider, *IMPATIENT) as stage:
        before = stage.charges
        order, key = lost(stage, "/orders")
        again = stage.settled("/orders", order, key)
        assert (again.status, again.replayed) == (201, False)  # its rows were rolled back, and the key was free
        assert stage.rows(f"SELECT count(*) FROM orders WHERE item = '{order['item']}'") == [(1,)]
        order, key = lost(stage, "/charges")
        unknown = stage.send("/charges", order, key=key)
        assert (unknown.status, unknown.json()["code"]) == (409, "idempotency_outcome_unknown")  # it may have charged
        order, key = lost(stage, "/payments")
        paid = stage.settled("/payments", order, key)
        assert (paid.status, stage.charges - before) == (201, 1)


@pytest.mark.parametrize("name", ["flask-sync", "flask-gthread"])
def test_gunicorn_waits_for_a_handler_when_it_is_stopped(name: str, tmp_path: Path, provider: Provider) -> None:
    with staged(name, tmp_path, provider, *ONE) as stage:
        with stage.held("/orders") as held:
            os.kill(stage.pid, signal.SIGTERM)
            reply = held.release()
        assert (reply.status, stage.ended()) == (201, 0)
        stage.start()
        again = stage.send("/orders", held.order, key=held.key)
    assert (again.body, again.replayed) == (reply.body, True)


def test_stopping_waitress_leaves_a_record_that_can_be_retried(tmp_path: Path, provider: Provider) -> None:
    with staged("wsgi", tmp_path, provider) as stage:
        with stage.held("/orders") as held:
            os.kill(stage.pid, signal.SIGTERM)
            with pytest.raises((http.client.HTTPException, OSError)):
                held.reply.result()
            stage.ended()
        assert stage.rows("SELECT count(*) FROM orders") == [(0,)]
        stage.start()
        again = stage.settled("/orders", held.order, held.key)
        assert (again.status, again.replayed) == (201, False)
        assert stage.rows("SELECT count(*) FROM orders") == [(1,)]


@pytest.mark.parametrize("name", ["flask-sync", "flask-gthread", "wsgi"])
def test_a_wsgi_stream_is_stored_if_the_client_disconnects(name: str, tmp_path: Path, provider: Provider) -> None:
    # The stream was drawn and settled before its first byte was sent: who hangs up then cuts off nothing
    with staged(name, tmp_path, provider) as stage:
        key = new_key()
        lines = {"Authorization": f"Bearer {WRITER}", "Idempotency-Key": key, "Content-Type": "application/json"}
        with closing(http.client.HTTPConnection("127.0.0.1", stage.port, timeout=PATIENCE)) as connection:
            connection.request("POST", "/exports", '{"pieces": 20000}', lines)
            response = connection.getresponse()
            beginning = response.read(10)
        again = stage.send("/exports", {"pieces": 20000}, key=key)
    assert (response.status, again.status, again.replayed, again.body[:10]) == (201, 201, True, beginning)
    assert again.body.count(b" ") == 20002


def test_a_server_thread_keeps_no_state_between_requests(tmp_path: Path, provider: Provider) -> None:
    # One thread serves everybody: after a refusal, an error and an answer it is as it was
    with staged("flask-gthread", tmp_path, provider, "--workers", "1", "--threads", "1") as stage:
        key = new_key()
        assert stage.send("/charges", {}, key="short").status == 400
        assert stage.send("/events", {}).status == 500
        assert stage.send("/orders", {"item": "tea"}, key=key).status == 201
        assert stage.send("/charges", {}, key="").json()["code"] == "idempotency_key_missing"
        assert stage.get("/orders").status == 200
        assert stage.send("/orders", {"item": "tea"}, key=key).replayed
